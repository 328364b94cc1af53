"""From a sample to token ids: chat template or raw, one BOS, LongBench's middle truncation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvrepro.errors import UserError
from kvrepro.tasks.base import Sample


@dataclass(frozen=True)
class Encoded:
    """Token ids of a prompt, and whether its middle was cut out."""

    input_ids: list[int]
    truncated: bool


def asked(tokenizer: Any, sample: Sample) -> Sample:
    """The sample as a model is asked it: a base model, which has no chat template, gets the prompt as it is.

    Nothing but a line break then ends an answer, so where all gold answers are of one line, so is the prediction.
    """
    if not sample.chat or tokenizer.chat_template is not None:
        return sample
    one_line = not any("\n" in answer.strip() for answer in sample.answers)
    return replace(sample, chat=False, first_line=sample.first_line or one_line)


def encode(tokenizer: Any, sample: Sample, limit: int) -> Encoded:
    """Encode a sample for a model.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    sample : Sample
    limit : int
        Longest prompt in tokens. As in LongBench the prompt itself is measured (BOS included) and, where it is longer,
        replaced by its first and last ``limit // 2`` tokens, decoded; the chat template and the sample's prefix come
        on top, so leave room for them and for the answer below the model's context length.

    Returns
    -------
    Encoded
        Exactly one BOS in front where the tokenizer sets one, whether or not the template writes it, too. A base model
        without a chat template gets the raw prompt.

    Raises
    ------
    UserError
        If ``limit`` is below 2.
    """
    if limit < 2:
        raise UserError(
            f"prompt limit {limit} is too small; truncation keeps two halves; give at least 2 tokens"
        )
    prompt, truncated = sample.prompt, False
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) > limit:
        half = limit // 2
        prompt = "".join(
            tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])
        )
        truncated = True
    if asked(tokenizer, sample).chat:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(prompt + sample.prefix, add_special_tokens=False)["input_ids"])
    if _adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return Encoded(ids, truncated)


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer by itself begins a text with BOS (some define a BOS that their model never saw there)."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
