"""The references themselves, on cases small enough to work out by hand (q = 0 makes attention uniform)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from naive import (
    Seen,
    Slot,
    asymkv_merge,
    attend,
    causal_attention,
    causal_weights,
    h2o,
    hessian_weight,
    kvmerger,
    kvslimmer,
    lookm,
    merge_pair,
    pyramid_budgets,
    pyramidkv,
    released_merge,
    released_positions,
    rotate,
    selkv,
    snapkv,
    streaming_llm,
    summed_attention,
    unrotate,
    vatp,
    weightedkv,
)
from numpy.testing import assert_allclose, assert_array_equal

LOG = math.log
COUNTERS = ("merges", "left_out", "no_mass", "denominator", "outside", "composite", "dropped_l")


def rope(n: int, dim: int) -> dict[str, np.ndarray]:
    angle = np.arange(n)[:, None] / 100 ** (np.arange(dim // 2) / (dim // 2))
    angle = np.concatenate([angle, angle], -1)
    return {"cos": np.cos(angle), "sin": np.sin(angle)}


def no_rope(n: int) -> dict[str, np.ndarray]:
    return {"cos": np.ones((n, 2)), "sin": np.zeros((n, 2))}


def uniform(heads: int, n: int) -> np.ndarray:
    return np.zeros((heads, n, 2))


def random_prompt(heads: int = 4, kv_heads: int = 2, n: int = 60, dim: int = 8) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(x, n, dim)) for x in (heads, kv_heads, kv_heads))


def weighted(*odds: float, tags: tuple[float, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """q, k of one head whose attention is proportional to the odds; the keys' second coordinate is free."""
    n = len(odds)
    q = np.tile([1.0, 0.0], (1, n, 1))
    return q, np.stack([np.log(odds), np.zeros(n) if tags is None else np.array(tags)], -1)[None]


# --- attention and RoPE ---------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    a = causal_weights(uniform(1, 3), uniform(1, 3), 1.0)
    assert_allclose(a[0], [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    q, k = weighted(1, 3, 4)
    assert_allclose(causal_weights(q, k, 1.0)[0, 2], [1 / 8, 3 / 8, 1 / 2])
    assert_allclose(causal_weights(q, k, 2.0)[0, 1, :2], [1 / 10, 9 / 10])
    assert_allclose(causal_attention(q, k, [[[8, 0], [0, 8], [8, 8]]], 1.0)[0, 2], [5, 7])


def test_a_bias_of_log_2_is_the_entry_twice_and_minus_infinity_is_no_entry() -> None:
    q, k, v = random_prompt(n=5)
    twice = attend(q, k[:, [0, 1, 2, 2]], v[:, [0, 1, 2, 2]], None, 0.3)
    bias = [[0, 0, LOG(2), -math.inf, -math.inf]]  # [1, m] broadcasts over the heads
    assert_allclose(attend(q, k, v, bias, 0.3), twice, atol=1e-14)
    assert_allclose(attend(q, k, v, None, 0.3)[:, -1], causal_attention(q, k, v, 0.3)[:, -1], atol=1e-14)


def test_log_l_with_mean_values_is_the_summed_value_form() -> None:
    q, k, v = random_prompt(n=9)
    l = np.arange(1.0, 19.0).reshape(2, 9)
    assert_allclose(
        attend(q, k, v, np.log(l), 0.3), summed_attention(q, k, v * l[..., None], l, 0.3), rtol=0, atol=1e-12
    )


def test_rope() -> None:
    quarter = np.array([0.0, 0.0]), np.array([1.0, 1.0])  # cos, sin of a quarter turn
    assert_allclose(rotate(np.array([1.0, 0.0]), *quarter), [0, 1])
    assert_allclose(rotate(np.array([0.0, 1.0]), *quarter), [-1, 0])
    x, table = random_prompt(n=5)[1], rope(5, 8)
    for factor in (1.0, 1.3):  # yarn scales its tables
        cos, sin = table["cos"] * factor, table["sin"] * factor
        assert_allclose(unrotate(rotate(x, cos, sin), cos, sin), x, atol=1e-14)


# --- every method ---------------------------------------------------------------------------------

METHODS = {
    "streaming-llm": lambda *a, **t: streaming_llm(*a),
    "streaming-llm reindexed": lambda *a, **t: streaming_llm(*a, reindex=True, **t),
    "snapkv": lambda *a, **t: snapkv(*a, w=8),
    "pyramidkv": lambda *a, **t: pyramidkv(*a, layer=1, layers=3, w=8),
    "h2o": lambda *a, **t: h2o(*a),
    "vatp": lambda *a, **t: vatp(*a),
    "look-m": lambda *a, **t: lookm(*a, **t),
    "weightedkv": lambda *a, **t: weightedkv(*a),
    "kvmerger": lambda *a, **t: kvmerger(*a, **t),
    "selkv": lambda *a, **t: selkv(*a, w=8, m_r=6),
    "selkv repositioned": lambda *a, **t: selkv(*a, w=8, m_r=6, reposition=True, **t),
    "snapkv+selkv": lambda *a, **t: selkv(*a, w=8, m_r=6, select="snapkv", snap_w=8),
    "kvslimmer": lambda *a, **t: kvslimmer(*a, **t),
    "kvslimmer drop": lambda *a, **t: kvslimmer(*a, weights="drop-lighter", bias="none", **t),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_full_budget_returns_everything(method) -> None:
    q, k, v = random_prompt()
    for m in (60, 61):
        out = method(q, k, v, 0.3, m, **rope(60, 8))
        assert_array_equal(out["keys"], k)
        assert_array_equal(out["values"], v)
        assert_array_equal(out["positions"], [range(60)] * 2)
        assert out["bias"] is None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("m", [1, 3, 20, 59])
def test_the_budget_is_met_and_positions_ascend(method, m: int) -> None:
    q, k, v = random_prompt()
    out = method(q, k, v, 0.3, m, **rope(60, 8))
    for h in range(2):
        entries = len(out["keys"][h])
        assert entries == len(out["values"][h]) == len(out["positions"][h])
        # kvmerger joins whole sets and may end below the budget; its threshold is the highest that suffices
        assert entries <= m if "sets" in out else entries == m
        assert np.all(np.diff(out["positions"][h]) > 0)
        if "kept" in out:
            assert out["kept"][h] == sorted(set(out["kept"][h]))


# --- selectors ------------------------------------------------------------------------------------


def test_streaming_llm() -> None:
    q, k, v = random_prompt(n=9)
    assert streaming_llm(q, k, v, 1.0, 6)["kept"] == [[0, 1, 2, 3, 7, 8]] * 2
    assert streaming_llm(q, k, v, 1.0, 4)["kept"] == [[0, 1, 2, 3]] * 2
    assert streaming_llm(q, k, v, 1.0, 3)["kept"] == [[0, 1, 2]] * 2
    table = rope(9, 8)
    out = streaming_llm(q, k, v, 1.0, 6, reindex=True, **table)
    assert_array_equal(out["positions"], [range(3, 9)] * 2)
    raw = unrotate(k, table["cos"], table["sin"])
    assert_allclose(out["keys"][0, 0], rotate(raw[0, 0], table["cos"][3], table["sin"][3]), atol=1e-14)
    assert_allclose(out["keys"][:, 4:], k[:, 7:], atol=1e-14)  # the recent tokens stay where they were


def test_snapkv_pools_and_breaks_ties_to_the_lower_index() -> None:
    q, k = weighted(1, 1, 1, 4, 1, 1)
    v = np.ones((1, 6, 2))
    assert snapkv(q, k, v, 1.0, 3, w=1, kernel=1)["kept"] == [[0, 3, 5]]
    assert snapkv(q, k, v, 1.0, 3, w=1, kernel=3)["kept"] == [[2, 3, 5]]
    assert snapkv(q, k, v, 1.0, 2, w=2)["kept"] == [[4, 5]]  # not above the window: the last m
    q, k = weighted(1.5, 2, 4, 1, 1, 1)
    assert snapkv(q, k, v, 1.0, 2, w=1, kernel=3, pool="avg")["kept"] == [[1, 5]]  # 7.5 against 7
    # the zero beyond the border counts: 2/15 at token 0 against 3/15
    q, k = uniform(1, 5), uniform(1, 5)
    assert snapkv(q, k, v[:, :5], 1.0, 2, w=1, kernel=3, pool="avg")["kept"] == [[1, 4]]


def test_group_sum_and_max() -> None:
    odds = np.array([[12, 4, 2, 2], [1, 10, 5, 4]]) / 20
    k = np.log(odds).T[None]  # [1, 4, 2]: head 0 reads the first coordinate, head 1 the second
    q = np.stack([np.tile([1.0, 0.0], (4, 1)), np.tile([0.0, 1.0], (4, 1))])
    assert snapkv(q, k, k, 1.0, 2, w=1, kernel=1)["kept"] == [[1, 3]]  # .65 < .70
    assert snapkv(q, k, k, 1.0, 2, w=1, kernel=1, group="max")["kept"] == [[0, 3]]  # .6 > .5


def test_h2o_and_vatp() -> None:
    q, k, v = uniform(1, 5), uniform(1, 5), np.ones((1, 5, 2))
    assert h2o(q, k, v, 1.0, 3)["kept"] == [[0, 3, 4]]  # column sums fall; the odd entry is recent
    assert h2o(q, k, v, 1.0, 1)["kept"] == [[4]]
    v[0, 2] = [5, -5]  # 0.783 * 10 beats 2.283 * 2
    assert vatp(q, k, v, 1.0, 3, sinks=0)["kept"] == [[2, 3, 4]]
    assert vatp(q, k, v, 1.0, 3)["kept"] == [[0, 3, 4]]  # sinks fill the heavy half
    assert vatp(q, k, v, 1.0, 4, sinks=1)["kept"] == [[0, 2, 3, 4]]


def test_pyramid_budgets() -> None:
    assert pyramid_budgets(6, 100, 3, w=2, beta=4) == [9, 6, 3]
    assert pyramid_budgets(6, 8, 3, w=2, beta=4) == [8, 6, 4]  # capped at n
    assert pyramid_budgets(6, 100, 3, w=2, beta=8) == [10, 6, 2]  # 7.5, 4, 0.5: the tie goes to layer 0
    assert pyramid_budgets(32, 100, 3) == pyramid_budgets(32, 20, 3) == [32] * 3
    assert sum(pyramid_budgets(517, 2048, 30)) == 30 * 517


# --- selkv ----------------------------------------------------------------------------------------

TINY = {"w": 2, "m_r": 1, "kernel": 1}


def tiny_values() -> np.ndarray:
    return np.array([[[2.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])


def test_selkv_by_hand() -> None:
    """a = 7/12 for tokens 0 to 2; token 0 has the largest ‖v‖, and 1 and 2 go to it with g = 1/√2 and 1."""
    g = 1 / math.sqrt(2)
    out = selkv(uniform(1, 4), uniform(1, 4), tiny_values(), 1.0, 2, **TINY)
    assert out["kept"] == [[0, 3]]
    assert_allclose(out["values"][0, 0], np.array([2 + g + 1, g]) / (2 + g))
    assert_array_equal(out["values"][0, 1], [0, 1])
    assert_allclose(out["bias"], [[LOG(2 + g) / 2, 0]])
    assert_allclose(out["diagnostics"]["log_r"], [[LOG(2 + g), 0]])
    assert out["diagnostics"]["share_routed"] == 1
    assert_allclose(out["diagnostics"]["mean_gate"], (g + 1) / 2)
    assert out["diagnostics"]["floored"] == 0


def test_selkv_arms_by_hand() -> None:
    def arm(**options):
        return selkv(uniform(1, 4), uniform(1, 4), tiny_values(), 1.0, 2, **TINY, **options)

    gate = arm()
    evict = arm(merge=False, bias="none")
    assert evict["bias"] is None
    assert_array_equal(evict["values"], tiny_values()[:, [0, 3]])
    assert evict["diagnostics"]["share_routed"] == 1
    assert_array_equal(arm(merge=False)["bias"], [[0, 0]])
    every = arm(gate=False)
    assert_allclose(every["values"][0, 0], [4 / 3, 1 / 3])
    assert_allclose(every["bias"], [[LOG(3) / 2, 0]])
    assert_allclose(arm(alpha=1.0)["bias"], 2 * gate["bias"])
    assert_allclose(arm(bias="count")["bias"], [[LOG(3), 0]])
    assert_allclose(arm(bias="gated-count", alpha=0.1)["bias"], [[LOG(2 + 1 / math.sqrt(2)), 0]])
    assert_array_equal(arm(bias="none")["values"], gate["values"])


def test_a_closed_gate_is_eviction() -> None:
    v = np.array([[[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]])  # opposed, orthogonal, zero
    out = selkv(uniform(1, 5), uniform(1, 5), v, 1.0, 2, **TINY)
    assert out["kept"] == [[0, 4]]
    assert_array_equal(out["values"], v[:, [0, 4]])
    assert_array_equal(out["bias"], [[0, 0]])
    assert out["diagnostics"]["share_routed"] == 1
    assert out["diagnostics"]["mean_gate"] == 0


def test_selkv_norm_and_pooling() -> None:
    v = np.array([[[3.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 0.0]]])  # L2 3 > 2.83, L1 3 < 4
    run = [uniform(1, 4), uniform(1, 4), v, 1.0, 2]
    assert selkv(*run, **TINY)["kept"] == [[0, 3]]
    assert selkv(*run, **TINY, norm="l1")["kept"] == [[1, 3]]
    # kernel 3 over a‖v‖: token 0 has (0 + 3 + 2.83) / 3 and token 1 (3 + 2.83 + 0) / 3, a tie
    assert selkv(*run, w=2, m_r=1, kernel=3)["kept"] == [[0, 3]]


def test_selkv_leaves_short_prompts_alone_and_keeps_the_last_of_a_small_budget() -> None:
    q, k, v = random_prompt(n=20)
    for options in ({"w": 21}, {"w": 4, "m_r": 20}):
        out = selkv(q, k, v, 0.3, 10, **options)
        assert out["diagnostics"]["untouched"]
        assert_array_equal(out["keys"], k)
    for target in ("own", "shared"):
        out = selkv(q, k, v, 0.3, 6, w=4, m_r=6, target=target)
        assert out["kept"] == [list(range(14, 20))] * 2
        assert_array_equal(out["bias"], np.zeros((2, 6)))
        assert out["diagnostics"]["share_routed"] == 0
        assert math.isnan(out["diagnostics"]["mean_gate"])


def test_selkv_routes_within_a_bucket_by_attention() -> None:
    v = np.ones((1, 6, 2))
    v[0, 0] = 2
    run = [uniform(1, 6), uniform(1, 6), v, 1.0, 2]
    drop = selkv(*run, **TINY, bucket=2)
    assert drop["kept"] == [[0, 5]]
    assert drop["diagnostics"]["routes"] == [{1: 0}]
    assert drop["diagnostics"]["share_routed"] == 1 / 4
    anywhere = selkv(*run, **TINY, bucket=2, route="any")
    assert anywhere["diagnostics"]["routes"] == [{1: 0, 2: 0, 3: 0, 4: 0}]

    v[0, 2] = 2
    q, k = weighted(1, 1, 2, 1, 1, 1)
    routes = selkv(q, k, v, 1.0, 3, **TINY)["diagnostics"]["routes"]
    assert routes == [{1: 0, 3: 2, 4: 2}]  # token 1 comes before 2
    routes = selkv(*run[:2], v, 1.0, 3, **TINY)["diagnostics"]["routes"]
    assert routes == [{1: 0, 3: 0, 4: 0}]  # a tie goes to the lower index


def gqa(second: float = 0.5, **options):
    """Two KV heads of two query heads, window 1: a = .5 everywhere in head 0, (.2, 1.4, .2, .2) in head 1.

    Head 0 chooses token 0 and head 1 token 1; by the mean of c (.85, .6) only 0 survives the trim to one.
    """
    q0, k1 = weighted(0.1, 0.7, 0.1, 0.1)
    q = np.concatenate([uniform(2, 4), q0, q0])
    v = np.zeros((2, 4, 2))
    v[..., 0] = [[3, 1, 1, 1], [1, second, 1, 1]]
    return selkv(q, np.concatenate([uniform(1, 4), k1]), v, 1.0, 2, w=1, m_r=1, kernel=1, **options)


def test_selkv_gqa_union_trim_and_ratio() -> None:
    out = gqa()
    assert out["kept"] == [[0, 3], [0, 3]]
    assert out["diagnostics"]["union_size"] == 2
    assert out["diagnostics"]["routes"] == [{1: 0, 2: 0}, {}]  # token 0 is not in head 1's own set
    assert out["diagnostics"]["share_routed"] == 0.5
    assert_allclose(out["values"][:, 0, 0], [5 / 3, 1])
    assert_allclose(out["bias"], [[LOG(2) / 2, 0]] * 2)  # R = 3 and 1
    assert_allclose(gqa(ratio="ratio-of-sums")["bias"], [[LOG(1.7 / 0.7) / 2, 0]] * 2)
    assert_allclose(gqa(ratio="per-head")["bias"], [[LOG(3) / 2, 0], [0, 0]])
    for ratio in ("mean", "ratio-of-sums", "per-head"):  # counts are averaged whatever the option of R
        assert_allclose(gqa(ratio=ratio, bias="count")["bias"], [[LOG(1 + 2 / 2), 0]] * 2)
        assert_allclose(gqa(ratio=ratio, bias="gated-count")["bias"], [[LOG(2), 0]] * 2)
    assert gqa(second=0.9)["kept"] == [[1, 3]] * 2  # means .85 and .88, though head 0 gives token 0 1.5
    shared = gqa(target="shared")
    assert shared["diagnostics"]["share_routed"] == 1
    assert_allclose(shared["bias"], [[LOG((3 + 9) / 2) / 2, 0]] * 2)  # head 1: (.2 + 1.4 + .2) / .2 = 9
    assert_allclose(shared["values"][1, 0, 0], (0.2 * 1 + 1.4 * 0.5 + 0.2 * 1) / 1.8)


def test_selkv_mha_keeps_a_set_a_head() -> None:
    q, k, v = random_prompt(heads=2)
    out = selkv(q, k, v, 0.3, 20, w=8, m_r=6)
    alone = [selkv(q[[h]], k[[h]], v[[h]], 0.3, 20, w=8, m_r=6) for h in range(2)]
    assert out["kept"] == [a["kept"][0] for a in alone]
    assert out["kept"][0] != out["kept"][1]
    assert_allclose(out["bias"], np.concatenate([a["bias"] for a in alone]))
    assert out["diagnostics"]["union_size"] is None


def test_selkv_merges_into_the_kept_set_of_snapkv() -> None:
    q, k, v = random_prompt()
    out = selkv(q, k, v, 0.3, 20, w=8, m_r=6, select="snapkv", snap_w=8)
    assert out["kept"] == snapkv(q, k, v, 0.3, 20, w=8)["kept"]
    assert np.any(out["bias"][0] != out["bias"][1])  # R per head
    assert not np.any(out["bias"][:, -8:])  # the window receives nothing


def test_selkv_floors_a_kept_slot_without_attention() -> None:
    q, k = weighted(1e-43, 1e-43, 1)
    v = np.array([[[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    out = selkv(q, k, v, 1.0, 2, w=1, m_r=1, kernel=1)
    assert out["kept"] == [[0, 2]]
    assert out["diagnostics"]["floored"] == 1
    assert_allclose(out["values"][0, 0], [2, 0])
    assert_allclose(out["bias"], [[0, 0]], atol=1e-14)


def test_selkv_repositions_keys_only() -> None:
    q, k, v = random_prompt()
    table = rope(60, 8)
    plain = selkv(q, k, v, 0.3, 20, w=8, m_r=6)
    moved = selkv(q, k, v, 0.3, 20, w=8, m_r=6, reposition=True, **table)
    assert moved["kept"] == plain["kept"]
    assert_array_equal(moved["positions"], [range(40, 60)] * 2)
    assert_array_equal(moved["values"], plain["values"])
    assert_allclose(moved["keys"][:, -6:], k[:, -6:], atol=1e-14)
    old = plain["kept"][1][0]
    raw = unrotate(k[1, old], table["cos"][old], table["sin"][old])
    assert_allclose(moved["keys"][1, 0], rotate(raw, table["cos"][40], table["sin"][40]), atol=1e-14)


# --- kvslimmer ------------------------------------------------------------------------------------


def counters(out, **expected: int) -> bool:
    return {c: out["diagnostics"][c] for c in COUNTERS} == {**dict.fromkeys(COUNTERS, 0), **expected}


def test_kvslimmer_three_tokens_in_two_slots() -> None:
    """Uniform attention: the pair holds 2/3 >= 0.45, so it is left out and falls back to equal p-weights."""
    k = np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    table = rope(3, 2)
    out = kvslimmer(uniform(1, 3), k, k, 1.0, 2, **table)
    raw = unrotate(k, table["cos"], table["sin"])
    assert_allclose(out["keys"][0, 0], rotate((raw[0, 0] + raw[0, 1]) / 2, table["cos"][1], table["sin"][1]))
    assert_allclose(out["keys"][0, 1], k[0, 2], atol=1e-14)
    assert_array_equal(out["values"][0], [[2, 3], [5, 6]])
    assert_array_equal(out["positions"], [[1, 2]])  # equal masses: the later
    assert_array_equal(out["l"], [[2, 1]])
    assert_allclose(out["bias"], [[LOG(2), 0]])
    assert counters(out, merges=1, left_out=1, no_mass=1)
    assert_allclose(out["output"][0], [[1, 2], [2, 3], [3, 4]])
    assert (out["diagnostics"]["chunk"], out["diagnostics"]["sinks"], out["diagnostics"]["peak"]) == (1, 0, 3)


def test_kvslimmer_merges_of_merges() -> None:
    k = np.array([[[0.0, 8.0], [0.0, 4.0], [0.0, 3.0], [0.0, 1.0]]])
    run = [uniform(1, 4), k, k, 1.0, 2]
    out = kvslimmer(*run, **no_rope(4))
    # the slot of two has p = 1/2 against 1/4: key weights 2/3 and 1/3, its position stays
    assert_allclose(out["keys"][0], [[0, (2 * 6 + 3) / 3], [0, 1]])
    assert_allclose(out["values"][0, 0], [0, 5])
    assert_array_equal(out["positions"], [[1, 3]])
    assert_array_equal(out["l"], [[3, 1]])
    assert_allclose(out["rho"], [[3, 1]])  # 1 -> 2 -> 2 (3/4) / (1/2)
    assert_allclose(out["output"], causal_attention(*run[:3], 1.0))  # nothing is lost under uniform attention
    unbiased = kvslimmer(*run, bias="none", **no_rope(4))
    assert unbiased["bias"] is None
    assert_allclose(unbiased["output"][0, 3], [0, (6 + 3 + 1) / 3])
    half = kvslimmer(*run, bias="ratio", values="mass", **no_rope(4))
    # first rho = 2, attended with √2: p = √2 : 1 : 1, so rho = 2 (√2 + 1) / √2
    assert_allclose(half["rho"][0, 0], 2 + math.sqrt(2))
    assert_allclose(half["bias"], [[LOG(2 + math.sqrt(2)) / 2, 0]])
    assert_allclose(half["values"][0, 0], [0, (math.sqrt(2) * 6 + 3) / (math.sqrt(2) + 1)])
    clamped = kvslimmer(*run, bias="clamp", clamp=2.0, **no_rope(4))
    assert_allclose(clamped["bias"], [[LOG(2), 0]])
    assert_array_equal(clamped["l"], [[3, 1]])


def test_kvslimmer_drop_lighter() -> None:
    k = np.array([[[0.0, 8.0], [0.0, 4.0], [0.0, 3.0], [0.0, 1.0]]])
    out = kvslimmer(uniform(1, 4), k, k, 1.0, 2, weights="drop-lighter", **no_rope(4))
    assert_array_equal(out["keys"], k[:, 2:])  # ties: the later survives, twice
    assert_array_equal(out["positions"], [[2, 3]])
    assert_array_equal(out["l"], [[1, 1]])
    assert_array_equal(out["rho"], [[1, 1]])
    assert counters(out, merges=2, dropped_l=2)


def five(second: float, **options):
    """Five tokens in four slots, p = 1/5 each; the first pair merges. The values sum to zero, so o = 0.

    ‖c11‖ = .12, ‖c22‖ = .12·second, ‖c12‖ = .04·(1 + second).
    """
    v = np.zeros((1, 5, 2))
    v[0, :3, 0] = 1, second, -1 - second
    k = np.zeros((1, 5, 2))
    k[0, 0, 1] = 1  # the merged key's second coordinate is the first key's weight
    return kvslimmer(uniform(1, 5), k, v, 1.0, 4, **no_rope(5), **options)


def test_kvslimmer_weights_by_hand() -> None:
    assert_allclose(five(1.5)["keys"][0, 0, 1], (0.12 - 0.1) / (0.12 + 0.18 - 0.2))
    assert counters(five(1.5), merges=1)
    assert_allclose(five(1.5, weights="diagonal")["keys"][0, 0, 1], 0.12 / 0.30)
    assert_allclose(five(1.5, weights="mass")["keys"][0, 0, 1], 0.5)
    assert_allclose(five(3.0)["keys"][0, 0, 1], 0.5)  # (.12 - .16) / .16 < 0: fallback
    assert counters(five(3.0), merges=1, outside=1)
    assert_allclose(five(3.0, weights="diagonal")["keys"][0, 0, 1], 0.25)
    assert_allclose(five(1.5)["values"][0, 0], [1.25, 0])
    assert_allclose(five(1.5, values="as-key")["values"][0, 0], [0.2 * 1 + 0.8 * 1.5, 0])
    assert_allclose(five(1.5, values="sum", bias="none")["values"][0, 0], [2.5, 0])
    assert_allclose(five(1.5, values="plain-mean", bias="none")["values"][0, 0], [1.25, 0])


def test_kvslimmer_second_round() -> None:
    """Odds 3 1 1 3: only the middle pair fits in the first round, the second joins it to token 0."""
    q, k = weighted(3, 1, 1, 3, 1, 1, tags=(10, 20, 40, 0, 0, 0))
    v = np.zeros((1, 6, 2))
    v[0, :, 0] = 5, 1, 1, 7, 7, 7  # equal values in the pair: the exact weight is 1/2
    out = kvslimmer(q, k, v, 1.0, 4, chunk=2, **no_rope(6))
    assert counters(out, merges=2, composite=1)
    assert_array_equal(out["l"], [[3, 1, 1, 1]])
    assert_array_equal(out["positions"], [[0, 3, 4, 5]])
    assert_allclose(out["keys"][0, 0], [0.6 * LOG(3), 0.6 * 10 + 0.4 * 30])
    assert_allclose(out["values"][0, 0], [7 / 3, 0])
    mean = kvslimmer(q, k, v, 1.0, 4, chunk=2, weights="mean", **no_rope(6))
    assert_allclose(mean["keys"][0, 0], [LOG(3) / 3, 70 / 3])
    assert counters(mean, merges=2)
    drop = kvslimmer(q, k, v, 1.0, 4, chunk=2, weights="drop-lighter", **no_rope(6))
    assert_array_equal(drop["positions"], [[0, 3, 4, 5]])  # 3 against the survivor's 1 + 1
    q, k = weighted(3, 2, 2, 3, 1, 1)
    drop = kvslimmer(q, k, v, 1.0, 4, chunk=2, weights="drop-lighter", **no_rope(6))
    assert_array_equal(drop["positions"], [[2, 3, 4, 5]])  # 3 against 2 + 2


def test_kvslimmer_group_heads_share_a_slot() -> None:
    """Two query heads: masses and norms are summed over both."""
    v = np.zeros((1, 5, 2))
    v[0, :3, 0] = 1, 1.5, -2.5
    k = np.zeros((1, 5, 2))
    k[0, 0, 1] = 1
    out = kvslimmer(uniform(2, 5), k, v, 1.0, 4, **no_rope(5))
    assert_allclose(out["keys"][0, 0, 1], 0.2)
    assert_allclose(out["output"][0], out["output"][1])
    # odds 3 1 4 and 1 7 8: masses 3/8 + 1/16 and 1/8 + 7/16
    odds = np.log(np.array([[[3.0, 1.0], [1.0, 7.0], [4.0, 8.0]]]))
    q = np.stack([np.tile([1.0, 0.0], (3, 1)), np.tile([0.0, 1.0], (3, 1))])
    summed = kvslimmer(q, odds, odds, 1.0, 2, weights="mass", **no_rope(3))
    assert_allclose(summed["keys"][0, 0], [7 / 16 * LOG(3), 9 / 16 * LOG(7)])
    assert_array_equal(summed["positions"], [[1, 2]])
    three = kvslimmer(uniform(2, 3), k[:, :3], v[:, :3], 1.0, 2, **no_rope(3))
    assert counters(three, merges=1, left_out=2, no_mass=1)


def test_kvslimmer_guards_of_one_pair() -> None:
    def weight(pairs, v1, v2, exact=True):
        s1, s2 = (Slot(np.zeros(2), np.array(v), i, column=i) for i, v in enumerate((v1, v2)))
        counts = dict.fromkeys(COUNTERS, 0)
        seen = [Seen(np.array(p), np.zeros(2)) for p in pairs]
        return hessian_weight(s1, s2, seen, exact, counts), {c for c, n in counts.items() if n}

    assert weight([(0.0, 0.0)], [1.0, 0], [1.0, 0]) == (None, {"no_mass"})
    assert weight([(0.2, 0.3), (0.0, 0.0)], [1.0, 0], [1.0, 0]) == (None, {"left_out", "no_mass"})
    assert weight([(0.1, 0.1)], [0.0, 0], [0.0, 0]) == (None, {"denominator"})  # v = o: every norm is 0
    assert weight([(0.23, 0.24)], [1.0, 0], [1.0, 0]) == (None, {"left_out", "no_mass"})
    left, counted = weight([(0.25, 0.25), (0.1, 0.1)], [1.0, 0], [0.0, 1])
    assert_allclose(left, 0.5)
    assert counted == {"left_out"}


def test_kvslimmer_pair_without_mass_merges_by_l() -> None:
    s1 = Slot(np.array([3.0, 0]), np.array([3.0, 0]), 4, l=2, rho=2, column=0)
    s2 = Slot(np.array([0.0, 0]), np.array([0.0, 0]), 7, l=1, rho=1, column=1)
    counts = dict.fromkeys(COUNTERS, 0)
    out = merge_pair(s1, s2, [Seen(np.zeros(2), np.ones(2))], "exact", "mass", counts)
    assert_allclose(out.key, [2, 0])
    assert_allclose(out.value, [2, 0])
    assert (out.l, out.rho, out.position, out.mass) == (3, 3, 4, 0)
    assert counts["no_mass"] == 1


@pytest.mark.parametrize("weights", ["exact", "diagonal", "mass", "mean", "drop-lighter"])
def test_kvslimmer_accounts_for_every_token(weights: str) -> None:
    q, k, v = random_prompt()
    for m, chunk in ((1, None), (2, None), (17, None), (20, 10), (21, 100), (59, 3)):
        out = kvslimmer(q, k, v, 0.3, m, chunk=chunk, weights=weights, **rope(60, 8))
        counts = out["diagnostics"]
        assert out["l"].sum() + counts["dropped_l"] == 2 * 60
        assert counts["merges"] == (0 if m == 1 else 2 * (60 - m))
        assert counts["peak"] == min(60, m + counts["chunk"])
        if m > 1 and weights != "drop-lighter":
            assert_array_equal(out["l"].sum(1), [60, 60])
        raw = min(m, counts["chunk"])
        assert_allclose(out["keys"][:, -raw:], k[:, -raw:], atol=1e-14)  # the newest chunk stays raw
        sinks = counts["sinks"]
        assert sinks == m // 8
        assert_allclose(out["keys"][:, :sinks], k[:, :sinks], atol=1e-14)
        assert_allclose(out["output"][:, :sinks], causal_attention(q, k, v, 0.3)[:, :sinks], atol=1e-14)


def test_kvslimmer_one_entry_is_the_last_token() -> None:
    q, k, v = random_prompt(n=5)
    out = kvslimmer(q, k, v, 0.3, 1, **rope(5, 8))
    assert_allclose(out["keys"], k[:, -1:], atol=1e-14)
    assert_array_equal(out["positions"], [[4], [4]])
    assert out["diagnostics"]["dropped_l"] == 2 * 4


# --- the other merging baselines ------------------------------------------------------------------


def test_lookm_by_hand() -> None:
    k = np.array([[[1.0, 0.0], [2.0, 0.0], [0.0, 4.0], [0.0, 1.0]]])
    v = np.array([[[0.0, 0.0], [4.0, 0.0], [0.0, 8.0], [2.0, 2.0]]])
    out = lookm(uniform(1, 4), k, v, 1.0, 2, space="post")
    assert out["kept"] == [[0, 3]]
    assert_allclose(out["keys"][0], [[1.25, 0], [0, 1.75]])  # means of 1, 1.5 and of 1, 2.5
    assert_allclose(out["values"][0], [[1, 0], [1.5, 3.5]])
    table = rope(4, 2)
    pre = lookm(uniform(1, 4), rotate(k, **table), v, 1.0, 2, **table)
    assert_allclose(pre["keys"][0], rotate(out["keys"][0], table["cos"][[0, 3]], table["sin"][[0, 3]]))
    assert_allclose(pre["values"], out["values"])


def test_weightedkv_by_hand() -> None:
    v = np.array([[[9.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    out = weightedkv(uniform(1, 4), uniform(1, 4), v, 1.0, 2)
    assert out["kept"] == [[0, 3]]
    # mean attention of tokens 1 to 3: (1/2 + 1/3 + 1/4) / 3, (1/3 + 1/4) / 2, 1/4
    weight = np.array([13 / 36, 7 / 24, 1 / 4])
    assert_allclose(out["values"][0], [[9, 0], [*weight[:2] / weight.sum()]])


def test_kvmerger_by_hand() -> None:
    """Tokens 0 (heavy) and 7 (recent) are set aside; 1 to 3 are alike and so are 4 to 6."""
    k = np.zeros((1, 8, 2))
    k[0, 1:4, 0] = 1, 2, 3
    k[0, 4:7, 1] = 1
    v = np.zeros((1, 8, 2))
    v[0, 1:7, 0] = 1, 2, 3, 3, 5, 7
    out = kvmerger(uniform(1, 8), k, v, 1.0, 4, space="post")
    assert out["sets"] == [[[0], [1, 2, 3], [4, 5, 6], [7]]]
    assert out["diagnostics"]["threshold"] == [0.75]
    assert_array_equal(out["positions"][0], [0, 1, 4, 7])  # the most attended members
    weight = np.exp(-np.array([0, 1, 4]) / (2 * 5 / 3))
    centre = weight @ [1, 2, 3] / weight.sum()
    assert_allclose(out["keys"][0], [[0, 0], [centre, 0], [0, 1], [0, 0]])
    assert_allclose(out["values"][0][:, 0], [0, centre, 5, 0])  # equal keys: equal weights


def test_kvmerger_lowers_its_threshold() -> None:
    angle = np.cumsum([0, 0, 0.1, 1.0, 0.2, 1.1, 0.3, 0])  # between neighbouring candidates 1 to 6
    k = np.stack([np.cos(angle), np.sin(angle)], -1)[None]
    run = [uniform(1, 8), k, k, 1.0]
    assert kvmerger(*run, 6, space="post")["sets"] == [[[0], [1, 2], [3, 4], [5, 6], [7]]]
    five_left = kvmerger(*run, 5, space="post")
    assert len(five_left["keys"][0]) == 5
    lower = kvmerger(*run, 4, space="post")
    assert lower["sets"] == [[[0], [1, 2, 3, 4], [5, 6], [7]]]
    assert_allclose(lower["diagnostics"]["threshold"], [math.cos(1.1)])
    k = np.tile([[1.0, 0.0], [0.0, 1.0]], (4, 1))[None]  # every cosine is 0, none is strictly above
    none = kvmerger(uniform(1, 8), k, k, 1.0, 4, space="post")
    assert none["sets"] == [[[0], [1, 2, 3, 4, 5, 6], [7]]]
    assert none["diagnostics"]["threshold"] == [-1.0]


def test_asymkv_merge() -> None:
    key, g = asymkv_merge([1, 1, 1], [5, 5, 5], [1, 0, -2], [1, 0, 0])
    assert_allclose(key, [3, 3, 1])
    assert_allclose(g, [2, 0, -2])


def test_released_merge_loses_the_middle_of_overlapping_pairs() -> None:
    """α = 1/3, o = 0: h = 1/9, 1/9, 0 and h12 = 2/9, 1/9; the weights are 1/2 and (1/9-1/9)/(1/9-2/9) = 0."""
    v = np.array([[[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]])
    k = np.array([[[1.0, 0.0], [3.0, 0.0], [7.0, 0.0]]])
    out = released_merge(k, v, [[4, 4, 1]], np.zeros((1, 0)), [[2, 2, 2]], 1, 1)
    assert out["begins"] == [0, 1]
    assert_allclose(out["weights"], [[0.5, 0]], atol=1e-12)
    assert_allclose(out["k"], [[[2, 0]]])
    assert_allclose(out["v"], [[[0, 0]]], atol=1e-15)
    assert_array_equal(out["l"], [[5]])  # 8, clamped
    assert_array_equal(out["lost"], [1])  # token 2 went with the merge it was in
    assert_allclose(out["h"], [[(1 / 9 + 1 / 9) / 4]])


def test_released_merge_prefers_newer_and_lighter_pairs_and_smooths() -> None:
    v = np.array([[[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]])
    equal = released_merge(v, v, np.ones((1, 4)), np.zeros((1, 0)), np.ones((1, 4)), 1, 3)
    assert equal["begins"] == [2]  # 1 / exp(m / γ) falls with m
    assert_array_equal(equal["lost"], [0])
    light = released_merge(v, v, [[1, 1, 2, 2]], np.zeros((1, 0)), np.ones((1, 4)), 1, 3)
    assert light["begins"] == [0]
    smooth = released_merge(v, v, np.ones((1, 4)), [[0.5, 0.5]], np.ones((1, 4)), 2, 3)
    assert_allclose(smooth["h"][0, :2], 0.125 / 2 + 0.5 / 2)  # 1/4 (1 - 1/2) now, ½ before
    zero = released_merge(v, np.ones((1, 4, 2)), np.ones((1, 4)), np.zeros((1, 0)), np.ones((1, 4)), 1, 3)
    assert zero["halves"] == 1
    assert_allclose(zero["weights"], 0.5)


def test_released_positions() -> None:
    positions, query = released_positions([[1, 3, 2], [9, 9, 9]])
    assert_array_equal(positions, [0, 3, 5])
    assert query == 6
