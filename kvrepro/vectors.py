"""Known-answer files: small inputs and what each method makes of them, to check another implementation against.

    kvrepro vectors DIR

``inputs-gqa.json`` and ``inputs-mha.json`` hold one prompt in one layer (float64): queries [H, n, D] and keys
[Hkv, n, D] rotated, values [Hkv, n, D], scaling, the budget m, and the rotary tables' base (Llama's, D channels).
``METHOD[+ARM]-gqa.json`` holds the entries after compression: positions, keys, values, bias, mass, and diagnostics.
The tests compare both with naive loops and with the files in data/vectors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import Observed, attend_observed
from .entries import Entries
from .methods import Method, available, make, method_class
from .results import write_atomic
from .rope import Rope

SHAPES = {"gqa": (4, 2), "mha": (2, 2)}
TOKENS, WIDTH, BUDGET, BASE = 72, 4, 36, 10000.0


def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Llama's rotary tables, cos and sin [..., D]."""
    frequency = BASE ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angle = positions[..., None].double() * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def inputs(shape: str) -> dict[str, Any]:
    """A prompt [H, n, D] made of sines rather than of a random generator, so that any language can make it again."""
    heads, kv_heads = SHAPES[shape]

    def wave(count: int, a: float, b: float) -> Tensor:
        index = torch.arange(count * TOKENS * WIDTH, dtype=torch.float64)
        return (
            (2 * torch.sin(a * index + b * index**2 / 1000)).round(decimals=6).reshape(count, TOKENS, WIDTH)
        )

    return {
        "queries": wave(heads, 1.7, 0.31).tolist(),
        "keys": wave(kv_heads, 2.3, 0.17).tolist(),
        "values": wave(kv_heads, 0.9, 0.53).tolist(),
        "scaling": WIDTH**-0.5,
        "budget": BUDGET,
        "rope_base": BASE,
    }


def answer(method: Method, given: dict[str, Any]) -> dict[str, Any]:
    """What the method holds after the prompt ``given``."""
    queries, keys, values = (
        torch.tensor(given[x], dtype=torch.float64) for x in ("queries", "keys", "values")
    )
    positions = torch.arange(keys.shape[1])[None]
    rope, m = Rope(tables), given["budget"]
    entries: Entries | None = None
    diagnostics: dict[str, float] = {}
    outputs, start = [], 0
    for size in method.chunks(keys.shape[1], m):
        piece = slice(start, start + size)
        fresh = (keys[:, piece], values[:, piece], positions[:, piece])
        entries = Entries(*fresh) if entries is None else entries.extend(*fresh)
        observed = Observed(queries[:, piece], given["scaling"], rope)
        outputs.append(attend_observed(entries, observed))
        if not method.untouched(keys.shape[1], m):
            entries, found = method.compress(entries, observed, m)
            diagnostics = {name: diagnostics.get(name, 0) + number for name, number in found.items()}
        start += size
    assert entries is not None
    return {
        "positions": entries.positions.expand(entries.kv_heads, -1).tolist(),
        "keys": entries.keys.tolist(),
        "values": entries.values.tolist(),
        "bias": None if entries.bias is None else entries.bias.expand(entries.kv_heads, -1).tolist(),
        "mass": None if entries.mass is None else entries.mass.tolist(),
        "attention_output": torch.cat(outputs, 1).tolist() if method.schedule == "chunked" else None,
        "diagnostics": diagnostics,
    }


def cases() -> list[str]:
    """Every method and arm that works inside the forward pass."""
    names = [name for name in available() if method_class(name).schedule != "driven"]
    return [case for name in names for case in (name, *(f"{name}/{arm}" for arm in method_class(name).arms))]


def write(folder: str | Path) -> list[Path]:
    """Write all files into ``folder`` and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []

    def put(name: str, content: dict[str, Any]) -> None:
        paths.append(folder / name)
        write_atomic(paths[-1], (json.dumps(content) + "\n").encode())

    for shape in SHAPES:
        given = inputs(shape)
        put(f"inputs-{shape}.json", given)
        for case in cases():
            method = make(case)
            settings = {"method": case, "settings": method.settings}
            put(f"{case.replace('/', '+')}-{shape}.json", settings | answer(method, given))
    return paths
