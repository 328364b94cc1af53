"""How each method and each measure looks, everywhere alike: colour, marker, name, unit."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """How an arm is drawn and named."""

    color: str
    marker: str
    label: str


# Hues are far apart for the common forms of colour blindness (after Okabe and Ito, and Tol) between methods
# that share a figure; arms of one method are shades of its hue, and a marker is never used twice with
# neighbours.
LOOKS = {
    "full": Look("#000000", "o", "full cache"),
    "full-folded": Look("#777777", "o", "full cache, folded kernel"),
    "streaming-llm": Look("#999933", "p", "StreamingLLM"),
    "h2o": Look("#882255", "H", "H2O"),
    "snapkv": Look("#E69F00", "s", "SnapKV"),
    "pyramidkv": Look("#85500A", "^", "PyramidKV"),
    "vatp": Look("#661100", "v", "VATP"),
    "look-m": Look("#C2387E", "<", "LOOK-M"),
    "weightedkv": Look("#6F63BB", ">", "WeightedKV"),
    "kvmerger": Look("#CC6677", "d", "KVMerger"),
    "bifocal": Look("#117733", "8", "Bifocal (ours)"),
    "adjacent": Look("#44AA99", "X", "Adjacent merge"),
    "selkv/on-bifocal": Look("#66A61E", "h", "Bifocal + SelKV merge"),
    "selkv/on-bifocal+gate": Look("#8FC454", "<", "Bifocal + gate, no bias"),
    "selkv/on-bifocal+gated-count": Look("#3F6B12", "X", "Bifocal + gate, gated-count bias"),
    "selkv/on-bifocal+merge-all": Look("#B9DE8F", "^", "Bifocal + merge all"),
    "selkv": Look("#0072B2", "D", "SelKV"),
    "selkv/evict": Look("#56B4E9", "v", "SelKV: evict only"),
    "selkv/merge-all": Look("#332288", "^", "SelKV: merge all"),
    "selkv/gate": Look("#009E73", "<", "SelKV: gate, no bias"),
    "selkv/gate+count": Look("#004D33", "P", "SelKV: gate, count bias"),
    "selkv/gate+gated-count": Look("#5FC4A2", "X", "SelKV: gate, gated-count bias"),
    "selkv/merge-all+ratio": Look("#9A8BD9", ">", "SelKV: merge all, ratio bias"),
    "selkv/alpha-0.25": Look("#7FB2D9", "8", "SelKV: alpha 0.25"),
    "selkv/alpha-1": Look("#003A63", "d", "SelKV: alpha 1"),
    "selkv/on-snapkv": Look("#D55E00", "h", "SnapKV + SelKV merge"),
    "asymkv": Look("#B5577F", "X", "AsymKV"),
    "kvslimmer": Look("#CC79A7", "*", "KVSlimmer"),
    "kvslimmer/diagonal": Look("#5A1846", "s", "KVSlimmer: diagonal weights"),
    "kvslimmer/mass": Look("#1F5FA8", "o", "KVSlimmer: weights by mass"),
    "kvslimmer/mean": Look("#B8860B", "^", "KVSlimmer: weights by l"),
    "kvslimmer/drop-lighter": Look("#0A7A4B", "v", "KVSlimmer: drop the lighter"),
    "kvslimmer/clamped": Look("#5B2A86", "D", "KVSlimmer: l clamped at 5"),
    "kvslimmer/ratio": Look("#00766C", "h", "KVSlimmer: ratio bias"),
    "kvslimmer/ratio-alpha-1": Look("#66B5E8", "d", "KVSlimmer: ratio bias, alpha 1"),
    "kvslimmer/no-bias": Look("#D1803A", "p", "KVSlimmer: no bias"),
    "kvslimmer/plain-sum": Look("#8C2D19", "P", "KVSlimmer: plain sum"),
    "kvslimmer/plain-mean": Look("#E0A458", "X", "KVSlimmer: plain mean"),
    "kvslimmer/mass-values": Look("#4C956C", "<", "KVSlimmer: values by mass"),
    "kvslimmer/as-key": Look("#274690", ">", "KVSlimmer: values as the keys"),
    "kvslimmer-released": Look("#EA9CC6", "P", "KVSlimmer, released code"),
}

# Arms of bifocal that are nothing of its own: the votes of some queries, as other methods take them.
SELECTORS = ("window", "whole", "sampled", "mixed")


class Metric(NamedTuple):
    """How a metric is named, its unit, the digits it is printed with, and which way is better."""

    label: str
    unit: str
    digits: int
    better: str


METRICS = {
    "score": Metric("task score", "points of 100", 1, "right"),
    "nll": Metric("NLL of the gold answer", "nats a token", 3, "left"),
    "kl": Metric("KL from the full cache", "nats a token", 3, "left"),
    "agree": Metric("top-1 agreement with the full cache", "share", 3, "right"),
    "kept_entries": Metric("entries kept", "share", 3, "left"),
    "kept_bytes": Metric("bytes kept", "share", 3, "left"),
}


def look(arm: str) -> Look:
    """Return an arm's colour, marker and label: its method's where it has none, grey for a method that is not ours."""
    method, _, part = arm.partition("/")
    if method == "bifocal" and part.partition("-")[0] in SELECTORS:
        return Look("#555555", "o", f"Selector: {part.replace('-', ' ')}")
    if part and arm not in LOOKS and method in LOOKS:
        return LOOKS[method]._replace(label=f"{LOOKS[method].label}: {part.replace('-', ' ')}")
    return LOOKS.get(arm, Look("#555555", "o", arm))
