"""Count what makes the tree hard to read for a stranger: names, docstrings, comments, loose modules, circles of folders, words.

    python -m benchmarks.house [--list one-word|empty|openers]

The numbers are thermometers: where a number and a reader disagree, the reader is right.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator

from tests.unit.sources import ROOT, files, find_cycle, folder_edges, tree

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md")
EMPTY = frozenset({
    "again", "all_of_them", "anew", "asked", "before", "beside", "both", "come", "done", "each", "else_", "first",
    "found", "given", "gone", "goes", "had", "hears", "here", "its", "kept", "known", "left", "like", "made", "meant",
    "mine", "more", "nobody", "one", "ones", "other", "others", "ours", "place", "places", "rest", "said", "same",
    "seen", "some", "taken", "tells", "that", "theirs", "there", "they", "those", "told", "took", "two", "what",
    "where", "which", "who", "whole", "why", "wanted", "words", "wrote",
})  # fmt: skip
"""Participles, pronouns and other names that say nothing of what they hold."""
OPENERS = ("What", "Who", "Whose", "Whether", "How", "Where", "Why", "When", "Which")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def bound_names(module: ast.Module) -> Iterator[str]:
    """Yield each name that a file binds: functions, classes, arguments, variables, attributes of `self`."""
    for node in ast.walk(module):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def functions(module: ast.Module) -> Iterator[Function]:
    """Yield functions and methods without those that Python itself names."""
    for node in ast.walk(module):
        if isinstance(node, Function) and not node.name.startswith("__"):
            yield node


def docstrings(module: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions."""
    for node in ast.walk(module):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield text


def listed(kind: str) -> Iterator[str]:
    """Yield the places that a figure counts, one line each."""
    for module in files():
        if kind == "one-word":
            yield from (f"{module} {f.name}" for f in functions(tree(module)) if "_" not in f.name.strip("_"))
        elif kind == "empty":
            yield from (f"{module} {name}" for name in bound_names(tree(module)) if name.strip("_") in EMPTY)
        else:
            docs = docstrings(tree(module))
            yield from (f"{module} {doc.splitlines()[0]}" for doc in docs if doc.split()[0].rstrip(",:") in OPENERS)


def measure() -> dict[str, object]:
    """Return the figures by name."""
    trees = [tree(module) for module in files()]
    names = [function.name.strip("_") for each in trees for function in functions(each)]
    classes = Counter(node.name for each in trees for node in ast.walk(each) if isinstance(node, ast.ClassDef))
    texts = [path.read_text(encoding="utf-8") for path in files().values()]
    tokens = (token for text in texts for token in tokenize.generate_tokens(io.StringIO(text).readline))
    comments = sum(token.type == tokenize.COMMENT and "noqa" not in token.string for token in tokens)
    lines = sum(text.count("\n") for text in texts)
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]

    def percent(kind: str, of: int) -> float:
        return round(100 * sum(1 for _ in listed(kind)) / of, 1)

    return {
        "product_lines": lines,
        "one_word_functions_percent": percent("one-word", len(names)),
        "median_function_name": statistics.median(map(len, names)),
        "openers_percent": percent("openers", sum(1 for each in trees for _ in docstrings(each))),
        "empty_names_percent": percent("empty", sum(1 for each in trees for _ in bound_names(each))),
        "comments_per_100_lines": round(100 * comments / lines, 2),
        "class_names_twice": sorted(name for name, num in classes.items() if num > 1),
        "folder_circle": find_cycle(folder_edges()),
        "loose_modules": sorted(path.stem for path in (ROOT / "opd").glob("*.py") if path.stem != "__init__"),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=("one-word", "empty", "openers"))
    chosen = parser.parse_args().list
    if chosen:
        print(*listed(chosen), sep="\n")
    else:
        print(json.dumps(measure(), indent=1))
