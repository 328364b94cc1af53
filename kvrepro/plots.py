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
from matplotlib.colors import PowerNorm, to_rgb
from matplotlib.figure import Figure as PlainFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

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
    """Return an arm's colour, marker and label; grey and its own name for one that is not ours."""
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
