"""Models in the shape of the papers', with random weights and no download: what a token costs does not depend on them.

kvrepro bench decode --shape llama-3.1-8b --device cuda
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from .. import models
from ..costs import SHAPES
from ..errors import UserError
from ..hf import IMPLEMENTATION

PREFIX = "shape:"  # before a shape's name, where a model's is asked for


def load(name: str, device: str = "cpu", dtype: str | None = None) -> tuple[Any, Any]:
    """``models.load``, and of ``shape:NAME`` a random model of ``costs.SHAPES``, in bfloat16 unless told otherwise.

    Returns
    -------
    model, tokenizer
        The model in eval mode, made where it stays.  A shape's tokenizer makes a token of each byte, so that any text is
        a prompt and any vocabulary has its tokens.

    Raises
    ------
    UserError
        What ``models.load`` raises; an unknown shape, or one without room for its weights.
    """
    if not name.startswith(PREFIX):
        return models.load(name, device, dtype)
    config, where = config_of(name.removeprefix(PREFIX)), models._device(device)
    kind = models._dtype(dtype or "bfloat16")
    assert isinstance(kind, torch.dtype)
    models._check_memory(name, config, kind, where)
    with torch.random.fork_rng(devices=[where] if where != "cpu" else []), torch.device(where):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=IMPLEMENTATION)
    return model.eval(), _bytes()


def config_of(name: str) -> Any:
    """The transformers config of a shape."""
    if name not in SHAPES:
        raise UserError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    shape, row = SHAPES[name], models.REGISTRY[name]
    window = {"sliding_window": None} if row.architecture == "mistral" else {}  # as its v0.3 has it
    return AutoConfig.for_model(
        row.architecture, num_hidden_layers=shape.layers, hidden_size=shape.hidden, head_dim=shape.head_dim,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied, max_position_embeddings=row.context,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **window,
    )  # fmt: skip


def _bytes() -> Any:
    """A tokenizer of 256 bytes and the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")
