"""Entries and rows: shapes, growth and bytes, by hand and against plain lists (hypothesis)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrepro.entries import BLOCK, SHARE, Entries, Rows

FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def entries_of(
    n: int, heads: int = 2, seed: int = 0, bias: int = 0, mass: bool = False, **more: Any
) -> Entries:
    """n random entries; ``bias`` heads of bias (0: None)."""
    return Entries(
        random(heads, n, 8, seed=seed), random(heads, n, 4, seed=seed + 1), torch.arange(n)[None] * 3,
        random(bias, n, seed=seed + 2) if bias else None,
        torch.arange(heads * n).view(heads, n) + 1.0 if mass else None, **more,
    )  # fmt: skip


# --- Entries


@pytest.mark.parametrize("bias", [0, 1, 2])
def test_take_the_same_entries_of_all_heads(bias: int) -> None:
    whole = entries_of(9, bias=bias, mass=True, state={"rho": random(2, 9)})
    index = torch.tensor([0, 4, 8])
    part = whole.take(index)
    assert len(part) == 3 and part.positions.tolist() == [[0, 12, 24]]
    for h in range(2):
        for slot, i in enumerate(index):
            for name in ("keys", "values", "mass"):
                assert torch.equal(getattr(part, name)[h, slot], getattr(whole, name)[h, i])
            assert part.state["rho"][h, slot] == whole.state["rho"][h, i]
    assert (part.bias is None) == (bias == 0)
    if whole.bias is not None:
        assert part.bias is not None and torch.equal(part.bias, whole.bias[:, index])


@pytest.mark.parametrize("bias", [0, 1, 2])
def test_take_other_entries_of_each_head(bias: int) -> None:
    whole = entries_of(9, bias=bias, mass=True, state={"rho": random(2, 9), "column": random(2, 9, 3)})
    index = torch.tensor([[0, 4, 8], [1, 2, 3]])
    part = whole.take(index)
    assert part.positions.tolist() == [[0, 12, 24], [3, 6, 9]]
    for h in range(2):
        for slot, i in enumerate(index[h]):
            for name in ("keys", "values", "mass"):
                assert torch.equal(getattr(part, name)[h, slot], getattr(whole, name)[h, i])
            assert torch.equal(part.state["column"][h, slot], whole.state["column"][h, i])
            if whole.bias is not None:
                assert part.bias is not None and part.bias[h, slot] == whole.bias[h % bias, i]


@pytest.mark.parametrize("heads", [1, 2])
def test_extend_by_raw_tokens(heads: int) -> None:
    """They have bias 0, mass 1 and their positions, also where the heads' positions already differ."""
    first = entries_of(4, bias=heads, mass=True)
    first = replace(first, positions=first.positions.expand(heads, -1))
    more = entries_of(3, seed=9)
    grown = first.extend(more.keys, more.values, torch.tensor([[90, 91, 92]]))
    assert torch.equal(grown.keys, torch.cat([first.keys, more.keys], 1))
    assert torch.equal(grown.values, torch.cat([first.values, more.values], 1))
    assert grown.positions.tolist() == [[0, 3, 6, 9, 90, 91, 92]] * heads
    assert grown.bias is not None and grown.bias.shape == (heads, 7) and not grown.bias[:, 4:].any()
    assert grown.mass is not None and grown.mass[:, 4:].eq(1).all() and len(first) == 4
    assert (
        entries_of(4).extend(more.keys, more.values, more.positions).bias is None
    )  # None stays None: a faster kernel


# --- Rows


def seen(rows: Rows, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and bias [Hkv, valid] of one row, as attention reads them."""
    keys, values, bias = rows.view()
    bias = keys.new_zeros(*keys.shape[:1], 1, keys.shape[2]) if bias is None else bias
    valid = bias[row, 0] > -torch.inf
    return keys[row][:, valid], values[row][:, valid], bias[row].expand(keys.shape[1], -1)[:, valid]


@FEW
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    heads=st.lists(st.sampled_from([0, 1, 2]), min_size=3, max_size=3),
    steps=st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.integers(0, 3)), max_size=4),
)
def test_rows_hold_what_was_put_in(
    lengths: list[int], heads: list[int], steps: list[tuple[int, bool, int]]
) -> None:
    """Against plain lists, over appending, padding, growing across blocks and truncating."""
    parts = [entries_of(n, seed=7 * i, bias=heads[i]) for i, n in enumerate(lengths)]
    rows, count = Rows(parts), len(parts)
    model = [
        (e.keys, e.values, torch.zeros(2, len(e)) if e.bias is None else e.bias.expand(2, -1)) for e in parts
    ]
    for number, (new, padded, dropped) in enumerate(steps):
        keys, values = random(count, 2, new, 8, seed=50 + number), random(count, 2, new, 4, seed=80 + number)
        valid = torch.ones(count, new, dtype=torch.bool)
        if padded and new > 1:
            valid[0, : new // 2] = False
        stays = slice(0, new - min(dropped, new))
        rows.append(keys[:, :, stays], values[:, :, stays], valid[:, stays])
        mark = rows.mark()
        rows.append(keys[:, :, stays.stop :], values[:, :, stays.stop :], valid[:, stays.stop :])
        rows.rewind(mark)
        for r, (k, v, b) in enumerate(model):
            own = valid[r, stays]
            model[r] = (torch.cat([k, keys[r][:, stays][:, own]], 1), torch.cat([v, values[r][:, stays][:, own]], 1),
                        torch.nn.functional.pad(b, (0, int(own.sum()))))  # fmt: skip
    for r, expected in enumerate(model):
        for found, true in zip(seen(rows, r), expected, strict=True):
            assert torch.equal(found, true.double())
    assert rows.keys.shape[2] % BLOCK == 0 and rows.keys.shape[2] - rows.length <= BLOCK


def test_no_bias_and_equal_lengths_mean_no_bias() -> None:
    rows = Rows([entries_of(5), entries_of(5, seed=4)])
    rows.append(random(2, 2, 3, 8), random(2, 2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    assert rows.view()[2] is None
    assert Rows([entries_of(5), entries_of(4)]).bias is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bias_is_float32_at_least(dtype: torch.dtype) -> None:
    entries = Entries(
        *(random(2, 5, 8, dtype=dtype) for _ in range(2)), torch.arange(5)[None], torch.full((1, 5), 0.1)
    )
    bias = Rows([entries]).view()[2]
    assert (
        bias is not None
        and bias.dtype == torch.promote_types(dtype, torch.float32)
        and bias[0, 0, 0] == pytest.approx(0.1)
    )


def test_rewinding_keeps_what_compression_left() -> None:
    rows = Rows([entries_of(5)])
    mark = rows.mark()
    rows.append(random(1, 2, 4, 8), random(1, 2, 4, 4))
    with pytest.raises(ValueError, match="appended"):
        rows.entries(0, torch.arange(5)[None])
    rows.rewind(mark)
    assert (rows.length, rows.held) == (5, [5])
    assert torch.equal(rows.entries(0, torch.arange(5)[None]).keys, entries_of(5).keys)


def test_rewinding_restores_the_state_before_a_padded_append() -> None:
    """Also that there was no bias: zeros in its place would switch the kernel and be counted as bytes."""
    rows = Rows([entries_of(5), entries_of(5, seed=4)])
    before, mark = rows.bytes_used(0), rows.mark()
    rows.append(random(2, 2, 2, 8), random(2, 2, 2, 4), torch.tensor([[False, True], [True, True]]))
    rows.rewind(mark)
    assert rows.view()[2] is None and rows.bytes_used(0) == before


@pytest.mark.parametrize("bias", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 255, 256, 257])
@pytest.mark.parametrize("new", [0, 1, 300])
def test_bytes_are_the_formula_and_spare_capacity_at_most_a_block(bias: int, n: int, new: int) -> None:
    rows = Rows([entries_of(n, bias=bias)])
    if new:
        rows.append(random(1, 2, new, 8), random(1, 2, new, 4))
    entry = 2 * (8 + 4) * 8 + bias * 8  # Hkv · (key + value) · float64 + bias
    assert rows.bytes_used(0) == (n + new) * entry
    assert 0 <= rows.bytes_allocated() - rows.bytes_used(0) <= BLOCK * entry
    assert rows.bytes_allocated() == sum(
        x.untyped_storage().nbytes() for x in (rows.keys, rows.values, rows.bias) if x is not None
    )


def test_a_long_cache_grows_by_a_share_of_its_length() -> None:
    """Copying n entries every n / 16 steps costs the same at any length; a block of 256 would cost ever more."""
    n = SHARE * BLOCK * 3
    rows = Rows([entries_of(n, heads=1)])
    for _ in range(2):
        rows.append(random(1, 1, 1, 8), random(1, 1, 1, 4))
        assert rows.keys.shape[2] == n + 3 * BLOCK
        assert rows.bytes_allocated() - rows.bytes_used(0) < rows.bytes_used(0) / SHARE
    rows.append(random(1, 1, 8 * BLOCK, 8), random(1, 1, 8 * BLOCK, 4))  # a long turn: as much as it needs
    assert rows.keys.shape[2] == n + 9 * BLOCK


def test_growing_copies_once_a_block() -> None:
    rows = Rows([entries_of(200)])
    buffers = []
    for _ in range(600):
        rows.append(random(1, 2, 1, 8), random(1, 2, 1, 4))
        if not buffers or buffers[-1] != rows.keys.data_ptr():
            buffers.append(rows.keys.data_ptr())
    assert len(buffers) == 4 and rows.length == 800
