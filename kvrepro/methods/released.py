"""KVSlimmer as its released code computes it: a list of deviations from the paper, each of them one setting.

Over the slots after the sinks, with a_i the attention of the chunk's queries to slot i (weighted by l_i) and s_i = l_i v_i:

    α = a / Σ a,    o = Σ α s,    d_i = ‖s_i - o‖₁,    h_i = α_i (1 - 2 α_i) d_i,    h12 = α1 α2 (d1 + d2)
    k* = [(h1 - h12) k1 + (h2 - h12) k2] / (h1 + h2 - 2 h12),    s* = s1 + s2,    l* = min(l1 + l2, 5)

h12 bounds ‖c12‖ by the triangle inequality.  Storing s / l with bias log l gives what the code computes with s and l.
With every deviation switched off (arm ``as-printed``) this is ``kvslimmer``, driven.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from .base import register, setting
from .kvslimmer import TURNING_POINT, curvatures, guarded, unguarded
from .pairs import ChunkMerger, Deviations, Pairs, carried, running_mean


@register
@dataclass(frozen=True)
class KVSlimmerReleased(ChunkMerger):
    """KVSlimmer's released code: overlapping pairs, aggregated L1 norms, clamped counts, contracted positions, two passes."""

    name = "kvslimmer-released"
    schedule = "driven"
    formula = (
        "h = α(1-2α)‖s-o‖₁ of attention summed over the chunk; h12 = α1 α2 (d1+d2); "
        "k* = [(h1-h12) k1 + (h2-h12) k2] / (h1+h2-2 h12); s* = s1 + s2; l* = min(l1+l2, 5); "
        "score = (a1+a2) / exp(slot/γ) · Σ l, γ = 4096 / ln 512"
    )
    paper = "arXiv 2603.00907, released code"
    arms = {
        "l2-norms-per-query": {"norms": "l2-per-query"},
        "guarded": {"guards": True},
        "disjoint-pairs": {"pairs": "disjoint"},
        "unclamped": {"clamp": False},
        "no-recency": {"recency": False},
        "no-smoothing": {"smoothing": False},
        "true-positions": {"positions": "true"},
        "one-pass": {"passes": 1},
        "as-printed": {
            "norms": "l2-per-query", "guards": True, "pairs": "disjoint", "clamp": False, "recency": False,
            "smoothing": False, "positions": "true", "passes": 1,
        },
    }  # fmt: skip

    norms: str = setting(
        "l1-aggregated", "‖v-o‖₁ of the chunk's summed attention, ‖c12‖ bounded; or Σ over queries of ‖c_ij‖₂",
        "released code; paper: l2-per-query", ("l1-aggregated", "l2-per-query"),
    )  # fmt: skip
    guards: bool = setting(
        False, "fall back to attention weights where the rule has no answer", "released code: none; our kvslimmer: True"
    )  # fmt: skip
    pairs: str = setting(
        "overlapping", "all lowest pairs at once, shared by the heads, overlaps lose tokens; or disjoint, each head its own",
        "released code; paper: disjoint", ("overlapping", "disjoint"),
    )  # fmt: skip
    clamp: bool = setting(True, "l at most 5, while the value stays a sum", "released code; paper: False")
    recency: bool = setting(
        True, "score / exp(slot / γ) · Σ l: newer slots merge first", "released code; paper: False"
    )
    smoothing: bool = setting(True, "running mean of h over the chunks", "released code; paper: False")
    positions: str = setting(
        "contracted", "slots at cumsum(l) - l_0 and queries at Σ l; or the heavier member's, and true ones",
        "released code; paper: true", ("contracted", "true"),
    )  # fmt: skip
    passes: int = setting(
        2, "two: statistics, merge, then the chunk's pass; one: the chunk's own pass gives them", "released code; paper: 1",
        (2, 1),
    )  # fmt: skip

    @property
    def deviations(self) -> Deviations:
        return Deviations(
            overlapping=self.pairs == "overlapping",
            clamped=self.clamp,
            recency=self.recency,
            smoothing=self.smoothing,
            contracted=self.positions == "contracted",
            two_passes=self.passes == 2,
        )

    def follow(self, entries: Entries, observed: Observed, older: range) -> dict[str, Tensor]:
        age = carried(entries, "age", 0.0)  # chunks that have seen the entry
        age[:, : older.stop] += 1
        old, new, alpha = carried(entries, "h", 0.0), torch.zeros_like(age), torch.zeros_like(age)
        where = slice(older.start, older.stop)
        received = observed.received(entries)[:, where]
        total = received.sum(1, keepdim=True)
        alpha[:, where] = received / torch.where(total == 0, 1.0, total)
        new[:, where] = self._curvature(entries, observed, alpha)[:, where]
        # The code counts the chunks that had a past, from 1: as many as have seen the first slot.
        smooth = running_mean(old, new, age, age[:, :1]) if self.smoothing else new
        return super().follow(entries, observed, older) | {"age": age, "alpha": alpha, "h": smooth}

    def _curvature(self, entries: Entries, observed: Observed, alpha: Tensor) -> Tensor:
        """h of this chunk alone [Hkv, n]."""
        assert entries.mass is not None
        if self.norms == "l1-aggregated":
            sums = entries.mass[..., None] * at_least_float32(entries.values)
            center = alpha[:, None] @ sums  # o [Hkv, 1, D]
            return alpha * (1 - 2 * alpha) * (sums - center).abs().sum(-1)
        assert observed.probabilities is not None and observed.output is not None
        away = torch.cdist(observed.output, at_least_float32(entries.values))  # ‖v - o‖₂ [Hkv, G·q, n]
        p = observed.probabilities
        return (p * (1 - 2 * p).abs() * away).sum(1)

    def pair_weights(self, pairs: Pairs) -> Tensor:
        state, first = pairs.slots.state, pairs.first
        if self.norms == "l2-per-query":
            h1, h12, h2, no_mass = curvatures(pairs, exact=True, leave_out=self.guards)
            if self.smoothing:  # of slots, not of pairs: no query is left out of a slot's h
                h1, h2 = state["h"][first], state["h"][first + 1]
        else:
            (h1, h2), (a1, a2) = ((state[name][first], state[name][first + 1]) for name in ("h", "alpha"))
            d1, d2 = (_quotient(h, a * (1 - 2 * a)) for h, a in ((h1, a1), (h2, a2)))
            h12 = a1 * a2 * (d1 + d2)
            no_mass = a1 + a2 == 0
            if self.guards:  # the chunk's attention is the one query that there is
                past = (a1 + a2 >= TURNING_POINT) & ~pairs.composite
                pairs.counts["left_out"] += int(past.sum())
                no_mass = no_mass | past
        return guarded(pairs, h1, h12, h2, no_mass) if self.guards else unguarded(pairs, h1, h12, h2)

    def merge_state(self, pairs: Pairs, weight: Tensor) -> dict[str, Tensor]:
        h = pairs.slots.state["h"]
        merged = weight.square() * h[pairs.first] + (1 - weight).square() * h[pairs.first + 1]
        return super().merge_state(pairs, weight) | {"h": merged}


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """above / below, 0 where below is 0."""
    empty = below == 0
    return torch.where(empty, 0.0, above / torch.where(empty, 1.0, below))
