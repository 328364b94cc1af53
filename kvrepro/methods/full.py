"""The two full caches that everything is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention import Observed
from ..entries import Entries
from .base import Diagnostics, Method, register


@register
@dataclass(frozen=True)
class Full(Method):
    """Nothing is dropped and the stock kernel runs: bit-identical to the unmodified model."""

    name = "full"
    formula = "entries' = entries; stock attention"
    paper = "the unmodified model"

    def untouched(self, n: int, m: int) -> bool:
        return True


@register
@dataclass(frozen=True)
class FullFolded(Method):
    """Nothing is dropped, but the kernel of the compressed arms runs (within 1e-5 of ``full``).

    A decoding speedup is stated against this one: the same kernel on more entries.
    """

    name = "full-folded"
    formula = "entries' = entries; folded attention"
    paper = "the unmodified model, through the kernel of the compressed arms"

    def untouched(self, n: int, m: int) -> bool:
        return False

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        return entries, {}
