"""RoPE repositioning: re-rotate kept keys to consecutive positions."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..attention import at_least_float32
from ..entries import Entries
from ..rope import Rope


def repositioned(entries: Entries, n: int, rope: Rope) -> Entries:
    """``entries`` (m of n tokens) with their keys at positions n-m..n-1.

    RoPE is relative, so this equals positions 0..m-1 with queries from m on, and decoding needs no change.
    """
    m = len(entries)
    target = torch.arange(n - m, n, device=entries.keys.device).expand(entries.positions.shape[0], m)
    keys = rope.unrotate(at_least_float32(entries.keys), entries.positions)
    return replace(entries, keys=rope.rotate(keys, target).to(entries.keys.dtype), positions=target)
