"""LOOK-M, text-only: every evicted token joins its most similar kept key."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries, gather
from .base import Diagnostics, Method, register, setting
from .h2o import GROUP, heavy_and_recent, prompt_mass

SPACE = ("pre", "post")
BLOCK = 512  # evicted keys compared at a time


@register
@dataclass(frozen=True)
class LookM(Method):
    """Pivot merge (arXiv 2406.18139): a kept entry becomes the mean of itself and of (evicted + kept) / 2."""

    name = "look-m"
    formula = "π(e) = argmax_c cos(k_e, k_c); k'_c = mean({k_c} ∪ {(k_e + k_c) / 2 : π(e) = c}), the same for values"
    paper = "arXiv 2406.18139"
    arms = {"post": {"space": "post"}}

    sinks: int = setting(4, "first tokens always kept, within the heavy half", "our choice", least=0)
    space: str = setting("pre", "keys compared and merged before RoPE, or after", "paper (post)", SPACE)
    group: str = setting("sum", "how a group's query heads are reduced", "our choice", GROUP)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        index = heavy_and_recent(prompt_mass(entries, observed, self.group), m, self.sinks)  # [Hkv, m]
        heads, n = entries.kv_heads, len(entries)
        keys, values = at_least_float32(entries.keys), at_least_float32(entries.values)
        if self.space == "pre":
            keys = observed.rope.unrotate(keys, entries.positions)
        kept = torch.zeros(heads, n, dtype=torch.bool, device=keys.device).scatter(1, index, True)
        gone = (~kept).nonzero()[:, 1].view(heads, n - m)  # [Hkv, e]
        slot = nearest(gather(keys, gone), gather(keys, index))  # [Hkv, e]

        ones = torch.zeros(heads, m, dtype=keys.dtype, device=keys.device)
        count = ones.scatter_add(1, slot, torch.ones_like(slot, dtype=keys.dtype))[..., None]

        def pivoted(x: Tensor) -> Tensor:
            own, others = gather(x, index), gather(x, gone)
            landed = torch.zeros_like(own).scatter_add(1, slot[..., None].expand_as(others), others)
            return (own + (landed + count * own) / 2) / (1 + count)

        merged = entries.take(index)
        new_keys = pivoted(keys)
        if self.space == "pre":
            new_keys = observed.rope.rotate(new_keys, merged.positions)
        joined = count > 0  # an entry that nothing joined stays bit for bit
        return (
            replace(
                merged,
                keys=torch.where(joined, new_keys.to(merged.keys.dtype), merged.keys),
                values=torch.where(joined, pivoted(values).to(merged.values.dtype), merged.values),
            ),
            {"share_joined": float(joined.float().mean())},
        )


def nearest(evicted: Tensor, kept: Tensor) -> Tensor:
    """For each of ``evicted`` [Hkv, e, D] the most similar of ``kept`` [Hkv, m, D] by cosine, the first of equals."""
    evicted, kept = _unit(evicted), _unit(kept)
    return torch.cat([(block @ kept.transpose(1, 2)).argmax(-1) for block in evicted.split(BLOCK, 1)], 1)


def _unit(x: Tensor) -> Tensor:
    norm = x.norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, x / norm, 0)
