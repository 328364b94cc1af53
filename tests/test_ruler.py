"""RULER rows in a folder: names, answers, prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrepro import tasks
from kvrepro.errors import UserError
from kvrepro.tasks import metrics

# NVIDIA's constants.py: longest answer, and whether all outputs are wanted
KINDS = {
    **{f"niah_{kind}_{i}": (128, True) for kind in ("single", "multikey") for i in (1, 2, 3)},
    "niah_multivalue": (128, True),
    "niah_multiquery": (128, True),
    "vt": (30, True),
    "cwe": (120, True),
    "fwe": (50, True),
    "qa_1": (32, False),
    "qa_2": (32, False),
}


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    text = {"input": f"What is hidden in {number}?", "answer_prefix": " It is", "outputs": ["11", "22"]}
    return {"index": number, "length": 4096, **text} | changes


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_all_tasks_at_all_lengths(tmp_path: Path) -> None:
    for length in (131072, 4096):
        for kind in KINDS:
            write(tmp_path / f"{length}_{kind}.jsonl", row(3), row(7))
    write(tmp_path / "4096_niah_single_4.jsonl", row())  # not one of RULER's
    found = [name for name in tasks.available(data=tmp_path) if name.startswith("ruler/")]
    assert found == [f"ruler/{length}_{kind}" for length in (4096, 131072) for kind in sorted(KINDS)]
    for name in found:
        first, second = tasks.load(name, 5, data=tmp_path)
        longest, wants_all = KINDS[name.partition("_")[2]]
        assert (first.id, second.id) == (f"{name}/3", f"{name}/7")
        assert (first.category, first.max_new_tokens) == ("synthetic", longest)
        assert (first.chat, first.first_line, first.prefix) == (True, False, " It is")
        assert first.prompt == "What is hidden in 3?"
        assert metrics.score(first, "11, I think") == (50 if wants_all else 100)
        assert metrics.score(first, "22 and 11") == 100


def test_older_rows_have_no_prefix(tmp_path: Path) -> None:
    bare = {k: v for k, v in row().items() if k != "answer_prefix"}
    write(tmp_path / "4096_vt.jsonl", bare, row(1, answer_prefix=""))
    assert [s.prefix for s in tasks.load("ruler/4096_vt", 2, data=tmp_path)] == ["", ""]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input": ""}, "'input' holds no text"),
        ({"outputs": []}, "at least one string"),
        ({"outputs": ["1", 2]}, "at least one string"),
        ({"answer_prefix": None}, "'answer_prefix' has to be a string"),
        ({"index": "1"}, "'index' has to be a whole number"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "4096_vt.jsonl", row(), row(1) | changes)
    with pytest.raises(UserError) as error:
        tasks.load("ruler/4096_vt", 1, data=tmp_path)
    assert str(error.value).startswith(f"{path}, line 2: ") and why in str(error.value)


def test_a_repeated_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "4096_vt.jsonl", row(), row())
    with pytest.raises(UserError, match="two rows have the id ruler/4096_vt/0"):
        tasks.load("ruler/4096_vt", 1, data=tmp_path)
