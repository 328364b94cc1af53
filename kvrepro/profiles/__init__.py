"""How much is run, each profile a readable YAML file beside this one.

kvrepro run --profile quick                      `smoke` (CI, minutes), `quick` (the default), `full`: offline tasks
kvrepro run --profile longbench --data DIR       `longbench`, `ruler`, `papers`: rows of the benchmarks
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvrepro.errors import UserError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Profile:
    """The size of a run.

    Attributes
    ----------
    context
        Longest prompt, in tokens.
    tasks
        Samples for each task, at most.
    retain
        Shares of the prompt's entries to keep, in (0, 1].
    arms
        Arms of the experiment, by name.
    seed
        Seed of everything random: methods that draw.
    studies
        Size of the studies (see ``kvrepro.studies``), whose arms often need a prefill each: ``samples`` of each task,
        at most, and ``context``, under ``default``; under a study's name what it has instead, ``tasks`` among it.
    whole
        Only samples whose prompt fits the context uncut.
    """

    name: str
    context: int
    tasks: dict[str, int]
    retain: tuple[float, ...]
    arms: tuple[str, ...]
    seed: int
    studies: dict[str, dict[str, Any]]
    whole: bool = False


def available() -> list[str]:
    """Names of the profiles, smallest first."""
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: load(name).context)


def load(name: str) -> Profile:
    """Read a profile.

    Raises
    ------
    UserError
        No profile of that name; or the file has an unknown key, lacks one, or holds an impossible value.
    """
    path = FOLDER / f"{name}.yaml"
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    if name not in known:
        raise UserError(f"unknown profile '{name}'; use one of {', '.join(known)}")
    return parse(name, yaml.safe_load(path.read_text()))


def parse(name: str, values: dict[str, Any]) -> Profile:
    """Check the content of a profile file and freeze it."""
    keys = {field.name for field in fields(Profile)} - {"name"}
    needed = {field.name for field in fields(Profile) if field.default is MISSING} - {"name"}
    if unknown := set(values) - keys:
        raise UserError(
            f"profile '{name}' has unknown key '{min(unknown)}'; known are {', '.join(sorted(keys))}"
        )
    if lacking := needed - set(values):
        raise UserError(f"profile '{name}' lacks the key '{min(lacking)}'; add it to {name}.yaml")
    retain = tuple(float(share) for share in values["retain"])
    if not all(0 < share <= 1 for share in retain):
        raise UserError(
            f"profile '{name}' has retain {values['retain']}; shares must be above 0 and at most 1"
        )
    return Profile(**{**values, "name": name, "retain": retain, "arms": tuple(values["arms"])})
