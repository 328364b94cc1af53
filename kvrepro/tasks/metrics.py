"""LongBench's and LongBench-v2's official metrics, RULER's string matches and an exact match.

Each metric takes (prediction, gold, classes) and returns 0..1; `score` applies a sample's rules and returns 0..100.
Rewritten from the official scripts (THUDM/LongBench ``metrics.py``, ``eval.py`` and ``pred.py``, NVIDIA/RULER
``constants.py``) with their quirks, because published numbers contain them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from rapidfuzz import fuzz
from rouge import Rouge

from kvrepro.tasks.base import Sample

Metric = Callable[[str, str, tuple[str, ...]], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no English articles, single blanks (SQuAD's rule)."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def qa_f1(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """F1 of the normalised words, counted with multiplicity."""
    predicted, wanted = normalize(prediction).split(), normalize(gold).split()
    same = sum((Counter(predicted) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """F measure of ROUGE-L; 0 where ``rouge`` refuses (nothing left after its splitting, or too long to recurse)."""
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores([prediction], [gold], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """1 / (number of labels named) if the gold label is among them; labels contained in the gold one do not count."""
    named = [label for label in classes if label in prediction]
    # The official loop removes from the list it walks and so skips the label after each removed one.
    for label in named:
        if label in gold and label != gold:
            named.remove(label)
    return 1 / len(named) if gold in named else 0.0


def count(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """Share of the predicted numbers that equal the gold number (the last one in ``gold``)."""
    wanted = re.findall(r"\d+", gold)
    return _share_of_numbers(prediction, wanted[-1] if wanted else "")


def retrieval(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """Share of the predicted numbers that equal the number of the gold ``Paragraph N``."""
    wanted = re.search(r"Paragraph (\d+)", gold)
    return _share_of_numbers(prediction, wanted.group(1) if wanted else "")


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def code_sim(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """Edit similarity of the first predicted line that is neither a comment nor markdown, in whole percents."""
    line = next(filter(_is_code, prediction.lstrip("\n").split("\n")), "")
    return round(fuzz.ratio(line, gold)) / 100  # fuzzywuzzy, which LongBench calls, rounds


def _is_code(line: str) -> bool:
    return not any(mark in line for mark in ("`", "#", "//"))


def needle(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """1 if the gold string is contained, letter case aside (RULER's ``string_match``)."""
    return float(bool(gold) and gold.lower() in prediction.lower())


def contains(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """As `needle`, where one of several gold answers is enough (RULER's ``string_match_part``)."""
    return needle(prediction, gold)


def choice(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """1 if both texts name the same letter in LongBench-v2's sentence, ``The correct answer is (B)``."""
    named = _letter(prediction)
    return float(named is not None and named == _letter(gold))


def _letter(text: str) -> str | None:
    text = text.replace("*", "")  # bold face
    for form in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if found := re.search(form, text):
            return found.group(1)
    return None


def exact(prediction: str, gold: str, classes: tuple[str, ...] = ()) -> float:
    """1 if the strings are equal but for white space around them."""
    return float(prediction.strip() == gold.strip())


METRICS: dict[str, Metric] = {
    f.__name__: f
    for f in (qa_f1, rouge_l, classification, count, retrieval, code_sim, needle, contains, choice, exact)
}


def score(sample: Sample, prediction: str) -> float:
    """Score of a prediction, 0..100.

    The first-line rule is applied where the sample asks for it. The best of the gold answers counts, but for
    ``needle``, where all are wanted and the mean counts (RULER's ``string_match_all``). No gold answer: 0.
    """
    if sample.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[sample.metric]
    values = [metric(prediction, gold, sample.classes) for gold in sample.answers]
    if not values:
        return 0.0
    return 100 * (sum(values) / len(values) if metric is needle else max(values))


def settled(sample: Sample, prediction: str) -> bool:
    """Whether more text cannot change the score: only the first line, or the first line of code, counts."""
    finished = prediction.lstrip("\n").split("\n")[:-1]
    if sample.first_line:
        return bool(finished)
    return sample.metric == "code_sim" and any(map(_is_code, finished))
