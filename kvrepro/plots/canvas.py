"""What every figure shares: the style, a figure that carries its table, saving both, and small parts of axes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as PlainFigure

from ..errors import UserError
from ..results import write_atomic
from .looks import look

SHADE = "#E3E3E3"  # what so few samples could miss

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
        return render(self, "png", dpi=100)


P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
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
        "png": render(figure, "png", dpi=150),
        "svg": render(figure, "svg"),
        "csv": figure.data.to_csv(index=False, float_format="%.6g").encode(),
    }
    paths = []
    for ending, content in contents.items():
        path = Path(folder) / f"{name}.{ending}"
        write_atomic(path, content)
        paths.append(path)
    return paths


def blank(
    size: tuple[float, float], title: str, *, rows: int = 1, columns: int = 1, **share: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure, list(axes.ravel())


def points(axis: Axes, rows: pd.DataFrame, center: str) -> None:
    """A marker and an interval for each arm, the first arm on top; an interval of NaN is left out."""
    for y, (arm, row) in enumerate(rows.iterrows()):
        color, marker, _ = look(str(arm))
        axis.plot([row["low"], row["high"]], [y, y], color=color, lw=2, marker="|", ms=7, mew=1.5)
        size = {"*": 12, "P": 9, "X": 9}.get(marker, 7)
        axis.plot(row[center], y, marker=marker, color=color, ms=size, mec="white", mew=0.6, ls="", zorder=3)


def print_values(axis: Axes, values: pd.Series, form: str) -> None:
    """The numbers themselves, in a column right of the panel."""
    for y, value in enumerate(values):
        text = "–" if np.isnan(value) else format(value, form).replace("-", "−")
        axis.text(
            1.01, y, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8.5, color="#444444"
        )


def arm_axis(axis: Axes, arms: Sequence[str]) -> None:
    axis.set_yticks(range(len(arms)), [look(arm).label for arm in arms])
    axis.set_ylim(len(arms) - 0.4, -0.6)


def subtitle(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", color="#444444", fontsize=10)


def count(n: pd.Series) -> str:
    return f"n = {n.min()}" if n.min() == n.max() else f"n = {n.min()} to {n.max()}"


def render(figure: PlainFigure, kind: str, **options: Any) -> bytes:
    """Draw into memory, without the dates and versions that would make two equal figures differ."""
    quiet = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=quiet, **options)
    return buffer.getvalue()
