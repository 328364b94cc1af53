"""The prefill bench on the real model: what is timed is what is said; a timing decides nothing.

That compression is linear in the prompt, and leaves nothing behind, is counted in products and bytes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conftest import build_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kvrepro import make_cache
from kvrepro import prefill as kvrepro_prefill
from kvrepro.attention import Observed, attend_causal
from kvrepro.cli import main
from kvrepro.entries import Entries
from kvrepro.measure import prefill
from kvrepro.methods import make
from kvrepro.rope import Rope


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return prefill.run(
        "smollm2-135m", contexts=[1024], methods=["snapkv", "kvslimmer"], repeats=2, memory_repeats=1
    )


def test_every_arm_is_held_against_the_plain_prefill_of_its_repeat(found: dict[str, Any]) -> None:
    assert [row["arm"] for row in found["rows"]] == ["full", "snapkv", "kvslimmer"]
    for row in found["rows"]:
        assert 800 < row["context"] <= 1024 and len(row["seconds"]) == 2
        assert all(
            0 <= inside < whole for inside, whole in zip(row["compression"], row["seconds"], strict=True)
        )
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    full, *others = found["rows"]
    assert full["ratio"]["median"] == 1 and full["compression"] == [0, 0]
    assert all(row["overhead"]["low"] > 0 for row in others)


def test_memory_is_a_peak_above_the_loaded_model_in_a_process_of_its_own(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        assert row["layer_bytes"] == 2 * 3 * 64 * 4 * row["context"]  # K and V, KV heads, channels, float32
        assert row["extra_bytes"]["low"] <= row["extra_bytes"]["median"] <= row["extra_bytes"]["high"]
    full, snapkv, _ = found["rows"]
    assert full["extra_bytes"]["median"] > 30 * full["layer_bytes"]  # the cache of 30 layers
    assert full["extra_bytes"]["median"] < 270e6  # and not the weights, which are 538 MB
    assert full["layers_above_plain"]["median"] == 0
    assert snapkv["layers_above_plain"]["median"] < 0  # it leaves a quarter of that cache


def test_it_is_a_table_for_people_and_json_for_programs(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefill.text(found).count("\n") == 3
    on_gpu = {"rows": [row | {"overhead": None} for row in found["rows"]]}
    assert all("   –   " in line for line in prefill.text(on_gpu).splitlines()[1:])
    asked: dict[str, Any] = {}
    monkeypatch.setattr(prefill, "run", lambda model, **given: asked.update(given) or found)
    assert main(["bench", "prefill", "--context", "1024", "2048", "--methods", "selkv,h2o", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["arm"] == "full"
    assert asked["contexts"] == [1024, 2048] and asked["methods"] == ["selkv", "h2o"]


# --- Linear in the prompt


class Allocations(TorchDispatchMode):
    """Bytes of all tensors that operators return, and of the largest; views count as nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._seen | known:
                self._seen.add(tensor.untyped_storage().data_ptr())
                self._kept.append(tensor)
                self.total += tensor.untyped_storage().nbytes()
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def cost(name: str, n: int) -> tuple[int, int, int]:
    """Multiplications and additions, bytes and largest tensor of compressing a prompt of n tokens to a quarter."""
    heads, kv_heads, width = 4, 2, 16
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, x, n, width, generator=random) for x in (heads, kv_heads, kv_heads))
    both = attend_causal(q, k, v, width**-0.5)
    assert both is not None
    rope = Rope(
        lambda positions, dtype: (torch.ones(1, positions.shape[-1], width), torch.zeros(1, 1, width))
    )
    observed = Observed(q[0], width**-0.5, rope, layers=2, logsumexp=both[1][0])
    entries = Entries(k[0], v[0], torch.arange(n)[None])
    with FlopCounterMode(display=False) as products, Allocations() as bytes_:
        make(name).compress(entries, observed, n // 4)
    return products.get_total_flops(), bytes_.total, bytes_.largest


@pytest.mark.parametrize("name", ["selkv", "snapkv", "pyramidkv"])
def test_compression_is_linear_in_the_prompt(name: str) -> None:
    """The logsumexp comes from the attention kernel, so only the window's queries meet the keys again."""
    for short, long in zip(cost(name, 2048), cost(name, 4096), strict=True):
        assert long <= 2.05 * short
    _, _, largest = cost(name, 4096)
    assert largest <= 4 * 4 * 4096 * 32  # H floats for each token and query of the window


def test_whole_prompt_attention_is_taken_in_blocks() -> None:
    """H2O reads every query's attention, which is the model's own cost again; but no n x n matrix exists."""
    short, long = cost("h2o", 2048), cost("h2o", 4096)
    assert 3 < long[0] / short[0] < 4.1  # the count shows what is not linear
    assert long[2] <= 2.05 * short[2] and long[2] < 4 * 4 * 4096 * 4096 / 8


@pytest.mark.parametrize(
    "name", ["selkv", "selkv/evict", "snapkv", "pyramidkv", "h2o", "kvslimmer", "asymkv"]
)
def test_nothing_of_a_layer_is_left_but_its_entries(name: str) -> None:
    """No view keeps the prompt's keys and values alive, and no statistics stay behind."""
    model = build_tiny("llama", torch.float32)
    ids = torch.randint(1, 97, (1, 200), generator=torch.Generator().manual_seed(0))
    cache = make_cache(model, name, retain=0.25)
    with torch.no_grad():
        kvrepro_prefill(model, cache, ids)
        model(ids[:, cache.get_seq_length() :], cache=cache)
    for layer in cache.compressed_layers():
        assert layer._waiting is None and layer._leaf is None
        (row,) = layer.prompt
        assert row.entries is not None
        for tensor in (row.entries.keys, row.entries.values, *row.entries.state.values()):
            assert tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
            assert tensor.shape[1] <= row.m + 20  # the pyramid's lower layers hold more
