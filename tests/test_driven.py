"""Driven methods: asymkv and the released KVSlimmer against naive loops over a forward pass written out here.

The naive forward shares no code with the package: the model's own blocks, and an attention function over explicit past
keys, through which autograd gives the gradient.  It has no cache, so sliding-window layers get their whole raw past and
a mask.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import build_tiny
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import kvrepro
from kvrepro import UserError, make_cache, prefill
from kvrepro.evaluate import NamedArm, evaluate
from kvrepro.methods import make, method_class
from kvrepro.tasks.base import Sample

N = 46
ARMS = tuple(method_class("kvslimmer-released").arms)
DRIVEN = ("asymkv", "asymkv/released", "kvslimmer-released")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def model_of(architecture: str) -> Any:
    """A tiny float64 model; where transformers computes rotary angles in float32, here they are exact.

    Contracted positions rest on distances alone, which float32 angles keep to 1e-7 only.
    """
    model = build_tiny(architecture)
    rotary = model.model.rotary_emb
    if hasattr(rotary, "inv_freq"):
        frequency = rotary.inv_freq.double()

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angle = (position_ids[..., None].double() * frequency).repeat(1, 1, 2)
            return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        rotary.forward = forward
    return model


def tolerance(architecture: str) -> float:
    """Gemma's norms (and Gemma 2's stock softmax) compute in float32 whatever the model's dtype."""
    return 1e-5 if architecture.startswith("gemma") else 1e-10


def prompt(n: int = N, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (1, n), generator=torch.Generator().manual_seed(seed))


# --- The naive forward


@dataclass
class Past:
    """What the naive attention attends to, by layer index, and what it saw."""

    keys: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, P, D]
    values: dict[int, Tensor] = field(default_factory=dict)
    bias: dict[int, Tensor] = field(default_factory=dict)  # [Hkv, P]
    moved: dict[int, Any] = field(default_factory=dict)  # where the chunk stands, and where it should
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # k, v, p of the chunk


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def past_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """softmax(q·k·scaling + bias) over explicit past and chunk, the soft cap and the window included."""
    past: Past = module.naive_past
    index, (heads, size) = module.layer_idx, query.shape[1:3]
    group = heads // key.shape[1]
    if index in past.moved:  # the model rotated to true positions; this layer's slots have others
        (cos, sin), (new_cos, new_sin) = past.moved[index]
        query, key = (turn(turn(x, cos, -sin), new_cos, new_sin) for x in (query, key))
    keys, values = key[0], value[0]
    bias = torch.zeros(*key.shape[1:3], dtype=key.dtype)
    if index in past.keys:
        keys = torch.cat([past.keys[index], keys], 1)
        values = torch.cat([past.values[index], values], 1)
        bias = torch.cat([past.bias[index], bias], 1)
    logits = query[0] @ keys.repeat_interleave(group, 0).transpose(1, 2) * kwargs["scaling"]
    cap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logits = logits + bias.repeat_interleave(group, 0)[:, None]
    before = keys.shape[1] - size
    distance = torch.arange(size)[:, None] + before - torch.arange(keys.shape[1])
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    p = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    past.seen[index] = key[0].detach(), value[0].detach(), p.detach()
    return (p @ values.repeat_interleave(group, 0)).transpose(0, 1)[None], None


AttentionInterface.register("naive-past", past_attention)
AttentionMaskInterface.register("naive-past", lambda *args, **kwargs: None)


class Naive:
    """A tiny model whose compressible layers attend to a past that is given to them."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.ids = ids
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("naive-past")
        kinds = (
            getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
        )
        self.whole = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self.sliding: dict[
            int, tuple[Tensor, Tensor, Tensor]
        ] = {}  # raw keys and values of all tokens so far
        self.logits = torch.empty(0)

    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """cos and sin of each compressible layer, far beyond the prompt."""
        rotary = self.model.model.rotary_emb
        extra = {"layer_type": "full_attention"} if self.model.config.model_type == "gemma3_text" else {}
        cos, sin = rotary(torch.empty(0, dtype=torch.float64), torch.arange(400)[None], **extra)
        return [(cos[0].numpy(), sin[0].numpy())] * len(self.whole)

    def look(
        self, layers: Any, start: int, stop: int, position: list[int] | int, gradient: bool
    ) -> list[naive.Layer]:
        """See ``naive.Look``; where positions contract, each layer's queries stand at a place of their own."""
        store = Past()
        size = stop - start
        for index in range(len(self.model.model.layers)):
            self.model.model.layers[index].self_attn.naive_past = store
        for index, held in self.sliding.items():
            store.keys[index], store.values[index] = held[0][:, :start], held[1][:, :start]
            store.bias[index] = torch.zeros(held[0].shape[0], start, dtype=torch.float64)
        for slot, index in enumerate(self.whole if layers is not None else []):
            store.keys[index], store.values[index], store.bias[index] = map(torch.as_tensor, layers[slot])
            store.keys[index] = store.keys[index].clone().requires_grad_(gradient)
        for slot, place in enumerate(position if isinstance(position, list) else []):
            tables = [torch.as_tensor(table) for table in self.tables()[slot]]
            store.moved[self.whole[slot]] = tuple(
                tuple(table[at : at + size] for table in tables) for at in (start, place)
            )
        places = torch.arange(start, stop)[None]
        with torch.set_grad_enabled(gradient):
            self.logits = self.model(self.ids[:, start:stop], position_ids=places, use_cache=False).logits[0]
        gradients: list[Any] = [None] * len(self.whole)
        if gradient:
            log_p = self.logits.log_softmax(-1)
            loss = -sum(log_p[t, self.ids[0, start + t + 1]] for t in range(size)) / size
            loss.backward()
            gradients = [store.keys[index].grad.numpy() for index in self.whole]
        for index in set(store.seen) - set(self.whole):
            k, v, p = store.seen[index]
            old = self.sliding.get(index, (k[:, :0], v[:, :0], p))
            self.sliding[index] = (
                torch.cat([old[0][:, :start], k], 1),
                torch.cat([old[1][:, :start], v], 1),
                p,
            )
        return [
            naive.Layer(*(x.numpy() for x in store.seen[index]), gradients[slot])
            for slot, index in enumerate(self.whole)
        ]

    def last(self, held: list[Any], position: Any) -> Tensor:
        """Logits [V] of the prompt's last token over the layers' slots."""
        layers = [(x["keys"], x["values"], x["bias"]) for x in held]
        n = self.ids.shape[1]
        self.look(layers if layers[0][0].shape[1] else None, n - 1, n, position, False)
        return self.logits[-1].detach()


# --- Equal to the naive loops


def driven(model: Any, ids: Tensor, method: Any, **budget: Any) -> tuple[Any, list[Any], Tensor]:
    """The cache after the drive, a copy of what its layers held, and the logits [V] of the last token."""
    wanted = {name: weight.requires_grad for name, weight in model.named_parameters()}
    cache = make_cache(model, method, **budget)
    prefill(model, cache, ids)
    held = copy.deepcopy([layer.prompt[0].entries for layer in cache.compressed_layers()])
    assert cache.get_seq_length() == ids.shape[1] - 1
    with torch.no_grad():
        logits = model(ids[:, -1:], cache=cache).logits[0, -1]
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == wanted
    assert all(weight.grad is None for weight in model.parameters())
    lines = [line for line in cache.report() if line["method"] != "sliding-window"]
    assert all(line["entries"] == line["m"] and line["seen"] == ids.shape[1] for line in lines)
    return cache, held, logits


def check(entries: Any, expected: Any, within: float) -> None:
    heads = entries.kv_heads
    assert np.array_equal(
        entries.positions.expand(heads, -1), np.broadcast_to(expected["positions"], (heads, len(entries)))
    )
    for name in ("keys", "values"):
        assert np.abs(getattr(entries, name).numpy() - expected[name]).max() < within, name
    bias = torch.zeros(heads, len(entries)) if entries.bias is None else entries.bias
    assert np.abs(bias.numpy() - expected["bias"]).max() < within


ASYMKV = [
    ("llama", {"retain": 0.4}, {}), ("llama", {"retain": 0.2}, {"chunk": 7, "sinks": 1}), ("llama-mha", {"retain": 0.3}, {}),
    ("qwen3", {"retain": 0.4}, {}), ("gemma2", {"retain": 0.4}, {}), ("gemma3", {"retain": 0.3}, {}),
    ("llama", {"budget": 3}, {}), ("llama", {"budget": 2}, {}), ("gemma3", {"budget": 45}, {}),
    ("llama", {"retain": 0.4}, {"values": "as-key"}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "budget", "settings"), ASYMKV)
def test_asymkv(architecture: str, budget: dict[str, Any], settings: dict[str, Any]) -> None:
    model, ids = model_of(architecture), prompt()
    cache, held, logits = driven(model, ids, make("asymkv", **settings), **budget)
    reference, m = Naive(model, ids), next(line["m"] for line in cache.report() if line["m"])
    names = {"values": {"mean": "mean-l"}.get(settings.get("values", "mean"), "as-key")}
    sizes = {key: x for key, x in settings.items() if key != "values"}
    expected = naive.asymkv(reference.look, N - 1, m - 1, reference.tables(), **sizes, **names)
    for entries, other in zip(held, expected, strict=True):
        check(entries, other, tolerance(architecture))
        assert np.array_equal(entries.mass, other["l"])
        if m > 2:
            assert entries.mass.sum(1).tolist() == [N - 1] * entries.kv_heads
    assert float((logits - reference.last(expected, N - 1)).abs().max()) < tolerance(architecture)


RELEASED = [
    ("llama", {"retain": 0.4}, {}), ("llama-mha", {"retain": 0.3}, {}), ("qwen3", {"retain": 0.4}, {}),
    ("gemma2", {"retain": 0.4}, {}), ("gemma3", {"retain": 0.3}, {}), ("llama", {"retain": 0.2}, {"chunk": 3, "sinks": 1}),
    ("llama", {"budget": 3}, {}), ("llama", {"budget": 2}, {}), ("llama", {"budget": 45}, {}),
]  # fmt: skip


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("architecture", "budget", "settings"), RELEASED)
def test_released(
    architecture: str, budget: dict[str, Any], settings: dict[str, Any], gradient: bool
) -> None:
    """The naive loop contracts positions literally: slots at cumsum(l) - l_0, queries at Σ l."""
    method = make("asymkv/released" if gradient else "kvslimmer-released", **settings)
    check_released(architecture, budget, settings, method, gradient=gradient)


SWITCHES: dict[str, dict[str, Any]] = {
    "unclamped": {"clamp": math.inf}, "no-recency": {"recency": False}, "no-smoothing": {"smoothing": False},
    "true-positions": {"true_positions": True}, "one-pass": {"one_pass": True},
}  # fmt: skip


@pytest.mark.parametrize("arm", SWITCHES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_released_with_one_deviation_switched_off(architecture: str, arm: str) -> None:
    check_released(architecture, {"retain": 0.25}, {}, make(f"kvslimmer-released/{arm}"), **SWITCHES[arm])


def check_released(
    architecture: str, budget: dict[str, Any], sizes: dict[str, int], method: Any, **options: Any
) -> None:
    model, ids = model_of(architecture), prompt()
    cache, held, logits = driven(model, ids, method, **budget)
    reference = Naive(model, ids)
    lines = [line for line in cache.report() if line["m"]]
    expected = naive.released(
        reference.look, N - 1, lines[0]["m"] - 1, reference.tables(), **sizes, **options
    )
    for entries, other, line, (cos, sin) in zip(held, expected, lines, reference.tables(), strict=True):
        moved = N - 1 - other["query"]  # RoPE knows distances only
        at = other["positions"].astype(int) + moved
        same = other | {"positions": at, "keys": naive.rotate(other["upright"], cos[at], sin[at])}
        check(entries, same, tolerance(architecture))
        assert line["mass_share"] == pytest.approx(other["l"].sum(1).mean() / (N - 1))
        assert line["tokens_held"] == pytest.approx(other["held"] / (N - 1))
    position = [x["query"] for x in expected]
    assert float((logits - reference.last(expected, position)).abs().max()) < tolerance(architecture)


def test_overlapping_pairs_lose_tokens_and_clamping_loses_mass() -> None:
    """The comparison above is of something: tokens are lost, l reaches its ceiling, positions contract."""
    cache, held, _ = driven(model_of("llama"), prompt(), "kvslimmer-released", retain=0.25)
    line = cache.report()[0]
    assert line["mass_share"] <= line["tokens_held"] < 0.8
    assert int(held[0].positions[0, 0]) > 0
    cache, held, _ = driven(model_of("llama"), prompt(90), "kvslimmer-released/no-recency", retain=0.25)
    assert max(float(entries.mass.max()) for entries in held) == 5


@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "gemma3", "gemma2"])
@pytest.mark.parametrize("budget", [{"retain": 0.4}, {"budget": 5}, {"budget": 2}])
def test_without_its_deviations_the_released_code_is_kvslimmer(
    architecture: str, budget: dict[str, Any]
) -> None:
    """kvslimmer inside the forward pass, over n - 1 tokens with m - 1 entries, and the last token behind it."""
    model, ids = model_of(architecture), prompt()
    cache, held, logits = driven(model, ids, "kvslimmer-released/as-printed", **budget)
    m = next(line["m"] for line in cache.report() if line["m"])
    plain = make_cache(model, "kvslimmer", budget=m - 1)
    with torch.no_grad():
        model(ids[:, :-1], cache=plain)
        for entries, layer in zip(held, plain.compressed_layers(), strict=True):
            other = layer.prompt[0].entries
            assert other is not None and torch.equal(
                entries.positions.expand(entries.kv_heads, -1), other.positions.expand(entries.kv_heads, -1)
            )
            for name in ("keys", "values", "mass"):
                assert float((getattr(entries, name) - getattr(other, name)).abs().max()) < tolerance(
                    architecture
                )
        assert float((model(ids[:, -1:], cache=plain).logits[0, -1] - logits).abs().max()) < tolerance(
            architecture
        )
    lines = zip(cache.report(), plain.report(), strict=True)
    for found, expected in ((a, b) for a, b in lines if a["m"]):
        for name in ("merges", "left_out", "no_mass", "denominator", "outside", "composite", "dropped_mass"):
            assert found.get(name, 0) == expected.get(name, 0), name


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "as-printed"])
def test_each_deviation_is_a_switch_of_its_own(arm: str) -> None:
    settings = method_class("kvslimmer-released").arms[arm]
    assert len(settings) == 1
    assert make("kvslimmer-released/as-printed").settings | make("kvslimmer-released").settings != settings
    _, released, _ = driven(model_of("llama"), prompt(90), "kvslimmer-released", budget=12)
    _, switched, _ = driven(model_of("llama"), prompt(90), f"kvslimmer-released/{arm}", budget=12)
    if arm == "unclamped":
        arms = [driven(model_of("llama"), prompt(90), make("kvslimmer-released", recency=False, clamp=clamp), budget=12)[1]
                for clamp in (True, False)]  # fmt: skip
        released, switched = arms
    if arm != "guarded":  # a guard changes nothing where none is needed; see the next test
        assert any(not torch.allclose(a.keys, b.keys) for a, b in zip(released, switched, strict=True))


# --- Small budgets, untouched prompts, generate()


@pytest.mark.parametrize("name", [*DRIVEN, *(f"kvslimmer-released/{arm}" for arm in ARMS)])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_budget_is_held_and_generate_goes_on(architecture: str, name: str) -> None:
    model, ids = model_of(architecture), prompt(21)
    for m in (1, 2, 3, 8, 20):
        with torch.inference_mode():
            cache = make_cache(model, name, budget=m)
            prefill(model, cache, ids)
            lines = [line for line in cache.report() if line["m"]]
            assert {line["entries"] for line in lines} == {m - 1} and {line["seen"] for line in lines} == {20}
            peak = max(line["peak_entries"] for line in lines)
            assert peak <= m - 1 + max(1, (m - 1) // 4)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=4, do_sample=False
            )
        assert out.shape == (1, 25)
        lines = [line for line in cache.report() if line["m"]]
        assert {line["entries"] for line in lines} == {m + 3} and {line["seen"] for line in lines} == {24}


@pytest.mark.parametrize("name", DRIVEN)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "mistral"])
@pytest.mark.filterwarnings("ignore:every layer of this model has a sliding window")
def test_untouched_prompts_are_bit_identical(architecture: str, name: str) -> None:
    stock = build_tiny(architecture, attn_implementation="eager" if architecture == "gemma2" else "sdpa")
    model, ids = build_tiny(architecture), prompt(30)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True}  # fmt: skip
    cache = make_cache(model, name, budget=30)
    prefill(model, cache, ids)
    assert cache.get_seq_length() == 0
    found, expected = model.generate(ids, cache=cache, **options), stock.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
    lines = [line for line in cache.report() if line["m"]]
    assert all(line["untouched"] for line in lines)
    if not lines:
        return
    cache = make_cache(model, name, budget=30)
    prefill(model, cache, ids)
    with pytest.raises(UserError, match=r"kvrepro\.prefill"):  # a longer prompt than the one that was shown
        model.generate(prompt(31), cache=cache, max_new_tokens=2)


def test_bad_requests_are_one_clear_line() -> None:
    model = model_of("llama")
    cache = make_cache(model, "asymkv", retain=0.5)
    for ids in (prompt().expand(2, -1), prompt()[0], prompt()[:, :0]):
        with pytest.raises(UserError, match=r"\[1, n\]") as caught:
            prefill(model, cache, ids)
        assert "\n" not in str(caught.value)
    prefill(model, cache, prompt())
    with pytest.raises(UserError, match="holds a prompt already"):
        prefill(model, cache, prompt())
    cache.reset()
    with pytest.raises(UserError, match=r"kvrepro\.prefill"):
        model.generate(prompt(), cache=cache, max_new_tokens=2)
    prefill(model, cache, prompt())
    assert cache.get_seq_length() == N - 1
    with torch.inference_mode():
        made = build_tiny("llama")
    with pytest.raises(UserError, match="inference_mode"):
        prefill(made, make_cache(made, "asymkv", retain=0.5), prompt())


def test_a_failed_drive_leaves_an_empty_cache_and_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    cache = make_cache(model, "asymkv", retain=0.5)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            prefill(model, cache, prompt())
    assert cache.get_seq_length() == 0 and all(weight.requires_grad for weight in model.parameters())
    prefill(model, cache, prompt())
    assert {line["entries"] for line in cache.report()} == {22}


@pytest.mark.parametrize("name", DRIVEN)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_marks_joins_and_copies_work_as_for_a_chunked_cache(architecture: str, name: str) -> None:
    model, ids, more = model_of(architecture), prompt(), prompt(4, seed=1)
    with torch.inference_mode():
        cache = make_cache(model, name, retain=0.4)
        prefill(model, cache, ids)
        mark, twin = cache.mark(), copy.deepcopy(cache)
        first = model(ids[:, -1:], cache=cache).logits
        assert torch.equal(model(ids[:, -1:], cache=twin).logits, first)
        cache.rewind(mark)
        assert cache.get_seq_length() == N - 1
        again = model(
            torch.cat([ids[:, -1:], more], 1), cache=cache
        ).logits  # the last token and a question at once
        assert float((again[:, :1] - first).abs().max()) < tolerance(architecture)
        chunked = make_cache(model, "kvslimmer", retain=0.25)
        model(ids, cache=chunked)
        joined = kvrepro.KVCache.join([chunked, twin])
        together = model(more.expand(2, -1), cache=joined).logits
    assert float((together[1] - again[0, 1:]).abs().max()) < tolerance(architecture)
    lines = [line for line in joined.report() if line["m"]]
    assert {line["entries"] - line["m"] for line in lines} == {4} and {line["seen"] for line in lines} == {
        N + 4
    }


class Letters:
    """A tokenizer of one token a letter, without a chat template."""

    chat_template = bos_token_id = None
    eos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [(ord(letter) - 31) % 97 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 31) for token in ids)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_harness_runs_driven_arms(architecture: str) -> None:
    model = build_tiny(architecture, dtype=torch.float32)
    model.generation_config.eos_token_id = [1]
    sample = Sample("s/0", "s", "code", "the quick brown fox " * 5, ("jumps over",), "exact", 4, False, False)
    arms = [NamedArm("full", 1.0), NamedArm("snapkv", 0.25), *(NamedArm(name, 0.25) for name in DRIVEN)]
    records = {record["arm"]: record for record in evaluate(model, Letters(), sample, arms, 4096)}
    for name in DRIVEN:
        record = records[name]
        assert record["budget"] == 25 and record["kept_entries"] == pytest.approx(0.25)
        assert math.isfinite(record["kl"]) and record["kl"] > 0
        assert 0 < record["diagnostics"]["tokens_held"] <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_asymkv_stays_finite_in_half_precision(architecture: str, dtype: torch.dtype) -> None:
    model, ids = build_tiny(architecture, dtype), prompt(80)
    cache = make_cache(model, "asymkv", retain=0.3)
    prefill(model, cache, ids)
    with torch.no_grad():
        assert model(ids[:, -1:], cache=cache).logits.isfinite().all()
    assert all(line["m"] is None or line["mass_share"] == 1 for line in cache.report())
