"""What a decoded token costs: time by part, bytes and peak memory, over context, batch and retention.

kvrepro bench decode --context 1000 10000 100000 --batch 1 4 8 --retain 0.5 0.25 0.1

Decoding time does not depend on content, so a cache is filled with random entries of the form that its method leaves
of a real prompt (which KV heads share a bias or positions), and no long prompt is ever run.  One cache lives at a time:
it is built, decodes, and goes; the arms of a context and batch take turns, and a ratio is taken within a turn.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .. import results
from ..entries import Entries, Rows
from ..hf import IMPLEMENTATION, CompressedLayer, Row, make_cache
from ..methods import Budget
from ..progress import progress
from .shaped import load

STOCK = {"stock-eager": "eager", "stock-sdpa": "sdpa"}  # arm -> transformers' name of its attention
FULL = ("full", "full-folded")
METHODS = ("selkv", "snapkv", "kvslimmer")
AGAINST = ("full-folded", "stock-sdpa", "stock-eager")  # the same kernel; what a user has today

PROBE = 256  # tokens of the real prompt that shows a method's form
MEMORY, MEMORY_CUDA = 0.6, 0.8  # share of the machine's or the device's memory that a cell may take
STEPS, SECONDS = (2, 12), 0.5  # steps timed a turn: as many as fit these seconds, within these limits
SPLIT = 2  # steps of a turn whose parts are timed
READ = 2**28  # floats that are summed to measure the bandwidth


@dataclass(frozen=True)
class Cell:
    """One arm at one context (tokens seen), batch (rows) and retention."""

    arm: str
    context: int
    batch: int
    retain: float


def run(
    model_name: str,
    *,
    contexts: Sequence[int] = (1000, 10_000, 100_000),
    batches: Sequence[int] = (1, 4, 8),
    retains: Sequence[float] = (0.5, 0.25, 0.1),
    repeats: int = 3,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """Time decoding steps of every arm.

    Returns
    -------
    dict
        ``machine`` (with threads, memory_bytes, weight_bytes and bandwidth, bytes a second of reading a large tensor)
        and ``rows``: arm, context, batch, retain, ``status`` ("measured", or "skipped: needs X GiB", and then the rest
        is None), and medians over the repeats:

        tokens_per_s
            All rows together; the copy of a cache that outgrows its buffer counts with its share of a step.
        ms_step, ms_attention, ms_append, ms_other
            Milliseconds a step, which decodes one token of every row.  The parts are timed in steps of their own
            and add up to those: attention is the attention function without the projections, append is storing the
            new token with growth's share, other is the rest of the model, among it the mask that eager attention is
            given.
        bytes
            Of the entries of all rows before the first step.
        peak_bytes
            Most memory above what was held before the cache was built: of the process (None where the system does not
            tell), of torch's allocator on CUDA.
        roofline, of_roofline
            Milliseconds to read weights and entries once at the bandwidth; how many times longer the step takes.
        speedup
            Of the step against each arm of ``AGAINST`` that was measured beside it.
        spread
            [low, high] over the repeats of each of these.
    """
    model, _ = load(model_name, device=device, dtype=dtype)
    memory, weights = _memory(model.device), _weight_bytes(model)
    allowed = memory * (MEMORY_CUDA if model.device.type == "cuda" else MEMORY)
    forms = {arm: form(model, arm) for arm in (*FULL, *METHODS)}
    forms |= dict.fromkeys(STOCK, forms["full"])
    cells = [
        [
            *(Cell(arm, context, batch, 1.0) for arm in (*STOCK, *FULL)),
            *(Cell(arm, context, batch, retain) for retain in dict.fromkeys(retains) for arm in METHODS),
        ]
        for context in dict.fromkeys(contexts)
        for batch in dict.fromkeys(batches)
    ]
    bandwidth: list[float] = []
    found: dict[Cell, dict[str, list[float]]] = {}
    needed = {cell: weights + _needed(model, forms[cell.arm], cell) for turn in cells for cell in turn}
    for turn in cells:
        fitting = [cell for cell in turn if needed[cell] <= allowed]
        found |= {cell: defaultdict(list) for cell in fitting}
        label = f"decoding, {turn[0].context} tokens, batch {turn[0].batch}"
        for _ in progress(range(repeats), label):
            bandwidth.append(_bandwidth(model.device))
            for cell in fitting:
                for name, number in _measure(model, cell, forms[cell.arm]).items():
                    found[cell][name].append(number)
    speed = statistics.median(bandwidth)
    machine = results.versions() | gpu_of(model.device) | {
        "device": device, "dtype": str(model.dtype).removeprefix("torch."), "model": model_name,
        "threads": torch.get_num_threads(), "memory_bytes": memory, "weight_bytes": weights,
        "bandwidth": speed, "spread": {"bandwidth": [min(bandwidth), max(bandwidth)]},
    }  # fmt: skip
    rows = [
        _row(cell, found, weights / speed, speed)
        if cell in found
        else _skipped(cell, f"skipped: needs {needed[cell] / 2**30:.1f} GiB")
        for turn in cells
        for cell in turn
    ]
    return {"machine": machine, "rows": rows}


NUMBERS = (
    "tokens_per_s", "ms_step", "ms_attention", "ms_append", "ms_other", "bytes", "peak_bytes", "roofline", "of_roofline",
)  # fmt: skip


def _skipped(cell: Cell, why: str) -> dict[str, Any]:
    return vars(cell) | {"status": why} | dict.fromkeys(NUMBERS) | {"speedup": {}, "spread": {}}


def _row(
    cell: Cell, found: dict[Cell, dict[str, list[float]]], weight_seconds: float, speed: float
) -> dict[str, Any]:
    own = found[cell]
    roofline = weight_seconds + own["bytes"][0] / speed
    beside = {arm: found.get(replace(cell, arm=arm, retain=1.0)) for arm in AGAINST}
    several: dict[str, list[float]] = {
        "tokens_per_s": [cell.batch / x for x in own["step"]],
        "ms_step": [1e3 * x for x in own["step"]],
        "ms_attention": [1e3 * x for x in own["attention"]],
        "ms_append": [1e3 * x for x in own["append"]],
        "ms_other": [1e3 * x for x in own["other"]],
        "peak_bytes": own["peak"],
        "of_roofline": [x / roofline for x in own["step"]],
    }
    speedups = {
        arm: [theirs / ours for theirs, ours in zip(other["step"], own["step"], strict=True)]
        for arm, other in beside.items()
        if other is not None
    }
    medians = {name: statistics.median(values) if values else None for name, values in several.items()}
    return {
        **vars(cell),
        "status": "measured",
        **dict.fromkeys(NUMBERS),
        **medians,
        "bytes": int(own["bytes"][0]),
        "roofline": 1e3 * roofline,
        "speedup": {arm: statistics.median(values) for arm, values in speedups.items()},
        "spread": {
            **{name: [min(values), max(values)] for name, values in several.items() if values},
            "speedup": {arm: [min(values), max(values)] for arm, values in speedups.items()},
        },
    }


# Caches of random entries


@torch.inference_mode()
def form(model: Any, arm: str) -> Entries:
    """What ``arm`` leaves in the first compressible layer of a short real prompt: shapes and dtypes for :func:`filled`."""
    cache = make_cache(model, arm, retain=0.5)
    ids = torch.arange(PROBE, device=model.device)[None] % model.config.get_text_config().vocab_size
    model(ids, cache=cache, logits_to_keep=1)
    entries = cache.compressed_layers()[0].unstacked()[0].entries
    assert entries is not None
    return entries


def filled(like: Entries, n: int, m: int) -> Entries:
    """m random entries of a prompt of n tokens, with the heads and dtypes of ``like``."""

    def normal(tensor: Tensor) -> Tensor:  # [Hkv, m, D]
        return torch.randn(tensor.shape[0], m, tensor.shape[2], dtype=tensor.dtype, device=tensor.device)

    positions = torch.arange(m, device=like.keys.device) * n // m
    bias = like.bias
    if bias is not None:
        bias = torch.rand(bias.shape[0], m, dtype=bias.dtype, device=bias.device)
    return Entries(normal(like.keys), normal(like.values), positions.repeat(like.positions.shape[0], 1), bias)


def filled_cache(model: Any, cell: Cell, entries: Entries) -> Any:
    """The cache of ``cell`` as it stands after a prompt: stock layers hold the entries, ours their ``Rows``."""
    stock = STOCK.get(cell.arm)
    model.set_attn_implementation(stock or IMPLEMENTATION)
    cache: Any = (
        DynamicCache(config=model.config.get_text_config(decoder=True))
        if stock
        else make_cache(model, cell.arm, retain=cell.retain)
    )
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            (arm,) = layer.arms
            untouched = arm.method.untouched(cell.context, len(entries))
            layer.prompt = [
                Row(arm, cell.context, len(entries), untouched, entries, entries.positions.clone())
                for _ in range(cell.batch)
            ]
            layer.seen, layer.stock = cell.context, untouched
            continue
        sliding = isinstance(
            layer, DynamicSlidingWindowLayer
        )  # holds what its window needs, under every method
        held = (
            filled(entries, cell.context, min(cell.context, layer.sliding_window - 1)) if sliding else entries
        )
        layer.update(*(x.expand(cell.batch, -1, -1, -1) for x in (held.keys, held.values)))
        if sliding:
            layer.cumulative_length = cell.context
    return cache


def _bytes_held(cache: Any) -> int:
    """Bytes of the entries in all layers and rows; stacks the rows of ours."""
    if isinstance(cache, DynamicCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return sum(line["bytes_used"] for line in cache.report())


def _needed(model: Any, like: Entries, cell: Cell) -> int:
    """Bytes that a cell takes at most: its entries, and as many layers more as stock eager repeats keys and values for."""
    config = model.config.get_text_config(decoder=True)
    heads, layers = like.kv_heads, config.num_hidden_layers
    entry = heads * (like.keys.shape[2] + like.values.shape[2]) * like.keys.element_size()
    entry += 0 if like.bias is None else like.bias.shape[0] * like.bias.element_size()
    layer = cell.batch * Budget(cell.retain).resolve(cell.context) * entry
    return layer * (layers + 1 + config.num_attention_heads // heads)


# One turn


@torch.inference_mode()
def _measure(model: Any, cell: Cell, like: Entries) -> dict[str, float]:
    """Build the cell's cache and decode: seconds a step and of its parts, bytes, peak bytes (absent where unknown)."""
    entries = filled(like, cell.context, Budget(cell.retain).resolve(cell.context))
    ids = torch.zeros(cell.batch, 1, dtype=torch.long, device=model.device)
    with _peak(model.device) as peak:
        cache = filled_cache(model, cell, entries)
        held = _bytes_held(cache)

        def step() -> float:
            return seconds_of(model.device, lambda: model(ids, cache=cache))

        first = step()  # warms up, and says how many fit
        steps = min(max(STEPS[0], round(SECONDS / first)), STEPS[1])
        seconds = statistics.median_low([step() for _ in range(steps)])  # of two the one that did not grow
        with timed_parts(model, cache) as parts:
            split = []
            for _ in range(SPLIT):
                parts.clear()
                whole = step()
                split.append((parts["attention"], parts["append"], whole - sum(parts.values())))
    growth = _growth(cache, model.device)
    attention, append, other = (statistics.median_low(part) for part in zip(*split, strict=True))
    return {
        "step": seconds + growth, "attention": attention, "append": append + growth, "other": other, "bytes": held,
        **({} if peak[0] is None else {"peak": peak[0]}),
    }  # fmt: skip


@contextmanager
def timed_parts(model: Any, cache: Any) -> Iterator[dict[str, float]]:
    """Sum the seconds of "append" and "attention" of every layer while inside.

    Seen from the borders that all these models share: a layer hands the new token to ``cache.update``, attends, and
    runs its output projection.  Ours stores the token while attending, in ``Rows.append``.
    """
    parts: dict[str, float] = defaultdict(float)
    left = 0.0  # when ``update`` returned

    def timed(call: Callable[..., Any], within: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            started = _now(model.device)
            result = call(*args, **kwargs)
            ended = _now(model.device)
            parts["append"] += ended - started
            if within:  # of attention, which is timed around it
                parts["attention"] -= ended - started
            else:
                left = ended
            return result

        return wrapped

    def projects(*_: Any) -> None:
        parts["attention"] += _now(model.device) - left

    hooks = [
        module.o_proj.register_forward_pre_hook(projects)
        for module in model.modules()
        if hasattr(module, "o_proj")
    ]
    watched = [(cache, "update"), *((rows, "append") for rows in _rows(cache))]
    for owner, name in watched:
        setattr(owner, name, timed(getattr(owner, name), within=owner is not cache))
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()
        for owner, name in watched:
            delattr(owner, name)  # the class's method is back


def _rows(cache: Any) -> list[Rows]:
    """What our layers hold; none of a stock cache."""
    return [layer.rows for layer in cache.layers if isinstance(layer, CompressedLayer) and layer.rows]


def _growth(cache: Any, device: torch.device) -> float:
    """Seconds a step that growing costs: the copy into a larger buffer, over the steps that then need none."""
    layers = _rows(cache)
    if not layers:
        return 0.0  # stock layers copy at every step, in ``update``
    rows = layers[-1]
    capacity = rows.keys.shape[2]
    new = rows.keys[:, :, : capacity - rows.length + 1].clone()
    started = _now(device)
    rows.append(new, new)
    return (_now(device) - started) * len(layers) / (rows.keys.shape[2] - capacity)


# The machine


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds from an idle device to an idle device; on CUDA as its own events tell."""
    if device.type != "cuda":
        started = _now(device)
        call()
        return _now(device) - started
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def gpu_of(device: torch.device) -> dict[str, str]:
    """Its name, where it is one."""
    return {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def _bandwidth(device: torch.device) -> float:
    """Bytes a second of reading a large tensor with all threads: the median of five sums."""
    large = torch.ones(READ, device=device)
    return large.nbytes / statistics.median(seconds_of(device, large.sum) for _ in range(5))


def _memory(device: torch.device) -> int:
    """Bytes of the machine's, or the device's, memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all but an embedding table of its own, of which it reads a row a token."""
    table, head = (x().weight for x in (model.get_input_embeddings, model.get_output_embeddings))
    whole = sum(weight.nbytes for weight in model.parameters())
    return whole if head is table else whole - table.nbytes


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int | None]]:
    """Most bytes held while inside, above those held before; read from the list afterwards."""
    found: list[int | None] = [None]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(device) - before
        return
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):  # only Linux tells a peak since a moment
        yield found
        return
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve now
    reset.write_text("5")
    before = _status("VmRSS")
    yield found
    found[0] = _status("VmHWM") - before


def _status(field: str) -> int:
    """A line of the process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def text(found: dict[str, Any]) -> str:
    """The same for a person: medians, a block for each context and batch."""
    machine = found["machine"]
    lines = [
        f"{machine['model']}, {machine['dtype']}, {machine['threads']} threads, reading at "
        f"{machine['bandwidth'] / 1e9:.1f} GB/s; milliseconds a step of one token a row"
    ]
    for row, before in zip(found["rows"], [None, *found["rows"]], strict=False):
        if before is None or (row["context"], row["batch"]) != (before["context"], before["batch"]):
            lines += [
                f"\n{row['context']} tokens, batch {row['batch']}",
                f"{'arm':<13}{'kept':>5}{'tokens/s':>10}{'step':>9}{'attention':>11}{'append':>8}{'other':>8}"
                f"{'MB':>9}{'peak MB':>9}  roofline   times faster than {', '.join(AGAINST)}",
            ]
        start = f"{row['arm']:<13}{row['retain']:>5.0%}"
        if row["status"] != "measured":
            lines.append(f"{start}  {row['status']}")
            continue
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        faster = "  ".join(_faster(row, arm) for arm in AGAINST)
        lines.append(
            f"{start}{row['tokens_per_s']:>10.2f}{row['ms_step']:>9.1f}{row['ms_attention']:>11.1f}"
            f"{row['ms_append']:>8.2f}{row['ms_other']:>8.1f}{row['bytes'] / 1e6:>9.0f}{peak:>9}"
            f"{row['of_roofline']:>9.2f}x   {faster}"
        )
    return "\n".join(lines)


def _faster(row: dict[str, Any], arm: str) -> str:
    if arm not in row["speedup"]:
        return "–"
    low, high = row["spread"]["speedup"][arm]
    return f"{row['speedup'][arm]:.2f} ({low:.2f} to {high:.2f})"
