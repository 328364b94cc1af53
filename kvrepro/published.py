"""What the papers report, to stand beside what we measure.

``data/published/*.csv`` holds one number a row: which paper, model, benchmark and setting, which method,
which metric. The papers' models are 50 times larger than the embedded one and their texts differ, so the
columns of :func:`beside` are there to compare orders and gaps, not levels.
"""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import pandas as pd

from kvrepro.errors import UserError

FOLDER = Path(__file__).parent.parent / "data" / "published"

COLUMNS = ("paper", "model", "benchmark", "setting", "method", "metric", "value", "note")
KEY = COLUMNS[:6]

# The papers' names for what we call arms. A name that is not here has no arm (CaM), or says again what a
# better source says (KVSlimmer's rerun of AsymKV).
ARM_OF = {
    "Full": "full",
    "StreamingLLM": "streaming-llm",
    "H2O": "h2o",
    "SnapKV": "snapkv",
    "PyramidKV": "pyramidkv",
    "SelKV": "selkv",
    "SelKV evict only": "selkv/evict",
    "SelKV merge all (no gate)": "selkv/merge-all",
    "SelKV gate without bias": "selkv/gate",
    "AsymKV": "asymkv",
    "KVSlimmer": "kvslimmer",
}
RERUN_OF = {"AsymKV (rerun)": "asymkv"}  # what counts, too, where a difference is taken


def load(folder: str | os.PathLike[str] = FOLDER) -> pd.DataFrame:
    """Read every published number.

    Parameters
    ----------
    folder
        Folder of CSV files with the columns ``COLUMNS``.

    Returns
    -------
    DataFrame
        One row a number, ``value`` as float, the rest as text (an empty ``note`` is "").

    Raises
    ------
    UserError
        No file, another header, an empty or repeated key, or a value that is no finite number; with file and
        line.
    """
    paths = sorted(Path(folder).glob("*.csv"))
    if not paths:
        raise UserError(
            f"no published numbers in {folder}; there is no .csv file; run from a clone of the repository"
        )
    rows: list[dict[str, str | float]] = []
    seen: dict[tuple[str | float, ...], str] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            try:
                for cells in reader:
                    place = f"{path}, line {reader.line_num}"
                    if reader.line_num == 1:
                        if tuple(cells) != COLUMNS:
                            raise UserError(f"{place}: the header is not ours; make it {','.join(COLUMNS)}")
                    elif cells:
                        row = _row(cells, place)
                        key = tuple(row[column] for column in KEY)
                        if key in seen:
                            raise UserError(f"{place} repeats {seen[key]}; keep one of the two")
                        seen[key] = place
                        rows.append(row)
            except (csv.Error, UnicodeDecodeError) as error:
                raise UserError(
                    f"{path}, line {reader.line_num + 1} cannot be read; {error}; save it as UTF-8 CSV"
                ) from error
    return pd.DataFrame(rows, columns=list(COLUMNS))


def lookup(paper: str, model: str, benchmark: str, setting: str, method: str) -> float:
    """Return one published number.

    Examples
    --------
    >>> lookup("SelKV", "Gemma-2-9B-IT", "LongBench-16", "25% retention; 3500 tokens", "SnapKV")
    42.16

    Raises
    ------
    UserError
        There is no such number; the message lists what that paper has for the method.
    """
    table = load()
    wanted = dict(zip(KEY, (paper, model, benchmark, setting, method), strict=False))
    hits = table[(table[list(wanted)] == pd.Series(wanted)).all(axis=1)]
    if len(hits) == 1:
        return float(hits["value"].iloc[0])
    near = table[(table["paper"] == paper) & (table["method"] == method)]
    known = " | ".join(f"{r.model}, {r.benchmark}, {r.setting}" for r in near.itertuples()) or "nothing"
    found = "several metrics" if len(hits) else "no number"
    raise UserError(
        f"{found} for {method} in {paper} ({model}, {benchmark}, {setting}); it has {known}; choose one of "
        "these"
    )


def beside(main_table: pd.DataFrame) -> pd.DataFrame:
    """Put the published averages beside ours.

    Parameters
    ----------
    main_table
        As :func:`kvrepro.results.main_table` gives it: index ``arm``, column ``average``.

    Returns
    -------
    DataFrame
        Index ``arm``, all of ours, in our order; column ``here`` with our average, then one column for each
        published model and setting, named with the papers it comes from. Only those that hold at least two of
        the table's arms: a number alone compares with nothing. NaN where nothing is published.
    """
    table = load()
    averages = table[(table["metric"] == "average") & table["method"].isin(list(ARM_OF))]
    columns = {"here": main_table["average"]}
    for (model, _, setting), rows in averages.groupby(["model", "benchmark", "setting"], sort=False):
        value_of = dict(zip(rows["method"].map(ARM_OF), rows["value"], strict=True))
        if len(value_of.keys() & set(main_table.index)) >= 2:
            papers = ", ".join(rows["paper"].unique())
            columns[f"{papers}: {model} ({setting})"] = main_table.index.to_series().map(value_of)
    return pd.DataFrame(columns)


def differences(arm: str, baseline: str) -> list[float]:
    """Differences in average, arm minus baseline, wherever both stand side by side, in the order of the files."""
    table = load()
    table = table[table["metric"] == "average"]
    table = table.assign(arm=table["method"].map(ARM_OF | RERUN_OF))
    found = []
    for _, rows in table.groupby(["model", "benchmark", "setting"], sort=False):
        ours, theirs = (rows.loc[rows["arm"] == name, "value"] for name in (arm, baseline))
        found += [round(float(one - other), 6) for one in ours for other in theirs]
    return found


def signed(number: float, digits: int = 2) -> str:
    """A difference as text, with a true minus sign and no negative zero."""
    return f"{round(number, digits) + 0.0:+.{digits}f}".replace("-", "−")


def _row(cells: list[str], place: str) -> dict[str, str | float]:
    if len(cells) != len(COLUMNS):
        raise UserError(
            f"{place} has {len(cells)} fields, not {len(COLUMNS)}; quote a text that holds commas"
        )
    row: dict[str, str | float] = dict(zip(COLUMNS, cells, strict=True))
    if empty := [column for column in KEY if not str(row[column]).strip()]:
        raise UserError(f"{place} has no {empty[0]}; fill it in")
    try:
        row["value"] = float(row["value"])
    except ValueError:
        row["value"] = math.nan
    if not math.isfinite(float(row["value"])):
        raise UserError(f"{place}: value {cells[6]!r} is not a finite number; write it like 42.31")
    return row
