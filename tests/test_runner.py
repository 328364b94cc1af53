"""The main job on the real model: evaluation, the runner, and a real process killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvrepro import results, runner, tasks
from kvrepro.errors import UserError
from kvrepro.evaluate import NamedArm, evaluate
from kvrepro.hf import make_cache
from kvrepro.tasks.prompts import encode

ARMS = [
    NamedArm("full", 1.0),
    *(NamedArm(name, 0.25) for name in ("snapkv", "selkv", "selkv/evict", "kvslimmer")),
]


@pytest.fixture(scope="module")
def sample() -> Any:
    return tasks.load("needle-single", 1, 1024)[0]


@pytest.fixture(scope="module")
def together(smollm2: Any, sample: Any) -> dict[str, dict[str, Any]]:
    return {record["arm"]: record for record in evaluate(*smollm2, sample, ARMS, 1024)}


def test_the_full_cache_is_its_own_reference(together: dict[str, dict[str, Any]]) -> None:
    full = together["full"]
    assert (full["kl"], full["agree"], full["kept_entries"], full["kept_bytes"]) == (0, 1, 1, 1)
    assert full["untouched"] and not together["selkv"]["untouched"]


def test_budgets_are_held(together: dict[str, dict[str, Any]]) -> None:
    for arm in ARMS[1:]:
        record = together[arm.name]
        assert record["budget"] == int(0.25 * record["n_tokens"] + 0.5)
        assert record["kept_entries"] == pytest.approx(record["budget"] / record["n_tokens"])
        assert 0.25 <= record["kept_bytes"] < 0.27  # keys and values, and where there is one a bias
        assert record["kl"] > 0


@pytest.mark.parametrize("name", ["selkv", "kvslimmer"])
def test_a_shared_prefill_measures_what_an_arm_alone_does(
    smollm2: Any, sample: Any, together: dict[str, dict[str, Any]], name: str
) -> None:
    (alone,) = evaluate(*smollm2, sample, [NamedArm(name, 0.25)], 1024)
    shared = together[name]
    assert alone["prediction"] == shared["prediction"]
    for metric in ("nll", "kl"):
        assert alone[metric] == pytest.approx(shared[metric], rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["full", "selkv", "kvslimmer"])
def test_generate_gives_the_same_answer(
    smollm2: Any, sample: Any, together: dict[str, dict[str, Any]], name: str
) -> None:
    """The harness's batched greedy decoding is what a user gets from generate()."""
    model, tokenizer = smollm2
    ids = torch.tensor([encode(tokenizer, sample, 1024).input_ids])
    cache = make_cache(model, name, retain=0.25)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=sample.max_new_tokens
    )
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == together[name]["prediction"]


def test_bad_requests_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for wrong in (
        {"profile": "nope"}, {"methods": ["selkvv"]}, {"task_names": ["nope"]}, {"limit": 0}, {"retain": [0.0]},
        {"retain": [float("nan")]},
    ):  # fmt: skip
        given: dict[str, Any] = {"profile": "smoke", "model": "no-such-model", "out": tmp_path, **wrong}
        with pytest.raises(UserError) as caught:
            runner.run(given.pop("profile"), given.pop("model"), **given)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / results.RECORDS).exists()


def test_another_text_under_the_same_name_is_not_taken_for_measured(tmp_path: Path) -> None:
    """A results folder goes on only with the samples it began with."""
    rows = tmp_path / "rows"
    rows.mkdir()

    def run_on(number: int) -> None:
        row = {
            "index": 0,
            "input": f"The number is {number}. What is the number?",
            "outputs": [str(number)],
            "length": 9,
        }
        (rows / "4096_vt.jsonl").write_text(json.dumps(row) + "\n")
        runner.run(
            "smoke", out=tmp_path / "out", data=rows, methods=["full"]
        )  # no tasks named: what the folder holds

    run_on(7361942)
    assert results.load(tmp_path / "out")["task"].tolist() == ["ruler/4096_vt"]
    with pytest.raises(UserError, match="another text"):
        run_on(1111111)


def command(out: Path) -> list[str]:
    chosen = [
        "--tasks",
        "needle-single,pydoc-fewshot",
        "--limit",
        "2",
        "--methods",
        "full,snapkv,selkv,kvslimmer",
    ]
    return [sys.executable, "-m", "kvrepro.cli", "run", "--profile", "smoke", *chosen, "--out", str(out)]


def stored(out: Path) -> pd.DataFrame:
    frame = results.load(out).sort_values(["sample", "arm"]).reset_index(drop=True)
    return frame[[column for column in frame if not column.startswith("seconds")]]


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path, capsys: Any) -> None:
    """SIGKILL after the first unit is on disk, then the same command again."""
    out, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(command(out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    records = out / results.RECORDS
    deadline = time.monotonic() + 300
    while not (records.exists() and records.read_bytes().count(b"\n")):
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended or hung before its first unit"
        )
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = records.read_bytes()
    kept = len(before[: before.rfind(b"\n") + 1].splitlines())
    assert 1 <= kept < 4, "killed in the middle, with something stored and something missing"

    again = subprocess.run(command(out), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    after = records.read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])  # what was stored stays as it is
    assert after.count(b"\n") == 4

    assert subprocess.run(command(whole), capture_output=True).returncode == 0
    pd.testing.assert_frame_equal(stored(out), stored(whole))
    assert not stored(out).duplicated(["sample", "arm"]).any()
    with capsys.disabled():
        print(f"\nkilled with {kept} of 4 units stored; after the rerun {after.count(chr(10).encode())} units, "
              f"{len(stored(out))} records, none lost or doubled, equal to an uninterrupted run")  # fmt: skip

    third = subprocess.run(command(out), capture_output=True, text=True)
    assert third.returncode == 0 and records.read_bytes() == after  # nothing is measured again
