"""Does a run agree with another one, or with what the papers publish?

    kvrepro compare results/quick data/results/quick
    kvrepro compare results/quick --published

Two runs are compared arm by arm, at the same retention.  Where both measured the same samples (same name and, where both
record one, same digest of the text), the differences are paired; where they did not, each run's mean has its own standard
error, and only tasks that both have count.  An interval *contains 0* to the digits shown: two machines that differ in the
seventh digit of every sample agree.  One interval in twenty misses 0 where nothing differs, so runs *agree* when at least
95 % of the intervals contain it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from . import analyses, plots, published, results, stats
from .errors import UserError
from .tasks.base import CATEGORIES

METRICS = ("score", "kl", "nll", "agree")
AGREE = 0.95  # share of the intervals
AVERAGE = "average"
KEY = ["arm", "retain"]
ALONE = 1.96  # standard errors on both sides of the difference of two independent means
SETTINGS = ("profile", "context", "model", "dtype", "device", "seed")


@dataclass(frozen=True)
class Run:
    """A stored run: its records, and the settings and versions it was made with, as far as they are known."""

    name: str
    frame: pd.DataFrame
    made: dict[str, str]

    @property
    def samples(self) -> int:
        return int(self.frame["sample"].nunique())

    def __str__(self) -> str:
        what = ", ".join(
            self.made[key] for key in ("profile", "model", "dtype", "device") if key in self.made
        )
        return f"{self.name}: {what}; {self.samples} samples, {self.frame['arm'].nunique()} arms"


def read(folder: str | os.PathLike[str]) -> Run:
    """A run folder, or a carried one; errors as of :func:`kvrepro.results.load`."""
    frame = results.load(folder)
    try:
        described = json.loads((Path(folder) / results.RUN).read_text(encoding="utf-8"))
        versions = described["versions"]
        made = {key: described[key] for key in SETTINGS if key in described} | versions
    except (OSError, ValueError, LookupError, TypeError):  # records alone compare, too
        made = {}
    for key in ("model", "dtype", "device"):  # what a record says goes before what was asked for
        if key in frame:
            made[key] = ", ".join(sorted(map(str, frame[key].dropna().unique())))
    return Run(os.fspath(folder).rstrip("/"), frame, {key: str(value) for key, value in made.items()})


# Two runs


def differences(
    one: Run, other: Run, metrics: Sequence[str] = METRICS, *, n_boot: int = 10_000
) -> pd.DataFrame:
    """Every arm of both runs: the second minus the first, on average and in each category.

    Returns
    -------
    DataFrame
        ``scope`` (average, or a category), ``metric, arm, retain, one, other, diff, low, high, n`` (samples; of
        independent ones the smaller number), ``paired``, ``verdict`` (same, differs, or open: no interval).

    Raises
    ------
    UserError
        The runs share no arm at one retention, or no task.
    """
    frames = [_keyed(run.frame) for run in (one, other)]
    keys = [key for key in frames[0]["key"].unique() if key in set(frames[1]["key"])]
    if not keys:
        raise UserError(
            f"{one.name} and {other.name} share no arm at the same retention; nothing to compare; run the same arms"
        )
    parts = []
    for paired in (True, False):
        pair = _aligned(frames, keys) if paired else _apart(frames, keys)
        keys = [key for key in keys if key not in set(pair[0]["key"])]
        for scope in (AVERAGE, *results.in_order(pair[0]["category"], CATEGORIES)):
            chosen = [part if scope == AVERAGE else part[part["category"] == scope] for part in pair]
            if len(chosen[0]) and len(chosen[1]):
                parts.append(_means(chosen, metrics, paired, n_boot).assign(scope=scope, paired=paired))
    if not parts:
        raise UserError(
            f"{one.name} and {other.name} share no task; means over different texts do not compare; run the same tasks"
        )
    table = pd.concat(parts, ignore_index=True)
    trivial = table["arm"].eq("full") & table["metric"].isin(["kl", "agree"])  # 0 and 1 by definition
    table = table[~trivial]
    table["verdict"] = [_verdict(row) for row in table.to_dict("records")]
    order = ["scope", "metric", *KEY, "one", "other", "diff", "low", "high", "n", "paired", "verdict"]
    places = [results.rank(arm, results.ARMS) for arm in table["arm"]]
    return table[order].iloc[sorted(range(len(table)), key=places.__getitem__)].reset_index(drop=True)


def _keyed(frame: pd.DataFrame) -> pd.DataFrame:
    return results.one_each(frame).assign(
        key=[f"{arm}@{share:g}" for arm, share in zip(frame["arm"], frame["retain"])]
    )


def _aligned(frames: Sequence[pd.DataFrame], keys: Sequence[str]) -> list[pd.DataFrame]:
    """The records that both runs have of the same arm on the same sample, in the same order."""
    one, other = (
        frame[frame["key"].isin(keys)].set_index(["key", "sample"]).sort_index() for frame in frames
    )
    both = one.index.intersection(other.index)
    one, other = one.loc[both], other.loc[both]
    if "digest" in one and "digest" in other:
        same = one["digest"].eq(other["digest"]) | one["digest"].isna() | other["digest"].isna()
        one, other = one[same], other[same]
    return [one.reset_index(), other.reset_index()]


def _apart(frames: Sequence[pd.DataFrame], keys: Sequence[str]) -> list[pd.DataFrame]:
    """Every record of the tasks that both runs have of an arm."""
    one, other = (frame[frame["key"].isin(keys)].set_index(["key", "task"]) for frame in frames)
    both = one.index.unique().intersection(other.index.unique())
    return [frame[frame.index.isin(both)].reset_index() for frame in (one, other)]


def _means(pair: list[pd.DataFrame], metrics: Sequence[str], paired: bool, n_boot: int) -> pd.DataFrame:
    """Both means and their difference with its interval: a row a metric and arm."""
    names = list(metrics)
    # the keys take the arms' place: one arm may be there at several retentions
    one, other = (frame.assign(arm=frame["key"], retain=0.0) for frame in pair)
    arms = list(one["arm"].unique())
    if paired:
        measured = one[names].notna() & other[names].notna()
        one[names], other[names] = one[names].where(measured), other[names].where(measured)
        change = one.assign(**{name: other[name] - one[name] for name in names})
        table = stats.means(change, names, arms, n_boot=n_boot).rename(columns={"mean": "diff"})
        table["one"] = _points(one, table)
        table["other"] = _points(other, table)
    else:
        table, second = (stats.means(frame, names, arms, n_boot=n_boot) for frame in (one, other))
        table = table.rename(columns={"mean": "one"})
        table["other"], table["diff"] = second["mean"], second["mean"] - table["one"]
        reach = ALONE * np.hypot(table["se"], second["se"])
        table["low"], table["high"] = table["diff"] - reach, table["diff"] + reach
        table["n"] = np.minimum(table["n"], second["n"])
    table[KEY] = [key.rsplit("@", 1) for key in table["arm"]]
    return table.astype({"retain": float}).drop(columns="se")


def _points(frame: pd.DataFrame, table: pd.DataFrame) -> list[float]:
    """The macro average of each row's metric and arm: over samples, tasks, categories."""
    tasks = frame.groupby(["arm", "category", "task"])[list(table["metric"].unique())].mean()
    points = tasks.groupby(["arm", "category"]).mean().groupby("arm").mean()
    return [float(points.loc[arm, metric]) for arm, metric in zip(table["arm"], table["metric"])]


def _verdict(row: Mapping[Any, Any]) -> str:
    """Whether 0 lies in an interval, to the digits that the metric is printed with."""
    digits = plots.METRICS[row["metric"]].digits
    least = 0.5 * 10.0**-digits
    if np.isnan(row["low"]):
        return "same" if row["paired"] and abs(row["diff"]) < least else "open"
    return "same" if row["low"] < least and row["high"] > -least else "differs"


def notes(one: Run, other: Run) -> list[str]:
    """What differs between two runs besides their numbers, a line each."""
    found = [
        f"{key}: {one.made.get(key, 'unknown')} in the first, {other.made.get(key, 'unknown')} in the second"
        for key in dict.fromkeys([*one.made, *other.made])
        if one.made.get(key) != other.made.get(key)
    ]
    for run, rest in ((one, other), (other, one)):
        alone = results.in_order(list(set(run.frame["arm"]) - set(rest.frame["arm"])), results.ARMS)
        if alone:
            found.append(f"only in {run.name}: {', '.join(alone)}")
    return found + _settings(one.frame, other.frame)


def _settings(one: pd.DataFrame, other: pd.DataFrame) -> list[str]:
    """Arms of one name and other settings: two versions of the package may have other defaults."""
    found = []
    columns = [column for column in one if str(column).startswith("settings.") and column in other]
    first, second = (frame.drop_duplicates("arm").set_index("arm")[columns] for frame in (one, other))
    for arm in first.index.intersection(second.index):
        for column, ours, theirs in zip(columns, first.loc[arm], second.loc[arm]):
            if not pd.isna(ours) and not pd.isna(theirs) and str(ours) != str(theirs):
                name = str(column).removeprefix("settings.")
                found.append(f"{arm} has {name} {ours} in the first, {theirs} in the second")
    return found


# A run and the papers


def beside(run: Run, *, n_boot: int = 10_000) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A run's scores beside the published averages, and differences of arms beside published differences.

    Returns
    -------
    averages : DataFrame
        As of :func:`kvrepro.published.beside`.
    gaps : DataFrame
        A row a pair of arms and published column that has both: ``arm, baseline, diff, low, high, n`` measured here,
        ``where, published``, and ``verdict``: same where the published difference lies in the interval.

    Raises
    ------
    UserError
        No two of the run's arms are published side by side.
    """
    frame = analyses.at(run.frame)
    averages = published.beside(results.main_table(frame))
    columns = [column for column in averages.columns if column != "here"]
    asked = [pair for wanted in analyses.COMPARISONS.values() for pair in wanted.pairs]
    pairs = [*((arm, "full") for arm in averages.index if arm != "full"), *asked]
    rows: list[dict[str, Any]] = []
    seen: set[frozenset[str]] = set()
    for arm, baseline in pairs:
        if frozenset((arm, baseline)) in seen or not {arm, baseline} <= set(averages.index):
            continue
        seen.add(frozenset((arm, baseline)))
        told = (averages.loc[arm, columns] - averages.loc[baseline, columns]).dropna()
        if len(told):
            here = stats.compare(frame, ["score"], [arm], baseline, n_boot=n_boot).iloc[0]
            rows += [{**here, "where": where, "published": number} for where, number in told.items()]
    if not rows:
        raise UserError(
            f"{run.name} has no two arms that a paper publishes side by side; run more arms, such as full,snapkv,selkv"
        )
    gaps = pd.DataFrame(rows)
    inside = gaps["low"].le(gaps["published"]) & gaps["high"].ge(gaps["published"])
    gaps["verdict"] = np.where(gaps["low"].isna(), "open", np.where(inside, "same", "differs"))
    return averages, gaps


def apart(run: Run) -> str:
    """What lies between a run and the papers besides the numbers."""
    frame = analyses.at(run.frame)
    kinds = sorted(
        {task.partition("/")[0] if "/" in task else "offline tasks" for task in frame["task"].unique()}
    )
    shares = ", ".join(
        f"{share:.0%}" for share in sorted(frame.loc[frame["method"] != "full", "retain"].unique())
    )
    tokens = f" of at most {int(frame['n_tokens'].max()):,} tokens" if "n_tokens" in frame else ""
    return (
        f"here {run.made.get('model', 'an unknown model')}, {run.samples} samples{tokens} ({', '.join(kinds)}), "
        f"{shares or 'all'} of the entries kept; there the model, budget and length that each column names, all of "
        "LongBench's rows: other models on other rows, so levels do not compare, and differences only roughly"
    )


# For a person


def conclusion(table: pd.DataFrame, what: str) -> str:
    """One line: agrees or differs, and how many of the intervals say so.

    Examples
    --------
    >>> conclusion(pd.DataFrame({"verdict": ["same"] * 39 + ["differs", "open"]}), "differences contain 0")
    'agrees: 39 of 40 differences contain 0 (95 % intervals; 1 more has none)'
    """
    counts = table["verdict"].value_counts()
    same, without = int(counts.get("same", 0)), int(counts.get("open", 0))
    judged = len(table) - without
    more = f"; {without} more {'has' if without == 1 else 'have'} none" if without else ""
    if not judged:
        return f"open: no interval for any of {len(table)} differences; run more samples of each task"
    word = "agrees" if same >= AGREE * judged else "differs"
    return f"{word}: {same} of {judged} {what} (95 % intervals{more})"


def _most(table: pd.DataFrame) -> str:
    """The arm that is off most often, if one is."""
    off = table.loc[table["verdict"] == "differs", "arm"].value_counts()
    if not len(off):
        return ""
    arm = off.index[0]
    return f"; most often off: {plots.look(arm).label}, {off.iloc[0]} of {int(table['arm'].eq(arm).sum())}"


def text(one: Run, other: Run, table: pd.DataFrame) -> str:
    """Two runs for a terminal: what differs, a table a metric, categories, and the conclusion."""
    lines = [f"first   {one}", f"second  {other}", *(f"  {note}" for note in notes(one, other))]
    for metric in table["metric"].unique():
        label, unit, digits, _ = plots.METRICS[metric]
        rows = table[table["metric"] == metric]
        means = rows[rows["scope"] == AVERAGE]
        lines += ["", f"{label} ({unit}): second minus first, 95 % interval", ""]
        lines += _columns(
            ("method", "retain", "first", "second", "difference", "interval", "n", "samples", ""),
            [
                (
                    plots.look(row["arm"]).label, f"{row['retain']:.0%}", f"{row['one']:.{digits}f}",
                    f"{row['other']:.{digits}f}", published.signed(row["diff"], digits), _interval(row, digits),
                    str(row["n"]), "the same" if row["paired"] else "others",
                    "" if row["verdict"] == "same" else row["verdict"],
                )
                for row in means.to_dict("records")
            ],
        )  # fmt: skip
    parts = table[table["scope"] != AVERAGE]
    for metric in ("score", "kl"):
        rows = parts[parts["metric"] == metric]
        if len(rows):
            lines += [
                "",
                f"{plots.METRICS[metric].label}, by category: second minus first (* its interval leaves out 0)",
                "",
            ]
            lines += _by_category(rows, plots.METRICS[metric].digits)
    lines += ["", conclusion(table, "differences contain 0") + _most(table)]
    return "\n".join(lines)


def text_beside(run: Run, averages: pd.DataFrame, gaps: pd.DataFrame) -> str:
    """A run beside the papers for a terminal."""
    columns = [column for column in averages.columns if column in set(gaps["where"])]
    letters = {where: chr(ord("A") + place) for place, where in enumerate(columns)}
    lines = [str(run), f"what differs: {apart(run)}", ""]
    lines += [f"  {letter}  {where}" for where, letter in letters.items()]
    lines += ["", "average score (points of 100)", ""]
    told = averages[averages[columns].notna().any(axis=1)]
    lines += _columns(
        ("method", "here", *letters.values()),
        [
            (plots.look(str(arm)).label, *(_number(row[column]) for column in ("here", *columns)))
            for arm, row in told.iterrows()
        ],
    )
    lines += ["", "differences of score (points): here with its 95 % interval (* lies in it)", ""]
    rows = []
    for (arm, baseline), group in gaps.groupby(["arm", "baseline"], sort=False):
        first = group.iloc[0]
        cells = {
            row["where"]: f"{published.signed(row['published'])}{_star(row, 'same')}"
            for _, row in group.iterrows()
        }
        pair = f"{plots.look(str(arm)).label} minus {plots.look(str(baseline)).label}"
        shown = (cells.get(column, "–") for column in columns)
        rows.append((pair, published.signed(first["diff"], 1), _interval(first, 1), *shown))
    lines += _columns(("methods", "here", "interval", *letters.values()), rows)
    lines += ["", conclusion(gaps, "published differences lie in this run's intervals")]
    return "\n".join(lines)


def _by_category(rows: pd.DataFrame, digits: int) -> list[str]:
    scopes = results.in_order(rows["scope"], CATEGORIES)
    body = []
    for (arm, share), group in rows.groupby(KEY, sort=False):
        cells = {
            row["scope"]: f"{published.signed(row['diff'], digits)}{_star(row, 'differs')}"
            for _, row in group.iterrows()
        }
        body.append(
            (plots.look(str(arm)).label, f"{share:.0%}", *(cells.get(scope, "–") for scope in scopes))
        )
    return _columns(("method", "retain", *scopes), body)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in (head, *rows)
    ]


def _interval(row: Mapping[Any, Any] | pd.Series, digits: int) -> str:
    if np.isnan(row["low"]):
        return "none"
    return f"[{published.signed(row['low'], digits)}, {published.signed(row['high'], digits)}]"


def _star(row: pd.Series, verdict: str) -> str:
    return "*" if row["verdict"] == verdict else " "


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1f}"
