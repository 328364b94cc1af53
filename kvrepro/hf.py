"""All that depends on the transformers version: the attention function, the cache and its layers.

transformers 5.24 calls ``cache.update(k, v, layer_idx, kwargs=kwargs)`` and hands **the same dict** as keyword
arguments to the attention function, so a cache layer puts itself in there: no module is patched, nothing global is
kept.  Registered as ``attn_implementation="kvrepro"`` (the stock sdpa kernel underneath).

    model, tokenizer = kvrepro.load("smollm2-135m")
    cache = kvrepro.make_cache(model, "selkv", retain=0.25)
    model.generate(**tokenizer("...", return_tensors="pt"), cache=cache)
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped_attention_forward

from .attention import (
    Observed,
    at_least_float32,
    attend,
    attend_causal,
    attend_differentiable,
    attend_observed,
    causal_tail,
    softcapped,
)
from .entries import Entries, Rows
from .errors import UserError
from .methods import Budget, Method, make
from .models import SUPPORTED
from .rope import Rope

IMPLEMENTATION = "kvrepro"
LOSS_BLOCK = 128  # tokens whose logits stand at a time while the loss is differentiated
VERSION = "5.24.0"  # the source this file was written against; tests/test_hf.py fails loudly on another

Output = tuple[Tensor, Tensor | None]


def stock_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    """The unmodified model's own kernel: sdpa, and Gemma 2's eager one where logits are soft-capped."""
    if kwargs.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if mask is None and query.shape[2] > 1:
        mask = causal_tail(query.shape[2], key.shape[2], query.device, query.dtype) == 0
        mask = mask[None, None]
    if mask is not None:  # the eager kernel adds its mask, as transformers' eager_mask writes it
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
    return softcapped_attention_forward(module, query, key, value, mask, **kwargs)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kvrepro: CompressedLayer | bool | None = None,
    **kwargs: Any,
) -> Output:
    """The registered attention function; the cache put ``kvrepro`` among the keyword arguments."""
    if isinstance(kvrepro, CompressedLayer):
        return kvrepro.attend(module, query, key, value, attention_mask, **kwargs)
    if kvrepro is None and (kwargs.get("use_cache") or key.shape[2] != query.shape[2]):
        raise UserError(
            "this model runs kvrepro's attention but the cache is not one of kvrepro's, so nothing would be compressed; "
            "pass cache=kvrepro.make_cache(model, ...), or use_cache=False, or model.set_attn_implementation('sdpa')"
        )
    return stock_attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)  # the stock one: None would break sliding layers


@dataclass(frozen=True)
class Arm:
    """A method with its budget."""

    method: Method
    budget: Budget


@dataclass
class Row:
    """One row of a layer after prefill: a sample under an arm."""

    arm: Arm
    seen: int  # prompt tokens, padding not counted, here and in ``positions``
    m: int
    untouched: bool
    entries: Entries | None  # None once they moved into the layer's ``Rows``
    positions: Tensor  # of the prompt's entries, [Hkv or 1, m]
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of compression


@dataclass(frozen=True)
class Pass:
    """A driven method's pass over a chunk, as every layer carries it out."""

    m: int  # entries that may stand after the chunk
    learns: bool = (
        True  # the method sees the chunk and shrinks the past; otherwise the chunk is only appended
    )
    keeps: bool = True  # the chunk stays; otherwise this was a rehearsal
    gradient: bool = False  # the method waits for the gradient of the chunk's loss


class CompressedLayer(DynamicLayer):
    """One layer: compresses inside the prefill, right after attending; then grows by raw tokens.

    ``stock``: nothing was dropped from any row, so the stock kernel goes on (bit-identical to the plain model).
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, arms: Sequence[Arm], rope: Rope, layer: int, layers: int) -> None:
        super().__init__()
        self.arms, self.rope, self.layer, self.layers = tuple(arms), rope, layer, layers
        self.prompt: list[Row] = []  # empty until the first forward
        self.rows: Rows | None = None  # built from ``prompt`` when the first token after it comes
        self.seen = 0  # logical tokens, padding counted, as transformers counts
        self.stock = False
        self.step: Pass | None = None  # of a driven method, while it is driven
        self.incomplete = False  # driven, and the prompt's last token has not come yet
        self._leaf: Tensor | None = None  # past keys that the loss is differentiated by
        self._waiting: tuple[Entries, Observed] | None = None  # for that gradient

    # What transformers asks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kwargs["kwargs"]["kvrepro"] = self
        return key_states, value_states  # stored in ``attend``, which knows the queries and the mask

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self._physical()
        return physical + query_length, self.seen - physical

    def _physical(self) -> int:
        if self.rows is not None:
            return self.rows.length
        return max((len(row.entries) for row in self.prompt if row.entries is not None), default=0)

    def mark(self) -> tuple[int, Any]:
        """The present state, for :meth:`rewind`."""
        return self.seen, self._stacked().mark() if self.prompt else None

    def rewind(self, mark: tuple[int, Any]) -> None:
        """Forget what came after ``mark``; compression itself cannot be undone, so an empty mark empties the layer."""
        if mark[1] is None:
            self.reset()
        else:
            self.seen = mark[0]
            self._stacked().rewind(mark[1])

    def reset(self) -> None:
        self.prompt, self.rows, self.seen, self.stock = [], None, 0, False
        self.step, self.incomplete, self._leaf, self._waiting = None, False, None, None

    # Attention

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Output:
        new = query.shape[2]
        if self.step is not None:
            return self._drive(self.step, self.prompt[0], query, key, value, **kwargs)
        if self.incomplete:
            self.incomplete = False
            if query.shape[0] == new == 1:
                return self._complete(query, key, value, **kwargs)
        if not self.prompt:
            self.seen += new
            return self._prefill(module, query, key, value, mask, **kwargs)
        rows = self._stacked()
        self.seen += new
        # The model's mask has one shape for all layers; only its last columns, the new tokens', hold for this one.
        valid = None if mask is None else mask[:, 0, -1, -new:]
        if self.stock:
            rows.append(key, value, valid, masked=False)
            keys, values, _ = rows.view()
            return stock_attention(module, query, keys, values, mask, **kwargs)
        rows.append(key, value, valid)
        out = attend(query, *rows.view(), kwargs["scaling"], kwargs.get("softcap"))
        return out.transpose(1, 2).contiguous(), None

    def _stacked(self) -> Rows:
        if self.rows is None:
            stacked = [row.entries for row in self.prompt if row.entries is not None]
            self.rows = Rows(stacked, [row.positions.shape[1] for row in self.prompt])
            for row in self.prompt:
                row.entries = None
        return self.rows

    def unstacked(self) -> list[Row]:
        """The rows with their entries, also where they were stacked already."""
        rows = self.rows
        if rows is None:
            return [copy.copy(row) for row in self.prompt]
        return [replace(row, entries=rows.entries(i, row.positions)) for i, row in enumerate(self.prompt)]

    def _prefill(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Output:
        batch, _, length, _ = query.shape
        valid = None if mask is None else mask[:, 0, -1]  # [B, n] bool; the last query sees all but padding
        counts = [length] * batch if valid is None else valid.sum(1).tolist()
        if len(self.arms) > 1 and batch > 1:
            raise UserError(
                "several arms share the prefill of one sample; give a batch one arm, or samples one by one"
            )
        plan = [(b, arm, arm.budget.resolve(counts[b])) for arm in self.arms for b in range(batch)]
        untouched = [arm.method.untouched(counts[b], m) for b, arm, m in plan]

        places = kwargs.get("position_ids")
        if places is None:
            places = torch.arange(length, device=key.device)[None]
        places = places.expand(batch, -1)

        if all(untouched):  # padding stays in place: the model's own mask goes on
            self.stock = True
            for b, arm, m in plan:
                seen_at = places[b : b + 1] if valid is None else places[b : b + 1, valid[b]]
                raw = Entries(key[b], value[b], places[b : b + 1])
                self.prompt.append(Row(arm, counts[b], m, True, raw, seen_at))
            return stock_attention(module, query, key, value, mask, **kwargs)

        chunked = self.arms[0].method.schedule != "one-shot"
        if chunked and not any(untouched):
            out, lse = query.new_zeros(batch, length, query.shape[1], value.shape[-1]), None
        else:
            out, lse = self._whole(module, query, key, value, mask, **kwargs)
        # What each sample's layer saw, shared by its arms.
        own = [slice(None) if valid is None else valid[b] for b in range(batch)]
        seen = [
            self._observed(
                query[b], key[b], value[b], places[b], own[b], None if lse is None else lse[b], kwargs
            )
            for b in range(batch)
        ]
        for (b, arm, m), passes in zip(plan, untouched, strict=True):
            entries, observed = seen[b]
            row = Row(arm, counts[b], m, passes, entries, entries.positions)
            if not passes and chunked:
                out[b, own[b]] = self._chunked(row, observed).transpose(0, 1)
            elif not passes:
                self._compress(row, entries, observed)
            assert row.entries is not None
            row.positions = row.entries.positions
            self.prompt.append(row)
        return out, None

    def _observed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Tensor,
        own: slice | Tensor,
        lse: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Entries, Observed]:
        """One sample's entries and queries without its padding; query [H, n, D], key, value [Hkv, n, D], places [n]."""
        observed = Observed(
            query[:, own],
            kwargs["scaling"],
            self.rope,
            kwargs.get("softcap"),
            self.layer,
            self.layers,
            lse,
        )
        return Entries(key[:, own], value[:, own], places[None, own]), observed

    def _whole(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Stock attention of the prompt, [B, n, H, D], with its logsumexp [B, H, n] where a kernel gives it."""
        if mask is None and kwargs.get("softcap") is None:
            both = attend_causal(query, key, value, kwargs["scaling"])
            if both is not None:
                return both[0].transpose(1, 2).contiguous(), both[1]
        return stock_attention(module, query, key, value, mask, **kwargs)[0], None

    @staticmethod
    def _compress(row: Row, entries: Entries, observed: Observed, m: int | None = None) -> None:
        started = time.perf_counter()
        row.entries, diagnostics = row.arm.method.compress(entries, observed, row.m if m is None else m)
        for name, number in diagnostics.items():
            row.diagnostics[name] = row.diagnostics.get(name, 0) + number
        row.seconds += time.perf_counter() - started

    def _chunked(self, row: Row, whole: Observed) -> Tensor:
        """Attend chunk by chunk to what is stored and to the chunk itself; returns [H, n, D]."""
        raw, outputs, start = row.entries, [], 0
        assert raw is not None
        stored: Entries | None = None
        for size in row.arm.method.chunks(len(raw), row.m):
            stop = start + size
            piece = slice(start, stop)
            fresh = Entries(raw.keys[:, piece], raw.values[:, piece], raw.positions[:, piece])
            stored = fresh if stored is None else stored.extend(fresh.keys, fresh.values, fresh.positions)
            observed = Observed(
                whole.queries[:, piece], whole.scaling, whole.rope, whole.softcap, whole.layer, whole.layers
            )
            outputs.append(attend_observed(stored, observed))
            self._compress(row, stored, observed)
            stored = row.entries
            start = stop
        row.diagnostics |= row.arm.method.used(len(raw), row.m)
        if stored is not None:
            row.diagnostics |= row.arm.method.summary(stored, len(raw))
        return torch.cat(outputs, 1)

    # Driven: the chunks come as forward passes of the model (``prefill``)

    @property
    def has_past(self) -> bool:
        """Whether a driven method has stored anything yet."""
        return any(row.entries is not None and len(row.entries) for row in self.prompt)

    def _drive(
        self, step: Pass, row: Row, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Output:
        """Attend to what is stored and to the chunk, [1, H, c, D], and do with both what ``step`` says."""
        size, scaling, softcap = query.shape[2], kwargs["scaling"], kwargs.get("softcap")
        places = torch.arange(self.seen, self.seen + size, device=key.device)[None]
        fresh = (key[0].detach(), value[0].detach(), places)
        past = row.entries
        whole = Entries(*fresh) if past is None else past.extend(*fresh)
        bias = None if whole.bias is None else whole.bias[None]
        observed = Observed(query[0].detach(), scaling, self.rope, softcap, self.layer, self.layers)
        if step.keeps:
            self.seen += size
        if step.gradient:
            assert past is not None
            self._leaf = past.keys.detach().requires_grad_()
            self._waiting = whole, observed
            own, keys, values = (
                x.squeeze(0) for x in (query, key, value)
            )  # x[0] costs zeros on the way back
            keys = torch.cat([self._leaf, keys], 1)
            out = attend_differentiable(own, keys, values, whole, observed)[None]
        elif step.learns:
            out = attend_observed(whole, observed)[None]
            self._learn(step, row, whole, observed)
        else:
            out = attend(query, whole.keys[None], whole.values[None], bias, scaling, softcap)
            # More than m only where nothing may stand at all: not even the chunk, which attended to itself.
            last = torch.arange(max(0, len(whole) - step.m), len(whole), device=key.device)
            row.entries = whole if len(whole) <= step.m else whole.take(last)
            self._place(row)
        return out.transpose(1, 2).contiguous(), None

    def _learn(self, step: Pass, row: Row, whole: Entries, observed: Observed) -> None:
        self._compress(row, whole, observed, step.m)
        if not step.keeps and row.entries is not None:
            past = len(row.entries) - observed.queries.shape[1]
            row.entries = row.entries.take(torch.arange(past, device=row.entries.keys.device))
        self._place(row)

    def _place(self, row: Row) -> None:
        started = time.perf_counter()
        assert row.entries is not None
        row.entries = row.arm.method.place(row.entries, self.rope, self.seen)
        row.seconds += time.perf_counter() - started

    @property
    def leaf(self) -> Tensor:
        """The keys stored before the chunk, [Hkv, past, D], which the chunk's loss is differentiated by."""
        assert self._leaf is not None
        return self._leaf

    def learn(self, gradient: Tensor) -> None:
        """What waited for the gradient of the chunk's loss by ``leaf``."""
        assert self._waiting is not None and self.step is not None
        (whole, observed), self._waiting, self._leaf = self._waiting, None, None
        self._learn(self.step, self.prompt[0], whole, replace(observed, gradient=gradient))

    def _complete(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Output:
        """The last token of a driven prompt, which makes m entries: from now on the row is as any other."""
        (row,) = self.unstacked()
        assert row.entries is not None
        place = torch.tensor([[self.seen]], device=key.device)
        row.entries = row.entries.extend(key[0], value[0], place)
        row.positions, row.seen = row.entries.positions, row.seen + 1
        self.prompt, self.rows, self.seen = [row], None, self.seen + 1
        bias = None if row.entries.bias is None else row.entries.bias[None]
        keys, values = row.entries.keys[None], row.entries.values[None]
        out = attend(query, keys, values, bias, kwargs["scaling"], kwargs.get("softcap"))
        return out.transpose(1, 2).contiguous(), None

    # Not possible on compressed entries, so said rather than inherited

    def _refuse(self, what: str) -> None:
        raise UserError(
            f"{what} is not possible with a compressed cache; use greedy decoding or sampling without it"
        )

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("cropping (assisted decoding)")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._refuse("reordering (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeating rows")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("selecting rows")

    def offload(self) -> None:
        self._refuse("offloading")

    def prefetch(self) -> None:
        self._refuse("offloading")


class KVCache(Cache):
    """A compressed cache for ``generate(cache=...)``; make it with :func:`make_cache`.

    Several arms may share one prefill of one sample: its rows are then the arms, and :meth:`split` takes them apart
    before decoding.
    """

    def __init__(self, model: PreTrainedModel, arms: Sequence[Arm]) -> None:
        config = model.config.get_text_config(decoder=True)
        if config.model_type not in SUPPORTED:
            raise UserError(
                f"the architecture {config.model_type!r} is not supported, so nothing would be compressed; "
                f"supported are {', '.join(SUPPORTED)}"
            )
        schedules = {arm.method.schedule for arm in arms}
        if len(arms) > 1 and schedules != {"one-shot"}:
            raise UserError(
                "a chunked method attends to its own merged past, so it cannot share a prefill; run it alone"
            )
        layers = list(DynamicCache(config=config).layers)
        compressible = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        for order, index in enumerate(compressible):
            layers[index] = CompressedLayer(arms, _rope(model, index), order, len(compressible))
        if config._attn_implementation != IMPLEMENTATION:
            model.set_attn_implementation(IMPLEMENTATION)
        self.arms = tuple(arms)
        self.driven = False  # prefill() was called
        self._config = config
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if "kwargs" not in kwargs:
            raise UserError(
                "this architecture does not hand its keyword arguments to the cache, so nothing would be compressed"
            )
        if layer_idx == 0 and self._config._attn_implementation != IMPLEMENTATION:
            raise UserError(
                f"this cache needs kvrepro's attention and the model now runs {self._config._attn_implementation!r}; "
                'call model.set_attn_implementation("kvrepro") or make the cache again'
            )
        if layer_idx == 0 and self.get_seq_length() == 0:
            _refuse_chunked_generate()
            self._refuse_undriven(key_states.shape[2])
            self._warn_of_no_effect(key_states.shape[2])
        kwargs["kwargs"]["kvrepro"] = True  # a sliding layer: stock, but one of ours
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self.driven = False

    def _refuse_undriven(self, n: int) -> None:
        arm, layers = self.arms[0], self.compressed_layers()
        if arm.method.schedule != "driven" or not layers or layers[0].step is not None:
            return
        if not (self.driven and arm.method.untouched(n, arm.budget.resolve(n))):
            raise UserError(
                f"{arm.method.name} needs passes of its own; call kvrepro.prefill(model, cache, input_ids) with this "
                "prompt before generate()"
            )

    def _warn_of_no_effect(self, n: int) -> None:
        idle = [arm.method.untouched(n, arm.budget.resolve(n)) for arm in self.arms]
        if not self.compressed_layers() and not all(idle):
            warnings.warn(
                "every layer of this model has a sliding window, so nothing is compressed", stacklevel=2
            )

    def compressed_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    # Several arms on one prefill (the harness)

    def split(self, *groups: Sequence[int]) -> list[KVCache]:
        """Take the rows of a shared prefill apart: one cache for each group of arm indices, nothing copied yet."""
        caches = []
        for group in groups:
            cache = copy.copy(self)
            cache.arms = tuple(self.arms[i] for i in group)
            cache.layers = [_rows_of(layer, group) for layer in self.layers]
            caches.append(cache)
        return caches

    @staticmethod
    def join(caches: Sequence[KVCache]) -> KVCache:
        """Caches of the same prompt, prefilled apart, as rows of one; none may have decoded yet."""
        if len({cache.get_seq_length() for cache in caches}) > 1:
            raise ValueError("caches of prompts of different lengths cannot decode as rows of one batch")
        joined = copy.copy(caches[0])
        joined.arms = tuple(arm for cache in caches for arm in cache.arms)
        joined.layers = [_joined([cache.layers[i] for cache in caches]) for i in range(len(caches[0].layers))]
        return joined

    def mark(self) -> list[Any]:
        """The present state, for :meth:`rewind`."""
        return [
            layer.mark() if isinstance(layer, CompressedLayer) else copy.copy(layer.__dict__)
            for layer in self.layers
        ]

    def rewind(self, mark: list[Any]) -> None:
        """Forget the tokens appended since ``mark``."""
        for layer, state in zip(self.layers, mark, strict=True):
            if isinstance(layer, CompressedLayer):
                layer.rewind(state)
            else:
                layer.__dict__.update(state)  # tensors are replaced by appending, never written into

    # What is held

    def report(self) -> list[dict[str, Any]]:
        """What each layer holds, one dict per layer and row.

        Keys: layer, row, method, retain or budget as given, m (entries allowed), untouched, seen (tokens, padding not
        counted), entries (held now), positions (of the prompt's entries, [Hkv or 1, m]), bytes_used (per entry and KV
        head a key, a value and, where there is one, its bias), bytes_allocated (the row's share of the buffers: at
        most a block of 256 slots more than the longest row holds, or, once they grew, a sixteenth of it), and the
        method's diagnostics.  Sliding-window layers hold all rows in one line, with method "sliding-window" and
        padding counted.
        """
        lines: list[dict[str, Any]] = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                lines += [{"layer": index, **line} for line in _report(layer)]
            elif layer.is_initialized:
                held = layer.keys.numel() * layer.keys.element_size() * 2
                lines.append({
                    "layer": index, "row": 0, "method": "sliding-window", "retain": None, "budget": None, "m": None,
                    "positions": None, "untouched": True,
                    "seen": layer.get_seq_length(), "entries": layer.keys.shape[2], "bytes_used": held,
                    "bytes_allocated": held,
                })  # fmt: skip
        return lines

    @property
    def compression_seconds(self) -> list[float]:
        """Seconds spent in ``compress``, for each row, over all layers."""
        layers = self.compressed_layers()
        rows = len(layers[0].prompt) if layers else 0
        return [sum(layer.prompt[row].seconds for layer in layers) for row in range(rows)]


def _report(layer: CompressedLayer) -> list[dict[str, Any]]:
    if not layer.prompt:
        return []
    rows = layer._stacked()
    return [
        {
            "row": index,
            "method": row.arm.method.name,
            "retain": row.arm.budget.retain,
            "budget": row.arm.budget.entries,
            "m": row.m,
            "untouched": row.untouched,
            "seen": row.seen + rows.held[index] - row.positions.shape[1],
            "entries": rows.held[index],
            "positions": row.positions,
            "bytes_used": rows.bytes_used(index),
            "bytes_allocated": rows.bytes_allocated() // len(layer.prompt),
            **row.diagnostics,
        }
        for index, row in enumerate(layer.prompt)
    ]


def _rows_of(layer: CacheLayerMixin, group: Sequence[int]) -> CacheLayerMixin:
    """The rows ``group`` of a layer that holds arms; a sliding layer holds the one sample, repeated for them."""
    part = copy.copy(layer)
    if isinstance(layer, CompressedLayer) and isinstance(part, CompressedLayer):
        held = layer.unstacked()
        part.prompt, part.rows = [held[i] for i in group], None
        part.stock = all(row.untouched for row in part.prompt)
    elif layer.is_initialized:
        part.keys, part.values = (x.expand(len(group), -1, -1, -1) for x in (layer.keys, layer.values))
    return part


def _joined(layers: Sequence[CacheLayerMixin]) -> CacheLayerMixin:
    whole = copy.copy(layers[0])
    if isinstance(whole, CompressedLayer):
        parts = [layer for layer in layers if isinstance(layer, CompressedLayer)]
        whole.prompt, whole.rows = [row for layer in parts for row in layer.unstacked()], None
        whole.stock = all(layer.stock for layer in parts)
    elif whole.is_initialized:
        whole.keys = torch.cat([layer.keys for layer in layers])
        whole.values = torch.cat([layer.values for layer in layers])
    return whole


def _rope(model: PreTrainedModel, index: int) -> Rope:
    """The model's own rotary tables for layer ``index``."""
    rotary = model.get_decoder().rotary_emb
    extra, kind = {}, rotary.rope_type
    if (
        "layer_type" in inspect.signature(rotary.forward).parameters
    ):  # Gemma 3 has a table for each layer type
        extra["layer_type"] = model.config.get_text_config(decoder=True).layer_types[index]
        kind = kind[extra["layer_type"]]

    def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary(torch.empty(0, dtype=dtype, device=positions.device), positions, **extra)

    return Rope(tables, changes=kind in ("dynamic", "longrope"))


def _refuse_chunked_generate() -> None:
    """generate(prefill_chunk_size=...) would show us the prompt in pieces, and the first would be compressed alone.

    Nothing that reaches a cache tells the pieces from a follow-up turn, so we look at the caller itself, once a
    prompt.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("generation_config")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise UserError("generate(prefill_chunk_size=...) would compress the first piece alone; leave it out")


def make_cache(
    model: PreTrainedModel,
    method: str | Method,
    *,
    retain: float | None = None,
    budget: int | None = None,
    **settings: Any,
) -> KVCache:
    """A cache for ``model.generate(**inputs, cache=cache)`` that compresses the prompt right after the prefill.

    One cache serves one conversation: for another prompt make a new one, or call ``cache.reset()``.

    Parameters
    ----------
    model : PreTrainedModel
        Of a supported architecture.  Its attention implementation is set to "kvrepro" (the stock sdpa kernel
        underneath); ``model.set_attn_implementation("sdpa")`` sets it back.
    method : str or Method
        A name, ``"selkv"``, an arm of it, ``"selkv/evict"``, or a made method.
    retain : float, optional
        Share of the prompt's tokens to hold a layer and KV head, in (0, 1].
    budget : int, optional
        Entries to hold instead, at least 1.  Without either, everything is held (as ``full`` does).
    **settings
        Of the method; see ``kvrepro explain METHOD``.

    Raises
    ------
    UserError
        Unknown method or setting, a budget out of range, an unsupported architecture.

    Examples
    --------
    >>> cache = kvrepro.make_cache(model, "selkv", retain=0.25)      # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache, max_new_tokens=32)     # doctest: +SKIP
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"make_cache needs a model, not {type(model).__name__}; kvrepro.load(name) gives one")
    if not isinstance(method, str | Method):
        raise UserError(f"method={method!r} is neither a name nor a method; see kvrepro.methods.available()")
    if isinstance(method, Method) and settings:
        raise UserError("settings go with a method's name; a made method has its own")
    chosen = method if isinstance(method, Method) else make(method, **settings)
    if retain is None and budget is None:
        retain = 1.0
    return KVCache(model, [Arm(chosen, Budget(retain, budget))])


def prefill(model: PreTrainedModel, cache: KVCache, input_ids: Tensor) -> None:
    """Run what a driven method needs before ``generate``: all tokens but the last, in passes of its own.

    A method that compresses inside the forward pass needs nothing, so this returns at once and ``generate`` prefills.
    For a driven one m - 1 entries stand afterwards, and the last token makes m.  A prompt that the budget leaves
    untouched is not run at all: ``generate`` then prefills it as the plain model does.

    Parameters
    ----------
    input_ids : Tensor [1, n], int64
        Without padding.

    Raises
    ------
    UserError
        More than one prompt, an empty one, a cache that holds a prompt already, or weights made in inference mode for a
        method that needs gradients.

    Examples
    --------
    >>> cache = kvrepro.make_cache(model, "asymkv", retain=0.25)       # doctest: +SKIP
    >>> kvrepro.prefill(model, cache, inputs["input_ids"])             # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache, max_new_tokens=32)       # doctest: +SKIP
    """
    arm = cache.arms[0]
    if arm.method.schedule != "driven":
        return
    name = arm.method.name
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise UserError(
            f"{name} is driven prompt by prompt, and input_ids has the shape {tuple(input_ids.shape)}; give [1, n]"
        )
    if cache.get_seq_length():
        raise UserError("this cache holds a prompt already; call cache.reset() or make a new one")
    if arm.method.gradient and any(weight.is_inference() for weight in model.parameters()):
        raise UserError(
            f"{name} needs gradients, and this model was made under torch.inference_mode(); load it outside"
        )
    n = input_ids.shape[1]
    m = arm.budget.resolve(n)
    layers = cache.compressed_layers()
    cache.driven = True
    if not layers or arm.method.untouched(n, m):
        return
    for layer in layers:
        layer.prompt = [
            Row(arm, n - 1, m, False, None, torch.empty(1, 0, dtype=torch.long, device=model.device))
        ]
    try:
        with torch.inference_mode(False), torch.no_grad(), _without_parameter_gradients(model):
            _drive(model, cache, input_ids.to(model.device, copy=True), m - 1)
    except BaseException:
        cache.reset()  # half a prompt is of no use
        raise
    for layer in layers:
        (row,) = layer.prompt
        assert row.entries is not None
        row.positions = row.entries.positions
        row.diagnostics |= arm.method.used(n - 1, m - 1) | arm.method.summary(row.entries, n - 1)
        layer.step, layer.incomplete = None, True


def _drive(model: PreTrainedModel, cache: KVCache, ids: Tensor, m: int) -> None:
    """All tokens [1, n] but the last, chunk by chunk: m entries stand afterwards."""
    method, layers = cache.arms[0].method, cache.compressed_layers()
    sliding = [layer for layer in cache.layers if not isinstance(layer, CompressedLayer)]

    def run(step: Pass) -> None:
        for layer in layers:
            layer.step = step
        piece = ids[:, start:stop]
        if not step.gradient:
            model.get_decoder()(input_ids=piece, cache=cache, use_cache=True)  # no logits
            return
        with torch.enable_grad():
            hidden = model.get_decoder()(input_ids=piece, cache=cache, use_cache=True).last_hidden_state
        slope = _loss_gradient(model, hidden.detach()[0], ids[0, start + 1 : stop + 1])
        gradients = torch.autograd.grad(hidden, [layer.leaf for layer in layers], slope[None])
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.learn(gradient)
        for other in sliding:
            other.keys, other.values = other.keys.detach(), other.values.detach()

    start = 0
    for size in method.chunks(ids.shape[1] - 1, m):
        stop = start + size
        past = layers[0].has_past
        if method.rehearsal:
            if past:
                held = [copy.copy(layer.__dict__) for layer in sliding]
                run(Pass(m, keeps=False, gradient=method.gradient))
                for layer, state in zip(sliding, held, strict=True):
                    layer.__dict__.update(state)  # tensors are replaced by appending, never written into
            run(Pass(m, learns=False))
        else:
            run(Pass(m, gradient=method.gradient and past))
        start = stop


def _loss_gradient(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the mean next-token loss by the last hidden states [c, E], a few tokens' logits at a time."""
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    slopes = []
    for states, wanted in zip(hidden.split(LOSS_BLOCK), labels.split(LOSS_BLOCK), strict=True):
        with torch.enable_grad():
            states = states.requires_grad_()
            logits = at_least_float32(softcapped(model.get_output_embeddings()(states), cap))
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / len(labels)
            slopes += torch.autograd.grad(loss, states)
    return torch.cat(slopes)


@contextmanager
def _without_parameter_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Only activations are differentiated by; the parameters' own marks come back."""
    wanted = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in wanted:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in wanted:
            weight.requires_grad_(True)
