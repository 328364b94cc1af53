"""The official metrics on cases worked out by hand."""

from __future__ import annotations

import pytest

from kvrepro.tasks import metrics
from kvrepro.tasks.base import Sample


def sample(metric: str, *answers: str, first_line: bool = False, classes: tuple[str, ...] = ()) -> Sample:
    return Sample("t/0", "t", "code", "p", answers, metric, 8, True, first_line, classes)


def test_normalize() -> None:
    assert metrics.normalize("  The Cat, a dog\tand AN eel! ") == "cat dog and eel"


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("the cat sat", "Cat!", 2 / 3),  # precision 1/2, recall 1
        ("b b c", "b c c", 2 / 3),  # two of three in common, counted with multiplicity
        ("eps=1e-5", "eps=1e-5", 1.0),
        ("eps=1e-6", "eps=1e-5", 0.0),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
        ("", "", 0.0),
        ("the", "a", 0.0),  # only articles: nothing left
    ],
)
def test_qa_f1(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.qa_f1(prediction, gold) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("a b c d", "a b c d", 1.0),
        ("a b c d", "a c", 2 / 3),  # longest common subsequence 2: precision 2/4, recall 2/2
        ("x y", "a b", 0.0),
        ("", "a b", 0.0),
        ("a b", "", 0.0),
        ("...", "a b", 0.0),
    ],
)
def test_rouge_l(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.rouge_l(prediction, gold) == pytest.approx(wanted, abs=1e-6)


def test_rouge_l_scores_0_where_the_library_gives_up() -> None:
    long = " ".join(f"w{i}" for i in range(1500))
    assert metrics.rouge_l(long, long) == 0.0  # its recursion is too deep; LongBench catches that, too


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("Type: Date", "Date", 1.0),
        ("Date or Plant", "Date", 0.5),
        ("Plant", "Date", 0.0),
        ("Other location", "Other location", 1.0),  # "location" is part of the gold label and does not count
        ("location", "Other location", 0.0),
        ("", "Date", 0.0),
    ],
)
def test_classification(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.classification(prediction, gold, ("Date", "Plant", "location", "Other location")) == wanted


def test_classification_skips_a_label_after_each_removed_one() -> None:
    """The official loop removes while it walks: of two parts of the gold label only the first goes."""
    assert metrics.classification("a b", "a b", ("a", "b", "a b")) == 0.5


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("7", "7", 1.0),
        ("There are 7 of 14", "7", 0.5),
        ("Unique paragraphs: 7", "Unique paragraphs: 7", 1.0),
        ("17", "7", 0.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
        ("7", "", 0.0),
    ],
)
def test_count(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.count(prediction, gold) == wanted


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("Paragraph 12", "Paragraph 12", 1.0),
        ("12", "Paragraph 12", 1.0),
        ("Paragraph 1 or 12", "Paragraph 12", 0.5),
        ("Paragraph 1", "Paragraph 12", 0.0),
        ("", "Paragraph 12", 0.0),
        ("Paragraph 12", "", 0.0),
    ],
)
def test_retrieval(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.retrieval(prediction, gold) == wanted


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("x = 1", "x = 1", 1.0),
        ("\n# a comment\n```python\nx = 1\ny = 2", "x = 1", 1.0),
        ("abcd", "abxy", 0.5),  # 2 * 2 common of 8 characters
        ("abc", "ab", 0.8),  # 2 * 2 of 5
        ("ab", "abcd", 0.67),  # 2/3 in whole percents
        ("# only a comment", "x = 1", 0.0),
        ("", "x", 0.0),
        ("x", "", 0.0),
    ],
)
def test_code_sim(prediction: str, gold: str, wanted: float) -> None:
    assert metrics.code_sim(prediction, gold) == pytest.approx(wanted)


def test_needle_and_exact() -> None:
    assert metrics.needle("It is 1234567.", "1234567") == 1
    assert metrics.needle("123456", "1234567") == 0
    assert metrics.needle("ABC def", "abc DEF") == 1
    assert metrics.needle("anything", "") == 0
    assert metrics.exact(" numpy.dot\n", "numpy.dot") == 1
    assert metrics.exact("numpy.dots", "numpy.dot") == 0
    assert metrics.exact("", "numpy.dot") == 0


@pytest.mark.parametrize(
    ("prediction", "wanted"),
    [
        ("The correct answer is (B)", 1),
        ("I think. The correct answer is (B), not (C).", 1),
        ("**The correct answer is B**", 1),
        ("The correct answer is (C)", 0),
        (
            "The correct answer is A. The correct answer is (B)",
            1,
        ),  # the form with brackets is looked for first
        ("(B)", 0),
        ("the correct answer is (B)", 0),
        ("", 0),
    ],
)
def test_choice(prediction: str, wanted: float) -> None:
    assert metrics.choice(prediction, "The correct answer is (B)") == wanted


def test_choice_without_an_answer_is_wrong() -> None:
    assert metrics.choice("no idea", "no letter") == 0


def test_one_of_several_golds_is_enough_to_be_contained() -> None:
    assert metrics.score(sample("contains", "Paris", "Rome"), "in rome, I think") == 100
    assert metrics.score(sample("contains", "Paris", "Rome"), "in Oslo") == 0


def test_score_takes_the_best_answer_in_percent() -> None:
    assert metrics.score(sample("qa_f1", "dog", "cat"), "the cat sat") == pytest.approx(200 / 3)
    assert metrics.score(sample("qa_f1"), "the cat sat") == 0


def test_score_of_a_needle_is_the_share_of_numbers_found() -> None:
    assert metrics.score(sample("needle", "111", "222", "333", "444"), "111, 333 and 555") == 50


def test_score_cuts_to_the_first_line_only_where_asked() -> None:
    prediction = "\n\nnumpy.dot\nSummary: more"
    assert metrics.score(sample("exact", "numpy.dot", first_line=True), prediction) == 100
    assert metrics.score(sample("exact", "numpy.dot"), prediction) == 0
    assert metrics.score(sample("exact", "numpy.dot", first_line=True), "") == 0


def test_score_hands_over_the_classes() -> None:
    assert metrics.score(sample("classification", "Date", classes=("Date", "Plant")), "Date, Plant") == 50
