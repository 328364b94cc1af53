"""One sample, many arms: prefill once, read what each arm's cache is worth, decode the arms side by side.

For each arm: the task score of its greedy answer, and, teacher-forced over the gold answer, the answer's NLL, the KL
from the full cache and the top-1 agreement with it.  The first answer token comes from the prefill's own logits: a
one-shot method has not compressed anything by then, so there its KL is 0 by construction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .hf import Arm, KVCache, prefill
from .methods import Budget, make
from .tasks import metrics
from .tasks.base import Sample
from .tasks.prompts import asked, encode

GOLD_LIMIT = 64  # tokens of the gold answer that are teacher-forced


@dataclass(frozen=True)
class NamedArm:
    """An arm of the experiments: its name (a method, or ``method/arm``) and the share of entries it keeps."""

    name: str
    retain: float

    @property
    def method(self) -> str:
        return self.name.partition("/")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the method, defaults included: what a record is the record of."""
        return make(self.name).settings

    def made(self) -> Arm:
        return Arm(make(self.name), Budget(retain=self.retain))


@dataclass
class Prefilled:
    """A cache after its prompt, one row an arm, and the logits of the first answer token."""

    arms: list[NamedArm]
    cache: KVCache
    logits: Tensor  # [arms, V]
    seconds: float


@torch.inference_mode()
def evaluate(
    model: Any, tokenizer: Any, sample: Sample, arms: Sequence[NamedArm], limit: int
) -> list[dict[str, Any]]:
    """Measure ``arms`` on one sample.

    Parameters
    ----------
    arms
        All one-shot arms share one prefill; a chunked one has its own.  The full cache is always run, as the
        reference, and recorded if it is among them.
    limit
        Longest prompt, in tokens.

    Returns
    -------
    list of dict
        One record an arm, in the order of ``arms``: sample, digest (of its text), task, category, n_tokens, truncated,
        query_aware, arm, method, retain, budget (entries), settings, prediction, score (0 to 100), nll and kl (nats a
        gold token), agree (share of gold tokens), kept_entries and kept_bytes (shares of the full cache's), untouched,
        seconds of the prefill, compression and decoding, rows that decoded together, and the method's diagnostics.
    """
    sample = asked(tokenizer, sample)
    encoded = encode(tokenizer, sample, limit)
    ids = torch.tensor([encoded.input_ids], device=model.device)
    gold = _gold(tokenizer, sample).to(model.device)
    full, groups = _prefill_all(model, ids, arms)
    shares = _held(full.cache)

    reference = _forced(model, full, gold)  # [1, L, V] log-probabilities
    found: dict[NamedArm, dict[str, Any]] = {}
    for group in [full, *groups]:
        held = _held(group.cache)
        log_probs = reference if group is full else _forced(model, group, gold)
        fidelity = _fidelity(reference, log_probs, gold)
        answers, seconds = _decode(model, tokenizer, group, sample)
        report = group.cache.report()
        compressing = group.cache.compression_seconds
        for row, arm in enumerate(group.arms):
            layers = [line for line in report if line["row"] == row and line["method"] != "sliding-window"]
            found[arm] = {
                "arm": arm.name,
                "method": arm.method,
                "retain": arm.retain,
                "budget": layers[0]["m"] if layers else None,
                "settings": arm.settings,
                "prediction": answers[row],
                "score": metrics.score(sample, answers[row]),
                **{name: values[row] for name, values in fidelity.items()},
                "kept_entries": held[row][0] / shares[0][0],
                "kept_bytes": held[row][1] / shares[0][1],
                "untouched": all(line["untouched"] for line in layers),
                "seconds_prefill": group.seconds,
                "seconds_compress": compressing[row],
                "seconds_decode": seconds,
                "decode_rows": len(group.arms),
                "diagnostics": _diagnostics(layers),
            }
    common = {
        "sample": sample.id,
        "digest": sample.digest,
        "task": sample.task,
        "category": sample.category,
        "n_tokens": ids.shape[1],
        "truncated": encoded.truncated,
        "query_aware": True,  # the question stands in the prompt that is compressed
    }
    return [common | found[arm] for arm in arms]


def _prefill_all(model: Any, ids: Tensor, arms: Sequence[NamedArm]) -> tuple[Prefilled, list[Prefilled]]:
    """The full cache, and the arms in groups that decode together: of one retention, so that rows are alike long."""
    full = next((arm for arm in arms if arm.name == "full"), NamedArm("full", 1.0))
    shared = [arm for arm in arms if make(arm.name).schedule == "one-shot" and arm != full]
    alone = [arm for arm in arms if make(arm.name).schedule != "one-shot"]
    first = _prefill(model, ids, [full, *shared])
    order = [full, *shared]
    # full-folded holds every token: in a batch with others, all rows would be as long
    batches = [[arm] for arm in shared if arm.name == "full-folded"]
    for retain in sorted({arm.retain for arm in arms}):
        batches.append([arm for arm in shared if arm.retain == retain and arm.name != "full-folded"])
    batches = [batch for batch in batches if batch]
    parts = first.cache.split([0], *([order.index(arm) for arm in batch] for batch in batches))
    groups = [
        Prefilled(batch, cache, first.logits.expand(len(batch), -1), first.seconds)
        for batch, cache in zip(batches, parts[1:], strict=True)
    ]
    for own in (_prefill(model, ids, [arm]) for arm in alone):
        mate = next(
            (g for g in groups if g.arms[0].retain == own.arms[0].retain and g.arms[0].name != "full-folded"),
            None,
        )
        if mate is None:
            groups.append(own)
        else:
            mate.cache = KVCache.join([mate.cache, own.cache])
            mate.logits = torch.cat([mate.logits, own.logits])
            mate.arms.extend(own.arms)
    return Prefilled([full], parts[0], first.logits, first.seconds), groups


def _prefill(model: Any, ids: Tensor, arms: list[NamedArm]) -> Prefilled:
    started = time.perf_counter()
    cache = KVCache(model, [arm.made() for arm in arms])
    prefill(model, cache, ids)
    logits = model(ids[:, cache.get_seq_length() :], cache=cache, logits_to_keep=1).logits[:, -1]
    _wait(model)
    return Prefilled(arms, cache, logits, time.perf_counter() - started)


def _gold(tokenizer: Any, sample: Sample) -> Tensor:
    """Token ids [L] of the gold answer and the token that ends it."""
    text = sample.answers[0]
    before = sample.prefix or ("" if sample.chat else sample.prompt)
    if before and not before[-1].isspace():
        text = " " + text  # the answer goes on in a line that was begun
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: GOLD_LIMIT - 1]
    end = (
        [tokenizer.eos_token_id]
        if sample.chat
        else tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]  # Llama 2 puts a blank before it
    )
    return torch.tensor(ids + end)


def _forced(model: Any, group: Prefilled, gold: Tensor) -> Tensor:
    """Log-probabilities [arms, L, V] of each gold position, the cache left as it was."""
    rows = len(group.arms)
    logits = [group.logits[:, None].float()]
    if len(gold) > 1:
        mark = group.cache.mark()
        logits.append(model(gold[None, :-1].expand(rows, -1), cache=group.cache).logits.float())
        group.cache.rewind(mark)
    return torch.cat(logits, 1).log_softmax(-1)


def _fidelity(reference: Tensor, log_probs: Tensor, gold: Tensor) -> dict[str, list[float]]:
    """NLL, KL(full ‖ arm) and top-1 agreement, means over the gold tokens, for each arm."""
    nll = -log_probs.gather(-1, gold[None, :, None].expand(len(log_probs), -1, 1))[..., 0].mean(1)
    kl = (reference.exp() * (reference - log_probs)).sum(-1).mean(1).clamp_min(0)
    agree = (reference.argmax(-1) == log_probs.argmax(-1)).float().mean(1)
    return {"nll": nll.tolist(), "kl": kl.tolist(), "agree": agree.tolist()}


def _decode(model: Any, tokenizer: Any, group: Prefilled, sample: Sample) -> tuple[list[str], float]:
    """Greedy answers of all rows, stopped at every end token, and the seconds it took."""
    stops = set(np.atleast_1d(model.generation_config.eos_token_id).tolist())
    started = time.perf_counter()
    token = group.logits.argmax(-1)  # [arms]
    answers: list[list[int]] = [[] for _ in group.arms]
    running = [True] * len(answers)
    for step in range(sample.max_new_tokens):
        for row, new in enumerate(token.tolist()):
            if running[row] and new not in stops:
                answers[row].append(new)
                running[row] = not metrics.settled(sample, tokenizer.decode(answers[row]))
            else:
                running[row] = False
        if not any(running) or step + 1 == sample.max_new_tokens:
            break
        token = model(token[:, None], cache=group.cache).logits[:, -1].argmax(-1)
    _wait(model)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers], time.perf_counter() - started


def _held(cache: KVCache) -> list[tuple[float, float]]:
    """For each row: mean entries of the compressible layers, and bytes of all layers."""
    report = cache.report()
    sliding = sum(line["bytes_used"] for line in report if line["method"] == "sliding-window")
    rows = len(cache.arms)
    held = []
    for row in range(rows):
        lines = [line for line in report if line["row"] == row and line["method"] != "sliding-window"]
        held.append(
            (
                float(np.mean([line["entries"] for line in lines])),
                sum(line["bytes_used"] for line in lines) + sliding / rows,
            )
        )
    return held


KNOWN = {
    "layer", "row", "method", "retain", "budget", "m", "untouched", "seen", "entries", "positions", "bytes_used",
    "bytes_allocated",
}  # fmt: skip


def _diagnostics(layers: list[dict[str, Any]]) -> dict[str, float]:
    """A method's diagnostics, means over the compressible layers."""
    names = sorted({name for line in layers for name in line} - KNOWN)
    return {name: float(np.nanmean([line[name] for line in layers if name in line])) for name in names}


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
