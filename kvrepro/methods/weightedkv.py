"""WeightedKV: dropped values live on in the next kept slot, dropped keys do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..attention import Observed, at_least_float32
from ..entries import Entries, gather
from .base import Diagnostics, Method, register, setting
from .h2o import GROUP, heavy_and_recent, prompt_mass


@register
@dataclass(frozen=True)
class WeightedKV(Method):
    """Runs of dropped tokens merge into the next kept slot's value, by mean attention (arXiv 2503.01330)."""

    name = "weightedkv"
    formula = "w_i = Σ_q A[q, i] / (queries that see i); kept = top of w ∪ recent half; v'_c = Σ w v / Σ w over run and slot"
    paper = "arXiv 2503.01330; the streaming rule applied once"

    group: str = setting("sum", "how a group's query heads are reduced", "our choice", GROUP)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        n = len(entries)
        mass = prompt_mass(entries, observed, self.group)
        weight = mass / torch.arange(n, 0, -1, device=mass.device)  # mean attention [Hkv, n]
        index = heavy_and_recent(weight, m)
        values = at_least_float32(entries.values)
        # The slot that a token falls into is the first kept one at or after it.
        slot = torch.searchsorted(
            index.contiguous(), torch.arange(n, device=mass.device).expand(len(index), n).contiguous()
        )
        total = torch.zeros_like(weight[:, :m]).scatter_add(1, slot, weight)
        count = torch.zeros_like(weight[:, :m]).scatter_add(1, slot, torch.ones_like(weight))
        spread = slot[..., None].expand_as(values)
        moved = torch.zeros_like(values[:, :m]).scatter_add(1, spread, weight[..., None] * values)
        merged = entries.take(index)
        changed = ((count > 1) & (total > 0))[..., None]
        new = torch.where(changed, moved / total[..., None], gather(values, index))
        return replace(merged, values=new.to(merged.values.dtype)), {"longest_run": float(count.max() - 1)}
