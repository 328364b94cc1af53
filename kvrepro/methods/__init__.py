"""The methods, one file each; importing this package registers them, in the order of tables and figures."""

from .base import Budget, Method, available, make, method_class
from .full import Full, FullFolded  # isort: skip
from .streaming_llm import StreamingLLM  # isort: skip
from .h2o import H2O, VATP  # isort: skip
from .snapkv import SnapKV  # isort: skip
from .pyramidkv import PyramidKV  # isort: skip
from .look_m import LookM  # isort: skip
from .weightedkv import WeightedKV  # isort: skip
from .kvmerger import KVMerger  # isort: skip
from .selkv import SelKV  # isort: skip
from .kvslimmer import KVSlimmer  # isort: skip

__all__ = [
    "H2O", "VATP", "Budget", "Full", "FullFolded", "KVMerger", "KVSlimmer", "LookM", "Method", "PyramidKV", "SelKV",
    "SnapKV", "StreamingLLM", "WeightedKV", "available", "make", "method_class",
]  # fmt: skip
