"""How concentrated a matrix is: shares of its rank that its singular values make use of.

With p_i = σ_i² / Σσ², the share of the energy in direction i, and r = min(shape),

    cumulative energy       Σ_{i <= k} p_i        against k / r
    entropy effective rank  exp(-Σ p_i log p_i) / r
    stable rank             Σσ² / σ_1² / r  =  1 / p_1 / r

KVSlimmer (arXiv 2603.00907) speaks of concentrated and dispersed spectra without printing its statistic, so both ranks
are taken.  They are the exponentials of two Rényi entropies of the same p, of order 1 and of order infinity, so

    1 / r <= stable <= effective <= 1.

(Roy and Vetterli, EUSIPCO 2007, who named the effective rank, take σ_i / Σσ for p; for that one the order need not hold.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def singular_values(weight: Tensor) -> Tensor:
    """Singular values of [..., a, b] -> [..., min(a, b)], descending, float64."""
    return torch.linalg.svdvals(weight.double())


def energy(sigma: Tensor) -> Tensor:
    """p_i = σ_i² / Σσ².

    Parameters
    ----------
    sigma : Tensor [..., r]
        Singular values, all of them, descending.

    Returns
    -------
    Tensor [..., r]
        Sums to 1; unchanged when the matrix is scaled.

    Raises
    ------
    ValueError
        A zero matrix: it has no directions to compare.

    Examples
    --------
    >>> energy(torch.tensor([2.0, 1.0, 1.0])).tolist()
    [0.6666666865348816, 0.1666666716337204, 0.1666666716337204]
    """
    largest = sigma[..., :1]
    if (largest == 0).any():
        raise ValueError("a zero matrix has no spectrum")
    square = (sigma / largest).square()  # of at most 1: no overflow, whatever the scale
    return square / square.sum(-1, keepdim=True)


def cumulative(sigma: Tensor, shares: Tensor) -> Tensor:
    """Energy in the first ``shares`` of the singular values.

    Parameters
    ----------
    sigma : Tensor [..., r]
        Descending.
    shares : Tensor [s]
        k / r in [0, 1]; between whole k the energy is interpolated, so that spectra of different r compare.

    Returns
    -------
    Tensor [..., s]
        From 0 at share 0 to 1 at share 1.
    """
    sums = torch.nn.functional.pad(energy(sigma).cumsum(-1), (1, 0))  # 0, p_1, p_1 + p_2, ... [..., r + 1]
    r = sigma.shape[-1]
    place = shares.to(sums) * r
    below = place.floor().long().clamp(0, r - 1)
    return torch.lerp(sums[..., below], sums[..., below + 1], place - below)


def effective_rank(sigma: Tensor) -> Tensor:
    """Entropy effective rank of singular values [..., r], divided by r: 1 if all are equal, 1 / r if one is alone."""
    return torch.special.entr(energy(sigma)).sum(-1).exp() / sigma.shape[-1]


def stable_rank(sigma: Tensor) -> Tensor:
    """Stable rank ‖W‖_F² / ‖W‖_2² of singular values [..., r], divided by r."""
    return 1 / energy(sigma)[..., 0] / sigma.shape[-1]


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Singular values of a matrix of independent normal entries: what a shape alone does to a spectrum.

    The squarer a random matrix, the wider its singular values spread, so ranks of different shapes compare only beside
    this.
    """
    generator = torch.Generator().manual_seed(seed)
    return singular_values(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
