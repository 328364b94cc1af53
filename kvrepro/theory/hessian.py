"""Second derivatives of attention by its keys, exactly, and the closed forms KVSlimmer makes of them.

One query q, logits z_i = scaling·q·k_i, α = softmax(z), o = Σ α_i v_i, loss L(o) with gradient E = ∂L/∂o
(KVSlimmer, arXiv 2603.00907).  Then

    c_ii = ∂²o/∂z_i²     = α_i (1 - 2α_i)(v_i - o)
    c_ij = ∂²o/∂z_i∂z_j  = -α_i α_j (v_i + v_j - 2o)
    ∂²L/∂z_i∂z_j         = E·c_ij + α_i α_j (v_i - o)ᵀ ∇²L (v_j - o)
    ∂²L/∂k_i∂k_j         = scaling² · ∂²L/∂z_i∂z_j · q qᵀ

The paper keeps the first term of the third line: exact where L is linear in o.
"""

from __future__ import annotations

import torch
from torch import Tensor


def output_curvature(weights: Tensor, values: Tensor) -> Tensor:
    """c_ij = ∂²o/∂z_i∂z_j.

    Parameters
    ----------
    weights : Tensor [n]
        α, softmax attention of one query.
    values : Tensor [n, D]

    Returns
    -------
    Tensor [n, n, D]

    Examples
    --------
    >>> output_curvature(torch.tensor([0.25, 0.75]), torch.tensor([[1.0], [3.0]])).squeeze(-1).tolist()
    [[-0.1875, 0.1875], [0.1875, -0.1875]]
    """
    away = values - weights @ values  # v_i - o [n, D]
    mixed = -weights[:, None, None] * weights[None, :, None] * (away[:, None] + away[None, :])
    # On the diagonal the same expression holds -2α_i²(v_i - o); α_i (v_i - o) is what is missing.
    return mixed + torch.diag_embed((weights[:, None] * away).T).movedim(0, -1)


def logit_hessian(
    weights: Tensor, values: Tensor, gradient: Tensor, loss_hessian: Tensor | None = None
) -> Tensor:
    """∂²L/∂z_i∂z_j [n, n]; without ``loss_hessian`` the paper's first term alone.

    Parameters
    ----------
    weights : Tensor [n]
    values : Tensor [n, D]
    gradient : Tensor [D]
        E = ∂L/∂o.
    loss_hessian : Tensor [D, D], optional
        ∇²L at o: the term that the paper leaves out.
    """
    first = output_curvature(weights, values) @ gradient
    if loss_hessian is None:
        return first
    slope = weights[:, None] * (values - weights @ values)  # ∂o/∂z_i [n, D]
    return first + slope @ loss_hessian @ slope.T


def key_hessian(query: Tensor, hessian: Tensor, scaling: float) -> Tensor:
    """∂²L/∂k_i∂k_j [n, n, D, D] from ∂²L/∂z_i∂z_j [n, n]: every block is a multiple of q qᵀ."""
    return scaling**2 * hessian[..., None, None] * torch.outer(query, query)


def optimal_weight(g11: Tensor, g12: Tensor, g22: Tensor) -> Tensor:
    """Weight of the first key where the quadratic form g11 δ1² + 2 g12 δ1 δ2 + g22 δ2² of a merge is stationary.

    δ_i = q·(k* - k_i), k* = w k1 + (1 - w) k2; g_ij = E·c_ij needs the gradient.  A minimum where the denominator is
    positive.
    """
    return (g11 + g12) / (g11 + 2 * g12 + g22)


def norm_weight(h11: Tensor, h12: Tensor, h22: Tensor) -> Tensor:
    """The paper's gradient-free weight of the first key, h_ij = ‖c_ij‖, under cos(E, c11) ≈ cos(E, c22) ≈ -cos(E, c12)."""
    return (h11 - h12) / (h11 - 2 * h12 + h22)
