"""The tree of a shell script: a script has lists, a list pipelines, a pipeline commands, a command words.

A word is a tuple of parts, because quotes decide what each part may still become.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal as OneOf


class UnreadableCommand(ValueError):
    """A command or code that we cannot read, so that it is not clear what it would do."""

    def __init__(self, reason: str, error_text: str = "") -> None:
        """`error_text` is what the shell would print that cannot read it either; empty if it could."""
        super().__init__(reason)
        self.error_text = error_text


@dataclass(frozen=True, slots=True)
class Literal:
    """Characters of the word itself."""

    text: str
    quoted: bool = False
    """True if quotes keep the shell from expanding globs and braces in it."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter expansion, `$name` or `${name...}`."""

    name: str
    operator: str = ""
    """The operator between name and operand, such as `:-`, `##` or `/`; `length` for `${#name}`, `indirect` for `${!name}`; empty if
    there is none."""
    operand: tuple[Part, ...] = ()
    quoted: bool = False
    index: tuple[Part, ...] = ()
    """The index in brackets, if something in it is expanded; the index as it is written is a part of `name`."""


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$( )` or backticks: the output of a script."""

    body: Script
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """A process substitution, `<( )` or `>( )`: a path behind which a script runs."""

    body: Script


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$(( ))`, of which only the parts matter that run a script: its value counts as not known."""

    inner: tuple[Part, ...]


Part = Literal | Variable | Substitution | Process | Arithmetic
Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirection; a heredoc has its text as the target and `<<` as the operator."""

    operator: str
    target: Word
    output: bool = True
    """False if another stream than the standard output is written, such as that of errors."""
    fd: str = ""
    """Number or name of the descriptor in front of the operator; empty for the one that the operator has without it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable and its new value, `name=value` or `name=(words)`."""

    name: str
    """Name of the variable, with the index in brackets if it has one."""
    value: Word
    append: bool = False
    """True for `+=`."""
    items: tuple[Word, ...] | None = None
    """The words of an array; None if a single value is assigned."""
    index: Word = ()
    """The index in brackets, if something in it is expanded."""


@dataclass(frozen=True, slots=True)
class Simple:
    """A program with its arguments. Without words there is no program, and the assignments set variables of the shell.

    `redirects` is a list because a heredoc is added to it only when the parser comes to its body, on a later line."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: list[Redirect] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CompoundCommand:
    """A command that is made of scripts, apart from a `for`."""

    bodies: tuple[Script, ...]
    """Braces, subshell: its one script. `if`: tests and branches in turn, and the `else` as the last. `case`: a script that expands the
    subject, then the branches; an empty one if it may be that no branch runs. Loop: its test and its body."""
    kind: OneOf["braces", "subshell", "if", "case", "loop"] = "braces"
    redirects: list[Redirect] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class For:
    """A loop over words."""

    name: str
    words: tuple[Word, ...]
    body: Script
    redirects: list[Redirect] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Command


Command = Simple | CompoundCommand | For | Function


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    when: str = ""
    """`&&` or `||` if it depends on the one before."""
    unsure: bool = False
    """True if `!` or `coproc` stands in front of it, so that the success of its last command says nothing about its own."""


@dataclass(frozen=True, slots=True)
class List:
    """Pipelines that depend on each other: `a && b || c`."""

    pipelines: tuple[Pipeline, ...]
    background: bool = False
    """True if a `&` stands behind it, so that all of it runs in a subshell."""


Script = tuple[List, ...]
