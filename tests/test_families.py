"""The papers' models, as far as that goes without a hub: tiny random checkpoints in the format of each go the whole way.

A checkpoint is written as the hub has it: config.json with the keys of its time (``rope_scaling``, ``torch_dtype``), its
tokenizer's class with a vocabulary trained here, its special tokens, and a chat template with its frame of a user's turn.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny
from test_longbench import row as longbench_row
from test_longbench import write
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    GemmaTokenizer,
    LlamaTokenizer,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from kvrepro import models, tasks
from kvrepro.errors import UserError
from kvrepro.evaluate import NamedArm, evaluate
from kvrepro.hf import _rope, make_cache
from kvrepro.tasks.prompts import encode

PROMPT = "Answer from the passage.\n\n{context}\n\nQuestion: {input}\nAnswer:"
BYTES = [f"<0x{i:02X}>" for i in range(256)]


@dataclass(frozen=True)
class Family:
    """What sets one model's checkpoint apart."""

    tokenizer: str  # its class's kind
    bos: str | None
    eos: str
    special: tuple[str, ...]
    config: dict[str, Any]
    frame: str  # of a user's turn with the answer's beginning, the prompt at {}
    template: str | None  # "{}" stands for the prompt
    generation: dict[str, Any] = field(default_factory=dict)


def template(frame: str) -> str:
    """A chat template of one user's turn."""
    before, after = frame.split("{}")
    return f"{before}{{{{ messages[0]['content'] }}}}{{% if add_generation_prompt %}}{after}{{% endif %}}"


_LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_GEMMA = "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
_QWEN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
    "polite answers to the user's questions. USER: {} ASSISTANT:"
)
_QWEN2 = Family(
    "qwen2", None, "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    {"model_type": "qwen2", "rope_theta": 1e6, "max_window_layers": 3, "use_sliding_window": False,
     "sliding_window": 32768, "max_position_embeddings": 32768},
    _QWEN, template(_QWEN), {"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "repetition_penalty": 1.1},
)  # fmt: skip

FAMILIES = {
    "longchat-7b": Family(
        "llama", "<s>", "</s>", ("<unk>", "<s>", "</s>"),
        {"model_type": "llama", "num_key_value_heads": 4, "rope_scaling": {"factor": 8.0, "type": "linear"},
         "max_position_embeddings": 4096},
        "<s>" + _VICUNA, None, {"temperature": 0.9, "top_p": 0.6, "do_sample": True},
    ),
    "llama-3.1-8b": Family(
        "byte-level", "<|begin_of_text|>", "<|eot_id|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 131072,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        _LLAMA3, template(_LLAMA3), {"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]},
    ),
    "gemma-2-9b": Family(
        "gemma", "<bos>", "<eos>", ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"model_type": "gemma2", "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "sliding_window": 64, "tie_word_embeddings": True,
         "max_position_embeddings": 8192},
        _GEMMA, template(_GEMMA), {"eos_token_id": ["<eos>", "<end_of_turn>"]},
    ),
    "mistral-7b-v0.3": Family(
        "llama", "<s>", "</s>", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "max_position_embeddings": 32768},
        "<s>[INST] {}[/INST]", template("<s>[INST] {}[/INST]"),
    ),
    "qwen2-1.5b": replace(_QWEN2, config={**_QWEN2.config, "tie_word_embeddings": True}),
    "qwen2-7b": _QWEN2,
}  # fmt: skip


@cache
def trained(byte_level: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of byte pairs and its merges, trained on this package's own sources."""
    sources = sorted((Path(models.__file__).parent / "tasks").glob("*.py"))
    tokenizer = Tokenizer(tokenizer_models.BPE())
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=80)
    tokenizer.train([str(path) for path in sources], trainer)
    saved = json.loads(tokenizer.to_str())["model"]
    return saved["vocab"], [tuple(merge) for merge in saved["merges"]]


def build_tokenizer(family: Family) -> Any:
    """A tokenizer of the family's class, special tokens first (Llama 3's and Qwen2's are added behind)."""
    byte_level = family.tokenizer in ("byte-level", "qwen2")
    vocab, merges = trained(byte_level)
    named = {"bos_token": family.bos, "eos_token": family.eos}
    if byte_level:
        if family.tokenizer == "qwen2":
            made = Qwen2Tokenizer(vocab=vocab, merges=merges, pad_token="<|endoftext|>", **named)
        else:
            from tokenizers import decoders, processors

            inner = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=merges))
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.decoder = decoders.ByteLevel()
            inner.add_special_tokens([*family.special])
            bos = [(family.bos, inner.token_to_id(family.bos))]
            inner.post_processor = processors.TemplateProcessing(
                single=f"{family.bos} $A", special_tokens=bos
            )
            made = PreTrainedTokenizerFast(tokenizer_object=inner, **named)
        made.add_special_tokens({"additional_special_tokens": [*family.special]})
    else:
        words = [*family.special, *BYTES, *(word for word in vocab if word not in BYTES)]
        kind = {"llama": LlamaTokenizer, "gemma": GemmaTokenizer}[family.tokenizer]
        vocab = {word: i for i, word in enumerate(words)}
        made = kind(vocab=vocab, merges=merges, add_bos_token=True, **named)
        made.add_special_tokens({"additional_special_tokens": [*family.special]})
    made.chat_template = family.template
    return made


def save(name: str, folder: Path) -> Any:
    """Write a tiny checkpoint of a family, as the hub has it; returns the model it holds."""
    family = FAMILIES[name]
    tokenizer = build_tokenizer(family)
    values = {**family.config, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    kind = values.pop("model_type")
    theta, scaling = values.pop("rope_theta", None), values.pop("rope_scaling", None)
    rope = {"rope_theta": theta or 1e4, "rope_type": "default"} | (scaling or {})
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    model = build_tiny(
        kind, torch.bfloat16, attn_implementation="eager", vocab_size=len(tokenizer), rope_parameters=rope,
        pad_token_id=tokenizer.pad_token_id, **values,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "dtype", "layer_types", *(["head_dim"] if kind == "llama" else [])):
        config.pop(key, None)
    old = {"torch_dtype": "bfloat16", "rope_scaling": scaling} | ({"rope_theta": theta} if theta else {})
    (folder / "config.json").write_text(json.dumps(config | old))
    generation = dict(family.generation)
    if "eos_token_id" in generation:
        generation["eos_token_id"] = tokenizer.convert_tokens_to_ids(generation["eos_token_id"])
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a copy of every registered hub model."""
    folder = tmp_path_factory.mktemp("cache")
    for name in FAMILIES:
        save(name, folder / name)
    return folder


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(checkpoints: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Loaded by its registered name, from the copy in the cache folder."""
    monkeypatch.setenv("KVREPRO_CACHE", str(checkpoints))
    return models.load(family, dtype="float32")


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, Any]:
    """A question that goes through the chat template, and one that does not."""
    context = " ".join(f"The number of crate {i} is {i * 37 % 101}." for i in range(40))
    for name in ("hotpotqa", "trec"):
        write(tmp_path / "rows" / f"{name}.jsonl", longbench_row(name, context=context))
    write(tmp_path / "rows" / "config" / "dataset2prompt.json", dict.fromkeys(("hotpotqa", "trec"), PROMPT))
    write(tmp_path / "rows" / "config" / "dataset2maxlen.json", dict.fromkeys(("hotpotqa", "trec"), 6))
    return {
        name: tasks.load(f"longbench/{name}", 1, data=tmp_path / "rows")[0] for name in ("hotpotqa", "trec")
    }


def test_the_families_are_the_registered_hub_models() -> None:
    assert set(FAMILIES) == {row.name for row in models.available() if row.kind == "hub"}


def test_the_row_describes_what_loads(loaded: tuple[Any, Any], family: str) -> None:
    model, tokenizer = loaded
    row = models.REGISTRY[family]
    assert model.config.model_type == row.architecture
    assert (tokenizer.chat_template is not None) == row.chat
    assert set(model.generation_config.eos_token_id) == set(tokenizer.convert_tokens_to_ids(list(row.stop)))
    assert not model.generation_config.do_sample and model.generation_config.repetition_penalty in (None, 1.0)
    assert models.context(family, model) == row.context
    assert models.revision(family, model) is None  # a folder has no commit
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    assert (heads[0] == heads[1]) == (family == "longchat-7b")


def test_one_frame_and_one_bos(loaded: tuple[Any, Any], family: str, samples: dict[str, Any]) -> None:
    _, tokenizer = loaded
    wanted = FAMILIES[family]
    for name, frame in (("hotpotqa", wanted.frame), ("trec", f"{wanted.bos or ''}{{}}")):
        prompt = samples[name].prompt
        ids = encode(tokenizer, samples[name], 4096).input_ids
        assert ids.count(tokenizer.bos_token_id) == (wanted.bos is not None)
        text = tokenizer.decode(ids)
        if wanted.bos:
            text = wanted.bos + text.removeprefix(wanted.bos).lstrip(
                " "
            )  # a blank that SentencePiece puts first
        assert text == frame.replace("{}", prompt)


def test_it_is_evaluated(loaded: tuple[Any, Any], samples: dict[str, Any]) -> None:
    arms = [NamedArm("full", 1.0), NamedArm("selkv", 0.5), NamedArm("kvslimmer", 0.5)]
    full, selkv, slimmer = evaluate(*loaded, samples["hotpotqa"], arms, 4096)
    assert 512 < full["n_tokens"] < 1024 and not full["truncated"]  # beyond KVSlimmer's first chunk
    assert full["kl"] == 0 and full["kept_entries"] == 1
    for record in (selkv, slimmer):
        assert record["budget"] == int(0.5 * record["n_tokens"] + 0.5)
        assert record["kept_entries"] == pytest.approx(record["budget"] / record["n_tokens"])
        assert not record["untouched"] and 0 < record["kl"] < float("inf")
    (cut,) = evaluate(*loaded, samples["trec"], arms[:1], 100)
    assert cut["truncated"] and 90 <= cut["n_tokens"] <= 110  # two halves, decoded and encoded again


class Say(LogitsProcessor):
    """Makes the third new token the given one."""

    def __init__(self, token: int, start: int) -> None:
        self.token, self.at = token, start + 2

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = torch.full_like(scores, -torch.inf)
        said[:, self.token if input_ids.shape[1] == self.at else 300] = 0
        return said


def test_every_stop_token_ends_an_answer(loaded: tuple[Any, Any], family: str) -> None:
    model, tokenizer = loaded
    inputs = tokenizer("The number", return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    for token in models.REGISTRY[family].stop:
        say = Say(tokenizer.convert_tokens_to_ids(token), start)
        out = model.generate(
            **inputs, cache=make_cache(model, "full"), max_new_tokens=6, logits_processor=[say]
        )
        assert out.shape[1] == start + 3, token


@pytest.mark.parametrize(("name", "kind"), [("longchat-7b", "linear"), ("llama-3.1-8b", "llama3")])
def test_scaled_rope(checkpoints: Path, name: str, kind: str) -> None:
    """The tables are the scaled ones: linear scaling divides positions by 8; keys come back from them."""
    model, _ = models.load(str(checkpoints / name), dtype="float32")
    assert model.model.rotary_emb.rope_type == kind
    rope = _rope(model, 0)
    theta = FAMILIES[name].config.get("rope_theta", 1e4)
    plain = theta ** -(torch.arange(4) / 4)
    positions = torch.tensor([[0, 1, 800, 4000]])
    cos, _ = rope.tables(positions, torch.float32)
    if kind == "linear":
        torch.testing.assert_close(cos[..., :4], (positions[..., None] / 8 * plain).cos(), rtol=0, atol=2e-4)
    else:  # high frequencies are left, the lowest (a period above 8192 tokens) is divided by 8
        slow = theta ** -(3 / 4) / 8
        torch.testing.assert_close(cos[..., 0], positions.float().cos(), rtol=0, atol=2e-4)
        torch.testing.assert_close(cos[..., 3], (positions * slow).cos(), rtol=0, atol=2e-4)
    keys = torch.randn(1, 4, 8)
    torch.testing.assert_close(
        rope.unrotate(rope.rotate(keys, positions), positions), keys, rtol=0, atol=1e-5
    )


def test_a_path_goes_by_the_checkpoint_alone(checkpoints: Path) -> None:
    """Without its registered name LongChat is a base model: nothing says what its turns look like."""
    assert models.load(str(checkpoints / "longchat-7b"))[1].chat_template is None
    model, tokenizer = models.load(str(checkpoints / "llama-3.1-8b"))
    assert tokenizer.chat_template is not None and model.dtype == torch.bfloat16
    assert models.row_of(str(checkpoints / "llama-3.1-8b")) is None


def test_an_old_tokenizer_file_says_what_it_needs(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(checkpoints / "longchat-7b", folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a SentencePiece tokenizer\.model .* pip install sentencepiece"):
        models.load(str(folder))


def test_vicuna_in_several_turns() -> None:
    tokenizer = build_tokenizer(FAMILIES["longchat-7b"])
    tokenizer.chat_template = models.VICUNA
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert text == _VICUNA.replace("{} ASSISTANT:", "a ASSISTANT: b</s>USER: c ASSISTANT:")
