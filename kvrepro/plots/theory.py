"""What the papers say of weights and second derivatives, on real models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .canvas import Figure, blank, count, styled, subtitle

# The projections; keys and values have the colours that they have in KINDS.
MATRICES = {"Q": ("#009E73", "^"), "K": ("#0072B2", "o"), "V": ("#D55E00", "s")}
RANKS = {"effective": "entropy effective rank / r", "stable": "stable rank / r"}
DEPTH = sns.color_palette("viridis", as_cmap=True)  # first layer dark, last layer light
PAIRS = {
    "keys": ("Keys", "concentration of W_K\n(1 − {rank} rank / r)", "cosine of adjacent keys"),
    "values": ("Values", "concentration of W_V\n(1 − {rank} rank / r)", "cosine of adjacent values"),
    "gap": (
        "Difference",
        "gap of the spectra\n({rank} rank / r, V minus K)",
        "cosine, keys minus values",
    ),
}


# KVSlimmer's angle relation: its three cosines, and how far two of them are apart.
COSINES = {
    "cos(E, c11)": ("#0072B2", "o"),
    "cos(E, c22)": ("#D55E00", "s"),
    "−cos(E, c12)": ("#009E73", "^"),
}
DISTANCES = {
    "distance c11, c22": ("#0072B2", "o", "-", "c11 and c22 of one pair"),
    "distance to another pair": ("#777777", "", ":", "c11 of one pair and of another"),
}
SETS = {"merged": ("#CC79A7", "pairs that merge"), "heaviest": ("#555555", "heaviest pairs")}


@styled
def angle_relation(
    angles: pd.DataFrame,
    *,
    title: str = "Do the curvatures of a pair point the same way, seen from the gradient?",
) -> Figure:
    """Cosines of the true gradient with the three curvatures by layer, and how far those of one pair are apart.

    Parameters
    ----------
    angles
        ``layer, kind`` (of ``COSINES`` and ``DISTANCES``; others are left out), ``low, median, high`` and ``n``.
    title
        The figure's title.
    """
    figure, axes = blank((10.5, 6.0), title, rows=2, sharex=True)
    for kind, (color, marker) in COSINES.items():
        rows = angles[angles["kind"] == kind]
        axes[0].plot(rows["layer"], rows["median"], color=color, marker=marker, ms=4, lw=1.2, label=kind)
        for edge in ("low", "high"):
            axes[0].plot(rows["layer"], rows[edge], color=color, lw=1, ls="--")
    axes[0].axhline(0, color="black", lw=1, zorder=1)
    axes[0].set_ylabel("cosine")
    for kind, (color, marker, dash, label) in DISTANCES.items():
        rows = angles[angles["kind"] == kind]
        axes[1].fill_between(rows["layer"], rows["low"], rows["high"], color=color, alpha=0.18, lw=0)
        axes[1].plot(rows["layer"], rows["median"], color=color, marker=marker, ls=dash, ms=4, label=label)
    axes[1].set(xlabel="layer", ylabel="distance of two cosines")
    axes[1].set_ylim(bottom=0)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    subtitle(
        axes[0],
        f"line: median over queries, heads and pairs, {count(angles['n'])} a layer; dashed: 10 and 90 %",
    )
    subtitle(axes[1], "the relation says 0; line: median; band: middle 80 %")
    figure.data = angles
    return figure


@styled
def rule_weights(
    pairs: pd.DataFrame,
    *,
    title: str = "The first key's weight: the norm rule against the rule with the true gradient",
) -> Figure:
    """Density of pairs over both weights, apart for pairs where the true rule has a minimum and where it has a maximum.

    Parameters
    ----------
    pairs
        A row a pair: ``true, exact`` (weights) and ``curvature`` (positive at a minimum).
    title
        The figure's title.
    """
    reach = (-1.0, 2.0)
    panels = {"a minimum": pairs[pairs["curvature"] > 0], "a maximum": pairs[pairs["curvature"] <= 0]}
    edges = np.linspace(*reach, 31), np.linspace(0, 1, 21)
    counts = {
        name: np.histogram2d(rows["true"].clip(*reach), rows["exact"], edges)[0]
        for name, rows in panels.items()
    }
    top = max(1.0, *(count.max() for count in counts.values()))
    figure, axes = blank((10.5, 4.0), title, columns=2, sharey=True)
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        shown = np.ma.masked_equal(counts[name].T, 0)
        mesh = axis.pcolormesh(*edges, shown, cmap="viridis_r", norm=PowerNorm(0.5, 0, top), rasterized=True)
        axis.plot([0, 1], [0, 1], color="#D55E00", lw=1.5, ls="--")
        for edge in (0, 1):
            axis.axvline(edge, color="black", lw=0.8)
        axis.set(xlim=reach, ylim=(0, 1), xlabel="weight by the rule with the true gradient")
        axis.set_xticks([-1, 0, 1, 2], ["≤ −1", "0", "1", "≥ 2"])
        share = len(rows) / max(len(pairs), 1)
        inside = rows["true"].between(0, 1).mean() if len(rows) else 0.0
        subtitle(
            axis,
            f"the true rule has {name}: {share:.0%} of the pairs,\n{inside:.0%} of them between the two keys",
        )
    axes[0].set_ylabel("weight by the norm rule")
    figure.colorbar(mesh, ax=axes, label="pairs", pad=0.02)
    figure.data = pd.DataFrame(
        [
            {"true rule": name, "true": edges[0][i], "exact": edges[1][j], "pairs": int(count[i, j])}
            for name, count in counts.items()
            for i, j in np.argwhere(count)
        ]
    )
    return figure


@styled
def merged_alphas(
    draws: pd.DataFrame, *, title: str = "How much attention does one query pay to a token that merges?"
) -> Figure:
    """Distribution of single attention weights on the tokens of merged and of the heaviest pairs; logarithmic axis.

    Parameters
    ----------
    draws
        ``set`` (merged, heaviest), ``alpha1`` and ``alpha2``.
    title
        The figure's title.
    """
    edges = np.logspace(-12, 0, 49)  # four bins a decade
    figure, axes = blank((10.5, 4.0), title)
    frames = []
    for name, (color, label) in SETS.items():
        alpha = draws.loc[draws["set"] == name, ["alpha1", "alpha2"]].to_numpy().ravel()
        if not len(alpha):
            continue
        share = np.histogram(alpha.clip(edges[0], edges[-1]), edges)[0] / len(alpha)
        label = f"{label}: median {np.median(alpha):.0e}"
        axes[0].stairs(share, edges, color=color, lw=1.6, fill=name == "merged", alpha=0.6 if name == "merged" else 1,
                       label=label)  # fmt: skip
        frames.append(pd.DataFrame({"set": name, "low": edges[:-1], "high": edges[1:], "share": share}))
    axes[0].axvline(1e-4, color="black", lw=1, ls="--")
    axes[0].text(1.2e-4, 0.98, "1e-4", transform=axes[0].get_xaxis_transform(), va="top", fontsize=9)
    axes[0].set(
        xscale="log", xlim=(edges[0], 1), xlabel="α of one query on one token (first bar: 1e-12 and less)"
    )
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("share, four bins a decade")
    axes[0].legend(loc="upper left")
    figure.data = pd.concat(frames, ignore_index=True)
    return figure


@styled
def spectra(
    curves: pd.DataFrame,
    *,
    title: str = "How concentrated are the projections? Energy in the largest singular values",
) -> Figure:
    """Cumulative singular-value energy, a panel a projection and a line a layer.

    Parameters
    ----------
    curves
        ``layer, matrix`` (Q, K, V), ``share`` of the singular values and the ``energy`` in them, both 0 to 1.
    title
        The figure's title.
    """
    figure, axes = blank((10.5, 3.8), title, columns=len(MATRICES), sharey=True)
    depth = _depth(curves["layer"])
    for axis, matrix in zip(axes, MATRICES, strict=True):
        axis.plot([0, 1], [0, 1], color="black", lw=1, ls=":")
        lines = curves[curves["matrix"] == matrix].pivot(index="share", columns="layer", values="energy")
        for layer, color in zip(lines, depth.to_rgba(lines.columns.to_numpy()), strict=True):
            axis.plot(lines.index, lines[layer], color=color, lw=1)
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of the singular values")
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        subtitle(axis, f"W_{matrix}")
    axes[0].set_ylabel("share of the energy Σσ²")
    _layer_bar(figure, depth, axes)
    figure.data = curves
    return figure


@styled
def ranks(
    heads: pd.DataFrame,
    whole: pd.DataFrame,
    *,
    title: str = "Which projections use their whole rank? Layer by layer",
) -> Figure:
    """Effective and stable rank of each projection by layer: its KV heads, the whole matrix, and a random one.

    Parameters
    ----------
    heads, whole
        ``layer, head, matrix`` (Q, K, V), ``rank`` (effective, stable), its ``share`` of r, and ``random``, that of a
        random matrix of the same shape; by KV head, and of whole matrices.
    title
        The figure's title.
    """
    figure, axes = blank((10.5, 4.4), title, columns=len(RANKS))
    keys = ["rank", "matrix", "layer"]
    table = (
        (
            heads.groupby(keys).agg(
                mean=("share", "mean"),
                low=("share", "min"),
                high=("share", "max"),
                random=("random", "first"),
            )
        )
        .join(whole.set_index(keys)["share"].rename("whole"))
        .reset_index()
    )
    for axis, (rank, label) in zip(axes, RANKS.items(), strict=True):
        for matrix, (color, marker) in MATRICES.items():
            rows = table[(table["rank"] == rank) & (table["matrix"] == matrix)]
            axis.fill_between(rows["layer"], rows["low"], rows["high"], color=color, alpha=0.18, lw=0)
            axis.plot(rows["layer"], rows["mean"], color=color, marker=marker, ms=4, lw=1.4)
            axis.plot(rows["layer"], rows["whole"], color=color, lw=1, ls="--")
            axis.axhline(rows["random"].iloc[0], color=color, lw=1, ls=":")
        axis.set(xlabel="layer", ylabel=label)
        axis.set_ylim(0, 1.02 if rank == "effective" else None)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = [
        Line2D([], [], color=color, marker=marker, ms=5, label=f"W_{m}")
        for m, (color, marker) in MATRICES.items()
    ]
    grey = "#555555"
    lines += [
        Line2D([], [], color=grey, label="mean of the KV heads (band: all)"),
        Line2D([], [], color=grey, ls="--", lw=1, label="whole matrix"),
        Line2D([], [], color=grey, ls=":", lw=1, label="random, of a head's shape (K's is V's)"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    figure.data = table
    return figure


@styled
def similarity_spectrum(
    pairs: pd.DataFrame,
    notes: dict[str, str],
    *,
    rank: str = "effective",
    title: str = "Does concentration go with similarity? A point a KV head",
) -> Figure:
    """Similarity of adjacent tokens against concentration of the spectrum, for keys, values, and their difference.

    Parameters
    ----------
    pairs
        ``part`` (keys, values, gap), ``layer, head, concentration, similarity``.
    notes
        For each part the correlation as text.
    rank
        The rank that the concentration is made of.
    title
        The figure's title.
    """
    figure, axes = blank((10.5, 4.0), title, columns=len(PAIRS))
    depth = _depth(pairs["layer"])
    for axis, (part, (name, x, y)) in zip(axes, PAIRS.items(), strict=True):
        rows = pairs[pairs["part"] == part]
        colors = depth.to_rgba(rows["layer"].to_numpy())
        axis.scatter(
            rows["concentration"], rows["similarity"], c=colors, s=26, edgecolor="white", lw=0.4, zorder=3
        )
        axis.set(xlabel=x.format(rank=rank), ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        subtitle(axis, f"{name}: {notes[part]}")
    _layer_bar(figure, depth, axes)
    figure.data = pairs
    return figure


def _depth(layers: pd.Series) -> ScalarMappable:
    """Layers as colours."""
    return ScalarMappable(Normalize(layers.min(), layers.max()), DEPTH)


def _layer_bar(figure: Figure, depth: ScalarMappable, axes: Sequence[Axes]) -> None:
    bar = figure.colorbar(depth, ax=list(axes), pad=0.02, label="layer")
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    bar.outline.set_visible(False)
