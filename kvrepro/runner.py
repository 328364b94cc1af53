"""Run a profile into a results folder: every arm on every sample, only what is missing.

    kvrepro run --profile quick --model smollm2-135m

The unit of work is (sample, group of arms): its records are stored in one write, so a killed run loses at most the
sample it was at, and running again goes on from there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import gate, models, profiles, results, scale, tasks
from .errors import UserError, out_of_memory
from .models import row_of
from .progress import progress
from .tasks.base import Sample

Work = tuple[Sample, list[Any]]
DEFAULT_MODEL = "smollm2-135m"
EVERY = 1 << 30  # rows of a benchmark: all there are
EXECUTORS = ("local", "ray")


def folder(
    profile: str,
    model: str = DEFAULT_MODEL,
    device: str = "cpu",
    study: str | None = None,
    context: int | None = None,
) -> str:
    """Name of the results folder of a run: one for each set of settings that cannot share one."""
    row = row_of(model)  # a model of the registry may be given by its hub id, too
    named = row.name if row else Path(model).name
    parts = [profile, study, context, None if named == DEFAULT_MODEL else named, device.partition(":")[0]]
    return "-".join(str(part) for part in parts if part and part != "cpu")


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
    context: int | None = None,
    data: str | Path | None = None,
    gated: bool = True,
    executor: str = "local",
    workers: int | None = None,
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
    methods, task_names, limit, retain, context
        Instead of the profile's: arms, tasks, samples a task at most, shares of entries, longest prompt.
    data
        Folder with benchmark rows, for tasks that are not built offline.
    gated
        Stop where the full cache scores far below what is published of the model (`kvrepro.gate`).
    executor, workers
        "ray" spreads the samples over so many workers of a cluster, each with a device of its own (`kvrepro.scale`).

    Returns
    -------
    Path
        Of ``summary.csv``.

    Raises
    ------
    UserError
        An unknown profile, arm or task, a folder that cannot be used, a model that cannot be loaded or that takes
        shorter prompts, a cluster that cannot be used; and, with what was measured kept, from the gate, on Ctrl-C, for
        want of memory, or for workers that died.
    """
    if executor not in EXECUTORS:
        raise UserError(f"unknown executor {executor!r}; use one of {', '.join(EXECUTORS)}")
    if executor == "ray":
        scale.check(device)
    elif workers is not None:
        raise UserError("--workers goes with --executor ray; a local run is one process")
    chosen = profiles.load(profile) if isinstance(profile, str) else profile
    if context is not None:
        if context < 2:
            raise UserError(f"--context {context} is no prompt; give its longest length in tokens")
        chosen = replace(chosen, context=context)
    samples = _samples(chosen, task_names, limit, data, model)
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
    where = model
    if executor == "ray" and row is None and Path(model).is_dir():
        where = str(Path(model).resolve())  # a worker may have another working directory
    with results.Store(out, settings) as store:
        todo = _missing(store, samples, arms)
        watch = _Watch(store, row.expects if row and gated else None)
        if todo:
            longest = max(sample.max_new_tokens for sample, _ in todo)
            bench = functools.partial(_Bench, where, device, dtype, store.settings, longest)
            if executor == "ray":
                done = scale.carry_out(bench, todo, device=device, workers=workers, quiet=quiet)
            else:
                done = _here(bench, todo)
            label = f"{chosen.name} on {store.settings['model']}"
            with _resumable(store, out), contextlib.closing(done):  # workers end with the run, come what may
                _measure(store, watch, progress(done, label, total=len(todo), quiet=quiet))
    return results.write_summary(out)


def _measure(store: results.Store, watch: _Watch, done: Iterator[tuple[Work, list[dict[str, Any]]]]) -> None:
    for (sample, arms), records in done:
        group = ",".join(f"{arm.name}@{arm.retain:g}" for arm in arms)
        store.append(store.unit(sample.id, group, arms=[arm.settings for arm in arms]), records)
        watch.see(records)


class _Bench:
    """A loaded model that carries out units of work: a run has one, and with Ray one in each worker."""

    def __init__(
        self, name: str, device: str, dtype: str | None, settings: Mapping[str, Any], longest: int
    ) -> None:
        self.model, self.tokenizer = models.load(name, device=device, dtype=dtype)
        self.context = settings["context"]
        if self.context + longest > (most := models.context(name, self.model)):
            raise UserError(
                f"profile {settings['profile']} has prompts of up to {self.context} tokens and answers of {longest}, "
                f"and {name} takes {most} in all; take a smaller profile, or a shorter --context"
            )
        self.common = {
            "model": settings["model"],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": settings["device"],
            "seed": settings["seed"],
            "versions": results.versions() | {"weights": models.revision(name, self.model)},
        }

    def __call__(self, sample: Sample, arms: list[Any]) -> list[dict[str, Any]]:
        from .evaluate import evaluate  # torch and transformers are needed only here

        records = evaluate(self.model, self.tokenizer, sample, arms, self.context)
        return [record | self.common for record in records]


def _here(make: Callable[[], _Bench], todo: list[Work]) -> Generator[tuple[Work, list[dict[str, Any]]]]:
    """Carry out the units one by one in this process (as `scale.carry_out` does in others)."""
    bench = make()
    for sample, arms in todo:
        yield (sample, arms), bench(sample, arms)


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
    profile: profiles.Profile,
    names: Sequence[str] | None,
    limit: int | None,
    data: str | Path | None,
    model: str,
) -> list[Sample]:
    """The profile's samples, task by task in turn, so that a run cut short has something of every task.

    A question that stands in two of the tasks (LongBench-E was drawn from LongBench's sources) is asked once.
    """
    known = tasks.available(data=data)
    offline = tasks.available()
    if not names:
        names = list(profile.tasks)
        if data and set(names) <= set(offline):  # a profile of offline tasks, and a folder: what that holds
            names = [name for name in known if name not in offline]
        elif profile.whole:  # a folder need not have all of a benchmark
            names = [name for name in names if name in known] or names
    for name in names:
        if name not in known:
            raise UserError(
                f"unknown task {name!r}; known are {', '.join(known)}"
                + ("" if data else "; rows of a benchmark come with --data DIR, or --data hub")
            )
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} leaves no sample; give at least 1")
    most = max(profile.tasks.values())
    fits = _fits(model, profile.context) if profile.whole else None
    count = _count(model)
    sets = []
    for name in names:
        wanted = min(profile.tasks.get(name, most), limit or most)
        if name in offline:
            sets.append(tasks.load(name, wanted, profile.context, count=count))
        else:
            sets.append(
                _drawn(tasks.load(name, EVERY, profile.context, data=data), wanted, profile.seed, fits)
            )
    if not any(sets):
        raise UserError(f"no row fits {profile.context} tokens whole; take a profile with a longer context")
    found = [
        samples[place] for place in range(max(map(len, sets))) for samples in sets if place < len(samples)
    ]
    again = tasks.duplicates(found)
    return [sample for sample in found if sample.id not in again]


def _drawn(
    samples: list[Sample], wanted: int, seed: int, fits: Callable[[Sample], bool] | None
) -> list[Sample]:
    """Some rows of a benchmark, at random but always the same: its files may be sorted by length or kind."""
    order = sorted(samples, key=lambda sample: hashlib.sha256(f"{seed} {sample.id}".encode()).digest())
    drawn = (sample for sample in order if fits is None or fits(sample))
    return list(itertools.islice(drawn, wanted))


def _count(model: str) -> tasks.Count:
    """Tokens of a text; the tokenizer is loaded when first asked."""
    tokenizer = functools.cache(lambda: models.load_tokenizer(model))
    return lambda text: len(tokenizer()(text, verbose=False)["input_ids"])  # no warning that it is long


def _fits(model: str, context: int) -> Callable[[Sample], bool]:
    from .tasks.prompts import encode

    tokenizer = models.load_tokenizer(model)
    return lambda sample: not encode(tokenizer, sample, context).truncated


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
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"out of memory; what is finished is kept in {out}; close other programs and run the same command again, or "
            "with fewer arms at a time (--methods) into the same folder"
        ) from error
