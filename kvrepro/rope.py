"""Un-rotate and re-rotate keys, with the model's own tables.

Keys are merged before RoPE: the cache holds them rotated, so a merge un-rotates its members, merges and rotates the
result once at the slot's position.  Half-precision keys lose 0.3 to 0.4 % when un-rotated, so it is done in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import UserError


class Rope:
    """Rotary tables of one layer.

    Parameters
    ----------
    tables : callable
        positions [1, m] (int64), dtype -> cos, sin [1, m, R] as the model computes them, R <= D rotated channels.
    changes : bool
        The tables depend on the sequence's length (dynamic NTK, longrope): a stored key cannot be un-rotated.
    """

    def __init__(self, tables: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]], changes: bool = False):
        self._tables = tables
        self._changes = changes

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [..., m, R] at ``positions`` [..., m] (int64)."""
        if self._changes:
            raise UserError(
                "this model's rotary embedding changes with the sequence length, so stored keys cannot be un-rotated; "
                "use a method that leaves keys where they are (streaming-llm, snapkv, selkv without reposition)"
            )
        cos, sin = self._tables(positions.reshape(1, -1), dtype)
        shape = (*positions.shape, cos.shape[-1])
        return cos.reshape(shape), sin.reshape(shape)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [..., m, D] before RoPE -> rotated to ``positions`` [..., m]."""
        cos, sin = self.tables(positions, keys.dtype)
        return _apply(keys, cos, sin)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The inverse of :meth:`rotate`; exact also where cos and sin carry a scaling factor (yarn)."""
        cos, sin = self.tables(positions, keys.dtype)
        square = cos.square() + sin.square()  # attention_scaling²: 1 for most models, not for yarn
        return _apply(keys, cos / square, -sin / square)


def _apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]  # rest: channels without RoPE (Phi-3)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
