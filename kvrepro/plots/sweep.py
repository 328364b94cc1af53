"""Over the share of entries kept: where each method stands, and which differences last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from ..results import ARMS, in_order
from .canvas import Figure, blank, count, styled, subtitle
from .looks import METRICS, Look, look

FLOOR = 1e-4  # nats; KL below it is drawn at it, on the logarithmic axis
FULL = ("full", "full-folded")


@styled
def sweep(
    panels: Mapping[str, pd.DataFrame], *, title: str = "How does each method stand from 10 to 90 %?"
) -> Figure:
    """Metrics against the share of entries kept, with intervals; the full cache is a dotted line.

    Parameters
    ----------
    panels
        By the panel's name, from :func:`kvrepro.analyses.sweep`: ``retain, metric, arm, mean, low, high, n``.  Arms of one
        panel share their samples; those of another have their own, so a panel has its own full cache.
    title
        The figure's title.
    """
    arms = in_order(pd.concat(list(panels.values()))["arm"], ARMS)
    lines = {arm: look(arm) for arm in arms if arm not in FULL}
    figure, grid = _grid(panels, title)
    for column, table in zip(grid.T, panels.values(), strict=True):
        for axis, (metric, rows) in zip(column, table.groupby("metric", sort=False), strict=True):
            if metric == "kl":
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.yaxis.set_minor_locator(NullLocator())
                rows = rows.assign(**rows[["mean", "low", "high"]].clip(lower=FLOOR))
            elif len(full := rows[rows["arm"] == "full"]):
                axis.axhline(full["mean"].iloc[0], color=look("full").color, lw=1.2, ls=":", zorder=1)
            _lines(axis, {arm: rows[rows["arm"] == arm] for arm in lines}, lines, "mean")
            if metric == "kl":
                low, high = axis.get_ylim()
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    for axis, metric in zip(grid[:, 0], _metrics(panels), strict=True):
        log = ", log scale" if metric == "kl" else ""
        axis.set_ylabel(f"{METRICS[metric].label}\n({METRICS[metric].unit}{log})")
    _legend(figure, lines, [Line2D([], [], color=look("full").color, lw=1.2, ls=":", label="full cache")])
    figure.data = _joined(panels)
    return figure


@styled
def lasting(
    panels: Mapping[str, pd.DataFrame], *, title: str = "Which differences last from 10 to 90 %?"
) -> Figure:
    """Paired differences against the share of entries kept, with intervals.

    Parameters
    ----------
    panels
        By the panel's name, from :func:`kvrepro.analyses.lasting`: ``retain, metric, arm, baseline, diff, low, high, n``.
    title
        The figure's title.
    """
    lines: dict[str, Look] = {}
    for arm, baseline in pd.concat(list(panels.values()))[["arm", "baseline"]].drop_duplicates().to_numpy():
        taken = {line.color for line in lines.values()}
        drawn = next(one for one in (look(arm), look(baseline)) if one.color not in taken)
        label = f"{look(arm).label} minus {look(baseline).label}"
        lines[f"{arm} {baseline}"] = drawn._replace(label=label)
    figure, grid = _grid(panels, title)
    for column, table in zip(grid.T, panels.values(), strict=True):
        names = table["arm"] + " " + table["baseline"]
        for axis, (_, rows) in zip(column, table.groupby("metric", sort=False), strict=True):
            axis.axhline(0, color="black", lw=1, zorder=1)
            if not np.nan_to_num(rows[["diff", "low", "high"]].to_numpy(dtype=float)).any():
                axis.set_ylim(-1, 1)  # all samples tie: a scale of its own would be rounding noise
            _lines(axis, {name: rows[names.loc[rows.index] == name] for name in lines}, lines, "diff")
    for axis, metric in zip(grid[:, 0], _metrics(panels), strict=True):
        side = {"left": "below", "right": "above"}[METRICS[metric].better]
        label = f"difference in {METRICS[metric].label}\n({METRICS[metric].unit}; {side} 0 is better)"
        axis.set_ylabel(label, fontsize=9)
    _legend(figure, lines)
    figure.data = _joined(panels)
    return figure


def _metrics(panels: Mapping[str, pd.DataFrame]) -> list[str]:
    return list(next(iter(panels.values()))["metric"].unique())


def _grid(panels: Mapping[str, pd.DataFrame], title: str) -> tuple[Figure, np.ndarray]:
    """A row a metric, a column a panel, each with a scale of its own: its samples are, too."""
    rows = len(_metrics(panels))
    size = (max(7.5, 5.4 * len(panels)), 1.6 + 2.6 * rows)
    figure, axes = blank(size, title, rows=rows, columns=len(panels), sharex=True)
    grid = np.array(axes, dtype=object).reshape(rows, len(panels))
    shares = sorted({x for table in panels.values() for x in table.loc[~table["arm"].isin(FULL), "retain"]})
    for (name, table), column in zip(panels.items(), grid.T, strict=True):
        subtitle(column[0], ", ".join(filter(None, (name, count(table["n"])))))
        column[-1].set_xlabel("share of the entries kept")
        column[-1].set_xticks(shares)
        column[-1].xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axis in column:
            axis.grid(axis="x", visible=False)
    return figure, grid


def _lines(axis: Axes, tables: dict[str, pd.DataFrame], looks: dict[str, Look], center: str) -> None:
    """A line with intervals for each table that has rows, side by side, so that none covers another."""
    drawn = {name: rows for name, rows in tables.items() if len(rows)}
    for i, (name, rows) in enumerate(drawn.items()):
        color, marker, _ = looks[name]
        x = rows["retain"] + 0.011 * (i - (len(drawn) - 1) / 2)
        axis.vlines(x, rows["low"], rows["high"], color=color, lw=1.4, alpha=0.65)
        size = {"*": 10, "P": 8, "X": 8}.get(marker, 6)
        marked: dict[str, Any] = {"marker": marker, "ms": size, "mec": "white", "mew": 0.5}
        axis.plot(x, rows[center], color=color, lw=1.1, zorder=3, **marked)


def _legend(figure: Figure, lines: dict[str, Look], more: list[Line2D] | None = None) -> None:
    handles = [
        Line2D([], [], color=line.color, marker=line.marker, ms=7, mec="white", mew=0.5, label=line.label)
        for line in lines.values()
    ]
    handles = [*(more or []), *handles]
    width = int(figure.get_figwidth() // 2.6)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), width))


def _joined(panels: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([table.assign(panel=name) for name, table in panels.items()], ignore_index=True)
