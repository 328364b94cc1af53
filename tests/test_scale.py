"""Units of work on a local Ray: workers that die, errors that travel, and a real run whose worker is killed.

Without Ray (it is an extra) only the tests of what is said then, and of the arithmetic, run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
from test_runner import command, stored

from kvrepro import results, runner, scale
from kvrepro.cli import main
from kvrepro.errors import UserError


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(scale, "find_spec", lambda name: None)
    assert main(["run", "--executor", "ray", "--model", "no-such-model", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'kvrepro[ray]'" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"executor": "dask"}, "unknown executor"),
        ({"workers": 2}, "--workers goes with"),
        ({"executor": "ray", "device": "cuda:1"}, "--device cuda"),
    ],
)
def test_bad_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(scale, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=said):
        runner.run("smoke", "no-such-model", out=tmp_path, **wrong)


def test_a_cluster_that_is_not_there_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scale, "find_spec", lambda name: object())
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UserError, match=r"^cannot reach a Ray cluster at 127\.0\.0\.1:\d+: .*refused"):
            runner.run("smoke", "no-such-model", out=tmp_path, executor="ray")


def test_workers_fit_the_machines() -> None:
    """No worker is asked for that no machine has a place for, and threads do not outnumber CPUs."""
    for cpus in ([2], [1], [16], [16, 6], [3, 3], [64, 8, 1, 0]):
        machines = [{"CPU": float(n)} for n in cpus]
        for workers in (None, *range(1, sum(cpus) + 1)):
            count, share = scale.crew(machines, "cpu", workers)
            assert count == (workers or count) and count * share["num_cpus"] <= sum(cpus)
            assert sum(n // share["num_cpus"] for n in cpus) >= count
    for device, workers in (("cpu", 3), ("cuda", None), ("cuda", 1)):
        with pytest.raises(UserError, match="Ray has"):
            scale.crew([{"CPU": 2.0}], device, workers)


# On a local Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (make test-ray installs it)")
    with scale.cluster() as ray:
        yield ray


def units(*names: str) -> list[Any]:
    return [(SimpleNamespace(id=name),) for name in names]


def on_two(make: Callable[[], Any], *names: str, seen: list[str] | None = None) -> None:
    """Carry out some units on two workers, and note those that are finished."""
    with contextlib.closing(scale.carry_out(make, units(*names), workers=2, quiet=True)) as done:
        for (unit,), records in done:
            assert records == [{"of": unit.id}]
            if seen is not None:
                seen.append(unit.id)


def test_a_unit_that_ends_its_worker_every_time_is_named_and_the_others_are_kept(
    cluster: Any, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"

    def make() -> Any:
        def bench(unit: Any) -> list[dict[str, Any]]:
            if unit.id == "deadly":
                with tries.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            return [{"of": unit.id}]

        return bench

    seen: list[str] = []
    with pytest.raises(
        UserError, match=r"^deadly ended 3 workers each.* all other results are kept"
    ) as caught:
        on_two(make, "a", "deadly", "b", "c", "d", seen=seen)
    assert sorted(seen) == ["a", "b", "c", "d"]
    assert tries.read_text() == "xxx" and "\n" not in str(caught.value)


def test_errors_travel(cluster: Any) -> None:
    """What a person can mend arrives as its one line; a bug keeps its traceback; a death while loading is told."""

    def no_model() -> Any:
        raise UserError("no model 'x'; check the spelling")

    def no_unit() -> Any:
        def bench(unit: Any) -> Any:
            raise UserError(f"{unit.id} is wrong; mend it")

        return bench

    def bug() -> Any:
        return lambda unit: 1 / 0

    for make, text in ((no_model, "no model 'x'; check the spelling"), (no_unit, "a is wrong; mend it")):
        with pytest.raises(UserError) as caught:
            on_two(make, "a")
        assert str(caught.value) == text
    with pytest.raises(ZeroDivisionError):
        on_two(bug, "a")
    with pytest.raises(UserError, match=r"^\d workers died while they loaded the model"):
        on_two(lambda: os._exit(1), "a", "b")


def test_control_c_ends_the_workers(cluster: Any, tmp_path: Path) -> None:
    def make() -> Any:
        tmp_path.joinpath(str(os.getpid())).touch()

        def bench(unit: Any) -> list[dict[str, Any]]:
            if unit.id == "slow":
                os.kill(driver, signal.SIGINT)
                time.sleep(600)
            return [{"of": unit.id}]

        return bench

    driver, seen = os.getpid(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        on_two(make, "quick", "slow", seen=seen)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, workers)):
        assert time.monotonic() < deadline, "a worker outlives its run"
        time.sleep(0.1)


@pytest.mark.timeout(1200)  # Ray itself may take a minute to start on a busy machine
def test_a_killed_worker_is_replaced_and_the_run_ends_as_a_local_one(
    cluster: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself, on the cluster at RAY_ADDRESS, with the one real model; SIGKILL for a worker at work."""
    out, local = tmp_path / "ray", tmp_path / "local"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as each of two workers on two CPUs
    monkeypatch.setenv("RAY_ADDRESS", cluster.get_runtime_context().gcs_address)
    many = [*command(out), "--executor", "ray", "--workers", "2"]
    process = subprocess.Popen(many, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records = out / results.RECORDS
    victim = None
    deadline = time.monotonic() + 400
    while victim is None:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
        if records.exists() and records.read_bytes().count(b"\n"):
            victim = next(at_work(), None)
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert said.count("a worker died at ") == 1 and "Traceback" not in said

    assert subprocess.run(command(local), capture_output=True).returncode == 0
    assert records.read_bytes().count(b"\n") == 4
    assert not stored(out).duplicated(["sample", "arm"]).any()
    pd.testing.assert_frame_equal(stored(out), stored(local))
    with capsys.disabled():
        print(f"\nkilled worker {victim} of 2 at work: {records.read_bytes().count(chr(10).encode())} units, "
              f"{len(stored(out))} records, none lost or doubled, equal to a local run")  # fmt: skip


def at_work() -> Iterator[int]:
    """Processes of this cluster's workers that carry out a unit, as Ray names them."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::_Worker.measure"]:
                yield process.pid
