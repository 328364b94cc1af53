"""What every layer saw of a prompt: the inputs of ``compress``, for notebooks and analyses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..attention import Observed, at_least_float32
from ..entries import Entries
from ..hf import KVCache, _rope, make_cache
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


class _Whole(DynamicCache):
    """Made without the model's config, so that layers with a sliding window keep every token, too."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kwargs["kwargs"]["kvrepro"] = True  # one of ours: kvrepro's attention refuses strangers
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.inference_mode()
def upright(model: Any, input_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys before RoPE, and values, of every layer of a prompt, sliding windows included.

    Keys are what the model caches, un-rotated with the layer's own tables: behind the key norm where there is one
    (Qwen3, Gemma 3).

    Parameters
    ----------
    input_ids : Tensor [1, n]

    Returns
    -------
    list of (Tensor, Tensor)
        Keys and values [Hkv, n, D] of each layer, at least float32.
    """
    cache = _Whole()
    model(input_ids, cache=cache, logits_to_keep=1)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    return [
        (
            _rope(model, index).unrotate(at_least_float32(layer.keys[0]), places),
            at_least_float32(layer.values[0]),
        )
        for index, layer in enumerate(cache.layers)
    ]
