"""Data flows one way: no module imports against the direction that CONTRIBUTING.md draws."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvrepro"

# A module may import from its own level and from lower ones.
LEVELS = [
    {"errors", "progress", "__init__"},
    {"entries", "rope", "embedded", "gate", "profiles", "theory", "scale"},
    {"tasks"},
    {"attention", "results"},
    {"methods", "stats", "published", "models", "explain"},
    {"hf", "plots", "vectors", "studies", "costs"},
    {"evaluate", "analyses"},
    {"runner", "measure", "claims", "demo", "generate", "heatmap", "compare", "doctor"},
    {"notebooks"},
    {"publish"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# Both inside a function: loading a model registers the attention function; the conversion borrows `quiet`.
EXCEPTIONS = {("models", "hf"), ("embedded", "models")}


def room(path: Path) -> str:
    """The room a file belongs to: methods/selkv.py is in methods."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms a file imports from."""
    package = ["kvrepro", *path.relative_to(PACKAGE).parts[:-1]]
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{stem}.{name.name}" for name in node.names]
        for target in targets:
            parts = target.split(".")
            if parts[0] == "kvrepro" and len(parts) > 1 and parts[1] in LEVEL:
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_flow_one_way(path: Path) -> None:
    own = room(path)
    assert own in LEVEL, f"{own} has no place in the house: add it to LEVELS and to CONTRIBUTING.md"
    if own == "__init__":
        return  # only names the public functions' homes
    wrong = {
        other
        for other in imported(path) - {own}
        if LEVEL[other] > LEVEL[own] and (own, other) not in EXCEPTIONS
    }
    assert not wrong, f"{own} imports {', '.join(sorted(wrong))}, which stands above it"


def test_methods_know_neither_models_nor_tasks() -> None:
    for path in (PACKAGE / "methods").glob("*.py"):
        assert imported(path) <= {"methods", "attention", "entries", "rope", "errors"}, path.name
