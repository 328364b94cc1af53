"""AsymKV: KVSlimmer's schedule and values, keys weighted elementwise by the squared gradient of the loss.

    k* = (g1² k1 + g2² k2) / (g1² + g2²),    g* = g1 + g2,    v* mean by l,    bias log l

g is the gradient of the chunk's next-token loss by a key before RoPE, a running mean over the chunks that have seen the
slot; a merged slot has been seen as often as its elder member.  It takes a backward pass a chunk, so the method is driven.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from .base import register, setting
from .pairs import PRINTED, RELEASED, ChunkMerger, Deviations, Pairs, carried, running_mean


@register
@dataclass(frozen=True)
class AsymKV(ChunkMerger):
    """Merge the adjacent pairs that draw the least attention, keys by the loss's squared gradient (AsymKV, NeurIPS 2025)."""

    name = "asymkv"
    schedule = "driven"
    formula = (
        "k* = (g1² k1 + g2² k2) / (g1² + g2²) elementwise, keys before RoPE, g = ∂loss/∂k (0/0 gives ½); g* = g1 + g2; "
        "v* = (l1 v1 + l2 v2) / (l1 + l2); l* = l1 + l2; bias = log l"
    )
    paper = "AsymKV (NeurIPS 2025)"
    arms = {"symmetric": {"values": "as-key"}, "released": {"released": True}}

    values: str = setting(
        "mean", "merged value: mean by l (= sum with cardinality), or as the key", "paper (mean)", ("mean", "as-key")
    )  # fmt: skip
    released: bool = setting(
        False, "the released code's schedule: two passes, overlapping pairs, l at most 5, recency, contracted positions, g "
        "smoothed by the chunk's index", "released code",
    )  # fmt: skip

    @property
    def gradient(self) -> bool:
        return True

    @property
    def deviations(self) -> Deviations:
        return RELEASED if self.released else PRINTED

    def follow(self, entries: Entries, observed: Observed, older: range) -> dict[str, Tensor]:
        age = carried(entries, "age", 0.0)  # chunks that have seen the entry
        mean = carried(entries, "gradient", 0.0, entries.keys.shape[-1])
        if observed.gradient is not None:
            past = observed.gradient.shape[1]
            positions = entries.positions.expand(entries.kv_heads, -1)[:, :past]
            # R⁻¹ and not Rᵀ: they differ by a factor that all channels share (yarn), so the weights do not see it.
            new = observed.rope.unrotate(at_least_float32(observed.gradient), positions)
            age[:, :past] += 1
            seen = age[:, :past, None]
            count = seen[:, :1] if self.deviations.smoothing else seen  # the first slot has seen every chunk
            mean[:, :past] = running_mean(mean[:, :past], new, seen, count)
        return super().follow(entries, observed, older) | {"age": age, "gradient": mean}

    def pair_weights(self, pairs: Pairs) -> Tensor:
        g1, g2 = _members(pairs)
        largest = torch.maximum(g1.abs(), g2.abs())  # squares of the numbers themselves would underflow
        halves = largest == 0
        pairs.counts["halves"] += int(halves.sum())
        largest = torch.where(halves, 1.0, largest)
        g1, g2 = (g1 / largest).square(), (g2 / largest).square()
        return torch.where(halves, 0.5, g1 / torch.where(halves, 1.0, g1 + g2))

    def merge_state(self, pairs: Pairs, weight: Tensor) -> dict[str, Tensor]:
        g1, g2 = _members(pairs)
        return super().merge_state(pairs, weight) | {"gradient": g1 + g2}


def _members(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """g of the two members, [K, D] each."""
    gradient = pairs.slots.state["gradient"]
    return gradient[pairs.first], gradient[pairs.first + 1]
