"""LongBench's protocol on rows of our own, in a folder laid out like the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro import tasks
from kvrepro.errors import UserError
from kvrepro.tasks import longbench, metrics, rows

# dataset: category, metric, chat template, first line only
PROTOCOL = {
    "narrativeqa": ("single-doc", "qa_f1", True, False),
    "qasper": ("single-doc", "qa_f1", True, False),
    "multifieldqa_en": ("single-doc", "qa_f1", True, False),
    "hotpotqa": ("multi-doc", "qa_f1", True, False),
    "2wikimqa": ("multi-doc", "qa_f1", True, False),
    "musique": ("multi-doc", "qa_f1", True, False),
    "gov_report": ("summarization", "rouge_l", True, False),
    "qmsum": ("summarization", "rouge_l", True, False),
    "multi_news": ("summarization", "rouge_l", True, False),
    "trec": ("few-shot", "classification", False, True),
    "triviaqa": ("few-shot", "qa_f1", False, True),
    "samsum": ("few-shot", "rouge_l", False, True),
    "passage_count": ("synthetic", "count", True, False),
    "passage_retrieval_en": ("synthetic", "retrieval", True, False),
    "lcc": ("code", "code_sim", False, False),
    "repobench-p": ("code", "code_sim", False, False),
}
EXTENDED = [name for name in PROTOCOL if name not in ("narrativeqa", "musique", "qmsum")]
GOLD = {"count": "3", "retrieval": "Paragraph 3", "classification": "Date", "code_sim": "x = 1"}
PROMPT = "Read:\n{context}\n\nQ: {input}\nA: "
V2_PROMPT = "<$DOC$> $Q$ (A) $C_A$ (B) $C_B$ (C) $C_C$ (D) $C_D$"


def row(dataset: str = "hotpotqa", number: int = 0, **changes: Any) -> dict[str, Any]:
    metric = PROTOCOL[dataset.removesuffix("_e")][1]
    return {
        "input": f"what is {number}?",
        "context": f"some text about {number}",
        "answers": [GOLD.get(metric, "two words")],
        "length": 5,
        "dataset": dataset,
        "language": "en",
        "all_classes": ["Date", "Plant"] if metric == "classification" else None,
        "_id": f"id{number}",
    } | changes


def row_v2(number: int = 0, **changes: Any) -> dict[str, Any]:
    choices = {f"choice_{c}": f" {c.lower()} \n" for c in "ABCD"}
    text = {"question": " which one? ", "context": "\na long text\n", "answer": "B", "domain": "Code"}
    return {"_id": f"id{number}", **choices, **text} | changes


def write(path: Path, *values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVREPRO_LONGBENCH", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """longbench/ with a config, longbench_e/ without one of its own; two rows of every dataset."""
    for name in PROTOCOL:
        write(tmp_path / "longbench" / f"{name}.jsonl", row(name, 0), row(name, 1))
    for name in EXTENDED:
        write(tmp_path / "longbench_e" / f"{name}_e.jsonl", row(f"{name}_e", 0), row(f"{name}_e", 7))
    config = tmp_path / "longbench" / "config"
    write(config / "dataset2prompt.json", dict.fromkeys(PROTOCOL, PROMPT))
    write(config / "dataset2maxlen.json", {name: 8 + i for i, name in enumerate(PROTOCOL)})
    (config / "0shot.txt").write_text(V2_PROMPT)
    return tmp_path


# What is there -----------------------------------------------------------------------------------------------


def test_a_folder_adds_what_it_holds(folder: Path) -> None:
    offline = tasks.available()
    wanted = {f"longbench/{name}": p[0] for name, p in PROTOCOL.items()}
    wanted |= {f"longbench-e/{name}": PROTOCOL[name][0] for name in EXTENDED}
    assert tasks.available(data=folder) == offline | wanted
    assert set(tasks.available(data=folder / "longbench_e")) - set(offline) == {
        name for name in wanted if name.startswith("longbench-e/")
    }
    assert not any(name.startswith("longbench") for name in offline)


def test_the_variable_names_a_folder_and_data_wins(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other / "lcc.jsonl", row("lcc"))
    monkeypatch.setenv("KVREPRO_LONGBENCH", str(folder))
    assert "longbench/hotpotqa" in tasks.available()
    assert len(tasks.load("longbench/hotpotqa", 2)) == 2
    assert "longbench/hotpotqa" not in tasks.available(data=other)
    assert set(tasks.available(data=other)) > {"longbench/lcc", "pydoc-code"}


def test_without_a_folder_the_error_says_where_rows_come_from() -> None:
    with pytest.raises(UserError, match=r"unknown task 'longbench/hotpotqa'.*KVREPRO_LONGBENCH.*--data hub"):
        tasks.load("longbench/hotpotqa", 1)


def test_sets_that_have_no_metric_here_are_no_tasks(folder: Path) -> None:
    write(folder / "longbench" / "dureader.jsonl", row())
    with pytest.raises(UserError, match="unknown task 'longbench/dureader'"):
        tasks.load("longbench/dureader", 1, data=folder)


def test_bad_folders_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UserError, match=r"cannot list the data folder .*nowhere"):
        tasks.available(data=folder / "nowhere")
    with pytest.raises(UserError, match="no benchmark rows in the data folder"):
        tasks.available(data=tmp_path_factory.mktemp("empty"))
    write(folder / "copy" / "lcc.jsonl", row("lcc"))
    with pytest.raises(UserError, match=r"2 files in .* would be the task longbench/lcc"):
        tasks.available(data=folder)


# The protocol ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [("longbench", name) for name in PROTOCOL] + [("longbench-e", name) for name in EXTENDED],
)
def test_protocol(folder: Path, family: str, name: str) -> None:
    first, second = tasks.load(f"{family}/{name}", 9, data=folder)
    category, metric, chat, first_line = PROTOCOL[name]
    assert first.id == f"{family}/{name}/id0"
    assert first.task == f"{family}/{name}"
    assert second.id.endswith("/id1" if family == "longbench" else "/id7")
    assert (first.category, first.metric, first.chat, first.first_line) == (
        category,
        metric,
        chat,
        first_line,
    )
    assert first.prompt == "Read:\nsome text about 0\n\nQ: what is 0?\nA: "
    assert first.max_new_tokens == 8 + list(PROTOCOL).index(name)
    assert first.classes == (("Date", "Plant") if name == "trec" else ())
    assert metrics.score(first, first.answers[0]) == pytest.approx(100)


def test_prompts_are_byte_for_byte(folder: Path) -> None:
    odd = row(
        context="{input} \r\n\u2028\ttab {x}\\n 中 \U0001f600 ", input=" {context}\n", answers=["a", "b"]
    )
    write(folder / "longbench" / "hotpotqa.jsonl", odd)
    sample = tasks.load("longbench/hotpotqa", 1, data=folder)[0]
    assert sample.prompt == PROMPT.format(**odd)
    assert sample.answers == ("a", "b")


def test_limit_takes_the_first_rows(folder: Path) -> None:
    assert [s.id for s in tasks.load("longbench/lcc", 1, 4096, data=folder)] == ["longbench/lcc/id0"]
    assert [s.id for s in tasks.load("longbench/lcc", 1, 1024, data=folder)] == ["longbench/lcc/id0"]
    with pytest.raises(UserError, match="limit 0"):
        tasks.load("longbench/lcc", 0, data=folder)


def test_repobench_may_have_its_text_in_the_context(folder: Path) -> None:
    write(folder / "longbench" / "repobench-p.jsonl", row("repobench-p", input="", language="unknown"))
    assert tasks.load("longbench/repobench-p", 1, data=folder)[0].prompt.endswith("Q: \nA: ")


def test_an_empty_input_is_fine_where_the_prompt_has_none(folder: Path) -> None:
    write(folder / "longbench" / "config" / "dataset2prompt.json", {"gov_report": "{context} Summary:"})
    write(folder / "longbench" / "gov_report.jsonl", row("gov_report", input=""))
    assert tasks.load("longbench/gov_report", 1, data=folder)[0].prompt == "some text about 0 Summary:"


def test_ids_never_become_paths(folder: Path) -> None:
    given = ["minilongbench-hotpotqa-3-idx58", "../../etc/passwd", "..", "a/b", "a_b", "a b\n", "x" * 300]
    write(folder / "longbench" / "hotpotqa.jsonl", *(row(_id=text) for text in given))
    ids = [s.id for s in tasks.load("longbench/hotpotqa", 99, data=folder)]
    assert len(set(ids)) == len(given)
    assert ids[0] == "longbench/hotpotqa/minilongbench-hotpotqa-3-idx58"
    for made in ids:
        last = made.removeprefix("longbench/hotpotqa/")
        assert last == Path(last).name and not last.startswith(".") and len(last) < 90 and last.isprintable()


def test_a_question_of_both_sets_is_found(folder: Path) -> None:
    both = [*tasks.load("longbench/lcc", 9, data=folder), *tasks.load("longbench-e/lcc", 9, data=folder)]
    assert tasks.duplicates(both) == {"longbench-e/lcc/id0": "longbench/lcc/id0"}
    assert tasks.duplicates(both[:2]) == {}


# Malformed rows ----------------------------------------------------------------------------------------------

BROKEN = {
    "context missing": ({k: v for k, v in row().items() if k != "context"}, "'context' is missing"),
    "context a number": (row(context=5), "'context' has to be a string, not int"),
    "context blank": (row(context=" \n"), "'context' holds no text"),
    "context with NUL": (row(context="a\0b"), "'context' holds a NUL"),
    "half a surrogate": (row(context="a\ud800"), "surrogate"),
    "no question": (row(input=""), "'input' holds no text"),
    "input null": (row(input=None), "'input' has to be a string, not NoneType"),
    "answers a string": (row(answers="a"), "'answers' has to be a list of strings, not str"),
    "no answer": (row(answers=[]), "at least one string"),
    "answers of numbers": (row(answers=["a", 1]), "at least one string and nothing else"),
    "blank answer": (row(answers=["a", ""]), "'answers' holds no text"),
    "length a string": (row(length="5"), "'length' has to be a whole number, not str"),
    "length true": (row(length=True), "whole number of at least 0"),
    "length negative": (row(length=-1), "whole number of at least 0"),
    "Chinese": (row(language="zh"), "language 'zh' is not supported"),
    "another dataset": (row("qasper"), "says dataset 'qasper', the file is one of hotpotqa"),
    "no id": (row(_id=""), "'_id' holds no text"),
    "a list": ([1, 2], "not a JSON object but list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_rows_are_named(folder: Path, case: str) -> None:
    """Whatever the limit: rows behind it are checked, too."""
    broken, why = BROKEN[case]
    path = write(folder / "longbench" / "hotpotqa.jsonl", row(), broken)
    with pytest.raises(UserError) as error:
        tasks.load("longbench/hotpotqa", 1, data=folder)
    message = str(error.value)
    assert message.startswith(f"{path}, line 2: ") and why in message and "\n" not in message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"input": ', r"line 1: not JSON \(Expecting value at character 10\)"),
        (json.dumps(row()).encode() + b"\n\n{'input'}\n", r"line 3: not JSON"),
        (b'{"input": "\xff"}', r"line 1: byte 11 is not UTF-8"),
        (b'{"input": "\x00"}', r"line 1: there is a NUL byte"),
        (b"[" * 100_000, r"line 1: no JSON that Python can read"),
        (b'{"length": ' + b"9" * 9999 + b"}", r"line 1: no JSON that Python can read"),
        (b" \n\n", r"hotpotqa\.jsonl has no rows"),
    ],
)
def test_malformed_files_are_named(folder: Path, content: bytes, why: str) -> None:
    (folder / "longbench" / "hotpotqa.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=why) as error:
        tasks.load("longbench/hotpotqa", 1, data=folder)
    assert "\n" not in str(error.value)


def test_a_repeated_id_is_refused(folder: Path) -> None:
    write(folder / "longbench" / "hotpotqa.jsonl", row(), row(context="other"))
    with pytest.raises(UserError, match="two rows have the id longbench/hotpotqa/id0"):
        tasks.load("longbench/hotpotqa", 1, data=folder)


def test_classification_needs_its_classes(folder: Path) -> None:
    write(folder / "longbench" / "trec.jsonl", row("trec", all_classes=None))
    with pytest.raises(UserError, match=r"trec\.jsonl, line 1: field 'all_classes' has to be a list"):
        tasks.load("longbench/trec", 1, data=folder)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(row())), VALUES, st.binary(max_size=20), st.booleans())
def test_any_row_loads_or_is_refused(field: str, value: Any, noise: bytes, whole: bool) -> None:
    line = json.dumps(row("trec") | {field: value}).encode() if whole else noise
    message = ""
    try:
        for found in rows.from_lines([line], "f"):
            longbench._sample("longbench/trec", "trec", PROMPT, 8, found)
    except UserError as error:
        message = str(error)
    assert "\n" not in message


# The configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("dataset2prompt.json", "{", "dataset2prompt.json has no usable entry 'hotpotqa'"),
        ("dataset2prompt.json", "{}", "dataset2prompt.json has no usable entry 'hotpotqa'"),
        ("dataset2prompt.json", "[]", "dataset2prompt.json has no usable entry 'hotpotqa'"),
        ("dataset2prompt.json", '{"hotpotqa": "{input}"}', "does not name {context}"),
        ("dataset2prompt.json", '{"hotpotqa": "{context} {answers}"}', "does not name {context}"),
        ("dataset2prompt.json", '{"hotpotqa": "{context} {input.x}"}', "does not name {context}"),
        ("dataset2prompt.json", '{"hotpotqa": "{context} {"}', "does not name {context}"),
        ("dataset2prompt.json", '{"hotpotqa": "{context:{x}}"}', "does not name {context}"),
        ("dataset2prompt.json", '{"hotpotqa": "{context:d}"}', "does not name {context}"),
        ("dataset2maxlen.json", '{"hotpotqa": "32"}', "dataset2maxlen.json has no usable entry 'hotpotqa'"),
        ("dataset2maxlen.json", '{"hotpotqa": true}', "dataset2maxlen.json has no usable entry 'hotpotqa'"),
        ("dataset2maxlen.json", '{"hotpotqa": 0}', "gives hotpotqa 0 tokens"),
    ],
)
def test_a_broken_configuration_is_named(folder: Path, name: str, content: str, why: str) -> None:
    (folder / "longbench" / "config" / name).write_text(content)
    with pytest.raises(UserError) as error:
        tasks.load("longbench/hotpotqa", 1, data=folder)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_the_configuration_may_lie_one_level_up(folder: Path) -> None:
    """The layout of the unpacked archive: data/ beside config/."""
    (folder / "longbench" / "config").rename(folder / "config")
    assert len(tasks.load("longbench/lcc", 1, data=folder)) == 1


# LongBench-v2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["longbench-v2.jsonl", "data.json"])
def test_longbench_v2(folder: Path, name: str) -> None:
    content = [row_v2(0), row_v2(1, context="about $Q$")]
    write(folder / "longbench-v2" / name, *([content] if name == "data.json" else content))
    assert tasks.available(data=folder)["longbench-v2"] == "single-doc"
    first, second = tasks.load("longbench-v2", 9, data=folder)
    assert first.id == "longbench-v2/id0"
    assert first.prompt == "<a long text> which one? (A) a (B) b (C) c (D) d"
    assert second.prompt.startswith("<about which one?>")  # the official order of replacement
    assert (first.chat, first.first_line, first.max_new_tokens) == (True, False, 128)
    assert metrics.score(first, first.answers[0]) == 100
    assert metrics.score(first, "The correct answer is (C).") == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (row_v2(), "is not a JSON array of rows"),
        ([], "is not a JSON array of rows"),
        ([row_v2(), row_v2(1, answer="E")], "data.json, row 2: answer 'E' is not one of A, B, C, D"),
        ([row_v2(choice_C=" ")], "data.json, row 1: field 'choice_C' holds no text"),
        ([row_v2(), 5], "data.json, row 2: not a JSON object but int"),
    ],
)
def test_malformed_v2_rows_are_named(folder: Path, content: Any, why: str) -> None:
    write(folder / "longbench-v2" / "data.json", content)
    with pytest.raises(UserError) as error:
        tasks.load("longbench-v2", 1, data=folder)
    assert why in str(error.value) and "\n" not in str(error.value)
