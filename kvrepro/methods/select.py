"""Scores and top-k, shared by all selectors: pooling, stable order, a protected recent window."""

from __future__ import annotations

import torch
from torch import Tensor

ODD = tuple(range(1, 64, 2))  # pooling kernels that keep the length


def pool(score: Tensor, kernel: int, mode: str) -> Tensor:
    """Pool scores [Hkv, n] along tokens, 'same' length; ``mode`` "avg" (zero padding counted), "max" or "none"."""
    if mode == "none" or kernel == 1:
        return score
    if mode == "avg":
        return torch.nn.functional.avg_pool1d(score, kernel, 1, kernel // 2)
    return torch.nn.functional.max_pool1d(score, kernel, 1, kernel // 2)


def top(score: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last axis, ascending; ties go to the lower index.

    ``torch.topk`` leaves ties open, and max pooling makes exact ties at almost every threshold.
    """
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(-1).values


def top_and_recent(score: Tensor, m: int, recent: int) -> Tensor:
    """Indices [Hkv, m]: the last ``recent`` tokens and the best of the others; the last m where m <= recent."""
    heads, n = score.shape
    if m <= recent:
        return torch.arange(n - m, n, device=score.device).expand(heads, m)
    best = top(score[:, : n - recent], m - recent)
    window = torch.arange(n - recent, n, device=score.device).expand(heads, recent)
    return torch.cat([best, window], 1)
