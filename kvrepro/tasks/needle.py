"""Magic numbers hidden in documentation prose, in RULER's style (Hsieh et al., 2024, arXiv:2404.06654).

`needle-single` hides one number, `needle-multikey` four under different keys and asks for one of them. The haystack is
made of the corpus' own paragraphs, so no text has to be fetched.
"""

from __future__ import annotations

from random import Random

from kvrepro.tasks import corpus

# The keys: colour-animal. Nothing of the corpus looks like one.
_COLOURS = """
    amber azure bronze cobalt copper coral crimson cyan ebony golden hazel indigo ivory jade lilac maroon olive
    pearl plum russet saffron scarlet silver teal topaz umber violet
"""
_ANIMALS = """
    badger beaver bison condor cougar coyote crane falcon ferret gazelle gecko heron ibis jackal lemur lynx magpie
    marmot narwhal ocelot otter panther pelican puffin raven salmon stork tapir toucan walrus wombat
"""

KEYS = tuple(f"{colour}-{animal}" for colour in _COLOURS.split() for animal in _ANIMALS.split())

SINGLE = """A special magic number is hidden within the following text. Make sure to memorize it. I will \
quiz you about the number afterwards.

{context}

What is the special magic number for {key} mentioned in the provided text? Give only the number.

Answer:"""

MULTIKEY = """Some special magic numbers are hidden within the following text. Make sure to memorize them. I \
will quiz you about one of the numbers afterwards.

{context}

What is the special magic number for {key} mentioned in the provided text? Give only the number.

Answer:"""


def single(key: str, rng: Random, budget: float) -> tuple[str, str] | None:
    """One needle."""
    return _hide(SINGLE, [key], rng, budget)


def multikey(key: str, rng: Random, budget: float) -> tuple[str, str] | None:
    """Four needles with different keys, one of them asked for."""
    others = rng.sample([k for k in KEYS if k != key], 3)
    return _hide(MULTIKEY, [key, *others], rng, budget)


def _hide(template: str, keys: list[str], rng: Random, budget: float) -> tuple[str, str] | None:
    """Prompt and number of ``keys[0]``; None if a number turned up twice."""
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
    needles = [
        f"One of the special magic numbers for {k} is: {n}." for k, n in zip(keys, numbers, strict=True)
    ]
    room = budget - corpus.size(template) - sum(corpus.size(n) + 1 for n in needles)
    haystack = corpus.fill(rng.sample(corpus.prose(), len(corpus.prose())), room)
    for needle in needles:
        haystack.insert(rng.randint(0, len(haystack)), needle)
    prompt = template.format(context="\n".join(haystack), key=keys[0])
    return (prompt, numbers[0]) if all(prompt.count(n) == 1 for n in numbers) else None
