"""What the papers' tables cost on GPUs: the arithmetic behind docs/scale.md.  Estimated, not measured on a GPU.

    python -m kvrepro.costs docs/scale.md      writes the page's tables anew (a test compares them)

Nothing here is read from a device.  Sizes of data and models are public, the operations of a layer are counted (a test
counts again), and what is assumed of a GPU stands in ``ASSUMED`` and on the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import profiles, studies
from .methods import make

# LongBench, Table 1: rows and mean words; dataset2maxlen: longest answer, tokens
ROWS = {
    "narrativeqa": (200, 18409, 128), "qasper": (200, 3619, 128), "multifieldqa_en": (150, 4559, 64),
    "hotpotqa": (200, 9151, 32), "2wikimqa": (200, 4887, 32), "musique": (200, 11214, 32),
    "gov_report": (200, 8734, 512), "qmsum": (200, 10614, 512), "multi_news": (200, 2113, 512),
    "trec": (200, 5177, 64), "triviaqa": (200, 8209, 32), "samsum": (200, 6258, 128),
    "passage_count": (200, 11141, 32), "passage_retrieval_en": (200, 9289, 32),
    "lcc": (500, 1235, 64), "repobench-p": (500, 4206, 64),
}  # fmt: skip
CODE = ("lcc", "repobench-p")


@dataclass(frozen=True)
class Shape:
    """A model of the papers, as its config says; weights and cache in 16 bits."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False  # one matrix for embedding and output
    biased: bool = False  # of the projections to query, key and value
    norms: int = 2  # of a layer

    @property
    def layer(self) -> int:
        """Weights of a layer that multiply every token."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        small = self.norms * self.hidden + self.biased * self.head_dim * (self.heads + 2 * self.kv_heads)
        matrices = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer + small) + matrices + self.hidden

    def kv_bytes(self, n: float) -> float:
        """Of n tokens under the full cache (a sliding window is counted as a full layer)."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2 * n


SHAPES = {
    "longchat-7b": Shape(32, 4096, 32, 32, 128, 11008, 32000),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "gemma-2-9b": Shape(42, 3584, 16, 8, 256, 14336, 256000, tied=True, norms=4),
    "mistral-7b-v0.3": Shape(32, 4096, 32, 8, 128, 14336, 32768),
    "qwen2-1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936, tied=True, biased=True),
    "qwen2-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, biased=True),
}


@dataclass(frozen=True)
class Device:
    """Peak rates of a GPU as its maker states them: FLOP/s in bf16 (dense) and float32, bytes/s, bytes."""

    bf16: float
    float32: float
    bandwidth: float
    memory: float


DEVICES = {
    "H100": Device(989e12, 67e12, 3.35e12, 80e9),
    "A100": Device(312e12, 19.5e12, 2.04e12, 80e9),
}
ASSUMED = {
    "utilisation": 0.4,  # of the peak FLOP/s, in long matrix products
    "bandwidth": 0.6,  # of the peak, in reading weights and cache
    "operation": 20e-6,  # seconds of one tensor operation, Python and launch together, where it is too small to fill a GPU
    "words": 1.5,  # tokens a word of prose
    "code": 3.0,  # tokens a word of code
    "passes": 5,  # over the attention weights, to make whole-prompt statistics of them
}
OPERATIONS = {
    "layer": 42,
    "one-shot": 120,
    "chunked": 400,
    "driven": 620,
}  # of a layer: forward, arm, chunk of an arm
CHUNK = 512


@dataclass(frozen=True)
class Cost:
    """Seconds of GPU time of all rows, by what they are spent on."""

    prefill: float
    statistics: float
    compression: float
    decode: float
    chunked: float

    @property
    def hours(self) -> float:
        return (self.prefill + self.statistics + self.compression + self.decode + self.chunked) / 3600


def tokens(dataset: str, context: int) -> float:
    """Tokens of a mean row cut to the context.  The mean of cut rows is less."""
    return min(context, ROWS[dataset][1] * ASSUMED["code" if dataset in CODE else "words"])


def prefill_flops(shape: Shape, n: float) -> float:
    """Two for each weight and token, and four for each channel of each pair of tokens in attention, half of them."""
    return shape.layers * (2 * shape.layer * n + 2 * shape.heads * shape.head_dim * n**2)


def estimate(
    shape: Shape, device: Device, context: int, arms: tuple[str, ...], shares: tuple[float, ...]
) -> Cost:
    """Seconds of all LongBench rows under some arms, each at every share of entries."""
    schedules = [make(arm).schedule for arm in arms if arm != "full"]
    shared = schedules.count("one-shot") * len(shares)
    step = shape.layers * ASSUMED["operation"]  # seconds of one operation in every layer
    flops, bandwidth = device.bf16 * ASSUMED["utilisation"], device.bandwidth * ASSUMED["bandwidth"]
    totals = [0.0] * 5
    for dataset, (rows, _, answer) in ROWS.items():
        n = tokens(dataset, context)
        prefill = prefill_flops(shape, n) / flops + step * OPERATIONS["layer"]
        pairs = shape.layers * shape.heads * n**2 / 2
        statistics = 2 * pairs * shape.head_dim / (device.float32 * ASSUMED["utilisation"])
        statistics += pairs * 4 * ASSUMED["passes"] / bandwidth
        decode = own = 0.0
        for share in (1.0, *shares):  # the full cache alone, then all arms of a share side by side
            held = shape.kv_bytes(n) * (1 if share == 1 else share * len(schedules))
            a_step = max((2 * shape.parameters + held) / bandwidth, step * OPERATIONS["layer"])
            decode += a_step * (answer + 1)  # and one for the gold answer, read at once
        for share in shares:
            chunks = -(-n // min(CHUNK, max(1, share * n // 4)))
            for schedule in schedules:
                if schedule == "chunked":
                    own += prefill + step * OPERATIONS["chunked"] * chunks
                elif schedule == "driven":  # two passes: forward twice, or forward and backward
                    own += 2 * prefill + step * OPERATIONS["driven"] * chunks
        parts = (prefill, statistics, step * OPERATIONS["one-shot"] * shared, decode, own)
        totals = [total + rows * part for total, part in zip(totals, parts, strict=True)]
    return Cost(*totals)


def memory(shape: Shape, context: int, arms: int, share: float) -> float:
    """Bytes at the end of a shared prefill: weights, the full cache, every arm's entries, and what is worked on."""
    work = (
        context * 3 * shape.intermediate * 2 + 3 * arms * 64 * shape.vocabulary * 4
    )  # one layer; gold logits
    return 2 * shape.parameters + shape.kv_bytes(context) * (1 + arms * share) + work


def arms_that_fit(shape: Shape, device: Device, context: int, share: float, free: float = 0.9) -> int:
    """One-shot arms that can share a prefill of the longest prompt; 0: not even one."""
    fit = 0
    while fit < 99 and memory(shape, context, fit + 1, share) <= free * device.memory:
        fit += 1
    return fit


# The page ------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- costs: written by python -m kvrepro.costs docs/scale.md -->", "<!-- end of costs -->"
GPUS = 8
LONG = 31500
LONG_MODELS = ("llama-3.1-8b", "longchat-7b")  # those of SelKV's long setting


def runs() -> list[tuple[str, int, tuple[str, ...], tuple[float, ...]]]:
    """What the page tells to run: its options, context, arms and shares."""
    papers = profiles.load("papers")
    studied = [(study, studies.of(study, "papers")) for study in ("methods", "slimmer", "sweep")]
    return [
        ("`papers`", papers.context, papers.arms, papers.retain),
        (f"`--context {LONG}`", LONG, papers.arms, papers.retain),
        *((f"`--study {study}`", grid.context, grid.arms, grid.retain) for study, grid in studied),
    ]


def block() -> str:
    """The tables of the page."""
    short, h100 = profiles.load("papers").context, DEVICES["H100"]
    data = [
        [dataset, f"{rows}", f"{tokens(dataset, short):,.0f}", f"{tokens(dataset, LONG):,.0f}", f"{answer}"]
        for dataset, (rows, _, answer) in ROWS.items()
    ]
    total = sum(rows for rows, _, _ in ROWS.values())
    means = [sum(ROWS[d][0] * tokens(d, context) for d in ROWS) / total for context in (short, LONG)]
    data.append(["all", f"{total:,}", *(f"{mean:,.0f} (mean)" for mean in means), ""])
    sizes = []
    for name, shape in SHAPES.items():
        cells = [f"{shape.parameters / 1e9:.2f}", f"{2 * shape.parameters / 1e9:.1f}"]
        for n in (short, LONG):
            fit = arms_that_fit(shape, h100, n, 0.25)
            cells += [f"{shape.kv_bytes(n) / 1e9:.1f}", f"{fit}" if fit < 99 else "99+"]
        sizes.append([name, *cells])
    hours = {gpu: {name: [name] for name in SHAPES} for gpu in DEVICES}
    parts = []
    for options, context, arms, shares in runs():
        for gpu, device in DEVICES.items():
            for name, shape in SHAPES.items():
                if context == LONG and name not in LONG_MODELS:
                    hours[gpu][name].append("")
                    continue
                cost = estimate(shape, device, context, arms, shares)
                hours[gpu][name].append(f"{cost.hours:.1f} ({cost.hours / GPUS:.1f})")
                if (gpu, name) == ("H100", "llama-3.1-8b"):
                    spent = [f"{seconds / 36 / cost.hours:.0f} %" for seconds in vars(cost).values()]
                    parts.append([options, *spent])
    columns = [options for options, *_ in runs()]
    tables = (
        (["set", "rows", f"tokens at {short:,}", f"tokens at {LONG:,}", "longest answer"], data),
        (["model", "parameters, 10⁹", "weights, GB", f"cache at {short:,}, GB", "arms a prefill",
          f"cache at {LONG:,}, GB", "arms a prefill"], sizes),
        *((["GPU hours (on 8) " + gpu, *columns], list(found.values())) for gpu, found in hours.items()),
        (["llama-3.1-8b, H100", "prefill", "statistics", "compression", "decoding", "chunked methods"], parts),
    )  # fmt: skip
    return "\n\n".join((_example(), *(_table(*table) for table in tables)))


def _example() -> str:
    """One row, in words."""
    name, gpu, papers = "llama-3.1-8b", "H100", profiles.load("papers")
    shape, device, n, share = SHAPES[name], DEVICES[gpu], papers.context, papers.retain[0]
    arms = len(papers.arms) - 1
    weights, whole = shape.layers * shape.layer, prefill_flops(shape, n)
    held = shape.kv_bytes(n) * share * arms
    reading = (2 * shape.parameters + held) / (device.bandwidth * ASSUMED["bandwidth"])
    calling = shape.layers * OPERATIONS["layer"] * ASSUMED["operation"]
    return (
        f"One row of {n:,} tokens, {name} on an {gpu}:\n\n"
        f"- prefill: 2 · {weights / 1e9:.2f}·10⁹ weights · {n:,} = {2 * weights * n / 1e12:.1f} TFLOP, and in attention "
        f"2 · {shape.layers} layers · {shape.heads} heads · {shape.head_dim} channels · {n:,}² = "
        f"{(whole - 2 * weights * n) / 1e12:.1f} TFLOP; at {ASSUMED['utilisation']:.0%} of {device.bf16 / 1e12:.0f} TFLOP/s "
        f"{whole / device.bf16 / ASSUMED['utilisation']:.2f} s, once for all one-shot arms\n"
        f"- compression: {arms} arms · {shape.layers} layers · {OPERATIONS['one-shot']} operations · "
        f"{ASSUMED['operation'] * 1e6:.0f} µs = {arms * shape.layers * OPERATIONS['one-shot'] * ASSUMED['operation']:.1f} s\n"
        f"- a decoding step of all arms side by side reads {2 * shape.parameters / 1e9:.1f} GB of weights and "
        f"{held / 1e9:.1f} GB of cache, {1000 * reading:.0f} ms at {ASSUMED['bandwidth']:.0%} of "
        f"{device.bandwidth / 1e12:.2f} TB/s; its {shape.layers} · {OPERATIONS['layer']} operations of "
        f"{ASSUMED['operation'] * 1e6:.0f} µs take {1000 * calling:.0f} ms, and the longer of the two counts; there are as "
        "many steps as the set's longest answer has tokens, once for the full cache and once for each share of entries"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{block()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
