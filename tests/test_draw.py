"""Which rows of a benchmark a run takes: at random but always the same, uncut where the profile says so, each once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_longbench import PROMPT, row, write

from kvrepro import profiles, runner
from kvrepro.errors import UserError

MODEL = "smollm2-135m"
LONG = "a few words of some text " * 2000  # about 12,000 tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    config = tmp_path / "config"
    write(config / "dataset2prompt.json", {"hotpotqa": PROMPT})
    write(config / "dataset2maxlen.json", {"hotpotqa": 8})
    write(
        tmp_path / "hotpotqa.jsonl",
        *(row(number=i, context=LONG if i % 2 else f"text {i}") for i in range(12)),
    )
    extended = [row("hotpotqa_e", number=i, _id=f"e{i}") for i in (0, 50, 51)]
    extended[0]["context"] = "text 0"  # the same question as a row of the standard set
    write(tmp_path / "hotpotqa_e.jsonl", *extended)
    return tmp_path


def drawn(data: Path | None, limit: int | None = None, **changes: object) -> list[str]:
    profile = replace(
        profiles.load("longbench"), tasks={"longbench/hotpotqa": 6, "longbench-e/hotpotqa": 6}, **changes
    )
    return [sample.id for sample in runner._samples(profile, None, limit, data, MODEL)]


def test_only_rows_that_fit_are_taken(data: Path) -> None:
    short = {f"longbench/hotpotqa/id{i}" for i in (2, 4, 6, 8, 10)}  # 0 may be asked in the other set
    standard = {name for name in drawn(data) if name.startswith("longbench/")}
    assert short <= standard <= short | {"longbench/hotpotqa/id0"}
    assert {name for name in drawn(data, whole=False) if name.startswith("longbench/")} - standard


def test_a_question_in_both_sets_is_asked_once(data: Path) -> None:
    found = drawn(data)
    assert len({"longbench/hotpotqa/id0", "longbench-e/hotpotqa/e0"} & set(found)) == 1 and len(found) == 8


def test_the_draw_is_of_a_seed_and_not_of_the_file_s_order(data: Path) -> None:
    few = drawn(data, limit=2, whole=False)
    assert few == [name for name in drawn(data, whole=False) if name in few]  # the first of the longer draw
    assert {tuple(drawn(data, limit=2, whole=False, seed=seed)) for seed in range(8)} != {tuple(few)}
    lines = data.joinpath("hotpotqa.jsonl").read_text().splitlines(keepends=True)
    data.joinpath("hotpotqa.jsonl").write_text("".join(reversed(lines)))
    assert drawn(data, limit=2, whole=False) == few


def test_tasks_take_turns(data: Path) -> None:
    kinds = [name.partition("/")[0] for name in drawn(data)][:4]
    assert sorted(kinds[:2]) == sorted(kinds[2:]) == ["longbench", "longbench-e"]


def test_a_benchmark_without_its_rows_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVREPRO_LONGBENCH", raising=False)
    profile = profiles.load("longbench")
    with pytest.raises(UserError, match=r"unknown task 'longbench-e/qasper'.*--data DIR, or --data hub"):
        runner._samples(profile, None, None, None, MODEL)


def test_a_context_that_no_row_fits_is_one_line(data: Path) -> None:
    with pytest.raises(UserError, match="no row fits 4 tokens whole"):
        drawn(data, context=4)


def test_a_context_of_one_s_own_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert runner.folder("papers", "longchat-7b", "cuda", context=31500) == "papers-31500-longchat-7b-cuda"
    with pytest.raises(UserError, match="--context 1 is no prompt"):
        runner.run("smoke", out=tmp_path, context=1)
