"""The questions that need arms of their own: larger grids, on fewer samples.

kvrepro run --profile quick --study slimmer      into results/quick-slimmer

A profile says how much is run (``studies``: tasks, samples of each, and a context), a study which arms.
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
    retain : tuple of float
        Shares to keep; none: the profile's.
    """

    question: str
    arms: tuple[str, ...]
    retain: tuple[float, ...] = ()


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
    "sweep": Study(
        "How does each method stand from 10 to 90 %?",
        ("full", "streaming-llm", "h2o", "snapkv", "pyramidkv", "look-m", "bifocal", "selkv", "selkv/evict"),
        (0.1, 0.25, 0.5, 0.75, 0.9),
    ),
    "sweep-chunked": Study(
        "And the methods that compress chunk by chunk?",
        ("full", "streaming-llm", "asymkv", "kvslimmer", "kvslimmer/drop-lighter"),
        (0.1, 0.25, 0.5),
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
    size = whole.studies["default"] | whole.studies.get(study, {})
    tasks = {task: min(whole.tasks[task], size["samples"]) for task in size.get("tasks", whole.tasks)}
    asked = STUDIES[study]
    return replace(
        whole, name=f"{profile}-{study}", context=size["context"], tasks=tasks, arms=asked.arms,
        retain=asked.retain or whole.retain,
    )  # fmt: skip
