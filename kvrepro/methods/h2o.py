"""H2O, and VATP, which weighs its score by the value's norm: whole-prompt attention and a recent half."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from .base import Diagnostics, Method, register, setting
from .select import top

GROUP = ("sum", "max")


def prompt_mass(entries: Entries, observed: Observed, group: str) -> Tensor:
    """Attention each token draws from the whole prompt, reduced over the group: [Hkv, n]."""
    mass = observed.column_mass(entries)
    return mass.sum(1) if group == "sum" else mass.amax(1)


def heavy_and_recent(score: Tensor, m: int, sinks: int = 0) -> Tensor:
    """Indices [Hkv, m]: a recent half (the odd entry too), forced sinks (cut to fit), and the heaviest others."""
    heads, n = score.shape
    heavy = m // 2
    recent = m - heavy
    forced = min(sinks, heavy)
    first = torch.arange(forced, device=score.device).expand(heads, forced)
    best = top(score[:, forced : n - recent], heavy - forced) + forced
    last = torch.arange(n - recent, n, device=score.device).expand(heads, recent)
    return torch.cat([first, best, last], 1)


@register
@dataclass(frozen=True)
class H2O(Method):
    """Half of the budget to the tokens the whole prompt attends to most, half to the most recent (arXiv 2306.14048)."""

    name = "h2o"
    formula = "score = Σ_q Σ_group A[q, :]; kept = top-(m // 2) ∪ last m - m // 2"
    paper = "arXiv 2306.14048"

    group: str = setting("sum", "how a group's query heads are reduced", "our choice", GROUP)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        return entries.take(heavy_and_recent(prompt_mass(entries, observed, self.group), m)), {}


@register
@dataclass(frozen=True)
class VATP(Method):
    """H2O's score times the value's L1 norm, with forced attention sinks (arXiv 2406.12335)."""

    name = "vatp"
    formula = "score = ‖v‖₁ · Σ_q Σ_group A[q, :]; kept = first 20 ∪ top ∪ last m - m // 2"
    paper = "arXiv 2406.12335"

    sinks: int = setting(20, "first tokens always kept, within the heavy half", "paper", least=0)
    group: str = setting("sum", "how a group's query heads are reduced", "our choice", GROUP)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        norm = at_least_float32(entries.values).norm(p=1, dim=-1)
        score = prompt_mass(entries, observed, self.group) * norm
        return entries.take(heavy_and_recent(score, m, self.sinks)), {}
