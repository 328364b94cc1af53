"""KVSlimmer as printed: adjacent keys merge by a closed form from the exact Hessian, chunk by chunk.

Notation (arXiv 2603.00907): z = q·k·scaling (+ bias), p = softmax(z) the weight an arm attends with, o = Σ p v,
c_ii = p_i (1 - 2 p_i)(v_i - o) and c_ij = -p_i p_j (v_i + v_j - 2 o) the second derivatives of o by z.

    k* = [(‖c11‖ - ‖c12‖) k_m + (‖c22‖ - ‖c12‖) k_{m+1}] / (‖c11‖ - 2‖c12‖ + ‖c22‖),    v* mean by l,    bias log l

Keys merge before RoPE.  Each KV head merges its own pairs; after every chunk the older entries shrink until the layer
holds m entries, the newest chunk raw (``pairs.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import at_least_float32, query_block
from ..entries import Entries
from .base import register, setting
from .pairs import CLAMP, ChunkMerger, Pairs

TURNING_POINT = (
    0.45  # p_m + p_{m+1} past ½ makes the stationary point a maximum; the paper's rule is left before it
)
DEGENERATE = 1e-12  # of the denominator, relative to ‖c11‖ + ‖c22‖


@register
@dataclass(frozen=True)
class KVSlimmer(ChunkMerger):
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

    @property
    def drops(self) -> bool:
        return self.weights == "drop-lighter"

    def bias_of(self, entries: Entries) -> Tensor | None:
        assert entries.mass is not None
        if self.bias == "none":
            return None
        if self.bias == "ratio":
            return self.alpha * entries.state["rho"].log()
        return (entries.mass.clamp_max(CLAMP) if self.bias == "clamp" else entries.mass).log()

    def pair_weights(self, pairs: Pairs) -> Tensor:
        if self.weights == "mass":
            return pairs.share
        if self.weights == "mean":
            l1, l2 = pairs.slots.mass[pairs.first], pairs.slots.mass[pairs.first + 1]
            return l1 / (l1 + l2)
        return guarded(pairs, *curvatures(pairs, self.weights == "exact"))


def curvatures(pairs: Pairs, exact: bool, leave_out: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ over the queries of ‖c11‖, ‖c12‖ (0 unless ``exact``), ‖c22‖, and which pairs no query gives mass to: [K] each.

    Of a pair that has no columns of its own (composite) nothing is computed: 0.

    ``leave_out``: a (query head, query) past the turning point is left out of a pair's sums, and counted.
    """
    observed, columns = pairs.observed, pairs.slots.column
    assert observed.probabilities is not None and observed.output is not None
    single = (~pairs.composite).nonzero()[:, 0]  # the others have no column of their own
    first, count = pairs.first[single], len(single)
    chosen = torch.cat([columns[first], columns[first + 1]])  # [2K]
    values = at_least_float32(pairs.entries.values[pairs.head][chosen])
    probabilities = observed.probabilities[pairs.head]  # [G·q, n]
    output = observed.output[pairs.head]  # o [G·q, D]
    apart = (values[:count] - values[count:]).square().sum(1)
    # ‖v - o‖² = [o, ‖o‖², 1]·[-2v, 1, ‖v‖²]: one product, taken for a block of queries at a time
    vv, oo = (x.square().sum(1, keepdim=True) for x in (values, output))
    members = torch.cat([-2 * values, torch.ones_like(vv), vv], 1).T
    centers = torch.cat([output, oo, torch.ones_like(oo)], 1)
    slot, pair = output.new_zeros(2 * count), output.new_zeros(2, count)
    left_out, block = 0, query_block(4 * max(count, 1), output.device)
    for o, p in zip(centers.split(block), probabilities.split(block), strict=True):
        away = (o @ members).clamp_min_(0)  # [q, 2K]
        p = p.index_select(1, chosen)
        p1, p2 = p[:, :count], p[:, count:]
        both = p1 + p2
        # Seldom, and looking for the largest costs a tenth of a mask.
        if leave_out and count and both.max() >= TURNING_POINT:
            past = both >= TURNING_POINT
            left_out += int(past.sum())
            for x in (p1, p2, both):
                x.masked_fill_(past, 0)
        pair[1] += both.sum(0)
        if exact:  # ‖a + b‖² = 2‖a‖² + 2‖b‖² - ‖a - b‖² with a = v1 - o and b = v2 - o
            cross = (away[:, :count] + away[:, count:]).mul_(2).sub_(apart).clamp_min_(0).sqrt_()
            pair[0] += cross.mul_(p1).mul_(p2).sum(0)
        slot += torch.addcmul(p, p, p, value=-2).abs_().mul_(away.sqrt_()).sum(0)
    if leave_out:
        pairs.counts["left_out"] += left_out
    sums = output.new_zeros(4, len(pairs.first))
    sums[:, single] = torch.stack([slot[:count], pair[0], slot[count:], pair[1]])
    return sums[0], sums[1], sums[2], sums[3] == 0


def guarded(pairs: Pairs, h11: Tensor, h12: Tensor, h22: Tensor, no_mass: Tensor) -> Tensor:
    """Weight of the first member [K] by the closed form, ``share`` where the rule has no answer.

    The fallbacks, each pair counted once and in this order: it contains a slot merged in this step (composite),
    no query of positive mass is left (no_mass), the denominator vanishes (denominator), the weight lies outside
    [0, 1] (outside).
    """
    composite = pairs.composite
    no_mass = no_mass & ~composite
    denominator = h11 - 2 * h12 + h22
    vanishing = (denominator <= DEGENERATE * (h11 + h22)) & ~composite & ~no_mass
    weight = (h11 - h12) / denominator
    outside = ~((weight >= 0) & (weight <= 1)) & ~composite & ~no_mass & ~vanishing
    reasons = {"composite": composite, "no_mass": no_mass, "denominator": vanishing, "outside": outside}
    _count(pairs.counts, reasons)
    return torch.where(composite | no_mass | vanishing | outside, pairs.share, weight)


def unguarded(pairs: Pairs, h11: Tensor, h12: Tensor, h22: Tensor) -> Tensor:
    """The closed form wherever it leads; 0/0 gives ½.  Counted: 0/0 (halves) and weights outside [0, 1] (outside).

    Only a slot merged in this step (composite) has no norms of its own, so that ``share`` stands in.
    """
    above, denominator = h11 - h12, h11 - 2 * h12 + h22
    halves = (above == 0) & (denominator == 0) & ~pairs.composite
    weight = torch.where(halves, 0.5, above / denominator)
    outside = ~((weight >= 0) & (weight <= 1)) & ~pairs.composite
    _count(pairs.counts, {"composite": pairs.composite, "halves": halves, "outside": outside})
    return torch.where(pairs.composite, pairs.share, weight)


def _count(counts: Counter[str], reasons: dict[str, Tensor]) -> None:
    for reason, affected in reasons.items():
        counts[reason] += int(affected.sum())
