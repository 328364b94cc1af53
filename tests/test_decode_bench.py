"""The decode bench: random caches are what real compressed ones are, and what is reported is what was measured.

A timing decides nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvrepro import hf
from kvrepro.cli import main
from kvrepro.entries import Rows
from kvrepro.measure import decode
from kvrepro.measure.decode import Cell, filled, filled_cache, form, timed_parts

ARMS = (*decode.STOCK, *decode.FULL, *decode.METHODS)


@pytest.fixture
def quick(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bench on a tiny model with little to read."""
    model = tiny("llama", torch.float32)
    monkeypatch.setattr(decode, "load", lambda *_, **__: (model, None))
    monkeypatch.setattr(decode, "READ", 1000)
    monkeypatch.setattr(decode, "STEPS", (2, 2))
    return model


# --- the caches


@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "gemma3"])
@pytest.mark.parametrize("arm", [*decode.FULL, *decode.METHODS])
@pytest.mark.parametrize("context", [300, 600])
def test_a_filled_cache_is_what_a_real_prompt_leaves(
    tiny: Any, architecture: str, arm: str, context: int
) -> None:
    """The same lengths, shapes, dtypes and bias in every layer, before and after a decoded token, so the same kernels."""
    model = tiny(architecture, torch.float32)
    retain, batch = (1.0 if arm in decode.FULL else 0.25), 2
    tokens = torch.randint(1, 97, (batch, context))
    with torch.inference_mode():
        real = hf.make_cache(model, arm, retain=retain)
        model(tokens, cache=real)
        cell = Cell(arm, context, batch, retain)
        made = filled_cache(model, cell, filled(form(model, arm), context, round(retain * context)))
        assert real.get_seq_length() == made.get_seq_length() == context
        for new in (0, 1):
            if new:
                logits = [model(tokens[:, :1], cache=cache).logits for cache in (real, made)]
                assert all(x.isfinite().all() for x in logits)
            lines = [
                [{key: x for key, x in line.items() if key in SAME} for line in cache.report()]
                for cache in (real, made)
            ]
            assert lines[0] == lines[1] and len(lines[0]) > 0
            for a, b in zip(real.compressed_layers(), made.compressed_layers(), strict=True):
                assert a.stock == b.stock
                assert [described(x) for x in a.rows.view()] == [described(x) for x in b.rows.view()]
                assert [row.positions.shape for row in a.prompt] == [row.positions.shape for row in b.prompt]
                last = max(int(row.positions.max()) for row in b.prompt)
                assert last < context <= last + 1 / retain


SAME = ("layer", "row", "method", "m", "untouched", "seen", "entries", "bytes_used", "bytes_allocated")


def described(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.stride())


def test_stock_arms_decode_through_transformers_own_cache(tiny: Any) -> None:
    model = tiny("gemma3", torch.float32)  # with sliding layers
    tokens = torch.randint(1, 97, (2, 300))
    like = form(model, "full")
    for arm, implementation in decode.STOCK.items():
        with torch.inference_mode():
            made = filled_cache(model, Cell(arm, 300, 2, 1.0), filled(like, 300, 300))
            real = DynamicCache(config=model.config)
            model(tokens, cache=real)
            assert type(made) is DynamicCache and model.config._attn_implementation == implementation
            for a, b in zip(real.layers, made.layers, strict=True):
                assert (a.keys.shape, a.keys.dtype) == (b.keys.shape, b.keys.dtype)
            model(tokens[:, :1], cache=made)
            assert made.get_seq_length() == 301


def test_a_context_past_the_models_own_decodes(tiny: Any) -> None:
    """The next token stands at the context's end, which only the rotary tables know of."""
    model = tiny("llama", torch.float32, max_position_embeddings=128)
    made = filled_cache(model, Cell("selkv", 5000, 1, 0.1), filled(form(model, "selkv"), 5000, 500))
    seen: list[Tensor] = []
    hook = model.model.rotary_emb.register_forward_hook(
        lambda module, given, kwargs, out: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with torch.inference_mode():
        assert model(torch.tensor([[5]]), cache=made).logits.isfinite().all()
    hook.remove()
    assert [x.tolist() for x in seen] == [[[5000]]]


# --- the numbers


def test_rows_hold_every_arm_with_its_spread(quick: Any) -> None:
    rows = decode.run("tiny", contexts=[300, 300], batches=[1, 3], retains=[0.5, 0.1], repeats=2)["rows"]
    expected = [
        (300, batch, arm, retain)
        for batch in (1, 3)
        for retain, arms in ((1.0, ARMS[:4]), (0.5, decode.METHODS), (0.1, decode.METHODS))
        for arm in arms
    ]
    assert [(row["context"], row["batch"], row["arm"], row["retain"]) for row in rows] == expected
    for row in rows:
        assert row["status"] == "measured"
        timed = {"tokens_per_s", "ms_step", "ms_attention", "ms_append", "ms_other", "of_roofline"}
        for name in timed:
            low, high = row["spread"][name]
            assert 0 < low <= row[name] <= high
        fastest, slowest = row["spread"]["ms_step"]
        tokens = [1e3 * row["batch"] / slowest, 1e3 * row["batch"] / fastest]
        assert row["spread"]["tokens_per_s"] == pytest.approx(tokens)
        assert row["of_roofline"] == pytest.approx(row["ms_step"] / row["roofline"])
        assert set(row["speedup"]) == set(decode.AGAINST)
        for arm, (low, high) in row["spread"]["speedup"].items():
            assert low <= row["speedup"][arm] <= high
        entry = 3 * 2 * 2 * 8 * 4  # layers · (key + value) · KV heads · channels · float32
        entry += {"selkv": 3 * 4, "kvslimmer": 3 * 2 * 4}.get(
            row["arm"], 0
        )  # a bias for all KV heads; for each
        assert row["bytes"] == row["batch"] * round(300 * row["retain"]) * entry
    folded = next(row for row in rows if row["arm"] == "full-folded")
    assert folded["speedup"]["full-folded"] == 1 and folded["spread"]["speedup"]["full-folded"] == [1, 1]


def test_the_roofline_reads_weights_once_and_entries(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_bandwidth", lambda device: 1e6)
    found = decode.run("tiny", contexts=[300], batches=[2], retains=[0.5], repeats=1)
    weights = sum(x.nbytes for x in quick.parameters()) - 97 * 32 * 4  # the embedding table is not tied
    assert found["machine"]["weight_bytes"] == weights and found["machine"]["bandwidth"] == 1e6
    for row in found["rows"]:
        assert row["roofline"] == pytest.approx((weights + row["bytes"]) / 1e6 * 1e3)


def test_a_cell_that_does_not_fit_says_what_it_needs(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    like = form(quick, "selkv")
    weights = decode._weight_bytes(quick)
    full, half = (
        weights + decode._needed(quick, like, Cell("selkv", 300, 1, retain)) for retain in (1.0, 0.5)
    )
    monkeypatch.setattr(decode, "_memory", lambda device: int((full + half) / 2 / decode.MEMORY))
    found = decode.run("tiny", contexts=[300], batches=[1], retains=[0.5, 0.25], repeats=1)
    rows = {(row["arm"], row["retain"]): row for row in found["rows"]}
    assert {arm for (arm, _), row in rows.items() if row["status"] != "measured"} == set(ARMS[:4])
    skipped = rows["full-folded", 1.0]
    assert skipped["status"].startswith("skipped: needs ") and skipped["status"].endswith(" GiB")
    assert skipped["tokens_per_s"] is None and set(skipped) == set(rows["selkv", 0.5])
    assert rows["selkv", 0.5]["speedup"] == {}  # nothing to compare with
    assert "skipped: needs" in decode.text(found)


@pytest.mark.parametrize("arm", ["stock-eager", "stock-sdpa", "full", "selkv"])
def test_the_parts_of_a_step_are_timed_where_they_happen(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    """On a clock that only the parts move: a storing costs 1, attending 10, an output projection 100."""
    model, clock = tiny("llama", torch.float32), [0.0]
    monkeypatch.setattr(decode, "_now", lambda device: clock[0])

    def costs(seconds: float, call: Any) -> Any:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return call(*args, **kwargs)

        return slowed

    made = filled_cache(
        model, Cell(arm, 300, 2, 0.5), filled(form(model, "full"), 300, 150 if arm == "selkv" else 300)
    )
    decode._bytes_held(made)
    if arm.startswith("stock"):
        monkeypatch.setattr(DynamicCache, "update", costs(1, DynamicCache.update))
    else:
        monkeypatch.setattr(Rows, "append", costs(1, Rows.append))
    softmax, sdpa = torch.nn.functional.softmax, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "softmax", costs(10, softmax))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", costs(10, sdpa))
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn.o_proj, "forward", costs(100, layer.self_attn.o_proj.forward))
    with torch.inference_mode():
        for _ in range(2):
            with timed_parts(model, made) as parts:
                model(torch.tensor([[5], [6]]), cache=made)
            assert dict(parts) == {"append": 3, "attention": 30}
        assert clock[0] == 2 * 333
        model(torch.tensor([[5], [6]]), cache=made)  # nothing is watched any more
        assert dict(parts) == {"append": 3, "attention": 30}
    assert "update" not in vars(made)
    assert not any(layer.self_attn.o_proj._forward_pre_hooks for layer in model.model.layers)


def test_growing_counts_with_its_share(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's copy takes 8 s here; three layers grow once in the 256 steps of a block."""
    model = tiny("llama", torch.float32)
    made = filled_cache(model, Cell("snapkv", 300, 1, 0.5), filled(form(model, "snapkv"), 300, 150))
    decode._bytes_held(made)
    ticks = iter([1.0, 9.0])
    monkeypatch.setattr(decode, "_now", lambda device: next(ticks))
    assert decode._growth(made, model.device) == 3 * 8 / 256
    assert made.compressed_layers()[-1].rows.keys.shape[2] == 512
    stock = filled_cache(model, Cell("stock-sdpa", 300, 1, 1.0), filled(form(model, "full"), 300, 300))
    assert decode._growth(stock, model.device) == 0


def test_peak_memory_is_what_was_taken_on_top() -> None:
    with decode._peak(torch.device("cpu")) as peak:
        torch.ones(20_000_000)
    if peak[0] is not None:  # the system tells
        assert 0.9 * 8e7 < peak[0] < 2 * 8e7
    with decode._peak(torch.device("cpu")) as less:
        torch.ones(5_000_000)
    assert peak[0] is None or (less[0] is not None and 0.9 * 2e7 < less[0] < 5e7)


# --- the command


def test_it_is_a_table_for_people_and_json_for_programs(
    quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = decode.run("tiny", contexts=[300], batches=[1], retains=[0.5], repeats=1)
    found["rows"][0]["peak_bytes"] = None
    lines = decode.text(found).splitlines()
    assert len(lines) == 1 + 2 + 1 + 7 and lines[4].split()[0] == "stock-eager" and "–" in lines[4]
    asked: dict[str, Any] = {}
    monkeypatch.setattr(decode, "run", lambda model, **given: asked.update(given) or found)
    command = ["bench", "decode", "--context", "300", "600", "--batch", "2", "--retain", "0.5", "0.1"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    assert (asked["contexts"], asked["batches"], asked["retains"]) == ([300, 600], [2], [0.5, 0.1])
    assert main([*command, "--json", str(tmp_path / "decode.json")]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert json.loads((tmp_path / "decode.json").read_text())["rows"][0]["arm"] == "stock-eager"


def test_a_file_that_cannot_be_written_is_said_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(decode, "run", lambda *_, **__: pytest.fail("measured first"))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "decode", "--json", str(tmp_path / "nowhere" / "f.json")])
    assert stopped.value.code == 2 and "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "1.5", "x", "nan"])
def test_a_share_is_above_0_and_at_most_1(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "decode", "--retain", wrong])
    assert stopped.value.code == 2 and wrong in capsys.readouterr().err
