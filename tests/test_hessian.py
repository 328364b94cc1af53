"""The closed forms against autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvrepro import methods
from kvrepro.attention import Observed, attend_observed
from kvrepro.entries import Entries
from kvrepro.rope import Rope
from kvrepro.theory.hessian import key_hessian, logit_hessian, norm_weight, optimal_weight, output_curvature

N, D, SCALING = 7, 5, 0.6
GENERATOR = torch.Generator().manual_seed(1)
QUERY, KEYS, VALUES, DIRECTION = (
    torch.randn(*shape, generator=GENERATOR, dtype=torch.float64) for shape in ((D,), (N, D), (N, D), (D,))
)


def linear(output: Tensor) -> Tensor:
    return DIRECTION @ output


def curved(output: Tensor) -> Tensor:
    return torch.sin(output).sum() + (DIRECTION @ output) ** 2


def output_of(keys: Tensor) -> Tensor:
    return torch.softmax(SCALING * keys @ QUERY, 0) @ VALUES


def exact(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """∂²L/∂k_i∂k_j [n, n, D, D] by autograd."""
    hessian = torch.autograd.functional.hessian(lambda keys: loss(output_of(keys)), KEYS)
    return hessian.permute(0, 2, 1, 3)


def closed(loss: Callable[[Tensor], Tensor], whole: bool) -> Tensor:
    """The same from the closed form, with or without the term of the loss's own curvature."""
    output = output_of(KEYS)
    gradient = torch.autograd.functional.jacobian(loss, output)
    curvature = torch.autograd.functional.hessian(loss, output) if whole else None
    weights = torch.softmax(SCALING * KEYS @ QUERY, 0)
    return key_hessian(QUERY, logit_hessian(weights, VALUES, gradient, curvature), SCALING)


def test_the_output_curvature_is_the_second_derivative_of_the_output() -> None:
    logits = SCALING * KEYS @ QUERY
    found = output_curvature(torch.softmax(logits, 0), VALUES)
    for channel in range(D):
        expected = torch.autograd.functional.hessian(
            lambda z, c=channel: torch.softmax(z, 0) @ VALUES[:, c], logits
        )
        assert (found[..., channel] - expected).abs().max() < 1e-15


def test_the_papers_term_is_exact_for_a_linear_loss() -> None:
    assert (closed(linear, whole=False) - exact(linear)).abs().max() < 1e-15


def test_a_curved_loss_leaves_a_gap_that_the_second_term_closes() -> None:
    true = exact(curved)
    gap = (closed(curved, whole=False) - true).abs().max() / true.abs().max()
    assert gap > 0.1
    assert (closed(curved, whole=True) - true).abs().max() < 1e-14 * true.abs().max() * 10


def test_summed_over_queries_the_block_is_not_rank_one() -> None:
    """Why one scalar weight a key is an approximation."""
    other = torch.randn(D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    block = sum(key_hessian(q, torch.ones(1, 1, dtype=torch.float64), SCALING)[0, 0] for q in (QUERY, other))
    assert torch.linalg.matrix_rank(block) == 2


@pytest.mark.parametrize("pair", range(N - 1))
def test_the_optimal_weight_is_where_the_quadratic_form_is_flat(pair: int) -> None:
    weights = torch.softmax(SCALING * KEYS @ QUERY, 0)
    g = logit_hessian(weights, VALUES, DIRECTION)[pair : pair + 2, pair : pair + 2]
    x1, x2 = KEYS[pair] @ QUERY, KEYS[pair + 1] @ QUERY

    def form(weight: Tensor) -> Tensor:
        x = weight * x1 + (1 - weight) * x2
        return g[0, 0] * (x - x1) ** 2 + 2 * g[0, 1] * (x - x1) * (x - x2) + g[1, 1] * (x - x2) ** 2

    weight = optimal_weight(g[0, 0], g[0, 1], g[1, 1])
    slope = torch.autograd.functional.jacobian(form, weight)
    steep = torch.autograd.functional.jacobian(form, weight + 1.0)
    assert abs(slope) < 1e-12 * abs(steep)


def test_kvslimmer_weighs_keys_by_the_norms_of_the_output_curvature() -> None:
    """One query, one head, one merge: the method's key is the closed form's."""
    past, fresh = 3, 1
    keys, values = KEYS[: past + fresh], VALUES[: past + fresh]

    def upright(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ones(*positions.shape, 4, dtype=dtype), torch.zeros(*positions.shape, 4, dtype=dtype)

    entries = Entries(keys[None], values[None], torch.arange(past + fresh)[None])
    observed = Observed(QUERY[None, None], SCALING, Rope(upright))
    attend_observed(entries, observed)
    merged, found = methods.make("kvslimmer", chunk=1, sinks=0).compress(entries, observed, past)
    assert found["merges"] == 1 and not any(
        found[reason] for reason in ("left_out", "no_mass", "denominator", "outside")
    )

    weights = torch.softmax(SCALING * keys @ QUERY, 0)
    first = int((weights[: past - 1] + weights[1:past]).argmin())
    norms = output_curvature(weights, values).norm(dim=-1)
    weight = norm_weight(norms[first, first], norms[first, first + 1], norms[first + 1, first + 1])
    expected = weight * keys[first] + (1 - weight) * keys[first + 1]
    assert (merged.keys[0, first] - expected).abs().max() < 1e-14
