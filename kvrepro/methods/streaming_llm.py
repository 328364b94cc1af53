"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention import Observed
from ..entries import Entries
from .base import Diagnostics, Method, register, setting
from .reposition import repositioned


@register
@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keep the first ``sinks`` tokens and the most recent ones (Xiao et al. 2024, arXiv 2309.17453)."""

    name = "streaming-llm"
    formula = "kept = {0..s-1} ∪ {n-(m-s)..n-1}"
    paper = "arXiv 2309.17453"
    arms = {"reindexed": {"reposition": True}}

    sinks: int = setting(4, "first tokens always kept", "paper", least=0)
    reposition: bool = setting(
        False, "re-rotate kept keys to the consecutive positions n-m..n-1, as the original does", "our choice"
    )

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        n, sinks = len(entries), min(self.sinks, m)
        kept = torch.cat([torch.arange(sinks), torch.arange(n - (m - sinks), n)]).to(entries.keys.device)
        kept_entries = entries.take(kept)
        if self.reposition:
            kept_entries = repositioned(kept_entries, n, observed.rope)
        return kept_entries, {}
