"""The store: nothing lost, nothing doubled, whatever happens to the process or the disk."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvrepro import results
from kvrepro.errors import UserError
from kvrepro.results import Store, load

SETTINGS = {"profile": "smoke", "model": "tiny", "device": "cpu", "dtype": "float32"}


def record(
    sample: str, arm: str = "full", task: str = "qa", category: str = "single-doc", **changes: object
) -> dict:
    return {
        "sample": sample,
        "task": task,
        "category": category,
        "method": arm.split("/")[0],
        "arm": arm,
        "retain": 0.25,
        "score": 50.0,
        "nll": 1.0,
        "kl": 0.1,
        "agree": 0.9,
        "kept_entries": 0.25,
        "kept_bytes": 0.25,
        "settings": {"alpha": 0.5},
        "diagnostics": {"gate": 0.7},
        **changes,
    }


def fill(folder: Path, n: int = 3) -> bytes:
    with Store(folder, SETTINGS) as store:
        for i in range(n):
            store.append(store.unit(f"qa/{i}", "all"), [record(f"qa/{i}"), record(f"qa/{i}", "selkv")])
    return (folder / results.RECORDS).read_bytes()


def test_what_was_stored_is_loaded_and_known_as_done(tmp_path):
    fill(tmp_path)
    frame = load(tmp_path)
    assert list(frame["sample"]) == ["qa/0", "qa/0", "qa/1", "qa/1", "qa/2", "qa/2"]
    assert set(frame["diag.gate"]) == {0.7}
    assert set(frame["settings.alpha"]) == {0.5}
    with Store(tmp_path, SETTINGS) as store:
        assert store.done(store.unit("qa/2", "all"))
        assert not store.done(store.unit("qa/3", "all"))
        assert not store.done(store.unit("qa/2", "other"))
        assert not store.done(store.unit("qa/2", "all", retain=0.5))
        with pytest.raises(ValueError, match="stored already"):
            store.append(store.unit("qa/2", "all"), [record("qa/2")])


def test_the_settings_hash_ignores_the_order_of_keys_and_nothing_else():
    assert results.settings_hash({"a": 1, "b": [1, 2]}) == results.settings_hash({"b": (1, 2), "a": 1})
    assert results.settings_hash({"a": 1}) != results.settings_hash({"a": 2})
    assert (
        results.settings_hash({"retain": 0.25}) == "3825d40989e48405"
    )  # the same on every machine and version


def test_nan_is_stored_as_null_and_infinity_is_refused(tmp_path):
    with Store(tmp_path, SETTINGS) as store:
        odd = record("qa/0", nll=math.nan, score=np.float32(12.5), diagnostics={"gate": np.float64("nan")})
        store.append(store.unit("qa/0", "all"), [odd])
        with pytest.raises(UserError, match=r"selkv on qa/1: kl is infinite"):
            store.append(store.unit("qa/1", "all"), [record("qa/1", "selkv", kl=math.inf)])
        with pytest.raises(ValueError, match="lacks kl"):
            store.append(store.unit("qa/1", "all"), [{k: v for k, v in record("qa/1").items() if k != "kl"}])
    line = json.loads((tmp_path / results.RECORDS).read_text())
    assert line["records"][0]["nll"] is None
    frame = load(tmp_path)
    assert len(frame) == 1
    assert np.isnan(frame["nll"][0])
    assert frame["score"][0] == 12.5


def test_a_prediction_of_any_characters_survives(tmp_path):
    text = 'naïve\n\x00\u2028\r 漢字 \U0001f600 "quoted"'
    with Store(tmp_path, SETTINGS) as store:
        store.append(store.unit("qa/0", "all"), [record("qa/0", prediction=text)])
        store.append(store.unit("qa/1", "all"), [record("qa/1", prediction="half a pair: \ud83d")])
    assert list(load(tmp_path)["prediction"]) == [text, "half a pair: ?"]


@pytest.mark.parametrize(
    "tail", [b'{"unit": {"sam', b'{"unit": {"sam\n', b"\x00" * 40, b"\xff\xfe", b'{"a": "\xff"}\n']
)
def test_a_torn_last_line_is_ignored_in_reading_and_cut_off_in_writing(tmp_path, tail):
    whole = fill(tmp_path)
    path = tmp_path / results.RECORDS
    path.write_bytes(whole + tail)
    assert len(load(tmp_path)) == 6
    assert path.read_bytes() == whole + tail  # reading changes nothing
    with Store(tmp_path, SETTINGS) as store:
        assert path.read_bytes() == whole
        store.append(store.unit("qa/9", "all"), [record("qa/9")])
    assert len(load(tmp_path)) == 7


def test_a_last_line_without_its_newline_is_redone(tmp_path):
    whole = fill(tmp_path)
    (tmp_path / results.RECORDS).write_bytes(whole[:-1])
    with Store(tmp_path, SETTINGS) as store:
        assert store.done(store.unit("qa/1", "all"))
        assert not store.done(store.unit("qa/2", "all"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [lines[0], b'{"half', *lines[1:]], "line 2 is damaged"),
        (lambda lines: [lines[0], b"", *lines[1:]], "line 2 is damaged"),
        (lambda lines: [b"[1, 2]", *lines], "line 1 is not a record of ours; it has no unit"),
        (lambda lines: [lines[0].replace(b'"group"', b'"grup"'), *lines[1:]], "line 1 .*needs sample, group"),
        (lambda lines: [lines[0], lines[1].replace(b'"kl":', b'"k":'), lines[2]], "line 2 .*lacks kl"),
        (
            lambda lines: [lines[0], lines[1].replace(b'"kl":0.1', b'"kl":"x"'), lines[2]],
            "line 2 .*kl is not a number",
        ),
        (lambda lines: [*lines, lines[1]], "line 4 repeats line 2"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line_and_left_alone(tmp_path, spoil, message):
    path = tmp_path / results.RECORDS
    spoiled = b"\n".join(spoil(fill(tmp_path).splitlines())) + b"\n"
    path.write_bytes(spoiled)
    with pytest.raises(UserError, match=message) as reading:
        load(tmp_path)
    assert str(path) in str(reading.value)
    with pytest.raises(UserError, match=message), Store(tmp_path, SETTINGS):
        pass
    assert path.read_bytes() == spoiled


def test_other_settings_are_refused_by_name_and_only_once_there_are_records(tmp_path):
    with Store(tmp_path, SETTINGS):
        pass
    fill_with = {**SETTINGS, "dtype": "bfloat16"}
    with Store(tmp_path, fill_with) as store:  # nothing was stored yet, so nothing can be mixed
        store.append(store.unit("qa/0", "all"), [record("qa/0")])
    with (
        pytest.raises(UserError, match='dtype "bfloat16" there and "float32" now') as refusal,
        Store(tmp_path, SETTINGS),
    ):
        pass
    assert "model" not in str(refusal.value).split(";")[1]
    with Store(tmp_path, fill_with) as store:
        assert store.done(store.unit("qa/0", "all"))

    (tmp_path / results.RUN).unlink()
    with pytest.raises(UserError, match="cannot be told apart"), Store(tmp_path, fill_with):
        pass


def test_run_json_says_what_ran_and_names_no_one(tmp_path, monkeypatch):
    with Store(tmp_path, {**SETTINGS, "model": "/home/someone/models/llama-8b"}) as store:
        store.append(store.unit("qa/0", "all"), [record("qa/0")])
        settings = store.settings
    run = json.loads((tmp_path / results.RUN).read_text())
    assert run["model"] == "llama-8b"
    assert run["profile"] == "smoke"
    assert set(run["versions"]) == {"python", "machine", "kvrepro", "torch", "transformers", "numpy"}
    assert os.uname().nodename not in (tmp_path / results.RUN).read_text()
    assert list(tmp_path.glob(".*")) == []  # no draft stays behind

    first = run["versions"]
    monkeypatch.setattr(results, "versions", lambda: first | {"numpy": "99"})
    with Store(tmp_path, settings):
        pass
    run = json.loads((tmp_path / results.RUN).read_text())
    assert run["versions"]["numpy"] == "99"
    assert run["earlier_versions"] == [first]


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_missing_or_empty_folder_is_said_plainly(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(UserError, match=r"no results in .*run;"):
        load(tmp_path / "run")
    with pytest.raises(UserError, match=r"no results in .*run;"):
        results.write_summary(tmp_path / "run")


def test_a_file_without_whole_records_is_no_result(tmp_path):
    (tmp_path / results.RECORDS).write_bytes(b'{"unit"')
    with pytest.raises(UserError, match="no whole record"):
        load(tmp_path)


def test_a_folder_that_cannot_be_made_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("not a folder")  # refused to root, too
    with pytest.raises(
        UserError, match=r"cannot write results to .*file.run; not a directory; choose another"
    ):
        Store(tmp_path / "file" / "run", SETTINGS).__enter__()


# --- real processes -----------------------------------------------------------------------------------------------

WRITER = """
import sys
from kvrepro.results import Store
sys.path.insert(0, sys.argv[2])
from test_results import SETTINGS, record
with Store(sys.argv[1], SETTINGS) as store:
    for i in range(int(sys.argv[3])):
        unit = store.unit(f"qa/{i}", "all")
        if store.done(unit):
            continue
        store.append(unit, [record(f"qa/{i}", prediction="x" * 20_000)])
        print(i, flush=True)
"""


def start(folder: Path, n: int, **options: object) -> subprocess.Popen:
    here = Path(__file__).parent
    command = [sys.executable, "-c", WRITER, str(folder), str(here), str(n)]
    environment = {**os.environ, "PYTHONPATH": str(here.parent)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def test_a_second_writer_is_turned_away(tmp_path):
    with Store(tmp_path, SETTINGS):
        _, errors = (second := start(tmp_path, 1)).communicate(timeout=60)
    assert second.returncode != 0
    assert f"another run is writing to {tmp_path}; a results folder has one writer; wait for it" in errors


def test_killed_while_appending_and_resumed_nothing_is_lost_or_doubled(tmp_path):
    n = 400
    killed = 0
    for _ in range(2):
        process = start(tmp_path, n)
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(15)]
        time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        said = [int(i) for i in [*seen, *rest.split()] if str(i).strip().isdigit()]
        stored = set(load(tmp_path)["sample"])
        assert {f"qa/{i}" for i in said} <= stored  # what was reported as stored is stored
    assert killed == 2
    # A kill rarely lands within the write itself, so tear the last line by hand as well.
    path = tmp_path / results.RECORDS
    path.write_bytes(path.read_bytes()[:-7_000])

    assert start(tmp_path, n).communicate(timeout=120)[1] == ""
    assert [json.loads(line)["unit"]["sample"] for line in path.read_bytes().splitlines()] == [
        f"qa/{i}" for i in range(n)
    ]


def test_a_full_disk_keeps_what_was_stored_and_says_so(tmp_path):
    limit = 90_000  # four units of 20 kB fit, the fifth is cut short

    def fewer_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    _, errors = (process := start(tmp_path, 10, preexec_fn=fewer_bytes)).communicate(timeout=60)
    assert process.returncode != 0
    assert f"cannot write results to {tmp_path}; no space left" in errors
    assert "the 4 finished units are kept, free some space and run again" in errors
    assert (tmp_path / results.RECORDS).read_bytes().endswith(b"}\n")  # cut back to the last whole line
    assert len(load(tmp_path)) == 4
    assert start(tmp_path, 10).wait(timeout=60) == 0
    assert len(load(tmp_path)) == 10


def test_after_a_failed_write_the_store_takes_no_more(tmp_path, monkeypatch):
    with Store(tmp_path, SETTINGS) as store:
        monkeypatch.setattr(
            os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        with pytest.raises(UserError, match="input/output error; the 0 finished units are kept"):
            store.append(store.unit("qa/0", "all"), [record("qa/0")])
        assert not store.done(store.unit("qa/0", "all"))
        with pytest.raises(ValueError, match="closed"):
            store.append(store.unit("qa/0", "all"), [record("qa/0")])
    assert (tmp_path / results.RECORDS).read_bytes() == b""


# --- tables -------------------------------------------------------------------------------------------------------


def two_categories() -> pd.DataFrame:
    """Category code: tasks of one and three samples, so that means of means differ from means."""
    rows = []
    for arm, shift in (("selkv", 0.0), ("full", 10.0), ("mine", 5.0)):
        for task, category, scores in (
            ("lcc", "code", [40.0]),
            ("repo", "code", [0.0, 10.0, 20.0]),
            ("qa", "single-doc", [50.0, 70.0]),
        ):
            for i, score in enumerate(scores):
                rows.append(record(f"{task}/{i}", arm, task, category, score=score + shift))
    return pd.DataFrame(rows)


def test_summary_has_the_contracts_columns_and_means(tmp_path):
    summary = results.summary(two_categories())
    assert ",".join(summary.columns) == (
        "task,category,method,arm,retain,n,score,nll,kl,agree,kept_entries,kept_bytes"
    )
    assert list(summary["task"].unique()) == ["qa", "lcc", "repo"]  # categories in their order, then tasks
    assert list(summary["arm"][:3]) == ["full", "selkv", "mine"]  # arms in their order, unknown ones last
    repo = summary[(summary["task"] == "repo") & (summary["arm"] == "selkv")].iloc[0]
    assert (repo["n"], repo["score"]) == (3, 10.0)

    fill(tmp_path)
    path = results.write_summary(tmp_path)
    assert path.read_text().splitlines()[1] == "qa,single-doc,full,full,0.25,3,50,1,0.1,0.9,0.25,0.25"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "run.json", "summary.csv"]


def test_main_table_averages_samples_to_tasks_to_categories():
    table = results.main_table(two_categories())
    assert list(table.index) == ["full", "selkv", "mine"]
    assert list(table.columns) == [
        "retain", "n", "single-doc", "code", "average", "nll", "kl", "agree", "kept_entries", "kept_bytes"
    ]  # fmt: skip
    selkv = table.loc["selkv"]
    assert (selkv["single-doc"], selkv["code"], selkv["average"]) == (60.0, 25.0, 42.5)
    assert selkv["n"] == 6
    assert selkv["kl"] == pytest.approx(0.1)


def test_an_arm_that_lacks_a_task_gets_no_average():
    frame = two_categories()
    partial = frame[~((frame["arm"] == "mine") & (frame["task"] == "lcc"))]
    table = results.main_table(partial)
    assert table.loc["mine", "single-doc"] == 65.0
    assert table.loc["mine", ["code", "average"]].isna().all()
    assert table.loc["selkv", "average"] == 42.5


def test_several_retentions_are_rows_of_their_own():
    frame = two_categories()
    low = frame[frame["arm"] == "selkv"].assign(retain=0.1, score=0.0)
    table = results.main_table(pd.concat([frame, low]))
    assert list(zip(table.index, table["retain"])) == [
        ("full", 0.25), ("selkv", 0.1), ("selkv", 0.25), ("mine", 0.25)
    ]  # fmt: skip
    assert list(table["average"]) == [52.5, 0.0, 42.5, 47.5]


def test_an_arm_measured_by_two_groups_counts_once_and_one_of_two_settings_is_refused(tmp_path):
    with Store(tmp_path, SETTINGS) as store:
        store.append(store.unit("qa/0", "main"), [record("qa/0"), record("qa/0", "selkv")])
        store.append(store.unit("qa/0", "ablation"), [record("qa/0", seconds_prefill=2.0)])
        assert list(load(tmp_path)["arm"]) == ["full", "selkv"]
        store.append(store.unit("qa/0", "alpha"), [record("qa/0", "selkv", settings={"alpha": 1.0})])
    with pytest.raises(UserError, match="arm selkv has several settings"):
        results.summary(load(tmp_path))
