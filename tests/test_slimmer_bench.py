"""The bench of KVSlimmer against AsymKV on a tiny model: fresh processes, and the KL that evaluation gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny

from kvrepro import UserError, models, tasks
from kvrepro.cli import main
from kvrepro.evaluate import NamedArm, evaluate
from kvrepro.measure import slimmer
from kvrepro.measure.fresh import fresh, peak

CONTEXT, BUDGET, CHUNK = (
    1024,
    162,
    40,
)  # a quarter, also of one entry less: what the methods choose themselves


@pytest.fixture(scope="module")
def folder(smollm2: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny Llama with a real tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny("llama", torch.float32, vocab_size=49152, attn_implementation="sdpa").save_pretrained(path)
    smollm2[1].save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def found(folder: str) -> dict[str, Any]:
    return slimmer.run(folder, context=CONTEXT, chunks=[CHUNK], budget=BUDGET, repeats=1)


def test_rows_say_what_was_measured(found: dict[str, Any]) -> None:
    assert [(row["arm"], row["chunk"]) for row in found["rows"]] == [
        ("full", None), *((arm, CHUNK) for arm in slimmer.ARMS)
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["extra_bytes"] > 0 and row["kl"] >= 0
        assert 800 < row["context"] <= CONTEXT
        for name, (low, high) in row["spread"].items():
            assert low <= row[name] <= high
    full, *others = found["rows"]
    assert full["kl"] == 0 and full["to_full"] == 1
    asymkv = others[-1]
    assert asymkv["arm"] == "asymkv" and asymkv["to_asymkv"] == asymkv["bytes_to_asymkv"] == 1
    for row in others:
        assert row["to_full"] == pytest.approx(row["seconds"] / full["seconds"])
        assert row["to_asymkv"] == pytest.approx(row["seconds"] / asymkv["seconds"])
        assert row["bytes_to_asymkv"] == pytest.approx(row["extra_bytes"] / asymkv["extra_bytes"])
    assert found["machine"]["dtype"] == "float32" and found["machine"]["repeats"] == 1


def test_the_kl_is_that_of_evaluation(found: dict[str, Any], folder: str) -> None:
    model, tokenizer = models.load(folder)
    sample = tasks.load("needle-single", 1, CONTEXT)[0]
    n = found["rows"][0]["context"]
    arms = [NamedArm(arm, BUDGET / n) for arm in slimmer.ARMS]
    records = {record["arm"]: record for record in evaluate(model, tokenizer, sample, arms, CONTEXT)}
    for row in found["rows"][1:]:
        record = records[row["arm"]]
        assert record["budget"] == BUDGET and record["diagnostics"]["sinks"] == pytest.approx(20, abs=1)
        assert row["kl"] > 0 and row["kl"] == pytest.approx(record["kl"], rel=1e-3)


def test_a_fresh_process_is_another_one_and_its_errors_come_back() -> None:
    assert fresh(os.getpid) != os.getpid()
    with pytest.raises(FileNotFoundError):
        fresh(Path("no/such/file").read_text)


def test_the_peak_is_what_was_held_at_once_and_not_before() -> None:
    before = torch.ones(2**25)  # 128 MiB that are there already
    with peak(before.device) as found:
        del before
        for _ in range(2):
            large = torch.ones(2**26)  # 256 MiB at once, of which 128 take the place of what was freed
            del large
    assert found[0] == pytest.approx(128 * 2**20, rel=0.15)


def test_bad_requests_are_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "slimmer", "--model", folder, "--context", "1024"]
    assert main([*words, "--chunk", "64", "128", "--budget", "200"]) == 2
    assert "--budget 288" in capsys.readouterr().err
    with pytest.raises(UserError, match="untouched"):
        slimmer.run(folder, context=CONTEXT, budget=2000)


def test_it_is_a_table_for_people_and_json_for_programs(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slimmer.text(found).count("\n") == 4
    asked: dict[str, Any] = {}
    monkeypatch.setattr(slimmer, "run", lambda model, **given: asked.update(given) or found)
    assert main(["bench", "slimmer", "--chunk", "128", "256", "--repeats", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert asked["chunks"] == [128, 256] and asked["budget"] == 1056 and asked["context"] == 4096
