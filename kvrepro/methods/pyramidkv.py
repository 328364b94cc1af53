"""PyramidKV: SnapKV's selection under a budget that falls over the layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from ..attention import Observed
from ..entries import Entries
from .base import Diagnostics, register, setting
from .select import top_and_recent
from .snapkv import SnapKV, window_score


def layer_budgets(m: int, n: int, layers: int, window: int, beta: int) -> list[int]:
    """Entries of each layer, window included: linear from the first to the last, the total exactly layers·m.

    From max = 2(m - w) - min down to min = (m - w) / β; where max reaches n - w it stays there and min rises.
    Fractions are rounded by largest remainder, ties to the lower layer.
    """
    if m <= window or m >= n or layers == 1:
        return [m] * layers
    low = Fraction(m - window, beta)
    high = 2 * (m - window) - low
    if high >= n - window:
        high = Fraction(n - window)
        low = 2 * (m - window) - high
    ideal = [high - (high - low) * Fraction(layer, layers - 1) for layer in range(layers)]
    budgets = [math.floor(share) for share in ideal]
    order = sorted(range(layers), key=lambda layer: (budgets[layer] - ideal[layer], layer))
    for layer in order[: layers * (m - window) - sum(budgets)]:
        budgets[layer] += 1
    return [window + budget for budget in budgets]


@register
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with more entries in the lower layers (arXiv 2406.02069); ``layer_budget`` reports what each got."""

    name = "pyramidkv"
    formula = (
        "m_layer falls linearly from 2(m-w) - (m-w)/β to (m-w)/β, Σ m_layer = L·m; kept = SnapKV's at m_layer"
    )
    paper = "arXiv 2406.02069"
    arms = {}

    beta: int = setting(20, "β: how steep the pyramid is", "paper", least=1)

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        budget = layer_budgets(m, len(entries), observed.layers, self.window, self.beta)[observed.layer]
        score = window_score(entries, observed, self.window, self.kernel, self.pooling, self.group)
        return entries.take(top_and_recent(score, budget, self.window)), {"layer_budget": budget}
