"""One function a figure: a table in, a figure out; the same colour for the same method everywhere.

Every figure carries the table that it shows, and :func:`save` writes both: NAME.png, NAME.svg and NAME.csv,
byte for byte the same on every run (no dates, no versions, fixed identifiers). Nothing here computes a
result: means, intervals and differences come from :mod:`kvrepro.stats` and :mod:`kvrepro.results`.

``kvrepro figures DIR`` redraws everything from stored results.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm, to_rgb
from matplotlib.figure import Figure as PlainFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvrepro.errors import UserError
from kvrepro.results import ARMS, by_category, in_order, write_atomic


class Look(NamedTuple):
    """How an arm is drawn and named."""

    color: str
    marker: str
    label: str


# Hues are far apart for the common forms of colour blindness (after Okabe and Ito, and Tol) between methods
# that share a figure; arms of one method are shades of its hue, and a marker is never used twice with
# neighbours.
LOOKS = {
    "full": Look("#000000", "o", "full cache"),
    "full-folded": Look("#777777", "o", "full cache, folded kernel"),
    "streaming-llm": Look("#999933", "p", "StreamingLLM"),
    "h2o": Look("#882255", "H", "H2O"),
    "snapkv": Look("#E69F00", "s", "SnapKV"),
    "pyramidkv": Look("#A6761D", "^", "PyramidKV"),
    "vatp": Look("#661100", "v", "VATP"),
    "look-m": Look("#C2387E", "<", "LOOK-M"),
    "weightedkv": Look("#6F63BB", ">", "WeightedKV"),
    "kvmerger": Look("#CC6677", "d", "KVMerger"),
    "bifocal": Look("#117733", "8", "Bifocal (ours)"),
    "adjacent": Look("#44AA99", "X", "Adjacent merge"),
    "selkv/on-bifocal": Look("#66A61E", "h", "Bifocal + SelKV merge"),
    "selkv/on-bifocal+gate": Look("#8FC454", "<", "Bifocal + gate, no bias"),
    "selkv/on-bifocal+gated-count": Look("#3F6B12", "X", "Bifocal + gate, gated-count bias"),
    "selkv/on-bifocal+merge-all": Look("#B9DE8F", "^", "Bifocal + merge all"),
    "selkv": Look("#0072B2", "D", "SelKV"),
    "selkv/evict": Look("#56B4E9", "v", "SelKV: evict only"),
    "selkv/merge-all": Look("#332288", "^", "SelKV: merge all"),
    "selkv/gate": Look("#009E73", "<", "SelKV: gate, no bias"),
    "selkv/gate+count": Look("#004D33", "P", "SelKV: gate, count bias"),
    "selkv/gate+gated-count": Look("#5FC4A2", "X", "SelKV: gate, gated-count bias"),
    "selkv/merge-all+ratio": Look("#9A8BD9", ">", "SelKV: merge all, ratio bias"),
    "selkv/alpha-0.25": Look("#7FB2D9", "8", "SelKV: alpha 0.25"),
    "selkv/alpha-1": Look("#003A63", "d", "SelKV: alpha 1"),
    "selkv/on-snapkv": Look("#D55E00", "h", "SnapKV + SelKV merge"),
    "asymkv": Look("#B5577F", "X", "AsymKV"),
    "kvslimmer": Look("#CC79A7", "*", "KVSlimmer"),
    "kvslimmer/diagonal": Look("#5A1846", "s", "KVSlimmer: diagonal weights"),
    "kvslimmer/mass": Look("#1F5FA8", "o", "KVSlimmer: weights by mass"),
    "kvslimmer/mean": Look("#B8860B", "^", "KVSlimmer: weights by l"),
    "kvslimmer/drop-lighter": Look("#0A7A4B", "v", "KVSlimmer: drop the lighter"),
    "kvslimmer/clamped": Look("#5B2A86", "D", "KVSlimmer: l clamped at 5"),
    "kvslimmer/ratio": Look("#00766C", "h", "KVSlimmer: ratio bias"),
    "kvslimmer/ratio-alpha-1": Look("#66B5E8", "d", "KVSlimmer: ratio bias, alpha 1"),
    "kvslimmer/no-bias": Look("#D1803A", "p", "KVSlimmer: no bias"),
    "kvslimmer/plain-sum": Look("#8C2D19", "P", "KVSlimmer: plain sum"),
    "kvslimmer/plain-mean": Look("#E0A458", "X", "KVSlimmer: plain mean"),
    "kvslimmer/mass-values": Look("#4C956C", "<", "KVSlimmer: values by mass"),
    "kvslimmer/as-key": Look("#274690", ">", "KVSlimmer: values as the keys"),
    "kvslimmer-released": Look("#EA9CC6", "P", "KVSlimmer, released code"),
}

# What became of a token, and the stages of the attention sag; kept and full share the strongest colour.
STATES = {"kept": "#0072B2", "merged": "#E69F00", "dropped": "#E8E8E8"}
STATE_LABELS = {"kept": "kept", "merged": "merged into a kept entry", "dropped": "dropped"}
SAG = {
    "full": ("#000000", "-", 1.6, "full cache"),
    "evicted": ("#56B4E9", "-", 2.6, "after eviction"),
    "merged": ("#332288", (0, (4, 3)), 1.4, "after merging, no bias"),
    "compensated": ("#D55E00", "-", 1.4, "after merging, with bias"),
}
SHADE = "#E3E3E3"
KINDS = {
    "key": ("#0072B2", "o", "-", "keys, adjacent"),
    "key-apart": ("#0072B2", "", ":", "keys, far apart"),
    "value": ("#D55E00", "s", "-", "values, adjacent"),
    "value-apart": ("#D55E00", "", ":", "values, far apart"),
}

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


class Metric(NamedTuple):
    """How a metric is named, its unit, the digits it is printed with, and which way is better."""

    label: str
    unit: str
    digits: int
    better: str


METRICS = {
    "score": Metric("task score", "points of 100", 1, "right"),
    "nll": Metric("NLL of the gold answer", "nats a token", 3, "left"),
    "kl": Metric("KL from the full cache", "nats a token", 3, "left"),
    "agree": Metric("top-1 agreement with the full cache", "share", 3, "right"),
    "kept_entries": Metric("entries kept", "share", 3, "left"),
    "kept_bytes": Metric("bytes kept", "share", 3, "left"),
}

STYLE: dict[str, Any] = {
    **sns.axes_style("whitegrid"),
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs on every machine
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "figure.titlesize": 12,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.edgecolor": "#888888",
    "grid.color": "#E6E6E6",
    "svg.hashsalt": "kvrepro",
    "svg.fonttype": "path",
}


class Figure(PlainFigure):
    """A figure with the table it shows as ``data``; shows itself in a notebook, without pyplot's state."""

    data: pd.DataFrame

    def _repr_png_(self) -> bytes:
        return _render(self, "png", dpi=100)


P = ParamSpec("P")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in our style, settle the layout, and leave the caller's settings alone."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for _ in range(
                3
            ):  # the layout is found by iteration; once it stands, every rendering is the same
                figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return figure

    return styled


def look(arm: str) -> Look:
    """Return an arm's colour, marker and label: its method's where it has none, grey for a method that is not ours."""
    method, _, part = arm.partition("/")
    if part and arm not in LOOKS and method in LOOKS:
        return LOOKS[method]._replace(label=f"{LOOKS[method].label}: {part.replace('-', ' ')}")
    return LOOKS.get(arm, Look("#555555", "o", arm))


def save(figure: Figure, folder: str | os.PathLike[str], name: str) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.csv.

    Parameters
    ----------
    figure
        From a function of this module.
    folder
        Made if missing.
    name
        File name without ending.

    Returns
    -------
    list of Path
        The three files. Equal data give equal bytes.

    Raises
    ------
    UserError
        The folder cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write figures to {folder}; {error.strerror}; choose another folder"
        ) from error
    contents = {
        "png": _render(figure, "png", dpi=150),
        "svg": _render(figure, "svg"),
        "csv": figure.data.to_csv(index=False, float_format="%.6g").encode(),
    }
    paths = []
    for ending, content in contents.items():
        path = Path(folder) / f"{name}.{ending}"
        write_atomic(path, content)
        paths.append(path)
    return paths


@_styled
def main_scores(
    means: pd.DataFrame, *, title: str = "How close does each method come to the full cache?"
) -> Figure:
    """Arms against macro score and KL, with intervals.

    The intervals are of each mean alone. Arms share their samples, so two arms can differ clearly though
    their intervals overlap: that is what :func:`intervals` shows.

    Parameters
    ----------
    means
        From :func:`kvrepro.stats.means` with the metrics score and kl: ``metric, arm, mean, low, high, n``.
    title
        The figure's title.
    """
    metrics = list(means["metric"].unique())
    arms = in_order(means["arm"], ARMS)
    figure, axes = _figure((10.5, 1.7 + 0.34 * len(arms)), title, columns=len(metrics), sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        rows = means[means["metric"] == metric].set_index("arm").reindex(arms)
        if "full" in arms:
            axis.axvline(rows.loc["full", "mean"], color=look("full").color, lw=1, ls=":", zorder=1)
        _points(axis, rows, "mean")
        _print(axis, rows["mean"], f".{METRICS[metric].digits}f")
        axis.set_xlabel(
            f"{METRICS[metric].label}\n({METRICS[metric].unit}; {METRICS[metric].better} is better)"
        )
    _arm_axis(axes[0], arms)
    _subtitle(axes[0], f"mean over categories and its 95 % interval, {_count(means['n'])}")
    figure.data = means
    return figure


@_styled
def categories(records: pd.DataFrame, metric: str = "kl", *, title: str | None = None) -> Figure:
    """Heat map of one metric, arms x categories, the number in each cell.

    Colour is the difference from the full cache in the same column, so that hard and easy categories compare;
    for KL, which is such a difference, and without a full arm, it is the value.

    Parameters
    ----------
    records
        From :func:`kvrepro.results.load`, filtered to one retention (the full arms aside).
    metric
        A metric of the records.
    title
        The figure's title.
    """
    table = by_category(records, metric).droplevel("retain")
    if table.index.has_duplicates:
        raise UserError(
            "the heat map needs one retention an arm; it got several; filter the records by retain first"
        )
    label, unit, digits, better = METRICS[metric]
    if metric != "kl" and "full" in table.index:
        shown = table - table.loc["full"]
        reach = float(np.nanmax(np.abs(shown.to_numpy()), initial=1e-9))
        scale: dict[str, Any] = {
            "cmap": "RdBu" if better == "right" else "RdBu_r",
            "vmin": -reach,
            "vmax": reach,
        }
        colors = "colour: difference from the full cache, red is worse"
    else:
        shown = table
        top = float(np.nanmax(shown.to_numpy(), initial=1e-9))
        # A square-root scale: one bad arm must not make all others look alike.
        scale = {"cmap": "Blues", "norm": PowerNorm(0.5, 0, top)}
        colors = "darker is worse" if better == "left" else "darker is better"
    figure, axes = _figure(
        (max(7.0, 3.4 + 1.05 * table.shape[1]), 2.1 + 0.34 * len(table)),
        title or f"Where is the loss? {label[0].upper()}{label[1:]}, by category",
    )
    sns.heatmap(
        shown,
        ax=axes[0],
        annot=table.to_numpy(),
        fmt=f".{digits}f",
        linewidths=1,
        cbar_kws={"label": unit, "pad": 0.02},
        annot_kws={"size": 9},
        **scale,
    )
    axes[0].set(xlabel="", ylabel="")
    axes[0].set_yticklabels([look(arm).label for arm in table.index], rotation=0)
    axes[0].set_xticklabels(list(table.columns), rotation=20, ha="right", rotation_mode="anchor")
    _subtitle(axes[0], f"number: {unit}; {colors}")
    axes[0].axvline(table.shape[1] - 1, color="black", lw=1.5)  # the average stands apart
    figure.data = table.reset_index()
    return figure


@_styled
def intervals(
    comparison: pd.DataFrame, *, title: str = "Which differences are real? Those whose interval clears zero"
) -> Figure:
    """Forest plot of paired differences, a panel a metric; shaded: too small for so few samples to show.

    Parameters
    ----------
    comparison
        From :func:`kvrepro.stats.compare`.
    title
        The figure's title.
    """
    metrics = list(comparison["metric"].unique())
    arms = list(comparison["arm"].unique())
    baselines = comparison.drop_duplicates("arm").set_index("arm")["baseline"]
    one = baselines.nunique() == 1
    figure, axes = _figure(
        (3.4 + 3.1 * len(metrics), 2.2 + (0.4 if one else 0.6) * len(arms)),
        title,
        columns=len(metrics),
        sharey=True,
    )
    for axis, metric in zip(axes, metrics, strict=True):
        label, unit, digits, better = METRICS[metric]
        rows = comparison[comparison["metric"] == metric].set_index("arm").reindex(arms)
        for y, reach in enumerate(rows["detectable"]):
            axis.fill_betweenx([y - 0.4, y + 0.4], -reach, reach, color=SHADE, lw=0, zorder=0)
        axis.axvline(0, color="black", lw=1, zorder=1)
        _points(axis, rows, "diff")
        _print(axis, rows["diff"], f"+.{digits + 1}f")
        axis.set_xlabel(f"difference in {label}\n({unit}; {better} is better)")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        if not np.nan_to_num(rows[["diff", "low", "high"]].to_numpy(dtype=float)).any():
            axis.set_xlim(-1, 1)  # all samples tie: a scale of its own would be rounding noise
        axis.grid(axis="y", visible=False)
    _arm_axis(axes[0], arms)
    if one:
        against = f"each minus \u201c{look(baselines.iloc[0]).label}\u201d"
    else:
        against = "each minus the arm named below it"
        labels = [f"{look(arm).label}\nminus {look(baselines[arm]).label}" for arm in arms]
        axes[0].set_yticks(range(len(arms)), labels)
    _subtitle(axes[0], f"{against}, paired, {_count(comparison['n'])}")
    figure.legend(
        handles=[
            Line2D([], [], color="#555555", marker="o", mec="white", lw=2, label="difference, 95 % interval"),
            Patch(color=SHADE, label="true differences that these samples could miss (power below 80 %)"),
        ],
        loc="outside lower center",
        ncols=2 if len(metrics) > 1 else 1,
    )
    figure.data = comparison
    return figure


@_styled
def across(table: pd.DataFrame, metric: str = "kl", *, title: str | None = None) -> Figure:
    """Arms x models: does an order that holds on one model hold on another?

    Parameters
    ----------
    table
        From :func:`kvrepro.analyses.across`: a row an arm, a column a model.
    metric
        A key of ``METRICS``.
    title
        The figure's title.
    """
    label, unit, _, better = METRICS[metric]
    table = table.loc[table.drop(index="full", errors="ignore").index]
    figure, axes = _figure(
        (8.5, 1.9 + 0.32 * len(table)), title or f"{label[0].upper()}{label[1:]}, by method and model"
    )
    axis = axes[0]
    shapes = (("o", "#222222"), ("s", "white"), ("^", "#9A9A9A"), ("D", "#555555"), ("v", "white"))
    for (marker, fill), model in zip(shapes, table.columns):
        axis.plot(table[model], range(len(table)), marker, mfc=fill, mec="#222222", ms=7, label=model, ls="")
    _arm_axis(axis, list(table.index))
    for tick, arm in zip(axis.get_yticklabels(), table.index):
        tick.set_color(look(str(arm)).color)
    axis.set_xlabel(f"{label} ({unit}; {better} is better)")
    figure.legend(loc="outside lower center", ncols=len(table.columns))
    figure.data = table.reset_index()
    return figure


@_styled
def sag(
    attention: pd.DataFrame,
    *,
    bucket: int = 32,
    title: str = "The attention sag: below 1, a stretch of the prompt gets less attention than it had",
) -> Figure:
    """Attention mass along the prompt in one layer, and its ratio to the full cache's.

    Merging without a bias leaves the keys, and so the attention, as eviction does: the two curves coincide.

    Parameters
    ----------
    attention
        Long form: ``position`` (int, in tokens), ``variant`` (full, evicted, merged, compensated), ``mass``
        (attention that the position's entry gets; evicted positions may be left out).
    bucket
        Positions summed into one step of the curve.
    title
        The figure's title.
    """
    summed = (
        attention.assign(position=attention["position"] // bucket * bucket)
        .groupby(["position", "variant"])["mass"]
        .sum()
        .unstack("variant", fill_value=0)
    )
    if "full" not in summed:
        raise UserError("no attention of the full cache; the figure compares with it; add the variant full")
    summed = summed[in_order(summed.columns, list(SAG))]
    figure, axes = _figure((10.5, 5.6), title, rows=2, sharex=True)
    edges = np.append(summed.index.to_numpy(), summed.index[-1] + bucket)
    for variant in summed:
        color, dash, width, label = SAG[str(variant)]
        style: dict[str, Any] = {"color": color, "linestyle": dash, "linewidth": width, "baseline": None}
        axes[0].stairs(summed[variant], edges, label=label, **style)
        if variant != "full":
            axes[1].stairs(summed[variant] / summed["full"], edges, **style)
    axes[0].set_yscale("log")
    axes[0].set_ylabel(f"attention mass\nof {bucket} positions")
    axes[0].legend(ncols=len(SAG), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[1].axhline(1, color=SAG["full"][0], lw=SAG["full"][2], zorder=1)
    axes[1].set(ylabel="ratio to\nthe full cache", xlabel="position in the prompt (tokens)")
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlim(edges[0], edges[-1])
    figure.data = summed.reset_index()
    return figure


@_styled
def entries_map(
    tokens: pd.DataFrame, *, title: str = "What became of each token? Stripes show where kept tokens cluster"
) -> Figure:
    """A strip for each KV head over the prompt: kept, merged into a kept entry, or dropped.

    Parameters
    ----------
    tokens
        ``head`` (int), ``position`` (int, in tokens), ``state`` (kept, merged, dropped).
    title
        The figure's title.
    """
    if unknown := set(tokens["state"]) - set(STATES):
        raise UserError(f"unknown token state {sorted(unknown)[0]}; use {', '.join(STATES)}")
    codes = tokens.assign(state=tokens["state"].map(list(STATES).index)).pivot(
        index="head", columns="position", values="state"
    )
    heads = len(codes)
    figure, axes = _figure((10.5, 1.3 + 0.62 * heads), title, rows=heads, sharex=True)
    extent = (float(codes.columns[0]) - 0.5, float(codes.columns[-1]) + 0.5, 0.0, 1.0)
    for axis, (head, row) in zip(axes, codes.iterrows(), strict=True):
        colors = np.array([to_rgb(STATES[name]) for name in STATES])[row.to_numpy()]  # [positions, 3]
        # Colours, not codes, are averaged where several tokens share a pixel: a blend shows their shares.
        axis.imshow(colors[None], aspect="auto", extent=extent, interpolation="antialiased")
        shares = [f"{np.mean(row == code):.0%} {name}" for code, name in enumerate(STATES)]
        axis.set_yticks([])
        axis.grid(visible=False)
        axis.set_ylabel(f"KV head {head}", rotation=0, ha="right", va="center")
        axis.text(1.01, 0.5, "\n".join(shares), transform=axis.transAxes, va="center", fontsize=8)
    axes[-1].set_xlabel("position in the prompt (tokens)")
    figure.legend(
        handles=[Patch(facecolor=STATES[s], edgecolor="#888888", label=STATE_LABELS[s]) for s in STATES],
        loc="outside lower center",
        ncols=len(STATES),
    )
    figure.data = tokens
    return figure


@_styled
def adjacent_similarity(
    cosines: pd.DataFrame, *, title: str = "Are neighbours alike? Keys and values of adjacent tokens"
) -> Figure:
    """Cosine of adjacent keys and of adjacent values, layer by layer.

    Keys that all share a large common part are alike whether adjacent or not: what neighbours add is the distance
    to the dotted line, tokens far apart.

    Parameters
    ----------
    cosines
        ``layer`` (int), ``kind`` (key, value, and key-apart, value-apart for comparison), ``cosine`` (-1 to 1);
        several rows a layer and kind (pairs, heads) become a line through their mean; adjacent ones a band over
        their middle 80 %, too.
    title
        The figure's title.
    """
    groups = cosines.groupby(["layer", "kind"])["cosine"]
    table = groups.agg(
        mean="mean", low=lambda x: x.quantile(0.1), high=lambda x: x.quantile(0.9), n="count"
    ).reset_index()
    figure, axes = _figure((8, 4), title)
    for kind, (color, marker, dash, label) in KINDS.items():
        rows = table[table["kind"] == kind]
        if len(rows):
            axes[0].plot(
                rows["layer"], rows["mean"], color=color, marker=marker, linestyle=dash, ms=5, label=label
            )
        if not kind.endswith("apart"):
            axes[0].fill_between(rows["layer"], rows["low"], rows["high"], color=color, alpha=0.18, lw=0)
    axes[0].axhline(0, color="black", lw=1)
    axes[0].set(xlabel="layer", ylabel="cosine of two tokens")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(KINDS))
    _subtitle(axes[0], "line: mean over pairs and heads; band: their middle 80 %")
    figure.data = table
    return figure


@_styled
def cardinality(entries: pd.DataFrame, *, title: str = "How many tokens does one entry stand for?") -> Figure:
    """Histogram of cardinalities; the count axis is logarithmic, since most entries stand for one token.

    Parameters
    ----------
    entries
        One row an entry: ``cardinality`` (tokens merged into it, itself included, at least 1).
    title
        The figure's title.
    """
    values = entries["cardinality"].to_numpy(dtype=float)
    # A bin each for 1, 2, 3 and 4, then twice as wide each time: 5-8, 9-16, ...
    last = max(3, int(np.ceil(np.log2(max(values.max(), 4)))))
    edges = np.array([0, 1, 2, 3, 4, *(2.0**k for k in range(3, last + 1))])
    counts = np.histogram(values, edges + 0.5)[0]
    names = [f"{int(a) + 1}" if b == a + 1 else f"{int(a) + 1}-{int(b)}" for a, b in pairwise(edges)]
    shares = np.histogram(values, edges + 0.5, weights=values)[0] / values.sum()
    figure, axes = _figure((1.6 + 0.75 * len(names), 4), title)
    bars = axes[0].bar(names, counts, color=look("kvslimmer").color, width=0.85)
    labels = [f"{count:,}\n{share:.0%}" for count, share in zip(counts, shares, strict=True)]
    axes[0].bar_label(bars, labels, fontsize=8, padding=2)
    axes[0].set(yscale="log", xlabel="tokens an entry stands for", ylabel="entries (log scale)")
    axes[0].set_ylim(0.7, counts.max() * 6)
    axes[0].grid(axis="x", visible=False)
    _subtitle(
        axes[0],
        f"{len(values):,} entries for {values.sum():,.0f} tokens\n"
        "on each bar: its entries, and the share of all tokens in them",
    )
    figure.data = pd.DataFrame({"tokens": names, "entries": counts, "share_of_tokens": shares})
    return figure


@_styled
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
    figure, axes = _figure((10.5, 6.0), title, rows=2, sharex=True)
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
    _subtitle(
        axes[0],
        f"line: median over queries, heads and pairs, {_count(angles['n'])} a layer; dashed: 10 and 90 %",
    )
    _subtitle(axes[1], "the relation says 0; line: median; band: middle 80 %")
    figure.data = angles
    return figure


@_styled
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
    figure, axes = _figure((10.5, 4.0), title, columns=2, sharey=True)
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
        _subtitle(
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


@_styled
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
    figure, axes = _figure((10.5, 4.0), title)
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


@_styled
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
    figure, axes = _figure((10.5, 3.8), title, columns=len(MATRICES), sharey=True)
    depth = _depth(curves["layer"])
    for axis, matrix in zip(axes, MATRICES, strict=True):
        axis.plot([0, 1], [0, 1], color="black", lw=1, ls=":")
        lines = curves[curves["matrix"] == matrix].pivot(index="share", columns="layer", values="energy")
        for layer, color in zip(lines, depth.to_rgba(lines.columns.to_numpy()), strict=True):
            axis.plot(lines.index, lines[layer], color=color, lw=1)
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of the singular values")
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        _subtitle(axis, f"W_{matrix}")
    axes[0].set_ylabel("share of the energy Σσ²")
    _layer_bar(figure, depth, axes)
    figure.data = curves
    return figure


@_styled
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
    figure, axes = _figure((10.5, 4.4), title, columns=len(RANKS))
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


@_styled
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
    figure, axes = _figure((10.5, 4.0), title, columns=len(PAIRS))
    depth = _depth(pairs["layer"])
    for axis, (part, (name, x, y)) in zip(axes, PAIRS.items(), strict=True):
        rows = pairs[pairs["part"] == part]
        colors = depth.to_rgba(rows["layer"].to_numpy())
        axis.scatter(
            rows["concentration"], rows["similarity"], c=colors, s=26, edgecolor="white", lw=0.4, zorder=3
        )
        axis.set(xlabel=x.format(rank=rank), ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        _subtitle(axis, f"{name}: {notes[part]}")
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


def _figure(
    size: tuple[float, float], title: str, *, rows: int = 1, columns: int = 1, **share: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure, list(axes.ravel())


def _points(axis: Axes, rows: pd.DataFrame, center: str) -> None:
    """A marker and an interval for each arm, the first arm on top; an interval of NaN is left out."""
    for y, (arm, row) in enumerate(rows.iterrows()):
        color, marker, _ = look(str(arm))
        axis.plot([row["low"], row["high"]], [y, y], color=color, lw=2, marker="|", ms=7, mew=1.5)
        size = {"*": 12, "P": 9, "X": 9}.get(marker, 7)
        axis.plot(row[center], y, marker=marker, color=color, ms=size, mec="white", mew=0.6, ls="", zorder=3)


def _print(axis: Axes, values: pd.Series, form: str) -> None:
    """The numbers themselves, in a column right of the panel."""
    for y, value in enumerate(values):
        text = "–" if np.isnan(value) else format(value, form).replace("-", "−")
        axis.text(
            1.01, y, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8.5, color="#444444"
        )


def _arm_axis(axis: Axes, arms: Sequence[str]) -> None:
    axis.set_yticks(range(len(arms)), [look(arm).label for arm in arms])
    axis.set_ylim(len(arms) - 0.4, -0.6)


def _subtitle(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", color="#444444", fontsize=10)


def _count(n: pd.Series) -> str:
    return f"n = {n.min()}" if n.min() == n.max() else f"n = {n.min()} to {n.max()}"


def _render(figure: PlainFigure, kind: str, **options: Any) -> bytes:
    """Draw into memory, without the dates and versions that would make two equal figures differ."""
    quiet = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=quiet, **options)
    return buffer.getvalue()
