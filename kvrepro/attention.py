"""Attention over entries, and the statistics that methods read from it.

The group's query heads are folded into the query axis, [B, Hkv, G·Q, D], and attend against [B, Hkv, n, D] directly:
KV heads are never repeated.  Statistics of a whole prompt are always taken in blocks: no n x n matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .entries import Entries
from .rope import Rope

SAMPLE_BLOCK = 64  # sampled queries a block: fewer, and they all see about the same part of the prompt
QUERY_BLOCK = 256  # queries a block of whole-prompt statistics, at most: [H, 256, n] floats at a time
BLOCK_FLOATS = {"cpu": 2**21, "cuda": 2**26}  # what stays in a CPU's cache; what fills a GPU


def at_least_float32(tensor: Tensor) -> Tensor:
    """Scores are computed in float32 (pitfall: float16 overflows), float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Gemma 2's cap; biases are added after it."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def query_block(width: int, device: torch.device) -> int:
    """Queries a block, where each has ``width`` = H·n floats of statistics."""
    return max(16, min(QUERY_BLOCK, BLOCK_FLOATS.get(device.type, 2**26) // width))


def fold(query: Tensor, kv_heads: int) -> Tensor:
    """[B, H, Q, D] -> [B, Hkv, G·Q, D]; query head h belongs to KV head h // G."""
    batch, heads, length, width = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads * length, width)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of Q new tokens over n entries, of which the new tokens are the last Q.

    Parameters
    ----------
    query : Tensor [B, H, Q, D]
    keys, values : Tensor [B, Hkv, n, D]
    bias : Tensor [B, Hkv or 1, n] or None
        Added to the logits (after the soft cap); -inf marks a missing entry.

    Returns
    -------
    Tensor [B, H, Q, D]
    """
    batch, heads, length, _ = query.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    folded = fold(query, kv_heads)
    mask = None if bias is None else bias[:, :, None, :]  # [B, Hkv | 1, 1, n]
    if length > 1:  # causality among the new tokens; earlier entries are seen by all
        causal = causal_tail(length, n, folded.device, torch.promote_types(query.dtype, torch.float32))
        causal = causal.repeat(heads // kv_heads, 1)  # [G·Q, n], as the folded queries lie
        mask = causal if mask is None else mask + causal
    if softcap is None:
        if mask is not None and query.device.type != "cpu":
            mask = mask.to(query.dtype)  # CUDA kernels want the query's dtype, the CPU's takes float32
        out = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
    else:
        logits = softcapped(folded @ keys.transpose(2, 3) * scaling, softcap)
        logits = logits if mask is None else logits + mask
        out = torch.softmax(at_least_float32(logits), -1).to(query.dtype) @ values
    return out.reshape(batch, heads, length, values.shape[-1])


def causal_tail(length: int, n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[Q, n] with -inf where query t (entry n - Q + t) would see a later entry."""
    mask = torch.full((length, n), -torch.inf, device=device, dtype=dtype)
    return mask.triu_(n - length + 1)


def attend_causal(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Causal attention of a whole prompt with its logsumexp, from one kernel; None where no such kernel fits.

    query [B, H, n, D], keys, values [B, Hkv, n, D] -> output [B, H, n, D] (``torch.equal`` to SDPA's) and
    logsumexp [B, H, n].  The operators are private to torch, so this is the only place that names them.
    """
    if keys.shape[-1] != values.shape[-1]:
        return None
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, True, scale=scaling
        )
        return out, lse
    if (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
    ):
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, True, False, scale=scaling
        )
        return out, lse
    return None


@dataclass
class Observed:
    """What a layer saw while attending; statistics are computed on demand, in blocks, once for all methods.

    One row: the last q of the n attended entries are the queries' own tokens, so query t sees the first
    n - q + t + 1 entries.

    Attributes
    ----------
    queries : Tensor [H, q, D]
        Rotated.
    scaling, softcap : float, float or None
    rope : Rope
    layer, layers : int
        Index of this layer among the compressible ones, and their number.
    logsumexp : Tensor [H, q] or None
        From the attention kernel, over all entries a query sees; None: computed when needed.
    probabilities, output : Tensor [Hkv, G·q, n], [Hkv, G·q, D] or None
        The attention itself and its output, at hand where a chunked method's chunk is computed (not where the
        chunk waits for its gradient: a map a layer would be kept).
    gradient : Tensor [Hkv, past, D] or None
        Of the chunk's mean next-token loss by the rotated keys stored before it, for methods that ask for it.
    """

    queries: Tensor
    scaling: float
    rope: Rope
    softcap: float | None = None
    layer: int = 0
    layers: int = 1
    logsumexp: Tensor | None = None
    probabilities: Tensor | None = None
    output: Tensor | None = None
    gradient: Tensor | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def heads(self) -> int:
        return self.queries.shape[0]

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Methods that share a prefill share its statistics."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def received(self, entries: Entries) -> Tensor:
        """Attention that each entry receives, summed over all queries and the group's heads: [Hkv, n]."""
        if self.probabilities is not None:
            return self.probabilities.sum(1)
        return self.column_mass(entries).sum(1)

    def column_mass(self, entries: Entries, last: int | None = None) -> Tensor:
        """Σ over the last ``last`` queries (None: all) of softmax attention, per query head: [Hkv, G, n]."""
        total = self.queries.shape[1]
        last = total if last is None else min(last, total)
        return self.once(("column", last), lambda: self._column_mass(entries, total - last))

    def _column_mass(self, entries: Entries, start: int) -> Tensor:
        total = self.queries.shape[1]
        group = self.heads // entries.kv_heads
        mass = at_least_float32(entries.keys).new_zeros(entries.kv_heads, group, len(entries))
        block = query_block(self.heads * len(entries), mass.device)
        for begin in range(start, total, block):
            stop = min(begin + block, total)
            seen = len(entries) - total + stop
            mass[:, :, :seen] += self.weights(entries, begin, stop, seen).sum(2)
        return mass

    def sampled_mass(self, entries: Entries, count: int | None) -> Tensor:
        """The same for ``count`` queries evenly spread over the prompt (None, or no fewer than there are: all).

        Only for entries without a bias, as a prompt's are before anything was compressed.
        """
        total = self.queries.shape[1]
        if count is None or count >= total:
            return self.column_mass(entries)
        return self.once(("sampled", count), lambda: self._sampled_mass(entries, count))

    def _sampled_mass(self, entries: Entries, count: int) -> Tensor:
        total, n, device = self.queries.shape[1], len(entries), self.queries.device
        group = self.heads // entries.kv_heads
        keys = at_least_float32(entries.keys)
        mass = keys.new_zeros(entries.kv_heads, group, n)
        rows = (
            (torch.arange(count, device=device) * 2 + 1) * total // (2 * count)
        )  # the middle of each stretch
        for block in rows.split(SAMPLE_BLOCK):
            first, seen = n - total + int(block[0]) + 1, n - total + int(block[-1]) + 1
            query = fold(at_least_float32(self.queries[None, :, block]) * self.scaling, entries.kv_heads)[0]
            logits = softcapped(query @ keys[:, :seen].transpose(1, 2), self.softcap)
            logits = logits.view(entries.kv_heads, group, len(block), seen)
            later = torch.arange(first, seen, device=device) > n - total + block[:, None]
            logits[..., first:].masked_fill_(later, -torch.inf)
            if self.logsumexp is None:
                whole = logits.logsumexp(-1)
            else:
                whole = at_least_float32(self.logsumexp[:, block]).view_as(logits[..., 0])
            mass[:, :, :seen] += logits.sub_(whole[..., None]).exp_().sum(2)
        return mass

    def _logits(self, entries: Entries, begin: int, stop: int, seen: int) -> Tensor:
        """Logits of queries begin..stop-1 over the first ``seen`` entries: [Hkv, G, stop - begin, seen]."""
        query = fold(at_least_float32(self.queries[None, :, begin:stop]) * self.scaling, entries.kv_heads)[0]
        logits = softcapped(query @ at_least_float32(entries.keys[:, :seen]).transpose(1, 2), self.softcap)
        if entries.bias is not None:
            logits += entries.bias[:, None, :seen]
        logits = logits.view(entries.kv_heads, -1, stop - begin, seen)
        own = logits[..., seen - (stop - begin) :]  # only the queries' own columns need the causal mask
        own += causal_tail(stop - begin, stop - begin, logits.device, logits.dtype)
        return logits

    def weights(self, entries: Entries, begin: int, stop: int, seen: int) -> Tensor:
        """Softmax attention of queries begin..stop-1 over the first ``seen`` entries: [Hkv, G, stop - begin, seen]."""
        return torch.softmax(self._logits(entries, begin, stop, seen), -1)

    def row_logsumexp(self, entries: Entries) -> Tensor:
        """logsumexp of every query: [H, q], from the kernel or, where there was none, in blocks."""
        if self.logsumexp is None:
            total = self.queries.shape[1]
            blocks = []
            block = query_block(self.heads * len(entries), self.queries.device)
            for begin in range(0, total, block):
                stop = min(begin + block, total)
                logits = self._logits(entries, begin, stop, len(entries) - total + stop)
                blocks.append(logits.logsumexp(-1).flatten(0, 1))
            self.logsumexp = torch.cat(blocks, 1)
        return self.logsumexp

    def bands(self, entries: Entries, width: int) -> Tensor:
        """Attention within buckets of ``width`` positions, summed over the group: [Hkv, buckets, width, width].

        Element [h, b, j, i] is Σ over the group's heads of A[width·b + j, width·b + i], 0 where i > j; rows past
        the prompt's end mean nothing.  Only for a prompt observed whole (as many queries as entries).
        """
        return self.once(("bands", width), lambda: self._bands(entries, width))

    def _bands(self, entries: Entries, width: int) -> Tensor:
        n = len(entries)
        short = -n % width
        lse = torch.nn.functional.pad(at_least_float32(self.row_logsumexp(entries)), (0, short))  # [H, n']
        query = torch.nn.functional.pad(at_least_float32(self.queries), (0, 0, 0, short))  # [H, n', D]
        keys = torch.nn.functional.pad(at_least_float32(entries.keys), (0, 0, 0, short))
        query = query.reshape(
            entries.kv_heads, -1, (n + short) // width, width, query.shape[-1]
        )  # [Hkv, G, b, w, D]
        keys = keys.reshape(entries.kv_heads, 1, -1, width, keys.shape[-1]).transpose(3, 4)
        logits = softcapped(query @ keys * self.scaling, self.softcap)  # [Hkv, G, b, w, w]
        weights = torch.exp(logits - lse.reshape(*query.shape[:4], 1))
        valid = torch.ones(width, width, dtype=torch.bool, device=weights.device).tril()
        return torch.where(valid, weights, 0).sum(1)


def attend_observed(entries: Entries, observed: Observed) -> Tensor:
    """Attention of a chunk over the stored entries and itself, keeping its probabilities for the method.

    Sets ``observed.probabilities`` [Hkv, G·q, n] and ``observed.output`` [Hkv, G·q, D], and returns the output
    as [H, q, D] in the queries' dtype.
    """
    length, n = observed.queries.shape[1], len(entries)
    observed.probabilities = observed.weights(entries, 0, length, n).flatten(1, 2)
    observed.output = observed.probabilities @ at_least_float32(entries.values)
    return observed.output.reshape(observed.heads, length, -1).to(observed.queries.dtype)
