"""What the papers claim, held against stored results: supported, contradicted, inconclusive, or not tested here.

    kvrepro claims                 with what is stored in results/, else with what the repository carries
    kvrepro claims results/mine    with one run, or with a folder of runs

``data/claims.yaml`` holds every claim in our words, with its source and the test that decides it.  Most tests name two
arms: the claim is that one is better.  It is **supported** where the 95 % interval of the paired difference lies on the
claimed side of zero, **contradicted** where it lies on the other, and otherwise **inconclusive**; then the detectable
difference says how large a true one these samples would have shown.  A claim about several baselines, categories,
retentions or models is as good as its weakest case.  "No worse" means: by less than a margin, which is our choice.
Each claim is judged by the task score, which is what the papers report, and by the KL from the full cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from . import analyses, plots, profiles, published, results, runner, stats, studies
from .errors import UserError
from .measure import asymmetry
from .methods import make
from .progress import progress
from .tasks.base import CATEGORIES

ROOT = Path(__file__).parents[1]
FILE = ROOT / "data" / "claims.yaml"
ROOTS = (ROOT / "results", ROOT / "data" / "results")  # one's own run first, else the carried one
PAPERS = ("SelKV", "KVSlimmer")
RETAIN = (0.25,)  # where a claim names no share of entries


@dataclass(frozen=True)
class Comparison:
    """A test: that ``arm`` is better than each ``baseline``, in every case.

    Attributes
    ----------
    arm
    baseline
        One or several.
    study
        Of ``studies.STUDIES``; none: the profile's own grid.
    profile
        Whose records decide it where they are stored, whatever the run's profile; none: the run's.
    models
        Instead of the run's model; each is a case.
    than
        A second model: the arm's gain over the baseline is larger on the first.
    retain
        Shares of entries, each a case.
    categories
        Each alone is a case; none: the average over all.
    metrics
        Columns of the records.
    margin
        By metric: how much worse still counts as no worse.
    run
        The command that makes the records, where it is not that of the study.
    """

    arm: str
    baseline: tuple[str, ...]
    study: str | None = None
    profile: str | None = None
    models: tuple[str, ...] = ()
    than: str | None = None
    retain: tuple[float, ...] = RETAIN
    categories: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("score", "kl")
    margin: dict[str, float] = field(default_factory=dict)
    run: str | None = None


@dataclass(frozen=True)
class Spectra:
    """A test: that parts of ``asymmetry.PARTS`` hold.  Notebook 6 decides it, ``publish`` stores its table."""

    asymmetry: tuple[str, ...]


@dataclass(frozen=True)
class Untested:
    """No test, and why."""

    not_tested: str


@dataclass(frozen=True)
class Published:
    """A published number, alone, ``minus`` another or ``over`` it; each by the arguments of ``published.lookup``."""

    value: tuple[str, ...]
    minus: tuple[str, ...] = ()
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        number = published.lookup(*self.value)
        if self.minus:
            return published.signed(number - published.lookup(*self.minus))
        return f"{number / published.lookup(*self.over):.1f}x" if self.over else f"{number:g}"


@dataclass(frozen=True)
class Claim:
    """A claim in our words, where it stands, and what decides it.

    ``published``: where the papers' own numbers stand; none: wherever both arms have published averages.
    """

    id: str
    paper: str
    claim: str
    source: str
    test: Comparison | Spectra | Untested
    published: tuple[Published, ...] = ()

    def told(self) -> str:
        """The papers' own numbers as text, "" where there are none."""
        test = self.test
        if self.published or not isinstance(test, Comparison):
            return ", ".join(map(str, self.published))
        if test.models or test.categories or test.retain != RETAIN:
            return ""
        found = []
        for baseline in test.baseline:
            numbers = ", ".join(map(published.signed, published.differences(test.arm, baseline)))
            several = numbers and len(test.baseline) > 1
            found.append(f"{numbers} ({plots.look(baseline).label})" if several else numbers)
        return ", ".join(filter(None, found))


def better(claim: str, arm: str, baseline: str) -> Claim:
    """A claim that no paper states: that a default, the papers' or ours, is the better choice."""
    return Claim("", "ours", claim, "implied by a default", Comparison(arm, (baseline,)))


# The file


def load(path: str | os.PathLike[str] = FILE) -> dict[str, Claim]:
    """Read and check the claims, by id.

    Raises
    ------
    UserError
        No such file, not YAML, or a claim with an unknown or missing key, arm, metric, study or published number.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}; {' '.join(str(error).split())}; restore the file") from error
    claims: dict[str, Claim] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not name or name in claims:
            why = f"two claims are called '{name}'" if name else "a claim has no id"
            raise UserError(f"cannot use {path}; {why}; begin each with '- id: ...', all different")
        try:
            claims[name] = _claim(entry)
        except (UserError, TypeError) as error:  # TypeError: a value of a kind that nothing can be done with
            raise UserError(f"{path}, claim '{name}': {error}") from error
    return claims


TESTS: dict[str, type[Comparison] | type[Spectra] | type[Untested]] = {
    "arm": Comparison, "asymmetry": Spectra, "not_tested": Untested
}  # fmt: skip


def _claim(entry: dict[str, Any]) -> Claim:
    values = _checked(Claim, entry)
    if values["paper"] not in PAPERS:
        raise UserError(f"unknown paper '{values['paper']}'; known are {', '.join(PAPERS)}")
    given = values["test"] if isinstance(values["test"], dict) else {}
    kind = next((cls for key, cls in TESTS.items() if key in given), None)
    if kind is None:
        raise UserError(f"its test has no key of {', '.join(TESTS)}; give one")
    values["test"] = kind(**{key: _value(key, x) for key, x in _checked(kind, given).items()})
    numbers = [_checked(Published, number) for number in values.get("published", ())]
    values["published"] = tuple(
        Published(**{key: tuple(place) for key, place in each.items()}) for each in numbers
    )
    claim = Claim(**values)
    claim.told()  # an unknown number is said now
    return claim


def _checked(cls: type, given: Any) -> dict[str, Any]:
    """A copy of a mapping that has the keys of a dataclass: all without a default, and no others."""
    if not isinstance(given, dict):
        raise UserError(f"{given!r} is no {cls.__name__.lower()}; write it as keys and values")
    known = {item.name: item.default is MISSING and item.default_factory is MISSING for item in fields(cls)}
    if unknown := [str(key) for key in given if key not in known]:
        raise UserError(f"unknown key '{unknown[0]}'; known are {', '.join(known)}")
    if lacking := [key for key, required in known.items() if required and not given.get(key)]:
        raise UserError(f"the key '{lacking[0]}' is missing; add it")
    return dict(given)


def _value(key: str, value: Any) -> Any:
    """A value of a test, checked; where several are allowed, a tuple of them."""
    if key in ("baseline", "models", "retain", "categories", "metrics", "asymmetry"):
        value = tuple(value) if isinstance(value, list) else (value,)
    if key in ("arm", "baseline"):
        for arm in (value,) if key == "arm" else value:
            make(arm)
    choices = {
        "metrics": plots.METRICS, "margin": plots.METRICS, "categories": CATEGORIES, "asymmetry": asymmetry.PARTS
    }  # fmt: skip
    if key in choices and (unknown := [str(name) for name in value if name not in choices[key]]):
        raise UserError(f"unknown {key} '{unknown[0]}'; known are {', '.join(choices[key])}")
    if key == "study":
        studies.of(value, "quick")
    if key == "profile":
        profiles.load(value)
    if key == "retain" and not all(0 < share <= 1 for share in value):
        raise UserError(f"retain {list(value)}; shares must be above 0 and at most 1")
    return value


# Judging

CASE = ("metric", "case", "arm", "baseline", "diff", "low", "high", "n", "se", "detectable", "verdict")
WEAKEST_FIRST = ("contradicted", "no interval", "inconclusive", "supported")


@dataclass(frozen=True)
class Judged:
    """A claim and what decided it.

    Attributes
    ----------
    cases : DataFrame
        Columns ``CASE``, a row a metric and case; ``diff`` is arm minus baseline (for spectra a share of heads, or a
        correlation).  Empty where the claim was not tested.
    why : str
        Why it was not.
    """

    claim: Claim
    cases: pd.DataFrame
    why: str = ""

    @property
    def verdicts(self) -> dict[str, str]:
        """By metric; none where the claim was not tested."""
        metrics = self.cases.groupby("metric", sort=False)["verdict"]
        return {str(metric): stats.together(list(verdicts)) for metric, verdicts in metrics}

    def weakest(self, metric: str) -> pd.Series:
        """The case that decides."""
        rows = [row for _, row in self.cases[self.cases["metric"] == metric].iterrows()]
        return min(rows, key=lambda row: (WEAKEST_FIRST.index(row["verdict"]), _bounds(row)))

    def as_dict(self) -> dict[str, Any]:
        """For a program to read: numbers, or None."""
        claim = self.claim
        return {
            "id": claim.id, "paper": claim.paper, "claim": claim.claim, "source": claim.source, "published": claim.told(),
            "verdicts": self.verdicts, "why": self.why, "cases": json.loads(self.cases.to_json(orient="records")),
        }  # fmt: skip


def judge_all(
    folder: str | os.PathLike[str] | None = None,
    *,
    profile: str = "quick",
    model: str = runner.DEFAULT_MODEL,
    device: str = "cpu",
    ids: Collection[str] | None = None,
    n_boot: int = 10_000,
    quiet: bool = True,
) -> list[Judged]:
    """Hold every claim of the file, or some of them, against the runs of a profile.

    Parameters
    ----------
    folder
        One run, by which every claim is judged whose arms it has; or a folder of runs, named as ``kvrepro run`` does.
        None: ``results/`` and, for a run that is not there, ``data/results/``.
    profile, model, device
        Name the runs.
    ids
        Only these claims.
    n_boot
        Resamples of each interval.
    quiet
        Do not tell how far it is.

    Raises
    ------
    UserError
        An unknown profile, or a folder without any run.
    """
    runs = Runs(folder, profile=profile, model=model, device=device)
    wanted = [claim for name, claim in load().items() if ids is None or name in ids]
    claims = progress(wanted, "claims", quiet=quiet)
    return [judge(claim, runs, n_boot=n_boot) for claim in claims]


def judge(claim: Claim, runs: Runs, **boot: int) -> Judged:
    """Hold one claim against stored runs."""
    test = claim.test
    try:
        if isinstance(test, Untested):
            raise _Lacking(test.not_tested)
        cases = _spectra(test, runs) if isinstance(test, Spectra) else _cases(test, runs, **boot)
    except _Lacking as lacking:
        return Judged(claim, pd.DataFrame(columns=list(CASE)), str(lacking))
    return Judged(claim, cases[list(CASE)].reset_index(drop=True))


def held(
    frame: pd.DataFrame, claim: Claim, metrics: Sequence[str] | None = None, **boot: int
) -> pd.DataFrame:
    """A claim about two arms, by records at one retention: a row a metric, with its verdict."""
    test = claim.test
    assert isinstance(test, Comparison)
    table = stats.compare(frame, metrics or test.metrics, [test.arm], test.baseline[0], **boot)
    return _decided(table, test)


class _Lacking(Exception):
    """Says what a test needs and does not find."""


class Runs:
    """Stored runs, found by what was run.  Parameters and errors as in :func:`judge_all`."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        profile: str = "quick",
        model: str = runner.DEFAULT_MODEL,
        device: str = "cpu",
    ) -> None:
        profiles.load(profile)
        self.profile, self.model, self.device = profile, model, device
        self.roots = ROOTS if folder is None else (Path(folder),)
        self.single = folder is not None and results.holds(folder)
        self._frames: dict[Path, pd.DataFrame] = {}
        if folder is not None and not self.single and not any(map(results.holds, Path(folder).glob("*/"))):
            raise UserError(
                f"no results in {folder}; neither it nor a folder in it holds records; run the experiments first"
            )

    def records(self, test: Comparison, model: str | None, retain: float) -> pd.DataFrame:
        """A test's records on a model (None: the run's own) at one retention."""
        if self.single and model:
            raise _Lacking("needs the runs of several models; give the folder that holds them, or none")
        for profile in filter(None, (test.profile, self.profile)):
            named = runner.folder(profile, model or self.model, self.device, test.study)
            places = self.roots if self.single else [root / named for root in self.roots]
            path = next(filter(results.holds, places), None)
            missing = f"no records of {named}"
            if path:
                if path not in self._frames:
                    self._frames[path] = results.load(path)
                frame = analyses.at(self._frames[path], retain)
                lacking = [arm for arm in (test.arm, *test.baseline) if arm not in set(frame["arm"])]
                if not lacking:
                    return frame
                missing = f"{path.name} has no {lacking[0]} at {retain:.0%} of the entries"
        raise _Lacking(f"{missing}; `{test.run or self._command(test, model)}`")

    def parts(self) -> list[asymmetry.Part]:
        """What was stored of notebook 6."""
        named = runner.folder(self.profile, self.model, self.device)
        for folder in self.roots if self.single else [root / named for root in self.roots]:
            if (folder / asymmetry.FILE).exists():
                return asymmetry.read(folder)
        raise _Lacking(
            f"decided in notebook 6; its table ({asymmetry.FILE}) lies with the carried run, which `kvrepro claims` alone reads"
        )

    def _command(self, test: Comparison, model: str | None) -> str:
        model = model or self.model
        options = {
            "--profile": self.profile,
            "--study": test.study,
            "--model": None if model == runner.DEFAULT_MODEL else model,
            "--device": None if self.device == "cpu" else self.device,
            "--data": "DIR" if any(map(_of_rows, profiles.load(self.profile).tasks)) else None,
        }
        return "kvrepro run " + " ".join(f"{key} {value}" for key, value in options.items() if value)


def _of_rows(task: str) -> bool:
    """Whether a task is not built offline."""
    return task.startswith(("longbench", "ruler/"))


def _cases(test: Comparison, runs: Runs, **boot: int) -> pd.DataFrame:
    found = []
    for model, baseline, retain, category in product(
        test.models or (None,), test.baseline, test.retain, test.categories or (None,)
    ):
        models = [model, test.than] if test.than else [model]
        picked = [runs.records(test, each, retain) for each in models]
        if category:
            picked = [frame[frame["category"] == category] for frame in picked]
        picked = [analyses.repeated(frame) for frame in picked]
        try:
            if test.than:
                frames = dict(zip(map(str, models), picked, strict=True))
                table = analyses.gain(frames, test.metrics, test.arm, baseline, **boot)
                table = table.assign(arm=test.arm, baseline=baseline)
            else:
                table = stats.compare(picked[0], test.metrics, [test.arm], baseline, **boot)
        except UserError as error:  # of a run that goes on: no sample has both arms yet
            raise _Lacking(str(error)) from error
        named = {
            f"against {plots.look(baseline).label}": len(test.baseline) > 1,
            f"on {Path(str(model)).name}": len(test.models) > 1,
            f"on {model} minus on {test.than}": test.than,
            f"at {retain:.0%}": len(test.retain) > 1,
            f"in {category}": len(test.categories) > 1,
            f"on {' and '.join(analyses.benchmarks(picked[0]))}": test.profile,
        }
        found.append(_decided(table, test, ", ".join(text for text, told in named.items() if told)))
    return pd.concat(found, ignore_index=True)


def _decided(table: pd.DataFrame, test: Comparison, case: str = "") -> pd.DataFrame:
    """A comparison with its verdicts."""
    verdicts = []
    for _, row in table.iterrows():
        low, high = (bound + test.margin.get(row["metric"], 0.0) for bound in _bounds(row))
        verdicts.append(stats.verdict(low, high))
    return table.assign(case=case, verdict=verdicts)


def _bounds(row: pd.Series) -> tuple[float, float]:
    """An interval, turned so that above zero is better."""
    metric = plots.METRICS.get(str(row["metric"]))
    sign = -1 if metric and metric.better == "left" else 1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    return low, high


def _spectra(test: Spectra, runs: Runs) -> pd.DataFrame:
    parts = runs.parts()
    verdicts = asymmetry.agreed(parts)
    rows = [
        {
            "metric": "heads" if part.part in asymmetry.SEEN else "correlation",
            "case": asymmetry.PARTS[part.part]
            + (f", {part.rank} rank" if part.part != "alike" else "")
            + (" (the ranks disagree)" if part.verdict != verdicts[part.part] else ""),
            "diff": part.estimate, "low": part.low, "high": part.high, "verdict": verdicts[part.part],
        }
        for part in parts
        if part.part in test.asymmetry
    ]  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates("case").reindex(columns=list(CASE))
