"""Intervals: right on average, equal to scipy's where scipy has the case, and stratified as promised."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
from scipy.stats import bootstrap

from kvrepro import stats
from kvrepro.errors import UserError


def frame(
    columns: dict[str, np.ndarray], tasks: list[tuple[str, str]] | None = None, **more: object
) -> pd.DataFrame:
    """Records of several arms on the same samples; tasks names each sample's category and task."""
    n = len(next(iter(columns.values())))
    tasks = tasks or [("code", "lcc")] * n
    return pd.concat(
        pd.DataFrame(
            {
                "sample": [f"{task}/{i}" for i, (_, task) in enumerate(tasks)],
                "category": [category for category, _ in tasks],
                "task": [task for _, task in tasks],
                "arm": arm,
                "retain": 0.25,
                "score": score,
                **more,
            }
        )
        for arm, score in columns.items()
    )


def test_one_task_agrees_with_scipy():
    rng = np.random.default_rng(3)
    base = rng.normal(50, 20, 80)
    arm = base + rng.gamma(1.0, 2.0, 80)  # skewed, so that percentiles are not just the normal ones
    ours = stats.paired(frame({"selkv": arm, "full": base}), "score", "selkv", "full", n_boot=20_000)
    theirs = bootstrap(
        (arm, base),
        lambda a, b, axis: (a - b).mean(axis=axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(4),
    )
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert ours.diff == pytest.approx((arm - base).mean(), abs=1e-12)
    # apart by resampling noise and by sqrt(80 / 79)
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.03 * width)
    assert ours.se == pytest.approx(np.std(arm - base, ddof=1) / np.sqrt(80), rel=0.02)
    assert ours.detectable == pytest.approx(2.8 * ours.se)
    assert ours.n == 80


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Six categories of five samples: here the uncorrected bootstrap would cover 91 %."""
    rng = np.random.default_rng(0)
    tasks = [(f"c{i // 5}", f"t{i // 5}") for i in range(30)]
    runs = 600
    columns = {f"arm{r}": rng.normal(0.5, 3.0, 30) for r in range(runs)} | {"full": np.zeros(30)}
    table = stats.compare(frame(columns, tasks), ["score"], list(columns)[:-1], "full", n_boot=1000)
    covered = ((table["low"] <= 0.5) & (table["high"] >= 0.5)).mean()
    assert 0.92 <= covered <= 0.97  # 0.95 less what 30 samples cost; standard error 0.009
    # and a true difference of the detectable size is seen in about 80 % of the cases
    shifted = table["diff"] - 0.5 + 2.8 * 3.0 / np.sqrt(30)
    half = (table["high"] - table["low"]) / 2
    assert 0.74 <= (shifted > half).mean() <= 0.88


def test_equal_arms_differ_by_exactly_nothing():
    values = np.random.default_rng(1).normal(size=20)
    interval = stats.paired(frame({"a": values, "full": values.copy()}), "score", "a", "full")
    assert interval == stats.Interval(0.0, 0.0, 0.0, 20, 0.0, 0.0)


def test_strata_are_kept_and_categories_weigh_the_same():
    """Each task's differences are constant, so resampling within tasks has no spread; across tasks it would."""
    tasks = [("code", "lcc")] * 2 + [("code", "repo")] * 4 + [("synthetic", "count")] * 6
    differences = np.array([1.0] * 2 + [3.0] * 4 + [-4.0] * 6)
    data = frame({"a": differences, "full": np.zeros(12)}, tasks)
    interval = stats.paired(data, "score", "a", "full", n_boot=500)
    # category code: (1 + 3) / 2 = 2; macro: (2 - 4) / 2 = -1, whatever the number of samples
    assert (interval.diff, interval.low, interval.high, interval.se) == (-1.0, -1.0, -1.0, 0.0)


def test_a_task_of_one_sample_has_no_interval():
    tasks = [("code", "lcc")] * 5 + [("code", "repo")]
    data = frame({"a": np.arange(6.0), "full": np.zeros(6)}, tasks)
    interval = stats.paired(data, "score", "a", "full", n_boot=100)
    assert (interval.diff, interval.n) == (3.5, 6)
    assert np.isnan([interval.low, interval.high, interval.se, interval.detectable]).all()


def test_only_samples_of_both_arms_count():
    data = frame({"a": np.array([1.0, 2.0, 3.0, np.nan, 5.0]), "full": np.zeros(5), "b": np.ones(5)})
    data = data[~((data["arm"] == "full") & (data["sample"] == "lcc/0"))]
    table = stats.compare(data, ["score"], ["a", "b"], "full", n_boot=200)
    assert list(table["n"]) == [3, 4]  # a lacks one measure, full lacks one record
    assert table["diff"][0] == pytest.approx((2 + 3 + 5) / 3)
    alone = stats.paired(data, "score", "b", "full", n_boot=200)
    assert tuple(table.loc[1, ["diff", "low", "high", "se"]]) == (alone.diff, alone.low, alone.high, alone.se)


def test_seeds_fix_the_resamples():
    data = frame({"a": np.random.default_rng(5).normal(size=30), "full": np.zeros(30)})
    first, again = (stats.paired(data, "score", "a", "full", n_boot=300) for _ in range(2))
    other = stats.paired(data, "score", "a", "full", n_boot=300, seed=1)
    assert first == again
    assert first.low != other.low


def test_means_have_intervals_too():
    values = np.random.default_rng(6).normal(40, 10, 100)
    data = frame({"a": values, "full": np.zeros(100)})
    interval = stats.mean(data, "score", "a")
    assert interval.diff == pytest.approx(values.mean())
    half = 1.96 * values.std(ddof=1) / 10
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    table = stats.means(data, ["score"], ["a", "full"])
    assert list(table.columns) == ["metric", "arm", "mean", "low", "high", "n", "se"]
    assert table["low"][0] == interval.low


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[data["arm"] != "full"], "no results of arm full; there are a"),
        (
            lambda data: pd.concat([data, data.assign(retain=0.5)]),
            r"arm a was run at several retentions \(0.25, 0.5\)",
        ),
        (
            lambda data: data[(data["arm"] == "a") == (data["sample"] == "lcc/0")],
            "no sample has score for a and full",
        ),
        (lambda data: pd.concat([data, data]), "arm a has several settings"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, message):
    data = frame({"a": np.arange(3.0), "full": np.zeros(3)})
    with pytest.raises(UserError, match=message):
        stats.paired(change(data), "score", "a", "full", n_boot=10)


def test_a_whole_ablation_takes_about_a_second():
    rng = np.random.default_rng(7)
    tasks = [(f"c{i // 16}", f"t{i // 8}") for i in range(96)]
    arms = {f"arm{a}": rng.normal(size=96) for a in range(14)}
    start = time.perf_counter()
    stats.compare(frame(arms, tasks), ["score"], list(arms)[1:], "arm0")
    assert time.perf_counter() - start < 5  # 0.1 s on an idle core
