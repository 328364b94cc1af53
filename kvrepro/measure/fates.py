"""What became of every prompt token, in every layer and KV head: kept, merged (into which) or dropped.

A method returns fewer entries and does not say where the other tokens went.  But each of its values is a weighted sum of
the values it was given, so its derivative says it: token j went into the entry whose value depends on v_j.  Two backward
passes through ``compress`` find that entry, and no method has to keep books for it.

    fates = trace(model, input_ids, [Arm(make("selkv"), Budget(retain=0.25))])[0]
    fates.table()                                                # a row a token, for kvrepro.heatmap
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..attention import Observed, at_least_float32
from ..entries import Entries
from ..errors import UserError
from ..hf import Arm, CompressedLayer, KVCache, Row, prefill
from ..methods.base import Diagnostics, Method

DROPPED = -1


@dataclass(frozen=True)
class Fates:
    """What became of n tokens in L layers with Hkv KV heads: L·Hkv cells that each keep, merge or drop a token.

    Attributes
    ----------
    layers : list of int
        The model's numbers of the L layers that can be compressed.
    target : array [L, Hkv, n], int
        The token whose entry holds token j: j itself where it was kept, -1 where it was dropped.
    bias : array [L, Hkv, n], float
        Of a kept token's entry, 0 elsewhere.
    """

    layers: list[int]
    target: np.ndarray
    bias: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """[L, Hkv, n] bool: the token has an entry of its own, which may hold others, too."""
        return self.target == np.arange(self.target.shape[-1])

    @property
    def dropped(self) -> np.ndarray:
        """[L, Hkv, n] bool: nothing of the token is left."""
        return self.target == DROPPED

    @property
    def merged(self) -> np.ndarray:
        """[L, Hkv, n] bool: the token is part of another one's entry."""
        return ~(self.kept | self.dropped)

    def table(self) -> pd.DataFrame:
        """Over all cells, a row a token.

        Returns
        -------
        DataFrame
            ``kept, merged, dropped`` (shares of the cells), ``into`` (the token that it merged into in most cells, the first of
            equals; -1: none), ``share_into`` (of its merges) and ``bias`` (mean where it is kept; NaN where it never is).
        """
        n = self.target.shape[-1]
        kept, merged = self.kept.reshape(-1, n), self.merged.reshape(-1, n)
        where = np.broadcast_to(np.arange(n), merged.shape)[merged]
        pairs, counts = np.unique(where * n + self.target.reshape(-1, n)[merged], return_counts=True)
        best = pd.DataFrame({"token": pairs // n, "into": pairs % n, "cells": counts})
        best = (
            best.sort_values("cells", ascending=False, kind="stable")
            .drop_duplicates("token")
            .set_index("token")
        )
        best = best.reindex(range(n))
        held = kept.sum(0)
        bias = (self.bias.reshape(-1, n) * kept).sum(0) / np.where(held, held, np.nan)
        return pd.DataFrame(
            {
                "kept": kept.mean(0),
                "merged": merged.mean(0),
                "dropped": self.dropped.reshape(-1, n).mean(0),
                "into": best["into"].fillna(DROPPED).astype(int),
                "share_into": (best["cells"] / merged.sum(0).clip(1)).fillna(0.0),
                "bias": bias,
            }
        )


def trace(model: Any, input_ids: Tensor, arms: Sequence[Arm]) -> list[Fates]:
    """Prefill a prompt under each arm and follow its tokens.

    A prefill of its own, so that nothing else is slower for it; the arms that compress once share it.

    Parameters
    ----------
    model
        Of a supported architecture.
    input_ids : Tensor [1, n], int64
        Without padding.

    Returns
    -------
    list of Fates
        One an arm.

    Raises
    ------
    UserError
        A method that spreads one token over several entries, or a model without layers to compress.
    """
    groups = [[index for index, arm in enumerate(arms) if arm.method.schedule == "one-shot"]]
    groups += [[index] for index, arm in enumerate(arms) if arm.method.schedule != "one-shot"]
    found: dict[int, Fates] = {}
    # Not in inference mode: what is made there cannot be differentiated through later.
    with torch.inference_mode(False), torch.no_grad():
        ids = input_ids.to(model.device, copy=True)
        for group in filter(None, groups):
            recorders = [_Recorder(arms[index].method) for index in group]
            recorded = [
                Arm(cast(Method, recorder), arms[index].budget)
                for index, recorder in zip(group, recorders, strict=True)
            ]
            cache = KVCache(model, recorded)
            if not cache.compressed_layers():
                raise UserError(
                    "every layer of this model has a sliding window, so no token is dropped or merged"
                )
            prefill(model, cache, ids)
            model(ids[:, cache.get_seq_length() :], cache=cache, logits_to_keep=1)
            for row, (index, recorder) in enumerate(zip(group, recorders, strict=True)):
                found[index] = recorder.fates(cache, row)
    return [found[index] for index in range(len(arms))]


class _Recorder:
    """A method that writes down where its entries go; all else is the method's own."""

    def __init__(self, method: Method) -> None:
        # Moved keys have new positions, and positions are what an entry is known by here.
        moves = any(field.name == "reposition" for field in dataclasses.fields(method))
        self.method = replace(method, reposition=False) if moves else method  # type: ignore[call-arg]
        self.held: dict[
            int, Tensor
        ] = {}  # by layer: the slot of each token so far [Hkv, t], -1 where it was dropped
        self.names: dict[int, Tensor] = {}  # by layer: the token that each slot is named after [Hkv, m]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        smaller, diagnostics, target, named = _traced(self.method, entries, observed, m)
        held, names = self._grown(observed.layer, entries)
        self.held[observed.layer] = _at(target, held)
        self.names[observed.layer] = _at(names, named)
        return smaller, diagnostics

    def _grown(self, layer: int, entries: Entries) -> tuple[Tensor, Tensor]:
        """Slots and names with the tokens that came since: raw, at the end, whatever the schedule."""
        empty = torch.empty(entries.kv_heads, 0, dtype=torch.long, device=entries.keys.device)
        held, names = self.held.get(layer, empty), self.names.get(layer, empty)
        fresh = torch.arange(len(entries) - names.shape[1], device=empty.device).expand(entries.kv_heads, -1)
        return torch.cat([held, fresh + names.shape[1]], 1), torch.cat([names, fresh + held.shape[1]], 1)

    def fates(self, cache: KVCache, row: int) -> Fates:
        """Of the prompt that ``cache`` holds in its row ``row``."""
        layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, CompressedLayer)}
        each = [self._layer(layer.layer, layer.unstacked()[row]) for layer in layers.values()]
        target, bias = (torch.stack(parts).cpu().numpy() for parts in zip(*each, strict=True))
        return Fates(list(layers), target, bias)

    def _layer(self, layer: int, row: Row) -> tuple[Tensor, Tensor]:
        """Target and bias [Hkv, n]."""
        entries = row.entries
        assert entries is not None
        held, names = self._grown(layer, entries)
        bias = torch.zeros(held.shape, dtype=torch.float64, device=held.device)
        target = _at(names, held)
        if entries.bias is not None:
            here = entries.bias.expand(entries.kv_heads, -1).to(bias.dtype)
            kept = target == torch.arange(held.shape[1], device=held.device)
            bias = torch.where(kept, here.gather(1, held.clamp_min(0)), 0)
        return target, bias


def _at(table: Tensor, index: Tensor) -> Tensor:
    """``table`` [Hkv, m] at ``index`` [Hkv, n], and -1 where the index is -1."""
    return torch.where(index >= 0, table.gather(1, index.clamp_min(0)), DROPPED)


def _traced(
    method: Method, entries: Entries, observed: Observed, m: int
) -> tuple[Entries, Diagnostics, Tensor, Tensor]:
    """``compress``, and the slot that each of n entries went into [Hkv, n] and the entry each slot is named after [Hkv, m]."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Converting a tensor with requires_grad"
        )  # for diagnostics, which are read off
        values = at_least_float32(entries.values).detach().clone().requires_grad_()
        smaller, diagnostics = method.compress(replace(entries, values=values), observed, m)
        ones = torch.ones_like(smaller.values)
        slots = torch.arange(1, len(smaller) + 1, device=ones.device, dtype=ones.dtype)
        # Σ_i J_ij and Σ_i i·J_ij, where only one i has a J_ij: their quotient is i.
        plain, counted = (
            torch.autograd.grad(smaller.values, values, weight, retain_graph=True)[0].nan_to_num()
            for weight in (ones, ones * slots[:, None])
        )
    channel = plain.abs().argmax(-1, keepdim=True)
    plain, counted = (x.gather(-1, channel)[..., 0] for x in (plain, counted))
    exact = counted / torch.where(plain == 0, 1, plain) - 1
    target = exact.round().long().masked_fill_(plain == 0, DROPPED)

    places, kept = (x.positions.expand(entries.kv_heads, -1).contiguous() for x in (entries, smaller))
    named = torch.searchsorted(places, kept).clamp_max(len(entries) - 1)
    if smaller.bias is not None:  # -inf: the slot is empty
        named = torch.where(smaller.bias.expand_as(named) > -torch.inf, named, DROPPED)
    slot = torch.arange(len(smaller), device=named.device).expand_as(named)
    head, where = (named >= 0).nonzero().T
    target[head, named[head, where]] = slot[
        head, where
    ]  # also where a kept value weighs nothing in its own entry

    whole = {
        field.name: _detached(getattr(smaller, field.name), getattr(entries, field.name))
        for field in dataclasses.fields(Entries)
    }
    strays = ((exact - target).abs() > 0.25) & (plain != 0)
    if strays.any() or not torch.equal(_at(places, named)[head, where], kept[head, where]):
        raise UserError(
            f"{method.name} spreads a token over several entries or invents positions, so its tokens cannot be followed; "
            "leave it out"
        )
    return Entries(**whole), diagnostics, target, named


def _detached(found: Any, given: Any) -> Any:
    """Without the graph, tensors in the dtype that was given."""
    if isinstance(found, dict):
        return {name: tensor.detach() for name, tensor in found.items()}
    if not isinstance(found, Tensor):
        return found
    return found.detach().to(given.dtype) if isinstance(given, Tensor) else found.detach()
