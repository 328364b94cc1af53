"""Numbers in prose come from stored results: the README's block is what the committed tables say."""

from __future__ import annotations

import json
import re

import pandas as pd

from kvrepro import analyses, publish, results

TABLES = publish.ROOT / "data" / "results" / "quick"
README = (publish.ROOT / "README.md").read_text()


def test_the_readme_shows_the_committed_results() -> None:
    shown = README.split(publish.BEGIN)[1].split(publish.END)[0].strip()
    assert shown == publish.block(TABLES).strip()


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
