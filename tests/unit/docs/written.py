"""Everything the pages tell a reader to type: lines of code blocks, commands within a sentence, and blocks of YAML and Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
SHELL = ("", "sh", "bash", "console")
"""Languages of fenced blocks that may hold commands."""
HEADS = ("opd", "make", "python", "python3")
BEGINS = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(?:{'|'.join(HEADS)}) ")
VARIABLE = re.compile(r"[A-Z_]+=")
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*|\$\w+|<[\w-]+>")


@dataclass(frozen=True, slots=True)
class Command:
    """One command as its words, without what a shell would do with its output."""

    line: int
    words: tuple[str, ...]
    whole: bool
    """It stands on a line of its own, so everything that it needs has to be there; in a sentence it may be cut short."""


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    language: str
    text: str


def is_placeholder(word: str) -> bool:
    return PLACEHOLDER.fullmatch(word) is not None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found, opened = [], 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened:
            language = lines[opened - 1].strip("`").strip()
            found.append(Block(opened + 1, language, "\n".join(lines[opened : number - 1]) + "\n"))
        opened = 0 if opened else number
    return found


def commands(page: Path) -> list[Command]:
    """Every command of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fenced = {block.line + at: block for block in blocks(page) for at in range(block.text.count("\n"))}
    found: list[Command] = []
    prose: list[str] = []
    for number, line in enumerate(lines, start=1):
        block = fenced.get(number)
        indented = block is None and line.startswith("    ")
        if indented or (block is not None and block.language in SHELL):
            found += [Command(number, words, True) for words in _typed(_continued(lines, number))]
        prose.append("" if indented or block is not None else line)
    return found + list(_quoted("\n".join(prose)))


def _continued(lines: list[str], number: int) -> str:
    """A line, counted from 1, with those that it goes on in."""
    line = lines[number - 1].strip()
    while line.endswith("\\") and number < len(lines):
        line = line[:-1] + lines[number].strip()
        number += 1
    return line


def _quoted(prose: str) -> Iterator[Command]:
    """Commands between backticks, which may reach over a line's end."""
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        if "\n\n" not in found[1]:
            line = prose.count("\n", 0, found.start()) + 1
            yield from (Command(line, words, False) for words in _typed(" ".join(found[1].split())))


def _typed(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line, without the remark behind them."""
    if not BEGINS.match(line):
        return
    typed = re.sub(r"(?<=\w)\|(?=\w)", "_OR_", re.split(r" {3,}| # ", line)[0])
    lexer = shlex.shlex(typed, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    for command in re.split(r"\0[;&|]+\0", "\0".join(lexer)):
        words = re.split(r"\0[<>]+\0", command)[0].split("\0")
        while words and (words[0] == "$" or VARIABLE.match(words[0])):
            words = words[1:]
        head = words[0].removeprefix(".venv/bin/") if words else ""
        if head in HEADS:
            yield (head, *_plain(words[1:]))


def _plain(words: list[str]) -> Iterator[str]:
    """Words without the brackets and dots of a usage line: `[--n N]` is `--n N`, and dots stand for a value only after an option."""
    before = ""
    for word in (word for word in words if word != "[OPTIONS]"):
        bare = word.removeprefix("[")
        bare = bare if "[" in bare or "=" in bare.partition("]")[0] else bare.removesuffix("]")
        if bare.strip("."):
            yield bare
        elif before.startswith("--"):
            yield "VALUE"
        before = bare
