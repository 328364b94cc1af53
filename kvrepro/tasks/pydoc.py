"""Offline tasks in LongBench's six categories, built from the documentation and code of the installed packages.

Golds are exact by construction: signatures, summary lines and source lines are read from the text itself (see
``corpus``: pinned packages only, the standard library is left out). Instructions follow LongBench's wording.

Every sample is drawn from its own seed (task, context, index), so sample i is the same whatever the limit. Lengths are
budgeted without a tokenizer: all models see the same text, which for SmolLM2 (chat template included) is at most
``context`` tokens and rarely below 80 % of it.

Rewrite the manifest after a change of builders or of the locked versions (half a minute):

    python -m kvrepro.tasks.pydoc --write-manifest
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from kvrepro.errors import UserError
from kvrepro.tasks import corpus, needle
from kvrepro.tasks.base import Sample
from kvrepro.tasks.corpus import Entry, Source

MIN_CONTEXT, MAX_CONTEXT = 1024, 8192

_TEMPLATE = 40  # tokens left for a chat template
_MARGIN = 1.06  # how far the estimate of a whole prompt can be too low
_STRIDE = (
    128  # how much further on a sample looks when its target does not work out, so that neighbours share none
)

Drawn = tuple[str, str] | None  # prompt and gold answer, or None: this target does not work with this seed


@dataclass(frozen=True)
class Builder:
    """How one task is built: what is asked about (``targets(context)``) and how a prompt is drawn around it."""

    category: str
    metric: str
    max_new_tokens: int
    targets: Callable[[int], Sequence[Any]]
    draw: Callable[[Any, Random, float], Drawn]
    chat: bool = True
    first_line: bool = False


def build(task: str, context: int, index: int) -> Sample:
    """Sample ``index`` of a task, independent of every other sample.

    Raises
    ------
    UserError
        For a context outside 1024..8192.
    """
    if not MIN_CONTEXT <= context <= MAX_CONTEXT:
        raise UserError(
            f"context {context} is not supported; offline tasks are built for {MIN_CONTEXT} to {MAX_CONTEXT} tokens; "
            "choose a value in that range"
        )
    builder = BUILDERS[task]
    order = list(builder.targets(context))
    Random(f"{task}/{context}").shuffle(order)
    rng = Random(f"{task}/{context}/{index}")
    budget = (context - _TEMPLATE) / _MARGIN
    for attempt in range(len(order)):
        step = index + attempt * _STRIDE
        place = (step + step // len(order)) % len(order)  # one further on each round, so that all are visited
        drawn = builder.draw(order[place], rng, budget)
        if drawn is not None:
            prompt, gold = drawn
            return Sample(
                id=f"{task}/{context}/{index:04d}",
                task=task,
                category=builder.category,
                prompt=prompt,
                answers=(gold,),
                metric=builder.metric,
                max_new_tokens=builder.max_new_tokens,
                chat=builder.chat,
                first_line=builder.first_line,
            )
    raise RuntimeError(f"no {task} sample {index} can be built at context {context}")


def _others(target: Entry, rng: Random) -> list[Entry]:
    """All other entries: those of the same module first, then of the same package, each group shuffled."""
    pool = [e for e in corpus.entries() if e is not target]
    rng.shuffle(pool)
    return sorted(
        pool, key=lambda e: (e.source is not target.source, e.source.package != target.source.package)
    )


_FRAME = 7  # tokens of "Paragraph 12: " and the blank line


def _numbered(blocks: Iterable[str]) -> str:
    return "\n\n".join(f"Paragraph {i}: {block}" for i, block in enumerate(blocks, 1))


def _paragraph(entry: Entry, budget: float) -> str:
    """The beginning of a documentation body as one paragraph: without blank lines."""
    return corpus.cut(re.sub(r"\n\s*\n", "\n", entry.body), budget)


def _insert(block: str, blocks: list[str], rng: Random) -> int:
    """Put ``block`` at a random place and return its index."""
    place = rng.randint(0, len(blocks))
    blocks.insert(place, block)
    return place


# Defaults: one hop on a page, two hops over passages --------------------------------------------------------

DEFAULT = """Read the following reference manual and answer briefly.

{context}

Now, answer the following question based on the above text, only give me the answer and do not output any \
other words.

Question: What is the default value of the parameter "{parameter}" of {name}? Give it as name=value, exactly \
as it is written in the signature.
Answer:"""

HOP = """Answer the question based on the given passages. Only give me the answer and do not output any \
other words.

The following are given passages.
{context}

Answer the question based on the given passages. Only give me the answer and do not output any other words.

Question: One of the functions above is documented as "{summary}" What is the default value of its parameter \
"{parameter}"? Give it as name=value, exactly as it is written in the signature.
Answer:"""

_LITERAL = re.compile(r"""-?\d[\w.+-]*|'[^'\s]+'|"[^"\s]+\"""")


@dataclass(frozen=True, eq=False)
class Ask:
    """A parameter whose default is asked for."""

    entry: Entry
    parameter: str
    value: str

    @property
    def gold(self) -> str:
        return f"{self.parameter}={self.value}"


@cache
def asks() -> tuple[Ask, ...]:
    """Parameters with a literal default that cannot be guessed well: no None, no truth value, no 0, 1 or -1."""
    return tuple(
        Ask(entry, name, value)
        for entry in corpus.entries()
        for name, value in entry.defaults
        if _LITERAL.fullmatch(value) and value not in ("0", "1", "-1")
    )


def _occurs_once(gold: str, prompt: str) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(gold)}(?!\w)", prompt)) == 1


def draw_default(ask: Ask, rng: Random, budget: float) -> Drawn:
    """A manual of several functions from one module; the default of a parameter of one of them."""

    def render(entry: Entry) -> str:
        text = corpus.cut(f"{entry.summary}\n\n{entry.body}", max(200.0, budget / 4))
        return f"{entry.signature}\n{text}"

    room = budget - corpus.size(DEFAULT) - corpus.size(ask.entry.name + ask.parameter)
    block = render(ask.entry)
    blocks = corpus.fill(map(render, _others(ask.entry, rng)), room - corpus.size(block))
    _insert(block, blocks, rng)
    prompt = DEFAULT.format(context="\n\n".join(blocks), parameter=ask.parameter, name=ask.entry.name)
    return (prompt, ask.gold) if _occurs_once(ask.gold, prompt) else None


@cache
def _hop_asks() -> tuple[Ask, ...]:
    """Asks whose parameter has another default elsewhere, so that its name alone does not give the answer."""
    values: dict[str, set[str]] = {}
    for ask in asks():
        values.setdefault(ask.parameter, set()).add(ask.value)
    return tuple(a for a in asks() if len(values[a.parameter]) > 1)


def draw_hop(ask: Ask, rng: Random, budget: float) -> Drawn:
    """Documentation and signatures as separate passages: the summary leads to a name, the name to the default."""
    rivals = [a.entry for a in asks() if a.parameter == ask.parameter and a.value != ask.value]
    rivals = [
        r for r in rng.sample(rivals, min(2, len(rivals))) if (ask.parameter, ask.value) not in r.defaults
    ]
    if not rivals:
        return None
    others = [
        e for e in _others(ask.entry, rng) if e not in rivals and (ask.parameter, ask.value) not in e.defaults
    ]
    room = budget - corpus.size(HOP) - corpus.size(ask.entry.summary + ask.parameter)
    passages: list[str] = []
    for entry in [ask.entry, *rivals, *others]:
        text = corpus.cut(entry.body, max(80.0, budget / 12))
        pair = [f"Documentation of {entry.name}\n{entry.summary}\n\n{text}", f"Signature\n{entry.signature}"]
        cost = sum(corpus.size(p) + _FRAME for p in pair)
        if cost <= room:
            passages += pair
            room -= cost
        if room < 60:
            break
    rng.shuffle(passages)
    context = "\n\n".join(f"Passage {i}:\n{text}" for i, text in enumerate(passages, 1))
    prompt = HOP.format(context=context, summary=ask.entry.summary, parameter=ask.parameter)
    has_rival = any(f"Signature\n{rival.signature}" in passages for rival in rivals)
    return (prompt, ask.gold) if has_rival and _occurs_once(ask.gold, prompt) else None


# Summary line of a documented definition --------------------------------------------------------------------

SUMMARY = """You are given the documentation and the source code of {name}, without the summary line of the \
documentation. Other code of the same module may stand around it. Write the summary line.

{context}

Now, write the summary line of {name}: one short sentence that says what it does.

Summary:"""


def _own(entry: Entry) -> str:
    lines = entry.source.lines
    code = "\n".join([*lines[entry.first : entry.doc_first], *lines[entry.doc_last : entry.last]])
    return f"Documentation of {entry.name}:\n\n{entry.body}\n\nCode of {entry.name}:\n\n{code}"


@cache
def _summary_targets(context: int) -> tuple[Entry, ...]:
    """The 384 entries that fill the context best by themselves (3.2 characters a token at least)."""
    lengths = {e: len(_own(e)) for e in corpus.entries()}
    fitting = [e for e in corpus.entries() if lengths[e] <= 0.75 * 3.2 * context]
    return tuple(sorted(fitting, key=lambda e: (-lengths[e], e.name))[:384])


def draw_summary(entry: Entry, rng: Random, budget: float) -> Drawn:
    """Body and code of a definition, with as much of its module before and after it as fits."""
    own = _own(entry)
    room = budget - corpus.size(SUMMARY) - 2 * corpus.size(entry.name) - corpus.size(own) - 20
    lines = entry.source.lines
    share = rng.random()
    # Backwards from the definition: cut keeps the lines nearest to it.
    before = corpus.cut("\n".join(reversed(lines[: entry.first])), room * share)
    after = corpus.cut("\n".join(lines[entry.last :]), room * (1 - share))
    parts = ["\n".join(reversed(before.split("\n"))).strip("\n"), own, after.strip("\n")]
    context = "\n\n".join(part for part in parts if part)
    prompt = SUMMARY.format(name=entry.name, context=context)
    if room < 0 or corpus.size(context) < 0.85 * (budget - corpus.size(SUMMARY)):
        return None
    return None if corpus.normal(entry.summary) in corpus.normal(prompt) else (prompt, entry.summary)


# Few-shot: the function that a summary describes ------------------------------------------------------------

FEWSHOT = """Please give the full name of the function that the summary describes. Here are some examples.

{context}
Summary: {summary}
Function:"""


@cache
def _fewshot_targets(context: int) -> tuple[Entry, ...]:
    """Entries whose last name is theirs alone and is spelled, part by part, in the words of their summary.

    A method's class must be named there, too, and numpy.ma is left out: its functions mirror numpy's own, with the
    same summaries.
    """
    leaves: dict[str, int] = {}
    for entry in corpus.entries():
        leaves[entry.leaf.lower()] = leaves.get(entry.leaf.lower(), 0) + 1
    return tuple(e for e in corpus.entries() if leaves[e.leaf.lower()] == 1 and _is_spelled(e))


def _is_spelled(entry: Entry) -> bool:
    words = corpus.normal(entry.summary).split()
    parts = [p.lower() for p in re.findall(r"[A-Z]?[a-z]+", entry.leaf)]
    owner = entry.name.split(".")[-2]
    if entry.name.startswith("numpy.ma.") or (owner[0].isupper() and owner.lower() not in words):
        return False
    return any(len(p) >= 3 for p in parts) and all(any(_abbreviates(p, w) for w in words) for p in parts)


def _abbreviates(part: str, word: str) -> bool:
    """``det`` and ``determinants`` both stand for ``determinant``."""
    return word.startswith(part) or (
        len(word) >= 4 and part.startswith(word[:5]) and len(part) <= len(word) + 3
    )


def draw_fewshot(entry: Entry, rng: Random, budget: float) -> Drawn:
    """Summaries with their functions, many of the same module, then one more summary."""
    prefix = entry.name.rsplit(".", 1)[0]
    pool = [e for e in corpus.entries() if e is not entry]
    rng.shuffle(pool)
    # A good third of the examples shows how names of the wanted module look.
    kin = [e for e in pool if e.name.rsplit(".", 1)[0] == prefix]
    if len(kin) < 5:
        return None
    share = round(budget / 38 / 3)  # an example takes about 38 tokens
    first = kin[:share]
    rest = [e for e in pool if e not in first]
    shots = [f"Summary: {e.summary}\nFunction: {e.name}" for e in [*first, *rest]]
    chosen = corpus.fill(shots, budget - corpus.size(FEWSHOT) - corpus.size(entry.summary))
    rng.shuffle(chosen)
    prompt = FEWSHOT.format(context="\n".join(chosen), summary=entry.summary)
    return None if entry.name in prompt else (prompt, entry.name)


# Synthetic: which paragraph, how many paragraphs ------------------------------------------------------------

RETRIEVAL = """Here are {n} paragraphs from the reference manuals of Python packages, along with a summary. \
Please determine which paragraph the summary belongs to.

{context}

The following is a summary.

{summary}

Please enter the number of the paragraph that the summary belongs to. The answer format must be like \
"Paragraph 1", "Paragraph 2", etc.

The answer is: """

COUNT = """There are some paragraphs below sourced from the reference manuals of Python packages. Some of \
them may be duplicates. Please carefully read these paragraphs and determine how many unique paragraphs \
there are after removing duplicates. In other words, how many non-repeating paragraphs are there in total?

{context}

Please enter the final count of unique paragraphs after removing duplicates. The answer format must be like \
"Unique paragraphs: 1", "Unique paragraphs: 2", etc.

The final answer is: """


def draw_retrieval(entry: Entry, rng: Random, budget: float) -> Drawn:
    """Signatures with documentation, the summary lines taken out; one of these lines is to be placed."""

    def render(e: Entry) -> str:
        return f"{e.signature}\n{_paragraph(e, max(90.0, budget / 16))}"

    pool = [e for e in corpus.entries() if e is not entry]
    rng.shuffle(pool)
    room = budget - corpus.size(RETRIEVAL) - corpus.size(entry.summary)
    block = render(entry)
    blocks = corpus.fill(map(render, pool), room - corpus.size(block) - _FRAME, frame=_FRAME)
    place = _insert(block, blocks, rng)
    prompt = RETRIEVAL.format(n=len(blocks), context=_numbered(blocks), summary=entry.summary)
    once = corpus.normal(prompt).count(corpus.normal(entry.summary)) == 1
    return (prompt, f"Paragraph {place + 1}") if once else None


def draw_count(entry: Entry, rng: Random, budget: float) -> Drawn:
    """Paragraphs of which some come twice or more; how many different ones there are."""

    pool = [e for e in corpus.entries() if e is not entry]
    rng.shuffle(pool)
    room = budget - corpus.size(COUNT)
    paragraphs = (_paragraph(e, max(80.0, budget / 20)) for e in [entry, *pool])
    blocks = corpus.fill(paragraphs, room, frame=_FRAME)
    if len(set(blocks)) != len(blocks) or len(blocks) < 4:
        return None
    # Some of them stay; repeats of these fill the room that the others leave.
    unique = rng.randint(max(2, len(blocks) // 3), len(blocks))
    kept = blocks[:unique]
    total = sum(corpus.size(b) + _FRAME for b in kept)
    repeats = []
    while True:
        extra = rng.choice(kept)
        total += corpus.size(extra) + _FRAME
        if total > room:
            break
        repeats.append(extra)
    repeated = [*kept, *repeats]
    rng.shuffle(repeated)
    return COUNT.format(context=_numbered(repeated)), f"Unique paragraphs: {unique}"


# Code: the next line of a module, with what it imports ------------------------------------------------------

CODE = """Please complete the code given below.
{context}Next line of code:
"""


@dataclass(frozen=True, eq=False)
class Line:
    """A line that names something its module imports."""

    source: Source
    index: int


@cache
def _code_targets(context: int) -> tuple[Line, ...]:
    """Up to forty lines a module, found by name only (`draw_code` looks at the syntax), far enough from its top."""
    found: dict[str, Line] = {}  # by text: sister modules share lines
    for source in (s for package in corpus.PACKAGES for s in corpus.sources(package)):
        names = _imported(source)
        if not names:
            continue
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        usable: list[int] = []
        above = 0  # characters
        for i, line in enumerate(source.lines):
            # Half of the context is to come from above the line, at 3.2 characters a token.
            if above > 1.6 * context and line[:4].isspace() and word.search(line) and _is_line_to_guess(line):
                usable.append(i)
            above += len(line) + 1
        usable = Random(source.path).sample(usable, min(40, len(usable)))
        found |= {source.lines[i].strip(): Line(source, i) for i in usable}
    return tuple(found.values())


@cache
def _imported(source: Source) -> dict[str, tuple[Source, int, int]]:
    """The imported names that the corpus defines: where, and on which lines."""
    modules = {s.module: s for s in corpus.sources(source.package)}
    found: dict[str, tuple[Source, int, int]] = {}
    for module, names in corpus.parsed(source).imports:
        if module in modules:
            places = {name: (first, last) for name, first, last in corpus.parsed(modules[module]).definitions}
            found |= {name: (modules[module], *places[name]) for name in names if name in places}
    return found


# The beginning of a one-line statement: prose and the inner lines of longer statements mostly differ.
_STATEMENT = re.compile(r"\s+(?:(?:return|raise|assert)\b|[\w.,()\[\] ]+ [-+*/|&]?= |[\w.]+\()")


def _is_line_to_guess(line: str) -> bool:
    # LongBench scores the first predicted line without these marks, so a gold line cannot have them either.
    if not 16 <= len(line.strip()) <= 100 or any(mark in line for mark in ("#", "//", "`", '"""', "'''")):
        return False
    is_whole = all(line.count(left) == line.count(right) for left, right in ("()", "[]", "{}"))
    return is_whole and line[-1] not in ",:\\" and bool(_STATEMENT.match(line))


def draw_code(line: Line, rng: Random, budget: float) -> Drawn:
    """RepoBench's form: definitions that the module imports, then the module up to a line that uses one of them."""
    source, index, lines = line.source, line.index, line.source.lines
    imported = _imported(source)
    used = [name for name in imported if name in corpus.statements(source).get(index, ())]
    if not used:
        return None
    room = budget - corpus.size(CODE) - 30
    rest = [name for name in imported if name not in used]
    rng.shuffle(rest)
    # Half for the imported definitions, the wanted ones first, each with at most a third of that half.
    blocks = []
    for name in [*used, *rest]:
        origin, first, last = imported[name]
        text = corpus.cut("\n".join(origin.lines[first:last]), max(60.0, room / 6))
        blocks.append(f"# Path: {origin.path}\n{text}")
    blocks = corpus.fill(blocks, room / 2)
    rng.shuffle(blocks)
    header = f"# Path: {source.path}\n"
    left = room - sum(corpus.size(b) + 2 for b in blocks) - corpus.size(header)
    above = corpus.cut("\n".join(reversed(lines[:index])), left)
    context = "\n\n".join([*blocks, header + "\n".join(reversed(above.split("\n")))]) + "\n"
    gold = lines[index]
    if corpus.size(context) < 0.9 * room or gold.strip() in context:
        return None
    return CODE.format(context=context), gold


BUILDERS: dict[str, Builder] = {
    "pydoc-default": Builder("single-doc", "qa_f1", 24, lambda context: asks(), draw_default),
    "pydoc-hop": Builder("multi-doc", "qa_f1", 24, lambda context: _hop_asks(), draw_hop),
    "pydoc-summary": Builder("summarization", "rouge_l", 48, _summary_targets, draw_summary),
    "pydoc-fewshot": Builder(
        "few-shot", "exact", 24, _fewshot_targets, draw_fewshot, chat=False, first_line=True
    ),
    "pydoc-retrieval": Builder(
        "synthetic", "retrieval", 12, lambda context: corpus.entries(), draw_retrieval
    ),
    "pydoc-count": Builder("synthetic", "count", 12, lambda context: corpus.entries(), draw_count),
    "needle-single": Builder("synthetic", "needle", 24, lambda context: needle.KEYS, needle.single),
    "needle-multikey": Builder("synthetic", "needle", 24, lambda context: needle.KEYS, needle.multikey),
    "pydoc-code": Builder("code", "code_sim", 64, _code_targets, draw_code, chat=False),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: rewrite the manifest."""
    from kvrepro.tasks import manifest

    parser = argparse.ArgumentParser(
        prog="python -m kvrepro.tasks.pydoc", description="the offline tasks' manifest"
    )
    parser.add_argument(
        "--write-manifest", action="store_true", required=True, help=f"rewrite {manifest.PATH.name}"
    )
    parser.parse_args(argv)
    manifest.write()
    print(f"wrote {manifest.PATH.name}: {len(BUILDERS)} tasks, {manifest.SAMPLES} samples each per context")


if __name__ == "__main__":
    main()
