"""Run a profile into a results folder: every arm on every sample, only what is missing.

    kvrepro run --profile quick --model smollm2-135m

The unit of work is (sample, group of arms): its records are stored in one write, so a killed run loses at most the
sample it was at, and running again goes on from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import gate, models, profiles, results, tasks
from .errors import UserError
from .models import row_of
from .progress import progress
from .tasks.base import Sample

Work = tuple[Sample, list[Any]]
DEFAULT_MODEL = "smollm2-135m"


def folder(profile: str, model: str = DEFAULT_MODEL, device: str = "cpu", study: str | None = None) -> str:
    """Name of the results folder of a run: one for each set of settings that cannot share one."""
    row = row_of(model)  # a model of the registry may be given by its hub id, too
    named = row.name if row else Path(model).name
    parts = [profile, study, None if named == DEFAULT_MODEL else named, device.partition(":")[0]]
    return "-".join(part for part in parts if part and part != "cpu")


def run(
    profile: str | profiles.Profile,
    model: str = DEFAULT_MODEL,
    *,
    out: str | Path,
    device: str = "cpu",
    dtype: str | None = None,
    methods: Sequence[str] | None = None,
    task_names: Sequence[str] | None = None,
    limit: int | None = None,
    retain: Sequence[float] | None = None,
    data: str | Path | None = None,
    gated: bool = True,
    quiet: bool = False,
) -> Path:
    """Measure a profile's arms on its samples and write ``summary.csv``.

    Parameters
    ----------
    profile
        A profile or its name.
    model
        As for ``kvrepro.load``; loaded only if something is missing.
    out
        The results folder; what it holds is not measured again.
    methods, task_names, limit, retain
        Narrow the profile: arms, tasks, samples a task, shares of entries.
    data
        Folder with benchmark rows, for tasks that are not built offline.
    gated
        Stop where the full cache scores far below what is published of the model (`kvrepro.gate`).

    Returns
    -------
    Path
        Of ``summary.csv``.

    Raises
    ------
    UserError
        An unknown profile, arm or task, a folder that cannot be used, a model that cannot be loaded or that takes
        shorter prompts; and from the gate, with what was measured kept.
    """
    chosen = profiles.load(profile) if isinstance(profile, str) else profile
    samples = list(_samples(chosen, task_names, limit, data))
    arms = _arms(methods or chosen.arms, retain or chosen.retain)
    settings = {
        "profile": chosen.name,
        "context": chosen.context,
        "model": model,
        "device": device.partition(":")[0],
        "dtype": dtype or "default",
        "seed": chosen.seed,
    }
    row = models.row_of(model)
    with results.Store(out, settings) as store:
        todo = _missing(store, samples, arms)
        watch = _Watch(store, row.expects if row and gated else None)
        if todo:
            with _resumable(store, out):
                _measure(store, todo, watch, settings, chosen.context, device, dtype, quiet)
    return results.write_summary(out)


def _measure(
    store: results.Store, todo: list[Work], watch: _Watch, settings: dict[str, Any], context: int, device: str,
    dtype: str | None, quiet: bool,
) -> None:  # fmt: skip
    from .evaluate import evaluate  # torch and transformers are needed only here

    name = settings["model"]
    model, tokenizer = models.load(name, device=device, dtype=dtype)
    longest = max(sample.max_new_tokens for sample, _ in todo)
    if context + longest > (most := models.context(name, model)):
        raise UserError(
            f"profile {settings['profile']} has prompts of up to {context} tokens and answers of {longest}, and {name} "
            f"takes {most} in all; take a smaller profile, or a copy of it with a shorter context"
        )
    common = {
        "model": store.settings["model"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": settings["device"],
        "seed": settings["seed"],
        "versions": results.versions() | {"weights": models.revision(name, model)},
    }
    for sample, missing in progress(todo, f"{settings['profile']} on {store.settings['model']}", quiet=quiet):
        group = ",".join(f"{arm.name}@{arm.retain:g}" for arm in missing)
        unit = store.unit(sample.id, group, arms=[arm.settings for arm in missing])
        records = evaluate(model, tokenizer, sample, missing, context)
        store.append(unit, [record | common for record in records])
        watch.see(records)


class _Watch:
    """The gate beside a run: sees every answer of the full cache, those that are stored first, and stops the run.

    Because of these a run that was stopped does not slip by when it is run again.
    """

    def __init__(self, store: results.Store, expected: float | None) -> None:
        self.name, self.folder, self.expected = store.settings["model"], store.folder, expected
        self.scores: list[tuple[str, float]] = []
        if expected is not None and store.folder.joinpath(results.RECORDS).stat().st_size:
            self.see(results.load(store.folder).to_dict("records"))

    def see(self, records: Sequence[Mapping[Any, Any]]) -> None:
        self.scores += [(record["task"], record["score"]) for record in records if record["arm"] == "full"]
        if found := gate.complaint(self.scores, self.expected):
            raise UserError(
                f"{self.name} is not run as it was published: {found}; likely a wrong chat template, two BOS, prompts "
                "cut too short, missing stop tokens or damaged weights: look at the predictions (results are kept in "
                f"{self.folder}), or go on with --no-gate"
            )


def _samples(
    profile: profiles.Profile, names: Sequence[str] | None, limit: int | None, data: str | Path | None
) -> Iterator[Sample]:
    """The profile's samples, task by task in turn, so that a run cut short has something of every task."""
    known = tasks.available(data=data)
    if not names:  # what the folder holds, where one is given
        names = [name for name in known if name not in tasks.available()] if data else list(profile.tasks)
    for name in names:
        if name not in known:
            raise UserError(f"unknown task {name!r}; known are {', '.join(known)}")
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} leaves no sample; give at least 1")
    most = max(profile.tasks.values())
    sets = [
        tasks.load(name, min(profile.tasks.get(name, most), limit or most), profile.context, data=data)
        for name in names
    ]
    for place in range(max(map(len, sets))):
        yield from (samples[place] for samples in sets if place < len(samples))


def _arms(names: Sequence[str], retain: Sequence[float]) -> list[Any]:
    """Every arm at every retention; the full caches once, at 1."""
    from .evaluate import NamedArm
    from .methods import Budget, make

    arms = []
    for name in dict.fromkeys(names):
        make(name)  # an unknown arm is said before anything is loaded
        if name in ("full", "full-folded"):
            arms.append(NamedArm(name, 1.0))
        else:
            for share in retain:
                Budget(retain=share)  # so is a share that is none
                arms.append(NamedArm(name, share))
    return arms


def _missing(store: results.Store, samples: list[Sample], arms: list[Any]) -> list[Work]:
    settings = {arm: arm.settings for arm in arms}
    todo = []
    for sample in samples:
        if not store.same_text(sample.id, sample.digest):
            raise UserError(
                f"{store.folder} holds results of another text under the name {sample.id}; the data differ, so choose "
                "another output folder"
            )
        missing = [arm for arm in arms if not store.has(sample.id, arm.name, arm.retain, settings[arm])]
        if missing:
            todo.append((sample, missing))
    return todo


@contextlib.contextmanager
def _resumable(store: results.Store, out: str | Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise UserError(
            f"stopped; what is finished is kept in {out}, run the same command again to go on"
        ) from None
