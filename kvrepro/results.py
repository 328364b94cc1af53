"""The store: what was measured, one JSON line a unit of work, and the tables made of it.

A run folder holds three files:

- ``records.jsonl``: append only, one line a unit (one sample under one group of arms), written in one call
  and synced. A line is there whole or not at all: a crash can tear only the last one, and the next run cuts
  it off and redoes that unit. One process writes at a time (an exclusive lock on this file); reading needs no
  lock.
- ``run.json``: the settings that all records share, and the versions they were made with. Written before the
  first record. A folder takes no records made with other settings.
- ``summary.csv``: one row a task, method and setting; always rebuilt whole.

A folder that the repository carries (``data/results/``) holds ``records.csv.gz`` instead of the first: the same records
without prompts' answers.  Both load alike.

Averages are taken everywhere in the same way: a task is the mean over its samples, a category the mean over
its tasks, and the average the mean over categories, so that a big task does not outvote a small one.

``kvrepro table DIR`` prints ``main_table(load(DIR))``.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvrepro.errors import UserError
from kvrepro.tasks.base import CATEGORIES

RECORDS, RUN, SUMMARY = "records.jsonl", "run.json", "summary.csv"
CARRIED = "records.csv.gz"  # what the repository carries of a run: no text, numbers to six digits

METRICS = ("score", "nll", "kl", "agree", "kept_entries", "kept_bytes")
SUMMARY_COLUMNS = ("task", "category", "method", "arm", "retain", "n", *METRICS)
REQUIRED = ("sample", "task", "category", "method", "arm", "retain", *METRICS)

# The order of rows in every table and figure; an arm not named here comes after these, by name.
ARMS = (
    "full",
    "full-folded",
    "streaming-llm",
    "h2o",
    "snapkv",
    "pyramidkv",
    "vatp",
    "look-m",
    "weightedkv",
    "kvmerger",
    "bifocal",
    "selkv",
    "selkv/evict",
    "selkv/merge-all",
    "selkv/gate",
    "selkv/gate+count",
    "selkv/gate+gated-count",
    "selkv/merge-all+ratio",
    "selkv/alpha-0.25",
    "selkv/alpha-1",
    "selkv/on-snapkv",
    "selkv/on-bifocal",
    "selkv/on-bifocal+gate",
    "selkv/on-bifocal+gated-count",
    "selkv/on-bifocal+merge-all",
    "adjacent",
    "asymkv",
    "kvslimmer",
    "kvslimmer/diagonal",
    "kvslimmer/mass",
    "kvslimmer/mean",
    "kvslimmer/drop-lighter",
    "kvslimmer/clamped",
    "kvslimmer/ratio",
    "kvslimmer/ratio-alpha-1",
    "kvslimmer/no-bias",
    "kvslimmer/plain-sum",
    "kvslimmer/plain-mean",
    "kvslimmer/mass-values",
    "kvslimmer/as-key",
    "kvslimmer-released",
)


class Unit(NamedTuple):
    """The unit of work: one sample under one group of arms and one set of settings."""

    sample: str
    group: str
    settings_hash: str


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Hash settings, whatever the order of their keys.

    Parameters
    ----------
    settings
        JSON-like values (numbers, strings, booleans, None, lists, nested mappings).

    Returns
    -------
    str
        First 16 hexadecimal digits of the SHA-256 of the canonical JSON text.
    """
    text = json.dumps(_plain(settings, "settings"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions that results depend on; nothing that names a person or a machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("kvrepro", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Store:
    """The one writer of a run folder, as a context manager.

    Parameters
    ----------
    folder
        The run folder; made if missing.
    settings
        What all records of the folder share: at least profile, model, device and dtype. Absolute paths are
        kept by their last part only, so that results carry no machine's directories.

    Raises
    ------
    UserError
        On entry: the folder cannot be written, another process is writing to it, it holds results of other
        settings, or a line other than the last is damaged.

    Examples
    --------
    >>> import tempfile
    >>> settings = {"profile": "smoke", "model": "tiny", "device": "cpu", "dtype": "float32"}
    >>> with tempfile.TemporaryDirectory() as folder, Store(folder, settings) as store:
    ...     store.done(store.unit("pydoc-code/2048/0000", "one-shot", retain=0.25))
    False
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.settings = {key: _without_folders(value) for key, value in _plain(settings, "settings").items()}
        self._done: set[Unit] = set()
        self._recorded: set[tuple[str, str]] = set()
        self._digests: dict[str, Any] = {}
        self._descriptor = -1

    def __enter__(self) -> Store:
        path = self.folder / RECORDS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write results to {self.folder}; {_reason(error)}; choose another output folder"
            ) from error
        try:
            self._lock()
            units, whole = _read(path)
            self._settle_settings(bool(units))
            if whole < os.fstat(self._descriptor).st_size:  # the torn last line of a run that was killed
                os.ftruncate(self._descriptor, whole)
                os.fsync(self._descriptor)
            self._done = {_key(unit) for unit in units}
            self._digests = {
                record["sample"]: record.get("digest") for unit in units for record in unit["records"]
            }
            self._recorded = {_identity(record) for unit in units for record in unit["records"]}
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which frees the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def unit(self, sample: str, group: str, **settings: Any) -> Unit:
        """Return the key of a unit: the folder's settings and the group's own go into its hash."""
        return Unit(sample, group, settings_hash({"run": self.settings, "group": settings}))

    def done(self, unit: Unit) -> bool:
        """Tell whether the unit's records are stored."""
        return unit in self._done

    def has(self, sample: str, arm: str, retain: float, settings: Mapping[str, Any]) -> bool:
        """Tell whether an arm with these settings was measured on the sample, in whatever group."""
        wanted = {"sample": sample, "arm": arm, "retain": retain, "settings": settings}
        return _identity(_plain(wanted, arm)) in self._recorded

    def same_text(self, sample: str, digest: str) -> bool:
        """Tell whether what is stored of a sample, if anything, was measured on the text with this digest."""
        return self._digests.get(sample) in (None, digest)

    def append(self, unit: Unit, records: Sequence[Mapping[str, Any]]) -> None:
        """Store one unit: one write of one line, on disk when this returns.

        NaN means "not measured": it is stored as null and loads as NaN. An infinite number is refused, since
        a mean that left it out would hide a failure.

        Parameters
        ----------
        unit
            The key, from :meth:`unit`.
        records
            One mapping an arm; must hold the keys in ``REQUIRED``.

        Raises
        ------
        UserError
            The disk is full or failing (what was stored before is kept), or a number is infinite.
        ValueError
            The unit is stored already, or a record lacks a key.
        """
        if self._descriptor < 0:
            raise ValueError("the store is closed")
        if unit in self._done:
            raise ValueError(f"unit {tuple(unit)} is stored already")
        for record in records:
            if missing := [key for key in REQUIRED if key not in record]:
                raise ValueError(f"record of {unit.sample} lacks {', '.join(missing)}")
        named = [_plain(record, f"{record['arm']} on {unit.sample}") for record in records]
        content = {"unit": unit._asdict(), "records": named}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        line = text.encode() + b"\n"

        before = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):  # if even this fails, the next run cuts the torn line off
                os.ftruncate(self._descriptor, before)
            self.close()  # nothing may be appended behind a line that could be torn
            raise UserError(
                f"cannot write results to {self.folder}; {_reason(error)}; the {len(self._done)} finished "
                "units are kept, free some space and run again"
            ) from error
        self._done.add(unit)
        self._recorded |= {_identity(record) for record in named}

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run is writing to {self.folder}; a results folder has one writer; wait for it to "
                "end or choose another output folder"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot lock {self.folder}; {_reason(error)}; choose an output folder on a local disk"
            ) from error

    def _settle_settings(self, has_records: bool) -> None:
        """Compare with run.json, or write it: the first run's settings are the folder's."""
        path = self.folder / RUN
        now = versions()
        known: dict[str, Any] = {}
        if has_records:
            known = _read_run(path)
            differing = [
                f"{key} {json.dumps(known.get(key))} there and {json.dumps(self.settings.get(key))} now"
                for key in sorted((known.keys() | self.settings.keys()) - {"versions", "earlier_versions"})
                if known.get(key) != self.settings.get(key)
            ]
            if differing:
                raise UserError(
                    f"{self.folder} holds results of other settings; {', '.join(differing)}; choose another "
                    "output folder or the same settings"
                )
        earlier = known.get("earlier_versions", [])
        if known and known["versions"] != now:
            earlier = [*earlier, known["versions"]]
        run = {**self.settings, "versions": now} | ({"earlier_versions": earlier} if earlier else {})
        if run != known:
            write_atomic(path, (json.dumps(run, indent=2) + "\n").encode())


def load(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a run folder's records, also while a run is writing to it.

    Parameters
    ----------
    folder
        The run folder.

    Returns
    -------
    DataFrame
        One row a record. ``diagnostics``, ``settings`` and ``versions`` are spread over columns ``diag.x``,
        ``settings.x`` and ``versions.x``; ``group`` names the group of arms. An arm that several groups
        measured on the same sample with the same settings (the full cache, above all) appears once. A torn
        last line is ignored.

    Raises
    ------
    UserError
        The folder is missing or holds no whole record, or a line other than the last is damaged.
    """
    path = Path(folder) / RECORDS
    carried = Path(folder) / CARRIED
    if carried.exists() and not path.exists():
        return _read_carried(carried)
    try:
        units, _ = _read(path)
    except OSError as error:
        raise UserError(
            f"no results in {folder}; {_reason(error)}; run the experiments into it first"
        ) from error
    rows: dict[str, dict[str, Any]] = {}
    for unit in units:
        for record in unit["records"]:
            same = [record.get(key) for key in ("sample", "arm", "retain", "budget", "seed", "settings")]
            rows.setdefault(
                json.dumps(same, sort_keys=True), {"group": unit["unit"]["group"]} | _spread(record)
            )
    if not rows:
        raise UserError(
            f"no results in {folder}; {RECORDS} holds no whole record; run the experiments into it first"
        )
    frame = pd.DataFrame(list(rows.values()))
    return frame.astype(dict.fromkeys(("retain", *METRICS), float))


def holds(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder has records to load: carried ones, or a whole line (a run that has just begun has none)."""
    if (Path(folder) / CARRIED).exists():
        return True
    try:
        return b"\n" in (Path(folder) / RECORDS).read_bytes()
    except OSError:
        return False


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Average over samples: one row a task, method and setting.

    Parameters
    ----------
    frame
        Records, as :func:`load` gives them.

    Returns
    -------
    DataFrame
        Columns ``SUMMARY_COLUMNS``; ``n`` counts samples, means leave out what was not measured.
    """
    keys = ["task", "category", "method", "arm", "retain"]
    groups = one_each(frame).groupby(keys, dropna=False)
    table = groups[list(METRICS)].mean().assign(n=groups.size()).reset_index()
    places = [
        (rank(category, CATEGORIES), task, rank(arm, ARMS), retain)
        for category, task, arm, retain in zip(table.category, table.task, table.arm, table.retain)
    ]
    in_place = sorted(range(len(table)), key=places.__getitem__)
    return table.iloc[in_place][list(SUMMARY_COLUMNS)].reset_index(drop=True)


def carry(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """Write a run's records as a repository carries them: without answers, digests and versions, to six digits."""
    frame = load(folder)
    texts = [
        column
        for column in frame
        if column in ("prediction", "digest", "group") or str(column).startswith("versions.")
    ]
    path = Path(to) / CARRIED
    table = frame.drop(columns=texts).to_csv(index=False, float_format="%.6g")
    write_atomic(path, gzip.compress(table.encode(), mtime=0))
    return path


def write_summary(folder: str | os.PathLike[str]) -> Path:
    """Rebuild ``summary.csv`` of a run folder and return its path; the file is replaced whole."""
    path = Path(folder) / SUMMARY
    write_atomic(path, summary(load(folder)).to_csv(index=False, float_format="%.6g").encode())
    return path


def by_category(frame: pd.DataFrame, metric: str = "score") -> pd.DataFrame:
    """Arms x categories of one metric.

    Parameters
    ----------
    frame
        Records, as :func:`load` gives them.
    metric
        A numeric column.

    Returns
    -------
    DataFrame
        Index ``(arm, retain)`` in the fixed order of arms; a column a category and ``average``, the mean over
        categories. A cell is the mean over the category's tasks of the mean over the task's samples. Where an
        arm lacks a task that others have, category and average are NaN: means over different tasks do not
        compare.
    """
    keys = ["arm", "retain", "category", "task"]
    tasks = one_each(frame).groupby(keys, dropna=False)[metric].mean().unstack(["category", "task"])
    tasks = pd.DataFrame(tasks).dropna(axis=1, how="all")
    names = tasks.columns.get_level_values("category")
    categories = pd.DataFrame(index=tasks.index)
    for name in in_order(names, CATEGORIES):
        categories[name] = tasks.loc[:, names == name].mean(axis=1, skipna=False)
    categories["average"] = categories.mean(axis=1, skipna=False)
    places = sorted(range(len(categories)), key=lambda i: (rank(categories.index[i][0], ARMS), i))
    return categories.iloc[places]


def main_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The main table: a row an arm (and retention), what it scored and what it kept.

    Parameters
    ----------
    frame
        Records, as :func:`load` gives them.

    Returns
    -------
    DataFrame
        Index ``arm``; columns ``retain``, ``n`` (samples), the score of each category, ``average`` (mean over
        categories), and ``nll``, ``kl``, ``agree``, ``kept_entries``, ``kept_bytes`` averaged in the same
        way.
    """
    table = by_category(frame, "score")
    for metric in METRICS[1:]:
        table[metric] = by_category(frame, metric)["average"]
    counts = frame.groupby(["arm", "retain"], dropna=False)["sample"].nunique()
    table.insert(0, "n", counts.reindex(table.index))
    return table.reset_index("retain")


def as_text(table: pd.DataFrame) -> str:
    """A table for a terminal: scores with one digit, measures with three, shares in percent, a dash for missing."""
    shown = table.reset_index().copy()
    for column in shown.columns:
        if column in ("retain", "kept_entries", "kept_bytes"):
            form = "{:.0%}" if column == "retain" else "{:.1%}"
        elif column in ("nll", "kl", "agree"):
            form = "{:.3f}"
        elif column in (*CATEGORIES, "average"):
            form = "{:.1f}"
        else:
            continue
        shown[column] = ["-" if pd.isna(x) else form.format(x) for x in shown[column]]
    return shown.to_string(index=False)


def one_each(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame if it holds each (sample, arm, retain) once; averages would otherwise mix settings.

    Raises
    ------
    UserError
        An arm was run with several settings; the message names it.
    """
    twice = frame.duplicated(["sample", "arm", "retain"])
    if twice.any():
        raise UserError(
            f"arm {frame.loc[twice, 'arm'].iloc[0]} has several settings for one sample; a table needs one; "
            "filter by a settings.* column first"
        )
    return frame


def rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Sort key of a name: its place in the given order; an unnamed arm goes with its method, an unknown name last."""
    method = name.partition("/")[0]
    known = next((x for x in (name, method) if x in order), None)
    return (len(order) if known is None else order.index(known), "" if name == known else name)


def in_order(names: Sequence[str] | pd.Index | pd.Series, order: Sequence[str]) -> list[str]:
    """Return the distinct names, sorted by :func:`rank`."""
    return sorted(set(names), key=lambda name: rank(name, order))


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file whole: readers see the old content or the new, never a part.

    Raises
    ------
    UserError
        The file cannot be written; the old one is untouched.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise UserError(
            f"cannot write {path}; {_reason(error)}; free some space or choose another folder"
        ) from error


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole units of a records file and the length in bytes that they fill."""
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":  # the usual end, a newline
        lines.pop()
        torn = None
    else:
        torn = len(lines)
    units: list[dict[str, Any]] = []
    lines_of: dict[Unit, int] = {}
    whole = 0
    for number, line in enumerate(lines, 1):
        try:
            unit = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number} is damaged; it is not a JSON record; restore the file, or delete "
                "that line and run again to redo its sample"
            ) from error
        if number == torn:  # complete but for its newline; redone, by the one rule that a line ends with one
            break
        if why := _malformed(unit):
            raise UserError(
                f"{path}, line {number} is not a record of ours; {why}; restore the file or delete that line"
            )
        if (first := lines_of.setdefault(_key(unit), number)) != number:
            raise UserError(
                f"{path}, line {number} repeats line {first}; it would count twice; delete one of them"
            )
        units.append(unit)
        whole += len(line) + 1
    return units, whole


def _read_carried(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, low_memory=False)
        if missing := [key for key in REQUIRED if key not in frame]:
            raise ValueError(f"it lacks the column {missing[0]}")
        return frame.astype(dict.fromkeys(("retain", *METRICS), float))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"cannot read {path}; {why}; restore the file from the repository") from error


def _malformed(unit: Any) -> str | None:
    """Say what is wrong with a parsed line, or None."""
    if not isinstance(unit, dict) or not isinstance(unit.get("unit"), dict):
        return "it has no unit"
    if set(unit["unit"]) != set(Unit._fields):
        return f"its unit needs {', '.join(Unit._fields)}"
    records = unit.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        return "it has no list of records"
    for record in records:
        if missing := [key for key in REQUIRED if key not in record]:
            return f"a record lacks {', '.join(missing)}"
        if wrong := [key for key in METRICS if not isinstance(record[key], int | float | None)]:
            return f"{wrong[0]} is not a number"
    return None


def _identity(record: Mapping[str, Any]) -> tuple[str, str]:
    """What makes a record the same measurement: its sample, and the arm with all its settings."""
    same = [record.get(key) for key in ("arm", "retain", "settings")]
    return record["sample"], json.dumps(same, sort_keys=True)


def _key(unit: dict[str, Any]) -> Unit:
    return Unit(**unit["unit"])


def _read_run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_bytes())
        if isinstance(run, dict) and isinstance(run.get("versions"), dict):
            return run
        why = "it is not a run description"
    except OSError as error:
        why = _reason(error)
    except ValueError:
        why = "it is not JSON"
    raise UserError(
        f"cannot read {path}; {why}; the records beside it cannot be told apart without it: restore it or "
        "choose another output folder"
    )


def _plain(value: Any, where: str) -> Any:
    """Turn a value into plain JSON; NaN to None, numpy and torch scalars to numbers, infinity refused."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # half a surrogate pair, which no file can carry
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        raise UserError(f"{where} is infinite; the arithmetic overflowed; try a wider dtype")
    return value


def _without_folders(value: Any) -> Any:
    """A local model is a path; only its name belongs into results."""
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith(("~", "."))):
        return Path(value).name
    return value


def _spread(record: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in record.items():
        if key in ("diagnostics", "settings", "versions"):
            prefix = "diag" if key == "diagnostics" else key
            row |= {f"{prefix}.{name}": item for name, item in (value or {}).items()}
        else:
            row[key] = value
    return row


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
