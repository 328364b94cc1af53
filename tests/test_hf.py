"""The cache under ``generate()``: bit-identical where nothing is dropped, a naive reference where something is.

The stock twin of a tiny model has the same weights and sdpa (eager for Gemma 2, whose soft cap sdpa does not know).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import naive
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, build_tiny
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvrepro
from kvrepro import KVCache, UserError, hf, make_cache
from kvrepro.attention import Observed
from kvrepro.entries import BLOCK, Entries
from kvrepro.hf import Arm, CompressedLayer
from kvrepro.methods import Budget, Method, StreamingLLM, make

ONE_SHOT = ("full-folded", "streaming-llm", "streaming-llm/reindexed", "snapkv", "selkv", "selkv/evict",
            "selkv/merge-all+ratio", "selkv/reposition")  # fmt: skip
METHODS = (*ONE_SHOT, "kvslimmer")
GLOBAL = [name for name in ARCHITECTURES if name != "mistral"]  # the tiny Mistral has a window on every layer


@pytest.fixture(autouse=True)
def _one_thread_and_no_grad() -> Iterator[None]:
    """Models this small only lose by sharing their work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@functools.cache
def model_of(architecture: str, dtype: torch.dtype = torch.float64) -> Any:
    return build_tiny(architecture, dtype)


@functools.cache
def stock_of(architecture: str, dtype: torch.dtype = torch.float64) -> Any:
    return build_tiny(
        architecture, dtype, attn_implementation="eager" if architecture == "gemma2" else "sdpa"
    )


def tokens(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths: input_ids and attention_mask [B, longest]."""
    longest, generator = max(lengths), torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (len(lengths), longest), generator=generator)
    mask = torch.stack([torch.arange(longest) >= longest - n for n in lengths]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def row(batch: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """One row without its padding."""
    own = batch["attention_mask"][b].bool()
    return {name: x[b : b + 1, own] for name, x in batch.items()}


def repeated(batch: dict[str, Tensor], times: int) -> dict[str, Tensor]:
    return {name: x.expand(times, -1) for name, x in batch.items()}


def followed(first: dict[str, Tensor], *more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([x, *(m[name] for m in more)], 1) for name, x in first.items()}


def generate(
    model: Any, batch: dict[str, Tensor], cache: Any = None, new: int = 5, **more: Any
) -> tuple[Tensor, Tensor]:
    """New tokens [B, new] and their logits [B, new, V]; greedy unless said otherwise."""
    options = {
        "max_new_tokens": new,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        **more,
    }
    exact: list[Tensor] = []  # generate() itself casts its logits to float32
    hook = model.lm_head.register_forward_hook(lambda module, args, out: exact.append(out[:, -1]))
    try:
        out = model.generate(**batch, cache=cache, **options)
    finally:
        hook.remove()
    logits = torch.stack(exact[-len(out.logits) :] if model.dtype == torch.float64 else out.logits, 1)
    return out.sequences[:, batch["input_ids"].shape[1] :], logits


def forward(model: Any, batch: dict[str, Tensor], cache: KVCache) -> Tensor:
    """Logits [B, t, V] of the last tokens, those that ``cache`` has not seen."""
    past = cache.get_seq_length()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)[:, past:]
    return model(input_ids=batch["input_ids"][:, past:], attention_mask=batch["attention_mask"], position_ids=positions,
                 cache=cache, use_cache=True).logits  # fmt: skip


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


# --- Nothing dropped: the untouched model, bit for bit


def passing(n: int) -> list[tuple[str, dict[str, Any]]]:
    """Caches under which a prompt of n < 32 tokens passes through: full, full budgets, and shorter than the window."""
    names = ("streaming-llm", "snapkv", "selkv", "kvslimmer")
    everything = [(name, {"retain": 1.0}) for name in names]
    ample = [(name, {"budget": n + 3}) for name in names]
    return [("full", {}), ("full", {"retain": 0.1}), *everything, *ample, ("snapkv", {"retain": 0.25}),
            ("selkv", {"retain": 0.25}), ("snapkv", {"budget": 1})]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(30,), (21, 30, 9)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untouched_prompts_are_bit_identical(
    architecture: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch = tokens(*lengths)
    expected = generate(stock_of(architecture, dtype), batch, new=4)
    for name, budget in passing(max(lengths)):
        cache = make_cache(model_of(architecture, dtype), name, **budget)
        found = generate(model_of(architecture, dtype), batch, cache, new=4)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), (name, budget)
        assert all(line["untouched"] for line in cache.report())


def test_bit_identical_over_more_than_a_block_of_new_tokens() -> None:
    batch = tokens(20, 40)
    expected = generate(stock_of("qwen3", torch.float32), batch, new=270)
    cache = make_cache(model_of("qwen3", torch.float32), "full")
    found = generate(model_of("qwen3", torch.float32), batch, cache, new=270)
    assert torch.equal(found[1], expected[1])
    rows = cache.compressed_layers()[0].rows
    assert rows is not None and rows.keys.shape[2] == 2 * BLOCK


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_follow_up_turns_on_an_untouched_cache_are_bit_identical(architecture: str) -> None:
    """A question of several tokens, left padded in one row, on a cache that dropped nothing."""
    dtype = torch.float32
    turns = [tokens(21, 30), tokens(7, 4, seed=1)]
    whole, caches = followed(*turns), (make_cache(model_of(architecture, dtype), "full"),
                                       DynamicCache(config=stock_of(architecture, dtype).config))  # fmt: skip
    for model, cache in zip(
        (model_of(architecture, dtype), stock_of(architecture, dtype)), caches, strict=True
    ):
        forward(model, turns[0], cache)
    logits = [
        forward(m, whole, c)
        for m, c in zip((model_of(architecture, dtype), stock_of(architecture, dtype)), caches)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("architecture", GLOBAL)
def test_full_folded_is_within_rounding(architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    batch = tokens(40)
    expected = generate(stock_of(architecture, dtype), batch)
    cache = make_cache(model_of(architecture, dtype), "full-folded")
    found = generate(model_of(architecture, dtype), batch, cache)
    if architecture == "gemma2":  # stock Gemma 2 takes its softmax in float32, whatever the model's dtype
        tolerance = 1e-5
    assert torch.equal(found[0], expected[0]) and far(found[1], expected[1]) < tolerance
    assert not any(layer.stock for layer in cache.compressed_layers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", GLOBAL)
def test_one_shot_compression_does_not_change_the_prefill(architecture: str, dtype: torch.dtype) -> None:
    """Statistics come from the kernel that attends, and its output is SDPA's bit for bit."""
    batch = tokens(50)
    expected = stock_of(architecture, dtype)(**batch, use_cache=False).logits
    for name in ("selkv", "snapkv", "full-folded"):
        cache = make_cache(model_of(architecture, dtype), name, retain=0.25)
        assert torch.equal(
            model_of(architecture, dtype)(**batch, cache=cache, use_cache=True).logits, expected
        )


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_method_observes_each_rows_own_queries_and_logsumexp(architecture: str) -> None:
    """From the kernel, where there is one that fits, or computed; padding is not among them."""
    seen: list[tuple[Entries, Observed]] = []

    @dataclass(frozen=True)
    class Spy(Method):
        name = "spy"

        def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, dict[str, float]]:
            seen.append((entries, observed))
            return entries, {}

    model = model_of(architecture, torch.float32)
    for batch in (tokens(50), tokens(30, 50)):
        seen.clear()
        forward(model, batch, make_cache(model, Spy(), budget=5))
        layers = 1 if architecture == "gemma2" else 3
        for index, (entries, observed) in enumerate(seen):
            n = int(batch["attention_mask"][index % len(batch["input_ids"])].sum())
            assert observed.queries.shape == (4, n, 8) and entries.positions.tolist() == [list(range(n))]
            assert (observed.layer, observed.layers) == (index // len(batch["input_ids"]), layers)
            kernel = architecture == "llama" and len(batch["input_ids"]) == 1
            assert (observed.logsumexp is not None) == kernel
            computed = dataclasses.replace(observed, logsumexp=None, _memo={}).row_logsumexp(entries)
            assert far(observed.row_logsumexp(entries), computed) < 1e-5
        assert len(seen) == layers * len(batch["input_ids"])


# --- Padding


PADDED = [("llama", name) for name in METHODS]
PADDED += [
    (arch, name) for arch in GLOBAL if arch not in ("llama", "qwen2") for name in ("selkv", "kvslimmer")
]


@pytest.mark.parametrize("retain", [0.5, 0.25])
@pytest.mark.parametrize(("architecture", "name"), PADDED)
def test_a_padded_row_equals_the_row_alone(architecture: str, name: str, retain: float) -> None:
    """Logits, tokens and what is held; the shortest row (below SelKV's window) passes through untouched."""
    # stock Gemma 2 gives NaN in float64 with padding: its eager mask is float64's lowest, its softmax float32
    dtype, tolerance = (torch.float32, 1e-4) if architecture == "gemma2" else (torch.float64, 1e-10)
    model, batch = model_of(architecture, dtype), tokens(52, 70, 37, 20)
    cache = make_cache(model, name, retain=retain)
    found, logits = generate(model, batch, cache, new=3)
    assert logits.isfinite().all()
    lines = [line for line in cache.report() if line["method"] != "sliding-window"]
    for b in range(4):
        alone = make_cache(model, name, retain=retain)
        expected, expected_logits = generate(model, row(batch, b), alone, new=3)
        assert torch.equal(found[b : b + 1], expected) and far(logits[b : b + 1], expected_logits) < tolerance
        own = [line for line in alone.report() if line["method"] != "sliding-window"]
        for line, true in zip([line for line in lines if line["row"] == b], own, strict=True):
            assert torch.equal(line["positions"], true["positions"])
            for key in ("layer", "m", "untouched", "seen", "entries"):
                assert line[key] == true[key], key


# --- Something dropped: a naive reference over the cache's own entries


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Any]


def drive(model: Any, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Logits [t, V] of tokens [t], layer by layer, with ``attend(layer, q, k, v, scaling)`` -> [H, t, D]."""
    hidden = model.model.embed_tokens(ids[None])
    cos, sin = model.model.rotary_emb(hidden, positions[None])
    for index, layer in enumerate(model.model.layers):
        block, x = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (
            project(x).view(1, len(ids), -1, 8) for project in (block.q_proj, block.k_proj, block.v_proj)
        )
        if hasattr(block, "q_norm"):  # Qwen 3
            q, k = block.q_norm(q), block.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        out = torch.as_tensor(attend(index, q[0], k[0], v.transpose(1, 2)[0], block.scaling))
        hidden = hidden + block.o_proj(out.transpose(0, 1).reshape(1, len(ids), -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0]


def snapshot(cache: KVCache, b: int) -> list[Entries]:
    """A copy of what each layer holds of row ``b`` right after the prefill."""
    held = [layer.prompt[b].entries for layer in cache.compressed_layers()]
    return copy.deepcopy([entries for entries in held if entries is not None])


def continued(model: Any, held: list[Entries], n: int, ids: Tensor) -> Tensor:
    """Logits [t, V] of tokens [t] that follow a prompt of n tokens, of which ``held`` is left."""

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        entries, outputs = held[index], []
        for t in range(len(ids)):
            grown = entries.extend(k[:, : t + 1], v[:, : t + 1], torch.arange(n, n + t + 1)[None])
            outputs.append(
                torch.as_tensor(naive.attend(q[:, t : t + 1], grown.keys, grown.values, grown.bias, scaling))
            )
        return torch.cat(outputs, 1)

    return drive(model, ids, torch.arange(n, n + len(ids)), attend)


@dataclass(frozen=True)
class Staircase(Method):
    """Layers of different length, alternate ones with a bias, the KV heads with different tokens."""

    name = "staircase"

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, dict[str, float]]:
        m = max(1, m - 7 * observed.layer)
        first = torch.arange(m) + torch.arange(entries.kv_heads)[:, None]
        kept = entries.take(first)
        if observed.layer % 2 == 0:
            return kept, {}
        bias = torch.linspace(-1, 1, m, dtype=entries.keys.dtype).expand(entries.kv_heads, -1)
        return Entries(kept.keys, kept.values, kept.positions, bias), {}


def arm_of(name: str) -> Method:
    return (
        Staircase()
        if name == "staircase"
        else make(name, **({"select": "snapkv"} if name == "selkv" else {}))
    )


CONTINUED = [
    *(("llama", name) for name in (*METHODS, "staircase")),
    *(
        (arch, name)
        for arch in ("llama-mha", "qwen3")
        for name in ("snapkv", "selkv", "kvslimmer", "staircase")
    ),
]


@pytest.mark.parametrize(("architecture", "name"), CONTINUED)
def test_questions_and_decoding_after_compression_equal_a_naive_reference(
    architecture: str, name: str
) -> None:
    """A question of six tokens at once, then tokens one by one."""
    model, turns = model_of(architecture), [tokens(61), tokens(6, seed=1)]
    cache = make_cache(model, arm_of(name), retain=0.4)
    forward(model, turns[0], cache)
    held = snapshot(cache, 0)
    if name == "staircase":
        assert [len(entries) for entries in held] == [24, 17, 10]
    elif name != "full-folded":
        assert {len(entries) for entries in held} == {24}
    turn = followed(*turns)
    logits = [forward(model, turn, cache)[0]]
    for step in range(3):
        turn = followed(turn, tokens(1, seed=10 + step))
        logits.append(forward(model, turn, cache)[0])
    expected = continued(model, held, 61, turn["input_ids"][0, 61:])
    assert far(torch.cat(logits), expected) < 1e-10


@pytest.mark.parametrize("name", ["streaming-llm", "snapkv", "selkv", "kvslimmer", "staircase"])
def test_a_padded_batch_with_a_padded_question_equals_a_naive_reference(name: str) -> None:
    """Rows hold different numbers of entries, and the question's own padding is seen by nobody."""
    model, turns = (
        model_of("llama"),
        [tokens(61, 40, 75, 20), tokens(6, 5, 2, 3, seed=1), tokens(1, 1, 1, 1, seed=2)],
    )
    cache = make_cache(model, arm_of(name), retain=0.4)
    forward(model, turns[0], cache)
    held = [snapshot(cache, b) for b in range(4)]
    assert len({len(entries[0]) for entries in held}) == 4
    logits = [forward(model, followed(*turns[:2]), cache), forward(model, followed(*turns), cache)]
    for b in range(4):
        question = row(followed(*turns[1:]), b)["input_ids"][0]
        found = torch.cat([logits[0][b][turns[1]["attention_mask"][b].bool()], logits[1][b]])
        assert (
            far(found, continued(model, held[b], int(turns[0]["attention_mask"][b].sum()), question)) < 1e-10
        )


def test_a_second_turn_of_generate_feeds_only_the_new_tokens() -> None:
    """generate() twice on one cache: what it has seen is not fed again, and the answers are those of the reference."""
    model, prompt = model_of("llama"), tokens(61)
    cache = make_cache(model, "selkv", retain=0.4)
    answer, first = generate(model, prompt, cache, new=3)
    alone = make_cache(model, "selkv", retain=0.4)
    forward(model, prompt, alone)
    held = snapshot(alone, 0)
    ones = torch.ones_like(answer)
    turn = followed(prompt, {"input_ids": answer, "attention_mask": ones}, tokens(5, seed=3))
    fed: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: fed.append(args[0].shape[1])
    )
    _, second = generate(model, turn, cache, new=2)
    hook.remove()
    assert fed == [6, 1]  # the last token of the first answer was never fed before
    expected = continued(model, held, 61, turn["input_ids"][0, 61:])
    assert far(first[0, 1:], expected[:2]) < 1e-10 and far(second[0, 0], expected[-1]) < 1e-10
    assert cache.report()[0]["seen"] == 61 + 3 + 5 + 1


@pytest.mark.parametrize("budget", [{"retain": 0.4}, {"budget": 7}, {"budget": 1}])
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "qwen3"])
def test_kvslimmers_prefill_attends_to_its_own_merged_past(architecture: str, budget: dict[str, Any]) -> None:
    """All logits of the prompt, through all layers, against the naive chunk loop; and what is held then."""
    model, prompt = model_of(architecture), tokens(45)
    cache = make_cache(model, "kvslimmer", **budget)
    found = forward(model, prompt, cache)[0]
    held, positions, m = snapshot(cache, 0), torch.arange(45), cache.report()[0]["m"]
    cos, sin = (x[0] for x in model.model.rotary_emb(torch.empty(0, dtype=torch.float64), positions[None]))

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Any:
        reference = naive.kvslimmer(q, k, v, scaling, m, cos=cos, sin=sin)
        assert far(held[index].keys, torch.as_tensor(reference["keys"])) < 1e-9
        return reference["output"]

    assert far(found, drive(model, prompt["input_ids"][0], positions, attend)) < 1e-9


@pytest.mark.parametrize("name", [name for name in ONE_SHOT if "re" not in name.partition("/")[2]])
def test_kept_keys_are_the_prompts_own(name: str) -> None:
    model, prompt = model_of("llama"), tokens(61)
    cache, stock = make_cache(model, name, retain=0.4), DynamicCache()
    forward(model, prompt, cache)
    stock_of("llama")(**prompt, cache=stock, use_cache=True)
    for held, layer in zip(snapshot(cache, 0), stock.layers, strict=True):
        for h in range(2):
            kept = held.positions.expand(2, -1)[h]
            assert far(held.keys[h], layer.keys[0, h, kept]) < 1e-12
            if not name.startswith("selkv") or name == "selkv/evict":
                assert far(held.values[h], layer.values[0, h, kept]) < 1e-12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["full", "selkv", "kvslimmer"])
@pytest.mark.filterwarnings("ignore:every layer of this model has a sliding window")
def test_generated_tokens_go_on_at_their_logical_positions(architecture: str, name: str) -> None:
    """Over a padded prompt, decoding and a follow-up turn: the positions the stock model gives."""
    dtype, turns = torch.float32, [tokens(61, 40), tokens(4, 4, seed=1)]
    recorded: list[list[list[list[int]]]] = []
    for model, cache in (
        (model_of(architecture, dtype), make_cache(model_of(architecture, dtype), name, retain=0.3)),
        (stock_of(architecture, dtype), DynamicCache(config=stock_of(architecture, dtype).config)),
    ):
        places: list[list[list[int]]] = []

        def record(module: Any, args: Any, kwargs: Any, places: list[list[list[int]]] = places) -> None:
            places.append(kwargs["position_ids"].tolist() if "position_ids" in kwargs else args[1].tolist())

        hook = model.model.rotary_emb.register_forward_pre_hook(record, with_kwargs=True)
        generate(model, turns[0], cache, new=3)
        fixed = {"input_ids": torch.full((2, 3), 5), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
        generate(model, followed(turns[0], fixed, turns[1]), cache, new=3)
        hook.remove()
        recorded.append([p for p in places if len(p) == 2])  # our RoPE's own look-ups have one row
    assert recorded[0] == recorded[1]
    assert recorded[0][-1] == [[69], [48]]


# --- Every prompt is compressed, and reported


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("reset", [True, False])
def test_every_prompt_is_compressed_like_the_first(architecture: str, reset: bool) -> None:
    model = model_of(architecture)
    prompts = [tokens(60, seed=1), tokens(44, seed=2), tokens(60, seed=1), tokens(90, seed=3)]
    answers, cache = [], make_cache(model, "selkv", retain=0.25)
    for prompt in prompts:
        if reset:
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.report() == []
        else:
            cache = make_cache(model, "selkv", retain=0.25)
        answers.append(generate(model, prompt, cache, new=4)[1])
        n = prompt["input_ids"].shape[1]
        for line in cache.report():
            if line["method"] != "sliding-window":
                assert (
                    line["entries"] == round(n / 4 + 1e-9) + 3
                    and line["seen"] == n + 3
                    and line["m"] == round(n / 4 + 1e-9)
                )
    assert torch.equal(answers[0], answers[2]) and not torch.equal(answers[0], answers[1])


ITEMS = {torch.float64: (8, 8), torch.float32: (4, 4), torch.bfloat16: (2, 4)}  # bytes of an item, of a bias


@pytest.mark.parametrize("dtype", ITEMS)
@pytest.mark.parametrize(("name", "bias_heads"), [
    ("full", 0), ("full-folded", 0), ("streaming-llm", 0), ("snapkv", 0), ("selkv", 1), ("kvslimmer", 2),
])  # fmt: skip
def test_report_counts_tokens_entries_and_bytes(name: str, bias_heads: int, dtype: torch.dtype) -> None:
    model, item = model_of("llama", dtype), ITEMS[dtype]
    for n, new in ((60, 0), (60, 9), (300, 0), (300, 230)):
        cache = make_cache(model, name, retain=0.5)
        prompt = tokens(n)
        if new == 9:
            generate(model, prompt, cache, new=new + 1)  # the last token is not fed
        else:
            forward(model, prompt, cache)
        if new == 230:  # across a block
            forward(model, followed(prompt, tokens(new, seed=1)), cache)
        m = n if name.startswith("full") else n // 2
        lines = cache.report()
        assert [line["layer"] for line in lines] == [0, 1, 2]
        for line, layer in zip(lines, cache.compressed_layers(), strict=True):
            entry = 2 * (8 + 8) * item[0] + bias_heads * item[1]  # Hkv · (key + value) + bias
            assert (line["seen"], line["entries"], line["m"]) == (n + new, m + new, n // 2)
            assert (line["method"], line["retain"], line["budget"]) == (name.partition("/")[0], 0.5, None)
            assert line["bytes_used"] == (m + new) * entry
            assert 0 <= line["bytes_allocated"] - line["bytes_used"] <= BLOCK * entry
            assert line["positions"].shape[1] == m
            rows = layer.rows
            assert rows is not None
            held = sum(
                x.untyped_storage().nbytes() for x in (rows.keys, rows.values, rows.bias) if x is not None
            )
            assert held == line["bytes_allocated"]


def test_report_gives_diagnostics_and_the_budget_as_given() -> None:
    cache = make_cache(model_of("llama"), "selkv", budget=17)
    assert cache.report() == [] and cache.compression_seconds == []
    forward(model_of("llama"), tokens(60), cache)
    for line in cache.report():
        assert (line["retain"], line["budget"], line["m"]) == (None, 17, 17)
        assert 0 < line["share_routed"] <= 1 and "log_ratio_p90" in line and line["union_size"] >= 1
    assert len(cache.compression_seconds) == 1 and 0 < cache.compression_seconds[0] < 60
    cache = make_cache(model_of("llama"), "kvslimmer", budget=17)
    forward(model_of("llama"), tokens(60), cache)
    assert {(line["chunk"], line["sinks"], line["peak_entries"]) for line in cache.report()} == {(4, 2, 21)}
    assert all(line["merges"] == 2 * 43 and line["dropped_mass"] == 0 for line in cache.report())


def test_a_share_that_rounds_to_nothing_keeps_one_entry() -> None:
    cache = make_cache(model_of("llama"), "streaming-llm", retain=0.001)
    generate(model_of("llama"), tokens(60), cache, new=3)
    assert {(line["m"], line["entries"]) for line in cache.report()} == {(1, 3)}


@pytest.mark.parametrize("lengths", [(20, 30), (60, 30)])
@pytest.mark.parametrize("name", ["full", "selkv"])
def test_padding_is_counted_nowhere(name: str, lengths: tuple[int, int]) -> None:
    """Neither the prompt's nor a question's, in seen, entries, positions and bytes_used."""
    model, turns = model_of("llama"), [tokens(*lengths), tokens(5, 3, seed=1)]
    cache = make_cache(model, name, retain=0.5)
    forward(model, turns[0], cache)
    for line in cache.report():
        n = lengths[line["row"]]
        held = n if line["untouched"] else n // 2
        assert (line["seen"], line["entries"], line["positions"].shape[1]) == (n, held, held)
        assert line["bytes_used"] // (2 * 16 * 8) == held
    forward(model, followed(*turns), cache)
    for line in cache.report():
        n, new = lengths[line["row"]], (5, 3)[line["row"]]
        assert (line["seen"], line["entries"]) == (n + new, (n if line["untouched"] else n // 2) + new)


def test_kv_heads_are_never_repeated_and_full_keys_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, update = tokens(120), CompressedLayer.update
    for name in METHODS[1:]:
        full: list[weakref.ref[Tensor]] = []

        def spy(self: Any, keys: Tensor, values: Tensor, *args: Any, full: Any = full, **kwargs: Any) -> Any:
            full.extend((weakref.ref(keys), weakref.ref(values)))
            return update(self, keys, values, *args, **kwargs)

        monkeypatch.setattr(CompressedLayer, "update", spy)
        cache = make_cache(model_of("llama"), name, retain=0.25)
        forward(model_of("llama"), prompt, cache)
        gc.collect()
        assert len(full) == 6 and all(ref() is None for ref in full), name
        for layer in cache.compressed_layers():
            entries = layer.prompt[0].entries
            assert entries is not None
            for tensor in (entries.keys, entries.values):  # no view of something larger
                assert tensor.untyped_storage().nbytes() == 2 * 30 * 8 * 8
        forward(model_of("llama"), followed(prompt, tokens(1)), cache)
        for layer in cache.compressed_layers():
            assert (
                layer.rows is not None
                and layer.rows.keys.shape == (1, 2, BLOCK, 8)
                and layer.prompt[0].entries is None
            )


def test_full_keys_are_freed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer attends, the layers below hold their compressed rest only."""
    attend, held = CompressedLayer.attend, []
    cache = make_cache(model_of("llama"), "selkv", retain=0.25)

    def spy(self: CompressedLayer, *args: Any, **kwargs: Any) -> Any:
        held.append(
            [
                len(r.entries)
                for layer in cache.compressed_layers()
                for r in layer.prompt
                if r.entries is not None
            ]
        )
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(CompressedLayer, "attend", spy)
    forward(model_of("llama"), tokens(200), cache)
    assert held == [[], [50], [50, 50]]


@pytest.mark.parametrize("name", [*METHODS[1:], "selkv/gate+count"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_half_precision_stays_finite_on_extreme_logits(
    architecture: str, name: str, dtype: torch.dtype
) -> None:
    model = extreme(architecture, dtype)
    cache = make_cache(model, name, retain=0.25)
    _, logits = generate(model, tokens(60, 44), cache, new=4)
    assert logits.isfinite().all()
    for layer in cache.compressed_layers():
        assert (
            layer.rows is not None and layer.rows.keys.isfinite().all() and layer.rows.values.isfinite().all()
        )


@functools.cache
def extreme(architecture: str, dtype: torch.dtype) -> Any:
    """A tiny model whose attention logits reach thousands: a softmax of zeros and ones."""
    model = build_tiny(architecture, dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 500
    return model


# --- Sliding layers


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_budgets_apply_to_global_layers_only(architecture: str) -> None:
    dtype = torch.float32
    model, stock, prompt = model_of(architecture, dtype), stock_of(architecture, dtype), tokens(60)
    cache, plain = make_cache(model, "selkv", retain=0.25), DynamicCache(config=stock.config)
    forward(model, prompt, cache)
    forward(stock, prompt, plain)
    report = cache.report()
    assert [line["method"] for line in report] == ["sliding-window", "selkv", "sliding-window"]
    assert [line["layer"] for line in report] == [0, 1, 2] and [line["entries"] for line in report] == [
        15,
        15,
        15,
    ]
    assert [line["seen"] for line in report] == [60] * 3
    for index in (0, 2):
        assert type(cache.layers[index]) is type(plain.layers[index])
        assert torch.equal(cache.layers[index].keys, plain.layers[index].keys)
        assert report[index]["bytes_used"] == 15 * 2 * 16 * 4
    generate(model, prompt, fresh := make_cache(model, "selkv", budget=30), new=4)
    assert [line["entries"] for line in fresh.report()] == [15, 33, 15]


def test_a_model_of_sliding_layers_only_warns_that_nothing_is_compressed() -> None:
    model, prompt = model_of("mistral", torch.float32), tokens(60)
    cache = make_cache(model, "selkv", retain=0.25)
    with pytest.warns(UserWarning, match="sliding window"):
        _, logits = generate(model, prompt, cache)
    assert torch.equal(logits, generate(stock_of("mistral", torch.float32), prompt)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, prompt, make_cache(model, "full"))
    assert {line["method"] for line in cache.report()} == {
        "sliding-window"
    } and cache.compression_seconds == []


# --- Several arms on one prefill


ARMS = [
    Arm(make("snapkv"), Budget(0.5)), Arm(make("selkv"), Budget(0.25)), Arm(make("full-folded"), Budget(1.0)),
    Arm(make("full"), Budget(1.0)), Arm(make("selkv/evict"), Budget(entries=9)), Arm(make("selkv/gate"), Budget(0.25)),
]  # fmt: skip


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_arms_that_share_a_prefill_hold_and_decode_what_each_would_alone(
    architecture: str, looked: bool
) -> None:
    """Also where report() was read in between: looking changes nothing."""
    model, prompt, question = model_of(architecture), tokens(60), tokens(4, seed=1)
    shared = KVCache(model, ARMS)
    first = forward(model, prompt, shared)
    together = [snapshot(shared, i) for i in range(len(ARMS))]
    if looked:
        assert len([line for line in shared.report() if line["method"] != "sliding-window"]) == 6 * (
            1 if architecture == "gemma3" else 3
        )
    groups = [[0, 1, 4], [2], [3], [5]]
    caches = shared.split(*groups)
    turn = followed(prompt, question)
    rows: dict[int, Tensor] = {}
    for group, cache in zip(groups, caches, strict=True):
        rows |= dict(zip(group, forward(model, repeated(turn, len(group)), cache), strict=True))
    for i, arm in enumerate(ARMS):
        alone = KVCache(model, [arm])
        assert far(forward(model, prompt, alone), first) < 1e-12
        for one, other in zip(snapshot(alone, 0), together[i], strict=True):
            assert torch.equal(one.positions, other.positions) and far(one.keys, other.keys) < 1e-12
            assert far(one.values, other.values) < 1e-12 and (one.bias is None) == (other.bias is None)
            assert one.bias is None or far(one.bias, other.bias) < 1e-12
        assert far(forward(model, turn, alone)[0], rows[i]) < 1e-10
    assert [cache.arms for cache in caches] == [tuple(ARMS[i] for i in group) for group in groups]
    assert all(layer.stock for layer in caches[2].compressed_layers())  # the full arm alone: the stock kernel


def test_the_full_arm_of_a_shared_prefill_is_bit_identical() -> None:
    model, prompt, question = model_of("llama", torch.float32), tokens(60), tokens(4, seed=1)
    shared = KVCache(model, ARMS)
    forward(model, prompt, shared)
    full = shared.split([3])[0]
    stock, plain = stock_of("llama", torch.float32), DynamicCache()
    forward(stock, prompt, plain)
    turn = followed(prompt, question)
    assert torch.equal(forward(model, turn, full), forward(stock, turn, plain))


def test_an_arm_can_be_taken_apart_again() -> None:
    """split() neither empties the shared cache nor ties the parts to each other."""
    model, prompt, turns = (
        model_of("gemma3"),
        tokens(60),
        [followed(tokens(60), tokens(4, seed=s)) for s in (1, 2)],
    )
    shared = KVCache(model, ARMS[:2])
    forward(model, prompt, shared)
    parts = shared.split([1], [0, 1])
    found = [forward(model, turns[0], parts[0])[0], forward(model, repeated(turns[1], 2), parts[1])[1]]
    found.append(forward(model, turns[1], shared.split([1])[0])[0])
    for turn, logits in zip((turns[0], turns[1], turns[1]), found, strict=True):
        alone = KVCache(model, ARMS[1:2])
        forward(model, prompt, alone)
        assert far(forward(model, turn, alone)[0], logits) < 1e-10


def test_joined_full_caches_go_on_with_the_stock_kernel() -> None:
    caches = [make_cache(model_of("llama"), "full") for _ in range(2)]
    for cache in caches:
        forward(model_of("llama"), tokens(60), cache)
    joined, stock = KVCache.join(caches), DynamicCache()
    turns = [repeated(tokens(60), 2), tokens(4, 4, seed=1)]
    forward(stock_of("llama"), turns[0], stock)
    found = forward(model_of("llama"), followed(*turns), joined)
    assert all(layer.stock for layer in joined.compressed_layers())
    assert far(found, forward(stock_of("llama"), followed(*turns), stock)) < 1e-10


@pytest.mark.parametrize("looked", [False, True])
def test_joined_caches_decode_as_each_alone(looked: bool) -> None:
    """Chunked arms prefill alone and then decode as rows of one batch."""
    model, prompt, turn = model_of("gemma3"), tokens(60), followed(tokens(60), tokens(4, seed=1))
    arms = [
        Arm(make("kvslimmer"), Budget(0.5)),
        Arm(make("selkv"), Budget(0.25)),
        Arm(make("full"), Budget(1.0)),
    ]
    caches = [KVCache(model, [arm]) for arm in arms]
    for cache in caches:
        forward(model, prompt, cache)
        if looked:
            cache.report()
    joined = KVCache.join(caches)
    logits = forward(model, repeated(turn, 3), joined)
    assert joined.arms == tuple(arms)
    assert [line["m"] for line in joined.report() if line["method"] != "sliding-window"] == [30, 15, 60]
    for i, arm in enumerate(arms):
        alone = KVCache(model, [arm])
        forward(model, prompt, alone)
        assert far(logits[i], forward(model, turn, alone)[0]) < 1e-10


@pytest.mark.parametrize("name", ["full", "selkv", "snapkv", "kvslimmer"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rewinding_restores_bit_equal_logits(architecture: str, name: str) -> None:
    model, prompt = model_of(architecture, torch.float32), tokens(60, 60)
    cache = make_cache(model, name, retain=0.25)
    forward(model, prompt, cache)
    mark, before = cache.mark(), plain(cache.report())
    turn = followed(prompt, tokens(4, 4, seed=1))
    first = forward(model, turn, cache)
    cache.rewind(mark)
    assert plain(cache.report()) == before and cache.get_seq_length() == 60
    for other in (tokens(290, 290, seed=2), tokens(3, 5, seed=3)):  # across a block; with padding
        forward(model, followed(prompt, other), cache)
        cache.rewind(mark)
    assert torch.equal(forward(model, turn, cache), first)
    cache.rewind(mark)
    assert [line["bytes_used"] for line in cache.report()] == [line["bytes_used"] for line in before]


def plain(report: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: x for key, x in line.items() if key not in ("positions", "bytes_allocated")} for line in report
    ]


def test_a_mark_of_an_empty_cache_rewinds_to_nothing() -> None:
    model, prompt = model_of("llama"), tokens(60)
    cache = make_cache(model, "selkv", retain=0.25)
    mark = cache.mark()
    first = forward(model, prompt, cache)
    cache.rewind(mark)
    assert cache.get_seq_length() == 0 and torch.equal(forward(model, prompt, cache), first)


def test_chunked_arms_and_batches_cannot_share_a_prefill() -> None:
    model = model_of("llama")
    with pytest.raises(UserError, match="share a prefill"):
        KVCache(model, [ARMS[0], Arm(make("kvslimmer"), Budget(0.5))])
    with pytest.raises(
        UserError
    ):  # its rows would be samples and arms, and split() would take the wrong ones apart
        forward(model, tokens(60, 60), KVCache(model, ARMS[:2]))


def test_a_copied_cache_is_a_cache_of_its_own() -> None:
    """copy.deepcopy is how a prompt's cache is reused for many questions."""
    model, prompt = model_of("llama"), tokens(60)
    cache = make_cache(model, "selkv", retain=0.25)
    forward(model, prompt, cache)
    twin = copy.deepcopy(cache)
    turns = [followed(prompt, tokens(4, seed=seed)) for seed in (1, 2)]
    logits = [forward(model, turns[0], cache), forward(model, turns[1], twin)]
    for turn, found in zip(turns, logits, strict=True):
        alone = make_cache(model, "selkv", retain=0.25)
        forward(model, prompt, alone)
        assert torch.equal(forward(model, turn, alone), found)


# --- Refused, or right


def test_an_unsupported_architecture_is_refused_by_name() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    for config in (
        transformers.GPTNeoXConfig(**sizes, intermediate_size=64),
        transformers.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(UserError, match=config.model_type) as caught:
            make_cache(model, "selkv", retain=0.25)
        assert "llama" in str(caught.value) and model.config._attn_implementation != hf.IMPLEMENTATION


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generating_without_our_cache_is_refused_and_a_plain_forward_is_stock(architecture: str) -> None:
    dtype, batch = torch.float32, tokens(30, 20)
    model, stock = model_of(architecture, dtype), stock_of(architecture, dtype)
    with pytest.raises(UserError, match="cache is not one of kvrepro's"):
        generate(model, batch, new=3)
    with pytest.raises(UserError, match="cache is not one of kvrepro's"):
        generate(model, batch, DynamicCache(config=model.config), new=3)
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)
    _, logits = generate(model, batch, new=3, use_cache=False)
    assert torch.equal(logits, generate(stock, batch, new=3, use_cache=False)[1])


def test_a_prefill_in_inference_mode_decodes_outside_it() -> None:
    model, prompt, turn = model_of("llama"), tokens(60), followed(tokens(60), tokens(4, seed=1))
    logits = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = make_cache(model, "selkv", retain=0.25)
        with mode():
            forward(model, prompt, cache)
            cache.report()
        with torch.no_grad():
            logits.append(forward(model, turn, cache))
    assert torch.equal(*logits)


def test_a_follow_up_of_another_batch_size_is_refused() -> None:
    model = model_of("llama")
    cache = make_cache(model, "selkv", retain=0.5)
    forward(model, tokens(60, 60), cache)
    with pytest.raises(UserError, match="batch size"):
        forward(model, followed(tokens(60), tokens(2, seed=1)), cache)


def test_caches_of_different_prompts_are_not_joined() -> None:
    model = model_of("llama")
    caches = [make_cache(model, "selkv", retain=0.25) for _ in range(2)]
    for n, cache in zip((60, 50), caches, strict=True):
        forward(model, tokens(n), cache)
    with pytest.raises(ValueError, match="different lengths"):
        KVCache.join(caches)


def test_our_cache_without_our_attention_is_refused() -> None:
    """set_attn_implementation after make_cache: the layers would store nothing and the model forget its past."""
    model = build_tiny("llama")
    cache = make_cache(model, "selkv", retain=0.25)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError):
        generate(model, tokens(60), cache)


REFUSED: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": True},
    "chunked prefill": {"prefill_chunk_size": 16},
}


@pytest.mark.parametrize("name", ["full", "selkv"])
@pytest.mark.parametrize("what", REFUSED)
def test_ways_of_decoding_that_cannot_work_are_refused(what: str, name: str) -> None:
    options = dict(REFUSED[what])
    if what == "assistant":
        options["assistant_model"] = stock_of("llama", torch.float32)
    cache = make_cache(model_of("llama", torch.float32), name, retain=0.25)
    # transformers itself refuses assisted decoding for a cache that says it cannot be cropped
    with pytest.raises(
        ValueError, match=r"is not possible|requires a cache that can be cropped|leave it out"
    ):
        generate(model_of("llama", torch.float32), tokens(60), cache, new=8, **options)


def test_a_chunked_follow_up_is_right() -> None:
    """Once the prompt is compressed, pieces of a question are only more tokens."""
    model, prompt, turn = model_of("llama"), tokens(60), followed(tokens(60), tokens(20, seed=1))
    logits = []
    for options in ({}, {"prefill_chunk_size": 6}):
        cache = make_cache(model, "selkv", retain=0.25)
        forward(model, prompt, cache)
        logits.append(generate(model, turn, cache, **options)[1])
    assert far(*logits) < 1e-10


def test_operations_on_compressed_entries_are_refused() -> None:
    model = model_of("llama")
    cache = make_cache(model, "selkv", retain=0.25)
    forward(model, tokens(60), cache)
    for call in (
        lambda: cache.crop(-1), lambda: cache.crop(50), lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.offload(0), lambda: cache.layers[0].prefetch(),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert far(forward(model, followed(tokens(60), tokens(1)), cache), forward(model, followed(tokens(60), tokens(1)),
               prefilled(model, tokens(60)))) == 0  # fmt: skip


def prefilled(model: Any, prompt: dict[str, Tensor]) -> KVCache:
    cache = make_cache(model, "selkv", retain=0.25)
    forward(model, prompt, cache)
    return cache


def test_several_samples_of_one_prompt_and_sampling_are_right() -> None:
    """num_return_sequences repeats the prompt before the prefill, so rows are compressed like any."""
    model, prompt = model_of("llama"), tokens(60)
    cache = make_cache(model, "selkv", retain=0.25)
    answers, logits = generate(model, prompt, cache, do_sample=True, num_return_sequences=3)
    assert len({tuple(answer.tolist()) for answer in answers}) == 3
    held = snapshot(prefilled(model, prompt), 0)
    for b in range(3):
        assert far(logits[b, 1:], continued(model, held, 60, answers[b, :-1])) < 1e-10
    assert {line["entries"] for line in cache.report()} == {15 + 4}


def test_bad_requests_are_one_clear_line() -> None:
    model = model_of("llama")
    for call in (
        lambda: make_cache(model, "selkvv"), lambda: make_cache(model, "selkv", retain=0.5, budget=9),
        lambda: make_cache(model, "selkv", retain=0), lambda: make_cache(model, "selkv", budget=0),
        lambda: make_cache(model, make("selkv"), window=3), lambda: make_cache(model, "selkv", wimdow=3),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_driven_method_must_be_driven() -> None:
    """prefill() runs its passes; without them generate() says so.  Other methods need none."""

    @dataclass(frozen=True)
    class Driven(StreamingLLM):
        name = "driven-test"
        schedule = "driven"

        def chunks(self, n: int, m: int) -> list[int]:
            return [n - 7, 7]

    model, prompt = model_of("llama"), tokens(60)
    cache = make_cache(model, Driven(), retain=0.5)
    with pytest.raises(UserError, match=r"kvrepro\.prefill"):
        generate(model, prompt, cache)
    kvrepro.prefill(model, cache, prompt["input_ids"])
    assert cache.get_seq_length() == 59 and cache.report()[0]["entries"] == 29
    generate(model, prompt, cache, new=1)
    assert cache.report()[0]["positions"].tolist() == [[*range(4), *range(34, 60)]]
    cache = make_cache(model, "selkv", retain=0.5)
    kvrepro.prefill(model, cache, prompt["input_ids"])
    assert cache.get_seq_length() == 0


# --- Nothing is left on the model


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_nothing_is_left_on_the_model(architecture: str) -> None:
    model, stock = build_tiny(architecture, torch.float32), stock_of(architecture, torch.float32)
    model.set_attn_implementation(stock.config._attn_implementation)

    def state() -> Any:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        return {
            name: (sorted(module.__dict__), type(module), {h: len(module.__dict__[h]) for h in hooks},
                   [id(p) for p in module.parameters(recurse=False)])
            for name, module in model.named_modules()
        }, model.config.to_dict()  # fmt: skip

    before = state()
    expected = generate(model, tokens(60))[1]
    for name in ("selkv", "kvslimmer", "full"):
        cache = make_cache(model, name, retain=0.25)
        assert model.config._attn_implementation == hf.IMPLEMENTATION
        reference = weakref.ref(cache)
        generate(model, tokens(60), cache)
        del cache
        gc.collect()
        assert reference() is None  # the model does not hold on to it
    model.set_attn_implementation(stock.config._attn_implementation)
    assert state() == before
    assert torch.equal(generate(model, tokens(60))[1], expected)


# --- The contract with transformers


def test_the_transformers_version_is_the_one_hf_was_written_against() -> None:
    assert transformers.__version__ == hf.VERSION, (
        f"kvrepro/hf.py was written against transformers {hf.VERSION}, installed is {transformers.__version__}. "
        "Before changing hf.VERSION re-read in the new source: (1) that attention layers call cache.update(k, v, "
        "layer_idx, kwargs=kwargs) and hand the same dict to the attention function, with scaling, position_ids and "
        "softcap; (2) Cache and DynamicLayer: get_mask_sizes, get_seq_length, reset, crop and new methods that would be "
        "inherited; (3) sdpa_mask: boolean, True where a token is seen, None where none is needed; (4) "
        "GenerationMixin._prefill and its generation_config (prefill_chunk_size), assisted decoding and beams; (5) "
        "Gemma 2's eager attention; (6) rotary_emb with layer_type. Then run this file."
    )


@pytest.mark.parametrize("architecture", GLOBAL)
def test_update_and_attention_share_their_keyword_arguments(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hf.py relies on in each architecture, said apart from what it computes."""
    update, attend = CompressedLayer.update, CompressedLayer.attend
    calls: list[Any] = []

    def spy_update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = update(self, keys, values, *args, **kwargs)
        calls.append(("update", self, set(kwargs["kwargs"])))
        return out

    def spy_attend(
        self: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        calls.append(("attend", self, set(kwargs), query, key, mask, kwargs))
        return attend(self, module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(CompressedLayer, "update", spy_update)
    monkeypatch.setattr(CompressedLayer, "attend", spy_attend)
    for lengths in ((40,), (40, 25)):
        calls.clear()
        model, batch = model_of(architecture, torch.float32), tokens(*lengths)
        cache = make_cache(model, "selkv", retain=0.5)
        forward(model, batch, cache)
        assert [call[0] for call in calls] == ["update", "attend"] * len(cache.compressed_layers())
        for (_, layer, handed), (_, same, got, query, key, mask, kwargs) in zip(
            calls[::2], calls[1::2], strict=True
        ):
            assert layer is same and handed - {"kvrepro"} <= got and "kvrepro" in handed
            assert kwargs["scaling"] == pytest.approx(8**-0.5)
            assert (kwargs.get("softcap") is not None) == (architecture == "gemma2")
            expected = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
            assert torch.equal(kwargs["position_ids"].expand(len(lengths), -1), expected)
            assert query.shape[1:] == (4, 40, 8) and key.shape[1] == (4 if architecture == "llama-mha" else 2)
            if len(lengths) == 1:
                assert mask is None
            else:
                assert mask.dtype == torch.bool and mask.shape == (2, 1, 40, 40)
                assert torch.equal(mask[:, 0, -1], batch["attention_mask"].bool())


def test_a_model_that_keeps_its_arguments_from_the_cache_is_refused() -> None:
    cache = make_cache(model_of("llama"), "selkv", retain=0.5)
    with pytest.raises(UserError, match="keyword arguments"):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)


def test_lengths_are_logical_for_transformers_and_physical_for_the_mask() -> None:
    model, cache = model_of("llama"), make_cache(model_of("llama"), "selkv", retain=0.25)
    forward(model, tokens(60), cache)
    sizes: Sequence[tuple[int, int]] = [layer.get_mask_sizes(4) for layer in cache.layers]
    assert cache.get_seq_length() == 60 and sizes == [(15 + 4, 45)] * 3
    forward(model, followed(tokens(60), tokens(4)), cache)
    assert cache.get_seq_length() == 64 and cache.layers[0].get_mask_sizes(1) == (20, 45)
