"""The questions asked of stored results: which arms are compared with which, and the figure that shows it.

``COMPARISONS`` names them, ``FIGURES`` draws them; notebooks and ``kvrepro figures`` read the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import plots, results, stats
from .methods import method_class

METRICS = ("kl", "nll", "score")
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


def at(frame: pd.DataFrame, retain: float | None = None) -> pd.DataFrame:
    """Records at one retention (default: 0.25 where there is one, else the smallest) and the full caches."""
    shares = sorted(frame.loc[~frame["method"].isin(("full", "full-folded")), "retain"].unique())
    if retain is None:
        retain = 0.25 if 0.25 in shares or not shares else shares[0]
    return frame[frame["method"].isin(("full", "full-folded")) | (frame["retain"] == retain)]


def compare(
    frame: pd.DataFrame, name: str, metrics: Sequence[str] = METRICS, *, n_boot: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """A comparison of ``COMPARISONS`` by name: paired differences with bootstrap intervals, for each metric."""
    groups: dict[str, list[str]] = {}
    for arm, baseline in COMPARISONS[name].pairs:
        groups.setdefault(baseline, []).append(arm)
    parts = [
        stats.compare(frame, metrics, arms, baseline, n_boot=n_boot, seed=seed)
        for baseline, arms in groups.items()
    ]
    return pd.concat(parts, ignore_index=True)


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


# The same grid on several models


def across(frames: Mapping[str, pd.DataFrame], metric: str) -> pd.DataFrame:
    """Arms x models of one metric, the average over categories."""
    columns = {
        model: results.by_category(frame, metric)["average"].droplevel("retain")
        for model, frame in frames.items()
    }
    table = pd.DataFrame(columns)
    return table.loc[results.in_order(table.index, results.ARMS)].rename_axis("arm")


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
    """Draw every figure whose arms are in a results folder; returns the files written (PNG, SVG, CSV)."""
    frame = at(results.load(folder))
    there = answered(frame)
    main = len(set(MAIN) & set(frame["arm"])) > len(MAIN) // 2  # a study has few of the main arms, or none
    written = []
    for name, make in FIGURES.items():
        if name in there or (main and name not in COMPARISONS):
            written += plots.save(make(frame), to, name)
    return written
