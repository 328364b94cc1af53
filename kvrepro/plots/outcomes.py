"""Outcomes: scores, distances and paired differences of methods, by category and by model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..errors import UserError
from ..results import ARMS, by_category, in_order
from .canvas import SHADE, Figure, arm_axis, blank, count, points, print_values, styled, subtitle
from .looks import METRICS, look


@styled
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
    figure, axes = blank((10.5, 1.7 + 0.34 * len(arms)), title, columns=len(metrics), sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        rows = means[means["metric"] == metric].set_index("arm").reindex(arms)
        if "full" in arms:
            axis.axvline(rows.loc["full", "mean"], color=look("full").color, lw=1, ls=":", zorder=1)
        points(axis, rows, "mean")
        print_values(axis, rows["mean"], f".{METRICS[metric].digits}f")
        axis.set_xlabel(
            f"{METRICS[metric].label}\n({METRICS[metric].unit}; {METRICS[metric].better} is better)"
        )
    arm_axis(axes[0], arms)
    subtitle(axes[0], f"mean over categories and its 95 % interval, {count(means['n'])}")
    figure.data = means
    return figure


@styled
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
    label = METRICS[metric].label
    title = title or f"Where is the loss? {label[0].upper()}{label[1:]}, by category"
    figure, axis = _heat(table, metric, title)
    axis.set_xticklabels(list(table.columns), rotation=20, ha="right", rotation_mode="anchor")
    axis.axvline(table.shape[1] - 1, color="black", lw=1.5)  # the average stands apart
    figure.data = table.reset_index()
    return figure


@styled
def datasets(table: pd.DataFrame, metric: str = "kl", *, title: str) -> Figure:
    """Heat map of one metric, arms x datasets, read as :func:`categories`; a line parts the categories.

    Parameters
    ----------
    table
        From :func:`kvrepro.analyses.by_dataset`: a row ``(category, dataset, n)``, a column an arm.
    metric
        The metric it is of.
    title
        The figure's title.
    """
    wide = table.T.rename_axis(index="arm")
    names, groups = wide.columns, wide.columns.get_level_values("category")
    figure, axis = _heat(wide.set_axis(names.get_level_values("dataset"), axis=1), metric, title, 0.85)
    ticks = [f"{dataset}\n{category}, n = {n}" for category, dataset, n in wide.columns.to_frame().to_numpy()]
    axis.set_xticklabels(ticks, rotation=35, ha="right", rotation_mode="anchor")
    for place in range(1, len(groups)):
        if groups[place] != groups[place - 1]:
            axis.axvline(place, color="black", lw=1.5)
    figure.data = table.reset_index()
    return figure


def _heat(table: pd.DataFrame, metric: str, title: str, width: float = 1.05) -> tuple[Figure, Axes]:
    """Arms x columns with the number in each cell, coloured by the difference from the full cache where there is one."""
    _, unit, digits, better = METRICS[metric]
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
    figure, axes = blank((max(7.0, 3.4 + width * table.shape[1]), 2.1 + 0.34 * len(table)), title)
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
    subtitle(axes[0], f"number: {unit}; {colors}")
    return figure, axes[0]


@styled
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
    figure, axes = blank(
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
        points(axis, rows, "diff")
        print_values(axis, rows["diff"], f"+.{digits + 1}f")
        axis.set_xlabel(f"difference in {label}\n({unit}; {better} is better)")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        if not np.nan_to_num(rows[["diff", "low", "high"]].to_numpy(dtype=float)).any():
            axis.set_xlim(-1, 1)  # all samples tie: a scale of its own would be rounding noise
        axis.grid(axis="y", visible=False)
    arm_axis(axes[0], arms)
    if one:
        against = f"each minus \u201c{look(baselines.iloc[0]).label}\u201d"
    else:
        against = "each minus the arm named below it"
        labels = [f"{look(arm).label}\nminus {look(baselines[arm]).label}" for arm in arms]
        axes[0].set_yticks(range(len(arms)), labels)
    subtitle(axes[0], f"{against}, paired, {count(comparison['n'])}")
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


@styled
def across(means: pd.DataFrame, metric: str = "kl", *, title: str | None = None) -> Figure:
    """Arms x models, with intervals: does an order that holds on one model hold on another?

    Parameters
    ----------
    means
        From :func:`kvrepro.analyses.models`: ``model, arm, mean, low, high, n``.
    metric
        The metric they are of, a key of ``METRICS``.
    title
        The figure's title.
    """
    label, unit, _, better = METRICS[metric]
    means = means[means["arm"] != "full"]
    arms, models = in_order(means["arm"], ARMS), list(means["model"].unique())
    figure, axes = blank(
        (8.5, 1.9 + (0.16 + 0.12 * len(models)) * len(arms)),
        title or f"{label[0].upper()}{label[1:]}, by method and model",
    )
    axis = axes[0]
    shapes = (("o", "#222222"), ("s", "white"), ("^", "#9A9A9A"), ("D", "#555555"), ("v", "white"))
    for i, ((marker, fill), model) in enumerate(zip(shapes, models)):
        rows = means[means["model"] == model].set_index("arm").reindex(arms)
        # one below the other: none covers another
        y = np.arange(len(arms)) + 0.22 * (i - (len(models) - 1) / 2)
        axis.hlines(y, rows["low"], rows["high"], color="#777777", lw=1.2)
        named = f"{model}, {count(means.loc[means['model'] == model, 'n'])}"
        axis.plot(rows["mean"], y, marker, mfc=fill, mec="#222222", ms=6, label=named, ls="", zorder=3)
    arm_axis(axis, arms)
    for tick, arm in zip(axis.get_yticklabels(), arms):
        tick.set_color(look(arm).color)
    for place in range(1, len(arms)):
        axis.axhline(place - 0.5, color="#DDDDDD", lw=0.8, zorder=0)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"{label} ({unit}; {better} is better)")
    subtitle(axis, "mean over categories and its 95 % interval")
    figure.legend(loc="outside lower center", ncols=min(len(models), 2))
    figure.data = means
    return figure
