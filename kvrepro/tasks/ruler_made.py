"""RULER's synthetic tasks, made here at any length from 4k to 128k (Hsieh et al., 2024, arXiv:2404.06654).

    tasks.load("ruler-made/vt", 8, context=16384, count=lambda text: len(tokenizer(text)["input_ids"]))

The protocol is RULER's: wording of prompts and answer prefixes, its 11 synthetic tasks with their numbers of keys, values,
queries, hops, words and repeats, and its idea of a length: prompt, chat template and longest answer together take at most
``context`` tokens *of the model's own tokenizer*. So models with different tokenizers get longer or shorter texts, and each
the length that is claimed; with one tokenizer, sample i is the same whatever the limit.

What is not RULER's, because nothing is fetched: the haystack of essays is prose of the documentation that the offline tasks
are built from (`corpus`), its paragraphs in another order in each sample, and again from the start where the context is
longer than all of it (some 60k tokens); words, in lists and in keys (``median-upload``), are words of the same packages.
A needle's key and value stand in no other sentence, which RULER leaves to chance. Scores are comparable between methods
and models here, not with published ones: for those, and for the QA tasks (SQuAD, HotpotQA), there are ready-made rows
(`ruler`).
"""

from __future__ import annotations

import itertools
import math
import re
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import NamedTuple

from kvrepro.errors import UserError
from kvrepro.tasks import corpus, manifest, ruler
from kvrepro.tasks.base import Count, Sample, Task

MIN_CONTEXT, MAX_CONTEXT = 4096, 131072

_TEMPLATE = 40  # tokens left for a chat template
_AIM, _FULL = 0.98, 0.95  # share of the room that a prompt aims at, and from which on it is long enough


class Drawn(NamedTuple):
    """A question, its answers, and the words that the model's answer begins with."""

    prompt: str
    answers: list[str]
    prefix: str


@dataclass(frozen=True)
class Kind:
    """How a task is drawn: ``draw(rng, units, context)``, longer with each unit of haystack, of which it needs some."""

    draw: Callable[[Random, int, int], Drawn]
    least: int


def find() -> list[Task]:
    """All tasks, ``ruler-made/niah_single_1`` to ``ruler-made/fwe``."""
    return [
        Task(f"ruler-made/{name}", "synthetic", partial(_load, name), counted=True) for name in sorted(KINDS)
    ]


def _load(name: str, limit: int, context: int, count: Count | None) -> list[Sample]:
    if count is None:
        raise UserError(
            f"ruler-made/{name} is measured in tokens of a model and none is named; its length would be a guess; pass "
            'count=lambda text: len(tokenizer(text)["input_ids"])'
        )
    return [build(name, context, index, count) for index in range(limit)]


def build(name: str, context: int, index: int, count: Count) -> Sample:
    """Sample ``index`` of a task, independent of every other sample.

    Parameters
    ----------
    name : str
        A key of ``KINDS``.
    context : int
        Prompt, template and answer together, in tokens: 4096 to 131072.
    index : int
    count : callable
        Tokens of a text.

    Raises
    ------
    UserError
        For a context out of range, or one that even the shortest prompt does not fit with this tokenizer.
    """
    if not MIN_CONTEXT <= context <= MAX_CONTEXT:
        raise UserError(
            f"context {context} is not supported; RULER's tasks are made for {MIN_CONTEXT} to {MAX_CONTEXT} tokens; "
            "choose a value in that range"
        )
    task, kind, family = f"ruler-made/{name}", KINDS[name], name.split("_")[0]

    def draw(units: int) -> Drawn:
        return kind.draw(Random(f"{task}/{context}/{index}"), units, context)

    drawn = _fill(draw, kind.least, context - ruler.MAX_NEW_TOKENS[family] - _TEMPLATE, count)
    if drawn is None:
        raise UserError(
            f"{task} does not fit {context} tokens of this tokenizer, not even with the least of its text; take a longer "
            "context"
        )
    return ruler.sample(f"{task}/{context}/{index:04d}", task, family, *drawn)


def _fill(draw: Callable[[int], Drawn], least: int, room: int, count: Count) -> Drawn | None:
    """A draw that nearly fills the room, found by secants: tokens are almost a straight line over units.

    Two cheap measurements and, as a rule, one or two of full length; counting tokens is what takes the time at 128k.
    """
    best, most = None, 0
    points: list[tuple[int, int]] = []
    units = least
    for _ in range(12):
        drawn = draw(units)
        tokens = count(drawn.prompt + drawn.prefix)
        if most < tokens <= room:
            best, most = drawn, tokens
        points = [*points[-1:], (units, tokens)]
        if most >= _FULL * room or (units == least and tokens > room):
            break
        if len(points) == 1:
            units = 10 * least
            continue
        (u0, t0), (u1, t1) = points
        if t0 == t1:  # no more text to be had
            break
        units = max(least, u1 + math.floor((_AIM * room - t1) * (u1 - u0) / (t1 - t0)))
        if units == u1:
            break
    return best


# Raw material -------------------------------------------------------------------------------------------------

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@cache
def words() -> tuple[str, ...]:
    """The words of the corpus' packages, code and comments alike, from four letters to twelve."""
    _check()
    word = re.compile(r"(?<!\S)[a-z]{4,12}(?=[\s.,;])")
    found = {w for p in corpus.PACKAGES for s in corpus.sources(p) for w in word.findall("\n".join(s.lines))}
    return tuple(sorted(found))


@cache
def paragraphs() -> tuple[tuple[str, ...], ...]:
    """The corpus' prose, each paragraph in sentences."""
    _check()
    return tuple(tuple(re.split(r"(?<=[.!?]) (?=[A-Z])", p)) for p in corpus.prose())


def _check() -> None:
    manifest.check_packages(manifest.read()["packages"])  # the same text on every machine


def _fresh(draw: Callable[[], str]) -> Iterator[str]:
    """Draws without repeats."""
    seen = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def _letters(rng: Random, alphabet: str, number: int) -> str:
    return "".join(rng.choices(alphabet, k=number))


# Needles ------------------------------------------------------------------------------------------------------

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE = """A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the \
{kind} afterwards.
{context}
What is the special magic {kind} for {asked} mentioned in the provided text?"""
ONE_PREFIX = " The special magic {kind} for {asked} mentioned in the provided text is"
MANY = """Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you \
about the {kind}s afterwards.
{context}
What are all the special magic {kind}s for {asked} mentioned in the provided text?"""
MANY_PREFIX = " The special magic {kind}s for {asked} mentioned in the provided text are"

DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # percent of the prose before a needle


@dataclass(frozen=True)
class Needles:
    """A needle task. A unit of its haystack is a sentence of prose, a line of noise, or a needle with another key.

    Attributes
    ----------
    haystack : str
        ``noise``, ``prose`` or ``needles``.
    key, value : str
        ``word``, ``number`` or ``uuid``.
    keys, values, queries : int
        Keys in the text, values of each key, keys that are asked for.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __call__(self, rng: Random, units: int, context: int) -> Drawn:
        """Draw the needles, hide them in ``units`` of haystack, and ask."""
        names, secrets = (_fresh(partial(_NAMERS[kind], rng)) for kind in (self.key, self.value))
        hidden = {
            key: list(itertools.islice(secrets, self.values)) for key in itertools.islice(names, self.keys)
        }
        asked = rng.sample(list(hidden), self.queries)
        needle = partial(NEEDLE.format, kind=self.value)
        needles = [needle(key=key, value=value) for key, values in hidden.items() for value in values]
        rng.shuffle(needles)
        if self.haystack == "prose":
            order = rng.sample(paragraphs(), len(paragraphs()))
            lines = list(itertools.islice((s for p in itertools.cycle(order) for s in p), units))
            places = [units * depth // 100 for depth in rng.sample(DEPTHS, len(needles))]
        else:
            lines = [NOISE] * units
            if self.haystack == "needles":
                lines = [needle(key=next(names), value=next(secrets)) for _ in range(units)]
            places = rng.sample(range(units), len(needles))
        for place, text in zip(sorted(places, reverse=True), needles, strict=True):
            lines.insert(place, text)
        template, prefix = (ONE, ONE_PREFIX) if self.queries * self.values == 1 else (MANY, MANY_PREFIX)
        named = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        return Drawn(
            template.format(
                kind=self.value, asked=named, context=(" " if self.haystack == "prose" else "\n").join(lines)
            ),
            [value for key in asked for value in hidden[key]],
            prefix.format(kind=self.value, asked=named),
        )


_NAMERS: dict[str, Callable[[Random], str]] = {
    "word": lambda rng: f"{rng.choice(words())}-{rng.choice(words())}",
    "number": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


# Variable tracking --------------------------------------------------------------------------------------------

TRACK = """Memorize and track the chain(s) of variable assignment hidden in the following text.

{context}
Question: Find all variables that are assigned the value {value} in the text above."""
TRACK_PREFIX = (  # RULER's own spelling
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assgined the value "
    "{value}, they are: "
)
HOPS = 4


def track(rng: Random, units: int, context: int) -> Drawn:
    """One chain of four hops in lines of noise, behind a solved example with shorter names."""
    example = _chain(rng, letters=3, lines=10)
    question = _chain(rng, letters=5, lines=units)
    solved = f"{example.prompt}{example.prefix} {' '.join(example.answers)}\n\n"
    return question._replace(prompt=solved + question.prompt)


def _chain(rng: Random, letters: int, lines: int) -> Drawn:
    value = rng.randrange(10_000, 99_999)
    names = list(itertools.islice(_fresh(lambda: _letters(rng, string.ascii_uppercase, letters)), HOPS + 1))
    chain = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)),
    ]
    text = [NOISE] * lines
    places = sorted(rng.sample(range(lines), len(chain)))
    for place, statement in reversed(list(zip(places, chain, strict=True))):
        text.insert(place, statement)
    return Drawn(
        TRACK.format(context="\n".join(text), value=value),
        names,
        TRACK_PREFIX.format(n=len(names), value=value),
    )


# Common and frequent words ------------------------------------------------------------------------------------

COMMON = """Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones \
that appear most often.
{context}
Question: What are the 10 most common words in the above list?"""
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON_WORDS = 10


def common(rng: Random, units: int, context: int) -> Drawn:
    """Ten words thirty times each among ``units`` words in all, the others three times; before it a solved list."""
    example = _list(rng, 40, 10, 3)
    question = _list(rng, units, 30, 3)
    solved = f"{example.prompt}{example.prefix} {_numbered(example.answers)}\n"
    return question._replace(prompt=solved + question.prompt)


def _list(rng: Random, number: int, repeats: int, others: int) -> Drawn:
    chosen = rng.sample(words(), len(words()))[:number]
    answers = chosen[:COMMON_WORDS]
    repeated = answers * repeats + chosen[COMMON_WORDS:] * others
    rng.shuffle(repeated)
    return Drawn(COMMON.format(context=_numbered(repeated)), answers, COMMON_PREFIX)


def _numbered(items: list[str]) -> str:
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


FREQUENT = """Read the following coded text and track the frequency of each coded word. Find the three most frequently \
appeared coded words. {context}
Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words \
in the above coded text?"""
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


def frequent(rng: Random, units: int, context: int) -> Drawn:
    """About ``units`` coded words of six letters; rank k stands there units / (zeta(2) k^2) times, the first is dots."""
    coded = _fresh(lambda: _letters(rng, string.ascii_lowercase, 6))
    ranked = ["...", *itertools.islice(coded, (context - ruler.MAX_NEW_TOKENS["fwe"]) // 50 - 1)]
    zeta = math.pi**2 / 6  # Zipf's law with RULER's alpha of 2
    text = [word for k, word in enumerate(ranked, 1) for _ in range(int(units / (zeta * k * k)))]
    rng.shuffle(text)
    return Drawn(FREQUENT.format(context=" ".join(text)), ranked[1:4], FREQUENT_PREFIX)


# RULER's synthetic.yaml
KINDS: dict[str, Kind] = {
    "niah_single_1": Kind(Needles("noise"), 10),
    "niah_single_2": Kind(Needles("prose"), 40),
    "niah_single_3": Kind(Needles("prose", value="uuid"), 40),
    "niah_multikey_1": Kind(Needles("prose", keys=4), 40),
    "niah_multikey_2": Kind(Needles("needles"), 10),
    "niah_multikey_3": Kind(Needles("needles", key="uuid", value="uuid"), 10),
    "niah_multivalue": Kind(Needles("prose", values=4), 40),
    "niah_multiquery": Kind(Needles("prose", keys=4, queries=4), 40),
    "vt": Kind(track, 10),
    "cwe": Kind(common, COMMON_WORDS),
    "fwe": Kind(frequent, 300),
}
