"""Our parser reads every script that tree-sitter's grammar of bash reads without an error, and finds every command that it finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from opd.guard.labelled_cases import shipped_cases
from opd.guard.shell.nodes import Literal, Simple, UnreadableCommand
from opd.guard.shell.parser import parse

tree_sitter = pytest.importorskip("tree_sitter")
tree_sitter_bash = pytest.importorskip("tree_sitter_bash")
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
CONSTRUCTS = [
    "(( x = $(ls a) + 1 ))",
    "for ((i = $(ls a); i < $(ls b); i++)); do ls c; done",
    "x[$(ls a)]=1",
    "x[$(ls a)]+=1 ls b",
    "echo ${x[$(ls a)]} ${x[$(ls b)]:-c} ${#x[$(ls c)]}",
    "echo $(( $(ls a) * 2 ))",
    "case a in $(ls a)) ls b;; esac",
    "case $(ls a) in b|c) ls d;; *) ls e;; esac",
    "if [[ $(ls a) == b ]]; then ls c; elif ls d; then ls e; else ls f; fi",
    "while ls a; do ls b; done; until ls c; do ls d; done",
    "for x in $(ls a) `ls b`; do ls c; done",
    "f() { ls a; }; function g { ls b; }; f",
    "ls a | ls b && ls c || ls d & ls e",
    "{ ls a; } > $(ls b); (ls c) 2>&1",
    "ls <(ls a) >(ls b)",
    "cat <<E\n$(ls a)\nE\nls b",
    "cat 3<<E 4<<<b\na\nE",
    "! ls a; time ls b",
    "a=($(ls a) b [3]=c); ls ${a[@]} ${a[1]}",
    "echo \"a $(ls 'b c' | ls d) ${x:-$(ls e)}\"",
    "coproc ls a",
    "m[a b]=c",
]


def named(node: Any) -> Iterator[str]:
    """Names of the commands in a tree of tree-sitter's, where they are plain words. It takes two reserved words for names."""
    if node.type == "command_name" and [child.type for child in node.children] == ["word"]:
        name = node.text.decode().replace("\\", "")
        if name not in ("time", "coproc"):
            yield name
    for child in node.children:
        yield from named(child)


def ours(node: Any) -> Iterator[str]:
    """The same of our tree, of all that stands in it."""
    if isinstance(node, tuple | list):
        for one in node:
            yield from ours(one)
    elif is_dataclass(node):
        if isinstance(node, Simple) and node.words:
            yield "".join(part.text for part in node.words[0] if isinstance(part, Literal))
        for field in fields(node):
            yield from ours(getattr(node, field.name))


def missing(script: str) -> list[str] | None:
    """Names that only tree-sitter finds; None if it cannot read the script."""
    tree = PARSER.parse(script.encode())
    if tree.root_node.has_error:
        return None
    try:
        left = list(ours(parse(script)))
    except UnreadableCommand as error:
        return [f"not read at all: {error}"]
    lacks = []
    for name in named(tree.root_node):
        if name in left:
            left.remove(name)
        else:
            lacks.append(name)
    return lacks


@pytest.mark.parametrize("script", CONSTRUCTS)
def test_constructs(script: str) -> None:
    assert not missing(script)


def test_the_labelled_commands() -> None:
    scripts = [step.arguments["command"] for case in shipped_cases() for step in case.steps]
    found = {script: missing(script) for script in scripts}
    assert sum(lacks is not None for lacks in found.values()) > 0.9 * len(found)
    assert {script: lacks for script, lacks in found.items() if lacks} == {}


def test_a_command_that_we_do_not_see_would_be_found() -> None:
    assert list(named(PARSER.parse(b"ls a; x=$(cat b)").root_node)) == ["ls", "cat"]
    assert list(ours(parse("ls a"))) == ["ls"]
