"""Agreement: a run against another run, and against what the papers publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .canvas import Figure, arm_axis, blank, count, styled, subtitle
from .looks import METRICS, look

OFF = "#FBE3DC"  # behind a row whose interval leaves out what it should hold
PUBLISHED = (
    ("o", "white"),
    ("s", "#222222"),
    ("^", "#9A9A9A"),
    ("D", "white"),
    ("v", "#555555"),
    ("P", "white"),
)


@styled
def agreement(
    table: pd.DataFrame, *, title: str = "Does the second run agree with the first? A shaded row does not"
) -> Figure:
    """Second run minus first, a panel a metric and a row an arm, the two means printed beside.

    Parameters
    ----------
    table
        Averages of :func:`kvrepro.compare.differences`: ``metric, arm, retain, one, other, diff, low, high, n, paired,
        verdict``.
    title
        The figure's title.
    """
    metrics = [metric for metric in ("score", "kl", "nll") if metric in set(table["metric"])]
    keys = list(dict.fromkeys(zip(table["arm"], table["retain"])))
    shares = {share for arm, share in keys if arm != "full"}
    figure, axes = blank(
        (3.0 + 3.4 * len(metrics), 2.3 + 0.34 * len(keys)), title, columns=len(metrics), sharey=True
    )
    for axis, metric in zip(axes, metrics):
        label, unit, digits, _ = METRICS[metric]
        axis.axvline(0, color="black", lw=1, zorder=1)
        for row in table[table["metric"] == metric].to_dict("records"):
            y = keys.index((row["arm"], row["retain"]))
            if row["verdict"] == "differs":
                axis.axhspan(y - 0.5, y + 0.5, color=OFF, lw=0, zorder=0)
            _interval(axis, row, y)
            axis.text(
                1.01, y, f"{row['one']:.{digits}f} → {row['other']:.{digits}f}", va="center", fontsize=8,
                color="#444444", transform=axis.get_yaxis_transform(),
            )  # fmt: skip
        axis.set_xlabel(f"difference in {label}\n({unit})")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        least = 10.0**-digits
        low, high = axis.get_xlim()
        axis.set_xlim(min(low, -least), max(high, least))  # below the digits shown everything is 0
        axis.grid(axis="y", visible=False)
    arm_axis(axes[0], [arm for arm, _ in keys])
    if len(shares) > 1:
        names = [look(arm).label + ("" if arm == "full" else f", {share:.0%}") for arm, share in keys]
        axes[0].set_yticks(range(len(keys)), names)
    kinds = table["paired"].map({True: "paired", False: "unpaired"}).unique()
    subtitle(axes[0], f"second minus first, {' and '.join(kinds)}, {count(table['n'])}")
    figure.legend(
        handles=[
            Line2D([], [], color="#555555", marker="o", mec="white", lw=2, label="difference, 95 % interval"),
            Patch(color=OFF, label="the interval leaves out 0, to the digits printed"),
        ],
        loc="outside lower center",
        ncols=2,
    )
    figure.data = table
    return figure


@styled
def beside_published(
    gaps: pd.DataFrame, *, title: str = "Do differences between methods come out as published?"
) -> Figure:
    """Differences of score between arms, here with intervals, and the published ones as marks.

    Parameters
    ----------
    gaps
        From :func:`kvrepro.compare.beside`: ``arm, baseline, diff, low, high, n, where, published, verdict``.
    title
        The figure's title.
    """
    pairs = list(dict.fromkeys(zip(gaps["arm"], gaps["baseline"])))
    places = list(dict.fromkeys(gaps["where"]))
    figure, (axis,) = blank((9.5, 2.4 + 0.42 * len(pairs) + 0.22 * len(places)), title)
    axis.axvline(0, color="black", lw=1, zorder=1)
    for y, (arm, baseline) in enumerate(pairs):
        rows = gaps[(gaps["arm"] == arm) & (gaps["baseline"] == baseline)].to_dict("records")
        _interval(axis, rows[0], y)
        for row in rows:
            marker, fill = PUBLISHED[places.index(row["where"]) % len(PUBLISHED)]
            axis.plot(row["published"], y + 0.22, marker, mfc=fill, mec="#222222", ms=6, ls="", zorder=4)
    arm_axis(axis, [arm for arm, _ in pairs])
    axis.set_yticks(
        range(len(pairs)), [f"{look(arm).label} minus {look(baseline).label}" for arm, baseline in pairs]
    )
    axis.set_xlabel("difference in task score (points of 100; right is better)")
    axis.grid(axis="y", visible=False)
    subtitle(axis, f"colour: this run with its 95 % interval, paired, {count(gaps['n'])}; black: published")
    handles = [
        Line2D([], [], marker=PUBLISHED[i % len(PUBLISHED)][0], mfc=PUBLISHED[i % len(PUBLISHED)][1], mec="#222222",
               ls="", label=place)
        for i, place in enumerate(places)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=1)
    figure.data = gaps
    return figure


def _interval(axis: Axes, row: Mapping[Any, Any], y: float) -> None:
    color, marker, _ = look(row["arm"])
    axis.plot([row["low"], row["high"]], [y, y], color=color, lw=2, marker="|", ms=7, mew=1.5, zorder=2)
    axis.plot(row["diff"], y, marker=marker, color=color, ms=7, mec="white", mew=0.6, ls="", zorder=3)
