"""Bifocal: keep what the question points at, from near and from far (ours).

Selection decides more than merging: which queries vote, and how far a vote reaches along the text, moves the distance from
the full cache by tens of percent; what becomes of the evicted tokens by a few.  The last queries know what is asked, but
where they point at a word the answer stands beside it: so their vote is smeared over the phrase, and over the passage.
What the text itself will need, the prompt's own queries know: so a sample of them votes, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from ..errors import UserError
from .base import Diagnostics, Method, register, setting
from .select import ODD, pool, top_and_recent

SHARP = {"phrase": 1, "passage": 1, "share": 0.0}  # votes reach no further than the token itself


@register
@dataclass(frozen=True)
class Bifocal(Method):
    """Keep the tokens that the last queries point at, with their surroundings, and what the whole prompt attends to (ours)."""

    name = "bifocal"
    formula = (
        "a = Σ_{q in last w} Σ_group A[q, :]; near = Σ_{k in phrase, passage} of maxpool_k(a) as a share of its sum, plus β "
        "times its mean over KV heads; far = Σ_{q in s spread over the prompt} Σ_group A[q, :]; "
        "score = (near / Σ near + λ far / Σ far)·‖v‖; kept = top-(m-r) per KV head ∪ last r"
    )
    paper = "ours"
    arms = {
        "window-8": {"near": 8, "far": 0.0, **SHARP},
        "window-32": {"near": 32, "far": 0.0, **SHARP},
        "window-128": {"near": 128, "far": 0.0, **SHARP},
        "window-512": {"near": 512, "far": 0.0, **SHARP},
        "sampled": {"near": 0, "far": 1.0},
        "whole": {"near": 0, "far": 1.0, "sample": None},
        "mixed": {"near": 8, "far": 1.0, "sample": None, **SHARP},
        "sharp": SHARP,
        "phrase": {"passage": 5},
        "passage": {"phrase": 31},
        "heads-apart": {"share": 0.0},
        "near-only": {"far": 0.0},
        "every-query": {"sample": None},
        "no-norm": {"norm": False},
    }

    near: int = setting(40, "w: the last queries that vote; 0: none", "our choice", least=0)
    phrase: int = setting(5, "max pooling of the near vote, narrow", "our choice", ODD)
    passage: int = setting(31, "max pooling of the near vote, wide", "our choice", ODD)
    share: float = setting(1.0, "β: weight of the near vote's mean over KV heads", "our choice", least=0)
    far: float = setting(0.125, "λ: weight of the whole prompt's vote", "our choice", least=0)
    sample: int | None = setting(
        256, "s: queries spread over the prompt that vote for all; None: all", "our choice", least=1
    )
    norm: bool = setting(True, "multiply by the L2 norm of the value", "our choice (as SelKV)")
    recent: int = setting(16, "r: last tokens always kept", "our choice (as SelKV)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.near or self.far):
            raise UserError("bifocal: near=0 and far=0 leave no query to vote; give one of them")

    def score(self, entries: Entries, observed: Observed) -> Tensor:
        """The votes of near and far queries for each token, times its value's norm: [Hkv, n]."""
        votes = at_least_float32(entries.keys).new_zeros(entries.kv_heads, len(entries))
        if self.near:
            attention = observed.column_mass(entries, self.near).sum(1)
            views = [shares(pool(attention, kernel, "max")) for kernel in (self.phrase, self.passage)]
            near = views[0] + views[1]
            votes = shares(near + self.share * near.mean(0, keepdim=True))
        if self.far:
            votes = votes + self.far * shares(observed.sampled_mass(entries, self.sample).sum(1))
        return votes * at_least_float32(entries.values).norm(dim=-1) if self.norm else votes

    def select(self, entries: Entries, observed: Observed, m: int) -> Tensor:
        """Kept indices [Hkv, m], ascending."""
        return top_and_recent(self.score(entries, observed), m, self.recent)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        return entries.take(self.select(entries, observed, m)), {}


def shares(votes: Tensor) -> Tensor:
    """Votes [Hkv, n] as shares of their sum over the prompt."""
    return votes / votes.sum(-1, keepdim=True)
