"""Answer a prompt with compressed caches, tell what they held and show what became of the text: ``kvrepro generate``.

asked = ask("smollm2-135m", notes, "What is the magic number?")
print(side_by_side(compare(asked, ["selkv", "snapkv", "kvslimmer"])))
Path("notes.html").write_text(heatmap(asked, ["selkv", "snapkv", "kvslimmer"]))
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .errors import UserError
from .evaluate import NamedArm, Prefilled, _fidelity, _forced, _prefill, _wait
from .heatmap import Panel, page, token_texts
from .hf import Arm, make_cache, prefill
from .measure.fates import trace
from .methods import Budget, make
from .models import context, load
from .plots import look
from .tasks.base import Sample
from .tasks.prompts import encode

RETAIN = 0.25  # where neither a share nor a number of entries is given


@dataclass(frozen=True)
class Asked:
    """A prompt as a loaded model takes it: token ids [1, n], and how many tokens its answer may have."""

    name: str
    model: Any
    tokenizer: Any
    ids: Tensor
    max_new_tokens: int


def ask(
    model_name: str,
    text: str,
    question: str | None = None,
    *,
    max_new_tokens: int = 64,
    device: str = "cpu",
    dtype: str | None = None,
) -> Asked:
    """Load a model and encode ``text``, with a question behind it, through the chat template where the model has one.

    Raises
    ------
    UserError
        An empty text or question, no room for an answer, or a prompt longer than the model takes.
    """
    if not text.strip():
        raise UserError("the prompt is empty; give a text")
    if question is not None:
        if not question.strip():
            raise UserError("the question is empty; ask one, or leave it out where the text ends with it")
        text = f"{text.rstrip()}\n\n{question.strip()}"
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens} leaves no answer; give at least 1")
    with torch.inference_mode(False):  # weights made in inference mode cannot be differentiated through
        model, tokenizer = load(model_name, device=device, dtype=dtype)
    sample = Sample("prompt", "prompt", "single-doc", text, (), "exact", max_new_tokens, True, False)
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
    return Asked(model_name, model, tokenizer, torch.tensor([ids], device=model.device), max_new_tokens)


@torch.inference_mode()
def generate(
    asked: Asked, method: str, *, retain: float | None = None, budget: int | None = None
) -> dict[str, Any]:
    """The greedy answer with one method.

    Returns
    -------
    dict
        model, method, answer, prompt_tokens, new_tokens, seconds, and ``layers``: the cache's report, without positions.
    """
    given = _budget(retain, budget)
    cache = make_cache(asked.model, method, retain=given.retain, budget=given.entries)
    started = time.perf_counter()
    prefill(asked.model, cache, asked.ids)
    answer = _continued(asked, asked.ids, cache, asked.max_new_tokens)
    seconds = time.perf_counter() - started
    return {
        "model": asked.name,
        "method": method,
        "answer": asked.tokenizer.decode(answer, skip_special_tokens=True),
        "prompt_tokens": asked.ids.shape[1],
        "new_tokens": len(answer),
        "seconds": seconds,
        "layers": _layers(cache),
    }


@torch.inference_mode()
def compare(
    asked: Asked, methods: Sequence[str], *, retain: float | None = None, budget: int | None = None
) -> dict[str, Any]:
    """The greedy answers of several methods, and how far each is from the full cache, which always runs along.

    Methods that compress once share a prefill; each answer is then decoded alone, as :func:`generate` does it.

    Returns
    -------
    dict
        model, prompt_tokens, and ``methods``, the full cache first unless it stands among them: method, answer,
        new_tokens, agree (share of the full cache's answer tokens, each given those before it, that this cache ranks
        first), kl (from the full cache, nats a token of that answer), compared_tokens (of that answer, its end token
        included), seconds_prefill (``shared`` says whether with others), seconds_compress, seconds_decode, and layers.
    """
    given, model = _budget(retain, budget), asked.model
    names = list(dict.fromkeys(methods))
    names = names if "full" in names else ["full", *names]
    n = asked.ids.shape[1]
    share = given.retain or min(
        1.0, given.resolve(n) / n
    )  # NamedArm knows shares; this one gives the number back
    arms = {name: NamedArm(name, 1.0 if name == "full" else share) for name in names}

    together = ["full", *(name for name in names if name != "full" and make(name).schedule == "one-shot")]
    first = _prefill(model, asked.ids, [arms[name] for name in together])
    compressing = dict(zip(together, first.cache.compression_seconds, strict=True))
    caches = first.cache.split(*([row] for row in range(len(together))))
    # One after the other, full first: it says what the others are measured on.
    rows: dict[str, dict[str, Any]] = {}
    answer = reference = torch.empty(0)
    for name in [*together, *(name for name in names if name not in together)]:
        alone = name not in together
        if alone:
            group = _prefill(model, asked.ids, [arms[name]])
            compressing[name] = group.cache.compression_seconds[0]
        else:
            cache = caches[together.index(name)]
            group = Prefilled([arms[name]], cache, first.logits, first.seconds)
        mark = group.cache.mark()
        started = time.perf_counter()
        new = _decoded(asked, group)
        seconds = time.perf_counter() - started
        layers = _layers(group.cache)
        group.cache.rewind(mark)
        if name == "full":
            answer = new
        found = _forced(model, group, answer)
        reference = found if name == "full" else reference
        fidelity = _fidelity(reference, found, answer)
        rows[name] = {
            "method": name,
            "answer": asked.tokenizer.decode(new, skip_special_tokens=True),
            "new_tokens": len(new),
            "agree": fidelity["agree"][0],
            "kl": fidelity["kl"][0],
            "compared_tokens": len(answer),
            "shared": len(together) > 1 and not alone,
            "seconds_prefill": group.seconds,
            "seconds_compress": compressing[name],
            "seconds_decode": seconds,
            "layers": layers,
        }
    return {"model": asked.name, "prompt_tokens": n, "methods": [rows[name] for name in names]}


def heatmap(
    asked: Asked,
    methods: Sequence[str],
    *,
    retain: float | None = None,
    budget: int | None = None,
    answers: Mapping[str, str] | None = None,
) -> str:
    """An HTML page of the prompt's tokens, a panel a method: kept, merged or dropped (:mod:`kvrepro.heatmap`).

    ``full`` has a panel only where nothing else is asked for: it keeps everything.  ``answers`` stand above the panels.
    """
    given = _budget(retain, budget)
    names = [name for name in dict.fromkeys(methods) if name != "full"] or ["full"]
    fates = trace(asked.model, asked.ids, [Arm(make(name), given) for name in names])
    panels = [
        Panel(name, found, (answers or {}).get(name, "").strip())
        for name, found in zip(names, fates, strict=True)
    ]
    tokens = token_texts(asked.tokenizer, asked.ids[0].tolist())
    budgeted = f"{given.retain:.0%} of the entries" if given.entries is None else f"{given.entries} entries"
    return page(
        tokens,
        panels,
        title="What became of each token",
        lead=f"{len(tokens)} prompt tokens, {asked.name}, {budgeted} kept in each layer and KV head.",
    )


def check(methods: Sequence[str], retain: float | None, budget: int | None) -> None:
    """An unknown method or an impossible budget, said before a model is loaded."""
    if not methods:
        raise UserError("--method names none; see `kvrepro methods`")
    for name in methods:
        make(name)
    _budget(retain, budget)


def text(found: dict[str, Any]) -> str:
    """The answer of :func:`generate`, and a line on what the cache held."""
    untouched = ", nothing was dropped" if all(line["untouched"] for line in found["layers"]) else ""
    return (
        f"{found['answer']}\n\n"
        f"[{found['method']}: {found['prompt_tokens']} prompt and {found['new_tokens']} new tokens; a layer holds "
        f"{_held(found['layers'])} entries a KV head{untouched}; {_mebibytes(found['layers']):.1f} MiB in "
        f"{len(found['layers'])} layers; {found['seconds']:.1f} s]"
    )


def table(found: dict[str, Any]) -> pd.DataFrame:
    """What each cache of :func:`compare` answered and held, how long it took, and how far it is from the full one, as text."""
    rows = {
        look(row["method"]).label: {
            "answer": row["answer"].strip(),
            "entries": _held(row["layers"]),
            "MiB": f"{_mebibytes(row['layers']):.1f}",
            "prefill": f"{row['seconds_prefill']:.1f} s" + "*" * row["shared"],
            "compress": f"{row['seconds_compress']:.2f} s",
            "decode": f"{row['seconds_decode']:.1f} s",
            "agrees": f"{round(row['agree'] * row['compared_tokens'])} of {row['compared_tokens']}",
            "KL": f"{row['kl']:.3f}",
        }
        for row in found["methods"]
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def side_by_side(found: dict[str, Any]) -> str:
    """The answers of :func:`compare`, then its table."""
    answers = [f"{look(row['method']).label}\n  {row['answer'].strip()}\n" for row in found["methods"]]
    shared = " (* one, shared)" if any(row["shared"] for row in found["methods"]) else ""
    return "\n".join([
        *answers,
        table(found).drop(columns="answer").to_string(),
        "",
        f"{found['prompt_tokens']} prompt tokens. entries: of a KV head in each layer, prompt and answer; prefill: with the",
        f"compression inside it{shared}; agrees: tokens of the full cache's answer that this cache ranks first, too;",
        "KL: from the full cache along that answer, nats a token.",
    ])  # fmt: skip


def _budget(retain: float | None, budget: int | None) -> Budget:
    return Budget(RETAIN if retain is None and budget is None else retain, budget)


def _continued(asked: Asked, ids: Tensor, cache: Any, limit: int) -> Tensor:
    """Greedy tokens [t] behind ``ids`` [1, n], their end token included."""
    mask = torch.ones_like(ids)
    out = asked.model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=limit)
    return out[0, ids.shape[1] :]


def _decoded(asked: Asked, group: Prefilled) -> Tensor:
    """Greedy tokens [t] behind a prompt that was prefilled, their end token included."""
    first = group.logits.argmax(-1)  # [1]
    stops = np.atleast_1d(asked.model.generation_config.eos_token_id).tolist()
    if asked.max_new_tokens == 1 or int(first) in stops:
        return first
    ids = torch.cat([asked.ids, first[None]], 1)
    rest = _continued(asked, ids, group.cache, asked.max_new_tokens - 1)
    _wait(asked.model)
    return torch.cat([first, rest])


def _layers(cache: Any) -> list[dict[str, Any]]:
    return [{key: x for key, x in line.items() if key != "positions"} for line in cache.report()]


def _held(layers: list[dict[str, Any]]) -> str:
    """Entries a KV head of the layers that can be compressed: one number, or the least and the most."""
    entries = [line["entries"] for line in layers if line["method"] != "sliding-window"] or [0]
    least, most = min(entries), max(entries)
    return f"{least}" if least == most else f"{least} to {most}"


def _mebibytes(layers: list[dict[str, Any]]) -> float:
    return float(sum(line["bytes_used"] for line in layers) / 2**20)
