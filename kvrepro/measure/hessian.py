"""How far from exact KVSlimmer's key weights are on a real prompt: the true gradients, and what they make of each pair.

    model, tokenizer = kvrepro.load("smollm2-135m")
    print(read(model, tokenizer, tasks.load("pydoc-summary", 1, 1024), limit=1024).reading())

The last chunk of a text predicts its successors with loss L; E = ∂L/∂o is the gradient at the output o of each query
head there.  For adjacent raw tokens before the chunk, with d_i = v_i - o and α the chunk's attention,

    E·c_11 = α_1 (1 - 2α_1) E·d_1,    E·c_22 = α_2 (1 - 2α_2) E·d_2,    E·c_12 = -α_1 α_2 E·(d_1 + d_2)

(:mod:`kvrepro.theory.hessian`).  Below α = ½ the cosines of the angle relation are therefore cos(E, d_1), cos(E, d_2)
and, for -cos(E, c_12), cos(E, d_1 + d_2): no attention weight is in them, the relation is about values alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..attention import Observed, at_least_float32, attend_observed, softcapped
from ..entries import Entries
from ..errors import UserError
from ..hf import CompressedLayer, KVCache, make_cache
from ..methods.base import Budget
from ..methods.kvslimmer import KVSlimmer
from ..methods.pairs import Pairs, Slots, choose_pairs
from ..progress import progress
from ..tasks.base import Sample
from ..tasks.prompts import encode
from ..theory.hessian import optimal_weight
from .observe import observe
from .walk import BFLOAT16_STEP

MERGED, HEAVIEST = "merged", "heaviest"
RULES = (
    "exact",
    "diagonal",
    "mass",
    "half",
)  # what needs no gradient; true and best are what they are held against
GRID = torch.linspace(0, 1, 41)  # weights among which the best is looked for
Both = tuple[Tensor, Tensor]  # one for each member of a pair
ANGLES = {"c11": "cos(E, c11)", "c22": "cos(E, c22)", "c12": "−cos(E, c12)"}


def gradients(model: Any, input_ids: Tensor, chunk: int) -> list[Tensor]:
    """E = ∂L/∂o for the last ``chunk`` queries, L the mean cross-entropy of the tokens that follow them.

    What came before the chunk only stands in the cache: attention is causal, so no gradient leads through it.

    Parameters
    ----------
    model
        With kvrepro's attention; nothing is left on it.
    input_ids : Tensor [1, n + 1]
        The last token is only predicted.

    Returns
    -------
    list of Tensor [H, chunk, D]
        For each compressible layer, the gradient at the attention output that goes into ``o_proj``.
    """
    return _slopes(model, _past(model, input_ids, chunk), input_ids, chunk)


def _past(model: Any, input_ids: Tensor, chunk: int) -> KVCache:
    """A cache that holds all tokens before the chunk (the last token is only predicted)."""
    with torch.inference_mode(False), torch.no_grad():
        cache = make_cache(model, "full")
        model(input_ids[:, : -1 - chunk], cache=cache, logits_to_keep=1)
    return cache


def _slopes(
    model: Any, past: KVCache, input_ids: Tensor, chunk: int, change: tuple[int, Tensor] | None = None
) -> list[Tensor]:
    """E of every compressible layer; with ``change`` (a layer, what is added to its outputs [H, chunk, D]) of that one."""
    places = [i for i, layer in enumerate(past.layers) if isinstance(layer, CompressedLayer)]
    attentions = [model.get_decoder().layers[i].self_attn for i in places]
    outputs: list[Tensor] = []

    def add(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert change is not None
        return (inputs[0] + change[1].transpose(0, 1).flatten(1)[None].to(inputs[0].dtype),)

    def watch(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not inputs[0].requires_grad:  # the first layer of a model whose parameters are frozen
            inputs[0].requires_grad_()
        outputs.append(inputs[0])

    hooks = []
    if change is not None:
        attentions = [attentions[change[0]]]
        hooks.append(attentions[0].o_proj.register_forward_pre_hook(add))
    hooks += [attention.o_proj.register_forward_pre_hook(watch) for attention in attentions]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            (cache,) = past.split([0])  # its own copy, which then holds the graph
            logits = model(input_ids[:, -1 - chunk : -1], cache=cache).logits[0]
            loss = torch.nn.functional.cross_entropy(at_least_float32(logits), input_ids[0, -chunk:])
            found = torch.autograd.grad(loss, outputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        gradient[0].unflatten(1, (-1, attention.head_dim)).transpose(0, 1)
        for gradient, attention in zip(found, attentions, strict=True)
    ]


@dataclass(frozen=True)
class Exactness:
    """What the true gradients say.

    Attributes
    ----------
    pairs : DataFrame
        A row a pair and KV head: ``sample, set`` (merged: a draw from the pairs that a step of KVSlimmer merges;
        heaviest: those with the most attention), ``layer, head, first`` (position), ``attention`` (α_1 + α_2, mean over
        queries and the group's heads), the first key's weight by each rule (``true`` with E; ``exact`` as KVSlimmer
        computes it, guards included; ``diagonal``, ``mass``, ``half``), ``curvature`` (the true rule's denominator:
        negative where its stationary point is a maximum), ``best`` (the weight in [0, 1] that changes the chunk's outputs
        least), and for each of them ``error_*``: the change of the outputs by the merge, relative to the outputs (``true``
        held in [0, 1]).
    draws : DataFrame
        A row a drawn (pair, query): ``sample, set, layer, head`` (of the query), ``first, query`` (in the chunk),
        ``alpha1, alpha2``, ``c11, c22`` (cosines with E), ``c12`` (minus the cosine, so that the relation says that the
        three are equal) and ``apart``, as c11 for another pair's first token.
    """

    pairs: pd.DataFrame
    draws: pd.DataFrame

    def angles(self, *by: str, pairs: str = MERGED) -> pd.DataFrame:
        """The angle relation: middle and spread of each cosine and of the distances between them.

        Parameters
        ----------
        by
            Columns of ``draws`` to group by: ``"layer"``, or ``"layer", "head"``; none: all together.

        Returns
        -------
        DataFrame
            ``*by, kind, low, median, high`` (10, 50 and 90 %), and n.
        """
        draws = self.draws[self.draws["set"] == pairs]
        kinds = {
            **{label: draws[name] for name, label in ANGLES.items()},
            "distance c11, c22": (draws["c11"] - draws["c22"]).abs(),
            "distance c11, −c12": (draws["c11"] - draws["c12"]).abs(),
            "distance c22, −c12": (draws["c22"] - draws["c12"]).abs(),
            "distance to another pair": (draws["c11"] - draws["apart"]).abs(),
        }
        keys = [draws[name] for name in by]
        frames = []
        for kind, values in kinds.items():
            groups = values.groupby(keys) if keys else values.groupby(np.zeros(len(values)))
            table = (
                groups.quantile(np.array([0.1, 0.5, 0.9]))
                .unstack()
                .set_axis(["low", "median", "high"], axis=1)
            )
            frames.append(table.assign(n=groups.size(), kind=kind).reset_index(drop=not keys))
        return pd.concat(frames, ignore_index=True)[[*by, "kind", "low", "median", "high", "n"]]

    def signs(self, *by: str) -> pd.DataFrame:
        """Where the relation must hold at least: share of draws in which the cosines have one sign, and their correlation.

        Where c11 and c22 have one sign, c12 has it, too: below α = ½ it is their weighted mean.  The second column of each
        compares with another pair's token, which the relation says nothing about.
        """
        rows = {}
        for key, draws in self.draws.groupby(["set", *by], sort=False):
            signs = {name: draws[name] > 0 for name in (*ANGLES, "apart")}
            rows[key if by else key[0]] = {
                "draws": len(draws),
                "share with one sign": (
                    (signs["c11"] == signs["c22"]) & (signs["c11"] == signs["c12"])
                ).mean(),
                "share with one sign, another pair": (signs["c11"] == signs["apart"]).mean(),
                "correlation of c11 and c22": draws["c11"].corr(draws["c22"]),
                "correlation, another pair": draws["c11"].corr(draws["apart"]),
            }
        return pd.DataFrame(rows).T.rename_axis(["pairs", *by] if by else "pairs")

    def alphas(self) -> pd.DataFrame:
        """How large α is on the tokens of a pair, by single queries: quantiles, and the share that is 1e-4 or less."""
        rows = {}
        for name, draws in self.draws.groupby("set", sort=False):
            alpha = draws[["alpha1", "alpha2"]].stack()
            spread = alpha.quantile([0.01, 0.1, 0.5, 0.9, 0.99]).set_axis(
                ["1 %", "10 %", "median", "90 %", "99 %"]
            )
            rows[name] = {**spread, "largest": alpha.max(), "share ≤ 1e-4": (alpha <= 1e-4).mean()}
        return pd.DataFrame(rows).T.rename_axis("pairs")

    def gaps(self) -> pd.DataFrame:
        """How far the rules put the first key's weight apart; ``true, a minimum`` only where that rule has one in [0, 1]."""
        rows = {}
        for name, pairs in self.pairs.groupby("set", sort=False):
            sound = self._sound(pairs)
            gaps = {
                "|exact - true|": (pairs["exact"] - pairs["true"]).abs(),
                "|exact - true|, where true is a minimum in [0, 1]": (pairs["exact"] - pairs["true"]).abs()[
                    sound
                ],
                "|mass - true|, where true is a minimum in [0, 1]": (pairs["mass"] - pairs["true"]).abs()[
                    sound
                ],
                "|1/2 - true|, where true is a minimum in [0, 1]": (0.5 - pairs["true"]).abs()[sound],
                "|exact - diagonal|": (pairs["exact"] - pairs["diagonal"]).abs(),
                "|exact - mass|": (pairs["exact"] - pairs["mass"]).abs(),
                "|exact - best|": (pairs["exact"] - pairs["best"]).abs(),
            }
            for what, gap in gaps.items():
                spread = gap.quantile([0.1, 0.5, 0.9]).set_axis(["10 %", "median", "90 %"])
                below = {"below a bfloat16 step": (gap < BFLOAT16_STEP).mean()}
                rows[name, what] = {"n": len(gap), **spread, **below}
        return pd.DataFrame(rows).T.rename_axis(["pairs", "distance of weights"])

    def soundness(self) -> pd.DataFrame:
        """What the true rule's stationary point is: shares of the pairs, for each set."""
        rows = {}
        for name, pairs in self.pairs.groupby("set", sort=False):
            inside, minimum = pairs["true"].between(0, 1), pairs["curvature"] > 0
            rows[name] = {
                "pairs": len(pairs),
                "share, a maximum": (~minimum).mean(),
                "share, outside [0, 1]": (~inside).mean(),
                "share, a minimum in [0, 1]": (minimum & inside).mean(),
            }
        return pd.DataFrame(rows).T.rename_axis("pairs")

    def errors(self) -> pd.DataFrame:
        """What each weight costs: change of the outputs, and its ratio to the best weight's, for each set."""
        rows = {}
        for name, pairs in self.pairs.groupby("set", sort=False):
            for rule in ("best", "true", *RULES):
                error = pairs[f"error_{rule}"]
                ratio = (error / pairs["error_best"]).quantile([0.5, 0.9])
                rows[name, rule] = {
                    "change of the outputs, median": error.median(),
                    "over the best, median": ratio[0.5],
                    "over the best, 90 %": ratio[0.9],
                }
        return pd.DataFrame(rows).T.rename_axis(["pairs", "weights"])

    def reading(self) -> str:
        """The main numbers of the merged pairs, in sentences."""
        angles = self.angles().set_index("kind").to_dict("index")
        same, distant = angles["distance c11, c22"]["median"], angles["distance to another pair"]["median"]
        low, high = angles["cos(E, c11)"]["low"], angles["cos(E, c11)"]["high"]
        signs, sound, alphas = (
            table.loc[MERGED].to_dict() for table in (self.signs(), self.soundness(), self.alphas())
        )
        gaps, errors = (
            pd.DataFrame(table.loc[MERGED]).to_dict("index") for table in (self.gaps(), self.errors())
        )
        far, where = gaps["|exact - true|"], gaps["|exact - true|, where true is a minimum in [0, 1]"]
        off = gaps["|exact - diagonal|"]
        cost = ", ".join(f"{errors[rule]['over the best, median']:.2f} ({rule})" for rule in ("true", *RULES))
        return (
            f"**Angles.** The three cosines have one sign in {signs['share with one sign']:.0%} of the draws, those of "
            f"two unrelated pairs in {signs['share with one sign, another pair']:.0%}. Their median distance is "
            f"{same:.3f} between c11 and c22 and {distant:.3f} between tokens of different pairs, on cosines whose "
            f"middle 80 % reach from {low:+.2f} to {high:+.2f}.\n\n"
            f"**The true rule.** In {sound['share, a maximum']:.0%} of the merged pairs its stationary point is a "
            f"maximum, in {sound['share, outside [0, 1]']:.0%} it lies outside [0, 1]; it is a minimum between the two "
            f"keys in {sound['share, a minimum in [0, 1]']:.0%}. The norm rule is {far['median']:.2f} away from it in "
            f"the median, {where['median']:.2f} where it is such a minimum, and {off['median']:.1g} away from the "
            f"diagonal rule.\n\n"
            f"**What it costs.** The merge changes the outputs least at the best weight; the rules' change over that "
            f"one, median: {cost}. α on merged tokens is {alphas['median']:.1g} in the median, {alphas['99 %']:.1g} at "
            f"99 %."
        ).replace("-0.", "−0.")

    @staticmethod
    def _sound(pairs: pd.DataFrame) -> pd.Series:
        """Where the true rule has a minimum between the two keys."""
        return (pairs["curvature"] > 0) & pairs["true"].between(0, 1)


def text(model: Any, tokenizer: Any, sample: Sample, limit: int) -> Tensor:
    """A prompt of at most ``limit`` tokens and its gold answer: [1, n + 1]."""
    answer = tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"]
    return torch.tensor([encode(tokenizer, sample, limit).input_ids + answer], device=model.device)


def read(
    model: Any, tokenizer: Any, samples: Sequence[Sample], limit: int, retain: float = 0.25, **sizes: int
) -> Exactness:
    """:func:`measure` prompts of at most ``limit`` tokens, each together with its gold answer."""
    found = []
    for sample in progress(samples, "gradients"):
        one = measure(model, text(model, tokenizer, sample, limit), retain, **sizes)
        found.append([frame.assign(sample=sample.id) for frame in (one.pairs, one.draws)])
    pairs, draws = (pd.concat(frames, ignore_index=True) for frames in zip(*found, strict=True))
    return Exactness(pairs, draws)


def measure(
    model: Any, input_ids: Tensor, retain: float = 0.25, *, pairs: int = 32, draws: int = 256, seed: int = 0
) -> Exactness:
    """Hold KVSlimmer's weights against the true gradient's, in every compressible layer of one text.

    Parameters
    ----------
    input_ids : Tensor [1, n + 1]
        The last token is only predicted.
    retain
        Budget that gives KVSlimmer's chunk, and how many of the pairs a step of it merges.
    pairs
        Drawn of each set for each KV head.
    draws
        (pair, query) of each set for each query head.
    seed
        Of both.

    Raises
    ------
    UserError
        The text is too short for a past of two tokens.
    """
    scene = _Scene.of(model, input_ids, retain)
    generator = np.random.default_rng(seed)
    frames = []
    with torch.no_grad():
        for head in scene.heads():
            for name, first in scene.pairs(head, pairs, generator).items():
                frames.append([
                    frame.assign(set=name, layer=head.observed.layer)
                    for frame in head.tables(first, draws, generator)
                ])  # fmt: skip
    tables = (pd.concat(parts, ignore_index=True) for parts in zip(*frames, strict=True))
    return Exactness(*tables)


def left_out(
    model: Any, input_ids: Tensor, retain: float = 0.25, *, layers: int = 3, pairs: int = 1, seed: int = 0
) -> pd.DataFrame:
    """Both terms of the second derivative of L where the two logits of a pair shift alike, for all queries of the chunk.

    The paper keeps the first, Σ E·(c11 + 2 c12 + c22). The second, Uᵀ ∇²L U with U = α_1 d_1 + α_2 d_2, comes from the
    difference of two true gradients, at outputs moved by 0.5 % of their length along U.

    Parameters
    ----------
    layers
        How many, spread evenly over the model; of each the first KV head.
    pairs
        Drawn of each set; each costs two passes of the chunk, forward and back.

    Returns
    -------
    DataFrame
        ``set, layer, head, first, attention``, the terms ``first_term, second_term``, and ``ratio`` of their sizes.

    Raises
    ------
    UserError
        A model in half precision, or a text that is too short.
    """
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        raise UserError(
            "left_out takes differences of gradients, which half precision cannot resolve; load the model in float32"
        )
    scene = _Scene.of(model, input_ids, retain)
    generator = np.random.default_rng(seed)
    count = len(scene.layers)
    rows = []
    for layer in np.unique(np.linspace(0, count - 1, min(layers, count)).round().astype(int)):
        with torch.no_grad():
            head = scene.head(int(layer), 0)
            chosen = scene.pairs(head, pairs, generator)
        for name, firsts in chosen.items():
            for first in firsts:
                with torch.no_grad():
                    alpha, away = head.parts(first[None])
                    g11, g12, g22 = head.curvature(alpha, away)
                    along = (alpha[0][..., None] * away[0] + alpha[1][..., None] * away[1])[:, 0]  # U [R, D]
                    size = along.norm()
                    step = 0.005 * head.output.norm()
                    whole = torch.zeros_like(scene.gradients[layer])  # [H, chunk, D]
                    whole[: head.group] = (along / size).reshape(head.group, -1, along.shape[-1])
                ahead, behind = (
                    _slopes(model, scene.past, input_ids, scene.chunk, (int(layer), sign * step * whole))[0]
                    for sign in (1, -1)
                )
                rows.append(
                    {
                        "set": name,
                        "layer": head.observed.layer,
                        "head": 0,
                        "first": int(first),
                        "attention": float(sum(p.mean() for p in alpha)),
                        "first_term": float(g11 + 2 * g12 + g22),
                        "second_term": float(size**2 * ((ahead - behind) * whole).sum() / (2 * step)),
                    }
                )
    table = pd.DataFrame(rows)
    return table.assign(ratio=(table["second_term"] / table["first_term"]).abs())


@dataclass(frozen=True)
class _Scene:
    """A text whose last chunk looks back: what every compressible layer sees, and the true gradients."""

    sinks: int
    chunk: int
    limit: int  # pairs that merge
    past: KVCache
    gradients: list[Tensor]  # E [H, chunk, D]
    layers: list[tuple[Entries, Observed]]

    @staticmethod
    def of(model: Any, input_ids: Tensor, retain: float) -> _Scene:
        n = input_ids.shape[1] - 1
        m = Budget(retain=retain).resolve(max(n, 1))
        sinks, chunk = KVSlimmer().sizes(m)
        older = n - chunk - sinks
        if older < 2:
            raise UserError(f"a text of {n} tokens leaves no pair before its last {chunk}; give a longer one")
        # A step of KVSlimmer merges a chunk's worth of the m - sinks slots before it: the same share of ours.
        limit = max(1, older * chunk // (m - sinks))
        past = _past(model, input_ids, chunk)
        layers = []
        for entries, seen in observe(model, input_ids[:, :-1])[0]:
            last = Observed(
                seen.queries[:, -chunk:], seen.scaling, seen.rope, seen.softcap, seen.layer, seen.layers
            )
            layers.append((entries, last))
        return _Scene(sinks, chunk, limit, past, _slopes(model, past, input_ids, chunk), layers)

    def head(self, layer: int, head: int) -> _Head:
        """One KV head; the layer's attention is computed when its first head is asked for."""
        entries, observed = self.layers[layer]
        if observed.probabilities is None:
            attend_observed(entries, observed)
        return _Head(head, entries, observed, at_least_float32(self.gradients[layer]))

    def heads(self) -> Iterator[_Head]:
        for layer, (entries, observed) in enumerate(self.layers):
            yield from (self.head(layer, head) for head in range(entries.kv_heads))
            observed.probabilities = observed.output = None  # one layer's attention at a time

    def pairs(self, head: _Head, count: int, generator: np.random.Generator) -> dict[str, Tensor]:
        """First members of ``count`` pairs of each set, in random order."""
        attention = head.slots.attention[self.sinks : len(head.entries) - self.chunk]
        sets = {MERGED: choose_pairs(attention, self.limit), HEAVIEST: choose_pairs(-attention, count)}
        return {
            name: first[torch.from_numpy(generator.permutation(len(first))[:count]).to(first.device)]
            + self.sinks
            for name, first in sets.items()
        }


class _Head:
    """One KV head and its group's queries [R = G·chunk], with the gradient at their outputs."""

    def __init__(self, head: int, entries: Entries, observed: Observed, gradient: Tensor) -> None:
        assert observed.probabilities is not None and observed.output is not None
        self.head, self.entries, self.observed = head, entries, observed
        self.group = observed.heads // entries.kv_heads
        self.weights = observed.probabilities[head]  # α [R, n]
        self.output = observed.output[head]  # o [R, D]
        self.gradient = gradient.reshape(entries.kv_heads, -1, gradient.shape[-1])[head]  # E [R, D]
        n = len(entries)
        ones = self.weights.new_ones(n)
        self.slots = Slots(
            keys=entries.keys[head],
            values=entries.values[head],
            positions=entries.positions.expand(entries.kv_heads, -1)[head],
            mass=ones,
            rho=ones,
            attention=self.weights.sum(0),
            column=torch.arange(n, device=ones.device),
            composite=torch.zeros(n, dtype=torch.bool, device=ones.device),
        )

    def tables(
        self, first: Tensor, draws: int, generator: np.random.Generator
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """``Exactness.pairs`` and ``draws`` of the pairs that begin at ``first`` [K]."""
        alpha, away = self.parts(first)
        return (
            self._weigh(first, alpha, away),
            self._draw(first, alpha, away, draws, generator),
        )

    def parts(self, first: Tensor) -> tuple[Both, Both]:
        """α of both members [R, K] each, and v_i - o [R, K, D] each."""
        values = at_least_float32(self.slots.values)
        where = first, first + 1
        return (
            (self.weights[:, where[0]], self.weights[:, where[1]]),
            (values[where[0]] - self.output[:, None], values[where[1]] - self.output[:, None]),
        )

    def curvature(self, alpha: Both, away: Both) -> tuple[Tensor, Tensor, Tensor]:
        """g11, g12, g22 = Σ E·c_ij over the queries: [K] each."""
        (p1, p2), (e1, e2) = alpha, (torch.einsum("rd,rkd->rk", self.gradient, d) for d in away)
        g11, g22 = ((p * (1 - 2 * p) * e).sum(0) for p, e in ((p1, e1), (p2, e2)))
        return g11, -(p1 * p2 * (e1 + e2)).sum(0), g22

    def _weigh(self, first: Tensor, alpha: Both, away: Both) -> pd.DataFrame:
        g11, g12, g22 = self.curvature(alpha, away)
        mass = self.slots.attention[first] + self.slots.attention[first + 1]
        share = torch.where(mass > 0, self.slots.attention[first] / mass, 0.5)
        given = Pairs(self.slots, first, share, self.head, self.entries, self.observed, Counter())
        weights = {
            "true": optimal_weight(g11, g12, g22),
            "exact": KVSlimmer().pair_weights(given),
            "diagonal": KVSlimmer(weights="diagonal").pair_weights(given),
            "mass": share,
            "half": torch.full_like(share, 0.5),
        }
        change = self._change(first, alpha, away)
        tried = torch.stack([change(torch.full_like(share, float(weight))) for weight in GRID])  # [41, K]
        least, where = tried.min(0)
        table = {
            "head": self.head,
            "first": first,
            "attention": mass / len(self.weights),
            **weights,
            "curvature": g11 + 2 * g12 + g22,
            "best": GRID.to(where.device)[where],
            "error_best": least,
            **{f"error_{name}": change(weight.clamp(0, 1)) for name, weight in weights.items()},
        }
        return pd.DataFrame({k: v.tolist() if isinstance(v, Tensor) else v for k, v in table.items()})

    def _change(self, first: Tensor, alpha: Both, away: Both) -> Callable[[Tensor], Tensor]:
        """The change of the outputs when each pair alone merges with weight w [K], as KVSlimmer merges: root of
        Σ ‖o' - o‖² / Σ ‖o‖² over the queries.

        With β = exp(z(k*)) / Σ exp(z), l* = 2 and the mean value,
        o' - o = [(β - α_1) d_1 + (β - α_2) d_2] / (1 - α_1 - α_2 + 2β).
        """
        p1, p2 = alpha
        slots, observed, rope = self.slots, self.observed, self.observed.rope
        second = first + 1
        later = slots.attention[second] >= slots.attention[first]
        place = slots.positions[torch.where(later, second, first)]
        queries = at_least_float32(observed.queries).reshape(self.entries.kv_heads, len(p1), -1)[self.head]
        moved = [
            rope.rotate(rope.unrotate(at_least_float32(slots.keys[i]), slots.positions[i]), place)
            for i in (first, second)
        ]
        z1, z2 = (observed.scaling * queries @ key.T for key in moved)  # [R, K] each
        lse = observed.row_logsumexp(self.entries).reshape(self.entries.kv_heads, -1, 1)[self.head]
        n11, n12, n22 = (
            (a * b).sum(-1) for a, b in ((away[0], away[0]), (away[0], away[1]), (away[1], away[1]))
        )
        size = self.output.square().sum()

        def change(weight: Tensor) -> Tensor:
            beta = torch.exp(softcapped(weight * z1 + (1 - weight) * z2, observed.softcap) - lse)
            x, y, left = beta - p1, beta - p2, 1 - p1 - p2 + 2 * beta
            moved = (x * x * n11 + 2 * x * y * n12 + y * y * n22) / left.square()
            return (moved.clamp_min(0).sum(0) / size).sqrt()

        return change

    def _draw(
        self,
        first: Tensor,
        alpha: Both,
        away: Both,
        draws: int,
        generator: np.random.Generator,
    ) -> pd.DataFrame:
        """Cosines of drawn pairs and queries; that of c_ij turns over where α_i passes ½."""
        both = away[0] + away[1]
        turn = [torch.where(p > 0.5, -1.0, 1.0) for p in alpha]
        c11, c22 = (sign * self._cosine(d) for sign, d in zip(turn, away, strict=True))
        table = {"alpha1": alpha[0], "alpha2": alpha[1], "c11": c11, "c22": c22, "c12": self._cosine(both)}
        table["apart"] = c11.roll(1, 1)  # the pairs stand in random order
        table["first"] = first.expand_as(c11)
        chunk = len(c11) // self.group
        frames = []
        for member in range(self.group):
            picks = [generator.integers(size, size=draws) for size in (chunk, len(first))]
            row, pair = (torch.from_numpy(pick).to(c11.device) for pick in picks)
            drawn = {name: values[member * chunk + row, pair].tolist() for name, values in table.items()}
            frames.append(pd.DataFrame({"head": self.head * self.group + member, "query": picks[0], **drawn}))
        return pd.concat(frames, ignore_index=True)

    def _cosine(self, vectors: Tensor) -> Tensor:
        """cos(E, vectors) of [R, K, D]; NaN, which tables leave out, where the gradient is zero."""
        norms = self.gradient.norm(dim=-1)[:, None] * vectors.norm(dim=-1)
        return torch.einsum("rd,rkd->rk", self.gradient, vectors) / norms
