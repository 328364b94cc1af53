"""Attention over entries, and the statistics that methods read from it.

The group's query heads are folded into the query axis, [B, Hkv, G·Q, D], and attend against [B, Hkv, n, D] directly:
KV heads are never repeated.  Statistics of a whole prompt are always taken in blocks: no n x n matrix exists.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from .entries import Entries
from .rope import Rope

SAMPLE_BLOCK = 64  # sampled queries a block: fewer, and they all see about the same part of the prompt
QUERY_BLOCK = 256  # queries a block of whole-prompt statistics, at most: [H, 256, n] floats at a time
BLOCK_FLOATS = {"cpu": 2**21, "cuda": 2**26}  # what stays in a CPU's cache; what fills a GPU
PART = 1024  # entries of a part, at least, where attention is split: below, merging costs more than an idle thread
ALIGNED = 16  # CUDA's kernel reads a bias from multiples of 8 entries on
CHANNELS = 8  # that carry a bias among the keys' own: flash kernels want a multiple of 8
FLOOR = -1e4  # stands for -inf there, where 0 · inf would be nan: e^-10000 is 0, and float16 can hold it
# Of ``BIASED``.  A constant and no choice at run time, so that no result depends on a timing; not measured on a GPU yet:
# `kvrepro bench kernels --device cuda` compares time and error.
ON_CUDA = "masked"


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
    if length == 1 and softcap is None and _decodes_on_cpu(query, keys, values):
        return attend_one(folded, keys, values, bias, scaling).reshape(batch, heads, 1, values.shape[-1])
    if length == 1 and softcap is None and bias is not None and query.device.type != "cpu":
        kernel = BIASED["masked" if _learns(query, keys, values) else ON_CUDA]
        return kernel(folded, keys, values, bias, scaling).reshape(batch, heads, 1, values.shape[-1])
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


def _decodes_on_cpu(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the CPU's flash kernel fits and nobody asks for gradients: none flow through its logsumexp."""
    fits = query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]
    return fits and not _learns(query, keys, values)


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float, parts: int | None = None
) -> Tensor:
    """One new token over n entries on the CPU, arranged so that all threads work: the same within rounding.

    The kernel gives a thread whole KV heads, so 3 heads keep 2 threads busy for 3/4 of the time.  Entries are
    therefore seen as ``parts`` stretches, each a head of its own, and their outputs merged by logsumexp
    (Flash-Decoding, Dao et al. 2023).  In bfloat16 its matrix products are slow for an odd number of queries, so a
    zero query joins.

    Parameters
    ----------
    query : Tensor [B, Hkv, G, D]
        Folded.
    keys, values : Tensor [B, Hkv, n, D]
    bias : Tensor [B, Hkv or 1, n] or None
    parts : int, optional
        As many as the threads need by default; 1 where there are few entries.

    Returns
    -------
    Tensor [B, Hkv, G, D]
    """
    group, n = query.shape[2], keys.shape[2]
    parts = parts_for(keys.shape[0] * keys.shape[1], n) if parts is None else parts
    if query.dtype == torch.bfloat16 and group % 2:
        query = torch.nn.functional.pad(query, (0, 0, 0, 1))
    if parts > 1:
        out = _attend_in_parts(query, keys, values, bias, scaling, parts)
    else:
        mask = None if bias is None else bias[:, :, None, :]
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
    return out[:, :, :group]


def parts_for(heads: int, n: int) -> int:
    """Parts that let ``heads`` heads (all rows') occupy all threads evenly; 1 where they would be short."""
    threads = torch.get_num_threads()
    parts = threads // math.gcd(heads, threads)
    return parts if n >= parts * PART else 1


def _attend_in_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    parts: int,
    aligned: int = 1,
) -> Tensor:
    """``parts`` parts of a multiple of ``aligned`` entries, and one more of what is left."""
    kv_heads, n = keys.shape[1], keys.shape[2]
    size = n // parts // aligned * aligned
    kernel = _flash_on_cpu if query.device.type == "cpu" else _efficient_on_cuda
    folded = query.flatten(0, 1)[:, None]  # [B·Hkv, 1, G, D]

    def attended(at: slice, count: int) -> tuple[Tensor, Tensor]:
        """The entries ``at`` as ``count`` parts: output [B·Hkv, count, G, D] and logsumexp [B·Hkv, count, G, 1]."""
        k, v = (x[:, :, at].unflatten(2, (count, -1)).flatten(0, 1) for x in (keys, values))  # views
        mask = (
            None if bias is None else bias[:, :, at].unflatten(2, (count, 1, -1))
        )  # [B, Hkv | 1, count, 1, c]
        empty = None if mask is None else mask.amax(-1, keepdim=True) == -torch.inf
        if mask is not None:
            mask = mask.expand(-1, kv_heads, -1, -1, -1).flatten(0, 1)
        out, lse = kernel(folded.expand(-1, count, -1, -1), k, v, False, scaling, mask)
        lse = lse[..., None]
        if empty is not None:  # what a kernel says of nothing is its own affair
            empty = empty.expand(-1, kv_heads, -1, -1, -1).flatten(0, 1)
            lse = lse.masked_fill(empty, torch.finfo(lse.dtype).min)
            out = out.masked_fill(empty, 0)
        return out, lse

    out, lse = attended(slice(0, parts * size), parts)
    if n > parts * size:
        last = attended(slice(parts * size, n), 1)
        out, lse = torch.cat([out, last[0]], 1), torch.cat([lse, last[1]], 1)
    return (out * torch.softmax(lse, 1)).sum(1).to(query.dtype).reshape(query.shape)


# One new token over entries with a bias, on a GPU -----------------------------------------------------------------
# All take the folded query [B, Hkv, G, D], keys and values [B, Hkv, n, D] and a bias [B, Hkv or 1, n], and return
# [B, Hkv, G, D].  They run on the CPU, too, where tests hold them against a loop.


def attend_masked(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """The bias as SDPA's mask, whose kernels want it in the query's dtype: 2^-9 of it is lost in bfloat16.

    Flash kernels take no mask.  What does either gives a multiprocessor whole heads, so that 8 KV heads leave the most
    of a GPU idle (the memory-efficient kernel), or plans anew for every length (cuDNN's): read in their sources, not
    measured here.
    """
    mask = bias[:, :, None].to(query.dtype)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=scaling)


def attend_in_parts(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, parts: int | None = None
) -> Tensor:
    """The same on the memory-efficient kernel, split as :func:`attend_one` splits: all multiprocessors work."""
    n = keys.shape[2]
    parts = parts_on_cuda(keys.shape[0] * keys.shape[1], n, query.device) if parts is None else parts
    if parts == 1 or query.dtype == torch.float64 or query.shape[-1] % 8:  # or no kernel but the plain one
        return attend_masked(query, keys, values, bias, scaling)
    bias = pad(bias.to(query.dtype), (0, -n % ALIGNED))[..., :n]
    return _attend_in_parts(query, keys, values, bias, scaling, parts, ALIGNED)


def parts_on_cuda(heads: int, n: int, device: torch.device) -> int:
    """Parts that give every multiprocessor (on a CPU: thread) about two of them; fewer where they would be short."""
    if device.type == "cpu":
        processors = torch.get_num_threads()
    else:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-2 * processors // heads), n // (PART // 4)))


def attend_flex(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Flex attention, which adds the bias in the dtype it has and splits by itself.

    Compiled on a GPU, once for every batch and not for every length; the group is the query's length, so no grouping
    of heads is asked for.
    """
    bias = bias.expand(-1, keys.shape[1], -1)
    if query.device.type == "cpu":
        with warnings.catch_warnings(action="ignore"):  # that this is slow
            return _flexed(query, keys, values, bias, scaling)
    mark_for_flex(query, keys, values, bias)
    return _compiled_flex()(query, keys, values, bias, scaling)


def mark_for_flex(query: Tensor, *growing: Tensor) -> None:
    """Say which sizes change from call to call: the entries; batch and heads the decoding kernel wants to know."""
    torch._dynamo.mark_static(query)
    for tensor in growing:  # [B, Hkv, n, ...]
        torch._dynamo.mark_static(tensor, [0, 1])
        torch._dynamo.maybe_mark_dynamic(tensor, 2)


def _flexed(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    def biased(score: Tensor, row: Tensor, head: Tensor, new: Tensor, entry: Tensor) -> Tensor:
        return score + bias[row, head, entry]

    out = flex_attention(query, keys, values, score_mod=biased, scale=scaling)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(_flexed)


BIASED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "masked": attend_masked,
    "parts": attend_in_parts,
    "flex": attend_flex,
}


def with_channels(keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, n, D + 8] that carry the bias, for :func:`attend_channels`.

    A copy of both, so this pays only where a cache stores its entries so (a sixteenth more at D = 128; the values are
    as wide as the keys because flash kernels want that).  The bias is held in two parts, which keeps 2^-17 of it in
    bfloat16, the larger one twice.
    """
    d = keys.shape[-1]
    keys, values = (pad(x, (0, CHANNELS)) for x in (keys, values))
    bias = bias.clamp(min=FLOOR)
    high = bias.to(keys.dtype)
    for channel, part in enumerate((high, bias - high, high)):
        keys[..., d + channel] = part
    return keys, values


def attend_channels(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention with a bias on a flash kernel, which takes none: q·k + bias/scaling is a longer product.

    query [B, Hkv, G, D], keys and values of :func:`with_channels` -> [B, Hkv, G, D].  1/scaling stands in two parts, too,
    and the product of the two smaller ones is left out: all in all 2^-16 of the bias.
    """
    d = query.shape[-1]
    inverse = torch.tensor(1 / scaling, dtype=torch.float64)
    high = inverse.to(query.dtype)
    query = pad(query, (0, CHANNELS))
    for channel, part in enumerate((high, high, inverse - high)):
        query[..., d + channel] = part.item()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scaling)
    return out[..., :d]


def causal_tail(length: int, n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[Q, n] with -inf where query t (entry n - Q + t) would see a later entry."""
    mask = torch.full((length, n), -torch.inf, device=device, dtype=dtype)
    return mask.triu_(n - length + 1)


def attend_causal(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Causal attention of a whole prompt with its logsumexp, from one kernel; None where no such kernel fits.

    query [B, H, n, D], keys, values [B, Hkv, n, D] -> output [B, H, n, D] (``torch.equal`` to SDPA's) and
    logsumexp [B, H, n].  The operators are private to torch: here, in ``_flash_on_cpu`` and in ``_efficient_on_cuda``
    are the only places that name them.
    """
    if keys.shape[-1] != values.shape[-1]:
        return None
    if query.device.type == "cpu":
        return _flash_on_cpu(query, keys, values, True, scaling)
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


def _flash_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D] and logsumexp [B, H, Q], which is 0 where the mask leaves a query nothing."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling
    )
    return out, lse


def _efficient_on_cuda(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same from the kernel that takes a mask; its logsumexp comes in blocks of 32 queries."""
    length = query.shape[2]
    mask = None if mask is None else mask.expand(-1, -1, length, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, mask, True, 0.0, causal, scale=scaling
    )
    return out, lse[..., :length]


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
        seen = self.probabilities
        return self.once(
            "received", lambda: self.column_mass(entries).sum(1) if seen is None else seen.sum(1)
        )

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


def attend_observed(entries: Entries, observed: Observed, keep: bool = True) -> Tensor:
    """Attention of a chunk over the stored entries and itself, with what a method reads from it.

    Sets ``observed.output`` [Hkv, G·q, D], what ``observed.received`` says and, to ``keep``,
    ``observed.probabilities`` [Hkv, G·q, n]; returns the output as [H, q, D] in the queries' dtype.
    """
    length, n, heads = observed.queries.shape[1], len(entries), entries.kv_heads
    values = at_least_float32(entries.values)
    output = values.new_empty(heads, observed.heads // heads, length, values.shape[-1])
    probabilities = values.new_empty(*output.shape[:3], n) if keep else None
    received = values.new_zeros(heads, n)
    block = query_block(observed.heads * n, values.device)
    for begin in range(0, length, block):
        stop = min(begin + block, length)
        seen = n - length + stop
        weights = observed.weights(entries, begin, stop, seen)
        if probabilities is not None:
            probabilities[:, :, begin:stop, :seen] = weights
            probabilities[:, :, begin:stop, seen:] = 0
        received[:, :seen] += weights.sum((1, 2))
        output[:, :, begin:stop] = (weights.flatten(1, 2) @ values[:, :seen]).view(*weights.shape[:3], -1)
    observed.once("received", lambda: received)
    observed.probabilities = None if probabilities is None else probabilities.flatten(1, 2)
    observed.output = output.flatten(1, 2)
    return observed.output.reshape(observed.heads, length, -1).to(observed.queries.dtype)


def attend_differentiable(
    query: Tensor, keys: Tensor, own: Tensor, entries: Entries, observed: Observed
) -> Tensor:
    """Attention of a chunk with gradients to its queries, to all keys and to its own values, but to no older value.

    What :func:`Observed.received` says comes from the way forth; the way back computes the weights again, in blocks, so
    that no layer keeps them.

    Parameters
    ----------
    query : Tensor [H, q, D]
    keys : Tensor [Hkv, n, D]
    own : Tensor [Hkv, q, D]
        The chunk's values.
    entries, observed
        The same without a graph.

    Returns
    -------
    Tensor [H, q, D]
    """
    out: Tensor = _Differentiable.apply(query, keys, own, entries, observed)
    return out


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, own: Tensor, entries: Entries, observed: Observed
    ) -> Tensor:
        out = attend_observed(entries, observed, keep=False)
        ctx.entries, ctx.observed = entries, observed
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        entries, observed, (gradient,) = ctx.entries, ctx.observed, gradients
        heads, n, length = entries.kv_heads, len(entries), observed.queries.shape[1]
        keys, values = at_least_float32(entries.keys), at_least_float32(entries.values)
        queries, gradient = (
            at_least_float32(x).reshape(heads, -1, length, x.shape[-1]) for x in (observed.queries, gradient)
        )  # [Hkv, G, q, D]
        inner = (gradient * observed.output.view_as(gradient)).sum(-1, keepdim=True)
        to_query, to_keys = torch.zeros_like(queries), torch.zeros_like(keys)
        to_own = values.new_zeros(heads, length, values.shape[-1])
        block = query_block(observed.heads * n, values.device)
        for begin in range(0, length, block):
            stop = min(begin + block, length)
            seen = n - length + stop
            query, back = (x[:, :, begin:stop].flatten(1, 2) for x in (queries, gradient))  # [Hkv, G·b, D]
            weights = observed.weights(entries, begin, stop, seen).flatten(1, 2)
            to_own[:, :stop] += weights[..., n - length :].transpose(1, 2) @ back
            slope = back @ values[:, :seen].transpose(1, 2)
            slope = slope.sub_(inner[:, :, begin:stop].flatten(1, 2)).mul_(weights).mul_(observed.scaling)
            if observed.softcap is not None:
                raw = query @ keys[:, :seen].transpose(1, 2) * observed.scaling
                slope *= 1 - torch.tanh(raw / observed.softcap).square()
            if ctx.needs_input_grad[0]:
                to_query[:, :, begin:stop] = (slope @ keys[:, :seen]).view_as(to_query[:, :, begin:stop])
            to_keys[:, :seen] += slope.transpose(1, 2) @ query
        found = to_query.flatten(0, 1), to_keys, to_own
        return *(x.to(y.dtype) for x, y in zip(found, gradients * 3, strict=True)), None, None
