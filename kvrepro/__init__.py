"""kvrepro: reproduce, check and extend two papers on merging the key-value cache of language models.

    model, tokenizer = kvrepro.load("smollm2-135m")
    cache = kvrepro.make_cache(model, "selkv", retain=0.25)
    inputs = tokenizer("...", return_tensors="pt")
    model.generate(**inputs, cache=cache)
    cache.report()
"""

from . import methods
from .errors import UserError
from .hf import KVCache, make_cache, prefill
from .models import load

__version__ = "0.1.0"
__all__ = ["KVCache", "UserError", "load", "make_cache", "methods", "prefill"]
