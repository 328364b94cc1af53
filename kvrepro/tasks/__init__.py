"""Tasks: where samples come from, how they become prompts, how predictions are scored.

    tasks.available()                                  names and categories of what needs no download
    tasks.load("pydoc-code", 16, context=2048)         the first 16 samples, always the same
    tasks.load("longbench/hotpotqa", 16, data="DIR")   a benchmark's rows in a folder, or data="hub" to fetch them

A benchmark is a list of `Task`; `_tasks` is the one place that knows them all. Submodules are imported on use, so that
importing the package reads no corpus.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvrepro.errors import UserError
from kvrepro.tasks.base import CATEGORIES, Count, Sample, Task

__all__ = ["CATEGORIES", "Count", "Sample", "Task", "available", "duplicates", "load"]

HUB = "hub"  # as `data`: fetch from the hub


@cache
def _offline() -> dict[str, Task]:
    from kvrepro.tasks import manifest, pydoc, ruler_made

    built = [
        Task(name, b.category, functools.partial(manifest.load, name)) for name, b in pydoc.BUILDERS.items()
    ]
    return {task.name: task for task in [*built, *ruler_made.find()]}


def _tasks(data: str | Path | None) -> dict[str, Task]:
    """The offline tasks, and the benchmarks that the folder (or the hub) has."""
    source = data or os.environ.get("KVREPRO_LONGBENCH")
    if not source:
        return _offline()
    from kvrepro.tasks import longbench, rows, ruler

    if str(source) == HUB:
        found = longbench.from_hub()
    else:
        files = rows.files(Path(source).expanduser())
        found = [*longbench.find(files), *ruler.find(files)]
        if not found:
            raise UserError(
                f"no benchmark rows in the data folder {source}; files are recognised by name, such as hotpotqa.jsonl, "
                "hotpotqa_e.jsonl or 4096_vt.jsonl; give the folder that holds them"
            )
    for name, times in Counter(task.name for task in found).items():
        if times > 1:
            raise UserError(
                f"{times} files in {source} would be the task {name}; only one can be; give its own folder"
            )
    return _offline() | {task.name: task for task in found}


def available(data: str | Path | None = None) -> dict[str, str]:
    """Task names with their categories: the offline ones, and the benchmarks of ``data`` (as for `load`)."""
    return {name: task.category for name, task in _tasks(data).items()}


def load(
    task: str, limit: int, context: int = 2048, data: str | Path | None = None, count: Count | None = None
) -> list[Sample]:
    """The first ``limit`` samples of a task.

    Parameters
    ----------
    task : str
        A name from `available`.
    limit : int
        Number of samples, at least 1. Sample i does not depend on it. A benchmark may have fewer.
    context : int, default 2048
        Longest prompt in tokens, 1024 to 8192 for the offline tasks; 4096 to 131072 for ``ruler-made/``, whose answer
        it has room for, too. A benchmark's rows are as long as they are; `prompts.encode` cuts the middle out of those
        that are too long and says so.
    data : str or Path, optional
        Folder with a benchmark's rows, or ``"hub"``; default: the environment variable ``KVREPRO_LONGBENCH``.
    count : callable, optional
        Tokens of a text, by the model's own tokenizer: what ``ruler-made/`` tasks are measured with. No other needs it.

    Returns
    -------
    list of Sample

    Raises
    ------
    UserError
        For an unknown task, a limit below 1, a context out of range, a tokenizer that is needed and not given, packages
        whose text is not the recorded one, a malformed row, or a file that cannot be read or fetched.
    """
    known = _tasks(data)
    if task not in known:
        raise UserError(
            f"unknown task {task!r}; there is no builder for it and no file of it; choose from {', '.join(known)}, or "
            f"name a folder with benchmark rows (--data DIR or KVREPRO_LONGBENCH; --data {HUB} fetches LongBench's)"
        )
    if limit < 1:
        raise UserError(f"limit {limit} asks for no sample; a task needs at least one; give limit 1 or more")
    found = known[task]
    return found.load(limit, context, count) if found.counted else found.load(limit, context)


def duplicates(samples: Sequence[Sample]) -> dict[str, str]:
    """Samples that ask again what an earlier one asked: id to the earlier id.

    LongBench-E was drawn from LongBench's sources, so a row may stand in both, under two ids. Each set is complete by
    itself; whoever averages over both leaves these out, or counts a question twice.
    """
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    again = {}
    for sample in samples:
        earlier = first.setdefault((sample.prompt, sample.answers), sample.id)
        if earlier != sample.id:
            again[sample.id] = earlier
    return again
