"""Docstrings read at once: they begin with a whole phrase, and known riddles do not come back.

A docstring is any string that stands alone: of a module, class or function, and under a field or constant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sources import ROOT, files

TORN = ("Of", "As", "By")
"""First words that hang in the air: `Of a LoRA adapter` is half a sentence, `The LoRA adapter` a whole phrase."""

RIDDLES = (
    "what is other",
    "that are other",
    "is other in",
    "what is not said",
    "goes without saying",
    "from which a person is told",
    "farewell",
    "comes to.",
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def torn(text: str) -> list[str]:
    """Line and first words of the docstrings of a source that begin with half a sentence."""
    found = docstrings(ast.parse(text))
    return [f"{line}: {doc.strip()[:60]}" for line, doc in found if doc.split()[:1] and doc.split()[0] in TORN]


def riddles(text: str) -> list[str]:
    """The riddles of a text, wherever its lines are broken."""
    flat = " ".join(text.lower().split())
    return [riddle for riddle in RIDDLES if riddle in flat]


def sources() -> list[Path]:
    return [*files().values(), *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "docs").glob("*.py"))]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_docstrings_begin_with_a_whole_phrase() -> None:
    found = [f"{file.relative_to(ROOT)}:{one}" for file in sources() for one in torn(file.read_text(encoding="utf-8"))]
    assert not found, "say whose, or what: " + "; ".join(found)


def test_known_riddles_do_not_come_back() -> None:
    found = {
        str(file.relative_to(ROOT)): told
        for file in (*sources(), *pages())
        if (told := riddles(file.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a module."""',
        'def f():\n    """As `g`."""',
        'class A:\n    x: int\n    """By name."""',
        'LIMIT = 3\n"""Of all."""',
    ],
)
def test_half_sentences_are_found(text: str) -> None:
    assert len(torn(text)) == 1


def test_whole_phrases_pass() -> None:
    assert not torn('"""Often right."""\n\ndef f():\n    """Bytes of all."""\n    return "Of course"\n')


def test_a_riddle_is_found_over_a_line_break() -> None:
    assert riddles("Keys of the section that\n    are other here.") == ["that are other"]
