"""Studies: arms for one question, on fewer samples; and what a repository carries of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from kvrepro import notebooks, profiles, results, runner, studies
from kvrepro.errors import UserError
from kvrepro.methods import available, make


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_arm_exists_and_the_full_cache_is_among_them(name: str) -> None:
    arms = studies.STUDIES[name].arms
    assert "full" in arms and len(set(arms)) == len(arms)
    for arm in arms:
        make(arm)


def test_the_methods_study_has_every_method() -> None:
    ours = {"full-folded", "adjacent"}  # a kernel and an operator, for comparisons of their own
    assert set(available()) - ours <= set(studies.STUDIES["methods"].arms)


@pytest.mark.parametrize("profile", profiles.available())
def test_a_study_takes_some_samples_of_every_task(profile: str) -> None:
    whole, part = profiles.load(profile), studies.of("positions", profile)
    size = whole.studies["default"]
    assert part.context == size["context"] and set(part.tasks) == set(size.get("tasks", whole.tasks))
    for task, n in part.tasks.items():
        assert n == min(size["samples"], whole.tasks[task])


def test_a_profile_may_give_a_study_its_own_size() -> None:
    own = profiles.load("longbench").studies["sweep"]
    sweep = studies.of("sweep", "longbench")
    assert sweep.context == own["context"] and list(sweep.tasks) == own["tasks"]
    assert set(sweep.tasks.values()) == {own["samples"]} and sweep.retain == studies.STUDIES["sweep"].retain


def test_an_unknown_study_is_said() -> None:
    with pytest.raises(UserError, match="unknown study 'nope'; known are methods"):
        studies.of("nope", "quick")


def test_each_setting_that_cannot_share_a_folder_has_its_own() -> None:
    assert runner.folder("quick") == "quick"
    assert runner.folder("quick", "a/b/Some-Model", "cuda:1", "slimmer") == "quick-slimmer-Some-Model-cuda"


def test_carried_records_give_the_same_tables_and_no_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    runner.run("smoke", out=run, methods=["full", "selkv"], task_names=["needle-single"], limit=2, quiet=True)
    path = results.carry(run, tmp_path)
    there, back = results.load(run), results.load(tmp_path)
    pd.testing.assert_frame_equal(results.main_table(back), results.main_table(there), rtol=1e-5)
    pd.testing.assert_frame_equal(results.summary(back), results.summary(there), rtol=1e-5)
    assert not {"prediction", "digest"} & set(back.columns)
    first = path.read_bytes()
    assert results.carry(run, tmp_path).read_bytes() == first  # the same bytes for the same records


def test_notebooks_read_carried_records_only_where_no_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("measured although records are carried"))
    carry(tmp_path, "quick-positions")
    assert list(notebooks.records("quick", "smollm2-135m", "cpu", study="positions")["arm"]) == ["selkv"]
    assert len(notebooks.records("quick", "smollm2-135m", "cpu", 0.25, "positions")) == 1
    monkeypatch.setattr(runner, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("measured")))
    (tmp_path / "results" / "quick-positions").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="measured"):
        notebooks.records("quick", "smollm2-135m", "cpu", study="positions")


def test_a_share_that_is_not_carried_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    carry(tmp_path, "quick-positions")
    monkeypatch.setattr(runner, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("measured")))
    with pytest.raises(RuntimeError, match="measured"):
        notebooks.records("quick", "smollm2-135m", "cpu", 0.5, "positions")


def test_other_models_are_read_where_there_are_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    carry(tmp_path, "quick-methods-gemma3-270m")
    found = notebooks.stored("quick", ["gemma3-270m", "smollm2-135m-mha"], "cpu", "methods")
    assert list(found) == ["gemma3-270m"] and len(found["gemma3-270m"]) == 1


def test_make_runs_every_study() -> None:
    listed = re.search(r"^STUDIES := (.*)$", (notebooks.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed and set(listed.group(1).split()) == set(studies.STUDIES)


def carry(root: Path, name: str) -> None:
    """One record, as the repository would carry it."""
    folder = root / "data" / "results" / name
    folder.mkdir(parents=True)
    frame = pd.DataFrame(
        {"sample": ["a"], "task": "t", "category": "code", "method": "selkv", "arm": "selkv", "retain": 0.25}
        | dict.fromkeys(results.METRICS, 0.5)
    )
    frame.to_csv(folder / results.CARRIED, index=False)
