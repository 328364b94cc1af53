"""One prompt, step by step: the tables that the first two notebooks show, made by the methods' own code.

    model, tokenizer = kvrepro.load("smollm2-135m")
    walk = read(model, tokenizer, tasks.load("pydoc-summary", 1)[0], limit=2048)
    walk.layer(15).routes(retain=0.25)

The prompt is read together with its gold answer: the answer's queries, which no method has seen when it compresses,
show what a compressed layer is worth.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries, gather
from ..hf import make_cache
from ..methods import make
from ..methods.base import Budget
from ..methods.kvslimmer import KVSlimmer
from ..methods.pairs import Pairs
from ..methods.selkv import Kept, Routes, SelKV
from ..tasks.base import Sample
from ..tasks.prompts import encode
from .observe import observe

# The stages of the sag, and the arm that shows each.
STAGES = {"full": "full", "evicted": "selkv/evict", "merged": "selkv/gate", "compensated": "selkv"}
BFLOAT16_STEP = 2.0**-8  # between neighbouring bfloat16 numbers in [½, 1)
APART = 100  # tokens between the two of a pair that is not adjacent


@dataclass(frozen=True)
class Layer:
    """What one layer saw of a prompt of n tokens, and of the t answer tokens after it.

    Attributes
    ----------
    tokens : list of str
        The prompt's tokens as text.
    entries, observed : Entries, Observed
        Of the prompt: what ``compress`` is given.
    later : Entries
        The answer's keys and values.
    queries : Tensor [H, t, D]
        The answer's queries.
    """

    tokens: list[str]
    entries: Entries
    observed: Observed
    later: Entries
    queries: Tensor

    def scores(self, head: int = 0, rows: int = 8, method: SelKV | None = None) -> pd.DataFrame:
        """The tokens that one KV head attends to most: attention, value norm, pooled score, and both ranks."""
        method = method or SelKV()
        mass = self.observed.column_mass(self.entries, method.window).sum(1)[head]  # a [n]
        score = method.score(self.entries, self.observed)[head]  # c [n]
        rank = score.argsort(descending=True, stable=True).argsort() + 1
        best = mass.argsort(descending=True, stable=True)[:rows]
        return pd.DataFrame(
            {
                "position": best.tolist(),
                "token": [repr(self.tokens[i]) for i in best.tolist()],
                "attention a": mass[best].tolist(),
                "value norm": at_least_float32(self.entries.values)[head, best].norm(dim=-1).tolist(),
                "score c": score[best].tolist(),
                "rank by a": range(1, len(best) + 1),
                "rank by c": rank[best].tolist(),
            }
        ).set_index("position")

    def counts(self, retain: float) -> pd.DataFrame:
        """How the kept set comes about, in tokens: one row a step."""
        method, m = SelKV(), self.budget(retain)
        kept, _ = method.routes(self.entries, self.observed, m)
        chosen, heads = m - method.recent, self.entries.kv_heads
        rows = {
            "prompt (n)": len(self.entries),
            f"budget, {retain:.0%} of it (m)": m,
            f"recent window, always kept (m_r = {method.recent})": method.recent,
            "each KV head chooses (m_s = m - m_r)": chosen,
        }
        if kept.union is None:
            rows["kept by each KV head"] = kept.index.shape[1]
            rows[f"kept by at least one of {heads} KV heads"] = len(torch.unique(kept.index))
        else:
            rows[f"chosen by at least one of {heads} KV heads (the union)"] = kept.union
            rows["trimmed from the union"] = kept.union - chosen
            rows["kept by the layer"] = len(kept.index)
            rows["kept and chosen by every KV head"] = int(kept.own.all(0).sum())
        return pd.DataFrame({"tokens": rows})

    def states(self, retain: float) -> pd.DataFrame:
        """What became of every token in every KV head, for ``plots.entries_map``."""
        _, routes, gates = self._routed(retain)
        merged, evicted = gates > 0, routes.evicted
        frames = []
        for head in range(self.entries.kv_heads):
            state = ["dropped" if out else "kept" for out in evicted[head].tolist()]
            state = ["merged" if into else was for was, into in zip(state, merged[head].tolist())]
            frames.append(pd.DataFrame({"head": head, "position": range(len(state)), "state": state}))
        return pd.concat(frames, ignore_index=True)

    def fates(self, retain: float) -> pd.DataFrame:
        """For each KV head, in tokens: evicted, without a target, closed out by the gate, merged; and the mean gate."""
        _, routes, gates = self._routed(retain)
        routed = routes.target >= 0
        evicted, went = routes.evicted.sum(1), routed.sum(1)
        merged = (gates > 0).sum(1)
        table = pd.DataFrame(
            {
                "evicted": evicted.tolist(),
                "no target in its bucket": (evicted - went).tolist(),
                "target, but gate 0": (went - merged).tolist(),
                "merged": merged.tolist(),
                "share routed": (went / evicted).tolist(),
                "mean gate": (gates.sum(1) / went).tolist(),
            }
        )
        return table.rename_axis("KV head")

    def merges(self, retain: float, head: int = 0, rows: int = 8) -> pd.DataFrame:
        """The merges of one KV head that move the most attention mass g_j·a_j."""
        _, routes, gates = self._routed(retain)
        mass = self.observed.column_mass(self.entries, SelKV().window).sum(1)[head]
        moved = gates[head] * mass
        best = moved.argsort(descending=True, stable=True)[:rows]
        best = best[moved[best] > 0]
        target = routes.target[head, best]
        return pd.DataFrame(
            {
                "token j": best.tolist(),
                "": [repr(self.tokens[j]) for j in best.tolist()],
                "merged into i": target.tolist(),
                " ": [repr(self.tokens[i]) for i in target.tolist()],
                "gate g": gates[head, best].tolist(),
                "a_j": mass[best].tolist(),
                "a_i": mass[target].tolist(),
                "adds to R_i": (moved[best] / mass[target]).tolist(),
            }
        ).set_index("token j")

    def ratios(self, retain: float, rows: int = 8) -> pd.DataFrame:
        """The kept entries with the largest R: tokens merged into them, R a head, its mean, the bias, the new value."""
        kept, routes, gates = self._routed(retain)
        m = self.budget(retain)
        biased, _ = make("selkv").compress(self.entries, self.observed, m)
        each, _ = make("selkv", ratio="head", alpha=1.0).compress(self.entries, self.observed, m)
        assert biased.bias is not None and each.bias is not None
        # A kept set of the layer has one R for all KV heads; where each head keeps its own, the first is shown.
        heads = list(range(1 if kept.index.dim() == 2 else self.entries.kv_heads))
        order = biased.bias[0].argsort(descending=True, stable=True)[:rows]
        index = kept.index.expand(self.entries.kv_heads, -1)
        old = gather(at_least_float32(self.entries.values), index)  # [Hkv, m, D]
        change = (at_least_float32(biased.values) - old).norm(dim=-1) / old.norm(dim=-1)
        came = (gates > 0).to(gates.dtype)
        arrived = torch.zeros_like(gates).scatter_add(1, routes.target.clamp_min(0), came)
        arrived = arrived.gather(1, index).long()  # [Hkv, m]
        where = biased.positions[0, order].tolist()
        table = pd.DataFrame(
            {
                "position": where,
                "token": [repr(self.tokens[i]) for i in where],
                "merged into it": arrived[heads][:, order].sum(0).tolist(),
                **{f"R, head {head}": each.bias[head, order].exp().tolist() for head in heads},
                "bias": biased.bias[0, order].tolist(),
                "value changed by": change[heads][:, order].mean(0).tolist(),
            }
        )
        return table.set_index("position")

    def attention(self, retain: float) -> pd.DataFrame:
        """Attention of the answer's queries along the prompt at each stage, for ``plots.sag``."""
        return self._along(self._stages(retain))

    def losses(self, retain: float, bucket: int = 32) -> pd.DataFrame:
        """What each stage costs this layer: attention on the prompt, mass in the wrong bucket, error of the output."""
        stages = self._stages(retain)
        along = self._along(stages)
        mass = along.groupby([along["position"] // bucket, "variant"])["mass"].sum().unstack("variant")
        true = stages["full"][2]
        rows = {}
        for stage, (_, _, output) in stages.items():
            error = (output - true).norm(dim=-1) / true.norm(dim=-1)
            rows[stage] = {
                "attention on the prompt": mass[stage].sum(),
                "mass in the wrong bucket": (mass[stage] - mass["full"]).abs().sum() / 2,
                "error of the output": float(error.mean()),
            }
        return pd.DataFrame(rows).T.rename_axis("stage")

    def _along(self, stages: dict[str, tuple[Entries, Tensor, Tensor]]) -> pd.DataFrame:
        frames = []
        for stage, (entries, weights, _) in stages.items():
            n = len(entries) - len(self.later)
            mass = weights.mean((1, 2))[:, :n] / len(weights)  # [Hkv, m]
            along = mass.new_zeros(len(self.entries))
            along.scatter_add_(0, entries.positions[:, :n].expand_as(mass).flatten(), mass.flatten())
            frames.append(
                pd.DataFrame({"position": range(len(along)), "variant": stage, "mass": along.tolist()})
            )
        return pd.concat(frames, ignore_index=True)

    def budget(self, retain: float) -> int:
        """Entries this prompt keeps."""
        return Budget(retain=retain).resolve(len(self.entries))

    def _routed(self, retain: float) -> tuple[Kept, Routes, Tensor]:
        method = SelKV()
        kept, routes = method.routes(self.entries, self.observed, self.budget(retain))
        return kept, routes, method.gates(self.entries, routes)

    def _stages(self, retain: float) -> dict[str, tuple[Entries, Tensor, Tensor]]:
        """At each stage the entries, answer included, the attention [Hkv, G, t, m + t] on them, its output [.., D]."""
        found = {}
        later = Observed(self.queries, self.observed.scaling, self.observed.rope, self.observed.softcap)
        for stage, arm in STAGES.items():
            method, m = make(arm), self.budget(retain)
            held = self.entries if stage == "full" else method.compress(self.entries, self.observed, m)[0]
            held = held.extend(self.later.keys, self.later.values, self.later.positions)
            weights = later.weights(held, 0, len(self.later), len(held))
            found[stage] = held, weights, weights @ at_least_float32(held.values)[:, None]
        return found


@dataclass(frozen=True)
class Walk:
    """A prompt that every layer has seen."""

    sample: Sample
    input_ids: Tensor  # [1, n]
    layers: list[Layer]

    def layer(self, index: int) -> Layer:
        """One compressible layer, counted from 0."""
        return self.layers[index]

    def overview(self, retain: float) -> pd.DataFrame:
        """SelKV in every layer: union before the trim, share routed, mean gate, log R; one row a layer."""
        method, rows = SelKV(), []
        for layer in self.layers:
            _, found = method.compress(layer.entries, layer.observed, layer.budget(retain))
            rows.append(found)
        return pd.DataFrame(rows).rename_axis("layer")

    def losses(self, retain: float) -> pd.DataFrame:
        """:meth:`Layer.losses`, mean over the layers."""
        return pd.concat([layer.losses(retain) for layer in self.layers]).groupby("stage", sort=False).mean()

    def reading(self, index: int, retain: float) -> str:
        """What happened in layer ``index``, in two sentences."""
        fates = self.layer(index).fates(retain)
        evicted, routed, merged = (
            int(fates[names].to_numpy().sum())
            for names in (["evicted"], ["target, but gate 0", "merged"], ["merged"])
        )
        here, everywhere = self.layer(index).losses(retain), self.losses(retain)

        def moved(table: pd.DataFrame, column: str) -> str:
            before, after = table[column].loc[["evicted", "compensated"]]
            return f"{before:.3f} to {after:.3f}"

        wrong, error = "mass in the wrong bucket", "error of the output"
        return (
            f"In layer {index}, {routed / evicted:.0%} of the evicted tokens find a target in their bucket and "
            f"{merged / evicted:.0%} pass the gate. From eviction to the compensated merge, the attention mass in the "
            f"wrong bucket goes from {moved(here, wrong)} (mean of all layers: {moved(everywhere, wrong)}) and the "
            f"relative error of the output from {moved(here, error)} ({moved(everywhere, error)})."
        )

    def alike(self) -> str:
        """How alike neighbours are, in a sentence."""
        mean = self.adjacent().groupby("kind")["cosine"].mean()
        return (
            f"Averaged over layers, the cosine of adjacent keys is {mean['key']:.2f}, of keys {APART} tokens apart "
            f"{mean['key-apart']:.2f}; of adjacent values {mean['value']:.2f}, of values far apart {mean['value-apart']:.2f}."
        )

    def adjacent(self) -> pd.DataFrame:
        """Cosines of adjacent keys (before RoPE) and values, and of tokens far apart, for ``plots.adjacent_similarity``."""
        frames = []
        for index, layer in enumerate(self.layers):
            entries = layer.entries
            keys = layer.observed.rope.unrotate(at_least_float32(entries.keys), entries.positions)
            for kind, vectors in {"key": keys, "value": at_least_float32(entries.values)}.items():
                for name, step in {kind: 1, f"{kind}-apart": min(APART, len(entries) // 2)}.items():
                    cosine = torch.cosine_similarity(vectors[:, :-step], vectors[:, step:], dim=-1)
                    frames.append(
                        pd.DataFrame({"layer": index, "kind": name, "cosine": cosine.flatten().tolist()})
                    )
        return pd.concat(frames, ignore_index=True)


@torch.inference_mode()
def read(model: Any, tokenizer: Any, sample: Sample, limit: int) -> Walk:
    """Show a model a prompt and its gold answer, and keep what every compressible layer saw.

    Parameters
    ----------
    limit
        Longest prompt, in tokens.
    """
    prompt = encode(tokenizer, sample, limit).input_ids
    answer = tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt + answer], device=model.device)
    n = len(prompt)
    tokens = [tokenizer.decode([token]) for token in prompt]
    layers = []
    for entries, seen in observe(model, ids)[0]:
        lse = None if seen.logsumexp is None else seen.logsumexp[:, :n]
        observed = Observed(
            seen.queries[:, :n], seen.scaling, seen.rope, seen.softcap, seen.layer, seen.layers, lse
        )
        places = torch.arange(ids.shape[1], device=ids.device)
        layers.append(
            Layer(tokens, entries.take(places[:n]), observed, entries.take(places[n:]), seen.queries[:, n:])
        )
    return Walk(sample, ids[:, :n], layers)


# KVSlimmer


@dataclass(frozen=True)
class _Watched(KVSlimmer):
    """KVSlimmer that writes down the key weights of every pair by each rule."""

    pairs: list[pd.DataFrame] = field(
        default_factory=list, metadata={"doc": "", "source": "", "choices": None, "least": None}
    )

    def pair_weights(self, pairs: Pairs) -> Tensor:
        slots, first, observed = pairs.slots, pairs.first, pairs.observed
        exact = super().pair_weights(pairs)
        diagonal = KVSlimmer(weights="diagonal").pair_weights(replace(pairs, counts=Counter()))
        assert observed.probabilities is not None
        rows = observed.probabilities.shape[1]
        second = first + 1
        found = pd.DataFrame(
            {
                "layer": observed.layer,
                "head": pairs.head,
                "first": slots.positions[first].tolist(),
                "second": slots.positions[second].tolist(),
                "l1": slots.mass[first].tolist(),
                "l2": slots.mass[second].tolist(),
                "attention": ((slots.attention[first] + slots.attention[second]) / rows).tolist(),
                "exact": exact.tolist(),
                "diagonal": diagonal.tolist(),
                "mass": pairs.share.tolist(),
                "composite": pairs.composite.tolist(),
            }
        )
        self.pairs.append(found)
        return exact


@dataclass(frozen=True)
class Slimmed:
    """A prompt that KVSlimmer has read.

    Attributes
    ----------
    pairs : DataFrame
        A row a merged pair: layer, head, first, second (positions), l1, l2, attention (p1 + p2, mean over the chunk's
        queries and the group's heads), and the first key's weight by each rule: exact, diagonal, mass; composite: one
        of the two was merged earlier in the same step, so that all rules fall back to mass.
    entries : DataFrame
        A row an entry at the end: layer, head, position, cardinality.
    chunks : DataFrame
        A row a chunk: tokens, entries stored before it, attended, merged away, left.
    counts : DataFrame
        A row a reason: pairs, and their share of all merges.
    """

    pairs: pd.DataFrame
    entries: pd.DataFrame
    chunks: pd.DataFrame
    counts: pd.DataFrame

    def gaps(self) -> pd.DataFrame:
        """How far the rules are apart, over the pairs that have an exact weight."""
        pairs = self.pairs[~self.pairs["composite"]]
        gap = pd.DataFrame(
            {
                "attention on the pair": pairs["attention"],
                "|exact - diagonal|": (pairs["exact"] - pairs["diagonal"]).abs(),
                "|exact - mass|": (pairs["exact"] - pairs["mass"]).abs(),
                "|exact - 1/2|": (pairs["exact"] - 0.5).abs(),
            }
        )
        table = gap.quantile([0.5, 0.9, 0.99]).T.set_axis(["median", "90 %", "99 %"], axis=1)
        table["below a bfloat16 step"] = (gap < BFLOAT16_STEP).mean()
        table.loc["attention on the pair", "below a bfloat16 step"] = float(
            "nan"
        )  # that column is about weights
        return table.rename_axis(f"{len(gap):,} pairs")

    def reading(self) -> str:
        """How far the rules are apart and what the entries stand for, in two sentences."""
        gaps, sizes = self.gaps(), self.entries["cardinality"]
        off, mass = gaps.loc["|exact - diagonal|"], gaps.loc["|exact - mass|"]
        single = (sizes == 1).mean()
        return (
            f"Dropping the off-diagonal term moves the weight of a key by {off['median']:.1g} in the median and by less "
            f"than one bfloat16 step in {off['below a bfloat16 step']:.1%} of the pairs; weighting by attention mass "
            f"instead moves it by {mass['median']:.1g}. At the end {single:.0%} of the entries stand for one token, the "
            f"largest for {sizes.max():.0f}, and the cardinalities sum to {sizes.sum():,.0f}."
        )

    def examples(self, tokens: list[str], layer: int, rows: int = 8) -> pd.DataFrame:
        """The merges of one layer's head 0 where exact and mass differ most, with the tokens' text."""
        pairs = self.pairs.query("layer == @layer and head == 0 and not composite and l1 == 1 and l2 == 1")
        apart = (pairs["exact"] - pairs["mass"]).abs()
        pairs = pairs.loc[apart.sort_values(ascending=False, kind="stable").index[:rows]]
        return pd.DataFrame(
            {
                "first": [repr(tokens[i]) for i in pairs["first"]],
                "second": [repr(tokens[i]) for i in pairs["second"]],
                **{name: pairs[name].tolist() for name in ("attention", "exact", "diagonal", "mass")},
            },
            index=pd.Index(pairs["first"], name="position"),
        )


@torch.inference_mode()
def slim(model: Any, input_ids: Tensor, retain: float) -> Slimmed:
    """Let KVSlimmer read a prompt [1, n], and keep what it merged and how."""
    method = _Watched()
    cache = make_cache(model, method, retain=retain)
    model(input_ids, cache=cache, logits_to_keep=1)
    frames = []
    for index, layer in enumerate(cache.compressed_layers()):
        held = layer.prompt[0].entries
        assert held is not None and held.mass is not None
        for head, (places, mass) in enumerate(zip(held.positions.tolist(), held.mass.tolist())):
            frames.append(
                pd.DataFrame({"layer": index, "head": head, "position": places, "cardinality": mass})
            )
    totals = pd.DataFrame([layer.prompt[0].diagnostics for layer in cache.compressed_layers()]).sum()
    names = {
        "merges": "all merges",
        "composite": "a slot merged twice in one step: weights by mass",
        "no_mass": "no query with attention on the pair: weights by mass",
        "denominator": "denominator vanishes: weights by mass",
        "outside": "weight outside [0, 1]: weights by mass",
    }
    counts = pd.DataFrame({"pairs": {label: int(totals[name]) for name, label in names.items()}})
    counts["share"] = counts["pairs"] / totals["merges"]
    n = input_ids.shape[1]
    return Slimmed(
        pd.concat(method.pairs, ignore_index=True),
        pd.concat(frames, ignore_index=True),
        schedule(method, n, Budget(retain=retain).resolve(n)),
        counts,
    )


def schedule(method: KVSlimmer, n: int, m: int) -> pd.DataFrame:
    """The chunks of a prompt of n tokens under a budget of m entries: what each attends to and leaves behind."""
    rows, stored = [], 0
    for fresh in method.chunks(n, m):
        attended = stored + fresh
        left = min(attended, m)
        rows.append(
            {
                "tokens": fresh,
                "stored before": stored,
                "attends to": attended,
                "merged away": attended - left,
                "left": left,
            }
        )
        stored = left
    return pd.DataFrame(rows, index=pd.RangeIndex(1, len(rows) + 1, name="chunk"))
