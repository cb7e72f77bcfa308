"""The tree of a shell script. A word is a tuple of parts, because quotes decide what each part may still become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal as OneOf


class UnreadableCommand(ValueError):
    """A text that we cannot read as a shell script; it is not clear what it would do. `said` is what the program would print that
    cannot read it either."""

    def __init__(self, reason: str, error_text: str = "") -> None:
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
    """The operator between the name and the operand, such as `:-`, `##` or `/`; `length`, `indirect`, or nothing."""
    operand: tuple[Part, ...] = ()
    quoted: bool = False
    index: tuple[Part, ...] = ()
    """The index in brackets, to be expanded."""


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$( )` or backticks: the output of a script."""

    body: Script
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """`<( )` or `>( )`: a path behind which a script runs."""

    body: Script


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$(( ))`; only the substitutions in it matter."""

    inner: tuple[Part, ...]


Part = Literal | Variable | Substitution | Process | Arithmetic
Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirection; a heredoc has its text as the target and `<<` as the operator."""

    operator: str
    target: Word
    output: bool = True
    """True if it writes the standard output, and not another stream."""
    fd: str = ""
    """The number in front of the operator, if it is not the one that the operator has by itself."""


@dataclass(frozen=True, slots=True)
class Assignment:
    name: str
    """With the index in brackets, if it has one."""
    value: Word
    append: bool = False
    items: tuple[Word, ...] | None = None
    """The words of an array, in the place of a value."""
    index: Word = ()
    """The index in brackets, to be expanded."""


@dataclass(frozen=True, slots=True)
class Simple:
    """A program with its arguments; without words the assignments are the shell's own.

    A heredoc joins the redirections when the parser comes to its body, on a later line."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: list[Redirect] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CompoundCommand:
    """Bodies that may run: one after the other in braces and subshells; tests and branches in turn, and a last `else`, of an `if`;
    the subject and the branches of a `case`, of which an empty one stands for none; test and body of a loop."""

    bodies: tuple[Script, ...]
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
    """True if `!` or `coproc` stands in front of it, so that its success is not that of its last command."""


@dataclass(frozen=True, slots=True)
class List:
    """Pipelines that depend on each other: `a && b || c`."""

    pipelines: tuple[Pipeline, ...]
    background: bool = False
    """True if `&` stands behind it, so that all of it runs in a subshell."""


Script = tuple[List, ...]
