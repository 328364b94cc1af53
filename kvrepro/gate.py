"""Stop a run whose full cache scores far below what is published: its harness is broken, not its methods.

`ModelRow.expects` is the full cache's published average over LongBench's 16 sets; where there is none, nothing is
checked. One set alone says nothing of it (counting passages scores next to zero with a sound model, too), so it takes
answers to many sets. Half is far below: the mean of so few answers is rough.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ANSWERS, SETS = 32, 8  # before them nothing is said
SHARE = 0.5  # of the expectation
PREFIX = "longbench/"  # the tasks that expectations are about; LongBench-E has other rows


def complaint(scores: Iterable[tuple[str, float]], expected: float | None) -> str | None:
    """What is wrong with the full cache's scores, in a clause, if anything.

    Parameters
    ----------
    scores
        Task and score (0 to 100) of every answer so far.
    expected
        Published average over LongBench's sets.

    Returns
    -------
    str or None
        None below ``ANSWERS`` answers to LongBench or ``SETS`` of its sets, and where the mean over sets reaches
        ``SHARE`` of the expectation.

    Examples
    --------
    >>> answers = [(f"longbench/set{i % 16}", 2.5) for i in range(32)]
    >>> complaint(answers, 40.54)
    'the full cache scores 2.5 in 32 answers to 16 LongBench sets, and 40.5 is published'
    >>> complaint(answers, 4.0), complaint(answers, None), complaint(answers[:31], 40.54)
    (None, None, None)
    """
    if expected is None:
        return None
    by_set: dict[str, list[float]] = {}
    for task, score in scores:
        if task.startswith(PREFIX):
            by_set.setdefault(task, []).append(score)
    count = sum(map(len, by_set.values()))
    if count < ANSWERS or len(by_set) < SETS:
        return None
    mean = float(np.mean([np.mean(answers) for answers in by_set.values()]))
    if mean >= SHARE * expected:
        return None
    return (
        f"the full cache scores {mean:.1f} in {count} answers to {len(by_set)} LongBench sets, and {expected:.1f} is "
        "published"
    )
