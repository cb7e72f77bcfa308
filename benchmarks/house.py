"""Count what makes the tree hard to read for a stranger: names, docstrings, comments, loose modules, knots of folders, words.

    python -m benchmarks.house [--list one-word|empty|openers|classes]

The numbers are thermometers: where a number and a reader disagree, the reader is right.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.sources import folder_knots

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("opd", "experts", "teachers", "pipelines")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md")
EMPTY = frozenset(
    [
        "again",
        "all_of_them",
        "anew",
        "asked",
        "before",
        "beside",
        "both",
        "come",
        "done",
        "each",
        "else_",
        "first",
        "found",
        "given",
        "gone",
        "goes",
        "had",
        "hears",
        "here",
        "its",
        "kept",
        "known",
        "left",
        "like",
        "made",
        "meant",
        "mine",
        "more",
        "nobody",
        "one",
        "ones",
        "other",
        "others",
        "ours",
        "place",
        "places",
        "rest",
        "said",
        "same",
        "seen",
        "some",
        "taken",
        "tells",
        "that",
        "theirs",
        "there",
        "they",
        "those",
        "told",
        "took",
        "two",
        "what",
        "where",
        "which",
        "who",
        "whole",
        "why",
        "wanted",
        "words",
        "wrote",
    ]
)
"""Participles, pronouns and other names that say nothing of what they hold."""
OPENERS = ("What", "Who", "Whose", "Whether", "How", "Where", "Why", "When", "Which")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Yield path, text and syntax tree of every product file."""
    for path in sorted([ROOT / "cli.py", *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]):
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(ROOT)), text, ast.parse(text)


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that a file binds: functions, classes, arguments, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield functions and methods without those that Python itself names."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and not node.name.startswith("__"):
            yield node


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield text


def measure() -> dict[str, object]:
    """Return the figures by name."""
    names: list[str] = []
    classes: Counter[str] = Counter()
    bound: list[str] = []
    opened: list[bool] = []
    comments = lines = 0
    for _, text, tree in sources():
        names += [function.name.strip("_") for function in functions(tree)]
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        bound += [name.strip("_") for name in bound_names(tree)]
        opened += [doc.split()[0].rstrip(",:") in OPENERS for doc in docstrings(tree)]
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        comments += sum(token.type == tokenize.COMMENT and "noqa" not in token.string for token in tokens)
        lines += text.count("\n")
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    return {
        "product_lines": lines,
        "one_word_functions_percent": round(100 * sum("_" not in name for name in names) / len(names), 1),
        "median_function_name": statistics.median(map(len, names)),
        "openers_percent": round(100 * sum(opened) / len(opened), 1),
        "empty_names_percent": round(100 * sum(name in EMPTY for name in bound) / len(bound), 1),
        "comments_per_100_lines": round(100 * comments / lines, 2),
        "class_names_twice": sorted(name for name, num in classes.items() if num > 1),
        "folder_knots": [sorted(knot) for knot in folder_knots()],
        "loose_modules": sorted(p.stem for p in (ROOT / "opd").glob("*.py") if p.stem != "__init__"),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def listed(kind: str) -> Iterator[str]:
    """Yield the places that a figure counts, one line each."""
    for path, _, tree in sources():
        if kind == "one-word":
            yield from (f"{path}:{f.lineno} {f.name}" for f in functions(tree) if "_" not in f.name.strip("_"))
        elif kind == "empty":
            yield from (f"{path} {name}" for name in bound_names(tree) if name.strip("_") in EMPTY)
        elif kind == "openers":
            yield from (f"{path} {doc.splitlines()[0]}" for doc in docstrings(tree) if re.match("|".join(OPENERS), doc))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=("one-word", "empty", "openers"))
    chosen = parser.parse_args().list
    if chosen:
        print(*listed(chosen), sep="\n")
    else:
        print(json.dumps(measure(), indent=1))
