"""`Code`, what a piece of code would read, write, reach and run, as far as can be told without running it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from opd.guard.shell.fields import TO_MARKS

SHOWN_ENVIRONMENT = "shown environment"
"""Stands among the names that code uses if it prints the whole environment; no name of Python. Rules ask for it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A command that code starts."""

    command: str | list[str]
    """A script for the shell, or a program with its arguments."""
    cwd: str = ""
    """The directory in which it starts, relative to that of the code; empty for the same."""


@dataclass(slots=True)
class Code:
    """Facts about a piece of code."""

    mentions: list[str] = field(default_factory=list)
    """Strings of the code that may be paths, relative to its first directory; globs with their marks (`opd.guard.shell.fields`)."""
    writes: list[str] = field(default_factory=list)
    """Paths that it opens for writing, removes or replaces."""
    strings: list[str] = field(default_factory=list)
    """All strings of one line and up to 512 characters."""
    texts: list[str] = field(default_factory=list)
    """Texts in which `find_mentions` looks for paths: the strings of Python code, also long ones; of another language the whole code."""
    uses: list[str] = field(default_factory=list)
    """Dotted names in the code, such as `os.path.join`, with aliases of imports resolved."""
    env: list[str] = field(default_factory=list)
    """Variables of the environment that it asks for by name."""
    shell: list[Started] = field(default_factory=list)
    """Commands that it starts."""
    nested: list[str] = field(default_factory=list)
    """Code of the same language that it evaluates."""
    loads: list[str] = field(default_factory=list)
    """Names of modules and of files that it may load."""
    files: list[tuple[str, str]] = field(default_factory=list)
    """Path and text of each file that it writes, if both are known."""
    tags: set[str] = field(default_factory=set)
    """Tags as those of `ProgramCall.tags`, and `decodes`: something in the code decodes text, though not necessarily text that it then runs."""
    cwd: str = ""
    """While the code is read: the directory at this point of its text, relative to the first one."""
    later: list[str] = field(default_factory=list)
    """While the code is read: those of `mentions` that stand in a function. It may run after a later change of the directory, so they are
    then noted again."""

    def changes_to(self, directory: str) -> None:
        """Note that the code changes its working directory."""
        self.cwd = posixpath.join(self.cwd, directory)
        self.mentions += [posixpath.join(self.cwd, text) for text in self.later]

    def mention(self, text: str, globs: bool) -> None:
        """Note a string of the code. With `globs` its `*`, `?`, `[` and braces count as those of a glob."""
        self.texts.append(text)
        if not text or len(text) > 512 or "\n" in text:
            return
        text = text.translate(TO_MARKS) if globs else text
        self.strings.append(text)
        if not any(c.isspace() for c in text):
            self.mentions.append(posixpath.join(self.cwd, text))
