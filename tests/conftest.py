"""Fixtures of the whole suite: the embedded model, and tiny random models of every supported architecture."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvrepro.hf  # noqa: F401  registers the attention function
from kvrepro import embedded, models
from kvrepro.models import SUPPORTED

torch.set_num_threads(2)

# 4 query heads of 8 channels, 2 KV heads, 3 layers: small enough for float64 and naive loops
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # ten times the usual: attention is far from uniform, so that a wrong weight shows
    "bos_token_id": None,
    "eos_token_id": None,  # generate() runs its full length
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "phi3": {"model_type": "phi3"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 16,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,  # low enough to bend the scores of random weights
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 8,
    },
}
assert {row["model_type"] for row in ARCHITECTURES.values()} == set(SUPPORTED)


def build_tiny(
    architecture: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attn_implementation: str = "kvrepro",
    **overrides: Any,
) -> Any:
    """A random model of a name in `ARCHITECTURES` in eval mode; `overrides` are config values."""
    values = {**_COMMON, **ARCHITECTURES[architecture], **overrides}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # drawn in float32, then cast: the same model in every dtype
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The factory `build_tiny`."""
    return build_tiny


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, float32 on the CPU. Shared: leave nothing on it."""
    return models.load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Any]:
    """Gemma-3-270M and its tokenizer, float32 on the CPU, where it was fetched before. Shared: leave nothing on it."""
    if not (embedded.cache_dir() / embedded.MODELS["gemma3-270m"].folder).is_dir():
        pytest.skip(
            "gemma3-270m (253 MB, Gemma terms of use) is not in the model cache, and a test does not fetch it"
        )
    return models.load("gemma3-270m", dtype="float32")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
