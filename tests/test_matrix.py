"""Every registered method on every architecture, as a user runs it: prefill, generate(), report.

What each method computes is tested elsewhere; here a method or an architecture that is added meets all of the others.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import build_tiny
from test_hf import generate, tokens

from kvrepro import make_cache, methods, prefill
from kvrepro.evaluate import _held
from kvrepro.hf import KVCache
from kvrepro.models import SUPPORTED, to_mha

RETAIN = 0.65
N = 61  # tokens of the prompt
M = 40  # entries that may stay: more than SnapKV's window, so that PyramidKV's layers differ
NEW = 3  # new tokens; the last is not fed
WINDOW = 16
# name: what is asked of build_tiny
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-to-mha": {"architecture": "llama"},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},  # as from version 0.2 on
    "phi3": {},
    "gemma2": {},  # soft cap, and sliding layers around a global one
    "gemma3": {},  # sliding layers around a global one, each with rotary tables of its own
}


@functools.cache
def twins(name: str) -> tuple[Any, Any]:
    """The tiny model in float32, and the same one untouched by kvrepro."""
    asked = {"architecture": name, "dtype": torch.float32, **ARCHITECTURES[name]}
    models = (
        build_tiny(**asked),
        build_tiny(**asked, attn_implementation="eager" if name == "gemma2" else "sdpa"),
    )
    return tuple(map(to_mha, models)) if name.endswith("to-mha") else models  # type: ignore[return-value]


@functools.cache
def untouched(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens and logits of the model without kvrepro."""
    return generate(twins(name)[1], tokens(N), new=NEW)


def prefilled(name: str, method: str, **budget: Any) -> KVCache:
    """A cache for the prompt, driven if the method is."""
    cache = make_cache(twins(name)[0], method, **budget)
    prefill(twins(name)[0], cache, tokens(N)["input_ids"])
    return cache


def test_the_matrix_has_every_supported_architecture() -> None:
    assert {twins(name)[0].config.model_type for name in ARCHITECTURES} == set(SUPPORTED)


@pytest.mark.parametrize("method", methods.available())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_goes_on_from_a_compressed_prompt(architecture: str, method: str) -> None:
    model, _ = twins(architecture)
    cache = prefilled(architecture, method, retain=RETAIN)
    found, logits = generate(model, tokens(N), cache, new=NEW)
    assert found.shape == (1, NEW) and logits.isfinite().all()

    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    lines = cache.report()
    assert [line["layer"] for line in lines] == [0, 1, 2]
    budgets = []
    for line, kind in zip(lines, kinds, strict=True):
        assert line["seen"] == N + NEW - 1
        if kind == "sliding_attention":
            assert (line["method"], line["entries"]) == ("sliding-window", WINDOW - 1)
            continue
        left = line["entries"] - (NEW - 1)  # of the prompt
        budgets.append(line.get("layer_budget", M))
        assert (line["method"], line["m"], line["retain"]) == (method, M, RETAIN)
        assert line["positions"].shape[1] == left
        if method in ("full", "full-folded"):
            assert left == N and line["untouched"] == (method == "full")
        else:
            assert not line["untouched"]
            assert left <= budgets[-1] if method == "kvmerger" else left == budgets[-1]
        heads = model.config.num_key_value_heads
        entry, beside = divmod(line["bytes_used"], line["entries"])
        assert beside == 0 and entry in {4 * (heads * 2 * 8 + bias) for bias in (0, 1, heads)}
        steps = line["positions"].diff(dim=-1)  # in order; a kvmerger head that holds fewer begins with zeros
        assert (steps >= 0).all() if method == "kvmerger" else (steps > 0).all()
        assert line["positions"].min() >= 0 and line["positions"].max() < N
    assert sum(budgets) == len(budgets) * M


@pytest.mark.parametrize(
    "method", [name for name in methods.available() if methods.make(name).untouched(N, N)]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_budget_is_the_untouched_model(architecture: str, method: str) -> None:
    """Bit for bit, through generate(); ``full-folded``, which runs its own kernel, is compared in test_hf.py."""
    expected = untouched(architecture)
    cache = prefilled(architecture, method, retain=1.0)
    found = generate(twins(architecture)[0], tokens(N), cache, new=NEW)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for line in cache.report():
        assert line["untouched"] and line["seen"] == N + NEW - 1
        assert line["entries"] == (WINDOW - 1 if line["method"] == "sliding-window" else line["seen"])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_shares_count_entries_where_tokens_may_go_and_bytes_everywhere(architecture: str) -> None:
    """evaluate's kept_entries and kept_bytes: of three layers, Gemma's two with a window hold the same in both caches."""
    held = []
    for method in ("full", "snapkv"):
        cache = prefilled(architecture, method, retain=RETAIN)
        with torch.no_grad():
            twins(architecture)[0](**tokens(N), cache=cache, use_cache=True)
        held += _held(cache)
    (all_entries, all_bytes), (entries, some_bytes) = held
    sliding = 0 if architecture == "llama" else 2 * (WINDOW - 1)
    layers = 1 if sliding else 3
    assert entries / all_entries == M / N
    assert some_bytes / all_bytes == (layers * M + sliding) / (layers * N + sliding)
