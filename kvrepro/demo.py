"""Two minutes: one prompt, three methods, one figure.

kvrepro demo
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from . import plots, stats, tasks
from .evaluate import NamedArm, evaluate
from .models import load
from .progress import progress

ARMS = (NamedArm("full", 1.0), NamedArm("snapkv", 0.25), NamedArm("selkv", 0.25), NamedArm("kvslimmer", 0.25))
TASKS = ("needle-single", "pydoc-default")


def run(model_name: str, device: str, to: str | Path) -> list[Path]:
    """Ask a few questions about long texts with a quarter of the cache, print the answers, and draw what it cost."""
    model, tokenizer = load(model_name, device=device)
    samples = [tasks.load(name, 2, 1024)[place] for place in range(2) for name in TASKS]
    found: list[dict[str, object]] = []
    for sample in progress(samples, "demo"):
        records = evaluate(model, tokenizer, sample, ARMS, 1024)
        print(f"\n{sample.prompt.strip().splitlines()[-2]}\n  wanted: {sample.answers[0]}")
        for record in records:
            print(
                f"  {record['arm']:<10} {record['kept_entries']:>4.0%} of the entries   {record['prediction'].strip()[:70]!r}"
            )
        found += [record | {"seed": 0} for record in records]
    frame = pd.DataFrame(found)
    means = stats.means(frame, ("score", "kl"), [arm.name for arm in ARMS], n_boot=1000)
    title = f"{len(samples)} questions at a quarter of the cache: how close to the full one?"
    paths = plots.save(plots.main_scores(means, title=title), to, "demo")
    print("\n" + "\n".join(str(path) for path in paths))
    return paths
