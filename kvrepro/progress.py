"""Progress that suits its reader: a bar on a terminal, otherwise a plain line now and then.

Notebooks, logs and CI get no control characters and no flood: at most one line every ten seconds, and a last one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
EVERY = 10.0  # seconds between two plain lines


def progress(iterable: Iterable[T], desc: str, total: int | None = None, quiet: bool = False) -> Iterator[T]:
    """Pass the items through and tell on stderr how far it is.

    Parameters
    ----------
    desc
        What is being done, in a word or two.
    total
        Number of items, where `len(iterable)` does not tell.
    quiet
        Print nothing.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if quiet:
        yield from iterable
    elif sys.stderr.isatty():
        yield from tqdm(iterable, desc=desc, total=total, dynamic_ncols=True)
    else:
        yield from _lines(iterable, desc, total)


def _lines(iterable: Iterable[T], desc: str, total: int | None) -> Iterator[T]:
    start = last = time.monotonic()
    done = told = 0
    for item in iterable:
        yield item
        done += 1  # counted when the consumer comes back for the next: the work on the item is over then
        if time.monotonic() - last >= EVERY:
            last, told = time.monotonic(), done
            _tell(desc, done, total, last - start)
    if told != done or not done:
        _tell(desc, done, total, time.monotonic() - start)


def _tell(desc: str, done: int, total: int | None, seconds: float) -> None:
    left = f", about {_clock(seconds / done * (total - done))} left" if total and 0 < done < total else ""
    count = f"{done}/{total}" if total is not None else f"{done}"
    print(f"{desc}: {count} in {_clock(seconds)}{left}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """Minutes and seconds, 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
