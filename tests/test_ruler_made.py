"""RULER's tasks as they are made here: counted, executed and solved by hand from the prompts alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest

from kvrepro import analyses, profiles, runner, tasks
from kvrepro.errors import UserError
from kvrepro.tasks import Sample, corpus, metrics, prompts, ruler, ruler_made

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# RULER's synthetic.yaml: kind of value, needles in all, answers
NEEDLES = {
    "niah_single_1": ("number", 1, 1),
    "niah_single_2": ("number", 1, 1),
    "niah_single_3": ("uuid", 1, 1),
    "niah_multikey_1": ("number", 4, 1),
    "niah_multikey_2": ("number", None, 1),
    "niah_multikey_3": ("uuid", None, 1),
    "niah_multivalue": ("number", 4, 4),
    "niah_multiquery": ("number", 4, 4),
}
KINDS = (*NEEDLES, "vt", "cwe", "fwe")
SHAPES = {"number": r"\d{7}", "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"}


def count(text: str) -> int:
    """A tokenizer that anybody can follow: words, digits and marks."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text))


@cache
def drawn(kind: str, context: int = 4096) -> tuple[Sample, ...]:
    return tuple(tasks.load(f"ruler-made/{kind}", 3, context, count=count))


def body(sample: Sample, before: str) -> tuple[str, str]:
    """The text between instruction and question, and the question; ``before`` is the instruction's end."""
    text, question = sample.prompt.rsplit("\n", 1)
    return text.rpartition(before)[2], question


# What is there -----------------------------------------------------------------------------------------------


def test_all_of_rulers_synthetic_tasks_and_no_more() -> None:
    made = {name: category for name, category in tasks.available().items() if name.startswith("ruler-made/")}
    assert made == {f"ruler-made/{kind}": "synthetic" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_well_formed_and_scored_as_rulers(kind: str) -> None:
    samples = drawn(kind)
    assert len({s.prompt for s in samples}) == 3
    for i, sample in enumerate(samples):
        assert sample.id == f"ruler-made/{kind}/4096/{i:04d}"
        assert (sample.task, sample.category) == (f"ruler-made/{kind}", "synthetic")
        assert (sample.metric, sample.chat, sample.first_line) == ("needle", True, False)
        assert sample.max_new_tokens == ruler.MAX_NEW_TOKENS[kind.split("_")[0]]
        assert metrics.score(sample, " and ".join(sample.answers)) == 100
        assert metrics.score(sample, sample.answers[0]) == pytest.approx(100 / len(sample.answers))
        assert metrics.score(sample, "I do not know 42.") == 0


def test_they_are_a_benchmark_of_their_own() -> None:
    frame = pd.DataFrame(
        {"task": ["needle-single", "ruler/4096_vt", *(f"ruler-made/{kind}" for kind in KINDS)]}
    )
    parts = analyses.benchmarks(frame.assign(category="synthetic"))
    assert set(parts) == {"offline tasks", "RULER, 4096 tokens", "RULER, made here"}
    assert set(parts["RULER, made here"]["category"]) == {"needles", "tracking", "counting"}


def test_bad_requests_are_refused() -> None:
    for context in (4095, 131073):
        with pytest.raises(UserError, match=f"context {context}"):
            tasks.load("ruler-made/vt", 1, context, count=count)
    with pytest.raises(UserError, match="tokens of a model and none is named"):
        tasks.load("ruler-made/vt", 1, 4096)
    with pytest.raises(UserError, match="limit 0"):
        tasks.load("ruler-made/vt", 0, 4096, count=count)
    with pytest.raises(UserError, match="ruler-made/cwe does not fit 4096 tokens"):
        tasks.load("ruler-made/cwe", 1, 4096, count=len)


# The same everywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_depend_on_the_others(kind: str) -> None:
    assert ruler_made.build(kind, 4096, 2, count) == drawn(kind)[2]


def test_another_process_draws_the_same() -> None:
    code = (
        "import re\nfrom kvrepro.tasks import ruler_made\n"
        "count = lambda text: len(re.findall(r'[A-Za-z]+|\\d|[^\\w\\s]', text))\n"
        "for kind in reversed(list(ruler_made.KINDS)):\n"
        "    print(kind, ruler_made.build(kind, 4096, 1, count).digest)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert dict(line.split() for line in ran.stdout.splitlines()) == {
        kind: drawn(kind)[1].digest for kind in KINDS
    }


# Length -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_with_smollm2(smollm2: tuple[Any, Any], kind: str) -> None:
    """Template and answer fit the context, too, and the prompt takes at least nine tenths of it."""
    tokenizer = smollm2[1]
    for context, number in ((4096, 4), (16384, 1)):
        for sample in tasks.load(
            f"ruler-made/{kind}", number, context, count=lambda text: len(tokenizer(text)["input_ids"])
        ):
            encoded = prompts.encode(tokenizer, sample, context)
            assert not encoded.truncated
            assert 0.9 * context <= len(encoded.input_ids) <= context - sample.max_new_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_context(kind: str) -> None:
    asked = 0

    def counted(text: str) -> int:
        nonlocal asked
        asked += len(text)
        return count(text)

    (sample,) = tasks.load(f"ruler-made/{kind}", 1, 131072, count=counted)
    room = 131072 - sample.max_new_tokens
    assert 0.94 * room <= count(sample.prompt + sample.prefix) <= room
    assert asked <= 4.5 * len(sample.prompt)  # counting is what takes time: it has to find its length soon


def test_a_bent_line_is_followed_to_its_end() -> None:
    """Tokens are not proportional to units where numbers in a list grow longer."""

    def draw(units: int) -> ruler_made.Drawn:
        return ruler_made.Drawn("x" * int(units**1.3), ["x"], "")

    for room in (100, 5_000, 100_000):
        found = ruler_made._fill(draw, 10, room, len)
        assert found is not None
        assert 0.9 * room <= len(found.prompt) <= room
    assert ruler_made._fill(draw, 10, 15, len) is None


def test_a_run_counts_in_the_models_own_tokens(smollm2: tuple[Any, Any]) -> None:
    profile = replace(profiles.load("smoke"), context=4096)
    samples = runner._samples(profile, ["ruler-made/vt", "ruler-made/cwe"], 2, None, "smollm2-135m")
    assert [s.id for s in samples] == [
        f"ruler-made/{kind}/4096/{i:04d}" for i in (0, 1) for kind in ("vt", "cwe")
    ]
    assert samples[0] == ruler_made.build("vt", 4096, 0, lambda text: len(smollm2[1](text)["input_ids"]))
    assert samples[0] != drawn("vt")[0]  # this tokenizer counts otherwise


# Needles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [4096, 131072])
@pytest.mark.parametrize("kind", NEEDLES)
def test_needles(kind: str, context: int) -> None:
    """Each needle once, as many as RULER hides, and the answers are those of the keys that are asked for."""
    value, hidden, wanted = NEEDLES[kind]
    what = "What are all the special magic {}s" if wanted > 1 else "What is the special magic {}"
    for sample in drawn(kind) if context == 4096 else [ruler_made.build(kind, context, 0, count)]:
        needles = re.findall(
            rf"One of the special magic {value}s for (\S+) is: ({SHAPES[value]})\.", sample.prompt
        )
        assert sample.prompt.count("special magic") == len(needles) + 2  # instruction and question
        assert all(sample.prompt.count(v) == 1 for _, v in needles)
        asked = re.search(
            rf"\n{what.format(value)} for (.+) mentioned in the provided text\?$", sample.prompt
        )
        assert asked
        keys = re.split(r", and |, ", asked[1])
        assert len(keys) == len(set(keys)) == (4 if kind == "niah_multiquery" else 1)
        assert len(sample.answers) == wanted
        assert sorted(sample.answers) == sorted(v for k, v in needles if k in keys)
        if len(keys) == wanted:  # the answers stand in the order of the question
            assert list(sample.answers) == [dict(needles)[key] for key in keys]
        if hidden:
            assert len(needles) == hidden
            assert len(dict(needles)) == (1 if kind == "niah_multivalue" else hidden)
        else:  # nothing but needles, and no key twice
            assert sample.prompt.count("\n") == len(needles) + 1
            assert len(dict(needles)) == len(needles) > 40


def test_the_noise_is_rulers() -> None:
    for sample in drawn("niah_single_1"):
        _, *lines, _ = sample.prompt.split("\n")
        assert sorted(set(Counter(lines).values())) == [1, len(lines) - 1]
        assert lines.count(NOISE) == len(lines) - 1


def test_prose_is_the_corpus_and_lies_otherwise_in_each_sample() -> None:
    assert all(" ".join(paragraph) in corpus.prose() for paragraph in ruler_made.paragraphs())
    known = {sentence for paragraph in ruler_made.paragraphs() for sentence in paragraph}
    texts = [sample.prompt.split("\n")[1] for sample in drawn("niah_multikey_1")]
    assert len({text[:60] for text in texts}) == 3
    for text in texts:
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
        needles = [s for s in sentences if s.startswith("One of the special magic numbers")]
        assert len(needles) == 4
        assert set(sentences) - set(needles) <= known


def test_needles_lie_at_all_depths() -> None:
    for kind in ("niah_single_1", "niah_single_2"):
        samples = tasks.load(f"ruler-made/{kind}", 40, 4096, count=count)
        depths = [s.prompt.index(s.answers[0]) / len(s.prompt) for s in samples]
        assert min(depths) < 0.2
        assert max(depths) > 0.8
    assert len(set(ruler_made.DEPTHS)) == 40
    assert (ruler_made.DEPTHS[0], ruler_made.DEPTHS[-1]) == (0, 100)


# Variables, common words, frequent words ----------------------------------------------------------------------


def run(lines: list[str]) -> dict[str, list[str]]:
    """Execute the assignments of a text: which variables hold a value, in their order."""
    values: dict[str, str] = {}
    for line in lines:
        if line.startswith("VAR "):
            name, _, source = line.removeprefix("VAR ").strip().partition(" = ")
            assert name not in values
            values[name] = values[source.removeprefix("VAR ")] if source.startswith("VAR ") else source
    held: dict[str, list[str]] = {}
    for name, value in values.items():
        held.setdefault(value, []).append(name)
    return held


def test_variables_are_solved_by_executing_the_text() -> None:
    for sample in drawn("vt"):
        example, question = sample.prompt.split("\n\nMemorize and track")
        text, asked = body(sample, "hidden in the following text.\n\n")
        lines = text.split("\n")
        value = re.search(r"assigned the value (\d{5}) in the text above", asked)
        assert value
        assert run(lines) == {value[1]: list(sample.answers)}
        assert [len(name) for name in sample.answers] == [5] * 5  # one chain, four hops
        assert {line for line in lines if not line.startswith("VAR ")} == {NOISE}
        assert value[1] in sample.prefix
        assert value[1] not in example
        # the example is solved, by other variables
        ((held, names),) = run(example.split("\n")).items()
        assert example.endswith(f"variables are assgined the value {held}, they are:  {' '.join(names)}")
        assert [len(name) for name in names] == [3] * 5
        assert question.startswith(" the chain(s) of variable assignment")


def counted(numbered: str) -> Counter[str]:
    """The words of a numbered list, whose numbers have to be right."""
    items = re.findall(r"(\d+)\. (\S+)", numbered)
    assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    return Counter(word for _, word in items)


def test_common_words_are_found_by_counting() -> None:
    for context, number in ((4096, 3), (131072, 1)):
        for sample in tasks.load("ruler-made/cwe", number, context, count=count):
            texts = re.findall(r"appear most often\.\n(.+)\nQuestion", sample.prompt)
            assert len(texts) == 2
            times = counted(texts[1])
            assert set(sample.answers) == {word for word, n in times.items() if n == 30}
            assert len(sample.answers) == 10
            assert sorted(times.values())[:-10] == [3] * (len(times) - 10)
            assert len(times) > (30 if context == 4096 else 3000)
            example = counted(texts[0])
            assert sorted(example.values()) == [3] * 30 + [10] * 10
            solved = sample.prompt.partition("that appear most often in the list are:")[2].partition("\n")[0]
            assert set(counted(solved)) == {word for word, n in example.items() if n == 10}


def test_frequent_words_are_found_by_counting() -> None:
    for context, number in ((4096, 3), (131072, 1)):
        for sample in tasks.load("ruler-made/fwe", number, context, count=count):
            text = sample.prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
            times = Counter(text.split(" "))
            (dots, most), *ranked = times.most_common()
            assert dots == "..."
            assert tuple(word for word, _ in ranked[:3]) == sample.answers
            assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
            # Zipf with alpha 2: rank k is k squared times rarer than the dots
            assert all(abs(n - most / k**2) <= 1 for k, (_, n) in enumerate(ranked, 2))
            assert len(ranked) < (context - 50) // 50


# RULER's words ------------------------------------------------------------------------------------------------


def test_sentences_are_rulers() -> None:
    """As they stand in released rows."""
    one = drawn("niah_single_1")[0]
    key = re.search(r"magic number for (\S+) mentioned", one.prompt)
    assert key
    assert one.prompt.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{NOISE}\n"
    )
    assert one.prompt.endswith(
        f"\nWhat is the special magic number for {key[1]} mentioned in the provided text?"
    )
    assert one.prefix == f" The special magic number for {key[1]} mentioned in the provided text is"
    many = drawn("niah_multiquery")[0]
    assert many.prompt.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the numbers afterwards.\n"
    )
    keys = re.search(
        r"\nWhat are all the special magic numbers for (.+) mentioned in the provided text\?$", many.prompt
    )
    assert keys
    assert re.fullmatch(r"\S+, \S+, \S+, and \S+", keys[1])
    assert many.prefix == f" The special magic numbers for {keys[1]} mentioned in the provided text are"
    assert drawn("niah_multikey_3")[0].prompt.startswith("A special magic uuid is hidden within")
    assert drawn("niah_multikey_3")[0].prefix.startswith(" The special magic uuid for ")

    variables = drawn("vt")[0]
    assert re.fullmatch(
        r" Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assgined the value "
        r"\d{5}, they are: ",
        variables.prefix,
    )
    assert re.search(
        r"\nQuestion: Find all variables that are assigned the value \d{5} in the text above\.$",
        variables.prompt,
    )

    words = drawn("cwe")[0]
    assert words.prompt.startswith(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n1. "
    )
    assert words.prompt.endswith("\nQuestion: What are the 10 most common words in the above list?")
    assert words.prefix == " Answer: The top 10 words that appear most often in the list are:"

    coded = drawn("fwe")[0]
    assert coded.prompt.startswith(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        "coded words. "
    )
    assert coded.prompt.endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    assert coded.prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
