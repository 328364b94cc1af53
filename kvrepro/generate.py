"""Answer a prompt with a compressed cache and tell what the cache held: ``kvrepro generate``."""

from __future__ import annotations

import time
from typing import Any

import torch

from .errors import UserError
from .hf import make_cache, prefill
from .models import context, load
from .tasks.base import Sample
from .tasks.prompts import encode


@torch.inference_mode()
def generate(
    model_name: str,
    method: str,
    prompt: str,
    *,
    retain: float | None = None,
    budget: int | None = None,
    max_new_tokens: int = 64,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """The greedy answer to ``prompt`` (through the chat template where the model has one).

    Returns
    -------
    dict
        answer, tokens, seconds, and ``layers``: the cache's report, without positions.
    """
    if not prompt.strip():
        raise UserError("the prompt is empty; give a text")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens} leaves no answer; give at least 1")
    if retain is None and budget is None:
        retain = 0.25
    with torch.inference_mode(False):  # weights made in inference mode cannot be differentiated through
        model, tokenizer = load(model_name, device=device, dtype=dtype)
    sample = Sample("prompt", "prompt", "single-doc", prompt, (), "exact", max_new_tokens, True, False)
    limit = context(model_name, model) - max_new_tokens
    if limit < 1:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in {model_name}; give fewer"
        )
    ids = encode(tokenizer, sample, 1 << 30).input_ids
    if len(ids) > limit:
        raise UserError(
            f"the prompt has {len(ids)} tokens and the model takes {limit} beside the answer; shorten it"
        )
    input_ids = torch.tensor([ids], device=model.device)
    cache = make_cache(model, method, retain=retain, budget=budget)
    started = time.perf_counter()
    prefill(model, cache, input_ids)
    out = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), cache=cache, max_new_tokens=max_new_tokens
    )
    seconds = time.perf_counter() - started
    return {
        "model": model_name,
        "method": method,
        "answer": tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True),
        "prompt_tokens": len(ids),
        "new_tokens": out.shape[1] - len(ids),
        "seconds": seconds,
        "layers": [{key: x for key, x in line.items() if key != "positions"} for line in cache.report()],
    }


def text(found: dict[str, Any]) -> str:
    """The answer, and a line on what the cache held."""
    layers = found["layers"]
    used = sum(line["bytes_used"] for line in layers)
    entries = [line["entries"] for line in layers if line["method"] != "sliding-window"] or [0]
    least, most = min(entries), max(entries)
    held = f"{least}" if least == most else f"{least} to {most}"
    untouched = ", nothing was dropped" if all(line["untouched"] for line in layers) else ""
    return (
        f"{found['answer']}\n\n"
        f"[{found['method']}: {found['prompt_tokens']} prompt and {found['new_tokens']} new tokens; a layer holds {held} "
        f"entries a KV head{untouched}; {used / 2**20:.1f} MiB in {len(layers)} layers; {found['seconds']:.1f} s]"
    )
