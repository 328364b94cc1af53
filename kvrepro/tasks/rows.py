"""Benchmark rows from disk, read strictly: what is not of the expected form is refused by file and line.

A row that is skipped or repaired in silence changes an average that nobody will look at again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrepro.errors import UserError
from kvrepro.tasks.base import Sample


@dataclass(frozen=True)
class Row:
    """One record and the place it comes from; each getter refuses a value that is not of its type."""

    values: dict[str, Any]
    place: str

    def text(self, field: str, *, empty: bool = False) -> str:
        """A string that can be written as UTF-8 and holds no NUL; blank only with ``empty``."""
        return self._checked(field, self._value(field, str, "a string"), empty)

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings, at least one of them, none blank."""
        found = self._value(field, list, "a list of strings")
        if not found or not all(isinstance(text, str) for text in found):
            raise self.wrong(f"field {field!r} has to be a list with at least one string and nothing else")
        return tuple(self._checked(field, text, False) for text in found)

    def number(self, field: str) -> int:
        """A non-negative whole number."""
        found = self._value(field, int, "a whole number")
        if isinstance(found, bool) or found < 0:
            raise self.wrong(f"field {field!r} has to be a whole number of at least 0")
        return int(found)

    def wrong(self, why: str) -> UserError:
        """The error that names this row."""
        return UserError(f"{self.place}: {why}; nothing was loaded; mend the row or take it out")

    def _value(self, field: str, kind: type, words: str) -> Any:
        if field not in self.values:
            raise self.wrong(f"field {field!r} is missing")
        value = self.values[field]
        if not isinstance(value, kind):
            raise self.wrong(f"field {field!r} has to be {words}, not {type(value).__name__}")
        return value

    def _checked(self, field: str, text: str, empty: bool) -> str:
        if not empty and not text.strip():
            raise self.wrong(f"field {field!r} holds no text")
        if "\0" in text:
            raise self.wrong(f"field {field!r} holds a NUL character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.wrong(f"field {field!r} holds half of a surrogate pair, which is no text") from None
        return text


def files(folder: Path) -> list[Path]:
    """The files of a folder and of the folders in it.

    Raises
    ------
    UserError
        There is no such folder, or it cannot be listed.
    """
    try:
        inside = sorted(folder.iterdir())
        found = [p for p in inside if p.is_file()]
        return found + [p for sub in inside if sub.is_dir() for p in sorted(sub.iterdir()) if p.is_file()]
    except OSError as error:
        raise UserError(
            f"cannot list the data folder {folder}; {error.strerror or error}; give a folder with benchmark rows"
        ) from error


def read(path: Path) -> Iterator[Row]:
    """The rows of a ``.jsonl`` file, or of a ``.json`` file that is one array.

    Raises
    ------
    UserError
        The file cannot be read, a row is not a JSON object in UTF-8, or there is none.
    """
    try:
        if path.suffix == ".json":
            yield from from_array(path.read_bytes(), str(path))
        else:
            with path.open("rb") as file:
                yield from from_lines(file, str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}; {error.strerror or error}; check the file") from error


def from_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """The rows of a JSONL stream; ``name`` is what errors call it."""
    found = False
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = True
            yield _row(_parsed(line, f"{name}, line {number}"), f"{name}, line {number}")
    if not found:
        raise UserError(f"{name} has no rows; a task needs at least one; fetch or copy the file again")


def from_array(content: bytes, name: str) -> Iterator[Row]:
    """The rows of a JSON array."""
    values = _parsed(content, name)
    if not isinstance(values, list) or not values:
        raise UserError(f"{name} is not a JSON array of rows; nothing was loaded; fetch or copy it again")
    for number, value in enumerate(values, start=1):
        yield _row(value, f"{name}, row {number}")


def first(limit: int, samples: Iterable[Sample]) -> list[Sample]:
    """The first ``limit`` samples, after a look at all of them: a broken file is broken for every limit."""
    kept: list[Sample] = []
    seen = set()
    for sample in samples:
        if sample.id in seen:
            raise UserError(
                f"two rows have the id {sample.id}; results are stored by it; take one out or rename it"
            )
        seen.add(sample.id)
        if len(kept) < limit:
            kept.append(sample)
    return kept


def safe_id(given: str) -> str:
    """``given`` if it is a harmless file name; else what is harmless in it, and eight digits of its hash."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}", given):
        return given
    harmless = re.sub(r"[^A-Za-z0-9_-]+", "_", given)[:40]
    return f"{harmless}-{hashlib.sha256(given.encode()).hexdigest()[:8]}"


def _parsed(content: bytes, place: str) -> Any:
    if b"\0" in content:
        raise Row({}, place).wrong("there is a NUL byte")
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Row({}, place).wrong(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Row({}, place).wrong(f"not JSON ({error.msg} at character {error.pos})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise Row({}, place).wrong("no JSON that Python can read") from None


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise Row({}, place).wrong(f"not a JSON object but {type(value).__name__}")
    return Row(value, place)
