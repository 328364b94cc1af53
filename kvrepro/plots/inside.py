"""Inside a layer: what became of each token, where attention went, how alike neighbours are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..errors import UserError
from ..results import in_order
from .canvas import Figure, blank, styled, subtitle
from .looks import look

# What became of a token, and the stages of the attention sag; kept and full share the strongest colour.
STATES = {"kept": "#0072B2", "merged": "#E69F00", "dropped": "#E8E8E8"}
STATE_LABELS = {"kept": "kept", "merged": "merged into a kept entry", "dropped": "dropped"}
SAG = {
    "full": ("#000000", "-", 1.6, "full cache"),
    "evicted": ("#56B4E9", "-", 2.6, "after eviction"),
    "merged": ("#332288", (0, (4, 3)), 1.4, "after merging, no bias"),
    "compensated": ("#D55E00", "-", 1.4, "after merging, with bias"),
}
KINDS = {
    "key": ("#0072B2", "o", "-", "keys, adjacent"),
    "key-apart": ("#0072B2", "", ":", "keys, far apart"),
    "value": ("#D55E00", "s", "-", "values, adjacent"),
    "value-apart": ("#D55E00", "", ":", "values, far apart"),
}


@styled
def sag(
    attention: pd.DataFrame,
    *,
    bucket: int = 32,
    title: str = "The attention sag: below 1, a stretch of the prompt gets less attention than it had",
) -> Figure:
    """Attention mass along the prompt in one layer, and its ratio to the full cache's.

    Merging without a bias leaves the keys, and so the attention, as eviction does: the two curves coincide.

    Parameters
    ----------
    attention
        Long form: ``position`` (int, in tokens), ``variant`` (full, evicted, merged, compensated), ``mass``
        (attention that the position's entry gets; evicted positions may be left out).
    bucket
        Positions summed into one step of the curve.
    title
        The figure's title.
    """
    summed = (
        attention.assign(position=attention["position"] // bucket * bucket)
        .groupby(["position", "variant"])["mass"]
        .sum()
        .unstack("variant", fill_value=0)
    )
    if "full" not in summed:
        raise UserError("no attention of the full cache; the figure compares with it; add the variant full")
    summed = summed[in_order(summed.columns, list(SAG))]
    figure, axes = blank((10.5, 5.6), title, rows=2, sharex=True)
    edges = np.append(summed.index.to_numpy(), summed.index[-1] + bucket)
    for variant in summed:
        color, dash, width, label = SAG[str(variant)]
        style: dict[str, Any] = {"color": color, "linestyle": dash, "linewidth": width, "baseline": None}
        axes[0].stairs(summed[variant], edges, label=label, **style)
        if variant != "full":
            axes[1].stairs(summed[variant] / summed["full"], edges, **style)
    axes[0].set_yscale("log")
    axes[0].set_ylabel(f"attention mass\nof {bucket} positions")
    axes[0].legend(ncols=len(SAG), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[1].axhline(1, color=SAG["full"][0], lw=SAG["full"][2], zorder=1)
    axes[1].set(ylabel="ratio to\nthe full cache", xlabel="position in the prompt (tokens)")
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlim(edges[0], edges[-1])
    figure.data = summed.reset_index()
    return figure


@styled
def entries_map(
    tokens: pd.DataFrame, *, title: str = "What became of each token? Stripes show where kept tokens cluster"
) -> Figure:
    """A strip for each KV head over the prompt: kept, merged into a kept entry, or dropped.

    Parameters
    ----------
    tokens
        ``head`` (int), ``position`` (int, in tokens), ``state`` (kept, merged, dropped).
    title
        The figure's title.
    """
    if unknown := set(tokens["state"]) - set(STATES):
        raise UserError(f"unknown token state {sorted(unknown)[0]}; use {', '.join(STATES)}")
    codes = tokens.assign(state=tokens["state"].map(list(STATES).index)).pivot(
        index="head", columns="position", values="state"
    )
    heads = len(codes)
    figure, axes = blank((10.5, 1.3 + 0.62 * heads), title, rows=heads, sharex=True)
    extent = (float(codes.columns[0]) - 0.5, float(codes.columns[-1]) + 0.5, 0.0, 1.0)
    for axis, (head, row) in zip(axes, codes.iterrows(), strict=True):
        colors = np.array([to_rgb(STATES[name]) for name in STATES])[row.to_numpy()]  # [positions, 3]
        # Colours, not codes, are averaged where several tokens share a pixel: a blend shows their shares.
        axis.imshow(colors[None], aspect="auto", extent=extent, interpolation="antialiased")
        shares = [f"{np.mean(row == code):.0%} {name}" for code, name in enumerate(STATES)]
        axis.set_yticks([])
        axis.grid(visible=False)
        axis.set_ylabel(f"KV head {head}", rotation=0, ha="right", va="center")
        axis.text(1.01, 0.5, "\n".join(shares), transform=axis.transAxes, va="center", fontsize=8)
    axes[-1].set_xlabel("position in the prompt (tokens)")
    figure.legend(
        handles=[Patch(facecolor=STATES[s], edgecolor="#888888", label=STATE_LABELS[s]) for s in STATES],
        loc="outside lower center",
        ncols=len(STATES),
    )
    figure.data = tokens
    return figure


@styled
def adjacent_similarity(
    cosines: pd.DataFrame, *, title: str = "Are neighbours alike? Keys and values of adjacent tokens"
) -> Figure:
    """Cosine of adjacent keys and of adjacent values, layer by layer.

    Keys that all share a large common part are alike whether adjacent or not: what neighbours add is the distance
    to the dotted line, tokens far apart.

    Parameters
    ----------
    cosines
        ``layer`` (int), ``kind`` (key, value, and key-apart, value-apart for comparison), ``cosine`` (-1 to 1);
        several rows a layer and kind (pairs, heads) become a line through their mean; adjacent ones a band over
        their middle 80 %, too.
    title
        The figure's title.
    """
    groups = cosines.groupby(["layer", "kind"])["cosine"]
    table = groups.agg(
        mean="mean", low=lambda x: x.quantile(0.1), high=lambda x: x.quantile(0.9), n="count"
    ).reset_index()
    figure, axes = blank((8, 4), title)
    for kind, (color, marker, dash, label) in KINDS.items():
        rows = table[table["kind"] == kind]
        if len(rows):
            axes[0].plot(
                rows["layer"], rows["mean"], color=color, marker=marker, linestyle=dash, ms=5, label=label
            )
        if not kind.endswith("apart"):
            axes[0].fill_between(rows["layer"], rows["low"], rows["high"], color=color, alpha=0.18, lw=0)
    axes[0].axhline(0, color="black", lw=1)
    axes[0].set(xlabel="layer", ylabel="cosine of two tokens")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(KINDS))
    subtitle(axes[0], "line: mean over pairs and heads; band: their middle 80 %")
    figure.data = table
    return figure


@styled
def cardinality(entries: pd.DataFrame, *, title: str = "How many tokens does one entry stand for?") -> Figure:
    """Histogram of cardinalities; the count axis is logarithmic, since most entries stand for one token.

    Parameters
    ----------
    entries
        One row an entry: ``cardinality`` (tokens merged into it, itself included, at least 1).
    title
        The figure's title.
    """
    values = entries["cardinality"].to_numpy(dtype=float)
    # A bin each for 1, 2, 3 and 4, then twice as wide each time: 5-8, 9-16, ...
    last = max(3, int(np.ceil(np.log2(max(values.max(), 4)))))
    edges = np.array([0, 1, 2, 3, 4, *(2.0**k for k in range(3, last + 1))])
    counts = np.histogram(values, edges + 0.5)[0]
    names = [f"{int(a) + 1}" if b == a + 1 else f"{int(a) + 1}-{int(b)}" for a, b in pairwise(edges)]
    shares = np.histogram(values, edges + 0.5, weights=values)[0] / values.sum()
    figure, axes = blank((1.6 + 0.75 * len(names), 4), title)
    bars = axes[0].bar(names, counts, color=look("kvslimmer").color, width=0.85)
    labels = [f"{count:,}\n{share:.0%}" for count, share in zip(counts, shares, strict=True)]
    axes[0].bar_label(bars, labels, fontsize=8, padding=2)
    axes[0].set(yscale="log", xlabel="tokens an entry stands for", ylabel="entries (log scale)")
    axes[0].set_ylim(0.7, counts.max() * 6)
    axes[0].grid(axis="x", visible=False)
    subtitle(
        axes[0],
        f"{len(values):,} entries for {values.sum():,.0f} tokens\n"
        "on each bar: its entries, and the share of all tokens in them",
    )
    figure.data = pd.DataFrame({"tokens": names, "entries": counts, "share_of_tokens": shares})
    return figure
