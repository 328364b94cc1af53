"""How fast one new token reads entries with a bias: the kernels that `attention.BIASED` knows, on one layer.

Every call has one entry more than the one before, as decoding has: a kernel that plans anew for each length pays here what
it pays there.  `unbiased` is the same cache without a bias, what eviction pays; `channel` finds the bias stored among the
keys' channels.  The kernels take turns, and a ratio is taken within a turn.

kvrepro bench kernels --shape llama-3.1-8b --device cuda --context 1024 32768 131072
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from .. import models, results
from ..attention import BIASED, attend_channels, with_channels
from ..costs import SHAPES
from ..errors import UserError
from ..methods import Budget
from ..progress import progress
from .decode import gpu_of, seconds_of

CALLS = 16  # a turn of a kernel, one entry more each
WARM_UP = 4  # calls before the first turn: a compiled kernel is compiled
LARGEST = 10.0  # of a bias; α log R and log l stay below

Kernel = Callable[[int], Tensor]  # n -> attention over the first n entries, [B, Hkv, G, D]


def run(
    shape_name: str = "llama-3.1-8b",
    *,
    contexts: Sequence[int] = (1024, 8192, 32768, 131072),
    batches: Sequence[int] = (1, 8),
    retain: float = 0.25,
    repeats: int = 3,
    device: str = "cpu",
    dtype: str | None = None,
) -> dict[str, Any]:
    """Time every kernel on random entries of a shape of ``costs.SHAPES``.

    Returns
    -------
    dict
        ``machine`` and ``rows``: kernel, context, batch, entries (held of the context), ``status`` ("measured", or why
        not), ``microseconds`` a call, ``gigabytes_per_s`` of keys, values and bias, ``to_masked`` (the time over that of
        `masked` in the same turn), each with its ``spread`` [low, high] over the repeats; ``error``, the largest
        difference from float64 attention in the first row, relative to the largest output; ``backend``, which of its
        kernels torch takes, where it is left to choose.

    Raises
    ------
    UserError
        An unknown shape, dtype or device.
    """
    if shape_name not in SHAPES:
        raise UserError(f"no shape is called {shape_name!r}; there are {', '.join(SHAPES)}")
    kind, where = models._dtype(dtype or "bfloat16"), torch.device(models._device(device))
    assert isinstance(kind, torch.dtype)
    rows = []
    for context in dict.fromkeys(contexts):
        for batch in dict.fromkeys(batches):
            rows += _cell(shape_name, context, batch, Budget(retain).resolve(context), repeats, where, kind)
    machine = results.versions() | gpu_of(where) | {
        "device": device, "dtype": str(kind).removeprefix("torch."), "shape": shape_name,
        "threads": torch.get_num_threads(), "repeats": repeats,
    }  # fmt: skip
    return {"machine": machine, "rows": rows}


@torch.inference_mode()
def _cell(
    shape_name: str,
    context: int,
    batch: int,
    held: int,
    repeats: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    shape = SHAPES[shape_name]
    room, scaling = held + WARM_UP + repeats * CALLS, shape.head_dim**-0.5

    def normal(length: int) -> Tensor:
        return torch.randn(batch, shape.kv_heads, length, shape.head_dim, dtype=dtype, device=device)

    query, keys, values = normal(shape.heads // shape.kv_heads), normal(room), normal(room)
    bias = LARGEST * torch.rand(batch, 1, room, device=device)
    kernels, backends = _kernels(query, keys, values, bias, scaling)
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for name, kernel in kernels.items():
        try:
            for n in range(held, held + WARM_UP):
                out = kernel(n)
            errors[name] = _error(
                out[0], query[0], keys[0, :, :n], values[0, :, :n], bias[0, :, :n], scaling, name
            )
        except (RuntimeError, NotImplementedError) as error:  # no such kernel for this shape, dtype or device
            failed[name] = "not possible: " + str(error).strip().splitlines()[0]
    for turn in progress(range(repeats), f"kernels, {context} tokens, batch {batch}"):
        first = held + WARM_UP + turn * CALLS
        for name, kernel in kernels.items():
            if name not in failed:
                found[name].append(seconds_of(device, partial(_calls, kernel, first)) / CALLS)
    read = held * batch * (2 * shape.kv_heads * shape.head_dim * dtype.itemsize + bias.element_size())
    rows = []
    for name, seconds in found.items():
        row = {
            "kernel": name, "context": context, "batch": batch, "entries": held, "status": failed.get(name, "measured"),
            "backend": backends.get(name), "error": errors.get(name),
        }  # fmt: skip
        several = {
            "microseconds": [1e6 * x for x in seconds],
            "gigabytes_per_s": [read / x / 1e9 for x in seconds],
        }
        several["to_masked"] = [x / y for x, y in zip(seconds, found["masked"], strict=False)]
        row |= {key: statistics.median(numbers) if numbers else None for key, numbers in several.items()}
        rows.append(row | {"spread": {key: [min(x), max(x)] for key, x in several.items() if x}})
    return rows


def _calls(kernel: Kernel, first: int) -> None:
    for n in range(first, first + CALLS):
        kernel(n)


def _kernels(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float
) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Each kernel as a function of the number of entries, and torch's own choices by name."""

    def biased(call: Callable[..., Tensor]) -> Kernel:
        return lambda n: call(query, keys[:, :, :n], values[:, :, :n], bias[:, :, :n], scaling)

    wide_keys, wide_values = with_channels(keys, values, bias)
    kernels: dict[str, Kernel] = {name: biased(call) for name, call in BIASED.items()}
    kernels["channel"] = lambda n: attend_channels(query, wide_keys[:, :, :n], wide_values[:, :, :n], scaling)
    kernels["unbiased"] = lambda n: scaled_dot_product_attention(
        query, keys[:, :, :n], values[:, :, :n], scale=scaling
    )
    mask = bias[:, :, None].to(query.dtype)
    choices = {
        name: torch._fused_sdp_choice(query, keys, values, given, 0.0, False, scale=scaling)
        for name, given in (("masked", mask), ("unbiased", None))
    }
    return kernels, {name: SDPBackend(int(choice)).name.lower() for name, choice in choices.items()}


def _error(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, name: str
) -> float:
    """Largest difference of a row, [Hkv, G, D], from float64 attention, relative to its largest value."""
    logits = query.double() @ keys.double().transpose(1, 2) * scaling
    logits = logits if name == "unbiased" else logits + bias[:, None].double()
    expected = logits.softmax(-1) @ values.double()
    return float((out - expected).abs().max() / expected.abs().max())


def text(found: dict[str, Any]) -> str:
    """The same for a person, a block for each context and batch."""
    machine = found["machine"]
    lines = [f"{machine['shape']}, one layer, {machine['dtype']} on {machine['device']}; one new token a row"]
    for row, before in zip(found["rows"], [None, *found["rows"]], strict=False):
        if before is None or (row["context"], row["batch"]) != (before["context"], before["batch"]):
            lines += [
                f"\n{row['entries']} entries of {row['context']} tokens, batch {row['batch']}",
                f"{'kernel':<10}{'µs':>9}{'GB/s':>8}{'error':>10}   over masked",
            ]
        if row["status"] != "measured":
            lines.append(f"{row['kernel']:<10}  {row['status']}")
            continue
        line = f"{row['kernel']:<10}{row['microseconds']:>9.0f}{row['gigabytes_per_s']:>8.0f}{row['error']:>10.1e}"
        if row["to_masked"] is not None:
            low, high = row["spread"]["to_masked"]
            line += f"   {row['to_masked']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(line + (f"  {row['backend']}" if row["backend"] else ""))
    return "\n".join(lines)
