"""SnapKV: what the last queries look at, pooled, per KV head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import Observed
from ..entries import Entries
from .base import Diagnostics, Method, register, setting
from .select import ODD, pool, top_and_recent


def window_score(
    entries: Entries, observed: Observed, window: int, kernel: int, pooling: str, group: str
) -> Tensor:
    """SnapKV's score [Hkv, n]: attention of the last ``window`` queries, over the group, pooled along tokens."""
    mass = observed.column_mass(entries, window)  # [Hkv, G, n]
    return pool(mass.sum(1) if group == "sum" else mass.amax(1), kernel, pooling)


@register
@dataclass(frozen=True)
class SnapKV(Method):
    """Keep the observation window and the tokens it attends to most (Li et al. 2024, arXiv 2404.14469)."""

    name = "snapkv"
    formula = "score = pool_k(Σ_{q in last w} Σ_group A[q, :]); kept = top-(m-w) per KV head ∪ last w"
    paper = "arXiv 2404.14469"
    arms = {"class-default": {"window": 64, "kernel": 5, "pooling": "avg"}}

    window: int = setting(
        32, "w: the last queries that vote, always kept", "paper (LongBench configs)", least=1
    )
    kernel: int = setting(7, "width of the pooling", "paper (LongBench configs)", ODD)
    pooling: str = setting(
        "max", "how neighbours are pooled", "paper (LongBench configs)", ("max", "avg", "none")
    )
    group: str = setting("sum", "how a group's query heads are reduced", "our choice", ("sum", "max"))

    def untouched(self, n: int, m: int) -> bool:
        return m >= n or n < self.window

    def select(self, entries: Entries, observed: Observed, m: int) -> Tensor:
        """Kept indices [Hkv, m], ascending."""
        score = window_score(entries, observed, self.window, self.kernel, self.pooling, self.group)
        return top_and_recent(score, m, self.window)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        return entries.take(self.select(entries, observed, m)), {}
