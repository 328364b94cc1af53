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
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}; {' '.join(str(error).split())}; mend the file") from error
    return parse(name, values)


KINDS: dict[str, Any] = {
    "context": int, "tasks": dict, "retain": list | tuple, "arms": list | tuple, "seed": int, "studies": dict
}  # fmt: skip


def parse(name: str, values: dict[str, Any]) -> Profile:
    """Check the content of a profile file and freeze it."""
    if not isinstance(values, dict):
        raise UserError(f"profile '{name}' is no mapping of keys to values; write one 'key: value' a line")
    keys = {field.name for field in fields(Profile)} - {"name"}
    needed = {field.name for field in fields(Profile) if field.default is MISSING} - {"name"}
    if unknown := set(values) - keys:
        raise UserError(
            f"profile '{name}' has unknown key '{min(unknown)}'; known are {', '.join(sorted(keys))}"
        )
    if lacking := needed - set(values):
        raise UserError(f"profile '{name}' lacks the key '{min(lacking)}'; add it to {name}.yaml")
    for key, kind in KINDS.items():
        if not isinstance(values[key], kind):
            raise UserError(
                f"profile '{name}' has {key} {values[key]!r}; see another profile for how it is written"
            )
    if bad := [task for task, n in values["tasks"].items() if not (isinstance(n, int) and n >= 1)]:
        raise UserError(
            f"profile '{name}' has no number of samples for {bad[0]}; give a whole number of at least 1"
        )
    retain = tuple(values["retain"])
    if not all(isinstance(share, int | float) and 0 < share <= 1 for share in retain):
        raise UserError(
            f"profile '{name}' has retain {values['retain']}; shares must be above 0 and at most 1"
        )
    retain = tuple(map(float, retain))
    return Profile(**{**values, "name": name, "retain": retain, "arms": tuple(values["arms"])})
