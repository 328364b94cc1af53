"""What every layer saw of a prompt: the inputs of ``compress``, for notebooks and analyses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import Observed
from ..entries import Entries
from ..hf import KVCache, make_cache
from ..methods.base import Diagnostics, Method


@dataclass(frozen=True)
class _Observer(Method):
    """Keeps everything and remembers what it was shown."""

    seen: list[tuple[Entries, Observed]] = field(
        default_factory=list, metadata={"doc": "", "source": "", "choices": None, "least": None}
    )
    name = "observer"
    formula = ""
    paper = ""

    def untouched(self, n: int, m: int) -> bool:
        return False

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        self.seen.append((entries, observed))
        return entries, {}


@torch.inference_mode()
def observe(model: Any, input_ids: Tensor) -> tuple[list[tuple[Entries, Observed]], KVCache, Tensor]:
    """Prefill a prompt and return what each compressible layer saw.

    Parameters
    ----------
    model
        With kvrepro's attention.
    input_ids : Tensor [1, n]

    Returns
    -------
    layers : list of (Entries, Observed)
        Keys and values [Hkv, n, D] of the prompt, and its queries [H, n, D] with the statistics of attention.
    cache : KVCache
        Holding every token.
    logits : Tensor [1, V]
        Of the token after the prompt.
    """
    observer = _Observer()
    cache = make_cache(model, observer)
    logits = model(input_ids, cache=cache, logits_to_keep=1).logits[:, -1]
    return observer.seen, cache, logits
