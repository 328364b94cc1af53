"""Adjacent: instead of evicting what a selector scores low, merge it into its neighbour (an operator for comparison; ours).

KVSlimmer's merge, once, after a prefill with the full cache, on the score of ``bifocal``: as many entries as its eviction
keeps, but every token is in one of them (at m = 1 only the newest is).  Sinks and the last tokens never merge.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import Observed
from ..entries import Entries
from .base import register, setting
from .bifocal import Bifocal
from .pairs import PairMerger, Pairs

SELECTOR = Bifocal()


@register
@dataclass(frozen=True)
class Adjacent(PairMerger):
    """Merge the adjacent pairs that Bifocal's score rates lowest, keys by the score, values by l (ours)."""

    name = "adjacent"
    formula = (
        "s = bifocal's score; lowest s1 + s2 merge: k* = (s1 k1 + s2 k2) / (s1 + s2) before RoPE, "
        "v* = (l1 v1 + l2 v2) / (l1 + l2), l* = l1 + l2, s* = s1 + s2 (l for s where s1 + s2 = 0); bias = log l; "
        "at most an eighth of the slots a round, not among the sinks and the last min(16, m // 2)"
    )
    paper = "ours"
    arms = {"no-bias": {"bias": "none"}}

    bias: str = setting("log-l", "log l, or none", "KVSlimmer", ("log-l", "none"))
    sinks: int = setting(32, "first tokens never merged, cut to m // 8", "KVSlimmer", least=0)

    def older(self, entries: Entries, observed: Observed, m: int) -> range:
        return range(min(self.sinks, m // 8), len(entries) - min(SELECTOR.recent, m // 2))

    def received(self, entries: Entries, observed: Observed) -> Tensor:
        return SELECTOR.score(entries, observed)

    def most(self, slots: int) -> int:
        # Far more is merged at once than after a chunk: a full round would pair heavy tokens, too.
        return max(1, slots // 8)

    def pair_weights(self, pairs: Pairs) -> Tensor:
        return pairs.share

    def bias_of(self, entries: Entries) -> Tensor | None:
        return super().bias_of(entries) if self.bias == "log-l" else None
