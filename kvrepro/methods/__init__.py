"""The methods, one file each; importing this package registers them."""

from .base import Budget, Method, available, make, method_class
from .full import Full, FullFolded
from .kvslimmer import KVSlimmer
from .selkv import SelKV
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM

__all__ = [
    "Budget", "Full", "FullFolded", "KVSlimmer", "Method", "SelKV", "SnapKV", "StreamingLLM",
    "available", "make", "method_class",
]  # fmt: skip
