"""KVMerger: runs of alike neighbouring keys become one entry, with Gaussian weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from .base import Diagnostics, Method, register, setting
from .h2o import GROUP, prompt_mass
from .look_m import SPACE
from .select import top


@register
@dataclass(frozen=True)
class KVMerger(Method):
    """Merge sets of consecutive tokens whose keys are alike (arXiv 2407.08454); may end below the budget.

    Heads that merge more than others hold fewer entries: the missing ones have bias -inf.
    """

    name = "kvmerger"
    formula = "runs with cos(k_i, k_{i+1}) > τ; pivot = most attended; w_i ∝ exp(-‖k_p - k_i‖² / 2σ²); k' = Σ w k, v' = Σ w v"
    paper = "arXiv 2407.08454"
    arms = {"post": {"space": "post"}}

    threshold: float = setting(
        0.75, "τ never rises above this; it falls until m entries remain", "paper", least=-1
    )
    space: str = setting("pre", "keys compared and merged before RoPE, or after", "paper (post)", SPACE)
    group: str = setting("sum", "how a group's query heads are reduced", "our choice", GROUP)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        score = prompt_mass(entries, observed, self.group)
        keys, values = at_least_float32(entries.keys), at_least_float32(entries.values)
        places = entries.positions.expand(entries.kv_heads, -1)
        if self.space == "pre":
            keys = observed.rope.unrotate(keys, entries.positions)
        made, thresholds = [], []
        for head in range(entries.kv_heads):
            run, threshold = self._runs(keys[head], score[head], m)
            pivot, weight = _pivots(keys[head], score[head], run)
            count = len(pivot)
            size = torch.zeros(count, dtype=torch.long, device=run.device).index_add(
                0, run, torch.ones_like(run)
            )

            def mean(x: Tensor, run: Tensor = run, weight: Tensor = weight, count: int = count) -> Tensor:
                return x.new_zeros(count, x.shape[1]).index_add(0, run, weight[:, None] * x)

            position = places[head][pivot]
            key = mean(keys[head])
            if self.space == "pre":
                key = observed.rope.rotate(key, position)
            alone = (size == 1)[:, None]  # stays bit for bit
            key = torch.where(alone, entries.keys[head][pivot], key.to(entries.keys.dtype))
            value = torch.where(
                alone, entries.values[head][pivot], mean(values[head]).to(entries.values.dtype)
            )
            made.append((key, value, position))
            thresholds.append(threshold)
        return _ragged(made), {"threshold": sum(thresholds) / len(thresholds)}

    def _runs(self, keys: Tensor, score: Tensor, m: int) -> tuple[Tensor, float]:
        """The run each token is in [n], numbered from 0, and the head's threshold (-1: none suffices)."""
        n, recent = len(keys), m // 4
        candidate = torch.ones(n, dtype=torch.bool, device=keys.device)
        candidate[n - recent :] = False
        candidate[top(score[: n - recent], m // 4)] = False
        norm = keys.norm(dim=1)
        scale = norm[:-1] * norm[1:]
        cosine = torch.where(scale > 0, (keys[:-1] * keys[1:]).sum(1) / scale, 0)
        cosine = cosine.masked_fill(~(candidate[:-1] & candidate[1:]), -torch.inf)  # [n - 1]
        # Strictly above τ merges; of the cosines at most the threshold, τ is the highest that leaves m entries or fewer.
        needed = n - m
        if int((cosine > self.threshold).sum()) >= needed:
            threshold = self.threshold
        else:
            rising = cosine[torch.isfinite(cosine)].sort().values
            levels = rising[rising <= self.threshold].unique().flip(0)
            enough = len(rising) - torch.searchsorted(rising, levels, right=True) >= needed
            threshold = float(levels[enough][0]) if enough.any() else -torch.inf
        joined = cosine > threshold  # token i + 1 goes into i's run
        run = torch.cat([joined.new_zeros(1, dtype=torch.long), (~joined).long().cumsum(0)])
        return run, threshold if threshold > -torch.inf else -1.0


def _pivots(keys: Tensor, score: Tensor, run: Tensor) -> tuple[Tensor, Tensor]:
    """Each run's pivot [runs] (most attended, the first of equals) and every token's weight within its run [n]."""
    count = int(run[-1]) + 1
    best = score.new_full((count,), -torch.inf).scatter_reduce(0, run, score, "amax")
    place = torch.arange(len(run), device=run.device)
    place = torch.where(score == best[run], place, len(run))
    pivot = place.new_full((count,), len(run)).scatter_reduce(0, run, place, "amin")
    square = (keys - keys[pivot][run]).square().sum(1)  # ‖k_p - k_i‖²
    size = square.new_zeros(count).index_add(0, run, torch.ones_like(square))
    variance = (square.new_zeros(count).index_add(0, run, square) / size)[run]
    weight = torch.where(variance > 0, torch.exp(-square / (2 * variance)), 1)
    return pivot, weight / weight.new_zeros(count).index_add(0, run, weight)[run]


def _ragged(made: list[tuple[Tensor, Tensor, Tensor]]) -> Entries:
    """Entries of heads with different numbers of them: right-aligned, the missing ones marked by bias -inf."""
    longest = max(len(key) for key, _, _ in made)
    missing = [longest - len(key) for key, _, _ in made]

    def padded(parts: list[Tensor]) -> Tensor:
        pad = [(0, 0) * (part.dim() - 1) + (lack, 0) for part, lack in zip(parts, missing, strict=True)]
        return torch.stack([torch.nn.functional.pad(part, p) for part, p in zip(parts, pad, strict=True)])

    keys, values, positions = (padded(list(parts)) for parts in zip(*made, strict=True))
    bias = None
    if any(missing):
        lack = torch.tensor(missing, device=keys.device)[:, None]
        there = torch.arange(longest, device=keys.device) >= lack
        bias = at_least_float32(keys).new_zeros(len(made), longest).masked_fill(~there, -torch.inf)
    return Entries(keys, values, positions, bias)
