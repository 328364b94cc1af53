"""The questions asked of stored results: which arms are compared with which, and the figure that shows it.

``COMPARISONS`` names them, ``FIGURES`` draws them; notebooks and ``kvrepro figures`` read the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import plots, results, stats
from .errors import UserError
from .methods import method_class
from .progress import progress

METRICS = ("kl", "nll", "score")
FULL = ("full", "full-folded")
GQA, MHA = "smollm2-135m", "smollm2-135m-mha"  # one function, heads that share KV heads and heads that do not
MAIN = ("full", "streaming-llm", "snapkv", "bifocal", "selkv/evict", "selkv", "selkv/on-snapkv", "kvslimmer")


@dataclass(frozen=True)
class Comparison:
    """Arms against a baseline, one for all or one for each, on the same samples, paired."""

    question: str
    arms: tuple[str, ...]
    baseline: str | tuple[str, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each arm with its baseline."""
        one = isinstance(self.baseline, str)
        return [(arm, str(self.baseline) if one else self.baseline[i]) for i, arm in enumerate(self.arms)]


# What each method is compared with at the same budget: a merge with the eviction it is built on.
EVICTION_OF = {
    **dict.fromkeys(("h2o", "vatp", "snapkv", "pyramidkv", "bifocal", "selkv/evict"), "streaming-llm"),
    **dict.fromkeys(("look-m", "weightedkv", "kvmerger"), "h2o"),
    "selkv": "selkv/evict",
    "kvslimmer/drop-lighter": "streaming-llm",
    **dict.fromkeys(("kvslimmer", "asymkv", "kvslimmer-released"), "kvslimmer/drop-lighter"),
}
# And steps of SelKV with its eviction, which is all that is left without them.
OWN = EVICTION_OF | dict.fromkeys(("selkv/merge-all", "selkv/gate", "selkv/gate+count"), "selkv/evict")
SELECTORS = tuple(f"bifocal/{arm}" for arm in method_class("bifocal").arms)
OPERATORS = (
    "selkv/on-bifocal", "selkv/on-bifocal+gate", "selkv/on-bifocal+gated-count", "selkv/on-bifocal+merge-all", "adjacent",
    "adjacent/no-bias",
)  # fmt: skip
MERGES = ("selkv", "look-m", "weightedkv", "kvmerger", "kvslimmer", "asymkv")

COMPARISONS = {
    "selkv_snapkv": Comparison("Does SelKV beat SnapKV?", ("selkv",), "snapkv"),
    "kvslimmer_streaming": Comparison("Does KVSlimmer beat StreamingLLM?", ("kvslimmer",), "streaming-llm"),
    "bifocal_selkv": Comparison("Does Bifocal, which only selects, beat SelKV?", ("bifocal",), "selkv"),
    "gate_ablation": Comparison(
        "Does the gate help? SelKV's merges against evicting the same tokens",
        ("selkv/merge-all", "selkv/gate", "selkv/merge-all+ratio", "selkv"),
        "selkv/evict",
    ),
    "bias_ablation": Comparison(
        "Which bias helps? Biases on the gated merge against none",
        ("selkv/alpha-0.25", "selkv", "selkv/alpha-1", "selkv/gate+count", "selkv/gate+gated-count"),
        "selkv/gate",
    ),
    "plugin": Comparison(
        "Does the merge help? On each kept set, against the same tokens without it",
        ("selkv", "selkv/on-snapkv"),
        ("selkv/evict", "snapkv"),
    ),
    "weights_ablation": Comparison(
        "Does the exact rule help? Other key weights against KVSlimmer's",
        ("kvslimmer/diagonal", "kvslimmer/mass", "kvslimmer/mean", "kvslimmer/drop-lighter"),
        "kvslimmer",
    ),
    "value_ablation": Comparison(
        "How should values merge? Against KVSlimmer's sum with cardinality",
        ("kvslimmer/plain-sum", "kvslimmer/plain-mean", "kvslimmer/mass-values", "kvslimmer/as-key"),
        "kvslimmer",
    ),
    "slimmer_bias": Comparison(
        "Which bias does KVSlimmer's merge need? Against log l",
        ("kvslimmer/clamped", "kvslimmer/ratio", "kvslimmer/ratio-alpha-1", "kvslimmer/no-bias"),
        "kvslimmer",
    ),
    "own_eviction": Comparison(
        "Does merging beat evicting? Each merging method against the eviction it is built on",
        MERGES,
        tuple(EVICTION_OF[arm] for arm in MERGES),
    ),
    "against_eviction": Comparison(
        "Every method against an eviction: merging ones against their own, evictions against StreamingLLM",
        tuple(EVICTION_OF),
        tuple(EVICTION_OF.values()),
    ),
    "gradient": Comparison("Does the gradient pay? KVSlimmer against AsymKV", ("kvslimmer",), "asymkv"),
    "deviations": Comparison(
        "Which deviation of the released code matters? Each switched off alone",
        tuple(f"kvslimmer-released/{arm}" for arm in method_class("kvslimmer-released").arms),
        "kvslimmer-released",
    ),
    "printed_released": Comparison(
        "Is the released code the printed method?", ("kvslimmer-released",), "kvslimmer"
    ),
    "selectors": Comparison(
        "What matters more than the merge? Selectors, all evicting, against SelKV",
        ("selkv/evict", "snapkv", *SELECTORS, "bifocal"),
        "selkv",
    ),
    "operators": Comparison(
        "What does the rest of the tokens add? Operators against evicting on the same score",
        ("selkv", "selkv/gate", *OPERATORS),
        ("selkv/evict", "selkv/evict", *["bifocal"] * len(OPERATORS)),
    ),
    "positions": Comparison(
        "Does it help to move kept keys to consecutive positions?",
        ("streaming-llm/reindexed", "selkv/reposition"),
        ("streaming-llm", "selkv"),
    ),
}


def shares(frame: pd.DataFrame) -> list[float]:
    """The shares of entries at which there are records, the full caches aside."""
    return sorted(frame.loc[~frame["method"].isin(FULL), "retain"].unique())


def at(frame: pd.DataFrame, retain: float | None = None) -> pd.DataFrame:
    """Records at one retention (default: 0.25 where there is one, else the smallest) and the full caches."""
    if retain is None:
        there = shares(frame)
        retain = 0.25 if 0.25 in there or not there else there[0]
    return frame[frame["method"].isin(FULL) | (frame["retain"] == retain)]


def compare(
    frame: pd.DataFrame, name: str, metrics: Sequence[str] = METRICS, *, n_boot: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """A comparison of ``COMPARISONS`` by name: paired differences with bootstrap intervals, for each metric."""
    return _paired(frame, COMPARISONS[name].pairs, metrics, n_boot=n_boot, seed=seed)


def against_own(frame: pd.DataFrame, metrics: Sequence[str] = METRICS, **boot: int) -> pd.DataFrame:
    """Every arm that is there against the eviction that ``OWN`` names for it, where that is there."""
    present = results.in_order(frame["arm"], results.ARMS)
    pairs = [(arm, OWN[arm]) for arm in present if OWN.get(arm) in present]
    return _paired(repeated(frame), pairs, metrics, **boot)


def against_full(frame: pd.DataFrame, metrics: Sequence[str] = ("score", "nll"), **boot: int) -> pd.DataFrame:
    """Every arm against the full cache."""
    arms = [arm for arm in results.in_order(frame["arm"], results.ARMS) if arm not in FULL]
    return stats.compare(repeated(frame), metrics, arms, "full", **boot)


def _paired(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], metrics: Sequence[str], **boot: int
) -> pd.DataFrame:
    """Pairs of arms; those with one baseline are compared together."""
    groups: dict[str, list[str]] = {}
    for arm, baseline in pairs:
        groups.setdefault(baseline, []).append(arm)
    parts = [stats.compare(frame, metrics, arms, baseline, **boot) for baseline, arms in groups.items()]
    return pd.concat(parts, ignore_index=True)


def repeated(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of the tasks with at least two samples: with a single one, nothing it enters has an interval.

    Unchanged where no task has two.
    """
    counts = frame.groupby("task")["sample"].transform("nunique")
    return frame[counts > 1] if (counts > 1).any() else frame


def answered(frame: pd.DataFrame) -> list[str]:
    """The comparisons of ``COMPARISONS`` whose arms are all among the records."""
    present = set(frame["arm"])
    return [
        name for name, wanted in COMPARISONS.items() if {x for pair in wanted.pairs for x in pair} <= present
    ]


def main(frame: pd.DataFrame, *, n_boot: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """Score and KL of the main arms, with bootstrap intervals."""
    present = [arm for arm in MAIN if arm in set(frame["arm"])]
    return stats.means(frame, ("score", "kl"), present, n_boot=n_boot, seed=seed)


def by_task(frame: pd.DataFrame, part: str, arms: Sequence[str]) -> pd.DataFrame:
    """KL, NLL and score of some arms on the tasks whose name contains ``part``."""
    rows = frame[frame["task"].str.contains(part)]
    measures = {
        (task, metric): cell.groupby("arm")[metric].mean()
        for task, cell in rows.groupby("task")
        for metric in ("kl", "nll", "score")
    }
    return pd.DataFrame(measures).reindex([arm for arm in arms if arm in set(rows["arm"])])


# Several benchmarks in a folder


BENCHMARKS = {"longbench": "LongBench", "longbench-e": "LongBench-E", "longbench-v2": "LongBench-v2"}
RULER_KINDS = {"niah": "needles", "vt": "tracking", "cwe": "counting", "fwe": "counting", "qa": "questions"}


def benchmarks(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Records apart by what is averaged apart, by the benchmark's name, LongBench-E first.

    RULER has a part for each length, and the kinds of its tasks as categories.
    """
    parts: dict[str, pd.DataFrame] = {}
    for task, rows in frame.groupby("task", sort=False):
        source, _, name = str(task).partition("/")
        if source == "ruler":
            length, kind, *_ = name.split("_")
            source, rows = f"RULER, {length} tokens", rows.assign(category=RULER_KINDS[kind])
        if source == "ruler-made":
            source, rows = "RULER, made here", rows.assign(category=RULER_KINDS[name.split("_")[0]])
        named = BENCHMARKS.get(source, source if "RULER" in source else "offline tasks")
        parts[named] = pd.concat([parts[named], rows]) if named in parts else rows
    order = ("LongBench-E", "LongBench", "LongBench-v2")
    return {name: parts[name] for name in sorted(parts, key=lambda name: results.rank(name, order))}


def by_dataset(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Datasets x arms of one metric: a row ``(category, dataset, n)``; n is the samples that all arms have, at the least."""
    table = results.summary(frame)
    table["dataset"] = table["task"].str.rpartition("/")[2]
    table["n"] = table.groupby("task")["n"].transform("min")
    wide = table.pivot(index=["category", "dataset", "n"], columns="arm", values=metric)
    order = list(dict.fromkeys(zip(table["category"], table["dataset"], table["n"], strict=True)))
    return wide.reindex(order)[results.in_order(wide.columns, results.ARMS)]


# Over the share of entries


# Differences that a sweep shows, where both arms are there.
LASTING = (
    ("selkv", "snapkv"), ("selkv", "selkv/evict"), ("bifocal", "selkv"), ("kvslimmer", "streaming-llm"),
    ("kvslimmer", "asymkv"), ("kvslimmer", "kvslimmer/drop-lighter"),
)  # fmt: skip


def sweep(frame: pd.DataFrame, metrics: Sequence[str] = METRICS, **boot: int) -> pd.DataFrame:
    """Every arm's means at each share of entries: ``retain, metric, arm, mean, low, high, n, se``; the full cache at 1."""
    rows = repeated(frame[frame["arm"] != "full-folded"])
    parts = [(1.0, rows[rows["arm"] == "full"])] if "full" in set(rows["arm"]) else []
    parts += [(share, rows[(rows["retain"] == share) & (rows["arm"] != "full")]) for share in shares(rows)]
    tables = []
    for share, part in parts:
        arms = results.in_order(part["arm"], results.ARMS)
        tables.append(stats.means(part, metrics, arms, **boot).assign(retain=share))
    return pd.concat(tables, ignore_index=True)


def lasting(frame: pd.DataFrame, metrics: Sequence[str] = METRICS, **boot: int) -> pd.DataFrame:
    """The differences of ``LASTING`` at each share of entries: ``retain`` and the columns of ``stats.compare``."""
    tables = [pd.DataFrame()]
    for share in shares(frame):
        rows = repeated(at(frame, share))
        present = set(rows["arm"])
        pairs = [pair for pair in LASTING if set(pair) <= present]
        if pairs:
            tables.append(_paired(rows, pairs, metrics, **boot).assign(retain=share))
    return pd.concat(tables, ignore_index=True)


# The same grid on several models


def across(frames: Mapping[str, pd.DataFrame], metric: str) -> pd.DataFrame:
    """Arms x models of one metric, the average over categories."""
    columns = {
        model: results.by_category(frame, metric)["average"].droplevel("retain")
        for model, frame in frames.items()
    }
    table = pd.DataFrame(columns)
    return table.loc[results.in_order(table.index, results.ARMS)].rename_axis("arm")


def models(frames: Mapping[str, pd.DataFrame], metric: str, **boot: int) -> pd.DataFrame:
    """Every arm's mean on each model: ``model, arm, mean, low, high, n``."""
    tables = []
    for model, frame in frames.items():
        arms = results.in_order(frame["arm"], results.ARMS)
        tables.append(stats.means(repeated(frame), [metric], arms, **boot).assign(model=model))
    return pd.concat(tables, ignore_index=True)[["model", "arm", "mean", "low", "high", "n"]]


def held(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """What SelKV and KVSlimmer hold on each model, as shares of the full cache."""
    rows = {
        (model, arm): results.main_table(frame).loc[arm, ["kept_entries", "kept_bytes"]]
        for model, frame in frames.items()
        for arm in ("selkv", "kvslimmer")
    }
    return pd.DataFrame(rows).T.rename_axis(["model", "arm"])


def merging(frames: Mapping[str, pd.DataFrame], metric: str = "kl", **boot: int) -> pd.DataFrame:
    """SelKV minus its own eviction on each model; and, where both are there, shared minus separate kept sets.

    The last row pairs the samples of two models that compute the same function, with heads that share a kept set (GQA)
    and with heads that do not (MHA).
    """
    rows = [
        stats.compare(frame, [metric], ["selkv"], "selkv/evict", **boot).assign(model=model)
        for model, frame in frames.items()
    ]
    if {GQA, MHA} <= set(frames):
        both = gain({model: frames[model] for model in (GQA, MHA)}, [metric], "selkv", "selkv/evict", **boot)
        rows.append(both.assign(model="shared minus separate kept sets"))
    return pd.concat(rows, ignore_index=True).set_index("model")


def gain(
    frames: Mapping[str, pd.DataFrame], metrics: Sequence[str], arm: str, baseline: str, **boot: int
) -> pd.DataFrame:
    """An arm's difference from its baseline on the first of two models minus that on the second, sample by sample."""
    differences = []
    for model, frame in frames.items():
        one, other = (frame[frame["arm"] == name].set_index("sample") for name in (arm, baseline))
        change = {metric: one[metric] - other[metric] for metric in metrics}
        differences.append(one.assign(arm=model, **change).reset_index())
    first, second = frames
    return stats.compare(pd.concat(differences), metrics, [first], second, **boot)


def _ablation(name: str) -> Callable[[pd.DataFrame], plots.Figure]:
    return lambda frame: plots.intervals(compare(frame, name), title=COMPARISONS[name].question)


FIGURES: dict[str, Callable[[pd.DataFrame], plots.Figure]] = {
    "main_scores": lambda frame: plots.main_scores(main(frame)),
    "categories_kl": lambda frame: plots.categories(frame[frame["arm"].isin(MAIN)], "kl"),
    "categories_score": lambda frame: plots.categories(frame[frame["arm"].isin(MAIN)], "score"),
    "gate_ablation": _ablation("gate_ablation"),
    "bias_ablation": _ablation("bias_ablation"),
    "weights_ablation": _ablation("weights_ablation"),
    "value_ablation": _ablation("value_ablation"),
    "slimmer_bias": _ablation("slimmer_bias"),
    "plugin": _ablation("plugin"),
    "own_eviction": _ablation("own_eviction"),
    "deviations": _ablation("deviations"),
    "positions": _ablation("positions"),
    "selectors": _ablation("selectors"),
    "operators": _ablation("operators"),
}


def draw(folder: str | Path, to: str | Path) -> list[Path]:
    """Draw every figure whose arms are in a results folder; returns the files written (PNG, SVG, CSV).

    Figures of several benchmarks in one folder have the benchmark's name behind theirs.
    """
    parts = benchmarks(results.load(folder))
    written = []
    for benchmark, whole in parts.items():
        ending = "_" + "_".join(re.findall(r"\w+", benchmark.lower())) if len(parts) > 1 else ""
        for name, figure in progress(_figures(whole), "figures"):
            written += plots.save(figure, to, name + ending)
    if not written:
        raise UserError(
            f"no figure of {folder}; its arms answer none of the questions; run a profile's own arms"
        )
    return written


def _figures(whole: pd.DataFrame) -> Iterator[tuple[str, plots.Figure]]:
    """Those that these records can show."""
    if len(shares(whole)) > 1:
        yield "sweep", plots.sweep({"": sweep(whole)})
        if len(table := lasting(whole)):
            yield "sweep_lasting", plots.lasting({"": table})
    frame = at(whole)
    there = answered(frame)
    main = len(set(MAIN) & set(frame["arm"])) > len(MAIN) // 2  # a study has few of the main arms, or none
    for name, make in FIGURES.items():
        if name in there or (main and name not in COMPARISONS):
            yield name, make(frame)
