"""Naive references: every method once more, in plain float64 loops, straight from its equations.

What the package computes fast is tested against these functions, which share no code with it. One prompt,
one layer: q [H, n, D] and k [Hkv, n, D] are rotated (RoPE applied), v is [Hkv, n, D], cos and sin [n, D] are
the tables of positions 0 .. n-1. Tensors on the CPU or arrays go in; numpy arrays come out, in a dict:

    keys, values   [Hkv, m, D]
    bias           [Hkv, m], or None where the method has none
    positions      [Hkv, m]   logical positions, ascending
    l              [Hkv, m]   number of tokens an entry stands for (kvslimmer)
    kept           Hkv lists of m sorted indices (selectors)
    diagnostics    dict

Sources: SelKV arXiv 2607.16213, KVSlimmer arXiv 2603.00907, AsymKV (NeurIPS 2025), the baselines' papers.

Readings taken where a rule can be read in more than one way
------------------------------------------------------------
selectors
 1. `group="max"`: the maximum over the group's heads of the statistic already summed over its queries.
 2. Average pooling divides by the kernel at the borders too; max pooling ignores what lies outside.
 3. m >= n: everything, bias None. Else m <= window: the last m tokens, even where n < window.
selkv
 4. evict is g = 0 whatever the other options: R = 1 and the gated count is 0, but `bias="count"` still counts
    the routed tokens. `bias` is None only for `bias="none"` (and for a prompt left alone), else zeros where
    nothing merged.
 5. Count biases: log(1 + mean over KV heads) on a shared kept set, whatever `ratio`; log(1 + count of the
    head) on per-head kept sets, where a slot is not the same token in every head.
 6. `floored` counts the kept (KV head, slot) pairs with a_i < 1e-8, recent window included; strictly below.
 7. `route="any"`: a token without a kept target i <= j in its bucket takes the largest A over all i <= j in
    the target set (own or shared); if there is none it is dropped.
 8. `mean_gate` is over the routed tokens, of the g that was used (1 for merge-all, 0 for evict); nan if none
    is routed.
 9. `union_size` exists only where a union is formed (GQA, select="selkv"); None elsewhere; 0 if m <= m_r.
10. `log_r` is log R after the averaging over heads, before alpha.
11. With another selector's kept set a prompt is left alone by SelKV's rule (n < w, n <= m_r or m >= n), m_r playing no
    other part; a head's own set is its top-(m - window).
kvslimmer
12. "The first chunk takes the remainder": the first chunk holds n mod chunk tokens (a full chunk if that is
    0).
13. m = 1: chunk 1, no sinks; there is no room for an older slot, so it is dropped (reported in dropped_l).
14. Both masses of a pair 0: the pair's l replaces p for weights, values, rho, the heavier member and the
    position; the mass the merged slot carries into later rounds stays 0.
15. Composite pairs merge by p-weights (and are counted) in the exact and diagonal arms only: the other arms
    have their weight without norms. No guard is evaluated for a composite pair.
16. denominator guard: den <= 1e-12 * (h11 + h22).
17. A pair is "left with no query of positive mass" if no query below 0.45 has p_m + p_{m+1} > 0. left_out is
    counted for pairs that fall back later, too.
18. Under drop-lighter the heavier slot's value survives whatever `values` says.
19. The guards and the zero-mass rule are the same for the log-l, clamp, ratio and none biases: p is what is
    attended.
other baselines
20. pyramid_budgets: one layer, m <= w and m >= n all give m to every layer; w is part of each budget.
21. lookm: targets by the cosine of keys; the same target for keys and values; sinks and recent tokens are
    targets.
22. weightedkv: a run and its slot that all have weight 0 keep the slot's own value.
23. kvmerger: heavy tokens are the m // 4 largest column sums outside the recent m // 4; an excluded token
    ends a run. The threshold is 0.75 where that suffices, else the highest cosine of neighbouring candidates
    that does; if none does -1 is recorded and all neighbouring candidates merge, even those that point apart.
    Ties for the pivot go to the lower index. Distances are in the space of the merge.
released and asymkv
24. d of a slot with α(1-2α) = 0 is 0; the smoothed h enters d. Only 0/0 in the weight gives ½: a vanishing
    denominator under a numerator that is not 0 is left to overflow, as the code has no guard.
25. Of K lowest pairs each deletes its second slot, so exactly K slots go; ties to the lower index.
26. AsymKV's g: a merged slot counts as many chunks as its elder member. Released: as h, by the chunk's index.
27. The chunk's index counts the chunks that have a past, from 1: the code's own counter is 1 at the second chunk.
28. Driven: all tokens but the last, with m - 1 slots; the statistics pass runs on every chunk with a past, whether
    anything merges or not.
ours
29. bifocal: the vote of all queries is that of `sample` >= n, too. selkv on bifocal merges into any token it kept.
30. adjacent: rules 13 and 14 hold, with s in the place of p: m = 1 is the newest token alone, and where both s
    are 0 l weighs the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray
Result = dict[str, Any]


# --- attention ------------------------------------------------------------------------------------


def array(x: Any) -> Array:
    """x as a float64 array."""
    return np.asarray(x, dtype=np.float64)


def softmax(z: Array) -> Array:
    """Softmax of a vector; -inf is a weight of 0."""
    e = np.exp(z - z.max())
    return e / e.sum()


def causal_weights(q: Any, k: Any, scaling: float) -> Array:
    """A[h, j, i], the causal softmax attention of query j to key i, [H, n, n], zeros above the diagonal."""
    q, k = array(q), array(k)
    heads, n, _ = q.shape
    group = heads // len(k)
    a = np.zeros((heads, n, n))
    for h in range(heads):
        for j in range(n):
            a[h, j, : j + 1] = softmax(k[h // group, : j + 1] @ q[h, j] * scaling)
    return a


def causal_attention(q: Any, k: Any, v: Any, scaling: float) -> Array:
    """Causal attention of the whole prompt, [H, n, D]."""
    a, v = causal_weights(q, k, scaling), array(v)
    group = len(a) // len(v)
    return np.stack([a[h] @ v[h // group] for h in range(len(a))])


def attend(q: Any, keys: Any, values: Any, bias: Any, scaling: float) -> Array:
    """softmax(q·k·scaling + bias) · value of q [H, Q, D] over entries [Hkv, m, D], all visible; [H, Q, D]."""
    q, keys, values = array(q), array(keys), array(values)
    group = len(q) // len(keys)
    extra = np.zeros(keys.shape[:2]) if bias is None else np.broadcast_to(array(bias), keys.shape[:2])
    out = np.zeros((*q.shape[:2], values.shape[-1]))
    for h in range(q.shape[0]):
        for t in range(q.shape[1]):
            p = softmax(keys[h // group] @ q[h, t] * scaling + extra[h // group])
            out[h, t] = p @ values[h // group]
    return out


def summed_attention(q: Any, keys: Any, sums: Any, l: Any, scaling: float) -> Array:
    """KVSlimmer's own form: Σ_j exp(z_j) sum_j / Σ_i l_i exp(z_i), with summed values; [H, Q, D]."""
    q, keys, sums, l = array(q), array(keys), array(sums), array(l)
    group = len(q) // len(keys)
    out = np.zeros((*q.shape[:2], sums.shape[-1]))
    for h in range(q.shape[0]):
        for t in range(q.shape[1]):
            z = keys[h // group] @ q[h, t] * scaling
            e = np.exp(z - z.max())
            out[h, t] = e @ sums[h // group] / (l[h // group] @ e)
    return out


# --- rotary embedding -----------------------------------------------------------------------------


def rotate_half(x: Array) -> Array:
    """(x1, x2) -> (-x2, x1), halves of the last axis."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE of x with the table rows of its position."""
    return x * cos + rotate_half(x) * sin


def unrotate(x: Array, cos: Array, sin: Array) -> Array:
    """The inverse of `rotate`, also for tables scaled by a factor (yarn)."""
    return (x * cos - rotate_half(x) * sin) / (cos**2 + sin**2)


# --- small tools ----------------------------------------------------------------------------------


def top(score: Array, candidates: Any, count: int) -> list[int]:
    """The `count` candidates with the largest score, ties to the lower index, sorted by index."""
    return sorted(sorted(candidates, key=lambda i: (-score[i], i))[:count])


def pool(score: Array, kernel: int, kind: str) -> Array:
    """Pooling of a vector to the same length: "avg" counts zero padding, "max" does not see it."""
    n, half = len(score), kernel // 2
    out = np.zeros(n)
    for i in range(n):
        near = score[max(0, i - half) : i + half + 1]
        out[i] = near.sum() / kernel if kind == "avg" else near.max()
    return out


def cosine(x: Array, y: Array) -> float:
    """Cosine similarity; 0 with a zero vector."""
    norms = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return float(x @ y) / norms if norms > 0 else 0.0


def over_group(stat: Array, kv_heads: int, how: str = "sum") -> Array:
    """A statistic of the query heads [H, ...] reduced over each group, [Hkv, ...]."""
    grouped = stat.reshape(kv_heads, -1, *stat.shape[1:])
    return grouped.sum(1) if how == "sum" else grouped.max(1)


def gather(k: Any, v: Any, kept: list[list[int]], **diagnostics: Any) -> Result:
    """The entries of a selector: kept tokens, untouched, at their own positions."""
    k, v = array(k), array(v)
    return {
        "keys": np.stack([k[h, rows] for h, rows in enumerate(kept)]),
        "values": np.stack([v[h, rows] for h, rows in enumerate(kept)]),
        "bias": None,
        "positions": np.array(kept),
        "kept": kept,
        "diagnostics": diagnostics,
    }


def everything(k: Any, v: Any) -> Result:
    """A prompt that is left alone."""
    n = array(k).shape[1]
    return gather(k, v, [list(range(n)) for _ in range(len(k))], untouched=True)


def at_end(keys: Array, kept: list[list[int]], cos: Any, sin: Any) -> tuple[Array, Array]:
    """Kept keys re-rotated to the consecutive positions n-m .. n-1, and those positions."""
    cos, sin = array(cos), array(sin)
    out, n, m = keys.copy(), len(cos), keys.shape[1]
    for h, rows in enumerate(kept):
        for slot, old in enumerate(rows):
            new = n - m + slot
            out[h, slot] = rotate(unrotate(keys[h, slot], cos[old], sin[old]), cos[new], sin[new])
    return out, np.tile(np.arange(n - m, n), (len(keys), 1))


# --- streaming-llm, snapkv ------------------------------------------------------------------------


def streaming_llm(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any = None, sin: Any = None,
    sinks: int = 4, reindex: bool = False,
) -> Result:  # fmt: skip
    """The first 4 tokens and the most recent m - 4; the first m if m < 4."""
    n = array(k).shape[1]
    if m >= n:
        return everything(k, v)
    first = min(sinks, m)
    rows = [*range(first), *range(n - (m - first), n)]
    out = gather(k, v, [rows] * len(k))
    if reindex:
        out["keys"], out["positions"] = at_end(out["keys"], out["kept"], cos, sin)
    return out


def snapkv_selection(
    a: Array, kv_heads: int, m: int, w: int, kernel: int, pool_kind: str, group: str
) -> tuple[list[list[int]], list[list[int]]]:
    """SnapKV's kept indices of each KV head, and the part of them outside the window."""
    n = a.shape[1]
    if m <= w:
        return [list(range(n - m, n))] * kv_heads, [[]] * kv_heads
    received = over_group(a[:, n - w :, :].sum(1), kv_heads, group)  # [Hkv, n]
    heavy = [top(pool(received[h], kernel, pool_kind), range(n - w), m - w) for h in range(kv_heads)]
    return [rows + list(range(n - w, n)) for rows in heavy], heavy


def snapkv(
    q: Any, k: Any, v: Any, scaling: float, m: int, *,
    w: int = 32, kernel: int = 7, pool: str = "max", group: str = "sum",
) -> Result:  # fmt: skip
    """The tokens the last w queries attend to most, pooled along the prompt, and the last w tokens."""
    n = array(k).shape[1]
    if m >= n:
        return everything(k, v)
    kept, _ = snapkv_selection(causal_weights(q, k, scaling), len(k), m, w, kernel, pool, group)
    return gather(k, v, kept)


# --- selkv ----------------------------------------------------------------------------------------


def selkv(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any = None, sin: Any = None,
    w: int = 32, m_r: int = 16, kernel: int = 5, norm: str = "l2", bucket: int = 32,
    merge: bool = True, gate: bool = True, bias: str = "ratio", alpha: float = 0.5,
    route: str = "drop", target: str = "own", ratio: str = "mean", reposition: bool = False,
    select: str = "selkv", snap_w: int = 32, snap_kernel: int = 7, snap_pool: str = "max",
) -> Result:  # fmt: skip
    """SelKV, with every named choice.

    norm "l2" | "l1"; bias "none" | "ratio" | "count" | "gated-count"; route "drop" | "any";
    target "own" | "shared"; ratio "mean" | "ratio-of-sums" | "per-head" (on a shared kept set only);
    select "selkv" | "snapkv" | "bifocal".
    Arms: evict is merge=False, bias="none"; merge-all is gate=False, bias="none".
    """
    v = array(v)
    kv_heads, n, _ = v.shape
    if n < w or n <= m_r or m >= n:
        return everything(k, v)
    by_head = causal_weights(q, k, scaling)  # [H, n, n]
    attention = over_group(by_head, kv_heads)  # [Hkv, n, n], A summed over the group
    a = attention[:, n - w :, :].sum(1)  # [Hkv, n], received from the window
    grouped = len(by_head) > kv_heads

    # 1, 2: score and selection
    union_size = None
    own: list[list[int]]
    if select == "snapkv":
        kept, own = snapkv_selection(by_head, kv_heads, m, snap_w, snap_kernel, snap_pool, "sum")
    elif select == "bifocal":
        kept = own = bifocal(q, k, v, scaling, m)["kept"]
    elif m <= m_r:
        kept, own = [list(range(n - m, n))] * kv_heads, [[]] * kv_heads
        union_size = 0 if grouped else None
    else:
        order = 2 if norm == "l2" else 1
        product = a * np.linalg.norm(v, order, axis=-1)  # [Hkv, n]
        c = np.stack([pool(row, kernel, "avg") for row in product])
        own = [top(c[h], range(n - m_r), m - m_r) for h in range(kv_heads)]
        chosen = own
        if grouped:
            union = sorted(set().union(*own))
            union_size = len(union)
            shared = top(c.mean(0), union, m - m_r)  # all of the union where it fits
            chosen = [shared] * kv_heads
        kept = [rows + list(range(n - m_r, n)) for rows in chosen]
    one_set = grouped and select == "selkv"  # the heads of the layer share their slots

    # 3: route[h] maps each evicted token to its target
    routes: list[dict[int, int]] = []
    for h in range(kv_heads):
        allowed = kept[h] if target == "shared" else sorted(set(own[h]) & set(kept[h]))
        routes.append({})
        for j in sorted(set(range(n)) - set(kept[h])):
            past = [i for i in allowed if i <= j]
            near = [i for i in past if i // bucket == j // bucket]
            if not near and route == "any":
                near = past
            if near:
                routes[h][j] = max(near, key=lambda i: (attention[h, j, i], -i))

    # 4, 5: gate and merge, values only
    floor = 1e-8
    base = np.maximum(np.stack([a[h, kept[h]] for h in range(kv_heads)]), floor)  # [Hkv, m], a_i
    gained = np.zeros((kv_heads, m))  # Σ g a_j
    count = np.zeros((kv_heads, m))
    gated = np.zeros((kv_heads, m))  # Σ g
    values = np.stack([v[h, kept[h]] for h in range(kv_heads)])
    gates = []
    for h in range(kv_heads):
        for slot, i in enumerate(kept[h]):
            total = base[h, slot] * v[h, i]
            for j, to in routes[h].items():
                if to != i:
                    continue
                g = 0.0 if not merge else max(cosine(v[h, j], v[h, i]), 0.0) if gate else 1.0
                gates.append(g)
                count[h, slot] += 1
                gated[h, slot] += g
                gained[h, slot] += g * a[h, j]
                total = total + g * a[h, j] * v[h, j]
            if gained[h, slot] > 0:
                values[h, slot] = total / (base[h, slot] + gained[h, slot])

    # 6: compensation
    r = (base + gained) / base  # [Hkv, m]
    if one_set and ratio == "mean":
        r = np.tile(r.mean(0), (kv_heads, 1))
    elif one_set and ratio == "ratio-of-sums":
        r = np.tile((base + gained).sum(0) / base.sum(0), (kv_heads, 1))
    if one_set:
        count, gated = (np.tile(x.mean(0), (kv_heads, 1)) for x in (count, gated))
    biases = {
        "none": None,
        "ratio": alpha * np.log(r),
        "count": np.log(1 + count),
        "gated-count": np.log(1 + gated),
    }

    out = gather(
        k, v, kept,
        share_routed=sum(len(rows) for rows in routes) / (kv_heads * (n - m)),
        mean_gate=sum(gates) / len(gates) if gates else math.nan,
        union_size=union_size,
        floored=sum(int(a[h, i] < floor) for h in range(kv_heads) for i in kept[h]),
        log_r=np.log(r),
        routes=routes,
    )  # fmt: skip
    out["values"], out["bias"] = values, biases[bias]
    if reposition:  # 7
        out["keys"], out["positions"] = at_end(out["keys"], kept, cos, sin)
    return out


# --- bifocal --------------------------------------------------------------------------------------


def bifocal_score(
    q: Any, k: Any, v: Any, scaling: float, *,
    near: int = 40, phrase: int = 5, passage: int = 31, share: float = 1.0, far: float = 0.125,
    sample: int | None = 256, norm: bool = True,
) -> Array:  # fmt: skip
    """The votes of the last `near` queries and of `sample` queries spread over the prompt, times ‖v‖; [Hkv, n]."""
    v = array(v)
    kv_heads, n, _ = v.shape
    attention = over_group(causal_weights(q, k, scaling), kv_heads)  # [Hkv, n, n], A summed over the group
    votes = np.zeros((kv_heads, n))
    if near > 0:
        pointed = np.zeros((kv_heads, n))
        for h in range(kv_heads):
            a = sum(attention[h, j] for j in range(max(0, n - near), n))
            for kernel in (phrase, passage):
                reached = pool(a, kernel, "max")
                pointed[h] += reached / reached.sum()
        joint = np.stack([x + share * sum(pointed) / kv_heads for x in pointed])
        votes += np.stack([x / x.sum() for x in joint])
    if far > 0:
        voters = range(n)
        if sample is not None and sample < n:  # the query in the middle of each of `sample` equal stretches
            voters = [math.floor(Fraction(2 * i + 1, 2) * Fraction(n, sample)) for i in range(sample)]
        for h in range(kv_heads):
            a = sum(attention[h, j] for j in voters)
            votes[h] += far * a / a.sum()
    if norm:
        for h in range(kv_heads):
            for i in range(n):
                votes[h, i] *= math.sqrt(float(v[h, i] @ v[h, i]))
    return votes


def bifocal(q: Any, k: Any, v: Any, scaling: float, m: int, *, recent: int = 16, **settings: Any) -> Result:
    """The m - recent best tokens of each KV head outside the last `recent`, and those."""
    n = array(k).shape[1]
    if m >= n:
        return everything(k, v)
    last = min(recent, m)
    score = bifocal_score(q, k, v, scaling, **settings)
    return gather(k, v, [top(row, range(n - last), m - last) + list(range(n - last, n)) for row in score])


# --- kvslimmer, as printed ------------------------------------------------------------------------


@dataclass
class Slot:
    """One entry of one KV head while the prompt is read."""

    key: Array  # [D], before RoPE
    value: Array  # [D]
    position: int
    l: float = 1.0
    rho: float = 1.0
    column: int = -1  # its place in this chunk's weights; meaningless once merged in this step
    mass: float = 0.0  # Σ p over this chunk's queries and the group's heads
    composite: bool = False  # merged in an earlier round of this step
    g: Any = 0.0  # [D], gradient of the loss by the key before RoPE, running mean (asymkv)
    age: int = 0  # chunks in that mean


@dataclass
class Seen:
    """What one (query head, query) of the chunk saw."""

    p: Array  # [stored], its weights on the stored slots
    o: Array  # [D], its output


def kvslimmer(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any, sin: Any,
    chunk: int | None = None, sinks: int = 32, weights: str = "exact",
    bias: str = "log-l", values: str = "mean-l", clamp: float = 5.0, alpha: float = 0.5,
) -> Result:  # fmt: skip
    """KVSlimmer as printed: chunks attend, then the older slots merge with the chunk's attention.

    weights "exact" | "diagonal" | "mass" | "mean" | "drop-lighter";
    bias "log-l" | "clamp" | "ratio" | "none";
    values "mean-l" | "sum" | "plain-mean" | "mass" | "as-key". A `chunk` asked for is cut to m // 2, `sinks`
    to m // 8. The result also has `l`, `rho` [Hkv, m] and `output` [H, n, D], the whole prompt's attention.
    """
    q, k, v, cos, sin = array(q), array(k), array(v), array(cos), array(sin)
    heads, n, _ = q.shape
    kv_heads = len(k)
    if m >= n:
        out = everything(k, v)
        out["l"] = out["rho"] = np.ones((kv_heads, n))
        out["output"] = causal_attention(q, k, v, scaling)
        return out
    sinks = min(sinks, m // 8)
    chunk = max(1, min(512, m // 4) if chunk is None else min(chunk, m // 2))
    first = n % chunk or chunk
    bounds = [(0, first), *((s, s + chunk) for s in range(first, n, chunk))]

    def slot_bias(s: Slot) -> float:
        if bias == "log-l":
            return math.log(s.l)
        if bias == "clamp":
            return math.log(min(s.l, clamp))
        return alpha * math.log(s.rho) if bias == "ratio" else 0.0

    def rotated(s: Slot) -> Array:
        return rotate(s.key, cos[s.position], sin[s.position])

    counts = dict.fromkeys(("merges", "left_out", "no_mass", "denominator", "outside", "composite"), 0)
    counts["dropped_l"] = 0
    output = np.zeros((heads, n, v.shape[-1]))
    peak = 0
    final: list[list[Slot]] = []
    for g in range(kv_heads):
        stored: list[Slot] = []
        for start, stop in bounds:
            new = [Slot(unrotate(k[g, t], cos[t], sin[t]), v[g, t], t) for t in range(start, stop)]
            slots = stored + new
            peak = max(peak, len(slots))
            keys = np.stack([rotated(s) for s in slots])  # [stored + chunk, D]
            vals = np.stack([s.value for s in slots])
            extra = np.array([slot_bias(s) for s in slots])
            seen = []
            for h in range(g * heads // kv_heads, (g + 1) * heads // kv_heads):
                for t in range(start, stop):
                    visible = len(stored) + t - start + 1
                    p = softmax(keys[:visible] @ q[h, t] * scaling + extra[:visible])
                    output[h, t] = p @ vals[:visible]
                    seen.append(Seen(p[: len(stored)], output[h, t]))
            for column, s in enumerate(stored):
                s.column, s.composite = column, False
                s.mass = float(sum(x.p[column] for x in seen))
            older = stored[sinks:]
            surplus = max(0, len(slots) - m)
            if m == 1:  # the one entry is the newest token
                counts["dropped_l"] += sum(int(s.l) for s in older)
                older = []
            else:
                older = merge_older(older, surplus, seen, weights, values, counts)
            stored = stored[:sinks] + older + new
        final.append(stored)

    return {
        "keys": np.stack([[rotated(s) for s in slots] for slots in final]),
        "values": np.stack([[s.value for s in slots] for slots in final]),
        "bias": None if bias == "none" else np.array([[slot_bias(s) for s in slots] for slots in final]),
        "positions": np.array([[s.position for s in slots] for slots in final]),
        "l": np.array([[s.l for s in slots] for slots in final]),
        "rho": np.array([[s.rho for s in slots] for slots in final]),
        "output": output,
        "diagnostics": {**counts, "chunk": chunk, "sinks": sinks, "peak": peak},
    }


def merge_older(
    older: list[Slot], surplus: int, seen: list[Seen], weights: str, values: str, counts: dict[str, int],
    part: int = 1,
) -> list[Slot]:  # fmt: skip
    """Rounds of merges of the lightest neighbouring pairs until `surplus` slots are gone, 1 / `part` of the slots a round."""
    while surplus > 0:
        most = max(1, len(older) // part)
        order = sorted(range(len(older) - 1), key=lambda i: (older[i].mass + older[i + 1].mass, i))
        used: set[int] = set()
        begins: set[int] = set()
        for i in order:
            if surplus > 0 and len(begins) < most and i not in used and i + 1 not in used:
                used |= {i, i + 1}
                begins.add(i)
                surplus -= 1
        after = []
        for i, s in enumerate(older):
            if i in begins:
                after.append(merge_pair(s, older[i + 1], seen, weights, values, counts))
            elif i not in used:
                after.append(s)
        older = after
    return older


def merge_pair(
    s1: Slot, s2: Slot, seen: list[Seen], weights: str, values: str, counts: dict[str, int]
) -> Slot:
    """Two neighbouring slots become one."""
    counts["merges"] += 1
    p1, p2 = s1.mass, s2.mass
    if p1 == 0 and p2 == 0:
        p1, p2 = s1.l, s2.l
    heavy, light, p_heavy = (s1, s2, p1) if p1 > p2 else (s2, s1, p2)  # ties to the later
    mass = s1.mass + s2.mass
    if weights == "drop-lighter":
        counts["dropped_l"] += int(light.l)
        return replace(heavy, mass=mass, composite=True)

    key, g = None, 0.0
    if weights == "gradient":
        key, g = asymkv_merge(s1.key, s2.key, s1.g, s2.g)
        w1 = asymkv_merge(np.ones_like(s1.g), np.zeros_like(s1.g), s1.g, s2.g)[0]
    elif weights == "mass":
        w1 = p1 / (p1 + p2)
    elif weights == "mean":
        w1 = s1.l / (s1.l + s2.l)
    elif s1.composite or s2.composite:
        counts["composite"] += 1
        w1 = p1 / (p1 + p2)
    else:
        guarded = hessian_weight(s1, s2, seen, weights == "exact", counts)
        w1 = p1 / (p1 + p2) if guarded is None else guarded

    v1, v2 = s1.value, s2.value
    merged_value = {
        "mean-l": (s1.l * v1 + s2.l * v2) / (s1.l + s2.l),
        "sum": v1 + v2,
        "plain-mean": (v1 + v2) / 2,
        "mass": (p1 * v1 + p2 * v2) / (p1 + p2),
        "as-key": w1 * v1 + (1 - w1) * v2,
    }[values]
    return Slot(
        key=w1 * s1.key + (1 - w1) * s2.key if key is None else key,
        value=merged_value,
        position=heavy.position,
        l=s1.l + s2.l,
        rho=heavy.rho * (p1 + p2) / p_heavy,
        mass=mass,
        composite=True,
        g=g,
        age=s1.age,
    )


def hessian_weight(s1: Slot, s2: Slot, seen: list[Seen], exact: bool, counts: dict[str, int]) -> float | None:
    """Weight of the first key from the norms of c_ij; None where a guard asks for p-weights."""
    h11 = h22 = h12 = 0.0
    positive = False
    for x in seen:
        p1, p2 = x.p[s1.column], x.p[s2.column]
        if p1 + p2 >= 0.45:
            counts["left_out"] += 1
            continue
        positive = positive or p1 + p2 > 0
        c11 = p1 * (1 - 2 * p1) * (s1.value - x.o)
        c22 = p2 * (1 - 2 * p2) * (s2.value - x.o)
        c12 = -p1 * p2 * (s1.value + s2.value - 2 * x.o)
        h11 += float(np.linalg.norm(c11))
        h22 += float(np.linalg.norm(c22))
        h12 += float(np.linalg.norm(c12)) if exact else 0.0
    if not positive:
        counts["no_mass"] += 1
        return None
    denominator = h11 - 2 * h12 + h22
    if denominator <= 1e-12 * (h11 + h22):
        counts["denominator"] += 1
        return None
    weight = (h11 - h12) / denominator
    if not 0 <= weight <= 1:
        counts["outside"] += 1
        return None
    return weight


# --- adjacent: the merge of kvslimmer/mass, once, on the score of bifocal --------------------------


def adjacent(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any, sin: Any,
    bias: str = "log-l", sinks: int = 32, recent: int = 16,
) -> Result:  # fmt: skip
    """Neighbours with the lowest s1 + s2 merge until m entries are left, but not the first and last tokens.

    bias "log-l" | "none"; `sinks` is cut to m // 8, `recent` to m // 2. The result also has `l` [Hkv, m].
    """
    k, v, cos, sin = array(k), array(v), array(cos), array(sin)
    n = k.shape[1]
    if m >= n:
        return everything(k, v)
    first, last = min(sinks, m // 8), n - min(recent, m // 2)
    counts = {"merges": 0, "dropped_l": 0}
    final = []
    for h, score in enumerate(bifocal_score(q, k, v, scaling)):
        slots = [Slot(unrotate(k[h, t], cos[t], sin[t]), v[h, t], t, mass=float(score[t])) for t in range(n)]
        if m == 1:
            final.append(slots[-1:])
            counts["dropped_l"] += n - 1
            continue
        older = merge_older(slots[first:last], n - m, [], "mass", "mean-l", counts, part=8)
        final.append(slots[:first] + older + slots[last:])
    l = np.array([[s.l for s in slots] for slots in final])
    return {
        "keys": np.array(
            [[rotate(s.key, cos[s.position], sin[s.position]) for s in slots] for slots in final]
        ),
        "values": np.array([[s.value for s in slots] for slots in final]),
        "bias": np.log(l) if bias == "log-l" else None,
        "positions": np.array([[s.position for s in slots] for slots in final]),
        "l": l,
        "diagnostics": counts,
    }


# --- h2o, vatp, pyramidkv -------------------------------------------------------------------------


def column_sums(q: Any, k: Any, scaling: float, group: str = "sum") -> Array:
    """Attention received from the whole prompt, [Hkv, n]."""
    return over_group(causal_weights(q, k, scaling).sum(1), len(k), group)


def heavy_and_recent(score: Array, m: int, sinks: int) -> list[list[int]]:
    """Recent half (the odd entry too), and a heavy half: the first `sinks`, cut to fit, then the best."""
    n = score.shape[1]
    heavy = m // 2
    recent = m - heavy
    forced = min(sinks, heavy)
    return [
        [*range(forced), *top(row, range(forced, n - recent), heavy - forced), *range(n - recent, n)]
        for row in score
    ]


def h2o(q: Any, k: Any, v: Any, scaling: float, m: int, *, group: str = "sum") -> Result:
    """Half of the budget to the largest column sums, half to the most recent tokens."""
    if m >= array(k).shape[1]:
        return everything(k, v)
    return gather(k, v, heavy_and_recent(column_sums(q, k, scaling, group), m, 0))


def vatp(q: Any, k: Any, v: Any, scaling: float, m: int, *, sinks: int = 20, group: str = "sum") -> Result:
    """H2O with the column sum times the L1 norm of the value, and 20 forced sinks."""
    if m >= array(k).shape[1]:
        return everything(k, v)
    score = column_sums(q, k, scaling, group) * np.abs(array(v)).sum(-1)
    return gather(k, v, heavy_and_recent(score, m, sinks))


def pyramid_budgets(m: int, n: int, layers: int, w: int = 32, beta: int = 20) -> list[int]:
    """PyramidKV's total entries of each layer, falling linearly; they sum to layers * m exactly."""
    if m <= w or m >= n or layers == 1:
        return [m] * layers
    low = Fraction(m - w, beta)
    high = 2 * (m - w) - low
    if high >= n - w:
        high = Fraction(n - w)
        low = 2 * (m - w) - high
    ideal = [high - (high - low) * Fraction(i, layers - 1) for i in range(layers)]
    budgets = [math.floor(x) for x in ideal]
    missing = layers * (m - w) - sum(budgets)
    by_remainder = sorted(range(layers), key=lambda i: (budgets[i] - ideal[i], i))
    for i in by_remainder[:missing]:
        budgets[i] += 1
    return [w + b for b in budgets]


def pyramidkv(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, layer: int, layers: int,
    w: int = 32, kernel: int = 7, pool: str = "max", beta: int = 20, group: str = "sum",
) -> Result:  # fmt: skip
    """SnapKV's selection under the layer's own budget."""
    budget = pyramid_budgets(m, array(k).shape[1], layers, w, beta)[layer]
    out = snapkv(q, k, v, scaling, budget, w=w, kernel=kernel, pool=pool, group=group)
    out["diagnostics"]["budget"] = budget
    return out


# --- look-m, weightedkv, kvmerger -----------------------------------------------------------------


def key_space(k: Array, cos: Any, sin: Any, space: str) -> Array:
    """The keys in which cosines and merges happen: "pre" RoPE, or "post" as given."""
    return unrotate(k, array(cos), array(sin)) if space == "pre" else k


def back(key: Array, position: int, cos: Any, sin: Any, space: str) -> Array:
    """A merged key as it is attended to."""
    return rotate(key, array(cos)[position], array(sin)[position]) if space == "pre" else key


def lookm(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any = None, sin: Any = None,
    sinks: int = 4, space: str = "pre", group: str = "sum",
) -> Result:  # fmt: skip
    """Each evicted key joins its most similar kept key: the mean of that entry and the pivot averages."""
    k, v = array(k), array(v)
    n = k.shape[1]
    if m >= n:
        return everything(k, v)
    kept = heavy_and_recent(column_sums(q, k, scaling, group), m, sinks)
    out = gather(k, v, kept)
    raw = key_space(k, cos, sin, space)
    for h, rows in enumerate(kept):
        joined: dict[int, list[int]] = {c: [] for c in rows}
        for e in sorted(set(range(n)) - set(rows)):
            joined[max(rows, key=lambda c: (cosine(raw[h, e], raw[h, c]), -c))].append(e)
        for slot, c in enumerate(rows):
            if joined[c]:
                pivot_keys = [raw[h, c]] + [(raw[h, e] + raw[h, c]) / 2 for e in joined[c]]
                pivot_values = [v[h, c]] + [(v[h, e] + v[h, c]) / 2 for e in joined[c]]
                out["keys"][h, slot] = back(sum(pivot_keys) / len(pivot_keys), c, cos, sin, space)
                out["values"][h, slot] = sum(pivot_values) / len(pivot_values)
    return out


def weightedkv(q: Any, k: Any, v: Any, scaling: float, m: int, *, group: str = "sum") -> Result:
    """Dropped runs go into the next kept slot: values averaged by mean attention, keys dropped."""
    k, v = array(k), array(v)
    n = k.shape[1]
    if m >= n:
        return everything(k, v)
    queries = n - np.arange(n)  # that see token i
    mean_attention = column_sums(q, k, scaling, group) / queries
    kept = heavy_and_recent(mean_attention, m, 0)
    out = gather(k, v, kept)
    for h, rows in enumerate(kept):
        before = -1
        for slot, c in enumerate(rows):
            run = list(range(before + 1, c + 1))  # the dropped run, and the slot itself
            before = c
            weight = mean_attention[h, run]
            if len(run) > 1 and weight.sum() > 0:
                out["values"][h, slot] = weight @ v[h, run] / weight.sum()
    return out


def kvmerger(
    q: Any, k: Any, v: Any, scaling: float, m: int, *, cos: Any = None, sin: Any = None,
    threshold: float = 0.75, space: str = "pre", group: str = "sum",
) -> Result:  # fmt: skip
    """Runs of alike neighbours become one entry at the most attended member, with Gaussian weights.

    The heads may end with different lengths: keys, values and positions are lists of arrays. `sets` lists the
    tokens of each entry; the diagnostics have the threshold of each head.
    """
    k, v = array(k), array(v)
    kv_heads, n, _ = k.shape
    if m >= n:
        return everything(k, v)
    score = column_sums(q, k, scaling, group)
    raw = key_space(k, cos, sin, space)
    recent = heavy = m // 4
    out: Result = {"keys": [], "values": [], "bias": None, "positions": [], "sets": []}
    thresholds = []
    for h in range(kv_heads):
        excluded = {*range(n - recent, n), *top(score[h], range(n - recent), heavy)}
        alike = {  # first token of each pair of neighbouring candidates
            i: cosine(raw[h, i], raw[h, i + 1]) for i in range(n - 1) if not excluded & {i, i + 1}
        }
        enough = [  # each joined pair is one entry fewer
            t for t in (threshold, *alike.values())
            if t <= threshold and n - sum(c > t for c in alike.values()) <= m
        ]  # fmt: skip
        tau = max(enough, default=-math.inf)  # if nothing suffices all candidates merge
        joins = {i for i, c in alike.items() if c > tau}
        sets: list[list[int]] = []
        for i in range(n):
            if i - 1 in joins:
                sets[-1].append(i)
            else:
                sets.append([i])
        keys, values, positions = [], [], []
        for members in sets:
            pivot = max(members, key=lambda i: (score[h, i], -i))
            far = np.array([float(((raw[h, pivot] - raw[h, i]) ** 2).sum()) for i in members])
            weight = np.exp(-far / (2 * far.mean())) if far.mean() > 0 else np.ones(len(members))
            weight /= weight.sum()
            alone = len(members) == 1
            keys.append(k[h, pivot] if alone else back(weight @ raw[h, members], pivot, cos, sin, space))
            values.append(weight @ v[h, members])
            positions.append(pivot)
        out["keys"].append(np.stack(keys))
        out["values"].append(np.stack(values))
        out["positions"].append(np.array(positions))
        out["sets"].append(sets)
        thresholds.append(tau if enough else -1.0)
    out["diagnostics"] = {"threshold": thresholds}
    return out


# --- asymkv's merge, kvslimmer as released --------------------------------------------------------


def asymkv_merge(k1: Any, k2: Any, g1: Any, g2: Any) -> tuple[Array, Array]:
    """(g1² k1 + g2² k2) / (g1² + g2²) elementwise, 0/0 gives ½; and the merged g = g1 + g2. All [D]."""
    k1, k2, g1, g2 = array(k1), array(k2), array(g1), array(g2)
    key = np.empty_like(k1)
    for d in range(len(k1)):
        total = g1[d] ** 2 + g2[d] ** 2
        w1 = g1[d] ** 2 / total if total > 0 else 0.5
        key[d] = w1 * k1[d] + (1 - w1) * k2[d]
    return key, g1 + g2


def released_merge(
    k: Any, v: Any, l: Any, h_old: Any, a: Any, t: int, keep: int, *,
    clamp: float = 5, recency: bool = True, smoothing: bool = True,
) -> Result:  # fmt: skip
    """One merge of the released KVSlimmer, statistics given: the slots after the sinks go down to `keep`.

    k [Hkv, S, D] before RoPE, v [Hkv, S, D] sums, l [Hkv, S]; h_old [Hkv, S_old] the smoothed h of the first
    S_old slots (the others are new); a [Hkv, S] the l-weighted attention summed over the chunk's queries,
    mean over the group's heads; t the chunk's index from 1. Returns k, v, l, h of the kept slots,
    [Hkv, keep, ...], `begins` (the merged pairs, sorted), `weights` [Hkv, pairs] of the first keys, `halves`
    (how many weights were 0/0), and `lost` [Hkv], the tokens that no slot holds any more (clamping aside).
    """
    k, v, l, h_old, a = array(k), array(v), array(l), array(h_old), array(a)
    kv_heads, slots = a.shape
    gamma = 4096 / math.log(512)
    share = np.zeros_like(a)  # α
    h = np.zeros_like(a)
    d = np.zeros_like(a)
    for g in range(kv_heads):
        share[g] = a[g] / a[g].sum()
        o = share[g] @ v[g]
        for i in range(slots):
            slope = share[g, i] * (1 - 2 * share[g, i])
            h[g, i] = slope * np.abs(v[g, i] - o).sum()
            if i < h_old.shape[1] and smoothing:
                h[g, i] = h[g, i] / t + (t - 1) / t * h_old[g, i]
            d[g, i] = h[g, i] / slope if slope != 0 else 0.0
    score = [
        (a[:, i] + a[:, i + 1]).sum()
        * ((l[:, i] + l[:, i + 1]).sum() / math.exp((i + 1) / gamma) if recency else 1.0)
        for i in range(slots - 1)
    ]
    begins = sorted(sorted(range(slots - 1), key=lambda i: (score[i], i))[: slots - keep])
    deleted = {i + 1 for i in begins}
    stay = [i for i in range(slots) if i not in deleted]
    new_k, new_v, new_l, new_h = k.copy(), v.copy(), l.copy(), h.copy()
    weights = np.zeros((kv_heads, len(begins)))
    halves = 0
    for g in range(kv_heads):
        for pair, i in enumerate(begins):  # every merge reads the unmerged slots
            h12 = share[g, i] * share[g, i + 1] * (d[g, i] + d[g, i + 1])
            above, below = h[g, i] - h12, h[g, i] + h[g, i + 1] - 2 * h12
            if above == 0 and below == 0:
                halves += 1
                w1 = w2 = 0.5
            else:
                w1, w2 = above / below, (h[g, i + 1] - h12) / below
            weights[g, pair] = w1
            new_k[g, i] = w1 * k[g, i] + w2 * k[g, i + 1]
            new_v[g, i] = v[g, i] + v[g, i + 1]
            new_l[g, i] = min(l[g, i] + l[g, i + 1], clamp)
            new_h[g, i] = w1**2 * h[g, i] + w2**2 * h[g, i + 1]
    held = {i + step for i in stay for step in ((0, 1) if i in begins else (0,))}
    return {
        "k": new_k[:, stay], "v": new_v[:, stay], "l": new_l[:, stay], "h": new_h[:, stay],
        "begins": begins, "weights": weights, "halves": halves,
        "lost": l[:, [i for i in range(slots) if i not in held]].sum(1),
    }  # fmt: skip


def released_positions(l: Any) -> tuple[Array, float]:
    """Released positions: cumsum(l) - l of slot 0 for the slots, Σ l for the first query; l of head 0."""
    l = array(l)[0]
    return np.cumsum(l) - l[0], float(l.sum())


# --- driven: the outer loops of asymkv and of the released code -----------------------------------


@dataclass
class Layer:
    """What one layer showed in a pass over a chunk of c tokens, after P stored slots."""

    k: Array  # [Hkv, c, D], the chunk's keys, rotated
    v: Array  # [Hkv, c, D]
    p: Array  # [H, c, P + c], attention weights
    g: Array | None  # [Hkv, P, D], gradient of the chunk's mean next-token loss by the stored rotated keys


# look(past, start, stop, position, gradient) runs tokens start..stop-1, the first at `position`, over each layer's
# past (keys [Hkv, P, D] rotated, values [Hkv, P, D], bias [Hkv, P]) and returns a Layer for each.
Look = Any


def driven_bounds(n: int, m: int, chunk: int | None, sinks: int) -> tuple[list[tuple[int, int]], int]:
    """Chunks of n tokens under m slots, the first with the remainder, and the sinks used."""
    chunk = max(1, min(512, m // 4) if chunk is None else min(chunk, m // 2))
    first = n % chunk or chunk
    return [(0, first), *((s, s + chunk) for s in range(first, n, chunk))], min(sinks, m // 8)


def asymkv(
    look: Look, n: int, m: int, tables: list[tuple[Array, Array]], *,
    chunk: int | None = None, sinks: int = 32, values: str = "mean-l",
) -> list[Result]:  # fmt: skip
    """AsymKV on KVSlimmer's schedule: n tokens into m slots, for each layer; `tables` are each layer's cos and sin."""
    bounds, sinks = driven_bounds(n, m, chunk, sinks)
    stored: list[list[list[Slot]]] = [[] for _ in tables]  # layer, KV head, slot

    def seen(layer: int) -> tuple[Array, Array, Array]:
        cos, sin = tables[layer]
        heads = stored[layer]
        return (
            np.array([[rotate(s.key, cos[s.position], sin[s.position]) for s in slots] for slots in heads]),
            np.array([[s.value for s in slots] for slots in heads]),
            np.array([[math.log(s.l) for s in slots] for slots in heads]),
        )

    counts = dict.fromkeys(("merges", "left_out", "no_mass", "denominator", "outside", "composite"), 0)
    for start, stop in bounds:
        past = None if not (stored[0] and stored[0][0]) else [seen(layer) for layer in range(len(tables))]
        shown = look(past, start, stop, start, past is not None)
        for layer, x in enumerate(shown):
            cos, sin = tables[layer]
            group = len(x.p) // len(x.k)
            heads = stored[layer] or [[] for _ in x.k]
            for h, slots in enumerate(heads):
                for column, s in enumerate(slots):
                    s.mass, s.composite = float(x.p[h * group : (h + 1) * group, :, column].sum()), False
                    g = unrotate(x.g[h, column], cos[s.position], sin[s.position])
                    s.g, s.age = (s.g * s.age + g) / (s.age + 1), s.age + 1
                new = [
                    Slot(unrotate(x.k[h, t - start], cos[t], sin[t]), x.v[h, t - start], t)
                    for t in range(start, stop)
                ]
                surplus = max(0, len(slots) + len(new) - m)
                if m <= 1:
                    heads[h] = (slots + new)[len(slots) + len(new) - m :] if surplus else slots + new
                else:
                    older = merge_older(slots[sinks:], surplus, [], "gradient", values, counts)
                    heads[h] = slots[:sinks] + older + new
            stored[layer] = heads
    return [
        {
            **dict(zip(("keys", "values", "bias"), seen(layer), strict=True)),
            "positions": np.array([[s.position for s in slots] for slots in stored[layer]]),
            "l": np.array([[s.l for s in slots] for slots in stored[layer]]),
        }
        for layer in range(len(tables))
    ]


def released(
    look: Look, n: int, m: int, tables: list[tuple[Array, Array]], *,
    chunk: int | None = None, sinks: int = 32, gradient: bool = False, one_pass: bool = False,
    true_positions: bool = False, **settings: Any,
) -> list[Result]:  # fmt: skip
    """The released KVSlimmer (or AsymKV, with `gradient`): n tokens into m slots, for each layer.

    Keys are kept before RoPE, values as sums, queries start at Σ l. `settings` go to `released_merge`.
    Positions and keys of the result are those before a query at Σ l (`query`); `held` counts the distinct tokens.
    """
    bounds, sinks = driven_bounds(n, m, chunk, sinks)
    layers: list[dict[str, Any]] = [
        {} for _ in tables
    ]  # k, v, l, places [Hkv, P, ...], h and g, tokens: a set a slot

    def view(layer: int) -> tuple[Array, Array, Array]:
        x, (cos, sin) = layers[layer], tables[layer]
        at = (
            x["places"]
            if true_positions
            else np.tile(released_positions(x["l"])[0].astype(int), (len(x["k"]), 1))
        )
        return rotate(x["k"], cos[at], sin[at]), x["v"] / x["l"][..., None], np.log(x["l"])

    def query(start: int) -> list[int]:
        return [start if true_positions or not x else int(released_positions(x["l"])[1]) for x in layers]

    def looked(start: int, stop: int, with_gradient: bool) -> list[Layer]:
        past = [view(layer) for layer in range(len(layers))] if layers[0] else None
        return look(past, start, stop, query(start), with_gradient)

    def shrink(
        x: dict[str, Any], shown: Layer, t: int, keep: int, at: Array, table: tuple[Array, Array]
    ) -> None:
        heads, slots = x["l"].shape
        a = shown.p.reshape(heads, -1, *shown.p.shape[1:]).sum(2).mean(1)[:, sinks:slots]
        s = slice(sinks, None)
        if gradient:
            cos, sin = table
            new = unrotate(shown.g, cos[at], sin[at])
            old = x["g"].shape[1]
            new[:, :old] = new[:, :old] / t + (t - 1) / t * x["g"]
            x["g"] = new
        if slots <= sinks:
            return
        out = released_merge(
            x["k"][:, s],
            x["v"][:, s],
            x["l"][:, s],
            x["h"],
            a,
            t,
            min(keep - sinks, slots - sinks),
            **settings,
        )
        begins = [i + sinks for i in out["begins"]]
        stay = [i for i in range(slots) if i - 1 not in begins]
        old_k, old_places, old_tokens = x["k"], x["places"], x["tokens"]
        x["h"] = out["h"]
        for name in ("k", "v", "l"):
            x[name] = np.concatenate([x[name][:, :sinks], out[name]], 1)
        x["tokens"] = [old_tokens[i] | (old_tokens[i + 1] if i in begins else set()) for i in stay]
        places = old_places.copy()
        for i in begins:
            for h in range(heads):
                later = a[h, i + 1 - sinks] >= a[h, i - sinks]
                places[h, i] = old_places[h, i + 1] if later else old_places[h, i]
        x["places"] = places[:, stay]
        if gradient:
            g = x["g"].copy()
            k = old_k.copy()
            for i in begins:
                for h in range(heads):
                    k[h, i], g[h, i] = asymkv_merge(
                        old_k[h, i], old_k[h, i + 1], x["g"][h, i], x["g"][h, i + 1]
                    )
            x["k"], x["g"] = k[:, stay], g[:, stay]

    for index, (start, stop) in enumerate(bounds):
        size = stop - start
        if index:
            shown = looked(start, stop, gradient)
            ats = [
                x["places"]
                if true_positions
                else np.tile(released_positions(x["l"])[0].astype(int), (len(x["k"]), 1))
                for x in layers
            ]
            begin = query(start)
            for x, see, at, table in zip(layers, shown, ats, tables, strict=True):
                if m == 1:
                    x.clear()
                else:
                    shrink(x, see, index, m - size, at, table)
        if not index or not one_pass:
            begin = query(start)
            shown = looked(start, stop, False)
        for layer, (x, see) in enumerate(zip(layers, shown, strict=True)):
            cos, sin = tables[layer]
            at = range(begin[layer], begin[layer] + size)
            heads = len(see.k)
            fresh = {
                "k": unrotate(see.k, cos[at], sin[at]), "v": see.v, "l": np.ones((heads, size)),
                "places": np.tile(np.arange(start, stop), (heads, 1)),
            }  # fmt: skip
            for name, new in fresh.items():
                x[name] = np.concatenate([x[name], new], 1) if name in x else new
            x["tokens"] = x.get("tokens", []) + [{t} for t in range(start, stop)]
            x.setdefault("h", np.zeros((heads, 0)))
            x.setdefault("g", np.zeros((heads, 0, see.k.shape[-1])))
    return [
        {
            **dict(zip(("keys", "values", "bias"), view(layer), strict=True)),
            "upright": x["k"], "l": x["l"], "held": sum(map(len, x["tokens"])),
            "positions": x["places"] if true_positions else released_positions(x["l"])[0][None],
            "query": query(n)[layer],
        }
        for layer, x in enumerate(layers)
    ]  # fmt: skip
