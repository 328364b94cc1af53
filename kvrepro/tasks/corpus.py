"""Human-written prose and code from the installed packages: the raw material of the offline tasks.

Only numpy, pandas, scipy and torch are read: the lock pins them to one version, so every machine has the same text.
The standard library is left out on purpose: its text changes with Python's patch releases, which no lock pins. Files
are chosen that are pure Python and the same on every platform and in CPU and CUDA builds. They are read as text and
parsed with ``ast``; nothing is imported or executed, so building a task costs neither torch's start-up nor trust.

The parse (13 MB of source, one to two seconds) is cached for the life of the process.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvrepro.errors import UserError

PACKAGES = ("numpy", "pandas", "scipy", "torch")

# (files below the package's folder, public name under which users know what they define); {stem} is the file's name.
FILES: dict[str, tuple[tuple[str, str], ...]] = {
    "numpy": (
        ("lib/_arraypad_impl.py", "numpy"),
        ("lib/_arraysetops_impl.py", "numpy"),
        ("lib/_function_base_impl.py", "numpy"),
        ("lib/_histograms_impl.py", "numpy"),
        ("lib/_index_tricks_impl.py", "numpy"),
        ("lib/_nanfunctions_impl.py", "numpy"),
        ("lib/_npyio_impl.py", "numpy"),
        ("lib/_polynomial_impl.py", "numpy"),
        ("lib/_shape_base_impl.py", "numpy"),
        ("lib/_twodim_base_impl.py", "numpy"),
        ("lib/_type_check_impl.py", "numpy"),
        ("lib/recfunctions.py", "numpy.lib.recfunctions"),
        ("linalg/_linalg.py", "numpy.linalg"),
        ("fft/_pocketfft.py", "numpy.fft"),
        ("ma/core.py", "numpy.ma"),
        ("ma/extras.py", "numpy.ma"),
        ("polynomial/chebyshev.py", "numpy.polynomial.chebyshev"),
        ("polynomial/polynomial.py", "numpy.polynomial.polynomial"),
        ("polynomial/polyutils.py", "numpy.polynomial.polyutils"),
        ("_core/fromnumeric.py", "numpy"),
        ("_core/function_base.py", "numpy"),
        ("_core/numeric.py", "numpy"),
        ("_core/shape_base.py", "numpy"),
        ("_core/strings.py", "numpy.strings"),
    ),
    "pandas": (
        ("core/frame.py", "pandas"),
        ("core/series.py", "pandas"),
        ("core/indexes/base.py", "pandas"),
        ("core/indexes/datetimes.py", "pandas"),
        ("core/indexes/interval.py", "pandas"),
        ("core/indexes/multi.py", "pandas"),
        ("core/reshape/*.py", "pandas"),
        ("core/tools/datetimes.py", "pandas"),
        ("core/tools/numeric.py", "pandas"),
        ("core/tools/timedeltas.py", "pandas"),
        ("core/algorithms.py", "pandas"),
        ("core/common.py", "pandas.core.common"),
        ("core/missing.py", "pandas.core.missing"),
        ("core/sorting.py", "pandas.core.sorting"),
    ),
    "scipy": (
        ("cluster/*.py", "scipy.cluster.{stem}"),
        ("integrate/_*.py", "scipy.integrate"),
        ("interpolate/_*.py", "scipy.interpolate"),
        ("linalg/_*.py", "scipy.linalg"),
        ("ndimage/_*.py", "scipy.ndimage"),
        ("optimize/_*.py", "scipy.optimize"),
        ("signal/_*.py", "scipy.signal"),
        ("spatial/_*.py", "scipy.spatial"),
        ("stats/_*.py", "scipy.stats"),
    ),
    "torch": (
        ("functional.py", "torch"),
        ("autograd/functional.py", "torch.autograd.functional"),
        ("distributions/*.py", "torch.distributions"),
        ("nn/functional.py", "torch.nn.functional"),
        ("nn/init.py", "torch.nn.init"),
        ("nn/modules/*.py", "torch.nn"),
        ("nn/utils/prune.py", "torch.nn.utils.prune"),
        ("nn/utils/*.py", "torch.nn.utils"),
        ("optim/lr_scheduler.py", "torch.optim.lr_scheduler"),
        ("optim/*.py", "torch.optim"),
        ("utils/data/*.py", "torch.utils.data"),
    ),
}
# Large files that hold tables of numbers, or documentation filled into templates at run time.
LEFT_OUT = (
    "scipy/integrate/_lebedev.py",
    "scipy/optimize/_linprog_doc.py",
    "scipy/stats/_continuous_distns.py",
    "scipy/stats/_discrete_distns.py",
    "scipy/stats/_distribution_infrastructure.py",
    "scipy/stats/_distn_infrastructure.py",
    "scipy/stats/_multivariate.py",
)

_WORD = re.compile(r"[A-Za-z]+")
_PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+")


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: cheap cache keys
class Source:
    """One module: its package, path below site-packages, dotted module name, public prefix and lines of text."""

    package: str
    path: str
    module: str
    public: str
    lines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A documented function or class.

    Attributes
    ----------
    name : str
        Dotted public name, e.g. ``numpy.linalg.inv`` (by the rule in ``FILES``, not by importing).
    signature : str
        ``name(a, b=1)`` with the defaults exactly as the source spells them, annotations left out.
    defaults : tuple of (str, str)
        (parameter, default) of the parameters that have one.
    summary : str
        The docstring's first paragraph on one line: a single sentence.
    body : str
        The docstring without its summary, dedented.
    source : Source
    first, last : int
        Line span [first, last) of the definition in ``source.lines``.
    doc_first, doc_last : int
        Line span of the docstring.
    """

    name: str
    signature: str
    defaults: tuple[tuple[str, str], ...]
    summary: str
    body: str
    source: Source
    first: int
    last: int
    doc_first: int
    doc_last: int

    @property
    def leaf(self) -> str:
        """The last component of the name."""
        return self.name.rsplit(".", 1)[-1]


@cache
def size(text: str) -> float:
    """Tokens of ``text``, estimated without a tokenizer.

    Samples must not depend on a tokenizer (every model sees the same text), so lengths are budgeted in regex
    pieces, with costs fitted to SmolLM2's tokenizer: within 10 % on a paragraph of this corpus, 5 % on a page.
    """
    total = 0.0
    for piece in _PIECE.findall(text):
        if piece[-1].isalpha():
            total += 1 + max(0, len(piece) - 7) / 6
        elif piece.isdigit() or piece.isspace():
            total += 1
        else:
            total += 1.15
    return total


def cut(text: str, budget: float) -> str:
    """The whole lines of ``text`` that fit the budget, without a section heading left hanging at the end."""
    lines = text.split("\n")
    kept = 0
    for line in lines:
        budget -= size(line.strip()) + 1 if line.strip() else 0
        if budget < 0:
            break
        kept += 1
    while 0 < kept < len(lines) and (_is_blank_or_rule(lines[kept - 1]) or _is_heading(lines, kept - 1)):
        kept -= 1
    return "\n".join(lines[:kept])


def _is_blank_or_rule(line: str) -> bool:
    return not line.strip(" -=")


def _is_heading(lines: list[str], index: int) -> bool:
    following = lines[index + 1] if index + 1 < len(lines) else ""
    underlined = bool(following.strip()) and not following.strip(" -=")
    return underlined or bool(re.fullmatch(r"\s*[A-Z][a-z]+:", lines[index]))


def fill(blocks: Iterable[str], budget: float, frame: float = 2) -> list[str]:
    """Blocks in their order, those that fit, until under 3 % of the budget or 24 tokens are left.

    ``frame`` is what each block costs besides its text: blank lines, a number.
    """
    kept: list[str] = []
    left = budget
    for block in blocks:
        cost = size(block) + frame
        if cost <= left:
            kept.append(block)
            left -= cost
        if left < max(24.0, 0.03 * budget):
            break
    return kept


def flat(text: str) -> str:
    """``text`` with every run of white space made one blank: for comparisons that ignore line breaks."""
    return " ".join(text.split())


def package_root(package: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"package {package} is not installed; the offline tasks are built from its source text; "
            f"install the locked version of {package}"
        )
    return Path(spec.origin).parent


def package_version(package: str) -> str:
    """Installed version without its local part: 2.13.0 for 2.13.0+cpu, whose chosen files are the same."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def sources(package: str) -> tuple[Source, ...]:
    """The chosen modules of a package, in a fixed order."""
    root = package_root(package)
    found: dict[str, Source] = {}
    for pattern, public in FILES[package]:
        # As strings: Path sorts differently on Windows.
        for path in sorted(p.relative_to(root).as_posix() for p in root.glob(pattern)):
            if path.endswith("__init__.py") or path in found or f"{package}/{path}" in LEFT_OUT:
                continue
            text = (root / path).read_text(encoding="utf-8")  # universal newlines: the same lines everywhere
            stem = path.rsplit("/", 1)[-1].removesuffix(".py")
            module = f"{package}/{path}".removesuffix(".py").replace("/", ".")
            lines = tuple(text.split("\n"))
            found[path] = Source(package, f"{package}/{path}", module, public.format(stem=stem), lines)
    return tuple(found.values())


@cache
def fingerprint(package: str) -> str:
    """sha256 over the paths and texts of the chosen modules of a package."""
    digest = hashlib.sha256()
    for source in sources(package):
        digest.update(source.path.encode() + b"\0" + "\n".join(source.lines).encode() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Parsed:
    """What the tasks need of one module; the syntax trees themselves would hold ten times the memory.

    Attributes
    ----------
    entries : tuple of Entry
    imports : tuple of (module, names)
        Modules of the same package from which names are imported at the top level.
    definitions : tuple of (name, first, last)
        Line span [first, last) of each top-level function and class, decorators included.
    """

    entries: tuple[Entry, ...]
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    definitions: tuple[tuple[str, int, int], ...]


def tree(source: Source) -> ast.Module:
    """Syntax tree of one module."""
    return ast.parse("\n".join(source.lines))


@cache
def parsed(source: Source) -> Parsed:
    """Parse one module."""
    root = tree(source)
    spans = ((n, *_span(n)) for n in root.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
    return Parsed(
        entries=tuple(_entries_of(source, root)),
        imports=_imports_of(source, root),
        definitions=tuple((node.name, first, last) for node, first, last in spans),
    )


@cache
def entries() -> tuple[Entry, ...]:
    """Every usable documented function and class of the corpus; names and summaries are unique in it."""
    collects = gc.isenabled()
    gc.disable()  # walking the heap again and again while millions of nodes are made doubles the time
    try:
        found = [e for package in PACKAGES for source in sources(package) for e in parsed(source).entries]
    finally:
        if collects:
            gc.enable()
    names: dict[str, int] = {}
    summaries: dict[str, int] = {}
    for entry in found:
        names[entry.name] = names.get(entry.name, 0) + 1
        key = normal(entry.summary)
        summaries[key] = summaries.get(key, 0) + 1
    return tuple(e for e in found if names[e.name] == 1 and summaries[normal(e.summary)] == 1)


def normal(text: str) -> str:
    """Lower-case words only, to compare summaries."""
    return " ".join(_WORD.findall(text.lower()))


def _entries_of(source: Source, root: ast.Module) -> Iterator[Entry]:
    for node in root.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if not _is_public(source, root, node.name):
            continue
        name = f"{source.public}.{node.name}"
        yield from _entry(source, node, name)
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                # A property has no parameters to ask for, an overload no body.
                if not isinstance(child, ast.FunctionDef) or child.decorator_list:
                    continue
                if not child.name.startswith("_"):
                    yield from _entry(source, child, f"{name}.{child.name}", method=True)


def _is_public(source: Source, root: ast.Module, name: str) -> bool:
    """Whether ``name`` can be had from the public module: so that ``public.name`` is no invented name."""
    listed = _listed(root)
    if name.startswith("_") or (listed is not None and name not in listed):
        return False
    if source.module == source.public:
        return True
    explicit, starred = _exports(source.package, source.public)
    return name in explicit or source.module in starred


@cache
def _exports(package: str, module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a module imports, and the modules from which it imports everything, through star imports, too."""
    path = package_root(package).joinpath(*module.split(".")[1:])
    is_package = path.is_dir()
    path = path / "__init__.py" if is_package else path.with_suffix(".py")
    if not path.exists():  # a compiled module
        return frozenset(), frozenset()
    explicit: set[str] = set()
    starred: set[str] = set()
    root = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(root):
        if isinstance(node, ast.ImportFrom):
            names = {a.asname or a.name for a in node.names}
            explicit |= names
            origin = _absolute(node, f"{module}.__init__" if is_package else module)
            if "*" in names and origin.split(".")[0] == package:
                inner = _exports(package, origin)
                explicit |= inner[0]
                starred |= {origin, *inner[1]}
    listed = _listed(root)
    return frozenset(explicit if listed is None else explicit & listed), frozenset(starred)


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """Full name of the module that an import statement in ``module`` means."""
    base = module.split(".")[: -node.level] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _listed(root: ast.Module) -> set[str] | None:
    """The names in a literal ``__all__``, or None where the module has none."""
    for node in root.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return set(ast.literal_eval(node.value))  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None


def _entry(
    source: Source, node: ast.FunctionDef | ast.ClassDef, name: str, method: bool = False
) -> Iterator[Entry]:
    doc = ast.get_docstring(node)
    if (
        not doc or "%(" in doc or "{" in doc.split("\n\n")[0]
    ):  # templates are filled in at run time: not prose
        return
    head, _, body = doc.partition("\n\n")
    summary = flat(head)
    if not _is_sentence(summary) or len(body) < 200 or normal(summary) in normal(body):
        return
    function: ast.AST | None = node
    if isinstance(node, ast.ClassDef):
        function = next(
            (c for c in node.body if isinstance(c, ast.FunctionDef) and c.name == "__init__"), None
        )
    if not isinstance(function, ast.FunctionDef):
        return
    rendered = _signature(source, function, drop_self=method or isinstance(node, ast.ClassDef))
    if rendered is None:
        return
    arguments, defaults = rendered
    text_node = node.body[0]
    first, last = _span(node)
    yield Entry(
        name=name,
        signature=f"{name}({arguments})",
        defaults=defaults,
        summary=summary,
        body=body.strip("\n"),
        source=source,
        first=first,
        last=last,
        doc_first=text_node.lineno - 1,
        doc_last=text_node.end_lineno or text_node.lineno,
    )


def _is_sentence(text: str) -> bool:
    if not 24 <= len(text) <= 160 or not text[0].isupper() or not text.endswith(".") or not text.isascii():
        return False
    return ". " not in text and not any(mark in text for mark in ("->", "`", ":", "_", "*", "\\", "="))


def _signature(
    source: Source, function: ast.FunctionDef, drop_self: bool
) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """Arguments as the reference manual prints them, and the defaults; None for what is too odd to print."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    values: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    pairs = list(zip([a.arg for a in positional], values, strict=True))
    if drop_self:
        pairs = pairs[1:]
    parts: list[str] = []
    defaults: list[tuple[str, str]] = []

    def add(name: str, value: ast.expr | None) -> bool:
        if value is None:
            parts.append(name)
            return True
        text = _segment(source, value)
        if text is None:
            return False
        parts.append(f"{name}={text}")
        defaults.append((name, text))
        return True

    if not all(add(name, value) for name, value in pairs):
        return None
    if spec.vararg:
        parts.append("*" + spec.vararg.arg)
    elif spec.kwonlyargs:
        parts.append("*")
    if not all(add(a.arg, v) for a, v in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)):
        return None
    if spec.kwarg:
        parts.append("**" + spec.kwarg.arg)
    return ", ".join(parts), tuple(defaults)


def _segment(source: Source, node: ast.expr) -> str | None:
    """Source text of a one-line expression (``ast.unparse`` would spell it differently from Python to Python)."""
    if node.lineno != node.end_lineno:
        return None
    line = source.lines[node.lineno - 1].encode()  # ast counts columns in bytes
    return line[node.col_offset : node.end_col_offset].decode()


def _span(node: ast.FunctionDef | ast.ClassDef) -> tuple[int, int]:
    """Lines [first, last) of a definition, decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1, node.end_lineno or node.lineno


def _imports_of(source: Source, root: ast.Module) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, list[str]] = {}
    for node in root.body:
        if isinstance(node, ast.ImportFrom):
            module = _absolute(node, source.module)
            if module.split(".")[0] == source.package and module != source.module:
                found.setdefault(module, []).extend(a.asname or a.name for a in node.names if a.name != "*")
    return tuple((module, tuple(dict.fromkeys(names))) for module, names in found.items())


@cache
def prose() -> tuple[str, ...]:
    """Paragraphs of running prose in the documentation, each on one line and only once."""
    found = (flat(p) for e in entries() for p in re.split(r"\n\s*\n", e.body) if p and not p[0].isspace())
    return tuple(dict.fromkeys(p for p in found if _is_prose(p)))


def _is_prose(text: str) -> bool:
    words = text.count(" ") + 1
    letters = sum(c.isalpha() or c == " " for c in text) / len(text) if text else 0.0
    return text[:1].isupper() and text.endswith(".") and words >= 20 and letters > 0.9 and "--" not in text


@cache
def statements(source: Source) -> dict[int, frozenset[str]]:
    """One-line statements inside functions: line index, and the names and attributes each uses."""
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert)
    found: dict[int, frozenset[str]] = {}
    for function in ast.walk(tree(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, simple) and node.lineno == node.end_lineno:
                names = (getattr(n, "id", None) or getattr(n, "attr", None) for n in ast.walk(node))
                found[node.lineno - 1] = frozenset(str(n) for n in names if n)
    return found
