"""Encoding of prompts with a tokenizer whose tokens are letters, so that ids can be read as text."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_letters
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvrepro.errors import UserError
from kvrepro.tasks.base import Sample
from kvrepro.tasks.prompts import asked, encode

TOKENS = ["<s>", "</s>", "[user]", "[bot]", *ascii_letters]
WITH_BOS = "{{ bos_token }}[user]{{ messages[0]['content'] }}{% if add_generation_prompt %}[bot]{% endif %}"
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")


def tokenizer(template: str | None, adds_bos: bool = True, bos: str | None = "<s>") -> Any:
    """Letters are tokens; with ``adds_bos`` every text begins with <s>, as Llama's tokenizers do it."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[user\]|\[bot\]|."), "isolated")
    inner.decoder = decoders.Fuse()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token="</s>")
    made.chat_template = template
    return made


def sample(prompt: str, chat: bool = True) -> Sample:
    return Sample("t/0", "t", "code", prompt, ("a",), "exact", 8, chat, False)


def text(tok: Any, ids: list[int]) -> str:
    return "".join(tok.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_one_bos_whether_or_not_the_template_writes_it(template: str) -> None:
    tok = tokenizer(template)
    encoded = encode(tok, sample("ab"), 50)
    assert text(tok, encoded.input_ids) == "<s>[user]ab[bot]"
    assert not encoded.truncated


def test_no_bos_where_the_tokenizer_sets_none() -> None:
    for tok in (tokenizer(WITHOUT_BOS, adds_bos=False), tokenizer(WITHOUT_BOS, adds_bos=False, bos=None)):
        assert text(tok, encode(tok, sample("ab"), 50).input_ids) == "[user]ab[bot]"


def test_a_template_alone_may_set_bos() -> None:
    tok = tokenizer(WITH_BOS, adds_bos=False)
    assert text(tok, encode(tok, sample("a"), 50).input_ids) == "<s>[user]a[bot]"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_raw_prompts_have_no_template(adds_bos: bool) -> None:
    tok = tokenizer(WITH_BOS, adds_bos=adds_bos)
    wanted = "<s>ab" if adds_bos else "ab"
    assert text(tok, encode(tok, sample("ab", chat=False), 50).input_ids) == wanted


def test_base_model_without_template_gets_the_raw_prompt() -> None:
    tok = tokenizer(None)
    assert text(tok, encode(tok, sample("ab"), 50).input_ids) == "<s>ab"


def test_a_base_model_answers_in_one_line_where_the_gold_does() -> None:
    """Without a template nothing but a line break ends an answer; with one, and of raw samples, nothing changes."""
    base, one = tokenizer(None), sample("ab")
    assert asked(base, one) == replace(one, chat=False, first_line=True)
    several = replace(one, answers=("a", "b\nc"))
    assert asked(base, several) == replace(several, chat=False)
    raw = sample("ab", chat=False)
    assert asked(base, raw) == raw and asked(tokenizer(WITH_BOS), one) == one


def test_truncation_keeps_both_ends() -> None:
    tok = tokenizer(WITHOUT_BOS, adds_bos=False)
    encoded = encode(tok, sample(ascii_letters, chat=False), 10)
    assert text(tok, encoded.input_ids) == "abcdeVWXYZ"
    assert encoded.truncated


def test_truncation_counts_bos_and_adds_the_template_afterwards() -> None:
    """LongBench's order: cut the tokenised prompt (with its BOS), decode without it, then apply the template."""
    tok = tokenizer(WITH_BOS)
    encoded = encode(tok, sample(ascii_letters), 11)  # halves of 5; the first one spends a token on BOS
    assert text(tok, encoded.input_ids) == "<s>[user]abcdVWXYZ[bot]"
    assert encoded.truncated


def test_truncation_starts_above_the_limit() -> None:
    tok = tokenizer(WITHOUT_BOS, adds_bos=False)
    assert not encode(tok, sample(ascii_letters[:10], chat=False), 10).truncated
    assert encode(tok, sample(ascii_letters[:11], chat=False), 10).truncated


@pytest.mark.parametrize(("template", "wanted"), [(WITH_BOS, "<s>[user]abXYZ[bot]xy"), (None, "<s>abXYZxy")])
def test_a_prefix_follows_the_template_and_is_never_cut(template: str | None, wanted: str) -> None:
    begun = replace(sample(ascii_letters), prefix="xy")
    encoded = encode(tokenizer(template), begun, 6)  # halves of 3; the first one spends a token on BOS
    assert text(tokenizer(template), encoded.input_ids) == wanted
    assert encoded.truncated


def test_a_limit_without_two_halves_is_refused() -> None:
    with pytest.raises(UserError, match="limit 1"):
        encode(tokenizer(None), sample("a"), 1)


def test_smollm2_frames_a_prompt_once(smollm2: tuple[Any, Any]) -> None:
    tok = smollm2[1]
    ids = encode(tok, sample("Hello"), 50).input_ids
    assert tok.decode(ids).count("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n") == 1
    assert ids[0] == tok.bos_token_id and ids[1] != tok.bos_token_id
    assert tok.decode(encode(tok, sample("Hello", chat=False), 50).input_ids) == "Hello"
