"""The questions asked of stored results: which arms are compared with which, and the figure that shows it.

``COMPARISONS`` names them, ``FIGURES`` draws them; notebooks and ``kvrepro figures`` read the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import plots, results, stats

METRICS = ("kl", "nll", "score")
MAIN = ("full", "streaming-llm", "snapkv", "selkv/evict", "selkv", "selkv/on-snapkv", "kvslimmer")


@dataclass(frozen=True)
class Comparison:
    """Arms against a baseline on the same samples, paired."""

    question: str
    arms: tuple[str, ...]
    baseline: str


COMPARISONS = {
    "selkv_snapkv": Comparison("Does SelKV beat SnapKV?", ("selkv",), "snapkv"),
    "kvslimmer_streaming": Comparison("Does KVSlimmer beat StreamingLLM?", ("kvslimmer",), "streaming-llm"),
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
    "plugin_selkv": Comparison("Does the merge help on SelKV's own kept set?", ("selkv",), "selkv/evict"),
    "plugin_snapkv": Comparison("Does the merge help on SnapKV's kept set?", ("selkv/on-snapkv",), "snapkv"),
}


def at(frame: pd.DataFrame, retain: float | None = None) -> pd.DataFrame:
    """Records at one retention (default: 0.25 where there is one, else the smallest) and the full caches."""
    shares = sorted(frame.loc[~frame["method"].isin(("full", "full-folded")), "retain"].unique())
    if retain is None:
        retain = 0.25 if 0.25 in shares or not shares else shares[0]
    return frame[frame["method"].isin(("full", "full-folded")) | (frame["retain"] == retain)]


def compare(frame: pd.DataFrame, name: str, *, n_boot: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """A comparison of ``COMPARISONS`` by name: paired differences with bootstrap intervals, for each metric."""
    chosen = COMPARISONS[name]
    return stats.compare(frame, METRICS, chosen.arms, chosen.baseline, n_boot=n_boot, seed=seed)


def plugin(frame: pd.DataFrame, *, n_boot: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """Selector x {evict, merge + bias}: each selector's merge against its own eviction."""
    parts = [compare(frame, name, n_boot=n_boot, seed=seed) for name in ("plugin_selkv", "plugin_snapkv")]
    return pd.concat(parts, ignore_index=True)


def main(frame: pd.DataFrame, *, n_boot: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """Score and KL of the main arms, with bootstrap intervals."""
    present = [arm for arm in MAIN if arm in set(frame["arm"])]
    return stats.means(frame, ("score", "kl"), present, n_boot=n_boot, seed=seed)


def _ablation(name: str) -> Callable[[pd.DataFrame], plots.Figure]:
    return lambda frame: plots.intervals(compare(frame, name), title=COMPARISONS[name].question)


FIGURES: dict[str, Callable[[pd.DataFrame], plots.Figure]] = {
    "main_scores": lambda frame: plots.main_scores(main(frame)),
    "categories_kl": lambda frame: plots.categories(frame[frame["arm"].isin(MAIN)], "kl"),
    "categories_score": lambda frame: plots.categories(frame[frame["arm"].isin(MAIN)], "score"),
    "gate_ablation": _ablation("gate_ablation"),
    "bias_ablation": _ablation("bias_ablation"),
    "plugin": lambda frame: plots.intervals(
        plugin(frame), title="Does the merge help? On each kept set, against the same tokens without it"
    ),
}


def draw(folder: str | Path, to: str | Path) -> list[Path]:
    """Draw every figure whose arms are in a results folder; returns the files written (PNG, SVG, CSV)."""
    frame = at(results.load(folder))
    present = set(frame["arm"])
    needs = {
        "gate_ablation": COMPARISONS["gate_ablation"],
        "bias_ablation": COMPARISONS["bias_ablation"],
    }
    written = []
    for name, make in FIGURES.items():
        wanted = needs.get(name)
        arms = {*wanted.arms, wanted.baseline} if wanted else set()
        if name == "plugin":
            arms = {"selkv", "selkv/evict", "selkv/on-snapkv", "snapkv"}
        if arms <= present:
            written += plots.save(make(frame), to, name)
    return written
