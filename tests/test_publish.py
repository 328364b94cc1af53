"""Numbers in prose come from stored results: the README's block is what the committed tables say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from kvrepro import analyses, publish, results, runner, studies

TABLES = publish.ROOT / "data" / "results" / "quick"
README = (publish.ROOT / "README.md").read_text()


def test_the_readme_shows_the_committed_results() -> None:
    shown = README.split(publish.BEGIN)[1].split(publish.END)[0].strip()
    assert shown == publish.block(TABLES.parent).strip()


def test_the_readme_shows_the_claims_as_the_committed_records_decide_them() -> None:
    shown = README.split(publish.CLAIMS_BEGIN)[1].split(publish.CLAIMS_END)[0].strip()
    assert shown == publish.claims_block(TABLES.parent).strip()


def test_the_committed_results_are_of_the_whole_profile() -> None:
    from kvrepro import profiles

    chosen = profiles.load("quick")
    summary = pd.read_csv(TABLES / "summary.csv")
    assert tuple(summary.columns) == results.SUMMARY_COLUMNS
    assert set(summary["arm"]) == set(chosen.arms)
    for task, n in chosen.tasks.items():
        assert set(summary.loc[summary["task"] == task, "n"]) == {n}, task
    assert json.loads((TABLES / "run.json").read_text())["context"] == chosen.context


def test_every_figure_of_the_readme_and_of_stored_results_is_there() -> None:
    figures = publish.ROOT / "figures"
    for name in [*analyses.FIGURES, *re.findall(r"figures/(\w+)\.png", README)]:
        assert (figures / f"{name}.png").exists() and (figures / f"{name}.svg").exists(), name


def test_links_of_the_readme_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (publish.ROOT / document).read_text()):
            assert (publish.ROOT / target).exists(), f"{document}: {target}"


def test_every_headline_is_a_comparison_of_its_study() -> None:
    for study, comparison, arm in publish.HEADLINES:
        chosen = analyses.COMPARISONS[comparison]
        assert arm in chosen.arms
        assert {x for pair in chosen.pairs for x in pair} <= set(studies.STUDIES[study].arms), comparison


def test_what_is_carried_of_each_run_is_whole_and_holds_no_text() -> None:
    for folder in sorted(TABLES.parent.iterdir()):
        frame = results.load(folder)
        assert not {"prediction", "digest"} & set(frame.columns), folder.name
        run = json.loads((folder / results.RUN).read_text())
        assert runner.folder(run["profile"], run["model"]) == folder.name
        table = pd.read_csv(folder / "main_table.csv").set_index("arm")
        parts = analyses.benchmarks(analyses.at(frame)).values()
        again = pd.concat([results.main_table(part)["kl"] for part in parts])
        pd.testing.assert_series_equal(again, table["kl"], rtol=1e-4, obj=folder.name)


def test_a_run_is_published_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes where it is committed, and the README's blocks are written from it."""
    shutil.copytree(TABLES.parent, tmp_path / "data" / "results")
    shutil.copy(publish.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "TABLES", tmp_path / "data" / "results")
    run = tmp_path / "smoke-positions"
    runner.run("smoke", out=run, methods=["full", "selkv"], task_names=["needle-single"], limit=2, quiet=True)
    written = {path.relative_to(tmp_path).as_posix() for path in publish.publish([run])}
    target = "data/results/smoke-positions"
    assert {
        f"{target}/{name}" for name in ("records.csv.gz", "main_table.csv", "summary.csv", "run.json")
    } <= written
    assert json.loads((tmp_path / target / "run.json").read_text())["dtype"] == "float32"
    assert (
        "README.md" in written
        and publish.block(publish.TABLES).strip() in (tmp_path / "README.md").read_text()
    )
