"""Text for a terminal or a log: lines of ours, and what others wrote, made safe to show."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable

Tell = Callable[[str], None]
"""Show one line to the user."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of pairs, without the line ends and tabs that belong to text."""


def escape_control_characters(text: str) -> str:
    """Return the text with every control, escape, invisible and direction-changing character spelt out, such as `\\x1b`.

    Prompts, file names, model names and a server's words may hold sequences that move the cursor, change the window's title
    or reverse the text that follows; a lone surrogate could not even be encoded. Line ends and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def to_one_line(text: str, limit: int) -> str:
    """Return the text as `escape_control_characters` gives it, on one line, cut to its first `limit` characters."""
    return escape_control_characters(" ".join(text[:limit].split()))


def find_control_character(text: str) -> re.Match[str] | None:
    """Return the first control character, or half of a pair, which no text for a policy may have; None without one."""
    return _CONTROL.search(text)


def strip_control_characters(text: str) -> str:
    """Return the text without the characters that `find_control_character` finds."""
    return _CONTROL.sub("", text)


def format_or_dash(value: float | None, form: str) -> str:
    """Return a number in this format; `-` where there is none."""
    return "-" if value is None else format(value, form)


def expand_home(path: str) -> str:
    """Return the path with the home directory in place of `~`, as a shell has it; `~` of nobody stays."""
    return os.path.expanduser(path)  # noqa: PTH111 (that of pathlib raises for nobody's home)


def quote_for_shell(path: object) -> str:
    """Return a path for a command that a user is to copy into a shell."""
    return shlex.quote(str(path))
