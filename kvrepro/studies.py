"""The questions that need arms of their own: larger grids, on fewer samples.

kvrepro run --profile quick --study slimmer      into results/quick-slimmer

A profile says how much is run (``studies``: samples of each task, and a context), a study which arms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import profiles
from .errors import UserError
from .methods import available, method_class


@dataclass(frozen=True)
class Study:
    """Arms that answer one question together; the full cache is always among them.

    Attributes
    ----------
    question : str
    arms : tuple of str
    """

    question: str
    arms: tuple[str, ...]


def _arms_of(method: str, *but: str) -> tuple[str, ...]:
    return (method, *(f"{method}/{arm}" for arm in method_class(method).arms if arm not in but))


STUDIES = {
    "methods": Study(
        "All methods at the same budget",
        ("full", *(name for name in available() if name not in ("full", "full-folded", "adjacent")), "selkv/evict",
         "kvslimmer/drop-lighter"),
    ),
    "slimmer": Study(
        "Which weight, value and bias does KVSlimmer's merge need?", ("full", *_arms_of("kvslimmer"))
    ),
    "released": Study(
        "KVSlimmer as printed against as released, deviation by deviation",
        ("full", "kvslimmer", "asymkv", *_arms_of("kvslimmer-released")),
    ),
    "selectors": Study(
        "What matters more than the merge?",
        ("full", "snapkv", "selkv", "selkv/evict", "selkv/gate", *_arms_of("bifocal"), *_arms_of("adjacent"),
         *(f"selkv/{arm}" for arm in method_class("selkv").arms if arm.startswith("on-bifocal"))),
    ),
    "positions": Study(
        "Does it help to move kept keys to consecutive positions?",
        ("full", "streaming-llm", "streaming-llm/reindexed", "selkv", "selkv/reposition"),
    ),
}  # fmt: skip


def of(study: str, profile: str) -> profiles.Profile:
    """The profile that runs a study: fewer samples, its own context, and its arms.

    Raises
    ------
    UserError
        An unknown study or profile.

    Examples
    --------
    >>> of("positions", "quick").name
    'quick-positions'
    """
    if study not in STUDIES:
        raise UserError(f"unknown study {study!r}; known are {', '.join(STUDIES)}")
    whole = profiles.load(profile)
    tasks = {task: min(n, whole.studies["samples"]) for task, n in whole.tasks.items()}
    context = whole.studies["context"]
    return replace(whole, name=f"{profile}-{study}", context=context, tasks=tasks, arms=STUDIES[study].arms)
