"""One function a figure: a table in, a figure out; the same colour for the same method everywhere.

Every figure carries the table that it shows, and :func:`save` writes both: NAME.png, NAME.svg and NAME.csv,
byte for byte the same on every run (no dates, no versions, fixed identifiers). Nothing here computes a
result: means, intervals and differences come from :mod:`kvrepro.stats` and :mod:`kvrepro.results`.

``kvrepro figures DIR`` redraws everything from stored results.
"""

from .agreement import agreement, beside_published
from .canvas import Figure, save
from .inside import adjacent_similarity, cardinality, entries_map, sag
from .looks import LOOKS, METRICS, Look, Metric, look
from .outcomes import across, categories, datasets, intervals, main_scores
from .sweep import lasting, sweep
from .theory import angle_relation, merged_alphas, ranks, rule_weights, similarity_spectrum, spectra

__all__ = [
    "LOOKS",
    "METRICS",
    "Figure",
    "Look",
    "Metric",
    "across",
    "adjacent_similarity",
    "agreement",
    "angle_relation",
    "beside_published",
    "cardinality",
    "categories",
    "datasets",
    "entries_map",
    "intervals",
    "lasting",
    "look",
    "main_scores",
    "merged_alphas",
    "ranks",
    "rule_weights",
    "sag",
    "save",
    "similarity_spectrum",
    "spectra",
    "sweep",
]
