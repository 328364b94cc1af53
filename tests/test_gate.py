"""The sanity gate: a full cache far below what is published stops the run, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_longbench import PROTOCOL, row, write

from kvrepro import evaluate, gate, models, profiles, results, runner
from kvrepro.cli import main
from kvrepro.errors import UserError
from kvrepro.tasks.base import Sample

NAMES = list(PROTOCOL)
LLAMA = "llama-3.1-8b"  # 40.54 is published


def scores(
    value: float, answers: int = 32, sets: int = 16, prefix: str = "longbench/"
) -> list[tuple[str, float]]:
    return [(f"{prefix}{NAMES[i % sets]}", value) for i in range(answers)]


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        (scores(2.0), True),
        (scores(20.2), True),
        (scores(20.3), False),
        (scores(40.0), False),
        (scores(90.0), False),
        (scores(2.0, answers=31), False),  # too few to say
        (scores(2.0, answers=200, sets=7), False),
        (scores(2.0, answers=200, sets=8), True),
        (scores(2.0, prefix="pydoc-"), False),  # the expectation is LongBench's
        (scores(2.0, prefix="longbench-e/"), False),
        ([], False),
    ],
)
def test_it_stops_below_half_of_what_is_published(given: list[tuple[str, float]], stops: bool) -> None:
    assert (gate.complaint(given, 40.54) is not None) == stops
    assert gate.complaint(given, None) is None


def test_a_big_set_does_not_outvote_the_others() -> None:
    """The published average is a mean over sets: 100 failures at counting do not make a sound model look broken."""
    counting = [("longbench/passage_count", 0.0)] * 100
    assert gate.complaint([*scores(30.0), *counting], 40.54) is None
    assert gate.complaint([*scores(10.0), *[("longbench/passage_count", 100.0)] * 100], 40.54)


# The runner -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three rows of each of LongBench's sets."""
    folder = tmp_path / "rows"
    for name in NAMES:
        write(folder / f"{name}.jsonl", *(row(name, i) for i in range(3)))
    write(
        folder / "config" / "dataset2prompt.json", {name: f"{name}: {{context}} {{input}}" for name in NAMES}
    )
    write(folder / "config" / "dataset2maxlen.json", dict.fromkeys(NAMES, 8))
    return folder


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A model that scores what `answers["full"]` says with the full cache, and 1 with any other."""
    given = {"full": 2.0}
    folder = f"/hub/snapshots/{models.REGISTRY[LLAMA].revision}"
    config = SimpleNamespace(name_or_path=folder, max_position_embeddings=4096)
    model = SimpleNamespace(dtype=torch.bfloat16, config=config)

    def measured(_: Any, __: Any, sample: Sample, arms: list[Any], limit: int) -> list[dict[str, Any]]:
        return [
            {
                "sample": sample.id, "digest": sample.digest, "task": sample.task, "category": sample.category,
                "method": arm.method, "arm": arm.name, "retain": arm.retain, "settings": arm.settings, "nll": 1.0,
                "score": given.get(arm.name, 1.0), "kl": 0.0, "agree": 1.0, "kept_entries": 1.0, "kept_bytes": 1.0,
            }
            for arm in arms
        ]  # fmt: skip

    monkeypatch.setattr(evaluate, "evaluate", measured)
    monkeypatch.setattr(models, "load", lambda name, device, dtype: (model, None))
    return given


def run(out: Path, data: Path, model: str = LLAMA, **given: Any) -> Path:
    methods = given.pop("methods", ["full", "selkv"])
    profile = replace(profiles.load("smoke"), tasks={"pydoc-code": 3})  # three samples of any task
    return runner.run(profile, model, out=out, data=data, methods=methods, quiet=True, **given)


def stored(out: Path) -> int:
    return len(results.load(out)["sample"].unique())


def test_a_broken_harness_is_stopped_and_stays_stopped(
    tmp_path: Path, data: Path, answers: dict[str, float]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError) as error:
        run(out, data)
    message = str(error.value)
    assert "\n" not in message
    for words in ("llama-3.1-8b", " 2.0 in 32 answers to 16 LongBench sets", "40.5 is published", "chat template",
                  "two BOS", "cut too short", "stop tokens", "damaged weights", str(out), "--no-gate"):  # fmt: skip
        assert words in message
    assert stored(out) == 32  # what was measured is kept

    answers["full"] = 50.0  # running again does not slip by: what is stored is as it was
    with pytest.raises(UserError, match=r" 2\.0 in 32 answers"):
        run(out, data)
    assert stored(out) == 32

    run(out, data, gated=False)  # and goes on where it was stopped, if told to
    frame = results.load(out)
    assert stored(out) == 48 and len(frame) == 96
    assert set(frame["versions.weights"]) == {models.REGISTRY[LLAMA].revision}


@pytest.mark.parametrize(
    ("score", "model", "methods"),
    [
        (39.0, LLAMA, ["full", "selkv"]),
        (2.0, "mistral-7b-v0.3", ["full", "selkv"]),  # nothing is published
        (2.0, "smollm2-135m", ["full", "selkv"]),
        (2.0, "some/other-model", ["full", "selkv"]),
        (2.0, LLAMA, ["selkv"]),  # the full cache was not asked for
    ],
)
def test_sound_and_unknown_models_run_to_the_end(
    tmp_path: Path, data: Path, answers: dict[str, float], score: float, model: str, methods: list[str]
) -> None:
    answers["full"] = score
    run(tmp_path / "out", data, model, methods=methods)
    assert stored(tmp_path / "out") == 48


def test_the_flag(tmp_path: Path, data: Path, answers: dict[str, float], capsys: Any) -> None:
    words = ["run", "--profile", "smoke", "--methods", "full", "--model", LLAMA, "--data", str(data)]
    words += ["--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time nothing is left to measure: smoke takes two samples of a task
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"kvrepro: {LLAMA} is not run as it was published")
    assert main([*words, "--no-gate"]) == 0


def test_prompts_that_the_model_does_not_take_are_refused(
    tmp_path: Path, data: Path, answers: dict[str, float]
) -> None:
    with pytest.raises(
        UserError, match=r"profile full has prompts of up to 4096 .* answers of 8, .* takes 4096"
    ):
        runner.run("full", "some/other-model", out=tmp_path / "out", data=data, methods=["full"])
    written = (tmp_path / "out" / results.RECORDS).read_text()
    assert not written and json.loads((tmp_path / "out" / results.RUN).read_text())["profile"] == "full"
