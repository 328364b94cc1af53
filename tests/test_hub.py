"""Fetching LongBench and models, with a small server standing in for the hub and for the authors' repository."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import save
from test_longbench import PROMPT, V2_PROMPT, row, row_v2

from kvrepro import models, tasks
from kvrepro.errors import UserError
from kvrepro.tasks import hub

LONGBENCH = f"/datasets/{hub.LONGBENCH.repository}/resolve/{hub.LONGBENCH.revision}/data.zip"
LONGBENCH_V2 = f"/datasets/{hub.LONGBENCH_V2.repository}/resolve/{hub.LONGBENCH_V2.revision}/data.json"
PROMPTS = f"/raw/{hub.PROTOCOL['dataset2prompt.json'][0]}"


@dataclass
class Site:
    """What the server has, how it fails, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # path: status, the hub's error code
    drop: dict[str, list[float]] = field(default_factory=dict)  # path: share of the rest to send, once each
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def got(self, path: str) -> list[str]:
        return [line for line in self.asked if line.startswith(f"GET {path}")]


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def answer(self, head: bool) -> None:
        site, path = self.site, self.path.partition("?")[0]
        asked = self.headers.get("Range", "")
        site.asked.append(f"{self.command} {path} {asked}".strip())
        status, code = site.refuse.get(path, (200, "") if path in site.files else (404, "EntryNotFound"))
        content = site.files.get(path, b"") if status == 200 else b""
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0) if asked else 0
        self.send_response(206 if start else status)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", path.partition("/resolve/")[2].partition("/")[0])
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if not head:
            rest, drops = content[start:], site.drop.get(path)
            self.wfile.write(rest[: int(len(rest) * drops.pop(0))] if drops else rest)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server with everything there and pinned; caches in a fresh folder."""
    content = {"dataset2prompt.json": {"hotpotqa": PROMPT}, "dataset2maxlen.json": {"hotpotqa": 32}}
    protocol = {name: json.dumps(value).encode() for name, value in content.items()}
    protocol["0shot.txt"] = V2_PROMPT.encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("hotpotqa", "hotpotqa_e"):
            lines = [json.dumps(row(name, i, context=f"{name} {i} " * 200)) for i in range(3)]
            archive.writestr(f"data/{name}.jsonl", "\n".join(lines))
        archive.writestr("../evil.jsonl", "never opened")
    made = Site({LONGBENCH: packed.getvalue(), LONGBENCH_V2: json.dumps([row_v2()]).encode()})
    made.files |= {f"/raw/{path}": protocol[name] for name, (path, _) in hub.PROTOCOL.items()}

    def pin(wanted: hub.Dataset, path: str) -> hub.Dataset:
        return replace(wanted, sha256=hashlib.sha256(made.files[path]).hexdigest())

    monkeypatch.setattr(hub, "LONGBENCH", pin(hub.LONGBENCH, LONGBENCH))
    monkeypatch.setattr(hub, "LONGBENCH_V2", pin(hub.LONGBENCH_V2, LONGBENCH_V2))
    pins = {
        name: (path, hashlib.sha256(protocol[name]).hexdigest()) for name, (path, _) in hub.PROTOCOL.items()
    }
    monkeypatch.setattr(hub, "PROTOCOL", pins)

    handler = type("Bound", (Handler,), {"site": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "PROTOCOL_URL", f"{made.url}/raw")
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path / "kvrepro"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 64)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits between its tries
    yield made
    server.shutdown()
    server.server_close()


def refused() -> str:
    """The one line that a load from the hub ends with."""
    with pytest.raises(UserError) as error:
        tasks.load("longbench/hotpotqa", 1, data="hub")
    assert "\n" not in str(error.value)
    return str(error.value)


# It works ----------------------------------------------------------------------------------------------------


def test_rows_come_from_the_archive_and_are_fetched_once(site: Site, tmp_path: Path) -> None:
    known = tasks.available(data="hub")
    assert sum(name.startswith("longbench/") for name in known) == 16
    assert sum(name.startswith("longbench-e/") for name in known) == 13
    assert not site.asked  # listing fetches nothing

    standard = tasks.load("longbench/hotpotqa", 2, data="hub")
    assert [s.id for s in standard] == ["longbench/hotpotqa/id0", "longbench/hotpotqa/id1"]
    assert standard[0].prompt == PROMPT.format(**row(context="hotpotqa 0 " * 200))
    assert standard[0].max_new_tokens == 32
    extended = tasks.load("longbench-e/hotpotqa", 9, data="hub")
    assert len(extended) == 3 and "hotpotqa_e 2" in extended[2].prompt

    assert len(site.got(LONGBENCH)) == len(site.got(PROMPTS)) == 1
    site.files.clear()  # from now on nothing can be fetched
    assert tasks.load("longbench/hotpotqa", 2, data="hub") == standard
    assert not list(tmp_path.rglob("*evil*"))


def test_longbench_v2_comes_as_an_array(site: Site) -> None:
    (sample,) = tasks.load("longbench-v2", 3, data="hub")
    assert sample.prompt.startswith("<a long text> which one?")


def test_the_variable_may_say_hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREPRO_LONGBENCH", "hub")
    assert len(tasks.load("longbench/hotpotqa", 1)) == 1


def test_a_folder_without_configuration_gets_the_pinned_one(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "hotpotqa.jsonl").write_text(json.dumps(row()))
    assert tasks.load("longbench/hotpotqa", 1, data=folder)[0].prompt == PROMPT.format(**row())
    site.files.clear()
    assert len(tasks.load("longbench/hotpotqa", 1, data=folder)) == 1  # the cached copy
    (tmp_path / "kvrepro" / "longbench" / "dataset2prompt.json").write_text("damaged")
    with pytest.raises(UserError, match=r"no config/dataset2prompt\.json beside .*rows, and .* \(404\)"):
        tasks.load("longbench/hotpotqa", 1, data=folder)


# Broken connections ------------------------------------------------------------------------------------------


def test_a_dropped_download_is_resumed(site: Site) -> None:
    site.drop = {LONGBENCH: [0.5, 0.5], PROMPTS: [0.5, 0.5]}
    assert len(tasks.load("longbench/hotpotqa", 1, data="hub")) == 1
    assert len(site.got(LONGBENCH)) == len(site.got(PROMPTS)) == 3
    assert all("bytes=" in line for line in site.got(LONGBENCH)[1:])  # the archive from where it broke


@pytest.mark.parametrize("path", [LONGBENCH, PROMPTS])
def test_a_connection_that_never_holds_is_one_line(site: Site, path: str) -> None:
    site.drop = {path: [0.0] * 99}
    assert "check the network" in refused()
    assert 2 < len(site.got(path)) < 10
    site.drop = {}
    assert len(tasks.load("longbench/hotpotqa", 1, data="hub")) == 1  # and nothing broken was kept


def test_no_server_at_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.load("longbench/hotpotqa", 1, data="hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError,
        match=r"cannot fetch .*LongBench-v2\S+ \(ConnectError\); check the network.* or give a folder",
    ):
        tasks.load("longbench-v2", 1, data="hub")
    monkeypatch.setattr(hub, "PROTOCOL_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("KVREPRO_CACHE", "/dev/null/none")
    assert "cannot fetch dataset2prompt.json (URLError); check the network" in refused()


# Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (401, "GatedRepo", "is refused (401); it is gated or private there; accept its terms, log in"),
        (401, "", "is refused (401)"),
        (403, "GatedRepo", "is refused (403)"),
        (404, "EntryNotFound", "is not there (404) at its pinned commit"),
        (404, "RevisionNotFound", "is not there (404) at its pinned commit"),
        (404, "RepoNotFound", "is not there (404) at its pinned commit"),
        (404, "", "is not there (404) at its pinned commit"),
    ],
)
def test_the_hub_refuses(site: Site, status: int, code: str, why: str) -> None:
    site.refuse[LONGBENCH] = (status, code)
    message = refused()
    assert (
        message.startswith("zai-org/LongBench/data.zip ")
        and why in message
        and "KVREPRO_LONGBENCH" in message
    )
    assert not site.got(LONGBENCH)


def test_a_failing_hub_is_one_line(site: Site) -> None:
    site.refuse[LONGBENCH] = (503, "")
    assert "cannot fetch zai-org/LongBench/data.zip (the server answers 503)" in refused()


@pytest.mark.parametrize(
    ("status", "why"), [(401, "is refused (401)"), (404, "is not there"), (500, "answers 500")]
)
def test_the_other_site_refuses(site: Site, status: int, why: str) -> None:
    site.refuse[PROMPTS] = (status, "")
    message = refused()
    assert (
        message.startswith(("dataset2prompt.json ", "cannot fetch dataset2prompt.json ")) and why in message
    )


# Other bytes than pinned -------------------------------------------------------------------------------------


def test_another_archive_is_refused_and_not_kept(site: Site) -> None:
    right = site.files[LONGBENCH]
    site.files[LONGBENCH] = right[:-1] + b"x"
    assert "data.zip came with sha256" in refused()
    assert "data.zip came with sha256" in refused()
    site.files[LONGBENCH] = right
    assert len(tasks.load("longbench/hotpotqa", 1, data="hub")) == 1


def test_a_damaged_cached_archive_is_refused_and_fetched_again(site: Site, tmp_path: Path) -> None:
    tasks.load("longbench/hotpotqa", 1, data="hub")
    (copy,) = (tmp_path / "hub").rglob("data.zip")
    copy.resolve().write_bytes(b"x" * len(site.files[LONGBENCH]))
    assert "came with sha256" in refused()
    assert len(tasks.load("longbench/hotpotqa", 1, data="hub")) == 1


def test_other_prompts_are_refused_and_not_kept(site: Site, tmp_path: Path) -> None:
    site.files[PROMPTS] = site.files[PROMPTS].replace(b"Read", b"read")
    assert "dataset2prompt.json came with sha256" in refused()
    assert not (tmp_path / "kvrepro" / "longbench" / "dataset2prompt.json").exists()


def test_a_cache_that_cannot_be_written_is_one_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", "/dev/null/none")
    assert "cannot write the cache folder" in refused()


# Models --------------------------------------------------------------------------------------------------------------

LLAMA = models.REGISTRY["llama-3.1-8b"]
OTHER = "0123456789abcdef0123456789abcdef01234567"  # a commit that the branch `main` stands at


@pytest.fixture
def hub_model(site: Site, tmp_path: Path) -> Path:
    """The site has a tiny Llama 3.1 at its pinned commit and at another one; returns its files."""
    folder = tmp_path / "llama"
    save(LLAMA.name, folder)
    (folder / "consolidated.safetensors").write_text("the weights again")
    publish(site, folder)
    return folder


def publish(site: Site, folder: Path) -> None:
    """Put a folder on the site as LLAMA's repository, at both commits."""
    api = f"/api/models/{LLAMA.source}"
    entries = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
        for path in sorted(folder.iterdir())
    ]
    site.files[f"{api}/revision/main"] = json.dumps({"id": LLAMA.source, "sha": OTHER}).encode()
    for commit in (LLAMA.revision, OTHER):
        site.files[f"{api}/tree/{commit}"] = json.dumps(entries).encode()
        for path in folder.iterdir():
            site.files[f"/{LLAMA.source}/resolve/{commit}/{path.name}"] = path.read_bytes()


def fetched(site: Site) -> set[str]:
    return {
        line.rpartition("/")[2].split()[0]
        for line in site.asked
        if line.startswith("GET") and "/resolve/" in line
    }


def refused_model(name: str) -> str:
    with pytest.raises(UserError) as error:
        models.load(name)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        (LLAMA.name, LLAMA.revision),
        (LLAMA.source, LLAMA.revision),
        (f"{LLAMA.name}@main", OTHER),
        (f"{LLAMA.source}@{OTHER}", OTHER),
    ],
)
def test_a_registered_model_comes_at_its_commit_or_the_one_asked_for(
    site: Site, hub_model: Path, name: str, commit: str
) -> None:
    model, tokenizer = models.load(name)
    assert models.revision(name, model) == commit
    assert model.dtype == torch.bfloat16 and models.context(name, model) == 131072
    assert set(model.generation_config.eos_token_id) == set(tokenizer.convert_tokens_to_ids(list(LLAMA.stop)))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched(site)
    assert "consolidated.safetensors" not in fetched(site)
    site.asked.clear()
    if commit in (LLAMA.revision, name.rpartition("@")[2]):  # a commit is looked up once
        site.files.clear()
        models.load(name)
        assert not site.asked


def test_what_does_not_fit_is_refused_by_its_config(
    site: Site, hub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrepro.models._free", lambda device: {"cpu": 2**10})
    message = refused_model(LLAMA.name)
    assert message.startswith("llama-3.1-8b needs ") and "GiB free; take a smaller model" in message
    assert fetched(site) == {"config.json"}


def test_pickled_weights_are_not_read(site: Site, hub_model: Path, tmp_path: Path) -> None:
    (hub_model / "model.safetensors").rename(hub_model / "pytorch_model.bin")
    publish(site, hub_model)
    message = refused_model(LLAMA.name)
    assert "has no *.safetensors" in message and "llama-3.1-8b@REVISION" in message
    assert str(tmp_path / "kvrepro" / LLAMA.name) in message
    assert "pytorch_model.bin" not in fetched(site)


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (
            401,
            "GatedRepo",
            "is gated: accept its licence on the hub (meta-llama/Llama-3.1-8B-Instruct), set HF_TOKEN",
        ),
        (403, "GatedRepo", "is gated: accept its licence on the hub"),
        (403, "", "refuses llama-3.1-8b (403)"),
        (401, "", "refuses llama-3.1-8b (401)"),
        (404, "RepoNotFound", "no model 'meta-llama/Llama-3.1-8B-Instruct' on the hub, or it is private"),
        (
            404,
            "RevisionNotFound",
            f"has no revision '{LLAMA.revision}'; give another one as llama-3.1-8b@REVISION",
        ),
        (503, "", "cannot fetch llama-3.1-8b from the hub (it answers 503); check the network"),
    ],
)
@pytest.mark.parametrize("place", ["tree", "resolve"])
def test_the_hub_refuses_a_model(
    site: Site, hub_model: Path, place: str, status: int, code: str, why: str
) -> None:
    """Whether it says so when asked for the list of files or for the first of them."""
    paths = {
        "tree": f"/api/models/{LLAMA.source}/tree/{LLAMA.revision}",
        "resolve": f"/{LLAMA.source}/resolve/{LLAMA.revision}/config.json",
    }
    site.refuse[paths[place]] = (status, code)
    assert why in refused_model(LLAMA.name)
    assert "model.safetensors" not in fetched(site)


def test_no_hub_at_all(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message says where a copy may lie, and a copy there is what loads."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    home = tmp_path / "kvrepro" / LLAMA.name
    message = refused_model(LLAMA.name)
    assert "(ConnectError); check the network" in message
    assert message.endswith(f"put a local copy (safetensors) into {home}")
    assert capfd.readouterr().err.count("\n") == 1  # it is being fetched; nothing of the client's retries
    save(LLAMA.name, home)
    assert models.load(LLAMA.name)[0].config.model_type == "llama"
