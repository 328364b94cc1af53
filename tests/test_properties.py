"""What every method owes, whatever it is given: properties on adversarial prompts (hypothesis), guards by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import naive
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrepro import methods, vectors
from kvrepro.attention import Observed, attend, attend_observed
from kvrepro.entries import Entries
from kvrepro.methods.pyramidkv import layer_budgets
from kvrepro.methods.selkv import SelKV
from kvrepro.rope import Rope

CASES = vectors.cases()
FULL = ("full", "full-folded")
NEVER_MERGED = ("streaming-llm", "snapkv", "pyramidkv", "h2o", "vatp", "bifocal", "selkv/evict", *FULL)
MERGED_KEYS = ("look-m", "kvmerger", "kvslimmer", "adjacent")
REPOSITIONED = ("streaming-llm/reindexed", "selkv/reposition")
# so that short prompts reach every step
TINY = {
    "window": 4, "recent": 3, "kernel": 3, "bucket": 8, "sinks": 2, "chunk": 64, "near": 4, "passage": 7, "sample": 5,
}  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def few(count: int) -> settings:
    """The same examples in every run."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=slow)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors as small as these only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rope_of(width: int, unit: bool = False) -> Rope:
    """Llama's rotary embedding of ``width`` channels; ``unit``: of a model that has none."""

    def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle = positions[..., None].double() * 10000 ** -(torch.arange(0, width, 2).double() / width)
        angle = torch.cat((angle, angle), -1) * (not unit)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    return Rope(tables)


@dataclass(frozen=True)
class Prompt:
    """One layer's view of a prompt, q [H, n, D], k, v [Hkv, n, D], and the entries it may leave."""

    q: Tensor
    k: Tensor
    v: Tensor
    m: int
    rope: Rope
    scaling: float
    layer: int
    layers: int
    tiny: bool

    @property
    def n(self) -> int:
        return self.k.shape[1]

    def method(self, case: str) -> methods.Method:
        """The method of a case; ``tiny``: with settings small enough for a short prompt."""
        method = methods.make(case)
        known = {field.name for field in fields(method)}
        changed = {name for name in known & TINY.keys() if getattr(method, name) not in (0, None)}
        return methods.make(case, **{name: TINY[name] for name in changed if self.tiny})

    def compress(self, method: methods.Method) -> tuple[Entries, dict[str, float], Tensor | None]:
        """What the layer holds after the prompt, the summed diagnostics, and a chunked method's attention."""
        positions = torch.arange(self.n)[None]
        stored, found, outputs, start = None, dict[str, float](), [], 0
        for size in method.chunks(self.n, self.m):
            at = slice(start, start := start + size)
            fresh = (self.k[:, at], self.v[:, at], positions[:, at])
            stored = Entries(*fresh) if stored is None else stored.extend(*fresh)
            observed = Observed(self.q[:, at], self.scaling, self.rope, None, self.layer, self.layers)
            if method.schedule != "one-shot":
                outputs.append(attend_observed(stored, observed))
            stored, one = method.compress(stored, observed, self.m)
            found = {name: found.get(name, 0) + number for name, number in one.items()}
        assert stored is not None and start == self.n
        return stored, found, torch.cat(outputs, 1) if outputs else None


KINDS = ("random", "equal keys", "equal neighbours", "zero keys", "dominant", "underflow")


@st.composite
def prompts(draw: Any, dtypes: Any = DTYPES) -> Prompt:
    """Short prompts with what hurts: huge logits, zero values, equal keys, one token that takes half of the mass, no mass.

    The choices come from one drawn random generator: drawn one by one, few examples are mostly of the same shape.
    """
    rng: Random = draw(st.randoms(use_true_random=True))
    random = torch.Generator().manual_seed(rng.getrandbits(32))
    heads, group, n, width = rng.randint(1, 3), rng.randint(1, 3), rng.randint(2, 40), rng.choice([2, 4, 8])
    m = rng.choice([1, min(2, n - 1), n - 1, *[rng.randint(1, n - 1) for _ in range(5)]])
    scaling, size = width**-0.5, rng.choice([0.1, 1.0, 10.0, 100.0, 1000.0])  # logits of up to 1e6 and more
    q, k, v = (torch.randn(x, n, width, generator=random).double() for x in (heads * group, heads, heads))
    q, k, kind = q * size, k * size, rng.choice(KINDS)
    if kind == "equal keys":
        k = k[:, :1].expand_as(k)
    elif kind == "equal neighbours":
        k, v = (x[:, torch.arange(n) // 2] for x in (k, v))
    elif kind == "zero keys":
        k = k * 0
    elif kind == "dominant":  # one token draws about this share of every query that sees it
        share, at = rng.choice([0.449, 0.45, 0.5, 0.9999]), rng.randrange(n)
        q, k = q * 1e-3 / size, k * 1e-3 / size
        q[..., 0] = 1
        k[:, at, 0] = math.log(share / (1 - share) * max(1, min(m, n // 2))) / scaling
    elif kind == "underflow":  # some tokens, often neighbours, draw nothing
        q[..., 0] = q[..., 0].abs() + 1
        k[:, torch.rand(n, generator=random) < rng.choice([0.3, 0.8, 1.0]), 0] = -6e4
    if rng.random() < 0.3:
        v = v * 0
    dtype, layers = rng.choice(dtypes), rng.randint(1, 3)
    q, k, v = (x.contiguous().to(dtype) for x in (q, k, v))
    rope = rope_of(width, unit=rng.random() < 0.3)
    return Prompt(q, k, v, m, rope, scaling, rng.randrange(layers), layers, tiny=rng.random() < 0.7)


def held(entries: Entries) -> Tensor:
    """Which slots hold an entry, [Hkv, m]."""
    bias = torch.zeros(1, len(entries)) if entries.bias is None else entries.bias
    return (bias > -torch.inf).expand(entries.kv_heads, -1)


@pytest.mark.parametrize("case", CASES)
@few(40)
@given(prompts())
def test_every_method(case: str, prompt: Prompt) -> None:
    method = prompt.method(case)
    if method.untouched(prompt.n, prompt.m):
        assert case == "full" or prompt.n < getattr(method, "window", 0)
        return
    before = [x.clone() for x in (prompt.q, prompt.k, prompt.v)]
    entries, found, output = prompt.compress(method)
    assert all(torch.equal(x, y) for x, y in zip(before, (prompt.q, prompt.k, prompt.v), strict=True))

    budget = prompt.n if case in FULL else found.get("layer_budget", prompt.m)
    count = held(entries).sum(1)
    assert len(entries) == count.max() <= budget
    if case.split("/")[0] != "kvmerger":  # the one that may end below
        assert count.min() == budget and (entries.bias is None or entries.bias.isfinite().all())

    n = prompt.n
    places = entries.positions.expand(entries.kv_heads, -1)
    for head, there in enumerate(held(entries)):
        assert not there.diff().lt(0).any()  # the missing ones stand first
        assert (places[head][there].diff() > 0).all()
        assert places[head][there][0] >= 0 and places[head][there][-1] < n
        # nothing but sinks fits, or m // 4 recent tokens are none
        if not (
            (case == "streaming-llm" and prompt.m <= 4) or (case.startswith("kvmerger") and prompt.m < 4)
        ):
            assert places[head][there][-1] == n - 1  # the newest token is always held

    for tensor, given_ in ((entries.keys, prompt.k), (entries.values, prompt.v)):
        assert tensor.dtype == given_.dtype and tensor.isfinite().all()
    assert entries.bias is None or entries.bias.dtype == torch.promote_types(prompt.k.dtype, torch.float32)
    assert output is None or output.isfinite().all()
    assert all(
        math.isfinite(x) or (math.isnan(x) and name in ("share_routed", "mean_gate"))
        for name, x in found.items()
    )

    # Kept tokens stay bit for bit; merged ones are means, so nothing lies outside of what was given.
    there = held(entries)
    raw = Entries(prompt.k, prompt.v, torch.arange(n)[None]).take(places)
    if case in REPOSITIONED:
        assert torch.equal(entries.positions[0], torch.arange(n - prompt.m, n))
    elif not case.startswith(MERGED_KEYS):
        assert torch.equal(entries.keys, raw.keys)
        assert torch.equal(entries.values, raw.values) or not case.startswith(NEVER_MERGED)
    if entries.mass is not None:  # an entry of one token is that token
        alone = entries.mass == 1
        assert torch.equal(entries.keys[alone], raw.keys[alone])
        assert torch.equal(entries.values[alone], raw.values[alone])
    slack = 1 + n * torch.finfo(prompt.k.dtype).eps
    longest = prompt.k.double().norm(dim=-1).amax(1)
    for head in range(entries.kv_heads):
        kept = entries.keys[head][there[head]].double().norm(dim=-1)
        assert (kept <= longest[head] * slack).all()
        if case != "kvslimmer/plain-sum":
            assert entries.values[head].abs().max() <= prompt.v[head].abs().max() * slack

    new = torch.randn(1, len(prompt.q), 1, prompt.q.shape[-1], generator=torch.Generator().manual_seed(0))
    bias = None if entries.bias is None else entries.bias[None]
    answer = attend(new.to(prompt.q.dtype), entries.keys[None], entries.values[None], bias, prompt.scaling)
    assert answer.isfinite().all()

    # Every token is accounted for.
    if entries.mass is not None:
        assert (
            case not in ("kvslimmer", "adjacent")
            or entries.bias is None
            or torch.equal(entries.bias, entries.mass.log())
        )
        assert (entries.mass >= 1).all()
        assert entries.mass.sum() + found["dropped_mass"] == n * entries.kv_heads
        if prompt.m > 1 and case != "kvslimmer/drop-lighter":
            assert found["dropped_mass"] == 0 and (entries.mass.sum(1) == n).all()
        fallbacks = sum(found.get(reason, 0) for reason in ("composite", "no_mass", "denominator", "outside"))
        assert fallbacks <= found.get("merges", 0)


# --- kvslimmer

# p of the two older slots and the newest one [queries, 3]; their values (one channel); l; what is counted; weight of k1
GUARDS: dict[str, tuple[list[list[float]], list[float], list[int], dict[str, int], float]] = {
    # h11 = .1·.8·1.1 + .05·.9·1, h22 = .2·.6·.9 + .05·.9·1, h12 = .1·.2·.2 + 0
    "one query left out": (
        [[0.35, 0.2, 0.45], [0.1, 0.2, 0.7], [0.05, 0.05, 0.9]], [1, -1, 0], [1, 1, 1], {"left_out": 1}, 0.129 / 0.278
    ),
    "0.45 itself is left out": ([[0.25, 0.2, 0.55]], [1, -1, 0], [1, 1, 1], {"left_out": 1, "no_mass": 1}, 5 / 9),
    "all left out": (
        [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]], [1, -1, 0], [1, 1, 1], {"left_out": 2, "no_mass": 1}, 0.6 / 1.6
    ),
    "left out or without mass": (
        [[0.6, 0.2, 0.2], [0, 0, 1]], [1, -1, 0], [1, 1, 1], {"left_out": 1, "no_mass": 1}, 0.75
    ),
    "underflown: l stands for p": ([[0, 0, 1], [0, 0, 1]], [1, -1, 0], [3, 1, 1], {"no_mass": 1}, 0.75),
    "no mass comes before the denominator": ([[0, 0, 1]], [0, 0, 0], [1, 4, 1], {"no_mass": 1}, 0.2),
    "zero values: no denominator": ([[0.3, 0.1, 0.6]], [0, 0, 0], [1, 1, 1], {"denominator": 1}, 0.75),
    "v1 = o: h11 = 0 < h12, weight -1/6": ([[0.1, 0.1, 0.8]], [0, 1, -0.125], [1, 1, 1], {"outside": 1}, 0.5),
    "v2 = o: weight 7/6": ([[0.1, 0.1, 0.8]], [1, 0, -0.125], [1, 1, 1], {"outside": 1}, 0.5),
    "one slot without mass": ([[0, 0.2, 0.8]], [1, -1, 0], [1, 1, 1], {}, 0.0),
}  # fmt: skip


def step(
    p: list[list[float]], v: list[float], l: list[int], m: int, **settings: Any
) -> tuple[Entries, dict[str, float]]:
    """One step on slots with the keys of a unit matrix, of which the last is the newest; each row of p is a query head."""
    width = len(v) + len(v) % 2
    probabilities, values = (
        torch.tensor(p, dtype=torch.float64)[None],
        torch.tensor(v, dtype=torch.float64)[None, :, None],
    )
    entries = Entries(
        torch.eye(width).double()[None, : len(v)],
        values,
        torch.arange(len(v))[None],
        mass=torch.tensor([l]).double(),
    )
    observed = Observed(
        torch.zeros(len(p), 1, width).double(), 1.0, rope_of(width, unit=True),
        probabilities=probabilities, output=probabilities @ values,
    )  # fmt: skip
    return methods.make("kvslimmer", **settings).compress(entries, observed, m)


@pytest.mark.parametrize("name", GUARDS)
def test_guards_of_kvslimmer(name: str) -> None:
    p, v, l, counted, weight = GUARDS[name]
    entries, found = step(p, v, l, 2)
    nothing = dict.fromkeys(("left_out", "no_mass", "denominator", "outside", "composite", "dropped_mass"), 0)
    assert found == nothing | {"merges": 1} | counted
    assert (
        entries.keys[0, 0] - torch.tensor([weight, 1 - weight, 0, 0], dtype=torch.float64)
    ).abs().max() < 1e-12
    assert entries.mass is not None and entries.mass.tolist() == [[l[0] + l[1], l[2]]]
    mass = torch.tensor(p).sum(0) if sum(map(sum, p)) > len(p) * p[0][2] else torch.tensor(l)
    assert entries.positions.tolist() == [[0 if mass[0] > mass[1] else 1, 2]]


def test_guard_of_slots_merged_in_the_same_step() -> None:
    """Four older slots become one: two pairs, then a pair of merged slots, which weighs by attention alone."""
    entries, found = step([[0.05, 0.1, 0.02, 0.03, 0.8]], [1, -1, 2, 0, 0.5], [1, 2, 3, 4, 1], 2)
    assert found["merges"] == 3 and found["composite"] == 1
    first, second = (
        step(p, v, [1, 1, 1], 2)[0].keys[0, 0, 0]
        for p, v in (
            ([[0.05, 0.1, 0.85]], [1, -1, 0.44 / 0.85]),
            ([[0.02, 0.03, 0.95]], [2, 0, 0.35 / 0.95]),
        )
    )  # fmt: skip  the same pairs alone, under the same output: 0.39
    share = 0.15 / 0.2
    expected = torch.stack(
        [first * share, (1 - first) * share, second * (1 - share), (1 - second) * (1 - share)]
    )
    assert (entries.keys[0, 0, :4] - expected).abs().max() < 1e-12
    assert entries.mass is not None and entries.mass.tolist() == [[10, 1]]
    assert entries.values[0, 0, 0] == pytest.approx((1 - 2 + 6 + 0) / 10)
    assert entries.positions.tolist() == [[1, 4]]


def test_the_diagonal_never_leaves_the_unit_interval() -> None:
    p, v, l, _, _ = GUARDS["v1 = o: h11 = 0 < h12, weight -1/6"]
    entries, found = step(p, v, l, 2, weights="diagonal")
    assert found["outside"] == 0 and entries.keys[0, 0].tolist() == pytest.approx([0, 1, 0, 0], abs=1e-12)


HOLDERS = (  # of summed values: what a slot stores, times its l, is the sum of its tokens' values
    "kvslimmer", "kvslimmer/diagonal", "kvslimmer/mass", "kvslimmer/mean", "kvslimmer/clamped", "kvslimmer/drop-lighter",
    "kvslimmer-released", "kvslimmer-released/disjoint-pairs", "kvslimmer-released/unclamped", "adjacent",
)  # fmt: skip


@pytest.mark.parametrize("case", HOLDERS)
@few(15)
@given(
    st.integers(0, 2**16), st.sampled_from([(4, 2), (2, 2), (3, 1)]), st.integers(6, 40), st.floats(0.1, 0.9)
)
def test_what_became_of_every_token(
    case: str, seed: int, shape: tuple[int, int], n: int, share: float
) -> None:
    """Token i has value e_i, so values show which tokens a slot stands for: each once, or not at all and reported."""
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(x, n, 4, generator=random).double() for x in shape)
    v = torch.eye(n).double().expand(shape[1], n, n)
    prompt = Prompt(q, k, v, max(2, int(share * n)), rope_of(4), 0.5, 0, 1, False)
    method = methods.make(case, sinks=1)
    entries, found, _ = prompt.compress(method)
    assert entries.mass is not None
    tokens = entries.mass[..., None] * entries.values  # [Hkv, m, n], 1 where a slot stands for a token
    assert torch.allclose(tokens, tokens.round()) and tokens.sum(1).max() < 1.5
    held = float(tokens.sum())
    if case == "kvslimmer-released" or case.endswith(
        "unclamped"
    ):  # overlapping pairs lose tokens, and say so
        report = method.summary(entries, n)
        assert report["tokens_held"] == pytest.approx(held / (n * shape[1]))
        assert report["mass_share"] == pytest.approx(float(entries.mass.sum()) / (n * shape[1]))
        assert report["mass_share"] <= report["tokens_held"] + 1e-12
        assert entries.mass.sum() + found["dropped_mass"] == n * shape[1]
    else:
        lost = found["dropped_mass"] if "drop" in case else 0
        assert held == pytest.approx(n * shape[1] - lost)
    if case in ("kvslimmer-released", "kvslimmer-released/disjoint-pairs"):
        assert (entries.mass <= tokens.sum(-1) + 1e-9).all() and entries.mass.max() <= 5
    else:
        assert torch.allclose(tokens.sum(-1), entries.mass)


def test_the_released_schedule_loses_tokens() -> None:
    """The report is not of nothing: on an ordinary prompt overlapping pairs do lose tokens."""
    n, random = 24, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, generator=random).double() for _ in range(3))
    prompt = Prompt(q, k, v, 12, rope_of(4), 0.5, 0, 1, False)
    method = methods.make("kvslimmer-released")
    entries, _, _ = prompt.compress(method)
    assert 0.5 < method.summary(entries, n)["tokens_held"] < 1


ALIKE = {  # arms that a merge of equal entries leaves as they were, and arms that it moves
    "": True, "diagonal": True, "mass": True, "mean": True, "clamped": True, "ratio-alpha-1": True, "mass-values": True,
    "as-key": True, "drop-lighter": False, "ratio": False, "no-bias": False, "plain-sum": False, "plain-mean": False,
}  # fmt: skip


@pytest.mark.parametrize("arm", ALIKE)
@few(15)
@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_merging_identical_neighbours(arm: str, seed: int, pairs: int, group: int, unit: bool) -> None:
    """Equal entries at one position (or without RoPE) merge into one of l = 2: attention to them is as before."""
    assert ALIKE.keys() - {""} == methods.method_class("kvslimmer").arms.keys()
    n, heads, scaling = 16, 2, 0.5
    random = torch.Generator().manual_seed(seed)
    q, new = (torch.randn(heads * group, x, 4, generator=random).double() for x in (2, 3))
    k, v = (torch.randn(heads, n, 4, generator=random).double() for _ in range(2))
    positions = torch.arange(n)[None].clone()
    q[..., 0] = q[..., 0].abs() + 1
    for at in torch.randperm(4, generator=random)[:pairs].tolist():
        at = 3 * at + 1  # apart, and neither the first nor the chunk
        k[:, at, 0] = -12  # the least attended, so the ones that merge
        k[:, at + 1], v[:, at + 1] = k[:, at], v[:, at]
        positions[:, at + 1] = positions[:, at] if not unit else at + 1
    entries = Entries(k, v, positions)
    observed = Observed(q, scaling, rope_of(4, unit))
    attend_observed(entries, observed)
    method = methods.make(f"kvslimmer/{arm}" if arm else "kvslimmer", sinks=0)
    merged, found = method.compress(entries, observed, n - pairs)
    assert found["merges"] == pairs * heads and merged.mass is not None
    if arm != "drop-lighter":
        assert (merged.mass == 2).sum() == pairs * heads
    bias = None if merged.bias is None else merged.bias[None]
    difference = attend(new[None], merged.keys[None], merged.values[None], bias, scaling)
    difference = (difference - attend(new[None], k[None], v[None], None, scaling)).abs().max()
    assert difference < 1e-12 if ALIKE[arm] else difference > 1e-6


@few(30)
@given(
    st.integers(0, 2**16), st.sampled_from([(6, 2), (3, 3), (4, 1)]), st.integers(5, 40), st.floats(0.1, 0.9)
)
def test_log_l_with_mean_values_is_the_summed_value_form(
    seed: int, shape: tuple[int, int], n: int, share: float
) -> None:
    """Attention with bias log l over mean values, as stored, is the paper's Σ exp(z) v / Σ l exp(z) over summed values."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(x, n, 8, generator=random).double() * 1.5 for x in (shape[0], shape[1], shape[1]))
    prompt = Prompt(q, k, v, max(2, int(share * n)), rope_of(8), 0.35, 0, 1, False)
    entries, _, _ = prompt.compress(methods.make("kvslimmer"))
    assert entries.mass is not None and entries.mass.max() > 1
    bias = None if entries.bias is None else entries.bias[None]
    stored = attend(q[None, :, -1:], entries.keys[None], entries.values[None], bias, 0.35)[0]
    sums = entries.mass[..., None] * entries.values
    printed = naive.summed_attention(q[:, -1:], entries.keys, sums, entries.mass, 0.35)
    assert (stored - torch.from_numpy(printed)).abs().max() < 1e-12


# --- selkv and pyramidkv


@few(40)
@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 3), st.integers(8, 40), st.floats(0, 1))
def test_selkv_keeps_the_trimmed_union(seed: int, heads: int, group: int, n: int, share: float) -> None:
    """GQA: from the union of the heads' own best, those best on average; MHA: each head's own; the same in every arm."""
    recent = 3
    m = recent + 1 + int(share * (n - recent - 2))
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(x, n, 4, generator=random).double() for x in (heads * group, heads, heads))
    entries, observed = Entries(k, v, torch.arange(n)[None]), Observed(q, 0.5, rope_of(4))
    sizes = {"window": 4, "recent": recent, "kernel": 3, "bucket": 8}
    score = SelKV(**sizes).score(entries, observed).tolist()

    def best(score: list[float], among: Any) -> list[int]:
        return sorted(sorted(among, key=lambda i: (-score[i], i))[: m - recent])

    own = [best(row, range(n - recent)) for row in score]
    union = set().union(*own)
    mean = torch.tensor(score).double().mean(0).tolist()
    chosen = own if group == 1 else [best(mean, union)] * heads
    kept = torch.tensor([[*row, *range(n - recent, n)] for row in chosen])
    for arm in ("", *SelKV.arms):
        method = methods.make(f"selkv/{arm}" if arm else "selkv", **sizes)
        if method.select != "selkv":
            continue
        found, diagnostics = method.compress(entries, observed, m)
        if not method.reposition:
            assert torch.equal(found.positions.expand(heads, -1), kept)
        assert diagnostics.get("union_size") == (None if group == 1 else len(union))
        assert (found.bias is None) == (method.bias == "none")
        assert found.bias is None or found.bias.min() >= 0  # mass is only ever restored
        if method.merge == "none":
            continue
        target = method.routes(entries, observed, m)[1].target
        for head, token in (target >= 0).nonzero().tolist():
            to = int(target[head, token])
            assert to < token and to // 8 == token // 8
            assert to in chosen[head] and to in own[head] and token not in kept[head]


@few(15)
@given(
    st.integers(0, 2**16),
    st.integers(50, 70),
    st.sampled_from(["", "/merge-all", "/gate", "/merge-all+ratio"]),
)
def test_merging_equal_values_leaves_them(seed: int, n: int, arm: str) -> None:
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(heads, n, 8, generator=random).double() * 1.5 for heads in (4, 2))
    v = torch.randn(2, 1, 8, generator=random).double().expand(2, n, 8).contiguous()
    prompt = Prompt(q, k, v, n // 2, rope_of(8), 0.35, 0, 1, False)
    entries, diagnostics, _ = prompt.compress(methods.make(f"selkv{arm}"))
    assert diagnostics["share_routed"] > 0
    assert (entries.values - v[:, :1]).abs().max() < 1e-12
    if arm in ("", "/gate"):
        assert diagnostics["mean_gate"] == pytest.approx(1)


@few(200)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 12), st.integers(1, 40), st.integers(1, 30))
def test_pyramid_budgets_fall_and_add_up(m: int, n: int, layers: int, window: int, beta: int) -> None:
    assume(m < n)
    budgets = layer_budgets(m, n, layers, window, beta)
    assert sum(budgets) == layers * m
    assert budgets == sorted(budgets, reverse=True) and budgets[0] <= n and budgets[-1] >= min(m, window)
    assert budgets == naive.pyramid_budgets(m, n, layers, window, beta)
