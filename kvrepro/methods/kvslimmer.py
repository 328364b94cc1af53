"""KVSlimmer as printed: adjacent keys merge by a closed form from the exact Hessian, chunk by chunk.

Notation (arXiv 2603.00907): z = q·k·scaling (+ bias), p = softmax(z) the weight an arm attends with, o = Σ p v,
c_ii = p_i (1 - 2 p_i)(v_i - o) and c_ij = -p_i p_j (v_i + v_j - 2 o) the second derivatives of o by z.

    k* = [(‖c11‖ - ‖c12‖) k_m + (‖c22‖ - ‖c12‖) k_{m+1}] / (‖c11‖ - 2‖c12‖ + ‖c22‖),    v* mean by l,    bias log l

Keys merge before RoPE.  Each KV head merges its own pairs; after every chunk the older entries shrink until the layer
holds m entries, the newest chunk raw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from .base import Diagnostics, Method, register, setting

TURNING_POINT = (
    0.45  # p_m + p_{m+1} past ½ makes the stationary point a maximum; the paper's rule is left before it
)
DEGENERATE = 1e-12  # of the denominator, relative to ‖c11‖ + ‖c22‖
CLAMP = 5  # the released code's ceiling on l


@dataclass
class Slots:
    """The entries of one KV head while it merges, in the order they stand."""

    keys: Tensor  # [T, D]
    values: Tensor  # [T, D]
    positions: Tensor  # [T]
    mass: Tensor  # l [T]
    rho: Tensor  # [T]
    attention: Tensor  # [T]: p summed over the chunk's queries and the group's heads
    column: Tensor  # [T]: where the slot stands in the chunk's probabilities
    composite: Tensor  # [T] bool: merged earlier in this step, so it has no column of its own


@register
@dataclass(frozen=True)
class KVSlimmer(Method):
    """Merge the adjacent pairs that draw the least attention, keys by the exact-Hessian rule (arXiv 2603.00907)."""

    name = "kvslimmer"
    schedule = "chunked"
    formula = (
        "k* = [(‖c11‖-‖c12‖) k1 + (‖c22‖-‖c12‖) k2] / (‖c11‖ - 2‖c12‖ + ‖c22‖), keys before RoPE; "
        "v* = (l1 v1 + l2 v2) / (l1 + l2); l* = l1 + l2; bias = log l"
    )
    paper = "arXiv 2603.00907"
    arms = {
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

    sinks: int = setting(
        32, "first tokens never merged, cut to m // 8", "paper (32); the cut is our choice", least=0
    )
    chunk: int | None = setting(
        None, "tokens a chunk; None: 512, at most m // 4; a number: at most m // 2", "paper (512); the cuts are our choice",
        least=1,
    )  # fmt: skip
    weights: str = setting(
        "exact", "key weights: exact Hessian, diagonal (c12 dropped), attention mass, mean by l, or drop the lighter",
        "paper (exact)", ("exact", "diagonal", "mass", "mean", "drop-lighter"),
    )  # fmt: skip
    values: str = setting(
        "mean", "merged value: mean by l (= sum with cardinality), plain sum, plain mean, by attention mass, as the key",
        "paper (mean)", ("mean", "sum", "plain-mean", "mass", "as-key"),
    )  # fmt: skip
    bias: str = setting(
        "log-l", "log l; log min(l, 5); α log ρ (SelKV's attention ratio on this merge); none", "paper (log l)",
        ("log-l", "clamp", "ratio", "none"),
    )  # fmt: skip
    alpha: float = setting(0.5, "α of the ratio bias", "our choice (SelKV's)", least=0)

    def sizes(self, m: int) -> tuple[int, int]:
        """Sinks and chunk used under a budget of m entries."""
        chunk = min(512, m // 4) if self.chunk is None else min(self.chunk, m // 2)
        return min(self.sinks, m // 8), max(chunk, 1)

    def chunks(self, n: int, m: int) -> list[int]:
        """The first chunk takes the remainder, so that the last one is full."""
        _, chunk = self.sizes(m)
        whole = (n - 1) // chunk
        return [n - whole * chunk] + [chunk] * whole

    def used(self, n: int, m: int) -> Diagnostics:
        sinks, chunk = self.sizes(m)
        return {"sinks": sinks, "chunk": chunk, "peak_entries": min(m + chunk, n)}

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        fresh = observed.queries.shape[1]
        mass = entries.mass
        if mass is None:
            mass = at_least_float32(entries.keys).new_ones(entries.kv_heads, len(entries))
        rho = entries.state.get("rho", mass[:, :0])
        rho = torch.nn.functional.pad(rho, (0, len(entries) - rho.shape[1]), value=1.0)
        entries = replace(entries, mass=mass, state={"rho": rho})
        surplus = len(entries) - m
        if surplus <= 0:
            return entries, {"dropped_mass": 0}
        if m == 1:  # nothing but the newest token fits
            last = torch.tensor([len(entries) - 1], device=entries.keys.device)
            return entries.take(last), {"dropped_mass": float(mass[:, :-1].sum())}

        counts: Counter[str] = Counter()
        older = range(self.sizes(m)[0], len(entries) - fresh)
        heads = [
            self._shrink(head, entries, observed, older, surplus, counts) for head in range(entries.kv_heads)
        ]
        left = torch.stack([slots.mass for slots in heads])
        merged = Entries(
            keys=torch.stack([slots.keys for slots in heads]),
            values=torch.stack([slots.values for slots in heads]),
            positions=torch.stack([slots.positions for slots in heads]),
            mass=left,
            state={"rho": torch.stack([slots.rho for slots in heads])},
        )
        return replace(merged, bias=self._bias(merged)), {
            "dropped_mass": float(mass.sum() - left.sum()),
            **counts,
        }

    def _bias(self, entries: Entries) -> Tensor | None:
        assert entries.mass is not None
        if self.bias == "none":
            return None
        if self.bias == "ratio":
            return self.alpha * entries.state["rho"].log()
        return (entries.mass.clamp_max(CLAMP) if self.bias == "clamp" else entries.mass).log()

    # One KV head

    def _shrink(
        self,
        head: int,
        entries: Entries,
        observed: Observed,
        older: range,
        surplus: int,
        counts: Counter[str],
    ) -> Slots:
        """Merge pairs of the head's older slots in rounds until ``surplus`` entries are gone."""
        assert observed.probabilities is not None and entries.mass is not None
        probabilities = observed.probabilities[head]  # [G·q, T]
        device = probabilities.device
        slots = Slots(
            keys=entries.keys[head],
            values=entries.values[head],
            positions=entries.positions.expand(entries.kv_heads, -1)[head],
            mass=entries.mass[head],
            rho=entries.state["rho"][head],
            attention=probabilities.sum(0),
            column=torch.arange(len(entries), device=device),
            composite=torch.zeros(len(entries), dtype=torch.bool, device=device),
        )
        stop = older.stop
        while surplus:
            first = choose_pairs(slots.attention[older.start : stop], surplus) + older.start
            if not len(first):
                raise AssertionError("a budget of at least 2 entries always leaves a pair to merge")
            slots = self._merge(slots, first, head, entries, observed, counts)
            surplus -= len(first)
            stop -= len(first)
            counts["merges"] += len(first)
        return slots

    def _merge(
        self,
        slots: Slots,
        first: Tensor,
        head: int,
        entries: Entries,
        observed: Observed,
        counts: Counter[str],
    ) -> Slots:
        second = first + 1
        l1, l2 = slots.mass[first], slots.mass[second]
        p1, p2 = slots.attention[first], slots.attention[second]
        empty = p1 + p2 == 0  # no attention at all: l stands for p everywhere
        p1, p2 = torch.where(empty, l1, p1), torch.where(empty, l2, p2)
        share = p1 / (p1 + p2)
        later = p2 >= p1  # the second is the heavier member; ties to the later
        heavier = torch.where(later, second, first)

        if self.weights in ("exact", "diagonal"):
            weight = self._hessian_weights(slots, first, share, head, entries, observed, counts)
        elif self.weights == "mean":
            weight = l1 / (l1 + l2)
        elif self.weights == "mass":
            weight = share
        else:
            weight = (~later).to(share.dtype)  # drop-lighter

        positions = slots.positions.clone()
        positions[first] = slots.positions[heavier]
        keys, values = slots.keys.clone(), slots.values.clone()
        mass, rho, attention = slots.mass.clone(), slots.rho.clone(), slots.attention.clone()
        attention[first] = slots.attention[first] + slots.attention[second]
        if self.weights == "drop-lighter":
            keys[first], values[first] = slots.keys[heavier], slots.values[heavier]
            mass[first], rho[first] = slots.mass[heavier], slots.rho[heavier]
        else:
            rope = observed.rope
            k1 = rope.unrotate(at_least_float32(slots.keys[first]), slots.positions[first])
            k2 = rope.unrotate(at_least_float32(slots.keys[second]), slots.positions[second])
            merged = weight[:, None] * k1 + (1 - weight)[:, None] * k2
            keys[first] = rope.rotate(merged, positions[first]).to(keys.dtype)
            v1, v2 = at_least_float32(slots.values[first]), at_least_float32(slots.values[second])
            w1, w2 = self._value_weights(weight, share, l1, l2)
            values[first] = (w1[:, None] * v1 + w2[:, None] * v2).to(values.dtype)
            mass[first] = l1 + l2
            rho[first] = slots.rho[heavier] * (p1 + p2) / torch.maximum(p1, p2)
        composite = slots.composite.clone()
        composite[first] = True

        keep = torch.ones(len(mass), dtype=torch.bool, device=mass.device)
        keep[second] = False
        return Slots(
            *(x[keep] for x in (keys, values, positions, mass, rho, attention, slots.column, composite))
        )

    def _value_weights(self, weight: Tensor, share: Tensor, l1: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
        if self.values == "sum":
            return torch.ones_like(share), torch.ones_like(share)
        first = {
            "mean": l1 / (l1 + l2),
            "plain-mean": torch.full_like(share, 0.5),
            "mass": share,
            "as-key": weight,
        }[self.values]
        return first, 1 - first

    def _hessian_weights(
        self,
        slots: Slots,
        first: Tensor,
        share: Tensor,
        head: int,
        entries: Entries,
        observed: Observed,
        counts: Counter[str],
    ) -> Tensor:
        """Weight of the first member of each pair [K], falling back to ``share`` where the rule has no answer.

        The fallbacks, each pair counted once and in this order: it contains a slot merged in this step (composite),
        no query of positive mass is left (no_mass), the denominator vanishes (denominator), the weight lies outside
        [0, 1] (outside).  ``left_out`` counts (query head, query) left out of a pair's sums past the turning point.
        """
        assert observed.probabilities is not None and observed.output is not None
        composite = slots.composite[first] | slots.composite[first + 1]
        c1, c2 = slots.column[first], slots.column[first + 1]
        p1, p2 = observed.probabilities[head][:, c1], observed.probabilities[head][:, c2]  # [G·q, K]
        left_out = p1 + p2 >= TURNING_POINT
        counts["left_out"] += int((left_out & ~composite).sum())
        p1, p2 = p1.masked_fill(left_out, 0), p2.masked_fill(left_out, 0)

        output = observed.output[head]  # o [G·q, D]
        v1, v2 = (
            at_least_float32(entries.values[head][c1]),
            at_least_float32(entries.values[head][c2]),
        )  # [K, D]
        ov1, ov2, oo = output @ v1.T, output @ v2.T, output.square().sum(1, keepdim=True)
        h11 = (p1 * (1 - 2 * p1).abs() * _distance(v1.square().sum(1) - 2 * ov1 + oo)).sum(0)
        h22 = (p2 * (1 - 2 * p2).abs() * _distance(v2.square().sum(1) - 2 * ov2 + oo)).sum(0)
        h12 = torch.zeros_like(h11)
        if self.weights == "exact":
            both = (v1 + v2).square().sum(1) - 4 * (ov1 + ov2) + 4 * oo
            h12 = (p1 * p2 * _distance(both)).sum(0)

        no_mass = ((p1 + p2).sum(0) == 0) & ~composite
        denominator = h11 - 2 * h12 + h22
        vanishing = (denominator <= DEGENERATE * (h11 + h22)) & ~composite & ~no_mass
        weight = (h11 - h12) / denominator
        outside = ~((weight >= 0) & (weight <= 1)) & ~composite & ~no_mass & ~vanishing
        for reason, pairs in (
            ("composite", composite), ("no_mass", no_mass), ("denominator", vanishing), ("outside", outside)
        ):  # fmt: skip
            counts[reason] += int(pairs.sum())
        return torch.where(composite | no_mass | vanishing | outside, share, weight)


def _distance(square: Tensor) -> Tensor:
    """Root of a squared distance computed by expansion, which rounding can push below zero."""
    return square.clamp_min(0).sqrt()


def choose_pairs(attention: Tensor, limit: int) -> Tensor:
    """First members [K] of at most ``limit`` adjacent pairs of slots [T], ascending: least attention first.

    A pair's score is the sum of its two slots' attention, ties go to the lower index, each slot is used once.
    """
    scores = attention[:-1] + attention[1:]
    used = bytearray(len(attention) + 1)
    chosen: list[int] = []
    for pair in torch.sort(scores, stable=True).indices.tolist():
        if len(chosen) == limit:
            break
        if not (used[pair] or used[pair + 1]):
            used[pair] = used[pair + 1] = 1
            chosen.append(pair)
    return torch.tensor(sorted(chosen), dtype=torch.long, device=attention.device)
