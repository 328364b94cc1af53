"""Adjacent slots merge pair by pair: what KVSlimmer, AsymKV, the released code of both and `adjacent` share.

Keys merge before RoPE, each KV head its own pairs, the least attended first.  A ``ChunkMerger`` does so after every
chunk, with the older entries (neither sinks nor the chunk), until the layer holds m entries, the newest chunk raw.  A method
of this family says how much each key of a pair weighs (``pair_weights``) and, if it needs to, what an entry carries from chunk
to chunk (``follow``, ``merge_state``).  ``Deviations`` are the places where the released code does otherwise than its paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from ..rope import Rope
from .base import Diagnostics, Method, setting

CLAMP = 5  # the released code's ceiling on l
GAMMA = 4096 / math.log(512)  # the released code's recency, in slots


@dataclass(frozen=True)
class Deviations:
    """Where the released code leaves the paper's schedule; all False: as printed."""

    overlapping: bool = False  # all K lowest pairs at once, shared by the heads, overlaps lose tokens
    clamped: bool = False  # l at most 5, while the value stays a sum
    recency: bool = False  # score / exp(slot / γ) · Σ l
    smoothing: bool = False  # running means over the chunk's index
    contracted: bool = False  # slots stand at cumsum(l) - l_0, queries at Σ l
    two_passes: bool = False  # a rehearsal for statistics, merge, then the chunk's pass


PRINTED = Deviations()
RELEASED = Deviations(True, True, True, True, True, True)


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
    state: dict[str, Tensor] = field(default_factory=dict)  # [T, ...]: what the method follows


@dataclass(frozen=True)
class Pairs:
    """The pairs that one KV head merges in one round."""

    slots: Slots
    first: Tensor  # [K]: where the first members stand; the second ones stand next to them
    share: Tensor  # [K]: p1 / (p1 + p2)
    head: int
    entries: Entries
    observed: Observed
    counts: Counter[str]  # diagnostics, added to

    @property
    def composite(self) -> Tensor:
        """[K] bool: a member was merged earlier in this step."""
        return self.slots.composite[self.first] | self.slots.composite[self.first + 1]


@dataclass(frozen=True)
class PairMerger(Method):
    """A method that merges adjacent pairs; subclasses say which and with what weights."""

    values = "mean"

    # What a method of the family says

    def older(self, entries: Entries, observed: Observed, m: int) -> range:
        """The entries that may merge."""
        raise NotImplementedError

    def received(self, entries: Entries, observed: Observed) -> Tensor:
        """What makes a pair heavy, and its heavier member: [Hkv, n]."""
        return observed.received(entries)

    def pair_weights(self, pairs: Pairs) -> Tensor:
        """Weight of the first key of each pair, [K], or [K, D] for a weight a channel; the second has the rest."""
        raise NotImplementedError

    def follow(self, entries: Entries, observed: Observed, older: range) -> dict[str, Tensor]:
        """What each entry carries besides key, value and l, brought up to date with this chunk: [Hkv, n, ...]."""
        state = {"rho": carried(entries, "rho", 1.0)}
        if self.schedule == "driven":
            state["tokens"] = carried(entries, "tokens", 1.0)  # distinct tokens that are in it
        if self.deviations.contracted:
            state["upright"] = _upright(entries, observed.rope)
        return state

    def merge_state(self, pairs: Pairs, weight: Tensor) -> dict[str, Tensor]:
        """The same of the merged slots, [K, ...]; what is not named here stays as it is in the first member."""
        return {name: _both(pairs, name).sum(0) for name in ("tokens",) if name in pairs.slots.state}

    def most(self, slots: int) -> int:
        """Pairs that one round may merge among so many slots: as many as there are."""
        return slots

    def bias_of(self, entries: Entries) -> Tensor | None:
        """The bias of the entries, from their l: [Hkv, m]."""
        assert entries.mass is not None
        return entries.mass.log()

    @property
    def deviations(self) -> Deviations:
        return PRINTED

    @property
    def drops(self) -> bool:
        """Whether the heavier member stays and the lighter is dropped, instead of a merge."""
        return False

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        older = self.older(entries, observed, m)
        mass = entries.mass
        if mass is None:
            mass = at_least_float32(entries.keys).new_ones(entries.kv_heads, len(entries))
        entries = replace(entries, mass=mass)
        entries = replace(entries, state=self.follow(entries, observed, older))
        surplus = len(entries) - m
        if surplus <= 0:
            return entries, {"dropped_mass": 0}
        if m <= 1:  # nothing but the newest token fits, or not even that
            last = torch.arange(surplus, len(entries), device=entries.keys.device)
            return entries.take(last), {"dropped_mass": float(mass[:, :surplus].sum())}

        counts: Counter[str] = Counter()
        received = self.received(entries, observed)
        whole = [self._slots(head, entries, received[head]) for head in range(entries.kv_heads)]
        heads = [
            self._shrink(head, whole, entries, observed, older, surplus, counts)
            for head in range(entries.kv_heads)
        ]
        left = torch.stack([slots.mass for slots in heads])
        names = entries.state.keys() - {"rho"}
        merged = Entries(
            keys=torch.stack([slots.keys for slots in heads]),
            values=torch.stack([slots.values for slots in heads]),
            positions=torch.stack([slots.positions for slots in heads]),
            mass=left,
            state={"rho": torch.stack([slots.rho for slots in heads])}
            | {name: torch.stack([slots.state[name] for slots in heads]) for name in names},
        )
        return replace(merged, bias=self.bias_of(merged)), {
            "dropped_mass": float(mass.sum() - left.sum()),
            **counts,
        }

    # One KV head

    def _slots(self, head: int, entries: Entries, attention: Tensor) -> Slots:
        assert entries.mass is not None
        device = attention.device
        return Slots(
            keys=entries.keys[head],
            values=entries.values[head],
            positions=entries.positions.expand(entries.kv_heads, -1)[head],
            mass=entries.mass[head],
            rho=entries.state["rho"][head],
            attention=attention,
            column=torch.arange(len(entries), device=device),
            composite=torch.zeros(len(entries), dtype=torch.bool, device=device),
            state={name: tensor[head] for name, tensor in entries.state.items() if name != "rho"},
        )

    def _shrink(
        self,
        head: int,
        whole: Sequence[Slots],
        entries: Entries,
        observed: Observed,
        older: range,
        surplus: int,
        counts: Counter[str],
    ) -> Slots:
        """Merge pairs of the head's older slots in rounds until ``surplus`` entries are gone."""
        slots, stop = whole[head], older.stop
        while surplus:
            heads = whole if self.deviations.overlapping else [slots]
            limit = min(surplus, self.most(stop - older.start))
            first = self._choose(heads, slice(older.start, stop), limit) + older.start
            if not len(first):
                raise AssertionError("a budget of at least 2 entries always leaves a pair to merge")
            slots = self._merge(slots, first, head, entries, observed, counts)
            surplus -= len(first)
            stop -= len(first)
            counts["merges"] += len(first)
        return slots

    def _choose(self, heads: Sequence[Slots], where: slice, limit: int) -> Tensor:
        """First members [K] of the pairs that merge in this round, counted from the first older slot."""
        attention = torch.stack([slots.attention[where] for slots in heads]).sum(0)
        score = attention[:-1] + attention[1:]
        if self.deviations.recency:
            mass = torch.stack([slots.mass[where] for slots in heads]).sum(0).double()
            index = torch.arange(1, len(score) + 1, dtype=torch.float64, device=score.device)
            score = score / torch.exp(index / GAMMA) * (mass[:-1] + mass[1:])
        if self.deviations.overlapping:
            return torch.sort(score, stable=True).indices[:limit].sort().values
        return _disjoint(score, limit)

    def _merge(
        self,
        slots: Slots,
        first: Tensor,
        head: int,
        entries: Entries,
        observed: Observed,
        counts: Counter[str],
    ) -> Slots:
        """The slots after one round; overlapping pairs all read the unmerged slots, and second members go."""
        second = first + 1
        l1, l2 = slots.mass[first], slots.mass[second]
        p1, p2 = slots.attention[first], slots.attention[second]
        empty = p1 + p2 == 0  # no attention at all: l stands for p everywhere
        p1, p2 = torch.where(empty, l1, p1), torch.where(empty, l2, p2)
        share = p1 / (p1 + p2)
        later = p2 >= p1  # the second is the heavier member; ties to the later
        heavier = torch.where(later, second, first)
        pairs = Pairs(slots, first, share, head, entries, observed, counts)

        positions = slots.positions.clone()
        positions[first] = slots.positions[heavier]
        keys, values = slots.keys.clone(), slots.values.clone()
        mass, rho, attention = slots.mass.clone(), slots.rho.clone(), slots.attention.clone()
        attention[first] = slots.attention[first] + slots.attention[second]
        state = dict(slots.state)
        if self.drops:
            keys[first], values[first] = slots.keys[heavier], slots.values[heavier]
            mass[first], rho[first] = slots.mass[heavier], slots.rho[heavier]
        else:
            weight = self.pair_weights(pairs)
            w1 = weight if weight.dim() == 2 else weight[:, None]
            rope = observed.rope
            k1, k2 = (_before_rope(slots, index, rope) for index in (first, second))
            merged = w1 * k1 + (1 - w1) * k2
            keys[first] = rope.rotate(merged, positions[first]).to(keys.dtype)
            mass[first] = (l1 + l2).clamp_max(CLAMP) if self.deviations.clamped else l1 + l2
            v1, v2 = at_least_float32(slots.values[first]), at_least_float32(slots.values[second])
            w1, w2 = self._value_weights(w1, share[:, None], l1[:, None], l2[:, None])
            # A clamped l keeps the sum of the values: the mean that stands for it is larger.
            stretch = ((l1 + l2) / mass[first])[:, None]
            values[first] = ((w1 * v1 + w2 * v2) * stretch).to(values.dtype)
            rho[first] = slots.rho[heavier] * (p1 + p2) / torch.maximum(p1, p2)
            changed = self.merge_state(pairs, weight)
            if "upright" in state:
                changed["upright"] = merged
            for name, tensor in changed.items():
                state[name] = slots.state[name].clone()
                state[name][first] = tensor
        composite = slots.composite.clone()
        composite[first] = True

        keep = torch.ones(len(mass), dtype=torch.bool, device=mass.device)
        keep[second] = False
        left = keep.nonzero()[:, 0]
        return Slots(
            keys=keys[left],
            values=values[left],
            positions=positions[left],
            mass=mass[left],
            rho=rho[left],
            attention=attention[left],
            column=slots.column[left],
            composite=composite[left],
            state={name: tensor[left] for name, tensor in state.items()},
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


@dataclass(frozen=True)
class ChunkMerger(PairMerger):
    """A pair merger that reads the prompt in chunks: after each the older entries merge, the newest chunk stays raw."""

    sinks: int = setting(
        32, "first tokens never merged, cut to m // 8", "paper (32); the cut is our choice", least=0
    )
    chunk: int | None = setting(
        None, "tokens a chunk; None: 512, at most m // 4; a number: at most m // 2", "paper (512); the cuts are our choice",
        least=1,
    )  # fmt: skip

    def older(self, entries: Entries, observed: Observed, m: int) -> range:
        return range(self.sizes(m)[0], len(entries) - observed.queries.shape[1])

    @property
    def rehearsal(self) -> bool:
        return self.deviations.two_passes

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

    def summary(self, entries: Entries, n: int) -> Diagnostics:
        if self.schedule != "driven":
            return {}
        tokens = carried(entries, "tokens", 1.0)
        mass = torch.ones_like(tokens) if entries.mass is None else entries.mass
        heads = entries.kv_heads
        return {"mass_share": float(mass.sum()) / heads / n, "tokens_held": float(tokens.sum()) / heads / n}

    def place(self, entries: Entries, rope: Rope, seen: int) -> Entries:
        """Contracted positions: slots stand at cumsum(l) - l_0 of head 0 and the next query at Σ l.

        RoPE knows distances only, so all of them may move by seen - Σ l: the next query then stands at ``seen``, where
        the model puts it.  Keys are rotated from the un-rotated ones that the state keeps: rotating back and forth
        every chunk would add up errors.
        """
        if not self.deviations.contracted or entries.mass is None or not len(entries):
            return entries  # without a merge l is 1 everywhere, and the positions are the true ones
        mass = entries.mass[0]
        positions = (mass.cumsum(0) - mass[0] + seen - mass.sum()).long()[None]
        upright = _upright(entries, rope)
        keys = rope.rotate(upright, positions).to(entries.keys.dtype)
        state = entries.state | {"upright": upright}
        return replace(entries, keys=keys, positions=positions, state=state)


def carried(entries: Entries, name: str, fresh: float, *width: int) -> Tensor:
    """The state ``name`` of all entries, [Hkv, n, *width]; those that came since have the value ``fresh``."""
    heads, n = entries.kv_heads, len(entries)
    like = at_least_float32(entries.keys)
    old = entries.state.get(name, like.new_empty(heads, 0, *width))
    return torch.cat([old, like.new_full((heads, n - old.shape[1], *width), fresh)], 1)


def running_mean(old: Tensor, new: Tensor, age: Tensor, count: Tensor) -> Tensor:
    """new / count + (count - 1) / count · old, where an entry was seen before; new where this is the first time (age 1)."""
    weight = torch.where(age > 1, 1 / count.clamp_min(1), 1.0)
    return weight * new + (1 - weight) * old


def _both(pairs: Pairs, name: str) -> Tensor:
    """The state ``name`` of the two members: [2, K, ...]."""
    state = pairs.slots.state[name]
    return torch.stack([state[pairs.first], state[pairs.first + 1]])


def _upright(entries: Entries, rope: Rope) -> Tensor:
    """Keys before RoPE [Hkv, n, D]: those the state keeps, and those of the tokens that came since."""
    keys, positions = at_least_float32(entries.keys), entries.positions.expand(entries.kv_heads, -1)
    old = entries.state.get("upright", keys[:, :0])
    since = slice(old.shape[1], None)
    return torch.cat([old, rope.unrotate(keys[:, since], positions[:, since])], 1)


def _before_rope(slots: Slots, index: Tensor, rope: Rope) -> Tensor:
    if "upright" in slots.state:
        return slots.state["upright"][index]
    return rope.unrotate(at_least_float32(slots.keys[index]), slots.positions[index])


def choose_pairs(attention: Tensor, limit: int) -> Tensor:
    """First members [K] of at most ``limit`` adjacent pairs of slots [T], ascending: least attention first.

    A pair's score is the sum of its two slots' attention, ties go to the lower index, each slot is used once.
    """
    return _disjoint(attention[:-1] + attention[1:], limit)


def _disjoint(scores: Tensor, limit: int) -> Tensor:
    used = bytearray(len(scores) + 2)
    chosen: list[int] = []
    for pair in torch.sort(scores, stable=True).indices.tolist():
        if len(chosen) == limit:
            break
        if not (used[pair] or used[pair + 1]):
            used[pair] = used[pair + 1] = 1
            chosen.append(pair)
    return torch.tensor(sorted(chosen), dtype=torch.long, device=scores.device)
