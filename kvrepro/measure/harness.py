"""What sharing a prefill saves: the time of twelve one-shot arms on a sample against one arm alone.

kvrepro bench harness --context 2048
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from .. import results, tasks
from ..evaluate import NamedArm, evaluate
from ..models import load
from ..progress import progress

TWELVE = (
    "full", "streaming-llm", "snapkv", "selkv", "selkv/evict", "selkv/merge-all", "selkv/gate", "selkv/gate+count",
    "selkv/gate+gated-count", "selkv/merge-all+ratio", "selkv/alpha-1", "selkv/on-snapkv",
)  # fmt: skip
ARMS = {"one": ("full",), "twelve": TWELVE}


def run(
    model_name: str, *, context: int = 2048, repeats: int = 3, device: str = "cpu", dtype: str | None = None
) -> dict[str, Any]:
    """Time the evaluation of one sample, one arm against twelve, interleaved; medians, and ratios within a repeat.

    Returns
    -------
    dict
        ``machine`` and ``rows`` (arms, seconds of each repeat), ``ratio``: median of twelve over one, with its range.
    """
    model, tokenizer = load(model_name, device=device, dtype=dtype)
    sample = tasks.load("needle-single", 1, context)[0]
    arms = {
        name: [NamedArm(arm, 1.0 if arm == "full" else 0.25) for arm in chosen]
        for name, chosen in ARMS.items()
    }
    evaluate(model, tokenizer, sample, arms["one"], context)  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in progress(range(repeats), "harness"):
        for name, chosen in arms.items():
            started = time.perf_counter()
            evaluate(model, tokenizer, sample, chosen, context)
            seconds[name].append(time.perf_counter() - started)
    ratios = [twelve / one for one, twelve in zip(seconds["one"], seconds["twelve"], strict=True)]
    return {
        "machine": results.versions() | {"device": device, "dtype": str(model.dtype).removeprefix("torch.")},
        "rows": [
            {"arms": len(arms[name]), "context": context, "seconds": times} for name, times in seconds.items()
        ],
        "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "n": repeats},
    }


def text(found: dict[str, Any]) -> str:
    """The same for a person."""
    one, twelve = (statistics.median(row["seconds"]) for row in found["rows"])
    ratio = found["ratio"]
    return (
        f"one arm alone {one:.1f} s, twelve one-shot arms {twelve:.1f} s a sample of {found['rows'][0]['context']} "
        f"tokens\nratio {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['n']} repeats)"
    )
