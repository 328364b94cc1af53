"""Are keys alike because W_Q and W_K are concentrated, and values not because W_V is dispersed? Layer by layer.

    model, tokenizer = kvrepro.load("smollm2-135m")
    print(measure(model, tokenizer, context=1024).reading())

KVSlimmer (arXiv 2603.00907) explains by these spectra why adjacent keys may be merged and adjacent values need care.
The weights say how concentrated each projection is (:mod:`kvrepro.theory.spectrum`); real text says how alike adjacent
keys and values are; a rank correlation over layers and KV heads says whether the one goes with the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import stats, tasks
from ..tasks.prompts import encode
from ..theory.spectrum import cumulative, effective_rank, gaussian, singular_values, stable_rank
from .observe import upright
from .walk import APART

# Documentation of packages: a long page, paragraphs of several, and a page with its source code.
TEXTS = ("pydoc-default", "pydoc-retrieval", "pydoc-summary")
RANKS = {"effective": effective_rank, "stable": stable_rank}
GRID = torch.arange(33) / 32  # shares of the singular values at which the curves are drawn
KINDS = ("key", "value", "key-apart", "value-apart")
FILE = "asymmetry.csv"  # the parts of the claim, in a results folder


class Projections(NamedTuple):
    """The projections of one layer, float64, their rows by KV head: the query heads of a group belong to it."""

    Q: Tensor  # [Hkv, G·D, d]
    K: Tensor  # [Hkv, D, d]
    V: Tensor  # [Hkv, D, d]


@torch.no_grad()
def projections(model: Any, *, behind: bool = False) -> list[Projections]:
    """W_Q, W_K and W_V of every layer, each input channel times the gain of the RMSNorm before it; biases aside.

    Parameters
    ----------
    behind
        Also fold in the gains of the query and key norms behind the projections (Qwen3, Gemma 3).  They are not part of
        the matrices that the claim is about, but of what is cached.
    """
    config = model.config.get_text_config(decoder=True)
    found = []
    for layer in model.get_decoder().layers:
        attention, gain = layer.self_attn, norm_gain(layer.input_layernorm, config.hidden_size)
        if hasattr(attention, "qkv_proj"):  # Phi-3 holds the three as one
            kv = config.num_key_value_heads * attention.head_dim
            weights = attention.qkv_proj.weight.split((len(attention.qkv_proj.weight) - 2 * kv, kv, kv))
        else:
            weights = tuple(p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        parts = [
            (weight.double() * gain).unflatten(0, (config.num_key_value_heads, -1)) for weight in weights
        ]
        if behind and _has_key_norm(model):
            for i, norm in enumerate((attention.q_norm, attention.k_norm)):
                each = norm_gain(norm, attention.head_dim)
                parts[i] = parts[i] * each.repeat(parts[i].shape[1] // len(each))[:, None]
        found.append(Projections(*parts))
    return found


def _has_key_norm(model: Any) -> bool:
    return hasattr(model.get_decoder().layers[0].self_attn, "k_norm")


@torch.no_grad()
def norm_gain(norm: torch.nn.Module, channels: int) -> Tensor:
    """What an RMSNorm multiplies each channel with [channels], float64, by its own convention (Gemma's is 1 + w).

    Asked of the module itself: equal inputs, so large that epsilon vanishes, come out as the gain.
    """
    device = next(norm.parameters()).device
    return norm(torch.full((channels,), 1e3, device=device)).double()


@dataclass(frozen=True)
class Spectra:
    """Singular values of a model's projections.

    Attributes
    ----------
    sigma : dict of Tensor [layers, heads, r]
        Of Q, K and V, descending.
    shapes : dict of (int, int)
        Of one matrix; r is the smaller side.
    """

    sigma: dict[str, Tensor]
    shapes: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, layers: Sequence[Projections], *, whole: bool = False) -> Spectra:
        """Of every KV head's rows, or of the whole matrices as one head."""
        sigma, shapes = {}, {}
        for name in Projections._fields:
            weights = torch.stack([getattr(layer, name) for layer in layers])  # [layers, Hkv, rows, d]
            if whole:
                weights = weights.flatten(1, 2)[:, None]
            sigma[name] = singular_values(weights).cpu()
            shapes[name] = (weights.shape[-2], weights.shape[-1])
        return cls(sigma, shapes)

    def ranks(self) -> pd.DataFrame:
        """A row a layer, head, matrix and rank (effective, stable): its ``share`` of r, and ``random``, the same of a
        random matrix of that shape."""
        frames = []
        for matrix, sigma in self.sigma.items():
            layers, heads = sigma.shape[:2]
            index = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"])
            for name, rank in RANKS.items():
                random = float(rank(gaussian(*self.shapes[matrix])))
                columns = {"matrix": matrix, "rank": name, "share": rank(sigma).flatten(), "random": random}
                frames.append(pd.DataFrame(columns, index=index).reset_index())
        return pd.concat(frames, ignore_index=True)

    def curves(self) -> pd.DataFrame:
        """Cumulative energy: ``layer, matrix, share`` (of the singular values), ``energy``, mean over heads."""
        frames = []
        for matrix, sigma in self.sigma.items():
            energy = cumulative(sigma, GRID).mean(1)  # [layers, shares]
            index = pd.MultiIndex.from_product([range(len(energy)), GRID.tolist()], names=["layer", "share"])
            frames.append(
                pd.DataFrame({"matrix": matrix, "energy": energy.flatten()}, index=index).reset_index()
            )
        return pd.concat(frames, ignore_index=True)[["layer", "matrix", "share", "energy"]]


def similarity(model: Any, prompts: Sequence[Tensor]) -> pd.DataFrame:
    """Cosines of adjacent keys (before RoPE) and values, and of tokens far apart, of every layer and KV head.

    Parameters
    ----------
    prompts : sequence of Tensor [1, n], int64

    Returns
    -------
    DataFrame
        ``layer, head, kind, cosine`` (mean over the pairs of all prompts), ``low, high`` (their middle 80 %),
        ``between`` (standard deviation of the prompts' means), ``pairs``.
    """
    found: dict[tuple[int, str], list[NDArray[np.float32]]] = {}
    for ids in prompts:
        for layer, (keys, values) in enumerate(upright(model, ids)):
            for name, vectors in {"key": keys, "value": values}.items():
                for kind, step in {name: 1, f"{name}-apart": min(APART, ids.shape[1] // 2)}.items():
                    cosine = torch.cosine_similarity(vectors[:, :-step], vectors[:, step:], dim=-1)
                    found.setdefault((layer, kind), []).append(cosine.cpu().numpy())  # [Hkv, n - step]
    rows = []
    for (layer, kind), parts in found.items():
        means = np.stack([part.mean(1) for part in parts])  # [prompts, Hkv]
        pairs = np.concatenate(parts, 1)  # [Hkv, all]
        for head, cosines in enumerate(pairs):
            low, high = np.quantile(cosines, [0.1, 0.9])
            between = means[:, head].std(ddof=1) if len(means) > 1 else np.nan
            rows.append((layer, head, kind, cosines.mean(), low, high, between, len(cosines)))
    names = ["layer", "head", "kind", "cosine", "low", "high", "between", "pairs"]
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(names[3:7], float))


# The claim in parts. What is seen, as shares of the KV heads (held against a half), and what would explain it, as rank
# correlations over them (held against 0).
SEEN = {
    "K": "W_K is more concentrated than W_V",
    "Q": "W_Q is more concentrated than W_V, each beside a random matrix of its shape",
    "alike": "adjacent keys are more alike than adjacent values",
}
EXPLAINED = {
    "keys": "the more concentrated W_K, the more alike adjacent keys",
    "values": "the more concentrated W_V, the more alike adjacent values",
    "gap": "the wider the gap between the spectra (V minus K), the wider that of similarity (keys minus values)",
}
PARTS = SEEN | EXPLAINED


class Part(NamedTuple):
    """A part of the claim by one rank: a share of heads or Spearman's rho, its 95 % interval, and the verdict."""

    part: str
    rank: str
    estimate: float
    low: float
    high: float
    verdict: str

    def __str__(self) -> str:
        form, symbol = (".0%", "") if self.part in SEEN else ("+.2f", "ρ = ")
        estimate, low, high = (
            format(x, form).replace("-", "−") for x in (self.estimate, self.low, self.high)
        )
        return f"{symbol}{estimate} [{low}, {high}]"


@dataclass(frozen=True)
class Asymmetry:
    """What the weights and the text of one model say.

    Attributes
    ----------
    heads, whole : Spectra
        Of each KV head's rows, and of the whole matrices.
    normed : Spectra or None
        Of each KV head's rows with the gains of query and key norm, where there are such norms.
    cosines : DataFrame
        From :func:`similarity`.
    tokens : tuple of int
        Length of each prompt.
    """

    heads: Spectra
    whole: Spectra
    normed: Spectra | None
    cosines: pd.DataFrame
    tokens: tuple[int, ...]

    def points(self, rank: str = "effective") -> pd.DataFrame:
        """A row a layer and KV head.

        Returns
        -------
        DataFrame
            ``layer, head``; ranks ``Q, K, V`` as shares of r; cosines ``key, value, key-apart, value-apart``; and whether the
            parts of ``SEEN`` hold there: ``K holds, Q holds, alike holds, all hold``.
        """
        ranks = self.heads.ranks().query("rank == @rank")
        random = ranks.drop_duplicates("matrix").set_index("matrix")["random"]
        wide = ranks.pivot(index=["layer", "head"], columns="matrix", values="share")
        cosines = self.cosines.pivot(index=["layer", "head"], columns="kind", values="cosine")
        points = wide[["Q", "K", "V"]].join(cosines[list(KINDS)])
        points["K holds"] = points["K"] < points["V"]
        points["Q holds"] = points["Q"] / random["Q"] < points["V"] / random["V"]
        points["alike holds"] = points["key"] > points["value"]
        points["all hold"] = points[[f"{part} holds" for part in SEEN]].all(axis=1)
        return points.rename_axis(columns=None).reset_index()

    def layers(self, rank: str = "effective") -> pd.DataFrame:
        """Layer by layer: means over its KV heads, and the number of heads in which each part of ``SEEN``, and all, hold."""
        layers = self.points(rank).drop(columns="head").groupby("layer")
        counts = [f"{part} holds" for part in SEEN] + ["all hold"]
        return layers[["Q", "K", "V", *KINDS]].mean().join(layers[counts].sum())

    def pairs(self, rank: str = "effective") -> pd.DataFrame:
        """What is correlated: ``part`` (of ``EXPLAINED``), ``layer, head, concentration, similarity``."""
        points = self.points(rank)
        where, k, v = points[["layer", "head"]], points["K"], points["V"]
        key, value = points["key"], points["value"]
        pairs = {"keys": (1 - k, key), "values": (1 - v, value), "gap": (v - k, key - value)}
        return pd.concat(
            [
                where.assign(part=part, concentration=x, similarity=y)[
                    ["part", "layer", "head", "concentration", "similarity"]
                ]
                for part, (x, y) in pairs.items()
            ],
            ignore_index=True,
        )

    def parts(self, *, n_boot: int = 10_000, seed: int = 0) -> list[Part]:
        """Every part of the claim by each rank, in the order of ``PARTS``; intervals resample whole layers."""
        found = []
        for rank in RANKS:
            points = self.points(rank)
            for part in SEEN:
                holds = _by_layer(points, f"{part} holds")
                estimate, low, high = _share(holds, n_boot, seed)
                found.append(Part(part, rank, estimate, low, high, stats.verdict(low - 0.5, high - 0.5)))
            for name, pairs in self.pairs(rank).groupby("part", sort=False):
                x, y = _by_layer(pairs, "concentration"), _by_layer(pairs, "similarity")
                rho = stats.spearman(x, y, n_boot=n_boot, seed=seed)
                found.append(
                    Part(str(name), rank, rho.rho, rho.low, rho.high, stats.verdict(rho.low, rho.high))
                )
        return sorted(found, key=lambda row: list(PARTS).index(row.part))

    def table(self, parts: Sequence[Part] | None = None) -> pd.DataFrame:
        """:meth:`parts` for reading: a row a part, its estimate by each rank, and the verdict."""
        parts = self.parts() if parts is None else parts
        by_rank = {rank: [str(row) for row in parts if row.rank == rank] for rank in RANKS}
        columns = {f"by the {rank} rank": texts for rank, texts in by_rank.items()}
        index = pd.Index(PARTS.values(), name="part of the claim")
        return pd.DataFrame(columns | {"verdict": list(agreed(parts).values())}, index=index)

    def reading(self, parts: Sequence[Part] | None = None) -> str:
        """The verdict, layer by layer and as an explanation, in Markdown."""
        parts = self.parts() if parts is None else parts
        verdicts, layers = agreed(parts), self.layers()
        heads = len(self.points()) // len(layers)
        whole = layers.index[layers["all hold"] == heads]
        lines = []
        for part in SEEN:
            count = layers[f"{part} holds"]
            but = f" (not all in {_listed(layers.index[count < heads])})" if (count < heads).any() else ""
            lines.append(f"- {PARTS[part]}: in {int(count.sum())} of {heads * len(layers)} heads{but}")
        reach = max(row.high for row in parts if row.part in EXPLAINED)
        seen, explained = (stats.together([verdicts[part] for part in some]) for some in (SEEN, EXPLAINED))
        return (
            f"That Q and K are concentrated, V dispersed, adjacent keys alike and values not is **{seen}**: it is so in every "
            f"head of {len(whole)} of {len(layers)} layers (effective rank; exceptions: "
            f"{_listed(layers.index.difference(whole))}). {self.sizes()}\n\n"
            + "\n".join(lines)
            + f"\n\n{self.behind()}"
            f"That the one follows from the other, so that more of it goes with more of the other from head to head, is "
            f"**{explained}**:\n\n"
            + "\n".join(
                f"- {PARTS[part]}: {', '.join(f'{row} ({row.rank} rank)' for row in parts if row.part == part)}: "
                f"{verdicts[part]}"
                for part in EXPLAINED
            )
            + f"\n\nThe intervals leave room for a correlation of at most {reach:.2f}. ".replace("-", "−")
            + self.adjacency()
        )

    def sizes(self) -> str:
        """Mean effective ranks, beside those of random matrices, in a sentence."""
        means = self.heads.ranks().query("rank == 'effective'").groupby("matrix")[["share", "random"]].mean()
        each = [
            f"{row['share']:.2f} in W_{matrix} ({row['random']:.2f})"
            for matrix, row in means.loc[[*"QKV"]].iterrows()
        ]
        return f"Mean effective rank over r of a KV head, and of a random matrix of its shape: {', '.join(each)}."

    def behind(self) -> str:
        """What the gain of a key norm changes about K and V, in a sentence; nothing where there is no such norm."""
        if self.normed is None:
            return ""
        share = (
            self.normed.ranks()
            .query("rank == 'effective'")
            .pivot(index=["layer", "head"], columns="matrix", values="share")
        )
        return (
            f"With the gain of the key norm folded in, too, W_K is more concentrated than W_V in "
            f"{int((share['K'] < share['V']).sum())} of {len(share)} heads.\n\n"
        )

    def adjacency(self) -> str:
        """How much of the similarity is due to being neighbours, in sentences."""
        mean = self.points()[list(KINDS)].mean()
        key, value = (f"{mean[kind] - mean[f'{kind}-apart']:.2f}" for kind in ("key", "value"))
        return (
            f"Over all layers and heads the cosine of adjacent keys is {mean['key']:.2f} and of adjacent values "
            f"{mean['value']:.2f}; {APART} tokens apart it is {mean['key-apart']:.2f} and {mean['value-apart']:.2f}. So being "
            f"neighbours adds {key} to keys and {value} to values; the rest is what any two tokens share "
            f"({len(self.tokens)} prompts, {sum(self.tokens):,} tokens)."
        )


def measure(model: Any, tokenizer: Any, context: int, samples: int = 1) -> Asymmetry:
    """Take a loaded model's spectra, and its similarities on the first ``samples`` prompts of each of ``TEXTS``.

    Parameters
    ----------
    context
        Longest prompt, in tokens, 1024 to 8192.
    """
    prompts = [
        torch.tensor([encode(tokenizer, sample, context).input_ids], device=model.device)
        for task in TEXTS
        for sample in tasks.load(task, samples, context)
    ]
    layers = projections(model)
    heads = Spectra.of(layers)
    return Asymmetry(
        heads,
        heads if len(layers[0].K) == 1 else Spectra.of(layers, whole=True),  # one head is the whole
        Spectra.of(projections(model, behind=True)) if _has_key_norm(model) else None,
        similarity(model, prompts),
        tuple(ids.shape[1] for ids in prompts),
    )


def agreed(parts: Sequence[Part]) -> dict[str, str]:
    """Verdict of each part: the paper does not say which rank it means, so where they differ it is inconclusive."""
    return {
        part: found.pop() if len(found) == 1 else "inconclusive"
        for part in PARTS
        for found in [{row.verdict for row in parts if row.part == part}]
    }


def write(parts: Sequence[Part], folder: str | os.PathLike[str]) -> Path:
    """Store :meth:`Asymmetry.parts` in a results folder."""
    path = Path(folder) / FILE
    pd.DataFrame(parts).to_csv(path, index=False, float_format="%.6g")
    return path


def read(folder: str | os.PathLike[str]) -> list[Part]:
    """What :func:`write` stored."""
    return [Part(*row) for row in pd.read_csv(Path(folder) / FILE).itertuples(index=False)]


def _by_layer(points: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """[layers, heads]"""
    return points.pivot(index="layer", columns="head", values=column).to_numpy(dtype=float)


def _share(holds: NDArray[np.float64], n_boot: int, seed: int) -> tuple[float, float, float]:
    """Share of heads [layers, heads] where something holds, with the interval over resampled layers."""
    layers = len(holds)
    picks = np.random.default_rng(seed).integers(layers, size=(n_boot, layers))
    low, high = np.percentile(holds[picks].mean((1, 2)), [2.5, 97.5])
    return float(holds.mean()), float(low), float(high)


def _listed(layers: pd.Index) -> str:
    """Layer numbers as text, runs shortened."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(names)}" if names else "no layer"
