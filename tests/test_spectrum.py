"""Spectra against hand-computed cases and numpy; what is taken from a model; and verdicts that follow the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

from kvrepro import stats
from kvrepro.measure import asymmetry
from kvrepro.measure.asymmetry import EXPLAINED, PARTS, SEEN, Asymmetry, Spectra
from kvrepro.measure.observe import observe, upright
from kvrepro.theory.spectrum import (
    cumulative,
    effective_rank,
    energy,
    gaussian,
    singular_values,
    stable_rank,
)

SPECTRUM = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12).map(
    lambda values: torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
)


# --- theory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "effective", "stable"),
    [
        (torch.eye(5), 1, 1),
        (torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 6)), 1 / 3, 1 / 3),  # rank one, r = 3
        (torch.diag(torch.tensor([7.0, 7, 0, 0])), 2 / 4, 2 / 4),  # two equal
        (torch.diag(torch.tensor([1.0, 2])), math.exp(-0.8 * math.log(0.8) - 0.2 * math.log(0.2)) / 2, 5 / 8),
        (torch.tensor([[3.0, 4]]), 1, 1),  # one row has one singular value
    ],
)
def test_ranks_by_hand(weight: Tensor, effective: float, stable: float) -> None:
    sigma = singular_values(weight)
    assert effective_rank(sigma).item() == pytest.approx(effective, abs=1e-12)
    assert stable_rank(sigma).item() == pytest.approx(stable, abs=1e-12)


def test_a_stack_of_matrices_equals_numpy_and_the_equations_in_a_loop() -> None:
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    sigma = singular_values(weights)
    for i, j in np.ndindex(2, 3):
        s = np.linalg.svd(weights[i, j].numpy(), compute_uv=False)
        p = [x**2 / sum(y**2 for y in s) for x in s]
        entropy = -sum(x * math.log(x) for x in p)
        assert np.abs(sigma[i, j].numpy() - s).max() < 1e-12
        assert np.abs(energy(sigma)[i, j].numpy() - p).max() < 1e-12
        assert effective_rank(sigma)[i, j].item() == pytest.approx(math.exp(entropy) / 5, abs=1e-10)
        frobenius, spectral = (np.linalg.norm(weights[i, j].numpy(), order) for order in ("fro", 2))
        assert stable_rank(sigma)[i, j].item() == pytest.approx((frobenius / spectral) ** 2 / 5, abs=1e-10)


def test_cumulative_energy_at_whole_and_broken_counts() -> None:
    sigma = torch.tensor([[2.0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)
    shares = torch.tensor([0, 0.125, 0.25, 0.5, 0.75, 1])
    expected = torch.tensor([[0, 2 / 6, 4 / 6, 5 / 6, 1, 1], [0, 0.125, 0.25, 0.5, 0.75, 1]])
    assert torch.allclose(cumulative(sigma, shares).float(), expected)


@given(SPECTRUM)
def test_stable_rank_never_exceeds_effective_rank(sigma: Tensor) -> None:
    """Rényi entropies fall with their order: 1 / r <= stable <= effective <= 1."""
    r = len(sigma)
    chain = [1 / r, stable_rank(sigma).item(), effective_rank(sigma).item(), 1.0]
    assert all(a <= b + 1e-12 for a, b in pairwise(chain))


@given(SPECTRUM, st.sampled_from([1e-200, 1e-3, 7.0, 1e200]))
def test_scale_does_not_matter(sigma: Tensor, scale: float) -> None:
    for rank in (effective_rank, stable_rank):
        assert rank(sigma * scale).item() == pytest.approx(rank(sigma).item(), rel=1e-9)


@given(SPECTRUM)
def test_energy_curves_rise_from_0_to_1_above_the_diagonal_and_bend_down(sigma: Tensor) -> None:
    shares = torch.linspace(0, 1, 17, dtype=torch.float64)
    curve = cumulative(sigma, shares)
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(1)
    assert (curve >= shares - 1e-12).all()
    assert (curve.diff() >= -1e-12).all()
    assert (curve.diff().diff() <= 1e-9).all()


def test_a_zero_matrix_has_no_spectrum() -> None:
    with pytest.raises(ValueError, match="zero matrix"):
        effective_rank(singular_values(torch.zeros(2, 3)))


def test_a_random_matrix_is_the_same_each_time_and_more_spread_the_squarer_it_is() -> None:
    assert torch.equal(gaussian(8, 64), gaussian(8, 64))
    assert effective_rank(gaussian(64, 64)) < effective_rank(gaussian(64, 576)) < 1


# --- rank correlation ---------------------------------------------------------------------------------------------


def test_rank_correlation_equals_scipy_with_ties() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (9, 3)), rng.integers(0, 6, (9, 3))
    found = stats.spearman(x, y, n_boot=500)
    assert found.rho == pytest.approx(spearmanr(x.ravel(), y.ravel()).statistic, abs=1e-12)
    assert found.low < found.rho < found.high
    assert (found.n, found.clusters) == (27, 9)
    assert stats.spearman(x, x, n_boot=100).low == pytest.approx(1)
    assert stats.spearman(x, -x, n_boot=100).high == pytest.approx(-1)


def test_members_of_a_group_are_not_taken_for_independent() -> None:
    """A head copied three times says nothing new, so the interval stays as it was."""
    x, y = np.random.default_rng(0).normal(size=(2, 20, 1))
    once = stats.spearman(x, y, n_boot=500)
    thrice = stats.spearman(x.repeat(3, 1), y.repeat(3, 1), n_boot=500)
    assert (thrice.rho, thrice.low, thrice.high) == pytest.approx((once.rho, once.low, once.high))


def test_where_there_is_no_correlation_to_take_it_is_nan() -> None:
    constant = stats.spearman(np.ones((4, 2)), np.arange(8).reshape(4, 2), n_boot=50)
    assert np.isnan([constant.rho, constant.low, constant.high]).all()
    two = stats.spearman(np.arange(4).reshape(2, 2), np.arange(4).reshape(2, 2), n_boot=50)
    assert two.rho == 1
    assert np.isnan(two.low)
    with pytest.raises(ValueError, match="clusters, members"):
        stats.spearman([1.0, 2.0], [1.0, 2.0])


# --- what is taken from a model -----------------------------------------------------------------------------------


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny: Any) -> Any:
    """Tiny, with norm gains and biases that are not the trivial ones."""
    made = tiny(request.param)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.5, 0.3)
    return made


def test_projections_carry_the_gain_and_make_the_cached_keys_and_values(model: Any) -> None:
    """Layer 0 from the equations: W x / rms(x), plus the bias, through the key norm where there is one."""
    ids = torch.randint(0, 97, (1, 40))
    layer, config = model.get_decoder().layers[0], model.config
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states[0][0]  # [n, d]
    epsilon = (
        layer.input_layernorm.eps if "gemma" in config.model_type else layer.input_layernorm.variance_epsilon
    )
    normed = states / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()
    attention, parts = layer.self_attn, asymmetry.projections(model)[0]
    keys, values = (normed @ weight.mT for weight in (parts.K, parts.V))  # [Hkv, n, D]
    if getattr(getattr(attention, "k_proj", None), "bias", None) is not None:
        keys = keys + attention.k_proj.bias.view(len(keys), 1, -1)
        values = values + attention.v_proj.bias.view(len(values), 1, -1)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    found_keys, found_values = upright(model, ids)[0]
    # a norm computes in float32 whatever the model's dtype
    assert (found_keys - keys).abs().max() < 1e-5 * keys.abs().max()
    assert (found_values - values).abs().max() < 1e-5 * values.abs().max()
    assert parts.Q.shape == (config.num_key_value_heads, 4 // config.num_key_value_heads * 8, 32)


def test_gains_of_query_and_key_norms_are_folded_on_demand(tiny: Any) -> None:
    model = tiny("gemma3")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_norm.weight.normal_(0, 0.3)
        attention.k_norm.weight.normal_(0, 0.3)
    plain, normed = asymmetry.projections(model)[0], asymmetry.projections(model, behind=True)[0]
    assert (normed.K - plain.K * (1 + attention.k_norm.weight)[:, None]).abs().max() < 1e-6
    twice = (1 + attention.q_norm.weight).repeat(2)  # two query heads a KV head
    assert (normed.Q - plain.Q * twice[:, None]).abs().max() < 1e-6
    assert torch.equal(normed.V, plain.V)


def test_every_layer_is_seen_whole_and_none_is_disturbed(model: Any) -> None:
    ids = torch.randint(0, 97, (1, 40))  # longer than the sliding windows
    layers = upright(model, ids)
    assert len(layers) == model.config.num_hidden_layers
    assert {(keys.shape[1], values.shape[1]) for keys, values in layers} == {(40, 40)}
    plain = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    with torch.inference_mode():  # the last layer's input is what the layers before it made
        last = model.get_decoder().layers[-1]
        normed = last.input_layernorm(plain[len(layers) - 1])
        if hasattr(last.self_attn, "v_proj"):
            heads = last.self_attn.v_proj(normed)[0].unflatten(-1, (-1, 8)).transpose(0, 1)
            assert (layers[-1][1] - heads).abs().max() < 1e-9


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_keys_are_unrotated_with_the_tables_of_their_own_layer(tiny: Any, architecture: str) -> None:
    model = tiny(architecture)
    ids = torch.randint(0, 97, (1, 40))
    compressible = [
        index
        for index, kind in enumerate(getattr(model.config, "layer_types", None) or ["full_attention"] * 3)
        if kind == "full_attention"
    ]
    layers = upright(model, ids)
    for index, (entries, observed) in zip(compressible, observe(model, ids)[0], strict=True):
        keys = observed.rope.unrotate(entries.keys, entries.positions)
        assert (layers[index][0] - keys).abs().max() < 1e-10


def test_whole_matrices_are_the_heads_stacked(tiny: Any) -> None:
    model = tiny("llama")
    layers = asymmetry.projections(model)
    gain = model.model.layers[1].input_layernorm.weight
    for matrix, weight in {"Q": "q_proj", "K": "k_proj", "V": "v_proj"}.items():
        w = getattr(model.model.layers[1].self_attn, weight).weight * gain
        rows = len(w) // 2
        for spectra, head, part in [
            (Spectra.of(layers, whole=True), 0, w),
            (Spectra.of(layers), 1, w[rows:]),
        ]:
            expected = np.linalg.svd(part.detach().numpy(), compute_uv=False)
            assert np.abs(spectra.sigma[matrix][1, head].numpy() - expected).max() < 1e-6
            assert spectra.shapes[matrix] == tuple(part.shape)


def test_similarity_is_of_neighbours_and_of_tokens_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 0's keys point one way, head 1's turn by 60° a token; values alternate; 301 tokens, then 201."""

    def vectors(_: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        turn = torch.arange(ids.shape[1], dtype=torch.float64)
        angles = torch.stack([0 * turn, turn * math.pi / 3])
        keys = torch.stack([angles.cos(), angles.sin()], -1)
        values = (-1.0) ** turn
        return [(keys, torch.stack([values, values])[..., None].expand(2, -1, 2) * 5)]

    monkeypatch.setattr(asymmetry, "upright", vectors)
    found = asymmetry.similarity(None, [torch.zeros(1, 301), torch.zeros(1, 201)])
    cosine = found.set_index(["kind", "head"])["cosine"]
    assert [cosine[kind, 0] for kind in asymmetry.KINDS] == pytest.approx([1, -1, 1, 1])
    assert cosine["key", 1] == pytest.approx(0.5)
    assert cosine["key-apart", 1] == pytest.approx(math.cos(100 * math.pi / 3))
    assert set(found.query("kind == 'key'")["pairs"]) == {300 + 200}
    assert set(found.query("kind == 'key-apart'")["pairs"]) == {201 + 101}
    assert found["between"].max() < 1e-12


# --- verdicts -----------------------------------------------------------------------------------------------------


def made(
    swap: bool = False, keys: float = 0.8, values: float = 0.2, slope: float = 0.1, layers: int = 12
) -> Asymmetry:
    """Two heads a layer. From layer to layer K's spectrum decays faster, and V's, flat, a little (``swap``: V's and K's);
    similarities rise by ``slope`` altogether, half as much for values."""
    depth = torch.linspace(0, 1, layers, dtype=torch.float64)[:, None, None]
    steps = torch.arange(16, dtype=torch.float64)

    def decay(rate: Tensor) -> Tensor:
        return torch.exp(-rate * steps).expand(layers, 2, 16) * (1 + 0.01 * torch.arange(2.0))[None, :, None]

    steep, flat = decay(0.3 + depth), decay(0.02 + 0.002 * depth)
    sigma = {"Q": decay(0.4 + depth), "K": flat if swap else steep, "V": steep if swap else flat}
    rows = [
        (layer, head, kind, base + slope * layer / (layers - 1) * weight, 0.0, 0.0, 0.0, 100)
        for layer in range(layers)
        for head in range(2)
        for kind, base, weight in [
            ("key", keys, 1),
            ("value", values, 0.5),
            ("key-apart", keys - 0.1, 1),
            ("value-apart", values - 0.1, 0.5),
        ]
    ]
    columns = ["layer", "head", "kind", "cosine", "low", "high", "between", "pairs"]
    spectra = Spectra(sigma, dict.fromkeys("QKV", (16, 64)))
    return Asymmetry(spectra, spectra, None, pd.DataFrame(rows, columns=columns), (100,))


def verdicts(found: Asymmetry) -> dict[str, str]:
    return asymmetry.agreed(found.parts(n_boot=300))


def test_a_claim_that_holds_is_supported_in_every_part() -> None:
    found = made()
    assert verdicts(found) == dict.fromkeys(PARTS, "supported")
    text = found.reading(found.parts(n_boot=300))
    assert "is **supported**: it is so in every head of 12 of 12 layers" in text
    assert "exceptions: no layer" in text
    assert "neighbours adds 0.10 to keys and 0.10 to values" in text


def test_what_the_key_norm_changes_is_said_where_there_is_one() -> None:
    found = made(swap=True)
    assert "key norm" not in found.reading(found.parts(n_boot=300))
    behind = replace(found, normed=made().heads)
    assert (
        "With the gain of the key norm folded in, too, W_K is more concentrated than W_V in 24 of 24 heads"
        in behind.reading(found.parts(n_boot=300))
    )


def test_a_claim_that_is_reversed_is_contradicted() -> None:
    found = made(swap=True, keys=0.2, values=0.8, slope=-0.1)
    judged = verdicts(found)
    assert [judged[part] for part in ("K", "alike", "keys", "values")] == ["contradicted"] * 4
    text = found.reading(found.parts(n_boot=300))
    assert "values not is **contradicted**: it is so in every head of 0 of 12 layers" in text
    assert "layers 0–11" in text
    assert "is **contradicted**:\n\n- the more" in text


def test_ranks_that_disagree_leave_a_part_open() -> None:
    found = made()
    parts = found.parts(n_boot=300)
    turned = [row._replace(verdict="contradicted") if row.rank == "stable" else row for row in parts]
    assert set(asymmetry.agreed(turned).values()) == {"inconclusive"}


def test_chance_is_inconclusive() -> None:
    found = made()
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, len(found.cosines))
    cosines = found.cosines.assign(cosine=np.where(found.cosines["kind"] == "key", 0.8, 0.2) + noise)
    judged = verdicts(replace(found, cosines=cosines))
    assert {judged[part] for part in SEEN} == {"supported"}
    assert {judged[part] for part in EXPLAINED} == {"inconclusive"}


def test_an_exception_is_named_with_its_layer() -> None:
    found = made()
    odd = (found.cosines["kind"] == "value") & (found.cosines["layer"] == 7) & (found.cosines["head"] == 1)
    cosines = found.cosines.assign(cosine=found.cosines["cosine"].mask(odd, 0.99))
    found = replace(found, cosines=cosines)
    layers = found.layers()
    assert layers.loc[7, ["K holds", "Q holds", "alike holds", "all hold"]].tolist() == [2, 2, 1, 1]
    text = found.reading(found.parts(n_boot=300))
    assert "every head of 11 of 12 layers (effective rank; exceptions: layer 7)" in text
    assert "adjacent keys are more alike than adjacent values: in 23 of 24 heads (not all in layer 7)" in text


def test_the_table_has_a_row_a_part_and_the_figures_show_it() -> None:
    found = made()
    parts = found.parts(n_boot=300)
    table = found.table(parts)
    assert list(table.index) == list(PARTS.values())
    assert table.iloc[0].tolist() == ["100% [100%, 100%]", "100% [100%, 100%]", "supported"]
    assert table.iloc[3, 0].startswith("ρ = +")
    pairs = found.pairs()
    assert list(pairs["part"].unique()) == list(EXPLAINED)
    keys = pairs[pairs["part"] == "keys"]
    points = found.points()
    assert np.allclose(keys["concentration"], 1 - points["K"])
    assert np.allclose(keys["similarity"], points["key"])
    curves = found.heads.curves()
    assert set(curves.columns) == {"layer", "matrix", "share", "energy"}
    assert len(curves) == 12 * 3 * len(asymmetry.GRID)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["supported"] * 3, "supported"),
        (["supported", "inconclusive"], "inconclusive"),
        (["supported", "inconclusive", "contradicted"], "contradicted"),
    ],
)
def test_a_claim_is_as_good_as_its_weakest_part(verdicts: list[str], whole: str) -> None:
    assert stats.together(verdicts) == whole


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], "no layer"), ([3], "layer 3"), ([0, 1], "layers 0, 1"), ([0, 2, 3, 4, 9], "layers 0, 2–4, 9")],
)
def test_layers_are_listed_with_runs_shortened(layers: list[int], text: str) -> None:
    assert asymmetry._listed(pd.Index(layers)) == text
