"""Tasks: where samples come from, how they become prompts, how predictions are scored.

    tasks.available()                             names and categories
    tasks.load("pydoc-code", 16, context=2048)    the first 16 samples, always the same

A benchmark is a list of `Task`; `_tasks` is the one place that knows them all. Submodules are imported on use, so that
importing the package reads no corpus.
"""

from __future__ import annotations

import functools
from functools import cache

from kvrepro.errors import UserError
from kvrepro.tasks.base import CATEGORIES, Sample, Task

__all__ = ["CATEGORIES", "Sample", "Task", "available", "load"]


@cache
def _tasks() -> dict[str, Task]:
    from kvrepro.tasks import manifest, pydoc

    offline = [
        Task(name, b.category, functools.partial(manifest.load, name)) for name, b in pydoc.BUILDERS.items()
    ]
    return {task.name: task for task in offline}


def available() -> dict[str, str]:
    """Task names with their categories."""
    return {name: task.category for name, task in _tasks().items()}


def load(task: str, limit: int, context: int = 2048) -> list[Sample]:
    """The first ``limit`` samples of a task.

    Parameters
    ----------
    task : str
        A name from `available`.
    limit : int
        Number of samples, at least 1. Sample i does not depend on it.
    context : int, default 2048
        Longest prompt in tokens, 1024 to 8192 for the offline tasks.

    Returns
    -------
    list of Sample

    Raises
    ------
    UserError
        For an unknown task, a limit below 1, a context out of range, or packages whose text is not the recorded one.
    """
    if task not in _tasks():
        raise UserError(
            f"unknown task {task!r}; there is no builder for it; choose from {', '.join(available())}"
        )
    if limit < 1:
        raise UserError(f"limit {limit} asks for no sample; a task needs at least one; give limit 1 or more")
    return _tasks()[task].load(limit, context)
