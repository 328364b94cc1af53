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
    means = analyses.models(frames, "kl", n_boot=50)
    assert set(zip(means["model"], means["arm"])) == {(m, a) for m in "ab" for a in frames[m]["arm"]}
    figure = plots.across(means, "kl")
    assert "full" not in figure.axes[0].get_yticklabels()[0].get_text()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a, n = 36", "b, n = 36"]


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


# Several benchmarks, several shares


def named(source: str, tasks: dict[str, int], kl: dict[str, float]) -> pd.DataFrame:
    """Rows of some tasks, so many of each."""
    frames = []
    for task, n in tasks.items():
        one = records(kl, n=n)
        one = one[one["category"] == "code"]
        frames.append(one.assign(task=source + task, sample=source + task + one["sample"].str[-2:]))
    return pd.concat(frames, ignore_index=True)


def test_benchmarks_are_averaged_apart() -> None:
    kl = {"full": 0.0, "selkv": 0.2}
    frame = pd.concat(
        [
            named("longbench/", {"lcc": 2, "qmsum": 1}, kl), named("longbench-e/", {"lcc": 3}, kl),
            named("", {"longbench-v2": 2, "pydoc-code": 2}, kl), named("ruler-made/", {"vt": 2, "niah_single_1": 2}, kl),
            named("ruler/", {"4096_vt": 2, "8192_vt": 2, "4096_niah_single_1": 2, "4096_cwe": 2, "4096_qa_1": 2}, kl),
        ]
    )  # fmt: skip
    parts = analyses.benchmarks(frame)
    assert list(parts) == [
        "LongBench-E", "LongBench", "LongBench-v2", "RULER, 4096 tokens", "RULER, 8192 tokens", "RULER, made here",
        "offline tasks",
    ]  # fmt: skip
    assert sum(map(len, parts.values())) == len(frame)
    assert set(parts["LongBench-E"]["task"]) == {"longbench-e/lcc"}
    assert set(parts["RULER, 4096 tokens"]["category"]) == {"needles", "tracking", "counting", "questions"}
    assert set(parts["RULER, made here"]["category"]) == {"needles", "tracking"}
    assert set(parts["LongBench"]["category"]) == {"code"}
    assert readings.rows({"LongBench": parts["LongBench"].assign(n_tokens=[*range(1000, 1006)])}, "none") == (
        "LongBench: 3 rows of 2 tasks, prompts of 1,000 to 1,005 tokens."
    )
    assert readings.rows({}, "none") == "none"
    beside = readings.beside({name: parts[name] for name in ("LongBench-E", "LongBench")})
    assert list(beside.columns[:2]) == ["here, LongBench-E (n = 3)", "here, LongBench (n = 3)"]
    assert beside.loc["selkv"].notna().sum() > 4


def test_datasets_are_listed_with_their_rows() -> None:
    frame = named("longbench/", {"qmsum": 1, "lcc": 3}, {"full": 0.0, "selkv": 0.2})
    table = analyses.by_dataset(frame, "kl")
    assert list(table.index) == [("code", "lcc", 3), ("code", "qmsum", 1)]
    assert list(table) == ["full", "selkv"]
    lcc = frame.query("task == 'longbench/lcc' and arm == 'selkv'")
    assert table["selkv"].iloc[0] == pytest.approx(lcc["kl"].mean())
    assert readings.by_dataset(frame, "score").iloc[0].to_dict() == {"full cache": "10.0", "SelKV": "10.0"}


def test_a_task_with_one_row_takes_no_interval_from_the_others() -> None:
    frame = named("longbench/", {"lcc": 3, "qmsum": 1}, {"full": 0.0, "streaming-llm": 0.4, "snapkv": 0.2})
    own = analyses.against_own(frame, ("kl",), n_boot=50)
    assert list(zip(own["arm"], own["baseline"])) == [("snapkv", "streaming-llm")]
    assert own["n"].item() == 3 and own["low"].notna().all()
    full = analyses.against_full(frame, n_boot=50)
    assert set(full["arm"]) == {"streaming-llm", "snapkv"} and set(full["metric"]) == {"score", "nll"}
    assert len(analyses.repeated(frame[frame["task"] == "longbench/qmsum"])) == 3  # as it is: none has two


def test_own_evictions_are_those_of_the_methods_and_of_selkvs_steps() -> None:
    assert analyses.OWN["selkv"] == analyses.OWN["selkv/gate"] == "selkv/evict"
    assert {arm: analyses.OWN[arm] for arm in analyses.EVICTION_OF} == analyses.EVICTION_OF


def over_shares(*arms: str, full: bool = True) -> pd.DataFrame:
    """Arms whose KL falls as they keep more, each a tenth closer than the one before."""
    levels = {arm: 1 - 0.1 * i for i, arm in enumerate(arms)}
    parts = [records({"full": 0.0})] if full else []
    parts += [
        records({arm: level * (1 - x) for arm, level in levels.items()}).assign(retain=x) for x in (0.1, 0.9)
    ]
    return pd.concat(parts, ignore_index=True)


def test_a_sweep_has_each_arm_at_each_share_and_the_full_cache_once() -> None:
    table = analyses.sweep(over_shares("snapkv", "selkv"), ("kl",), n_boot=50)
    assert list(zip(table["retain"], table["arm"])) == [
        (1.0, "full"), (0.1, "snapkv"), (0.1, "selkv"), (0.9, "snapkv"), (0.9, "selkv")
    ]  # fmt: skip
    assert table["mean"].iloc[1] == pytest.approx(0.9, abs=0.05) and set(table["n"]) == {36}
    shown = readings.swept(table, "kl")
    assert list(shown.columns) == ["10%", "90%", "100%"] and shown.index.name == "KL, nats a token, n = 36"
    assert shown.loc["SnapKV", "100%"] == "–" and shown.loc["SnapKV", "10%"].startswith(("0.8", "0.9"))
    assert len(analyses.sweep(over_shares("selkv", full=False), ("kl",), n_boot=50)) == 2


def test_differences_that_last_are_those_whose_arms_are_there() -> None:
    table = analyses.lasting(over_shares("snapkv", "selkv", "bifocal"), ("kl", "score"), n_boot=50)
    kl = table[table["metric"] == "kl"].set_index(["arm", "retain"])
    assert list(kl.index) == [("selkv", 0.1), ("bifocal", 0.1), ("selkv", 0.9), ("bifocal", 0.9)]
    assert kl.loc[("selkv", 0.1), "diff"] == pytest.approx(-0.09, abs=0.002)
    assert kl.loc[("selkv", 0.9), "diff"] == pytest.approx(-0.01, abs=0.002)
    shown = readings.lasting(table)
    assert list(shown.index) == [
        (pair, share) for pair in ("SelKV minus SnapKV", "Bifocal (ours) minus SelKV") for share in ("10%", "90%")
    ]  # fmt: skip
    assert set(shown["", "n"]) == {36}
    assert analyses.lasting(over_shares("snapkv", "h2o")).empty


def test_a_folder_with_several_shares_or_benchmarks_is_drawn_as_such(tmp_path: Path) -> None:
    from kvrepro import results

    plugin = {"selkv": 0.4, "selkv/evict": 0.5, "snapkv": 0.3, "selkv/on-snapkv": 0.2}
    both = [named("longbench/", {"lcc": 2}, plugin), named("longbench-e/", {"lcc": 2}, {"selkv": 0.4})]
    for frame, drawn in (
        (over_shares("snapkv", "selkv"), {"sweep", "sweep_lasting"}),
        (both[0], {"plugin"}),
        (pd.concat(both), {"plugin_longbench"}),
    ):
        frame.to_csv(tmp_path / results.CARRIED, index=False)
        assert {path.stem for path in analyses.draw(tmp_path, tmp_path / "figures")} == drawn
