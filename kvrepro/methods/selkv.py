"""SelKV: evict, merge values behind a soft cosine gate, restore the lost attention mass by a bias.

Selection, merge and bias are separate steps, as in the paper: the merge also works on another selector's kept set.
Notation (arXiv 2607.16213): A[h, q, i] causal attention summed over a group's query heads; a[h, i] its sum over the
last w queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32, query_block
from ..entries import Entries, gather
from .base import Diagnostics, Method, register, setting
from .bifocal import Bifocal
from .reposition import repositioned
from .select import ODD, pool, top, top_and_recent
from .snapkv import SnapKV

SELECTORS: dict[str, SnapKV | Bifocal] = {
    "snapkv": SnapKV(),
    "bifocal": Bifocal(),
}  # whose kept sets the merge works on, too
MASS_FLOOR = 1e-8  # of a kept token's attention, before it divides


@dataclass(frozen=True)
class Kept:
    """A kept set: ``index`` [m] (one for the layer) or [Hkv, m] (each head its own), and each head's own tokens."""

    index: Tensor
    own: Tensor  # [Hkv, n] bool: kept tokens the head itself chose; they may receive merged tokens
    union: int | None = None  # GQA: chosen by any head, before the trim, recent window not counted


@dataclass(frozen=True)
class Routes:
    """Where evicted tokens go: per KV head h and token j, ``target`` [Hkv, n] (-1: nowhere)."""

    evicted: Tensor  # [Hkv, n] bool
    target: Tensor


@register
@dataclass(frozen=True)
class SelKV(Method):
    """Merge each evicted token's value into a kept neighbour, or drop it, by a cosine gate (arXiv 2607.16213)."""

    name = "selkv"
    formula = (
        "c = avgpool_5(a·‖v‖); kept = top-m of c (GQA: union over heads, trimmed by the mean) ∪ last 16; "
        "π(j) = argmax_i A[j, i] in j's bucket of 32; g = max(cos(v_j, v_π(j)), 0); "
        "v'_i = (a_i v_i + Σ g_j a_j v_j) / (a_i + Σ g_j a_j); R_i = (a_i + Σ g_j a_j) / a_i; bias = α log R_i"
    )
    paper = "arXiv 2607.16213"
    arms = {
        "evict": {"merge": "none", "bias": "none"},
        "merge-all": {"merge": "all", "bias": "none"},
        "gate": {"bias": "none"},
        "gate+count": {"bias": "count"},
        "gate+gated-count": {"bias": "gated-count"},
        "merge-all+ratio": {"merge": "all"},
        "alpha-0.25": {"alpha": 0.25},
        "alpha-1": {"alpha": 1.0},
        "on-snapkv": {"select": "snapkv"},
        "on-bifocal": {"select": "bifocal"},
        "on-bifocal+gate": {"select": "bifocal", "bias": "none"},
        "on-bifocal+gated-count": {"select": "bifocal", "bias": "gated-count"},
        "on-bifocal+merge-all": {"select": "bifocal", "merge": "all", "bias": "none"},
        "reposition": {"reposition": True},
    }

    window: int = setting(32, "w: last queries whose attention is summed into a", "paper (step 1)", least=1)
    recent: int = setting(16, "m_r: last tokens always kept", "paper (step 2)", least=0)
    kernel: int = setting(5, "average pooling of the score along tokens", "paper (step 1)", ODD)
    norm: str = setting("l2", "norm of the value in the score", "our choice (VATP uses l1)", ("l2", "l1"))
    select: str = setting(
        "selkv", "whose kept set the merge works on", "paper (plug-in)", ("selkv", *SELECTORS)
    )
    bucket: int = setting(
        32, "B: a token merges only within its bucket of positions", "paper (step 3)", least=1
    )
    targets: str = setting(
        "own",
        "who may receive: kept tokens of the head's own top-m, or any kept token",
        "our choice",
        ("own", "shared"),
    )
    no_target: str = setting(
        "drop", "no target in the bucket: drop, or the most attended target anywhere before", "our choice",
        ("drop", "any"),
    )  # fmt: skip
    merge: str = setting(
        "gate", "gate: g = max(cos, 0); all: g = 1; none: evict", "paper (step 4)", ("gate", "all", "none")
    )
    bias: str = setting(
        "ratio", "ratio: α log R; count: log(1 + routed); gated-count: log(1 + Σ g); none", "paper (step 6)",
        ("ratio", "count", "gated-count", "none"),
    )  # fmt: skip
    alpha: float = setting(0.5, "α of the ratio bias", "paper (step 6)", least=0)
    ratio: str = setting(
        "mean", "R of a kept set shared by KV heads: mean over heads, ratio of sums, or per head", "paper (mean)",
        ("mean", "sums", "head"),
    )  # fmt: skip
    reposition: bool = setting(False, "re-rotate kept keys to n-m..n-1", "paper (step 7, off)")

    def untouched(self, n: int, m: int) -> bool:
        return m >= n or n < self.window or n <= self.recent

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        kept = observed.once((self._selection(), m), lambda: self._select(entries, observed, m))
        survivors = entries.take(kept.index)
        diagnostics: Diagnostics = {} if kept.union is None else {"union_size": kept.union}
        if self.merge != "none":
            survivors, merged = self._merge(entries, observed, survivors, m)
            diagnostics |= merged
        if self.reposition:
            survivors = repositioned(survivors, len(entries), observed.rope)
        return survivors, diagnostics

    # Selection (steps 1 and 2)

    def _selection(self) -> tuple[object, ...]:
        return ("selkv kept", self.select, self.window, self.recent, self.kernel, self.norm)

    def _select(self, entries: Entries, observed: Observed, m: int) -> Kept:
        n, heads = len(entries), entries.kv_heads
        own = torch.zeros(heads, n, dtype=torch.bool, device=entries.keys.device)
        if self.select in SELECTORS:
            index = SELECTORS[self.select].select(entries, observed, m)
            return Kept(index, own.scatter(1, index, True))
        score = self.score(entries, observed)
        if m <= self.recent:
            return Kept(torch.arange(n - m, n, device=own.device), own)
        if observed.heads == heads:  # MHA: each head keeps its own
            index = top_and_recent(score, m, self.recent)
            return Kept(index, own.scatter(1, index, True))
        old = n - self.recent
        own.scatter_(1, top(score[:, :old], m - self.recent), True)
        union = own.any(0)
        mean = torch.where(union[:old], score[:, :old].mean(0), -torch.inf)
        index = torch.cat([top(mean, m - self.recent), torch.arange(old, n, device=own.device)])
        shared = torch.zeros_like(union).scatter(0, index, True)
        return Kept(index, own & shared, int(union.sum()))

    def score(self, entries: Entries, observed: Observed) -> Tensor:
        """c [Hkv, n]: window attention times value norm, average-pooled along tokens (step 1)."""
        mass = observed.column_mass(entries, self.window).sum(1)
        norm = at_least_float32(entries.values).norm(p=2 if self.norm == "l2" else 1, dim=-1)
        return pool(mass * norm, self.kernel, "avg")

    # Routing (step 3)

    def _route(self, entries: Entries, observed: Observed, kept: Kept) -> Routes:
        n, heads = len(entries), entries.kv_heads
        held = torch.zeros(heads, n, dtype=torch.bool, device=entries.keys.device)
        held.scatter_(1, kept.index.expand(heads, -1), True)
        targets = kept.own if self.targets == "own" else held
        short = -n % self.bucket
        allowed = torch.nn.functional.pad(targets, (0, short)).view(
            heads, -1, 1, self.bucket
        )  # [Hkv, b, 1, i]
        causal = torch.ones(self.bucket, self.bucket, dtype=torch.bool, device=held.device).tril()
        weights = torch.where(allowed & causal, observed.bands(entries, self.bucket), -1)  # [Hkv, b, j, i]
        best, slot = weights.max(-1)  # the first of equals
        slot = slot + torch.arange(weights.shape[1], device=held.device)[:, None] * self.bucket
        target = torch.where(best >= 0, slot, -1).view(heads, -1)[:, :n]
        if self.no_target == "any":
            target = torch.where(target < 0, _anywhere(entries, observed, targets), target)
        return Routes(~held, torch.where(held, -1, target))

    def routes(self, entries: Entries, observed: Observed, m: int) -> tuple[Kept, Routes]:
        """Where every evicted token would go under a budget of m: computed once for all arms of a kept set."""
        kept = observed.once((self._selection(), m), lambda: self._select(entries, observed, m))
        key = (self._selection(), m, self.bucket, self.targets, self.no_target)
        return kept, observed.once(key, lambda: self._route(entries, observed, kept))

    # Gate, merge and compensation (steps 4 to 6)

    def gates(self, entries: Entries, routes: Routes) -> Tensor:
        """g [Hkv, n]: 0 where a token is not routed, 1 where everything merges, else max(cos(v_j, v_π(j)), 0)."""
        values = at_least_float32(entries.values)
        routed = (routes.target >= 0).to(values.dtype)
        if self.merge == "all":
            return routed
        return routed * _cosine(values, gather(values, routes.target.clamp_min(0))).clamp_min(0)

    def _merge(
        self, entries: Entries, observed: Observed, survivors: Entries, m: int
    ) -> tuple[Entries, Diagnostics]:
        kept, routes = self.routes(entries, observed, m)
        values = at_least_float32(entries.values)
        mass = observed.column_mass(entries, self.window).sum(1)  # a [Hkv, n]
        gate = self.gates(entries, routes)
        routed, target = routes.target >= 0, routes.target.clamp_min(0)
        index = kept.index.expand(entries.kv_heads, -1)  # [Hkv, m]
        a_kept = mass.gather(1, index)
        floored = int((a_kept < MASS_FLOOR).sum())
        a_kept = a_kept.clamp_min(MASS_FLOOR)

        weight = gate * mass  # g_j a_j [Hkv, n], 0 where j is not routed
        added = _into(target, weight).gather(1, index)  # Σ g_j a_j [Hkv, m]
        moved = gather(_into(target, weight[..., None] * values), index)  # Σ g_j a_j v_j [Hkv, m, D]
        total = a_kept + added
        own = gather(values, index)
        merged = (a_kept[..., None] * own + moved) / total[..., None]
        merged = torch.where(added[..., None] > 0, merged, own)  # nothing merged: the value stays bit for bit
        log_ratio = torch.log(self._over_heads(total, a_kept, kept))
        count = _into(target, (routed if self.bias == "count" else gate).to(mass.dtype)).gather(1, index)
        survivors = replace(
            survivors, values=merged.to(entries.values.dtype), bias=self._bias(log_ratio, count, kept)
        )

        evicted, went = int(routes.evicted.sum()), int(routed.sum())
        return survivors, {
            "share_routed": went / evicted if evicted else math.nan,
            "mean_gate": float(gate.sum()) / went if went else math.nan,
            "floored": floored,
            "log_ratio_mean": float(log_ratio.mean()),
            "log_ratio_p90": float(log_ratio.flatten().quantile(0.9)),
            "log_ratio_max": float(log_ratio.max()),
        }

    def _over_heads(self, total: Tensor, a_kept: Tensor, kept: Kept) -> Tensor:
        """R [1 or Hkv, m]: reduced over KV heads where they share the kept set."""
        if kept.index.dim() == 2 or self.ratio == "head":
            return total / a_kept
        if self.ratio == "sums":
            return total.sum(0, keepdim=True) / a_kept.sum(0, keepdim=True)
        return (total / a_kept).mean(0, keepdim=True)

    def _bias(self, log_ratio: Tensor, count: Tensor, kept: Kept) -> Tensor | None:
        if self.bias == "none":
            return None
        if self.bias == "ratio":
            return self.alpha * log_ratio
        return torch.log(1 + count if kept.index.dim() == 2 else (1 + count).mean(0, keepdim=True))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine along the last axis; 0 with a zero vector."""
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(scale > 0, (a * b).sum(-1) / scale, 0)


def _into(target: Tensor, amount: Tensor) -> Tensor:
    """Sum ``amount`` [Hkv, n, ...] into the slots ``target`` [Hkv, n] of an array of the same shape."""
    target = target.reshape(*target.shape, *(1,) * (amount.dim() - 2)).expand_as(amount)
    return torch.zeros_like(amount).scatter_add(1, target, amount)


def _anywhere(entries: Entries, observed: Observed, targets: Tensor) -> Tensor:
    """For each token the most attended target at or before it, in any bucket: [Hkv, n], -1 where there is none."""
    n = len(entries)
    chosen = []
    block = query_block(observed.heads * n, entries.keys.device)
    for begin in range(0, n, block):
        stop = min(begin + block, n)
        weights = observed.weights(entries, begin, stop, stop).sum(1)  # [Hkv, q, stop]
        causal = torch.ones(stop - begin, stop, dtype=torch.bool, device=weights.device).tril(begin)
        best, slot = torch.where(targets[:, None, :stop] & causal, weights, -1).max(-1)
        chosen.append(torch.where(best >= 0, slot, -1))
    return torch.cat(chosen, 1)
