"""Ready-made RULER rows (Hsieh et al., 2024, arXiv:2404.06654): file ``4096_vt.jsonl`` is task ``ruler/4096_vt``.

A row has ``index``, ``input``, ``outputs`` and, in newer releases, ``answer_prefix``. NVIDIA's scripts put that prefix
behind the filled chat template, so the model goes on in a sentence that has begun; `Sample.prefix` is put there. Where
a row has none, its input is the user text as it is. The number in the name is the length RULER aimed at, in tokens of
the tokenizer it was made with.

QA tasks want one of the outputs (``string_match_part``), all others every one (``string_match_all``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvrepro.tasks import rows
from kvrepro.tasks.base import Sample, Task

# Longest answers, from NVIDIA's constants.py
MAX_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}

_FILE = re.compile(
    r"(\d+)_(niah_single_[123]|niah_multikey_[123]|niah_multivalue|niah_multiquery|vt|cwe|fwe|qa_[12])\.jsonl"
)


def find(files: Sequence[Path]) -> list[Task]:
    """The tasks among some files, recognised by their names: short contexts first."""
    matches = [(int(match[1]), match[2], path) for path in files if (match := _FILE.fullmatch(path.name))]
    return [
        Task(
            f"ruler/{length}_{kind}",
            "synthetic",
            partial(_load, f"ruler/{length}_{kind}", kind.split("_")[0], path),
        )
        for length, kind, path in sorted(matches)
    ]


def _load(task: str, family: str, path: Path, limit: int, context: int) -> list[Sample]:
    return rows.first(limit, (_sample(task, family, row) for row in rows.read(path)))


def _sample(task: str, family: str, row: rows.Row) -> Sample:
    prefix = row.text("answer_prefix", empty=True) if "answer_prefix" in row.values else ""
    name = f"{task}/{row.number('index')}"
    return sample(name, task, family, row.text("input"), row.texts("outputs"), prefix)


def sample(name: str, task: str, family: str, prompt: str, outputs: Sequence[str], prefix: str) -> Sample:
    """A sample named ``name``, ready-made or not, with the metric and longest answer of its family."""
    return Sample(
        id=name,
        task=task,
        category="synthetic",
        prompt=prompt,
        answers=tuple(outputs),
        metric="contains" if family == "qa" else "needle",
        max_new_tokens=MAX_NEW_TOKENS[family],
        chat=True,
        first_line=False,
        prefix=prefix,
    )
