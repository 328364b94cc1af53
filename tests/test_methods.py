"""Each method against a naive loop written straight from its equations (tests/naive.py shares no code with it)."""

from __future__ import annotations

from typing import Any

import naive
import numpy as np
import pytest
import torch

from kvrepro import methods, vectors
from kvrepro.attention import Observed, attend_observed
from kvrepro.entries import Entries
from kvrepro.rope import Rope

SCALING = 0.35
SHAPES = {"gqa": (6, 2), "mha": (3, 3), "mqa": (4, 1)}
BASE = 10000.0


def tables(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's rotary tables in float64 for D = 8."""
    frequency = BASE ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = positions[..., None].double() * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def no_tables(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a model without RoPE."""
    return torch.ones(*positions.shape, 8, dtype=dtype), torch.zeros(*positions.shape, 8, dtype=dtype)


LLAMA, UNIT = Rope(tables), Rope(no_tables)


def prompt(shape: str, n: int, seed: int = 0, ties: bool = False) -> tuple[torch.Tensor, ...]:
    """Random q [H, n, 8], k, v [Hkv, n, 8]; with ``ties``, tokens repeat so that scores are equal to the bit."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = SHAPES[shape]
    q, k, v = (
        torch.randn(count, n, 8, generator=generator, dtype=torch.float64) * size
        for count, size in ((heads, 1.5), (kv_heads, 1.5), (kv_heads, 1.0))
    )
    if ties:  # equal keys and values draw equal attention from the same queries
        k[:, 10:14], v[:, 10:14] = k[:, 10:11], v[:, 10:11]
        k[:, 20:22], v[:, 20:22] = k[:, 10:11], v[:, 10:11]
    return q, k, v


def run(
    method: methods.Method, q: Any, k: Any, v: Any, m: int, dtype: Any = torch.float64, rope: Rope = LLAMA
) -> Any:
    """What a layer does with one row: entries, diagnostics and, of a chunked method, the prompt's attention."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    n = k.shape[1]
    positions = torch.arange(n)[None]
    if method.untouched(n, m):
        return Entries(k, v, positions), {}, None
    if method.schedule == "one-shot":
        entries, diagnostics = method.compress(Entries(k, v, positions), Observed(q, SCALING, rope), m)
        return entries, diagnostics, None
    stored, total, outputs, start = None, {}, [], 0
    for size in method.chunks(n, m):
        piece = slice(start, start + size)
        fresh = (k[:, piece], v[:, piece], positions[:, piece])
        stored = Entries(*fresh) if stored is None else stored.extend(*fresh)
        observed = Observed(q[:, piece], SCALING, rope)
        outputs.append(attend_observed(stored, observed))
        stored, diagnostics = method.compress(stored, observed, m)
        total = {key: total.get(key, 0) + number for key, number in diagnostics.items()}
        start += size
    return stored, total, torch.cat(outputs, 1)


def check(entries: Entries, reference: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Same positions; keys, values and bias within ``tolerance``."""
    heads = entries.kv_heads
    bias = torch.zeros(1, len(entries)) if entries.bias is None else entries.bias  # None means zero
    bias = bias.expand(heads, -1).double()
    held = bias > -torch.inf  # KVMerger's heads may end with different numbers of entries
    places = entries.positions.expand(heads, -1)
    for head in range(heads):
        assert np.array_equal(places[head][held[head]], reference["positions"][head])
        for name in ("keys", "values"):
            ours = getattr(entries, name)[head][held[head]].double().numpy()
            assert np.abs(ours - reference[name][head]).max() < tolerance, name
    if reference["bias"] is None:
        assert not bias[held].any()
        assert entries.bias is None or not held.all()
    else:
        assert np.abs(bias.numpy() - reference["bias"]).max() < tolerance


COS, SIN = (table.numpy() for table in tables(torch.arange(400), torch.float64))


def rotary(n: int) -> dict[str, Any]:
    return {"cos": COS[:n], "sin": SIN[:n]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("n", "m"), [(61, 60), (61, 17), (97, 24), (40, 3), (40, 1)])
def test_streaming_llm(shape: str, n: int, m: int) -> None:
    q, k, v = prompt(shape, n)
    check(run(methods.make("streaming-llm"), q, k, v, m)[0], naive.streaming_llm(q, k, v, SCALING, m))
    reindexed = naive.streaming_llm(q, k, v, SCALING, m, reindex=True, **rotary(n))
    check(run(methods.make("streaming-llm/reindexed"), q, k, v, m)[0], reindexed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "m"), [(90, 89), (90, 45), (83, 33), (83, 32), (83, 7)])
@pytest.mark.parametrize("settings", [
    {}, {"window": 8, "kernel": 5, "pooling": "avg"}, {"group": "max"}, {"window": 1, "kernel": 3},
    {"window": 64, "kernel": 5, "pooling": "avg"},
])  # fmt: skip
def test_snapkv(shape: str, ties: bool, n: int, m: int, settings: dict[str, Any]) -> None:
    q, k, v = prompt(shape, n, ties=ties)
    names = {"window": "w", "pooling": "pool"}
    reference = naive.snapkv(q, k, v, SCALING, m, **{names.get(key, key): x for key, x in settings.items()})
    check(run(methods.make("snapkv", **settings), q, k, v, m)[0], reference)


BASELINE_CASES: dict[str, Any] = {
    "h2o": naive.h2o,
    "vatp": naive.vatp,
    "weightedkv": naive.weightedkv,
    "look-m": naive.lookm,
    "look-m/post": lambda *a, **k: naive.lookm(*a, **k, space="post"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BASELINE_CASES)
@pytest.mark.parametrize(("n", "m"), [(90, 89), (90, 45), (83, 21), (60, 5), (40, 1)])
def test_whole_prompt_selectors_and_merges(shape: str, name: str, n: int, m: int) -> None:
    q, k, v = prompt(shape, n, seed=n + m)
    tables = rotary(n) if "look" in name else {}
    check(run(methods.make(name), q, k, v, m)[0], BASELINE_CASES[name](q, k, v, SCALING, m, **tables))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("n", "m"), [(90, 89), (90, 60), (90, 45), (83, 33), (83, 20)])
def test_pyramidkv(shape: str, n: int, m: int) -> None:
    q, k, v = prompt(shape, n, seed=n + m)
    held = []
    for layer in range(7):
        observed = Observed(q, SCALING, Rope(tables), layer=layer, layers=7)
        entries, found = methods.make("pyramidkv").compress(Entries(k, v, torch.arange(n)[None]), observed, m)
        reference = naive.pyramidkv(q, k, v, SCALING, m, layer=layer, layers=7)
        check(entries, reference)
        assert found["layer_budget"] == reference["diagnostics"]["budget"] == len(entries)
        held.append(len(entries))
    assert sum(held) == 7 * m and held == sorted(held, reverse=True)
    if m > 32:
        assert held[0] > held[-1]  # not silently uniform


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("space", ["pre", "post"])
@pytest.mark.parametrize(
    ("n", "m", "alike"),
    [(60, 40, 0.0), (60, 40, 3.0), (60, 55, 8.0), (60, 16, 3.0), (50, 3, 1.0), (61, 60, 3.0)],
)
def test_kvmerger(shape: str, space: str, n: int, m: int, alike: float) -> None:
    """``alike``: a shared direction added to all keys, so that many, some or no neighbours pass the threshold."""
    q, k, v = prompt(shape, n, seed=n + m)
    k = k + alike
    reference = naive.kvmerger(q, k, v, SCALING, m, **rotary(n), space=space)
    entries, found, _ = run(methods.make("kvmerger", space=space), q, k, v, m)
    assert found["threshold"] == pytest.approx(np.mean(reference["diagnostics"]["threshold"]), abs=1e-10)
    check(entries, reference)


SELKV_ARMS: dict[str, dict[str, Any]] = {  # arm -> naive's settings
    "": {},
    "evict": {"merge": False, "bias": "none"},
    "merge-all": {"gate": False, "bias": "none"},
    "gate": {"bias": "none"},
    "gate+count": {"bias": "count"},
    "gate+gated-count": {"bias": "gated-count"},
    "merge-all+ratio": {"gate": False},
    "alpha-0.25": {"alpha": 0.25},
    "alpha-1": {"alpha": 1.0},
    "on-snapkv": {"select": "snapkv"},
    "on-bifocal": {"select": "bifocal"},
    "on-bifocal+gate": {"select": "bifocal", "bias": "none"},
    "on-bifocal+gated-count": {"select": "bifocal", "bias": "gated-count"},
    "on-bifocal+merge-all": {"select": "bifocal", "gate": False, "bias": "none"},
    "reposition": {"reposition": True},
}
SELKV_OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"norm": "l1"}, {"norm": "l1"}),
    ({"no_target": "any"}, {"route": "any"}),
    ({"targets": "shared"}, {"target": "shared"}),
    ({"targets": "shared", "no_target": "any"}, {"target": "shared", "route": "any"}),
    ({"ratio": "sums"}, {"ratio": "ratio-of-sums"}),
    ({"ratio": "head"}, {"ratio": "per-head"}),
    ({"select": "snapkv", "bias": "count"}, {"select": "snapkv", "bias": "count"}),
    ({"window": 20, "recent": 5, "kernel": 3, "bucket": 7}, {"w": 20, "m_r": 5, "kernel": 3, "bucket": 7}),
    ({"recent": 0}, {"m_r": 0}),
]


def check_selkv(shape: str, n: int, m: int, ours: methods.Method, theirs: dict[str, Any], ties: bool) -> None:
    q, k, v = prompt(shape, n, seed=n + m, ties=ties)
    reference = naive.selkv(q, k, v, SCALING, m, **rotary(n), **theirs)
    entries, diagnostics, _ = run(ours, q, k, v, m)
    check(entries, reference)
    expected = reference["diagnostics"]
    if theirs.get("merge", True):
        for name in ("share_routed", "mean_gate"):
            assert diagnostics[name] == pytest.approx(expected[name], nan_ok=True, abs=1e-10)
        assert diagnostics["floored"] == expected["floored"]
        assert diagnostics["log_ratio_max"] == pytest.approx(expected["log_r"].max(), abs=1e-10)
    if m > 16:
        assert diagnostics.get("union_size") == expected["union_size"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", SELKV_ARMS)
@pytest.mark.parametrize(
    ("n", "m", "ties"),
    [(110, 109, False), (110, 55, True), (101, 28, False), (101, 17, True), (77, 12, False)],
)
def test_selkv_arms(shape: str, arm: str, n: int, m: int, ties: bool) -> None:
    ours = methods.make(f"selkv/{arm}" if arm else "selkv")
    check_selkv(shape, n, m, ours, SELKV_ARMS[arm], ties)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", range(len(SELKV_OPTIONS)))
@pytest.mark.parametrize(("n", "m"), [(110, 55), (101, 26)])
def test_selkv_options(shape: str, option: int, n: int, m: int) -> None:
    ours, theirs = SELKV_OPTIONS[option]
    check_selkv(shape, n, m, methods.make("selkv", **ours), theirs, ties=False)


def test_selkv_routes_something() -> None:
    """The comparison is not of empty routes: merges and biases do occur on these prompts."""
    q, k, v = prompt("gqa", 110, seed=165)
    entries, diagnostics, _ = run(methods.make("selkv"), q, k, v, 55)
    assert diagnostics["share_routed"] > 0.3 and entries.bias is not None and entries.bias.max() > 0.1


BIFOCAL_ARMS: dict[str, dict[str, Any]] = {
    "": {},
    **{
        f"window-{w}": {"near": w, "phrase": 1, "passage": 1, "share": 0.0, "far": 0.0}
        for w in (8, 32, 128, 512)
    },
    "sampled": {"near": 0, "far": 1.0},
    "whole": {"near": 0, "far": 1.0, "sample": None},
    "mixed": {"near": 8, "phrase": 1, "passage": 1, "share": 0.0, "far": 1.0, "sample": None},
    "sharp": {"phrase": 1, "passage": 1, "share": 0.0},
    "phrase": {"passage": 5},
    "passage": {"phrase": 31},
    "heads-apart": {"share": 0.0},
    "near-only": {"far": 0.0},
    "every-query": {"sample": None},
    "no-norm": {"norm": False},
}
BIFOCAL_OPTIONS: list[dict[str, Any]] = [
    {"sample": 1}, {"sample": 7, "far": 2.0}, {"sample": 82, "far": 1.0, "near": 0}, {"sample": 83},
    {"near": 1, "recent": 0}, {"near": 3, "phrase": 3, "passage": 9, "share": 2.5}, {"recent": 5, "norm": False},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", BIFOCAL_ARMS)
@pytest.mark.parametrize(
    ("n", "m", "ties"),
    [(90, 89, False), (90, 45, True), (83, 21, False), (83, 17, True), (83, 16, False), (40, 1, False)],
)
def test_bifocal_arms(shape: str, arm: str, n: int, m: int, ties: bool) -> None:
    q, k, v = prompt(shape, n, seed=n + m, ties=ties)
    entries, _, _ = run(methods.make(f"bifocal/{arm}" if arm else "bifocal"), q, k, v, m)
    check(entries, naive.bifocal(q, k, v, SCALING, m, **BIFOCAL_ARMS[arm]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", BIFOCAL_OPTIONS)
@pytest.mark.parametrize("m", [82, 41, 12])
def test_bifocal_options(shape: str, settings: dict[str, Any], m: int) -> None:
    q, k, v = prompt(shape, 83, seed=m)
    check(
        run(methods.make("bifocal", **settings), q, k, v, m)[0],
        naive.bifocal(q, k, v, SCALING, m, **settings),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", ["", "sampled", "whole", "window-128"])
def test_bifocal_on_more_tokens_than_it_samples(shape: str, arm: str) -> None:
    q, k, v = prompt(shape, 281)
    entries, _, _ = run(methods.make(f"bifocal/{arm}" if arm else "bifocal"), q, k, v, 101)
    check(entries, naive.bifocal(q, k, v, SCALING, 101, **BIFOCAL_ARMS[arm]))


def test_bifocal_arms_differ() -> None:
    """The comparison is not of one kept set: on a prompt longer than what votes each arm keeps its own."""
    q, k, v = prompt("gqa", 600)
    kept = [
        run(methods.make(f"bifocal/{arm}" if arm else "bifocal"), q, k, v, 150)[0].positions
        for arm in BIFOCAL_ARMS
    ]
    assert len({str(positions.tolist()) for positions in kept}) == len(BIFOCAL_ARMS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", [{}, {"bias": "none"}, {"sinks": 0}, {"sinks": 3}])
@pytest.mark.parametrize(
    ("n", "m", "ties"),
    [(90, 89, True), (90, 45, True), (83, 21, False), (83, 17, False), (83, 16, True), (83, 7, False), (40, 2, False),
     (40, 1, False)],
)  # fmt: skip
def test_adjacent(shape: str, settings: dict[str, Any], n: int, m: int, ties: bool) -> None:
    q, k, v = prompt(shape, n, seed=n + m, ties=ties)
    reference = naive.adjacent(q, k, v, SCALING, m, **rotary(n), **settings)
    entries, diagnostics, _ = run(methods.make("adjacent", **settings), q, k, v, m)
    check(entries, reference)
    assert np.array_equal(entries.mass, reference["l"])
    assert diagnostics["dropped_mass"] == reference["diagnostics"]["dropped_l"]
    assert diagnostics.get("merges", 0) == reference["diagnostics"]["merges"]


def test_adjacent_where_nothing_is_scored() -> None:
    """Values of 0 score 0, however attended: there l weighs the keys, and a tie leaves the later position."""
    q, k, v = prompt("gqa", 60, seed=2)
    v[:, 20:31] = 0
    reference = naive.adjacent(q, k, v, SCALING, 40, **rotary(60))
    assert (reference["l"] > 2).any()  # merged slots without a score merged again
    check(run(methods.make("adjacent"), q, k, v, 40)[0], reference)


SLIMMER_ARMS: dict[str, dict[str, Any]] = {
    "": {},
    "diagonal": {"weights": "diagonal"},
    "mass": {"weights": "mass"},
    "mean": {"weights": "mean"},
    "drop-lighter": {"weights": "drop-lighter"},
    "clamped": {"bias": "clamp"},
    "ratio": {"bias": "ratio", "values": "mass"},
    "ratio-alpha-1": {"bias": "ratio", "values": "mass", "alpha": 1.0},
    "no-bias": {"bias": "none"},
    "plain-sum": {"values": "sum", "bias": "none"},
    "plain-mean": {"values": "plain-mean", "bias": "none"},
    "mass-values": {"values": "mass"},
    "as-key": {"values": "as-key"},
}


def naive_answer(
    case: str, q: Any, k: Any, v: Any, scaling: float, m: int, cos: np.ndarray, sin: np.ndarray
) -> dict[str, Any]:
    """The naive loop's answer for a method or an arm of it."""
    base, _, arm = case.partition("/")
    prompt, rotary = (q, k, v, scaling, m), {"cos": cos, "sin": sin}
    if base == "selkv":
        return naive.selkv(*prompt, **rotary, **SELKV_ARMS[arm])
    if base == "kvslimmer":
        return naive.kvslimmer(*prompt, **rotary, **SLIMMER_ARMS[arm])
    if base == "streaming-llm":
        return naive.streaming_llm(*prompt, **rotary, reindex=arm == "reindexed")
    if base == "bifocal":
        return naive.bifocal(*prompt, **BIFOCAL_ARMS[arm])
    if base == "adjacent":
        return naive.adjacent(*prompt, **rotary, bias="none" if arm == "no-bias" else "log-l")
    if base in ("h2o", "vatp", "weightedkv"):
        return getattr(naive, base)(*prompt)
    if base == "look-m":
        return naive.lookm(*prompt, **rotary, space=arm or "pre")
    if base == "kvmerger":
        return naive.kvmerger(*prompt, **rotary, space=arm or "pre")
    if base == "pyramidkv":
        return naive.pyramidkv(*prompt, layer=0, layers=1)
    if base == "snapkv":
        return naive.snapkv(*prompt, **({"w": 64, "kernel": 5, "pool": "avg"} if arm else {}))
    if base in ("full", "full-folded"):
        return naive.everything(k, v)
    raise NotImplementedError(f"{case}: write its loop into naive.py and name it here")


def tied_prompt(shape: str, n: int, seed: int) -> tuple[torch.Tensor, ...]:
    """A prompt whose ties are exact in any order of summation, for rules that break ties towards the lower index.

    Dead keys draw an attention of exactly 0; they alternate between two directions whose cosine is exactly 0.6, or
    are equal.  Twins are neighbours with equal keys.  Of a budget of 34 the recent half begins with a dead token behind
    dropped dead ones.
    """
    q, k, v = prompt(shape, n, seed=seed)
    q[..., 0], q[..., 1] = q[..., 0].abs() + 1, 0
    dead, other = torch.zeros(2, 8, dtype=torch.float64)
    dead[0], other[:2] = -4000, torch.tensor([-2400, 3200])
    for at in (*range(3, 6), *range(24, 36), *range(44, 49), *range(50, 55)):
        k[:, at] = other if 24 <= at < 36 and at % 2 else dead
    for at in (10, 20, n - 5):
        k[:, at] = k[:, at - 1]
    k[:, 49, 0] = 4  # kept by all who look
    return q, k, v


@pytest.mark.parametrize("shape", ["gqa", "mha"])
@pytest.mark.parametrize("case", vectors.cases())
@pytest.mark.parametrize("m", [70, 60, 34])
def test_ties(shape: str, case: str, m: int) -> None:
    """Every method and arm on equal scores and cosines, also at one token above the budget; no RoPE, to keep them equal."""
    n = 71
    q, k, v = tied_prompt(shape, n, seed=m)
    expected = naive_answer(case, q, k, v, SCALING, m, np.ones((n, 8)), np.zeros((n, 8)))
    check(run(methods.make(case), q, k, v, m, rope=UNIT)[0], expected)


@pytest.mark.parametrize("shape", ["gqa", "mha"])
@pytest.mark.parametrize("arm", SLIMMER_ARMS)
@pytest.mark.parametrize(("n", "m", "sizes"), [
    (60, 59, {}), (60, 24, {}), (51, 18, {"chunk": 100, "sinks": 2}), (40, 5, {"chunk": 2}), (23, 2, {}), (20, 1, {}),
])  # fmt: skip
def test_kvslimmer(shape: str, arm: str, n: int, m: int, sizes: dict[str, int]) -> None:
    q, k, v = prompt(shape, n, seed=n * m)
    reference = naive.kvslimmer(q, k, v, SCALING, m, **rotary(n), **sizes, **SLIMMER_ARMS[arm])
    method = methods.make(f"kvslimmer/{arm}" if arm else "kvslimmer", **sizes)
    entries, diagnostics, output = run(method, q, k, v, m)
    check(entries, reference)
    assert np.array_equal(entries.mass, reference["l"])
    assert np.abs(entries.state["rho"].numpy() - reference["rho"]).max() < 1e-9
    assert np.abs(output.numpy() - reference["output"]).max() < 1e-10
    expected = reference["diagnostics"]
    assert diagnostics.get("dropped_mass", 0) == expected["dropped_l"]
    for name in ("merges", "left_out", "no_mass", "denominator", "outside", "composite"):
        assert diagnostics.get(name, 0) == expected[name], name
    assert method.used(n, m) == {key: expected[name] for key, name in
                                 (("sinks", "sinks"), ("chunk", "chunk"), ("peak_entries", "peak"))}  # fmt: skip
    if "drop" not in arm and m > 1:
        assert entries.mass.sum(1).tolist() == [n] * entries.kv_heads  # every token is accounted for


def test_kvslimmer_guards_fire_on_extreme_attention() -> None:
    """Sharp queries leave pairs out past the turning point, and dead pairs fall back; counted as the loop counts."""
    q, k, v = prompt("gqa", 60, seed=5)
    q, k = q * 3, k * 3
    q[..., 0] = q[..., 0].abs() + 1
    k[:, 20:26, 0] = -1e5  # no query looks there: α underflows to 0
    reference = naive.kvslimmer(q, k, v, SCALING, 16, **rotary(60))
    entries, diagnostics, _ = run(methods.make("kvslimmer"), q, k, v, 16)
    check(entries, reference, 1e-5)  # the dead keys are of size 1e5
    for name in ("left_out", "no_mass", "denominator", "outside", "composite"):
        assert diagnostics.get(name, 0) == reference["diagnostics"][name], name
    assert diagnostics["left_out"] > 0 and diagnostics["no_mass"] > 0


@pytest.mark.parametrize("name", ["streaming-llm", "snapkv", "selkv", "selkv/gate+count", "selkv/merge-all"])
def test_float32_keeps_the_same_tokens(name: str) -> None:
    """In float32: the float64 reference's indices, and values within rounding of it."""
    q, k, v = prompt("gqa", 150, seed=3)
    exact, _, _ = run(methods.make(name), q, k, v, 60)
    single, _, _ = run(methods.make(name), q, k, v, 60, torch.float32)
    assert torch.equal(single.positions, exact.positions)
    assert (single.values - exact.values).abs().max() < 1e-5
    if exact.bias is not None:
        assert single.bias is not None and (single.bias - exact.bias).abs().max() < 1e-5


def test_unknown_names_are_one_clear_line() -> None:
    for call in (
        lambda: methods.make("selkvv"), lambda: methods.make("selkv/no"), lambda: methods.make("selkv", w=3),
        lambda: methods.make("selkv", norm="l3"), lambda: methods.make("snapkv", kernel=4),
        lambda: methods.make("selkv", window=0), lambda: methods.make("selkv", window=2.5),
        lambda: methods.make("selkv", window=True), lambda: methods.make("selkv", window=None),
        lambda: methods.make("selkv", alpha=float("inf")), lambda: methods.make("selkv", alpha="x"),
        lambda: methods.make("selkv", reposition="no"), lambda: methods.make("snapkv", kernel=5.0),
        lambda: methods.make("kvslimmer", sinks="a"),
    ):  # fmt: skip
        with pytest.raises(methods.base.UserError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("budget", [{"retain": 0}, {"retain": -0.1}, {"retain": 1.1}, {"retain": float("nan")},
                                    {"entries": 0}, {"entries": -3}, {"entries": 2.5}, {"entries": True},
                                    {"entries": float("inf")}, {"retain": "x"}, {}])  # fmt: skip
def test_bad_budgets_are_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(methods.base.UserError):
        methods.Budget(**budget)


def test_budget_rounds_half_up_and_never_to_nothing() -> None:
    assert [methods.Budget(0.25).resolve(n) for n in (1, 2, 10, 14, 15)] == [1, 1, 3, 4, 4]
