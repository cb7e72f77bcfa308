"""Code given inline: what it would read, write, reach and run, without running it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from opd.guard.shell.fields import TO_MARKS


@dataclass(frozen=True, slots=True)
class Started:
    """A command that code starts: a script, or a program with its arguments."""

    command: str | list[str]
    cwd: str = ""
    """The directory, relative to that of the code itself."""


@dataclass(slots=True)
class Code:
    """Facts about a piece of code."""

    mentions: list[str] = field(default_factory=list)
    """Strings of it that may be paths, globs with marks."""
    writes: list[str] = field(default_factory=list)
    """Those that it opens for writing, removes or replaces."""
    strings: list[str] = field(default_factory=list)
    """All short strings."""
    texts: list[str] = field(default_factory=list)
    """Texts in which `find_mentions` looks for paths: all strings of Python code, also long ones; all code of other languages."""
    uses: list[str] = field(default_factory=list)
    """Dotted names, import aliases resolved."""
    env: list[str] = field(default_factory=list)
    """Variables of the environment that it asks for by name."""
    shell: list[Started] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    """Code of the same language that it evaluates."""
    loads: list[str] = field(default_factory=list)
    """Names of modules and of files that it may load."""
    files: list[tuple[str, str]] = field(default_factory=list)
    """Files that it writes with a text that is known: path and text."""
    tags: set[str] = field(default_factory=set)
    cwd: str = ""
    """The directory at this point of the text, relative to the first one."""
    later: list[str] = field(default_factory=list)
    """Those of `mentions` that stand in a function, which may run anywhere from there on."""

    def changes_to(self, directory: str) -> None:
        """Go on in another directory."""
        self.cwd = posixpath.join(self.cwd, directory)
        self.mentions += [posixpath.join(self.cwd, text) for text in self.later]

    def mention(self, text: str, globs: bool) -> None:
        """Note a string of the code. With `globs` a `*` in it stands for any text, as in a glob."""
        self.texts.append(text)
        if not text or len(text) > 512 or "\n" in text:
            return
        text = text.translate(TO_MARKS) if globs else text
        self.strings.append(text)
        if not any(c.isspace() for c in text):
            self.mentions.append(posixpath.join(self.cwd, text))
