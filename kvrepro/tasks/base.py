"""What a task hands to the harness: samples of one form, whatever benchmark they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

CATEGORIES = ("single-doc", "multi-doc", "summarization", "few-shot", "synthetic", "code")


@dataclass(frozen=True)
class Sample:
    """One question with its gold answers.

    Attributes
    ----------
    id : str
        ``task/context/index``, e.g. ``pydoc-code/2048/0007``.
    task, category : str
        The task's name and its LongBench category (one of ``CATEGORIES``).
    prompt : str
        The whole user text, untruncated and without a chat template.
    answers : tuple of str
        Gold answers; the first is the one that teacher-forced measures use.
    metric : str
        A key of ``kvrepro.tasks.metrics.METRICS``.
    max_new_tokens : int
        Longest answer to decode, in tokens.
    chat : bool
        Whether the prompt goes through the model's chat template.
    first_line : bool
        Whether a prediction is cut to its first line before it is scored.
    classes : tuple of str
        All labels, for the classification metric.
    prefix : str
        Text behind the filled chat template: an answer that has begun and that the model goes on with.
    """

    id: str
    task: str
    category: str
    prompt: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    chat: bool
    first_line: bool
    classes: tuple[str, ...] = ()
    prefix: str = field(default="", repr=False)  # the manifest hashes repr(), and its tasks have none

    @property
    def digest(self) -> str:
        """Of what is asked and expected: results of another text under the same id are not this sample's."""
        return hashlib.sha256(repr((self.prompt, self.prefix, self.answers)).encode()).hexdigest()[:16]


Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class Task:
    """A named source of samples: ``load(limit, context)`` gives the first ``limit`` of them, always the same.

    One that is ``counted`` is as long as a model's own tokenizer says: ``load(limit, context, count)``.
    """

    name: str
    category: str
    load: Callable[..., list[Sample]]
    counted: bool = False
