"""kvrepro: reproduce, check and extend two papers on merging the key-value cache of language models.

model, tokenizer = kvrepro.load("smollm2-135m")
cache = kvrepro.make_cache(model, "selkv", retain=0.25)
inputs = tokenizer("...", return_tensors="pt")
model.generate(**inputs, cache=cache)
cache.report()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from . import methods
    from .hf import KVCache, make_cache, prefill
    from .models import load

__version__ = "0.1.0"
__all__ = ["KVCache", "UserError", "load", "make_cache", "methods", "prefill"]

_HOME = {"KVCache": ".hf", "make_cache": ".hf", "prefill": ".hf", "load": ".models"}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when they are used: ``kvrepro --help`` and the tables need neither."""
    if name == "methods":
        return import_module(".methods", __name__)
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
