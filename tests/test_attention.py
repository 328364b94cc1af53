"""Attention over entries, the statistics read from it, and RoPE, each against loops or the model's own functions."""

from __future__ import annotations

from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import build_tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from kvrepro import attention, hf
from kvrepro.attention import (
    PART,
    QUERY_BLOCK,
    Observed,
    attend,
    attend_causal,
    attend_differentiable,
    attend_observed,
    attend_one,
    parts_for,
)
from kvrepro.entries import Entries
from kvrepro.errors import UserError
from kvrepro.rope import Rope

SCALING = 0.35
HEADS = {"gqa": (6, 2), "mha": (3, 3), "mqa": (4, 1)}
IDENTITY = Rope(lambda positions, dtype: (torch.ones(1, positions.shape[1], 8, dtype=dtype),
                                          torch.zeros(1, positions.shape[1], 8, dtype=dtype)))  # fmt: skip


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 1.5
    )


def qkv(shape: str, q: int, n: int, dtype: torch.dtype = torch.float64, batch: int = 1) -> tuple[Tensor, ...]:
    """Queries [B, H, q, 8], keys and values [B, Hkv, n, 8]."""
    heads, kv_heads = HEADS[shape]
    return (random(batch, heads, q, 8, dtype=dtype), random(batch, kv_heads, n, 8, seed=1, dtype=dtype),
            random(batch, kv_heads, n, 8, seed=2, dtype=dtype))  # fmt: skip


# --- attend


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("bias", ["none", "shared", "per-head", "with holes"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attend_is_a_loop_over_entries_and_causal_among_the_new(
    shape: str, new: int, bias: str, softcap: float | None
) -> None:
    n, batch = 23, 2
    query, keys, values = qkv(shape, new, n, batch=batch)
    kv_heads = keys.shape[1]
    extra = None
    if bias != "none":
        extra = random(batch, kv_heads if bias == "per-head" else 1, n, seed=3)
        extra[:, :, n - new :] = 0  # the new tokens are raw
    if bias == "with holes":
        assert extra is not None
        extra[1, :, :7] = -torch.inf
    out = attend(query, keys, values, extra, SCALING, softcap)
    full = torch.zeros(batch, kv_heads, n) if extra is None else extra.expand(-1, kv_heads, -1)
    for b in range(batch):
        for h in range(query.shape[1]):
            g = h // (query.shape[1] // kv_heads)
            for t in range(new):
                seen = n - new + t + 1
                logits = (keys[b, g, :seen] @ query[b, h, t] * SCALING).numpy()
                capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
                expected = naive.softmax(capped + full[b, g, :seen].numpy()) @ values[b, g, :seen].numpy()
                assert np.abs(out[b, h, t].numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_attend_stays_finite_on_extreme_logits(dtype: torch.dtype, softcap: float | None) -> None:
    query, keys, values = (x * 300 for x in qkv("gqa", 3, 40, dtype))
    bias = torch.zeros(1, 1, 40)
    bias[..., :30] = -torch.inf
    out = attend(query, keys, values, bias, 1.0, softcap)
    assert out.dtype == dtype and out.isfinite().all()


# --- one new token, its entries in parts


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("n", "parts"), [(1400, 1), (1400, 2), (1401, 2), (1401, 3), (1403, 16), (5, 4)])
@pytest.mark.parametrize("bias", ["none", "shared", "per-head", "with holes"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_attention_in_parts_is_attention(
    shape: str, n: int, parts: int, bias: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Also with padding over a whole part, over blocks of a part, in the last part, and a row that has nothing else."""
    query, keys, values = qkv(shape, 1, n, dtype, batch=3)
    kv_heads = keys.shape[1]
    extra = None
    if bias != "none":
        extra = random(3, kv_heads if bias == "per-head" else 1, n, seed=3)
    if bias == "with holes":
        assert extra is not None
        extra[0, :, : n // 2 + 2] = -torch.inf
        extra[1, :, :-1] = -torch.inf
        extra[2, :, n // 3 :] = -torch.inf
    folded = attention.fold(query, kv_heads)
    wide = torch.promote_types(dtype, torch.float32)
    found = attend_one(
        folded, keys, values, None if extra is None else extra.to(wide), SCALING, parts
    )  # as Rows keeps its bias
    logits = folded.double() @ keys.double().transpose(2, 3) * SCALING
    logits = logits if extra is None else logits + extra[:, :, None]
    expected = logits.softmax(-1) @ values.double()
    assert found.shape == folded.shape and found.dtype == dtype
    assert (found - expected).abs().max() < tolerance


def test_parts_are_views_of_a_growing_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied: spare capacity and other rows lie between the stretches."""
    query, keys, values = qkv("gqa", 1, 1500, batch=2)
    kernel, read = attention._flash_on_cpu, []

    def watched(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        read.extend([keys, values])
        return kernel(query, keys, values, *rest)

    monkeypatch.setattr(attention, "_flash_on_cpu", watched)
    used = slice(0, 1401)
    attend_one(attention.fold(query, 2), keys[:, :, used], values[:, :, used], None, SCALING, 4)
    stores = [x.untyped_storage().data_ptr() for x in (keys, values)]
    assert [x.untyped_storage().data_ptr() for x in read] == stores * 2
    assert [tuple(x.shape) for x in read] == [(4, 4, 350, 8)] * 2 + [(4, 1, 1, 8)] * 2


def test_threads_share_the_heads_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [parts_for(heads, 2 * PART) for heads in (1, 2, 3, 12)] == [2, 1, 2, 1]
    assert parts_for(3, 2 * PART - 1) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert parts_for(3, 100_000) == 16 and parts_for(8, 100_000) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_decoding_goes_in_parts_and_everything_else_does_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Several new tokens, a soft cap and gradients (none flow through the kernel's logsumexp) take the plain path."""
    calls: list[int] = []
    monkeypatch.setattr(attention, "parts_for", lambda heads, n: 2)
    monkeypatch.setattr(
        attention, "_attend_in_parts", lambda query, *rest: calls.append(query.shape[2]) or query
    )
    query, keys, values = qkv("gqa", 1, 50, dtype)
    attend(query, keys, values, None, SCALING)
    assert calls == [3 if dtype == torch.float64 else 4]  # bfloat16: an even number of queries
    attend(query.expand(-1, -1, 2, -1), keys, values, None, SCALING)
    attend(query, keys, values, None, SCALING, 2.0)
    attend(query, keys, values[..., :4], None, SCALING)
    for learned in (query, keys, values):
        leaf = learned.clone().requires_grad_()
        given = [leaf if x is learned else x for x in (query, keys, values)]
        attend(*given, None, SCALING).sum().backward()
        assert leaf.grad is not None and leaf.grad.any()
    assert len(calls) == 1
    with torch.no_grad():
        attend(query.clone().requires_grad_(), keys, values, None, SCALING)
    assert len(calls) == 2


def test_a_query_head_reads_the_kv_head_of_its_group() -> None:
    folded = attention.fold(torch.arange(6.0).view(1, 6, 1, 1).expand(1, 6, 2, 1), 2)
    assert folded[0, :, :, 0].tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]


# --- the kernel that also returns the logsumexp


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("n", [1, 5, 300, 2 * QUERY_BLOCK + 9])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 0.02)]
)
def test_attend_causal_is_sdpa_with_its_logsumexp(
    shape: str, n: int, dtype: torch.dtype, tolerance: float
) -> None:
    query, keys, values = qkv(shape, n, n, dtype)
    both = attend_causal(query, keys, values, SCALING)
    assert both is not None
    out, lse = both
    group = query.shape[1] // keys.shape[1]
    for expected in (
        scaled_dot_product_attention(
            query, keys, values, is_causal=n > 1, scale=SCALING, enable_gqa=group > 1
        ),
        scaled_dot_product_attention(
            query,
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            is_causal=n > 1,
            scale=SCALING,
        ),
    ):
        assert torch.equal(out, expected)
    logits = query.double() @ keys.double().repeat_interleave(group, 1).transpose(2, 3) * SCALING
    exact = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    scale = exact.abs().clamp_min(1)  # relative: a logsumexp of 10 has a last place of 1e-6 in float32
    assert ((lse - exact).abs() / scale).max() < tolerance


def test_attend_causal_declines_where_no_kernel_fits() -> None:
    query, keys, values = qkv("gqa", 5, 5)
    assert attend_causal(query, keys, values[..., :4], SCALING) is None


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("n", [7, QUERY_BLOCK, 2 * QUERY_BLOCK + 9])
def test_blocked_logsumexp_equals_the_kernels(shape: str, n: int) -> None:
    query, keys, values = qkv(shape, n, n)
    both = attend_causal(query, keys, values, SCALING)
    assert both is not None
    entries = Entries(keys[0], values[0], torch.arange(n)[None])
    blocked = Observed(query[0], SCALING, IDENTITY).row_logsumexp(entries)
    assert blocked.shape == both[1][0].shape and (blocked - both[1][0]).abs().max() < 1e-12


# --- statistics


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("n", [40, QUERY_BLOCK + 30])
@pytest.mark.parametrize("last", [1, 32, 100_000, None])
def test_column_mass_sums_the_last_queries_attention(shape: str, n: int, last: int | None) -> None:
    query, keys, values = qkv(shape, n, n)
    mass = Observed(query[0], SCALING, IDENTITY).column_mass(
        Entries(keys[0], values[0], torch.arange(n)[None]), last
    )
    weights = naive.causal_weights(query[0], keys[0], SCALING)  # [H, n, n]
    expected = weights[:, 0 if last is None else max(0, n - last) :].sum(1)
    assert mass.shape == (keys.shape[1], query.shape[1] // keys.shape[1], n)
    assert np.abs(mass.flatten(0, 1).numpy() - expected).max() < 1e-11


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    ("length", "n", "count"),
    [(40, 40, 1), (40, 40, 7), (40, 40, 39), (40, 40, 40), (40, 40, 41), (40, 40, None), (40, 57, 7),
     (QUERY_BLOCK + 45, QUERY_BLOCK + 45, QUERY_BLOCK + 14)],
)  # fmt: skip
def test_sampled_mass_sums_the_middle_query_of_each_stretch(
    shape: str, softcap: float | None, length: int, n: int, count: int | None
) -> None:
    """Also of queries that follow on other entries, and of more of them than a block holds."""
    query, keys, values = qkv(shape, length, n)
    entries = Entries(keys[0], values[0], torch.arange(n)[None])
    mass = Observed(query[0], SCALING, IDENTITY, softcap).sampled_mass(entries, count)
    count = length if count is None else min(count, length)
    kv_heads, heads = keys.shape[1], query.shape[1]
    expected = np.zeros((heads, n))
    for h in range(heads):
        for i in range(count):
            t = (2 * i + 1) * length // (2 * count)
            seen = n - length + t + 1
            logits = (keys[0, h * kv_heads // heads, :seen] @ query[0, h, t] * SCALING).numpy()
            expected[h, :seen] += naive.softmax(
                logits if softcap is None else softcap * np.tanh(logits / softcap)
            )
    assert mass.shape == (kv_heads, heads // kv_heads, n)
    assert np.abs(mass.flatten(0, 1).numpy() - expected).max() < 1e-11


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("n", "width"), [(64, 32), (50, 32), (50, 7), (5, 32)])
@pytest.mark.parametrize("kernel", [True, False])
def test_bands_are_blocks_of_the_attention_matrix(shape: str, n: int, width: int, kernel: bool) -> None:
    query, keys, values = qkv(shape, n, n)
    both = attend_causal(query, keys, values, SCALING)
    assert both is not None
    observed = Observed(query[0], SCALING, IDENTITY, logsumexp=both[1][0] if kernel else None)
    bands = observed.bands(Entries(keys[0], values[0], torch.arange(n)[None]), width)
    weights = naive.over_group(naive.causal_weights(query[0], keys[0], SCALING), keys.shape[1])  # [Hkv, n, n]
    for j in range(n):
        for i in range(j // width * width, min(n, (j // width + 1) * width)):
            found = bands[:, j // width, j % width, i % width].numpy()
            assert np.abs(found - weights[:, j, i]).max() < 1e-12


def test_soft_cap_enters_every_statistic() -> None:
    query, keys, values = qkv("gqa", 20, 20)
    entries, cap = Entries(keys[0], values[0], torch.arange(20)[None]), 1.5
    logits = query[0] @ keys[0].repeat_interleave(3, 0).transpose(1, 2) * SCALING
    capped = (cap * torch.tanh(logits / cap)).masked_fill(
        torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf
    )
    observed = Observed(query[0], SCALING, IDENTITY, cap)
    assert (observed.row_logsumexp(entries) - capped.logsumexp(-1)).abs().max() < 1e-12
    assert (observed.column_mass(entries).flatten(0, 1) - capped.softmax(-1).sum(1)).abs().max() < 1e-12
    assert (
        observed.bands(entries, 20)[:, 0] - capped.softmax(-1).view(2, 3, 20, 20).sum(1)
    ).abs().max() < 1e-12


def test_a_chunk_attends_to_biased_entries_and_itself() -> None:
    query, keys, values = (x[0] for x in qkv("gqa", 5, 17))
    bias = random(2, 17, seed=4)
    bias[:, 12:] = 0
    observed = Observed(query, SCALING, IDENTITY)
    out = attend_observed(Entries(keys, values, torch.arange(17)[None], bias), observed)
    for t in range(5):
        seen = 12 + t + 1
        expected = naive.attend(
            query[:, t : t + 1], keys[:, :seen], values[:, :seen], bias[:, :seen], SCALING
        )
        assert np.abs(out[:, t : t + 1].numpy() - expected).max() < 1e-12
    assert observed.probabilities is not None and (observed.probabilities.sum(-1) - 1).abs().max() < 1e-12
    assert observed.output is not None and torch.equal(observed.output.reshape(6, 5, 8), out)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("block", [2, 256])
def test_gradients_of_a_chunk_are_those_of_plain_attention(
    softcap: float | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its queries, all keys and its own values; what each entry receives is summed on the way forth."""
    monkeypatch.setattr("kvrepro.attention.query_block", lambda width, device: block)
    query, keys, values = (x[0].requires_grad_() for x in qkv("gqa", 5, 17))
    bias, out_by = random(2, 17, seed=4), random(*query.shape, seed=5)
    expected = attend(query[None], keys[None], values[None], bias[None], SCALING, softcap)[0]
    wanted = torch.autograd.grad(expected, (query, keys, values), out_by)
    entries = Entries(keys.detach(), values.detach(), torch.arange(17)[None], bias)
    observed = Observed(query.detach(), SCALING, IDENTITY, softcap)
    own = values.detach()[:, 12:].requires_grad_()
    out = attend_differentiable(query, keys, own, entries, observed)
    assert (out - expected).abs().max() < 1e-12 and observed.probabilities is None
    found = torch.autograd.grad(out, (query, keys, own), out_by)
    for ours, theirs in zip(found, (*wanted[:2], wanted[2][:, 12:]), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
    again = Observed(query.detach(), SCALING, IDENTITY, softcap)
    assert (observed.received(entries) - again.received(entries)).abs().max() < 1e-12


def test_statistics_are_float32_at_least_and_shared() -> None:
    query, keys, values = (x[0] for x in qkv("gqa", 20, 20, torch.float16))
    observed = Observed(query * 1000, SCALING, IDENTITY)  # the logits overflow float16
    entries = Entries(keys * 1000, values, torch.arange(20)[None])
    mass = observed.column_mass(entries, 8)
    assert (
        mass.dtype == torch.float32 and mass.isfinite().all() and mass.sum() == pytest.approx(6 * 8, rel=1e-4)
    )
    assert observed.column_mass(entries, 8) is mass and observed.column_mass(entries, 9) is not mass


# --- RoPE

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip


def scaled(name: str, **more: Any) -> Any:
    """A tiny model with a kind of RoPE."""
    return build_tiny(
        "phi3" if name == "partial" else "llama", rope_parameters={**ROPES[name], "rope_theta": 1e4}, **more
    )


def check_rope(rope: Rope, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """``rotate`` is the model's own function of its own tables, ``unrotate`` its inverse."""
    keys = random(2, positions.shape[-1], 8, seed=5)
    rotated = rope.rotate(keys, positions)
    model = apply_rotary_pos_emb(keys[None], keys[None], cos, sin)[1][0]
    assert torch.equal(rotated, model)
    assert (rotated - keys).abs().max() > 0.1
    assert (rope.unrotate(rotated, positions) - keys).abs().max() < 1e-12


@pytest.mark.parametrize("name", ROPES)
def test_unrotate_undoes_the_models_own_rotation(name: str) -> None:
    model = scaled(name)
    positions = torch.tensor([[0, 1, 5, 700, 3000]])
    cos, sin = model.model.rotary_emb(torch.empty(0, dtype=torch.float64), positions)
    assert cos.shape[-1] == (4 if name == "partial" else 8)
    if name == "yarn":  # the case that a plain inverse rotation gets wrong
        assert (cos.square() + sin.square() - 1).abs().max() > 0.1
    rope = hf._rope(model, 0)
    check_rope(rope, cos, sin, positions)
    each = torch.tensor([[0, 1, 5], [3, 700, 9]])  # positions of their own for each KV head
    keys = random(2, 3, 8)
    for h in range(2):
        assert torch.equal(rope.rotate(keys, each)[h], rope.rotate(keys, each[h : h + 1])[h])


def test_gemma3_has_a_table_for_each_layer_type() -> None:
    model = build_tiny("gemma3")
    positions = torch.tensor([[0, 1, 5, 700, 3000]])
    tables = []
    for index, kind in enumerate(model.config.layer_types):
        cos, sin = model.model.rotary_emb(torch.empty(0, dtype=torch.float64), positions, layer_type=kind)
        check_rope(hf._rope(model, index), cos, sin, positions)
        tables.append(cos)
    assert torch.equal(tables[0], tables[2]) and not torch.equal(tables[0], tables[1])


def test_half_precision_keys_unrotate_in_float32() -> None:
    rope = hf._rope(scaled("default"), 0)
    keys, positions = random(2, 50, 8, dtype=torch.bfloat16), torch.arange(50)[None] + 900
    back = rope.unrotate(rope.rotate(keys.float(), positions), positions)
    assert back.dtype == torch.float32 and (back - keys).abs().max() < 1e-5


@pytest.mark.parametrize("kind", [
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
     "original_max_position_embeddings": 64},
])  # fmt: skip
def test_a_rope_that_changes_with_the_length_is_refused_where_keys_move(kind: dict[str, Any]) -> None:
    model = build_tiny("llama", rope_parameters={**kind, "rope_theta": 1e4})
    tokens = torch.randint(1, 97, (1, 60))
    with torch.no_grad():
        for name in ("kvslimmer", "selkv/reposition", "streaming-llm/reindexed"):
            with pytest.raises(UserError, match="rotary"):
                model(tokens, cache=hf.make_cache(model, name, retain=0.5), use_cache=True)
        cache = hf.make_cache(model, "selkv", retain=0.5)  # leaves keys where they are
        assert model(tokens, cache=cache, use_cache=True).logits.isfinite().all()
        assert {line["entries"] for line in cache.report()} == {30}
