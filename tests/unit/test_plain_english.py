"""Docstrings read at once: they begin with a whole phrase that names the thing, and known riddles do not come back.

A docstring is any string that stands alone: of a module, class or function, and under a field or constant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sources import ROOT, files

TORN = ("Of", "As", "By")
"""First words that hang in the air: `Of a LoRA adapter` is half a sentence, `The LoRA adapter` a whole phrase."""

QUESTIONS = ("What", "Who", "Whether", "How", "Where", "Which", "When", "Why")
"""First words that ask: `Why a turn ended` asks, `Reason why a turn ended` names the thing."""

READ_BY_POLICIES = ROOT / "opd" / "environments" / "sandbox" / "problems.py"
"""Source that the sandbox's tasks show with its docstrings: another word there is another task."""

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


def begun_with(words: tuple[str, ...], text: str) -> list[str]:
    """Line and first words of the docstrings of a source that begin with one of these words."""
    found = docstrings(ast.parse(text))
    return [f"{line}: {doc.strip()[:60]}" for line, doc in found if re.match(rf"\s*({'|'.join(words)})\b", doc)]


def offenders(words: tuple[str, ...], searched: list[Path]) -> list[str]:
    """The same over files, with the name of each."""
    texts = {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in searched}
    return [f"{file}:{one}" for file, text in texts.items() for one in begun_with(words, text)]


def riddles(text: str) -> list[str]:
    """The riddles of a text, wherever its lines are broken."""
    flat = " ".join(text.lower().split())
    return [riddle for riddle in RIDDLES if riddle in flat]


def sources() -> list[Path]:
    return [*files().values(), *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "docs").glob("*.py"))]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_docstrings_begin_with_a_whole_phrase() -> None:
    found = offenders(TORN, sources())
    assert not found, "say whose, or what: " + "; ".join(found)


def test_docstrings_begin_with_no_question_word() -> None:
    found = offenders(QUESTIONS, [file for file in sources() if file != READ_BY_POLICIES])
    assert not found, "name the thing, or begin with an imperative: " + "; ".join(found)


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
    assert len(begun_with(TORN, text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""What all share."""',
        'def f():\n    """\n    Whether it ends."""',
        'class A:\n    x: int\n    """Who learns."""',
        'LIMIT = 3\n"""How often."""',
    ],
)
def test_questions_are_found(text: str) -> None:
    assert len(begun_with(QUESTIONS, text)) == 1


def test_whole_phrases_pass() -> None:
    text = '"""Often right."""\n\ndef f():\n    """However it ends: what it took."""\n    return "Of course"\n'
    assert not begun_with((*TORN, *QUESTIONS), text)


def test_a_riddle_is_found_over_a_line_break() -> None:
    assert riddles("Keys of the section that\n    are other here.") == ["that are other"]
