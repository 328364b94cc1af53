"""Paired comparisons: how sure a difference between two arms is, and how small a one could have been seen.

The methods differ by tenths of a point while samples differ by tens, so only differences on the same samples
can tell them apart. Every statistic here is the macro average of :mod:`kvrepro.results` (samples to tasks,
tasks to categories, categories to one number) of per-sample differences, and its interval comes from a
bootstrap that resamples the samples within each task: tasks and categories are the fixed design, the samples
are the chance.

Resampling n samples with replacement gives (n - 1) / n of the variance that the mean of n samples has; with
five samples a task that is a fifth too little. Each task's resampled means are therefore spread by sqrt(n /
(n - 1)) around its mean (Rao and Wu, JASA 83, 1988). One sample has no spread at all: where a task has only
one, bounds, standard error and detectable difference are NaN.

Beside these, :func:`spearman`: a rank correlation over layers and heads, whose chance is the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from kvrepro.errors import UserError
from kvrepro.results import one_each

# 1.96 + 0.84 standard errors: a true difference of this size leaves the 5 % two-sided test with 80 % power.
POWER_80 = 2.8


@dataclass(frozen=True)
class Interval:
    """A mean (of differences, or of one arm) with its 95 % percentile interval.

    Attributes
    ----------
    diff
        The macro-averaged mean difference, arm minus baseline; the mean itself where there is no baseline.
    low, high
        Bounds of the interval, in the metric's unit.
    n
        Samples used: those that both arms have.
    se
        Standard error: the standard deviation over resamples.
    detectable
        The smallest true difference that this design would show with 80 % power at 5 % two-sided, 2.8
        standard errors.
    """

    diff: float
    low: float
    high: float
    n: int
    se: float
    detectable: float


def paired(
    frame: pd.DataFrame, metric: str, arm: str, baseline: str, *, n_boot: int = 10_000, seed: int = 0
) -> Interval:
    """Compare two arms on the samples that both have.

    Parameters
    ----------
    frame
        Records as :func:`kvrepro.results.load` gives them; either arm at one retention only.
    metric
        Numeric column.
    arm, baseline
        Names of arms in ``frame``.
    n_boot
        Resamples.
    seed
        Seed of the resampling; equal seeds and designs draw the same resamples.

    Returns
    -------
    Interval
        Of arm minus baseline.

    Raises
    ------
    UserError
        An arm is missing, has several retentions, or shares no sample with the other.
    """
    return _intervals(frame, [metric], [arm], baseline, n_boot, seed)[metric, arm]


def mean(frame: pd.DataFrame, metric: str, arm: str, *, n_boot: int = 10_000, seed: int = 0) -> Interval:
    """Average one arm; parameters and errors as in :func:`paired`, ``diff`` is the mean."""
    return _intervals(frame, [metric], [arm], None, n_boot, seed)[metric, arm]


def compare(
    frame: pd.DataFrame,
    metrics: Sequence[str],
    arms: Sequence[str],
    baseline: str,
    *,
    n_boot: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare several arms with one baseline.

    Parameters and errors as in :func:`paired`.

    Returns
    -------
    DataFrame
        A row a metric and arm, in the given order: ``metric, arm, baseline, diff, low, high, n, se,
        detectable``.
    """
    found = _intervals(frame, metrics, arms, baseline, n_boot, seed)
    return pd.DataFrame(
        [
            {"metric": metric, "arm": arm, "baseline": baseline, **asdict(interval)}
            for (metric, arm), interval in found.items()
        ]
    )


def means(
    frame: pd.DataFrame, metrics: Sequence[str], arms: Sequence[str], *, n_boot: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """Average several arms.

    Parameters and errors as in :func:`paired`.

    Returns
    -------
    DataFrame
        A row a metric and arm, in the given order: ``metric, arm, mean, low, high, n, se``.
    """
    found = _intervals(frame, metrics, arms, None, n_boot, seed)
    rows = [{"metric": metric, "arm": arm, **asdict(interval)} for (metric, arm), interval in found.items()]
    return pd.DataFrame(rows).rename(columns={"diff": "mean"}).drop(columns="detectable")


def verdict(low: float, high: float) -> str:
    """What a 95 % interval says of a claim that the truth lies above zero.

    ``supported`` where all of it lies above, ``contradicted`` where all of it lies below, else ``inconclusive``;
    ``no interval`` where a bound is NaN.
    """
    if np.isnan(low) or np.isnan(high):
        return "no interval"
    return "supported" if low > 0 else "contradicted" if high < 0 else "inconclusive"


def together(verdicts: Sequence[str]) -> str:
    """Of a claim in parts: supported if each is, contradicted if any is, else open."""
    for open_or_wrong in ("contradicted", "no interval", "inconclusive"):
        if open_or_wrong in verdicts:
            return open_or_wrong
    return "supported"


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with its 95 % percentile interval; ``n`` points in ``clusters`` groups."""

    rho: float
    low: float
    high: float
    n: int
    clusters: int


def spearman(x: ArrayLike, y: ArrayLike, *, n_boot: int = 10_000, seed: int = 0) -> Correlation:
    """Rank correlation of two quantities that come in groups, ties sharing their mean rank.

    Members of a group (KV heads of a layer) are not independent, so the bootstrap resamples whole groups.

    Parameters
    ----------
    x, y : array [clusters, members]
        A row a group.
    n_boot, seed
        Resamples, and the seed of the resampling.

    Returns
    -------
    Correlation
        NaN where x or y is constant. Resamples in which one is are left out; bounds are NaN below three groups.
    """
    one, two = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if one.ndim != 2 or one.shape != two.shape:
        raise ValueError(f"x and y must be [clusters, members] alike, not {one.shape} and {two.shape}")
    clusters = len(one)
    rho = float(_rank_correlation(one.reshape(1, -1), two.reshape(1, -1))[0])
    low = high = float("nan")
    if clusters > 2 and not np.isnan(rho):
        picks = np.random.default_rng(seed).integers(clusters, size=(n_boot, clusters))
        draws = _rank_correlation(one[picks].reshape(n_boot, -1), two[picks].reshape(n_boot, -1))
        low, high = (float(bound) for bound in np.nanpercentile(draws, [2.5, 97.5]))
    return Correlation(rho, low, high, one.size, clusters)


def _rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's rho of each row [.., n]; NaN where a row is constant."""
    ranks = [rankdata(rows, axis=-1) for rows in (x, y)]
    a, b = (rank - rank.mean(-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.divide((a * b).sum(-1), scale, out=np.full(len(x), np.nan), where=scale > 0)


def _intervals(
    frame: pd.DataFrame,
    metrics: Sequence[str],
    arms: Sequence[str],
    baseline: str | None,
    n_boot: int,
    seed: int,
) -> dict[tuple[str, str], Interval]:
    """One interval a (metric, arm); pairs measured on the same samples share one set of resamples."""
    names = [*arms] if baseline is None else [*arms, baseline]
    picked = one_each(_one_retain(frame, names))
    design = picked.drop_duplicates("sample").set_index("sample")[["category", "task"]].sort_index()
    columns: dict[tuple[str, str], NDArray[np.float64]] = {}
    for metric in metrics:
        wide = picked.pivot(index="sample", columns="arm", values=metric).astype(float).sort_index()
        for arm in arms:
            difference = wide[arm] if baseline is None else wide[arm] - wide[baseline]
            columns[metric, arm] = difference.to_numpy()

    by_design: dict[bytes, list[tuple[str, str]]] = {}
    for name, column in columns.items():
        measured = ~np.isnan(column)
        if not measured.any():
            partner = "" if baseline is None else f" and {baseline}"
            raise UserError(
                f"no sample has {name[0]} for {name[1]}{partner}; nothing to compare; run both on the same "
                "tasks"
            )
        by_design.setdefault(measured.tobytes(), []).append(name)

    intervals = {}
    for mask, group in by_design.items():
        measured = np.frombuffer(mask, dtype=bool)
        values = np.stack([columns[name][measured] for name in group], axis=1)  # [samples, columns]
        point, draws = _bootstrap(values, design[measured], n_boot, seed)  # [columns], [n_boot, columns]
        low, high = np.percentile(draws, [2.5, 97.5], axis=0)
        errors = draws.std(axis=0, ddof=1)
        for i, name in enumerate(group):
            se = float(errors[i])
            intervals[name] = Interval(
                float(point[i]), float(low[i]), float(high[i]), len(values), se, POWER_80 * se
            )
    return {name: intervals[name] for name in columns}


def _bootstrap(
    values: NDArray[np.float64], design: pd.DataFrame, n_boot: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Macro average of each column, and of each of its stratified resamples."""
    rng = np.random.default_rng(seed)
    tasks_of = design.groupby("category")["task"].nunique()
    point = np.zeros(values.shape[1])
    draws = np.zeros((n_boot, values.shape[1]))
    strata = design.drop_duplicates().sort_values(["category", "task"])
    for category, task in zip(strata["category"], strata["task"]):
        rows = design["category"].eq(category) & design["task"].eq(task)
        stratum = values[rows.to_numpy()]  # [n, columns]
        n = len(stratum)
        weight = 1 / (len(tasks_of) * tasks_of[category])
        center = stratum.mean(axis=0)
        picks = rng.integers(n, size=(n_boot, n)) + n * np.arange(n_boot)[:, None]  # [n_boot, n]
        counts = np.bincount(picks.ravel(), minlength=n_boot * n).reshape(n_boot, n)
        deviations = counts @ (stratum - center) / n  # [n_boot, columns]
        spread = np.sqrt(n / (n - 1)) if n > 1 else np.nan
        point += weight * center
        draws += weight * spread * deviations
    return point, point + draws


def _one_retain(frame: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    for arm in arms:
        retains = frame.loc[frame["arm"] == arm, "retain"].unique()
        if len(retains) == 0:
            raise UserError(
                f"no results of arm {arm}; there are {', '.join(sorted(frame['arm'].unique()))}; choose "
                "among them"
            )
        if len(retains) > 1:
            shares = ", ".join(f"{share:g}" for share in sorted(retains))
            raise UserError(
                f"arm {arm} was run at several retentions ({shares}); compare one at a time; filter the "
                "frame by retain"
            )
    return frame[frame["arm"].isin(arms)]
