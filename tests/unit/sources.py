"""The product's source files, read as syntax trees: what the tests of the house's laws look at."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("opd", "experts", "teachers", "pipelines")


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports."""

    source: str
    """The module that imports."""
    target: str
    """The module that is imported: of the product's own the very file, of others as it is spelt."""
    when: str
    """`start`: as soon as the module is imported; `later`: inside of a function; `typing`: for type checkers alone."""

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


@cache
def files() -> dict[str, Path]:
    """Module -> file."""
    found = {"cli": ROOT / "cli.py"}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def imports() -> list[Import]:
    """Everything that the product imports, anywhere."""
    return [Import(m, target, when) for m in files() for target, when in _imports(tree(m).body, "start")]


def module_edges() -> set[tuple[str, str]]:
    """Importer and imported, of our own modules; an import for type checkers alone is none when the program runs."""
    return {(each.source, each.target) for each in imports() if each.when != "typing" and each.target in files()}


def folder_edges() -> set[tuple[str, str]]:
    """The same between folders of opd/; a loose module counts as a folder of its own."""
    parts = ((source.split("."), target.split(".")) for source, target in module_edges())
    return {(a[1], b[1]) for a, b in parts if a[0] == b[0] == "opd" and len(a) > 1 and len(b) > 1}


def find_cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return nodes that lead to one another in a circle, the first also as the last; empty if there is none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        if source != target:
            graph[source].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imports(body: list[ast.stmt], when: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((name.name, when) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            inner = [f"{node.module}.{name.name}" for name in node.names]
            yield from ((name if name in files() else node.module, when) for name in inner)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(node.body, when if when == "typing" else "later")
        else:
            typing = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for field, value in ast.iter_fields(node):
                if isinstance(value, list):
                    statements = [s for s in value if isinstance(s, ast.stmt)]
                    nested = [s for h in value if isinstance(h, ast.ExceptHandler | ast.match_case) for s in h.body]
                    yield from _imports([*statements, *nested], "typing" if typing and field == "body" else when)
