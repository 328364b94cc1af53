"""What compression costs: prefill plus compression against the plain prefill, interleaved in one process.

kvrepro bench prefill --context 4096 --methods selkv,snapkv,bifocal
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import results, tasks
from ..hf import make_cache, prefill
from ..models import load
from ..progress import progress
from ..tasks.prompts import encode

METHODS = ("selkv", "snapkv", "pyramidkv", "h2o", "bifocal")


def run(
    model_name: str,
    *,
    contexts: Sequence[int] = (4096,),
    methods: Sequence[str] = METHODS,
    retain: float = 0.25,
    repeats: int = 5,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """Time the prefill of a real prompt with each method.

    Returns
    -------
    dict
        ``machine`` and ``rows``: arm, context (tokens of the prompt), seconds of each repeat, of which compression
        (inside ``compress``), ``ratio`` of the seconds to the plain prefill's of the same repeat (median, low, high),
        and ``overhead``: compression as a share of the rest of the same prefill (None on CUDA, whose clock inside
        ``compress`` would count other kernels).
    """
    model, tokenizer = load(model_name, device=device, dtype=dtype)
    rows = []
    for context in contexts:
        sample = tasks.load("needle-single", 1, context)[0]
        ids = torch.tensor([encode(tokenizer, sample, context).input_ids], device=model.device)
        arms = ["full", *methods]
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        inside: dict[str, list[float]] = {arm: [] for arm in arms}
        _once(model, ids, "full", retain)  # warm up
        for _ in progress(range(repeats), f"prefill of {ids.shape[1]} tokens"):
            for arm in arms:
                whole, compression = _once(model, ids, arm, retain)
                seconds[arm].append(whole)
                inside[arm].append(compression)
        rows += [
            {
                "arm": arm,
                "context": ids.shape[1],
                "retain": 1.0 if arm == "full" else retain,
                "seconds": seconds[arm],
                "compression": inside[arm],
                "ratio": _spread([a / b for a, b in zip(seconds[arm], seconds["full"], strict=True)]),
                "overhead": None
                if model.device.type == "cuda"
                else _spread([c / (a - c) for a, c in zip(seconds[arm], inside[arm], strict=True)]),
            }
            for arm in arms
        ]
    machine = results.versions() | {"device": device, "dtype": str(model.dtype).removeprefix("torch.")}
    return {"machine": machine, "rows": rows}


@torch.inference_mode()
def _once(model: Any, ids: torch.Tensor, arm: str, retain: float) -> tuple[float, float]:
    cache = make_cache(model, arm, retain=1.0 if arm == "full" else retain)
    started = time.perf_counter()
    prefill(model, cache, ids)
    model(ids[:, cache.get_seq_length() :], cache=cache, logits_to_keep=1)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started, cache.compression_seconds[0]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def text(found: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"{'arm':<22}{'tokens':>8}{'seconds':>9}  against plain prefill   compression"]
    for row in found["rows"]:
        ratio, share = row["ratio"], row["overhead"]
        lines.append(
            f"{row['arm']:<22}{row['context']:>8}{statistics.median(row['seconds']):>9.2f}"
            f"  {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            + (f"   {share['median']:.1%} ({share['low']:.1%} to {share['high']:.1%})" if share else "   –")
        )
    return "\n".join(lines)
