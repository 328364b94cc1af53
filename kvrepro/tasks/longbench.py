"""LongBench (16 English sets), LongBench-E and LongBench-v2, by their official protocol.

    kvrepro run --tasks longbench/hotpotqa,longbench-e/hotpotqa --data DIR     DIR: JSONL in LongBench's schema
    kvrepro run --tasks longbench/hotpotqa --data hub                          fetched at pinned commits

Bai et al., 2023 (arXiv:2308.14508) and 2024 (arXiv:2412.15204). Prompts are ``dataset2prompt[dataset].format(**row)``
byte for byte, lengths are ``dataset2maxlen``'s; the files of LongBench-E and their rows carry an ``_e`` that these
tables do not have. A folder's files may lie in it or one level below; ``config/`` with the two tables (``0shot.txt``
for LongBench-v2) is looked for beside the file, one level up, and in a neighbour called ``longbench``, then fetched.

LongBench-v2 asks 503 multiple-choice questions of six kinds, which are not LongBench's categories: it is one task,
filed under single-doc, and is best reported by itself.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

from kvrepro.errors import UserError
from kvrepro.tasks import hub, rows
from kvrepro.tasks.base import Sample, Task

DATASETS = {  # category, metric (eval.py's dataset2metric)
    "narrativeqa": ("single-doc", "qa_f1"),
    "qasper": ("single-doc", "qa_f1"),
    "multifieldqa_en": ("single-doc", "qa_f1"),
    "hotpotqa": ("multi-doc", "qa_f1"),
    "2wikimqa": ("multi-doc", "qa_f1"),
    "musique": ("multi-doc", "qa_f1"),
    "gov_report": ("summarization", "rouge_l"),
    "qmsum": ("summarization", "rouge_l"),
    "multi_news": ("summarization", "rouge_l"),
    "trec": ("few-shot", "classification"),
    "triviaqa": ("few-shot", "qa_f1"),
    "samsum": ("few-shot", "rouge_l"),
    "passage_count": ("synthetic", "count"),
    "passage_retrieval_en": ("synthetic", "retrieval"),
    "lcc": ("code", "code_sim"),
    "repobench-p": ("code", "code_sim"),
}
ONLY_STANDARD = ("narrativeqa", "musique", "qmsum")  # LongBench-E has the other 13
RAW = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # no chat template
# Of samsum the official code also ends the decoding at a newline; the cut leaves the same text to be scored.
FIRST_LINE = ("trec", "triviaqa", "samsum")
LANGUAGES = ("en", "python", "java", "csharp", "unknown")  # unknown: some copies of the code sets

Read = Callable[[], Iterator[rows.Row]]

V2 = "longbench-v2"
V2_FILES = ("longbench-v2.jsonl", "data.json")  # the second is the official name
V2_MAX_NEW_TOKENS = 128


def find(files: Sequence[Path]) -> list[Task]:
    """The tasks among some files, recognised by their names."""
    found = [
        Task(task, DATASETS[dataset][0], partial(_load, task, dataset, partial(rows.read, path), path.parent))
        for task, dataset, name in _names()
        for path in files
        if path.name == name
    ]
    v2 = [path for path in files if path.name in V2_FILES]
    return found + [
        Task(V2, "single-doc", partial(_load_v2, partial(rows.read, path), path.parent)) for path in v2
    ]


def from_hub() -> list[Task]:
    """All tasks; the files are fetched when the first sample is asked for."""
    found = [
        Task(task, DATASETS[dataset][0], partial(_load, task, dataset, partial(_member, name), None))
        for task, dataset, name in _names()
    ]
    return [*found, Task(V2, "single-doc", partial(_load_v2, _array, None))]


def _names() -> Iterator[tuple[str, str, str]]:
    """Task, dataset and file name."""
    for dataset in DATASETS:
        yield f"longbench/{dataset}", dataset, f"{dataset}.jsonl"
    for dataset in DATASETS:
        if dataset not in ONLY_STANDARD:
            yield f"longbench-e/{dataset}", dataset, f"{dataset}_e.jsonl"


def _member(name: str) -> Iterator[rows.Row]:
    """The rows of one file of the official archive; nothing is unpacked."""
    path = hub.dataset(hub.LONGBENCH)
    with zipfile.ZipFile(path) as archive, archive.open(f"data/{name}") as lines:
        yield from rows.from_lines(lines, f"{path.name}/{name}")


def _array() -> Iterator[rows.Row]:
    return rows.read(hub.dataset(hub.LONGBENCH_V2))


# LongBench and LongBench-E ------------------------------------------------------------------------------------


def _load(task: str, dataset: str, read: Read, folder: Path | None, limit: int, context: int) -> list[Sample]:
    """The first ``limit`` rows; all are checked. ``context`` changes nothing: long prompts are cut when encoded."""
    prompt, length = _protocol(dataset, folder)
    return rows.first(limit, (_sample(task, dataset, prompt, length, row) for row in read()))


def _sample(task: str, dataset: str, prompt: str, max_new_tokens: int, row: rows.Row) -> Sample:
    named = row.text("dataset")
    if named.removesuffix("_e") != dataset:
        raise row.wrong(f"the row says dataset {named[:40]!r}, the file is one of {dataset}")
    if (language := row.text("language")) not in LANGUAGES:
        raise row.wrong(f"language {language[:40]!r} is not supported (English and code are)")
    row.number("length")
    category, metric = DATASETS[dataset]
    # some copies of repobench-p hold the whole text in the context
    question = "{input}" in prompt and dataset != "repobench-p"
    texts = {"context": row.text("context"), "input": row.text("input", empty=not question)}
    classes = row.texts("all_classes") if metric == "classification" else ()
    return Sample(
        id=f"{task}/{rows.safe_id(row.text('_id'))}",
        task=task,
        category=category,
        prompt=prompt.format(**texts),
        answers=row.texts("answers"),
        metric=metric,
        max_new_tokens=max_new_tokens,
        chat=dataset not in RAW,
        first_line=dataset in FIRST_LINE,
        classes=classes,
    )


def _protocol(dataset: str, folder: Path | None) -> tuple[str, int]:
    """Prompt template and longest answer of a dataset."""
    prompt = _entry("dataset2prompt.json", dataset, folder, str)
    try:
        fields = {field for _, field, _, _ in Formatter().parse(prompt) if field is not None}
        prompt.format(context="", input="")
    except (ValueError, LookupError, AttributeError):
        fields = set()
    if "context" not in fields or not fields <= {"context", "input"}:
        raise UserError(
            f"the prompt of {dataset} in dataset2prompt.json does not name {{context}} (and {{input}}) alone; rows "
            "have nothing else to fill in; restore the official file"
        )
    length = _entry("dataset2maxlen.json", dataset, folder, int)
    if length < 1:
        raise UserError(f"dataset2maxlen.json gives {dataset} {length} tokens; restore the official file")
    return prompt, length


def _entry(name: str, dataset: str, folder: Path | None, kind: type) -> Any:
    text = _official(name, folder)
    try:
        value = json.loads(text)[dataset]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    if type(value) is not kind:  # True is an int, too
        raise UserError(f"{name} has no usable entry {dataset!r}; it is not the official file; restore that")
    return value


def _official(name: str, folder: Path | None) -> str:
    """A protocol file: beside the rows, else the pinned one."""
    if folder is not None:
        here = folder.resolve()
        for place in (here, here.parent, here.parent / "longbench"):
            path = place / "config" / name
            if path.is_file():
                try:
                    return path.read_bytes().decode()  # no newline is translated
                except (OSError, UnicodeDecodeError) as error:
                    raise UserError(f"cannot read {path} as UTF-8 text; restore the official file") from error
    try:
        return hub.protocol(name)
    except UserError as error:
        if folder is None:
            raise
        raise UserError(f"no config/{name} beside {folder}, and {error}") from error


# LongBench-v2 -------------------------------------------------------------------------------------------------


def _load_v2(read: Read, folder: Path | None, limit: int, context: int) -> list[Sample]:
    template = _official("0shot.txt", folder)
    return rows.first(limit, (_sample_v2(template, row) for row in read()))


def _sample_v2(prompt: str, row: rows.Row) -> Sample:
    fields = {"$DOC$": "context", "$Q$": "question", **{f"$C_{c}$": f"choice_{c}" for c in "ABCD"}}
    for mark, field in fields.items():  # in the official order, which replaces in the document, too
        prompt = prompt.replace(mark, row.text(field).strip())
    answer = row.text("answer")
    if answer not in ("A", "B", "C", "D"):
        raise row.wrong(f"answer {answer[:40]!r} is not one of A, B, C, D")
    return Sample(
        id=f"{V2}/{rows.safe_id(row.text('_id'))}",
        task=V2,
        category="single-doc",
        prompt=prompt,
        answers=(f"The correct answer is ({answer})",),
        metric="choice",
        max_new_tokens=V2_MAX_NEW_TOKENS,
        chat=True,
        first_line=False,
    )
