"""Questions asked of records: each arm against its own baseline, several models side by side, what a study says in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvrepro import analyses, plots
from kvrepro.measure import readings
from kvrepro.tasks.base import CATEGORIES


def records(kl: dict[str, float], n: int = 6, seed: int = 0) -> pd.DataFrame:
    """Samples in six categories (one is a needle task), each arm around its KL, with noise that all arms share."""
    rng = np.random.default_rng(seed)
    rows = []
    for category in CATEGORIES:
        task = "needle-single" if category == "synthetic" else f"task-{category}"
        for i in range(n):
            common, own = rng.normal(0, 0.05), rng.normal(0, 0.001, len(kl))
            rows += [
                {
                    "sample": f"{task}/{i}", "task": task, "category": category, "arm": arm,
                    "method": arm.partition("/")[0], "retain": 1.0 if arm == "full" else 0.25,
                    "kl": level + common + noise, "nll": 2 * level + common, "agree": 0.5, "score": 10.0,
                    "kept_entries": 1.0 if arm == "full" else 0.25, "kept_bytes": 1.0 if arm == "full" else 0.3,
                    "diag.mass_share": 0.5, "diag.outside": 3.0,
                }
                for (arm, level), noise in zip(kl.items(), own, strict=True)
            ]  # fmt: skip
    return pd.DataFrame(rows)


def test_every_arm_is_compared_with_its_own_baseline() -> None:
    frame = records({"selkv": 0.5, "selkv/evict": 0.4, "selkv/on-snapkv": 0.2, "snapkv": 0.3})
    table = analyses.compare(frame, "plugin").query("metric == 'kl'").set_index("arm")
    assert dict(table["baseline"]) == {"selkv": "selkv/evict", "selkv/on-snapkv": "snapkv"}
    assert table.loc["selkv", "diff"] == pytest.approx(0.1, abs=0.002)
    assert table.loc["selkv/on-snapkv", "diff"] == pytest.approx(-0.1, abs=0.002)
    shown = readings.differences(analyses.compare(frame, "plugin"))
    assert list(shown["minus"]) == ["SelKV: evict only", "SnapKV"]


def test_only_comparisons_whose_arms_are_there_are_answered(tmp_path: Path) -> None:
    frame = records({"selkv": 0.5, "selkv/evict": 0.4, "selkv/on-snapkv": 0.2, "snapkv": 0.3})
    assert analyses.answered(frame) == ["selkv_snapkv", "plugin"]
    assert analyses.answered(frame[frame["arm"] != "snapkv"]) == []


def test_every_method_has_an_eviction_to_be_held_against() -> None:
    from kvrepro.studies import STUDIES

    arms = set(STUDIES["methods"].arms) - {"full", "streaming-llm"}
    assert set(analyses.EVICTION_OF) == arms
    assert set(analyses.EVICTION_OF.values()) <= set(STUDIES["methods"].arms)


def test_models_stand_side_by_side_in_the_order_of_arms() -> None:
    frames = {
        "a": records({"full": 0.0, "kvslimmer": 0.6, "selkv": 0.4}),
        "b": records({"full": 0.0, "selkv": 0.9}),
    }
    table = analyses.across(frames, "kl")
    assert list(table.index) == ["full", "selkv", "kvslimmer"] and list(table.columns) == ["a", "b"]
    assert table.loc["selkv", "b"] - table.loc["selkv", "a"] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(table.loc["kvslimmer", "b"])
    figure = plots.across(table, "kl")
    assert "full" not in figure.axes[0].get_yticklabels()[0].get_text()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_the_gain_of_shared_kept_sets_is_paired_over_samples() -> None:
    gqa = records({"selkv": 0.5, "selkv/evict": 0.4})
    mha = records({"selkv": 0.35, "selkv/evict": 0.4}, seed=1)
    table = analyses.merging({analyses.GQA: gqa, analyses.MHA: mha})
    assert table.loc[analyses.GQA, "diff"] == pytest.approx(0.1, abs=0.002)
    assert table.loc[analyses.MHA, "diff"] == pytest.approx(-0.05, abs=0.002)
    last = table.loc["shared minus separate kept sets"]
    assert last["diff"] == pytest.approx(0.15, abs=0.002) and last["low"] > 0
    assert len(analyses.merging({"another": gqa})) == 1
    assert readings.merging(table).loc[analyses.MHA, "difference [95 %]"].startswith(("−0.049", "−0.050"))


def test_how_much_closer_is_said_with_the_categories_that_are_worse() -> None:
    frame = records({"selkv": 0.4, "bifocal": 0.1})
    frame["kl"] = frame["arm"].map({"selkv": 0.4, "bifocal": 0.1})
    assert "**−75%** on average (single-doc −75%" in readings.closer(frame, "bifocal", "selkv")
    assert readings.closer(frame, "bifocal", "selkv").endswith("Worse nowhere.")
    frame.loc[(frame["arm"] == "bifocal") & (frame["category"] == "code"), "kl"] = 0.8
    assert "Worse in code (+" in readings.closer(frame, "bifocal", "selkv")


def test_needles_are_shown_alone() -> None:
    table = analyses.by_task(
        records({"selkv": 0.4, "bifocal": 0.1}), "needle", ["bifocal", "selkv", "absent"]
    )
    assert list(table.index) == ["bifocal", "selkv"]
    assert set(table.columns) == {("needle-single", metric) for metric in ("kl", "nll", "score")}


def test_what_merging_lost_is_a_table_for_people() -> None:
    table = readings.guards(records({"kvslimmer": 0.4}), ["kvslimmer", "absent"])
    assert (
        table.loc["KVSlimmer", "share: Σ l"] == 0.5 and table.loc["KVSlimmer", "weight outside 0 to 1"] == 3
    )


def test_shares_of_entries_and_bytes_for_each_model() -> None:
    table = analyses.held({"a": records({"full": 0.0, "selkv": 0.4, "kvslimmer": 0.5})})
    assert table.loc[("a", "selkv"), "kept_bytes"] == pytest.approx(0.3)
