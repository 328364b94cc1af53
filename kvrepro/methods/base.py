"""What a method is: a frozen dataclass of settings with one pure function, ``compress``.

To add one: subclass ``Method`` in a file of its own, declare its settings with ``setting(...)``, write ``compress``,
decorate the class with ``@register``, and import the file in ``methods/__init__.py``.  Runner, tables and command line
take it by name; ``plots.LOOKS`` and ``results.ARMS`` give it a colour and a place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..attention import Observed
from ..entries import Entries
from ..errors import UserError
from ..rope import Rope

Diagnostics = dict[str, float]


def setting(
    default: Any, doc: str, source: str, choices: tuple[Any, ...] | None = None, least: float | None = None
) -> Any:
    """A setting of a method: its default, what it does, and whether the paper says so or we chose.

    ``source`` is shown by ``kvrepro explain``; ``choices`` and ``least`` are checked when a method is made.
    """
    return dataclasses.field(
        default=default, metadata={"doc": doc, "source": source, "choices": choices, "least": least}
    )


@dataclass(frozen=True)
class Budget:
    """How many entries a layer may hold after prefill: a share of the prompt, or a number.

    Attributes
    ----------
    retain : float or None
        Share in (0, 1]; m = floor(retain·n + 0.5), at least 1.
    entries : int or None
        m itself, at least 1.
    """

    retain: float | None = None
    entries: int | None = None

    def __post_init__(self) -> None:
        if (self.retain is None) == (self.entries is None):
            raise UserError(
                "give the budget either as retain= (a share in (0, 1]) or as budget= (entries), not both"
            )
        if self.retain is not None and not (_fits(self.retain, "float") and 0 < self.retain <= 1):
            raise UserError(f"retain={self.retain!r} is not a share; give a number above 0 and at most 1")
        if self.entries is not None and not (_fits(self.entries, "int") and self.entries >= 1):
            raise UserError(
                f"budget={self.entries!r} is not a number of entries; give an integer of at least 1"
            )

    def resolve(self, n: int) -> int:
        """m for a prompt of n tokens (SelKV, step 2: round half up)."""
        if self.entries is not None:
            return int(self.entries)
        assert self.retain is not None
        return max(1, math.floor(self.retain * n + 0.5))


# The annotations a setting may have, and how to name them to a person.
KINDS = {
    "bool": "True or False",
    "int": "a whole number",
    "int | None": "a whole number or None",
    "float": "a finite number",
    "str": "a name",
}


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of the kind its annotation says; True is no number, infinity and NaN are none to use."""
    if kind not in KINDS:  # not a setting that a user gives
        return True
    if value is None:
        return kind == "int | None"
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, str if kind == "str" else int)


@dataclass(frozen=True)
class Method:
    """One way to compress a layer; subclasses add settings and ``compress``.

    Class attributes
    ----------------
    name : str
    schedule : "one-shot", "chunked" or "driven"
        one-shot: called once, after the prompt was attended to whole.  chunked: the layer splits the prompt by
        ``chunks`` and calls ``compress`` after each chunk has attended to what is stored.  driven: like chunked,
        but over all tokens but the last and with m - 1 entries, in passes of its own through the model
        (``kvrepro.prefill``), because it needs ``gradient`` or ``rehearsal``.
    formula, paper : str
        For ``kvrepro explain``.
    arms : mapping
        Named variations: arm -> settings.
    """

    name: ClassVar[str]
    schedule: ClassVar[str] = "one-shot"
    formula: ClassVar[str]
    paper: ClassVar[str]
    arms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices, least = (
                getattr(self, field.name),
                field.metadata["choices"],
                field.metadata["least"],
            )
            where = f"{self.name}: {field.name}={value!r}"
            if not _fits(value, str(field.type)):
                raise UserError(f"{where} is not {KINDS[str(field.type)]}; give one")
            if choices is not None and value not in choices:
                raise UserError(f"{where} is not known; choose from {', '.join(map(repr, choices))}")
            if least is not None and value is not None and not value >= least:
                raise UserError(f"{where} is too small; give at least {least}")

    def untouched(self, n: int, m: int) -> bool:
        """Whether a prompt of n tokens passes through as it is under a budget of m entries."""
        return m >= n

    def chunks(self, n: int, m: int) -> list[int]:
        """Lengths of the chunks a prompt is attended in; one-shot methods take it whole."""
        return [n]

    def used(self, n: int, m: int) -> Diagnostics:
        """Sizes that the budget fixes (recorded beside the diagnostics, once)."""
        return {}

    def summary(self, entries: Entries, n: int) -> Diagnostics:
        """What the entries left of n tokens amount to (recorded once, after the last chunk)."""
        return {}

    # What a driven method needs, which may depend on its settings

    @property
    def gradient(self) -> bool:
        """Whether ``observed.gradient`` holds the gradient of the chunk's loss: a backward pass a chunk."""
        return False

    @property
    def rehearsal(self) -> bool:
        """Two passes a chunk: one for the statistics, after which the past shrinks to m - chunk; then one that attends
        to the shrunken past and appends the chunk.  Otherwise one pass: attend, append, shrink the older entries to m.

        ``compress`` is the same: it is given past and chunk, and returns m entries that end with the chunk.
        """
        return False

    def place(self, entries: Entries, rope: Rope, seen: int) -> Entries:
        """Where the entries of a driven method stand for the next queries, which begin at position ``seen``."""
        return entries

    def compress(self, entries: Entries, observed: Observed, m: int) -> tuple[Entries, Diagnostics]:
        """Reduce ``entries`` to at most ``m``, from what the layer saw; diagnostics of chunks are summed."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Class decorator: make the method known by its name."""
    REGISTRY[method.name] = method
    return method


def available() -> list[str]:
    """Names of all methods."""
    return list(REGISTRY)


def method_class(name: str) -> type[Method]:
    """The class registered under ``name``; an unknown name is a UserError that lists the known ones."""
    if name not in REGISTRY:
        raise UserError(f"unknown method {name!r}; known are {', '.join(available())}")
    return REGISTRY[name]


def make(name: str, **settings: Any) -> Method:
    """A method by name, ``"selkv"`` or with an arm ``"selkv/evict"``; ``settings`` override the arm's.

    Examples
    --------
    >>> make("selkv/evict").bias
    'none'
    """
    base, _, arm = name.partition("/")
    cls = method_class(base)
    if arm and arm not in cls.arms:
        raise UserError(f"{base} has no arm {arm!r}; its arms are {', '.join(cls.arms) or 'none'}")
    chosen = {**(cls.arms[arm] if arm else {}), **settings}
    known = [field.name for field in dataclasses.fields(cls)]
    for key in chosen:
        if key not in known:
            raise UserError(f"{base} has no setting {key!r}; its settings are {', '.join(known) or 'none'}")
    return cls(**chosen)
