"""KVSlimmer (one pass) against AsymKV (a backward pass a chunk) and KVSlimmer's released code (two passes).

Each measurement is a process of its own: it loads the model, runs a short prompt to warm up, then the prompt.  The arms
take turns, and a ratio is taken within a turn.  The KL from the full cache over the gold answer, as in ``evaluate``, stands
beside the seconds, so that speed is not bought with quality.

kvrepro bench slimmer --chunk 512 --json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import results, tasks
from ..errors import UserError
from ..evaluate import NamedArm, Prefilled, _fidelity, _forced, _gold, _wait
from ..hf import make_cache, prefill
from ..progress import progress
from ..tasks.prompts import asked, encode
from .fresh import WARM_UP, fresh, peak, spread
from .shaped import load

ARMS = ("kvslimmer", "kvslimmer-released", "asymkv")
SINKS = 32


def run(
    model_name: str,
    *,
    context: int = 4096,
    chunks: Sequence[int] = (512,),
    budget: int = SINKS + 1024,
    repeats: int = 3,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """Measure prefill and compression of one real prompt.

    Parameters
    ----------
    context
        Tokens of the prompt, about.
    budget
        Entries held, sinks and the newest chunk among them; at least twice the largest chunk.
    repeats
        Processes of each arm and chunk.

    Returns
    -------
    dict
        ``machine`` and ``rows``: first the plain prefill (arm "full", chunk None), then each arm at each chunk, with
        context, budget, seconds, extra_bytes (peak above the loaded model) and kl (nats a gold token), medians, and the
        ratios within a repeat ``to_full`` and ``to_asymkv`` (of the seconds) and ``bytes_to_asymkv``; ``spread`` holds
        [low, high] of each.

    Raises
    ------
    UserError
        A chunk that the budget does not hold twice, a prompt that the budget leaves untouched.
    """
    chunks = list(dict.fromkeys(chunks))
    if max(chunks) > budget // 2:
        raise UserError(
            f"a budget of {budget} entries holds the newest chunk and as many older ones, not chunks of {max(chunks)}; "
            f"give --budget {2 * max(chunks) + SINKS} or smaller chunks"
        )
    model, tokenizer = load(model_name, device=device, dtype=dtype)
    kind = str(model.dtype).removeprefix("torch.")
    del model
    sample = asked(tokenizer, tasks.load("needle-single", 1, context)[0])
    ids, gold = encode(tokenizer, sample, context).input_ids, _gold(tokenizer, sample)
    if len(ids) <= budget:
        raise UserError(
            f"the prompt has {len(ids)} tokens and a budget of {budget} leaves it untouched; give a longer --context"
        )
    cells = [("full", None), *((arm, chunk) for chunk in chunks for arm in ARMS)]
    found: dict[tuple[str, int | None], list[dict[str, float]]] = {cell: [] for cell in cells}
    for _ in progress(range(repeats), f"{len(cells)} arms and chunks"):
        reference = None
        for arm, chunk in cells:
            seconds, extra, log_probs = fresh(
                measure, model_name, device, dtype, ids, gold, arm, None if chunk is None else budget, chunk
            )
            reference = log_probs if reference is None else reference
            kl = _fidelity(reference, log_probs, gold)["kl"][0]
            found[arm, chunk].append({"seconds": seconds, "extra_bytes": extra, "kl": kl})
    rows = []
    for (arm, chunk), own in found.items():
        plain, other = found["full", None], found[("asymkv", chunk) if chunk else ("full", None)]
        numbers = {name: [one[name] for one in own] for name in ("seconds", "extra_bytes", "kl")}
        numbers["to_full"] = _ratio(own, plain, "seconds")
        if chunk is not None:
            numbers |= {
                "to_asymkv": _ratio(own, other, "seconds"),
                "bytes_to_asymkv": _ratio(own, other, "extra_bytes"),
            }
        spreads = {name: spread(values) for name, values in numbers.items()}
        rows.append(
            {"arm": arm, "chunk": chunk, "context": len(ids), "budget": None if chunk is None else budget}
            | {name: one["median"] for name, one in spreads.items()}
            | {"spread": {name: [one["low"], one["high"]] for name, one in spreads.items()}}
        )
    machine = results.versions() | {
        "device": device, "dtype": kind, "model": model_name, "threads": torch.get_num_threads(), "repeats": repeats,
    }  # fmt: skip
    return {"machine": machine, "rows": rows}


def _ratio(own: list[dict[str, float]], other: list[dict[str, float]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(own, other, strict=True)]


def measure(
    model_name: str,
    device: str,
    dtype: str | None,
    ids: list[int],
    gold: Tensor,
    arm: str,
    budget: int | None,
    chunk: int | None,
) -> tuple[float, int, Tensor]:
    """One prefill: seconds, peak bytes above the loaded model, log-probabilities [1, L, V] of the gold answer."""
    model, _ = load(model_name, device=device, dtype=dtype)
    settings = {} if chunk is None else {"chunk": chunk, "sinks": SINKS}
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        model(prompt[:, :WARM_UP], cache=make_cache(model, "full"))
        _wait(model)
        with peak(model.device) as extra:
            started = time.perf_counter()
            cache = make_cache(model, arm, budget=budget, **settings)
            prefill(model, cache, prompt)
            logits = model(prompt[:, cache.get_seq_length() :], cache=cache, logits_to_keep=1).logits[:, -1]
            _wait(model)
            seconds = time.perf_counter() - started
        group = Prefilled([NamedArm(arm, 1.0)], cache, logits, seconds)
        return seconds, extra[0], _forced(model, group, gold.to(model.device)).cpu()


def text(found: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{'arm':<20}{'chunk':>6}{'seconds':>9}{'extra MB':>10}{'KL':>8}  against plain prefill  against asymkv  its memory"
    ]
    for row in found["rows"]:
        line = (
            f"{row['arm']:<20}{row['chunk'] or '–':>6}{row['seconds']:>9.2f}{row['extra_bytes'] / 1e6:>10.0f}"
        )
        line += f"{row['kl']:>8.4f}"
        for name in ("to_full", "to_asymkv", "bytes_to_asymkv"):
            if name in row:
                low, high = row["spread"][name]
                line += f"  {row[name]:.2f} ({low:.2f} to {high:.2f})"
        lines.append(line)
    return "\n".join(lines)
