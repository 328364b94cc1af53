"""Does a run agree with another, or with the papers?  Known differences come out as they were put in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvrepro import compare, plots, published, results
from kvrepro.cli import main
from kvrepro.errors import UserError
from kvrepro.tasks.base import CATEGORIES

CARRIED = Path(__file__).parents[1] / "data" / "results" / "quick"
ARMS = ("full", "snapkv", "selkv", "selkv/evict")


def frame(n: int = 5, **changes: Any) -> pd.DataFrame:
    """Records of four arms on ``n`` samples of a task in each category."""
    rng = np.random.default_rng(0)
    rows = []
    for category, i in itertools.product(CATEGORIES, range(n)):
        level = rng.uniform(20, 60)
        for k, arm in enumerate(ARMS):
            rows.append(
                {"sample": f"{category}/{i}", "digest": f"{category}{i}", "task": category, "category": category,
                 "method": arm.split("/")[0], "arm": arm, "retain": 1.0 if k == 0 else 0.25, "n_tokens": 900 + i,
                 "score": level + rng.uniform(0, 10), "kl": k * rng.uniform(0.1, 0.2), "nll": 1 + rng.uniform(),
                 "agree": 1 - k * 0.1, "kept_entries": 0.25, "kept_bytes": 0.25, "model": "tiny",
                 "settings.alpha": 0.5 if arm == "selkv" else np.nan}
            )  # fmt: skip
    return pd.DataFrame(rows).assign(**changes)


def run(records: pd.DataFrame, name: str = "run", **made: str) -> compare.Run:
    return compare.Run(name, records, made)


def differences(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    return compare.differences(run(one, "a"), run(other, "b"), n_boot=500)


def one_row(table: pd.DataFrame, **where: Any) -> pd.Series:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_a_run_agrees_with_itself_and_with_a_copy_in_another_order() -> None:
    records = frame()
    table = differences(records, records.sample(frac=1, random_state=1))
    assert table["paired"].all() and set(table["verdict"]) == {"same"}
    assert (table[["diff", "low", "high"]] == 0).all().all()
    assert len(table) == 7 * (
        4 * 4 - 2
    )  # average and six categories; the full cache's KL and agreement are given
    assert compare.conclusion(table, "differences contain 0").startswith("agrees: 98 of 98 ")


def test_a_shift_is_found_with_its_size_and_place() -> None:
    other = frame()
    other.loc[other["arm"].eq("selkv") & other["category"].eq("code"), "kl"] += 0.3
    table = differences(frame(), other)
    row = one_row(table, scope="average", arm="selkv", metric="kl")
    assert row["diff"] == pytest.approx(0.05) and row["other"] - row["one"] == pytest.approx(0.05)
    assert row["n"] == 30 and row["verdict"] == "differs"
    code = one_row(table, scope="code", arm="selkv", metric="kl")
    assert (code["diff"], code["low"], code["high"]) == pytest.approx((0.3, 0.3, 0.3)) and code["n"] == 5
    assert set(table.loc[table["verdict"] == "differs", "scope"]) == {"average", "code"}
    means = results.by_category(frame(), "kl")["average"].droplevel("retain")
    assert row["one"] == pytest.approx(means["selkv"])


def test_what_no_printed_digit_shows_is_no_difference() -> None:
    """Another processor's last digits lie all on one side of 0."""
    table = differences(frame(), frame().assign(kl=lambda f: f["kl"] + 1e-6))
    row = one_row(table, scope="average", arm="selkv", metric="kl")
    assert row["low"] > 0 and row["verdict"] == "same"


def test_noise_agrees_and_a_shift_everywhere_does_not() -> None:
    rng = np.random.default_rng(3)
    noisy = frame(8).assign(score=lambda f: f["score"] + rng.normal(0, 5, len(f)))
    assert compare.conclusion(differences(frame(8), noisy), "x").startswith("agrees: ")
    shifted = frame(8).assign(score=lambda f: f["score"] - 3)
    said = compare.text(run(frame(8), "a"), run(shifted, "b"), differences(frame(8), shifted))
    assert said.splitlines()[-1].startswith("differs: 70 of 98 differences contain 0")
    assert "most often off: full cache, 7 of 14" in said


def test_other_samples_are_not_paired_and_their_interval_is_wider() -> None:
    other = frame().assign(sample=lambda f: f["sample"] + "x", score=lambda f: f["score"] + 1)
    apart, paired = (one_row(differences(frame(), o), scope="average", arm="selkv", metric="score")
                     for o in (other, other.assign(sample=frame()["sample"])))  # fmt: skip
    assert not apart["paired"] and paired["paired"]
    assert apart["diff"] == pytest.approx(paired["diff"]) == pytest.approx(1)
    assert apart["high"] - apart["low"] > 10 * (paired["high"] - paired["low"])
    assert apart["verdict"] == "same" and paired["verdict"] == "differs"


def test_another_text_under_the_same_name_is_another_sample() -> None:
    other = frame().assign(digest="other")
    assert not differences(frame(), other)["paired"].any()
    assert differences(frame(), other.drop(columns="digest"))["paired"].all()  # carried records have none
    half = frame()
    half.loc[half["sample"].str.endswith("/0"), "digest"] = "other"
    assert one_row(differences(frame(), half), scope="average", arm="selkv", metric="kl")["n"] == 24


def test_only_what_both_runs_have_is_compared() -> None:
    fewer = frame()[lambda f: f["arm"].ne("selkv/evict") & f["category"].ne("code")]
    table = differences(frame(), fewer)
    assert set(table["arm"]) == {"full", "snapkv", "selkv"} and "code" not in set(table["scope"])
    assert "only in a: selkv/evict" in compare.notes(run(frame(), "a"), run(fewer, "b"))
    with pytest.raises(UserError, match="share no arm at the same retention"):
        differences(frame(), frame().assign(retain=0.5))
    with pytest.raises(UserError, match="share no task"):
        differences(frame(), frame().assign(task="other", sample="other" + frame()["sample"]))


def test_retentions_are_rows_of_their_own() -> None:
    both = pd.concat([frame(), frame()[lambda f: f["arm"] == "selkv"].assign(retain=0.5)])
    table = differences(both, both)
    assert sorted(table.loc[table["arm"] == "selkv", "retain"].unique()) == [0.25, 0.5]
    assert (
        plots.agreement(table[table["scope"] == "average"]).axes[0].get_yticklabels()[2].get_text()
        == "SelKV, 25%"
    )


def test_one_sample_a_task_has_no_interval() -> None:
    table = differences(frame(1), frame(1).assign(score=lambda f: f["score"] + 1))
    assert set(table.loc[table["metric"] == "score", "verdict"]) == {"open"}
    assert set(table.loc[table["metric"] == "kl", "verdict"]) == {"same"}  # the same numbers
    only = table[table["metric"] == "score"]
    assert compare.conclusion(only, "x") == (
        f"open: no interval for any of {len(only)} differences; run more samples of each task"
    )


def test_settings_and_versions_that_differ_are_said() -> None:
    other = frame()
    other["settings.alpha"] = other["settings.alpha"].replace(0.5, 1.0)
    said = compare.notes(run(frame(), "a", torch="2.13.0"), run(other, "b", torch="2.14.0", numpy="3"))
    assert said == [
        "torch: 2.13.0 in the first, 2.14.0 in the second", "numpy: unknown in the first, 3 in the second",
        "selkv has alpha 0.5 in the first, 1.0 in the second",
    ]  # fmt: skip
    assert compare.notes(run(frame()), run(frame())) == []


# The papers


def test_published_differences_are_those_of_the_tables() -> None:
    averages, gaps = compare.beside(compare.read(CARRIED), n_boot=500)
    row = one_row(
        gaps[gaps["where"].str.contains("LLaMA-3.1-8B-Instruct")], arm="selkv", baseline="selkv/evict"
    )
    key = ("SelKV", "LLaMA-3.1-8B-Instruct", "LongBench-16", "25% retention; 3500 tokens")
    assert row["published"] == pytest.approx(
        published.lookup(*key, "SelKV") - published.lookup(*key, "SelKV evict only")
    )
    here = results.main_table(results.load(CARRIED))["average"]
    assert row["diff"] == pytest.approx(here["selkv"] - here["selkv/evict"])
    inside = gaps["low"].le(gaps["published"]) & gaps["high"].ge(gaps["published"])
    assert (gaps["verdict"] == "same").equals(inside)
    pairs = list(map(frozenset, zip(gaps["arm"], gaps["baseline"], gaps["where"])))
    assert len(set(pairs)) == len(pairs)  # no pair twice, the other way round
    assert averages["here"].equals(here.rename("here"))


def test_a_run_without_published_arms_is_refused() -> None:
    with pytest.raises(UserError, match="no two arms that a paper publishes side by side"):
        compare.beside(run(frame()[lambda f: f["arm"] == "selkv"]))


# The command


def test_carried_records_beside_the_papers(capsys: Any, tmp_path: Path) -> None:
    words = ["compare", str(CARRIED), "--published", "--to", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert (
        "what differs: here smollm2-135m, 96 samples" in out
        and "published differences lie in this run's" in out
    )
    assert {path.name for path in tmp_path.iterdir()} == {"published.png", "published.svg", "published.csv"}
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["conclusion"] in out and found["run"]["dtype"] == "float32"
    assert all(row["published"] is not None for row in found["differences"])


def test_a_run_beside_its_carried_records(capsys: Any, tmp_path: Path) -> None:
    """As when somebody else has run it: text records with digests, here of a part, against numbers to six digits."""
    settings = {"profile": "quick", "model": "smollm2-135m", "device": "cuda", "dtype": "float32"}
    records = results.load(CARRIED)
    few = records[records["arm"].isin(["full", "selkv", "bifocal"])]
    with results.Store(tmp_path / "mine", settings) as store:
        for sample, group in few.groupby("sample"):
            given = group[[*results.REQUIRED, "model", "dtype"]].to_dict("records")
            store.append(
                store.unit(str(sample), "all"), [row | {"digest": "0", "settings": {}} for row in given]
            )
    words = ["compare", str(tmp_path / "mine"), str(CARRIED), "--to", str(tmp_path / "figures")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "device: cuda in the first, cpu in the second" in out and "only in" in out
    assert "agrees: 70 of 70 differences contain 0 (95 % intervals)" in out
    assert (tmp_path / "figures" / "runs.svg").exists()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["differences"]) == 70 and found["conclusion"].startswith("agrees")


@pytest.mark.parametrize("words", [
    (str(CARRIED),), (str(CARRIED), str(CARRIED), "--published"), ("nowhere", "--published"), (str(CARRIED), "nowhere"),
])  # fmt: skip
def test_bad_requests_are_one_line(capsys: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert main(["compare", *words, "--to", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (
        not out and err.startswith("kvrepro: ") and err.count("\n") == 1 and not (tmp_path / "out").exists()
    )


# The figures


@pytest.fixture(scope="module")
def drawn() -> dict[str, plots.Figure]:
    other = frame()
    other.loc[other["arm"] == "selkv", "kl"] += 0.3
    table = differences(frame(), other)
    _, gaps = compare.beside(compare.read(CARRIED), n_boot=200)
    return {
        "agreement": plots.agreement(table[table["scope"] == "average"]),
        "beside": plots.beside_published(gaps),
    }


def test_the_figures_show_the_table_and_shade_what_is_off(drawn: dict[str, plots.Figure]) -> None:
    score, kl, nll = drawn["agreement"].axes
    assert [len(axis.patches) for axis in (score, kl, nll)] == [0, 1, 0]
    table = drawn["agreement"].data
    selkv = one_row(table, arm="selkv", metric="kl")
    assert f"{selkv['one']:.3f} → {selkv['other']:.3f}" in [text.get_text() for text in kl.texts]
    (axis,) = drawn["beside"].axes
    gaps = drawn["beside"].data
    marks = [line for line in axis.lines if line.get_markeredgecolor() == "#222222"]
    assert [line.get_xdata()[0] for line in marks] == list(gaps["published"])


def test_nothing_drawn_lies_outside_the_figures(drawn: dict[str, plots.Figure]) -> None:
    for figure in drawn.values():
        inside = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert (
            inside.x0 >= -0.01
            and inside.y0 >= -0.01
            and inside.x1 <= width + 0.01
            and inside.y1 <= height + 0.01
        )


def test_an_arm_of_a_text_that_is_not_ours_is_drawn_grey() -> None:
    other = frame().replace({"arm": {"selkv": "mine"}})
    figure = plots.agreement(differences(other, other)[lambda f: f["scope"] == "average"])
    assert "mine" in [label.get_text() for label in figure.axes[0].get_yticklabels()]
