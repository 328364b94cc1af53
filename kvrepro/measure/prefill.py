"""What compression costs: prefill plus compression against the plain prefill, in time and in memory.

Times are interleaved in one process; each peak of memory is taken in a process of its own.

kvrepro bench prefill --context 1024 2048 4096 8192 --methods selkv,snapkv,bifocal
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import results, tasks
from ..hf import make_cache, prefill
from ..progress import progress
from ..tasks.prompts import encode
from .fresh import WARM_UP, fresh, peak, spread
from .shaped import load

METHODS = ("selkv", "snapkv", "pyramidkv", "h2o", "bifocal")


def run(
    model_name: str,
    *,
    contexts: Sequence[int] = (4096,),
    methods: Sequence[str] = METHODS,
    retain: float = 0.25,
    repeats: int = 5,
    memory_repeats: int = 2,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """Measure the prefill of a real prompt with each method.

    Returns
    -------
    dict
        ``machine`` and ``rows``: arm, context (tokens of the prompt), seconds of each repeat, of which compression
        (inside ``compress``), ``ratio`` of the seconds to the plain prefill's of the same repeat (median, low, high),
        and ``overhead``: compression as a share of the rest of the same prefill (None on CUDA, whose clock inside
        ``compress`` would count other kernels).

        ``extra_bytes``: the peak above the loaded model (median, low, high), the cache it leaves included;
        ``layer_bytes``: keys and values of the prompt in one layer; ``layers_above_plain``: how many of those the peak
        is above the plain prefill's of the same repeat (median, low, high; negative: below).
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
        extra: dict[str, list[int]] = {arm: [] for arm in arms}
        for _ in progress(range(memory_repeats), f"memory of {ids.shape[1]} tokens"):
            for arm in arms:
                extra[arm].append(fresh(_memory, model_name, device, dtype, ids.tolist(), arm, retain))
        layer = _layer_bytes(model, ids.shape[1])
        rows += [
            {
                "arm": arm,
                "context": ids.shape[1],
                "retain": 1.0 if arm == "full" else retain,
                "seconds": seconds[arm],
                "compression": inside[arm],
                "ratio": spread([a / b for a, b in zip(seconds[arm], seconds["full"], strict=True)]),
                "overhead": None
                if model.device.type == "cuda"
                else spread([c / (a - c) for a, c in zip(seconds[arm], inside[arm], strict=True)]),
                "extra_bytes": spread(extra[arm]),
                "layer_bytes": layer,
                "layers_above_plain": spread(
                    [(a - b) / layer for a, b in zip(extra[arm], extra["full"], strict=True)]
                ),
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


def _memory(
    model_name: str, device: str, dtype: str | None, ids: list[list[int]], arm: str, retain: float
) -> int:
    """Peak bytes of one prefill above the loaded model."""
    model, _ = load(model_name, device=device, dtype=dtype)
    prompt = torch.tensor(ids, device=model.device)
    _once(model, prompt[:, :WARM_UP], "full", retain)
    with peak(model.device) as found:
        _once(model, prompt, arm, retain)
    return found[0]


def _layer_bytes(model: Any, n: int) -> int:
    """Bytes of the keys and values of n tokens in one layer."""
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * n * config.num_key_value_heads * width * model.dtype.itemsize


def text(found: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{'arm':<22}{'tokens':>8}{'seconds':>9}  against plain prefill   compression{'':<14}  extra MB  above plain (layers)"
    ]
    for row in found["rows"]:
        ratio, share, layers = row["ratio"], row["overhead"], row["layers_above_plain"]
        inside = f"{share['median']:.1%} ({share['low']:.1%} to {share['high']:.1%})" if share else "–"
        lines.append(
            f"{row['arm']:<22}{row['context']:>8}{statistics.median(row['seconds']):>9.2f}"
            f"  {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            f"   {inside:<25}{row['extra_bytes']['median'] / 1e6:>10.0f}"
            f"  {layers['median']:+.1f} ({layers['low']:+.1f} to {layers['high']:+.1f})"
        )
    return "\n".join(lines)
