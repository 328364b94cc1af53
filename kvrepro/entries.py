"""A compressed cache is a weighted set of entries: the one idea that carries every method.

``Entries`` is what one layer holds of one sample: a method takes it and returns a smaller one.
``Rows`` is the same for a batch, dense and growing, as attention reads it while decoding.

Attention over entries is softmax(q·k·scaling + bias)·value.  Eviction has no bias (None), SelKV has α log R,
KVSlimmer log l with mean values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .errors import UserError

BLOCK = 256  # spare capacity in tokens: growing by blocks costs one copy in 256 steps, torch.cat one a step
SHARE = 16  # a long cache grows by this part of its length, so that the copy stays under a percent of a step


@dataclass(frozen=True)
class Entries:
    """What one layer holds of one sample.

    Attributes
    ----------
    keys, values : Tensor [Hkv, m, D]
        Rotated keys and **mean** values, in the model's dtype.
    positions : Tensor [Hkv or 1, m], int64
        Logical position of each entry (padding not counted); 1 where all KV heads hold the same tokens.
    bias : Tensor [Hkv or 1, m] or None
        Added to the logits, float32 or float64; None means zero everywhere (and a faster kernel).
    mass : Tensor [Hkv, m] or None
        Cardinality l: how many tokens an entry stands for; None means one each.
    state : dict of Tensor [Hkv, m, ...]
        What a chunked method carries from chunk to chunk for each entry.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None = None
    mass: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    def take(self, index: Tensor) -> Entries:
        """The entries at ``index`` [m'] (the same for all KV heads) or [Hkv, m'] (each head its own)."""
        if index.dim() == 1:
            return Entries(
                self.keys[:, index],
                self.values[:, index],
                self.positions[:, index],
                None if self.bias is None else self.bias[:, index],
                None if self.mass is None else self.mass[:, index],
                {name: tensor[:, index] for name, tensor in self.state.items()},
            )
        return Entries(
            gather(self.keys, index),
            gather(self.values, index),
            gather(self.positions.expand(self.kv_heads, -1), index),
            None if self.bias is None else gather(self.bias.expand(self.kv_heads, -1), index),
            None if self.mass is None else gather(self.mass, index),
            {name: gather(tensor, index) for name, tensor in self.state.items()},
        )

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> Entries:
        """Append raw tokens (keys, values [Hkv, t, D], positions [1, t]); they have bias 0 and mass 1.

        State is left to the method: it knows what a fresh token's state is.
        """
        heads, new = keys.shape[0], keys.shape[1]
        positions = positions.expand(self.positions.shape[0], -1)
        return replace(
            self,
            keys=torch.cat([self.keys, keys], 1),
            values=torch.cat([self.values, values], 1),
            positions=torch.cat([self.positions, positions], 1),
            bias=None if self.bias is None else torch.nn.functional.pad(self.bias, (0, new)),
            mass=None if self.mass is None else torch.cat([self.mass, self.mass.new_ones(heads, new)], 1),
        )


def gather(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor`` [Hkv, m, ...] at ``index`` [Hkv, m'], along m."""
    index = index.reshape(*index.shape, *(1,) * (tensor.dim() - 2)).expand(*index.shape, *tensor.shape[2:])
    return tensor.gather(1, index)


def _buffer(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros that may be written in place in any mode: a prefill under inference_mode may be decoded outside it."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


class Rows:
    """The entries of a batch of rows, dense, with spare capacity for the tokens to come.

    Rows may hold different numbers of entries: all are right-aligned to the longest, and a missing entry has
    bias -inf, the only mark of validity.

    Attributes
    ----------
    keys, values : Tensor [R, Hkv, capacity, D]
    bias : Tensor [R, Hkv or 1, capacity] or None
    length : int
        Slots in use, the same for all rows.
    held : list of int
        Entries of each row; missing ones and padding not counted.
    """

    def __init__(self, rows: Sequence[Entries], held: Sequence[int] | None = None) -> None:
        """Stack ``rows``; ``held`` says how many of a row's entries are tokens, where padding was left in place."""
        longest = max(len(entries) for entries in rows)
        first = rows[0]
        heads, width = first.kv_heads, first.keys.shape[-1]
        capacity = -(-longest // BLOCK) * BLOCK if longest else BLOCK
        self.length = longest
        self.held = [len(entries) for entries in rows] if held is None else list(held)
        self.keys = _buffer(first.keys, len(rows), heads, capacity, width)
        self.values = _buffer(first.values, len(rows), heads, capacity, first.values.shape[-1])
        self.bias: Tensor | None = None
        self._slots = [len(entries) for entries in rows]
        # A row stacked with others may carry a bias it does not need, so what its own would cost is kept.
        self._bias_heads = [0 if entries.bias is None else entries.bias.shape[0] for entries in rows]
        if any(self._bias_heads) or len(set(self._slots)) > 1:
            self.bias = self._no_bias(max(1, *self._bias_heads))
        for row, entries in enumerate(rows):
            at = slice(longest - len(entries), longest)
            self.keys[row, :, at] = entries.keys
            self.values[row, :, at] = entries.values
            if self.bias is not None:
                self.bias[row, :, : at.start] = -torch.inf
                if entries.bias is not None:
                    self.bias[row, :, at] = entries.bias

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None = None, masked: bool = True) -> None:
        """Append raw tokens: keys, values [R, Hkv, t, D]; ``valid`` [R, t] bool marks padding with False.

        ``masked`` False: the model's own mask hides the padding, so no bias is needed.
        """
        if keys.shape[0] != len(self.held):
            raise UserError(
                f"the cache holds {len(self.held)} rows and the new tokens come in {keys.shape[0]}; a follow-up needs the "
                "prompt's batch size"
            )
        new = keys.shape[2]
        self._reserve(new)
        at = slice(self.length, self.length + new)
        self.keys[:, :, at] = keys
        self.values[:, :, at] = values
        whole = valid is None or bool(valid.all())
        counts = [new] * len(self.held) if whole or valid is None else valid.sum(1).tolist()
        self.held = [held + count for held, count in zip(self.held, counts, strict=True)]
        if masked and not whole and valid is not None:
            if self.bias is None:
                self.bias = self._no_bias(1)
            self.bias[:, :, at].masked_fill_(~valid[:, None], -torch.inf)
        self.length += new

    def mark(self) -> tuple[int, list[int], bool]:
        """The present state, for :meth:`rewind`."""
        return self.length, list(self.held), self.bias is None

    def rewind(self, mark: tuple[int, list[int], bool]) -> None:
        """Forget the tokens appended since ``mark``."""
        self.length, held, unbiased = mark
        self.held = list(held)
        if self.bias is not None:
            self.bias[:, :, self.length :] = 0
        if unbiased:  # zeros in its place would switch kernels
            self.bias = None

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [R, Hkv, length, D] and bias [R, Hkv or 1, length] or None, without copying."""
        bias = None if self.bias is None else self.bias[:, :, : self.length]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length], bias

    def entries(self, row: int, positions: Tensor) -> Entries:
        """One row as it was stacked: views, not copies.  Not once tokens were appended, which may be padded."""
        if self.length != max(self._slots):
            raise ValueError("tokens were appended to these rows; take them apart before decoding, or rewind")
        at = slice(self.length - self._slots[row], self.length)
        heads = self._bias_heads[row]
        bias = self.bias[row, :heads, at] if self.bias is not None and heads else None
        return Entries(self.keys[row, :, at], self.values[row, :, at], positions, bias)

    def _no_bias(self, heads: int) -> Tensor:
        dtype = torch.promote_types(
            self.keys.dtype, torch.float32
        )  # a kernel takes float64 with float64 only
        return _buffer(self.keys, self.keys.shape[0], heads, self.keys.shape[2], dtype=dtype)

    def _reserve(self, new: int) -> None:
        short = self.length + new - self.keys.shape[2]
        if short <= 0:
            return
        more = max(-(-short // BLOCK), self.length // SHARE // BLOCK) * BLOCK

        def grown(old: Tensor) -> Tensor:  # old [R, H, capacity, ...]
            new_buffer = _buffer(old, *old.shape[:2], old.shape[2] + more, *old.shape[3:], dtype=old.dtype)
            new_buffer[:, :, : old.shape[2]] = old
            return new_buffer

        self.keys, self.values = grown(self.keys), grown(self.values)
        self.bias = None if self.bias is None else grown(self.bias)

    def bytes_used(self, row: int) -> int:
        """Bytes of what one row holds: held · (Hkv·2·D·itemsize + its own bias heads·itemsize of the bias)."""
        entry = self.keys.shape[1] * (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()
        if self.bias is not None:
            entry += self._bias_heads[row] * self.bias.element_size()
        return self.held[row] * entry

    def bytes_allocated(self) -> int:
        """Bytes of the buffers, all rows together.

        Spare a row: less than a block of 256 slots, or, once they grew, a sixteenth of what the longest row holds where
        that is more.
        """
        tensors = [self.keys, self.values, *([] if self.bias is None else [self.bias])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
