"""The methods, one file each; importing this package registers them, in the order of tables and figures."""

# isort: off
from .base import Budget, Method, available, make, method_class
from .full import Full, FullFolded
from .streaming_llm import StreamingLLM
from .h2o import H2O, VATP
from .snapkv import SnapKV
from .pyramidkv import PyramidKV
from .look_m import LookM
from .weightedkv import WeightedKV
from .kvmerger import KVMerger
from .bifocal import Bifocal
from .selkv import SelKV
from .asymkv import AsymKV
from .kvslimmer import KVSlimmer
from .released import KVSlimmerReleased
from .adjacent import Adjacent
# isort: on

__all__ = [
    "H2O", "VATP", "Adjacent", "AsymKV", "Bifocal", "Budget", "Full", "FullFolded", "KVMerger", "KVSlimmer",
    "KVSlimmerReleased", "LookM", "Method", "PyramidKV", "SelKV", "SnapKV", "StreamingLLM", "WeightedKV",
    "available", "make", "method_class",
]  # fmt: skip
