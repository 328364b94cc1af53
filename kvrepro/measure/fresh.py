"""Measurements in processes of their own: what an earlier one left behind (buffers, threads, heap) does not count.

On a CPU the peak is the process's (VmHWM), reset before the measured part, so the loading of the model does not count;
on CUDA it is the allocator's.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
WARM_UP = 64  # tokens run before a measurement: weights are paged in, threads and buffers made
RESET = Path("/proc/self/clear_refs")


def fresh(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``function(*args, **kwargs)`` in a new process that ends with it; both have to be picklable."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """Most bytes held while inside, above those held before; to be read from the list afterwards.

    Raises
    ------
    UserError
        On a CPU whose system does not tell a peak since a moment (other than Linux).
    """
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    if not os.access(RESET, os.W_OK):
        raise UserError(
            "this system does not tell the peak memory of a part of a process; measure on Linux or with --device cuda"
        )
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve now
    RESET.write_text("5")
    before = _status("VmRSS")
    yield found
    found.append(_status("VmHWM") - before)


def _status(field: str) -> int:
    """A line of the process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
