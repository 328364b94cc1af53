"""What decoding does on a GPU, proven on the CPU: the arithmetic against loops, the calls on tensors without numbers, the
benches on tiny shapes.  Tests marked `gpu` take the real device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvrepro import attention, costs, tasks
from kvrepro.attention import BIASED, attend, attend_channels, attend_in_parts, with_channels
from kvrepro.cli import main
from kvrepro.errors import UserError
from kvrepro.measure import decode, kernels, prefill, shaped, slimmer
from kvrepro.tasks.prompts import encode

SCALING = 0.35
HEADS = {"gqa": (6, 2), "mha": (3, 3), "mqa": (4, 1)}
TINY = costs.Shape(2, 32, 4, 2, 8, 64, 300)


def channels(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    return attend_channels(query, *with_channels(keys, values, bias), scaling)


def in_three(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    return attend_in_parts(query, keys, values, bias, scaling, 3)


CANDIDATES = {**BIASED, "parts": in_three, "channel": channels}


def given(shape: str, n: int, dtype: torch.dtype, bias: str, d: int = 8) -> tuple[Tensor, ...]:
    """Folded query [3, Hkv, G, D], keys, values [3, Hkv, n, D], bias [3, Hkv or 1, n] as a merging method leaves it."""
    heads, kv_heads = HEADS[shape]
    query, keys, values = (
        torch.randn(3, kv_heads, length, d).to(dtype) for length in (heads // kv_heads, n, n)
    )
    log = torch.rand(3, kv_heads if bias == "per-head" else 1, n, dtype=torch.float64) * 10
    log[:, :, ::3] = 0  # raw tokens
    if bias == "with holes":
        log[0, :, : n // 2 + 2] = -torch.inf  # a whole part, and some of the next one
        log[1, :, :-1] = -torch.inf
    return query, keys, values, log.to(torch.promote_types(dtype, torch.float32))  # as Rows keeps it


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("n", [150, 151])
@pytest.mark.parametrize("bias", ["shared", "per-head", "with holes"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)],
)
@pytest.mark.parametrize("kernel", CANDIDATES)
def test_every_kernel_is_a_loop_over_entries(
    kernel: str, shape: str, n: int, bias: str, dtype: torch.dtype, tolerance: float
) -> None:
    query, keys, values, extra = given(shape, n, dtype, bias)
    found = CANDIDATES[kernel](query, keys, values, extra, SCALING)
    assert found.shape == query.shape and found.dtype == dtype
    for row in range(3):
        for head in range(keys.shape[1]):
            own = extra[row].expand(keys.shape[1], -1)[head].double().numpy()
            for g in range(query.shape[2]):
                logits = (keys[row, head].double() @ query[row, head, g].double() * SCALING).numpy()
                expected = naive.softmax(logits + own) @ values[row, head].double().numpy()
                assert abs(found[row, head, g].double().numpy() - expected).max() < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [SCALING, 128**-0.5, 0.0625])
def test_channels_keep_what_a_mask_in_16_bits_loses(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scaling: float
) -> None:
    """The logit that the channels add is the bias within 2^-15 of it; the mask's is off by up to 2^-9 (2^-12)."""
    query, keys, values, bias = given("gqa", 500, dtype, "per-head")
    kernel, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query: Tensor, keys: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append((query, keys))
        return kernel(query, keys, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    channels(query, keys, values, bias, scaling)
    ((longer, wider),) = seen
    assert wider.shape[-1] == keys.shape[-1] + 8 and not wider[..., -5:].any()
    added = longer[..., 8:].double() @ wider[..., 8:].double().transpose(2, 3) * scaling
    lost = (added - bias[:, :, None]).abs() / bias[:, :, None].clamp(min=1e-9)
    assert lost.max() < 2**-15 and added[..., ::3].abs().max() == 0
    mask = ((bias.to(dtype) - bias).abs() / bias.clamp(min=1e-9)).max()
    assert mask > 8 * lost.max()


def test_what_is_missing_weighs_nothing_in_channels() -> None:
    """Also beside logits far below the others, where 0 · inf would be nan."""
    query, keys, values, bias = given("gqa", 40, torch.bfloat16, "with holes")
    values[0, :, :22], values[1, :, :-1] = 1e4, 1e4
    for low in (1.0, 20.0):
        out = channels(query * low, keys, values, bias, SCALING)
        assert out.isfinite().all() and out[:2].abs().max() < 10


def test_parts_begin_where_the_kernel_reads_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, seen = attention._flash_on_cpu, []

    def watched(query: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append((keys, rest[-1]))
        return kernel(query, keys, *rest)

    monkeypatch.setattr(attention, "_flash_on_cpu", watched)
    query, keys, values, bias = given("gqa", 1403, torch.bfloat16, "per-head")
    attend_in_parts(query, keys, values, bias, SCALING, 5)
    assert [(part.shape[1], part.shape[2]) for part, _ in seen] == [(5, 272), (1, 43)]
    for part, mask in seen:
        assert part.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()  # a view
        assert mask.dtype == torch.bfloat16 and mask.data_ptr() % 16 == 0
        steps = [step for step, size in zip(mask.stride(), mask.shape, strict=True) if size > 1]
        assert steps[-1] == 1 and all(step % 8 == 0 for step in steps[:-1])


def test_parts_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )
    counts = {(8, 32768): 33, (64, 32768): 5, (8, 1000): 3, (8, 100): 1, (400, 32768): 1}
    for (heads, n), parts in counts.items():
        assert attention.parts_on_cuda(heads, n, torch.device("cuda")) == parts


# --- the calls, on tensors that have no numbers and are not the CPU's


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Query [2, 8, 1, 64], keys, values [2, 2, 900, 64], bias [2, 1, 900]."""
    monkeypatch.setattr(attention, "parts_on_cuda", lambda *_: 3)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    query, keys = torch.empty(2, 8, 1, 64, **kind), torch.empty(2, 2, 1024, 64, **kind)[:, :, :900]
    return query, keys, torch.empty_like(keys), torch.zeros(2, 1, 900, device="meta")


@pytest.mark.parametrize("kernel", ["masked", "parts"])
def test_decoding_with_a_bias_takes_the_chosen_kernel(
    claimed: Any, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    query, keys, values, bias = claimed
    calls: list[str] = []

    def counted(name: str, call: Any) -> Any:
        def wrapped(*given: Tensor) -> Tensor:
            calls.append(name)
            return call(*given)

        return wrapped

    for name, call in BIASED.items():
        monkeypatch.setitem(BIASED, name, counted(name, call))
    monkeypatch.setattr(attention, "ON_CUDA", kernel)
    out = attend(query, keys, values, bias, SCALING)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, query.dtype, "meta")
    assert calls == [kernel]
    attend(query, keys, values, None, SCALING)
    attend(query, keys, values, bias, SCALING, 30.0)
    attend(query.expand(-1, -1, 3, -1), keys, values, bias, SCALING)
    assert calls == [kernel]  # no bias, a soft cap, several new tokens: as before
    attend(query, keys.requires_grad_(), values, bias, SCALING)
    assert calls == [kernel, "masked"]


def test_the_default_is_one_that_can_be_chosen() -> None:
    assert attention.ON_CUDA in BIASED


def test_channels_ask_for_a_flash_kernel(claimed: Any) -> None:
    query, keys, values, bias = claimed
    out = channels(attention.fold(query, 2), keys, values, bias, SCALING)
    assert (out.shape, out.dtype, out.device.type) == ((2, 2, 4, 64), torch.bfloat16, "meta")


def test_flex_compiles_once_a_batch_and_not_for_every_length() -> None:
    """On the way that CUDA takes, without generating code."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def as_it_is(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention._flexed, backend=as_it_is)
    for batch, n in [(1, 70), (1, 71), (1, 90), (4, 70), (4, 71), (8, 70), (8, 99), (1, 72)]:
        query, keys = torch.randn(batch, 2, 4, 16), torch.randn(batch, 2, 256, 16)[:, :, :n]
        bias = torch.rand(batch, 1, 256)[:, :, :n].expand(-1, 2, -1)
        attention.mark_for_flex(query, keys, keys, bias)
        with torch.inference_mode():
            out = compiled(query, keys, keys, bias, SCALING)
        logits = query @ keys.transpose(2, 3) * SCALING + bias[:, :, None]
        assert (out - logits.softmax(-1) @ keys).abs().max() < 1e-5
    assert len(graphs) == 3
    torch._dynamo.reset()


# --- shapes


@pytest.mark.parametrize("name", costs.SHAPES)
def test_a_shape_is_the_papers_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shaped.config_of(name))
    shape = costs.SHAPES[name]
    assert model.num_parameters() == shape.parameters
    attention_, config = model.model.layers[0].self_attn, model.config
    assert attention_.head_dim == shape.head_dim and config.num_key_value_heads == shape.kv_heads
    assert attention_.scaling == pytest.approx(shape.head_dim**-0.5)
    assert getattr(config, "sliding_window", None) is None or name == "gemma-2-9b" or "qwen2" in name
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    assert kinds == {"full_attention"} or name == "gemma-2-9b"


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(costs.SHAPES, "llama-3.1-8b", TINY)
    monkeypatch.setattr(decode, "READ", 1000)
    monkeypatch.setattr(decode, "STEPS", (2, 2))


def test_a_random_model_decodes_and_prefills_text(tiny_shape: None) -> None:
    model, tokenizer = shaped.load("shape:llama-3.1-8b")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.num_parameters() == TINY.parameters and model.lm_head.weight.std() > 0.01
    again = shaped.load("shape:llama-3.1-8b")[0]
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    text = "Grüße, 世界\n  x = 1"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and max(ids) < 256 and tokenizer.decode(ids) == text
    found = decode.run("shape:llama-3.1-8b", contexts=[300], batches=[1, 2], retains=[0.25], repeats=1)
    assert {row["status"] for row in found["rows"]} == {"measured"} and len(found["rows"]) == 14
    assert found["machine"]["model"] == "shape:llama-3.1-8b" and found["machine"]["dtype"] == "bfloat16"
    sample = tasks.load("needle-single", 1, 1024)[0]
    prompt = torch.tensor([encode(tokenizer, sample, 1024).input_ids])
    assert 1024 <= prompt.shape[1] < 1100 and prompt.max() < 256
    whole, compression = prefill._once(model, prompt, "selkv", 0.25)
    assert whole > compression > 0
    for arm in slimmer.ARMS:  # asymkv differentiates through it
        answer = slimmer.measure(
            "shape:llama-3.1-8b", "cpu", None, prompt[0, :700].tolist(), torch.tensor([5, 6]), arm, 160, 64
        )[2]
        assert answer.shape == (1, 2, 300) and answer.isfinite().all()


def test_what_has_no_shape_or_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there are longchat-7b, llama"):
        shaped.load("shape:llama-9")
    with pytest.raises(UserError, match="unknown device"):
        shaped.load("shape:llama-3.1-8b", device="tpu")
    monkeypatch.setattr("kvrepro.models._free", lambda device: {"cpu": 2**30})
    with pytest.raises(UserError, match=r"needs 15\.0 GiB"):
        shaped.load("shape:llama-3.1-8b")


def test_a_shape_is_given_in_a_models_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def seen(name: str, **_: Any) -> Any:
        asked.append(name)
        raise UserError("enough")

    monkeypatch.setattr(decode, "run", seen)
    monkeypatch.setattr(prefill, "run", seen)
    for command in ("decode", "prefill"):
        assert main(["bench", command, "--shape", "qwen2-7b"]) == 2
    assert main(["bench", "decode"]) == 2
    assert asked == ["shape:qwen2-7b", "shape:qwen2-7b", "smollm2-135m"]


# --- the bench of kernels


def test_kernels_are_compared_on_growing_entries(
    tiny_shape: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths: list[int] = []
    masked = BIASED["masked"]

    def watched(query: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        lengths.append(keys.shape[2])
        return masked(query, keys, *rest)

    monkeypatch.setitem(BIASED, "masked", watched)
    monkeypatch.setattr(kernels, "CALLS", 2)
    to = tmp_path / "kernels.json"
    command = [
        "bench",
        "kernels",
        "--context",
        "400",
        "--batch",
        "1",
        "2",
        "--repeats",
        "2",
        "--json",
        str(to),
    ]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(to.read_text())
    assert [row["kernel"] for row in found["rows"]] == ["masked", "parts", "flex", "channel", "unbiased"] * 2
    assert len(lines) == 1 + 2 * (3 + 5)
    for row in found["rows"]:
        assert row["status"] == "measured" and row["entries"] == 100 and row["error"] < 0.02
        assert row["microseconds"] > 0 and row["to_masked"] > 0
        low, high = row["spread"]["to_masked"]
        assert low <= row["to_masked"] <= high
        assert (row["backend"] is not None) == (row["kernel"] in ("masked", "unbiased"))
    assert lengths == [*range(100, 108)] * 2  # warm-up, then two turns: never twice the same


def test_a_kernel_that_cannot_be_had_is_said_and_the_others_run(
    tiny_shape: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.\nmore of it")

    monkeypatch.setitem(BIASED, "flex", refuses)
    found = kernels.run(contexts=[200], batches=[1], repeats=1, dtype="float32")
    rows = {row["kernel"]: row for row in found["rows"]}
    assert rows["flex"]["status"] == "not possible: No available kernel. Aborting execution."
    assert rows["flex"]["microseconds"] is None and rows["channel"]["error"] < 1e-5
    assert "not possible" in kernels.text(found)
    with pytest.raises(UserError, match="no shape"):
        kernels.run("llama-9")


# --- the real device


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CANDIDATES)
@pytest.mark.parametrize("bias", ["shared", "per-head", "with holes"])
@pytest.mark.parametrize("d", [64, 128])
def test_every_kernel_on_cuda(kernel: str, bias: str, d: int) -> None:
    scaling = 1 / math.sqrt(d)
    query, keys, values, extra = (x.cuda() for x in given("mqa", 5003, torch.bfloat16, bias, d))
    for n in (4999, 5000, 5003):
        k, v, b = keys[:, :, -n:], values[:, :, -n:], extra[:, :, -n:].contiguous()
        found = CANDIDATES[kernel](query, k, v, b, scaling)
        logits = query.double() @ k.double().transpose(2, 3) * scaling + b[:, :, None]
        assert (found - logits.softmax(-1) @ v.double()).abs().max() < 0.03


@pytest.mark.gpu
def test_the_benches_on_cuda(tiny_shape: None) -> None:
    found = kernels.run(contexts=[4096], batches=[1, 4], repeats=1, device="cuda")
    assert {row["status"] for row in found["rows"]} == {"measured"}
    assert all(row["error"] < 0.03 for row in found["rows"])
    rows = decode.run("shape:llama-3.1-8b", contexts=[300], batches=[2], repeats=1, device="cuda")["rows"]
    assert {row["status"] for row in rows} == {"measured"} and all(row["peak_bytes"] > 0 for row in rows)
