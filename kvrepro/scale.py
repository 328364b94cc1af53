"""Carry out a run's units of work on many devices or machines, through Ray (``pip install 'kvrepro[ray]'``).

    kvrepro run --executor ray --device cuda ...                       every GPU of this machine
    RAY_ADDRESS=HOST:6379 kvrepro run --executor ray --device cuda ... every GPU of the cluster that `ray start` made

A worker is a process with a device of its own, which loads the model once.  The driver gives every free worker the next
unit and takes back its records: the store keeps its one writer, and a run that was stopped goes on as any other does.
A worker that dies (killed, out of memory, its machine lost) is replaced, and its unit is done again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from .errors import UserError

Unit = tuple[Any, ...]  # what a bench is called with; its first part has an ``id``
Bench = Callable[..., list[dict[str, Any]]]  # a loaded model: from a unit to its records

ATTEMPTS = 3  # workers that a unit may take with it, and that may die while they load
PATIENCE = 60.0  # seconds without a word
THREADS = 4  # of a worker without a GPU, where the machine has so many
STORE = 2**28  # bytes of Ray's object store: prompts and records are small
# Ray's exceptions for the death of a worker or of its machine
DEATHS = ("RayActorError", "NodeDiedError", "OutOfMemoryError", "ObjectLostError")
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing of a run is reported to anybody
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what Ray prints of a worker's death: we tell it in a line
}


def check(device: str) -> None:
    """Refuse, before anything is loaded, what cannot work.

    Raises
    ------
    UserError
        Ray is not installed, one device is named by its number, or nothing answers at ``RAY_ADDRESS``.
    """
    if find_spec("ray") is None:
        raise UserError("--executor ray needs Ray, which is not installed; pip install 'kvrepro[ray]'")
    if ":" in device:
        raise UserError(
            f"--executor ray gives each worker a device of its own, so {device} cannot be one; say --device "
            f"{device.partition(':')[0]} (CUDA_VISIBLE_DEVICES tells Ray which to use)"
        )
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # Ray itself tries for minutes, and says so in many lines
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 6).close()
        except OSError as error:
            raise UserError(_unreachable(address, error.strerror or str(error))) from error


def carry_out(
    make: Callable[[], Bench],
    todo: Sequence[Unit],
    *,
    device: str = "cpu",
    workers: int | None = None,
    quiet: bool = False,
) -> Generator[tuple[Unit, list[dict[str, Any]]]]:
    """Yield each unit with its records, in the order in which they are finished.

    Closing the generator, or an exception in it, ends the workers.

    Parameters
    ----------
    make
        Makes a worker's bench, in the worker; has to be picklable.
    todo
        The units, each of them picklable.
    device
        "cuda": a GPU a worker.  "cpu": a share of the CPUs a worker.
    workers
        How many; default: as many as there are GPUs, or one for every four CPUs of a machine.
    quiet
        Say nothing of workers on stderr.

    Raises
    ------
    UserError
        What a bench says so of; no such devices, or no cluster at ``RAY_ADDRESS``; every worker dies while it loads; and,
        after all other units are done, a unit that took ``ATTEMPTS`` workers with it.
    """

    def tell(text: str) -> None:
        if not quiet:
            tqdm.write(text, file=sys.stderr)

    with cluster() as ray:
        gone = tuple(getattr(ray.exceptions, name) for name in DEATHS)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count, share = crew(machines, device, workers)
        hands = ray.remote(**share)(_Worker)
        queue, finished = _Queue(todo), 0
        at_work: dict[Any, tuple[Any, Unit | None]] = {}  # answer: worker, and its unit, None while it loads

        def hire() -> None:
            worker = hands.remote()
            at_work[worker.start.remote(make, share["num_cpus"])] = worker, None

        try:
            for _ in range(min(count, len(todo))):
                hire()
            tell(f"workers: {len(at_work)}, machines: {len(machines)}; each worker loads the model once")
            while finished + len(queue.lost) < len(todo):
                if not at_work:
                    raise UserError(queue.nobody_left())
                ready, _ = ray.wait(list(at_work), timeout=PATIENCE)
                if not ready:
                    if all(unit is None for _, unit in at_work.values()):
                        tell("no worker is ready yet: they load the model, or other jobs hold the devices")
                    continue
                worker, unit = at_work.pop(ready[0])
                try:
                    records = ray.get(ready[0])
                except gone:
                    ray.kill(worker)  # where only the way to it is lost, too: nobody waits for it any more
                    again, news = queue.died_at(unit)
                    if again:
                        hire()
                    tell(news)
                    continue
                if isinstance(records, str):
                    raise UserError(records)
                if queue.waiting:  # before anything else, so that the worker need not wait for us
                    following = queue.waiting.popleft()
                    at_work[worker.measure.remote(*following)] = worker, following
                if unit is not None:
                    finished += 1
                    yield unit, records
        finally:
            for worker, _ in at_work.values():
                ray.kill(worker)
        if queue.lost:
            raise UserError(queue.given_up())


class _Queue:
    """The units that wait for a worker, and those that took too many with them."""

    def __init__(self, todo: Sequence[Unit]) -> None:
        self.waiting = deque(todo)
        self.lost: list[str] = []
        self._deaths: Counter[str | None] = Counter()  # by unit; None: while loading

    def died_at(self, unit: Unit | None) -> tuple[bool, str]:
        """Whether the worker that died at a unit (None: while loading) is to be replaced, and what to say of it."""
        name = unit[0].id if unit else None
        self._deaths[name] += 1
        times = self._deaths[name]
        if unit and times < ATTEMPTS:
            self.waiting.append(unit)  # last, so that the others are done whatever it does
        elif unit:
            self.lost.append(unit[0].id)
        again = bool(self.waiting) and (unit is not None or times < ATTEMPTS)
        return again, f"a worker died at {name or 'loading the model'} ({times} of at most {ATTEMPTS} times)"

    def nobody_left(self) -> str:
        return (
            f"{self._deaths[None]} workers died while they loaded the model, most likely for want of memory; take fewer "
            "--workers or a smaller model, and run again"
        )

    def given_up(self) -> str:
        named = ", ".join(self.lost[:3]) + (" and others" if len(self.lost) > 3 else "")
        return (
            f"{named} ended {ATTEMPTS} workers each, most likely for want of memory; all other results are kept; run "
            "again with fewer --methods at a time or fewer --workers"
        )


def crew(
    machines: Sequence[Mapping[str, float]], device: str, workers: int | None
) -> tuple[int, dict[str, int]]:
    """How many workers, and what each of them asks of Ray.

    Parameters
    ----------
    machines
        "CPU" and "GPU" of each machine, as Ray counts them.

    Raises
    ------
    UserError
        The machines have less than is asked for.

    Examples
    --------
    >>> crew([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}], "cuda", None)
    (16, {'num_cpus': 1, 'num_gpus': 1})
    >>> crew([{"CPU": 16}, {"CPU": 6}], "cpu", None), crew([{"CPU": 16}, {"CPU": 6}], "cpu", 3)
    ((5, {'num_cpus': 4}), (3, {'num_cpus': 6}))
    """
    kind = "GPU" if device == "cuda" else "CPU"
    have = [int(machine.get(kind, 0)) for machine in machines]
    if sum(have) < (workers or 1):
        raise UserError(
            f"Ray has {sum(have)} {kind}s, and each of {workers or 1} workers needs one; give "
            + ("fewer --workers" if sum(have) else "--device cpu, or add machines with GPUs to the cluster")
        )
    if kind == "GPU":
        return workers or sum(have), {"num_cpus": 1, "num_gpus": 1}
    count = workers or sum(max(1, n // THREADS) for n in have if n)
    # as many threads as still leave all of them a place: a worker cannot be spread over machines
    return count, {"num_cpus": max(t for t in range(1, max(have) + 1) if sum(n // t for n in have) >= count)}


class _Worker:
    """What runs on a device.  A ``UserError`` travels back as its text: Ray would make a traceback of it."""

    def start(self, make: Callable[[], Bench], threads: int) -> list[dict[str, Any]] | str:
        # read when torch is imported, which is what ``make`` does first
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        try:
            self._bench = make()
        except UserError as error:
            return str(error)
        return []

    def measure(self, *unit: Any) -> list[dict[str, Any]] | str:
        try:
            return self._bench(*unit)
        except UserError as error:
            return str(error)


@contextmanager
def cluster() -> Iterator[Any]:
    """Ray, connected to ``RAY_ADDRESS``, else started on this machine for the time of the block.

    Where this process is connected already, nothing is changed.

    Raises
    ------
    UserError
        There is no cluster at that address, or Ray does not start.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS") or "local"
    own = {"include_dashboard": False, "object_store_memory": STORE} if address == "local" else {}
    for left in reversed(range(ATTEMPTS if own else 1)):
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
            break
        except Exception as error:  # the system's, Ray's own, and bare ones
            ray.shutdown()
            if (
                left
            ):  # on a busy machine Ray's helpers may miss a deadline of 15 s that Ray does not let one change
                continue
            why = next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(".")
            raise UserError(
                f"cannot start Ray on this machine: {why}; try again when it is less busy"
                if own
                else _unreachable(address, why)
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _unreachable(address: str, why: str) -> str:
    return (
        f"cannot reach a Ray cluster at {address}: {why}; set RAY_ADDRESS to what `ray start` printed, or unset it to use "
        "this machine alone"
    )
