"""The patterns of rules: globs over text, where `*` is any text, and globs over paths.

In a path glob `**` is any depth, `*` and `?` stay inside one component, and `{a,b}` are alternatives. A text glob is compared from
left to right without ever going back, so that no command can make a comparison slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from opd.guard.shell.fields import has_glob, is_fully_known, show_field

OUTSIDE = "outside:"
"""Begins a glob that is compared only with paths outside of the directory where the session begins."""


MAX_STARS = 12
"""Most `*` of a path that is compared with well-known paths: more would take long to try, and nobody needs more. With more of them,
`matches_path` takes the path for a match if every glob in it has a letter of its own, and `may_expand_into` takes it for none."""
MAX_PATH = 1024
"""Most characters of a path that is compared. What a grader keeps has shorter paths, so a longer one is no match."""


_ANY_DOT = re.compile(r"/\.[^\w/]+(?:/|$)")
"""A component of a dot and then neither letters nor digits: `.*`, `.??` or `.…`, which may be any name that begins with a dot."""


class TextGlobs:
    """Text globs that are compared together: a text fits if it fits one of them. Case is ignored."""

    def __init__(self, globs: Iterable[str]) -> None:
        parts = [glob.lower().split("*") for glob in globs]
        self._exact = frozenset(pieces[0] for pieces in parts if len(pieces) == 1)
        self._words = [pieces[1] for pieces in parts if _is_word_glob(pieces)]
        """The words of globs such as `*word*`. Most globs are such, and Python looks for a word faster than we compare parts."""
        self._parts = [pieces for pieces in parts if len(pieces) > 1 and not _is_word_glob(pieces)]

    def matches_text(self, text: str) -> bool:
        """Return True if one of the globs fits the whole text."""
        return self.matches_any_text((text,))

    def matches_any_text(self, texts: Iterable[str]) -> bool:
        """Return True if one of the globs fits one of the texts as a whole."""
        for text in texts:
            lower = text.lower()
            if lower in self._exact:
                return True
            for word in self._words:
                if word in lower:
                    return True
            for parts in self._parts:
                if _matches_parts(parts, lower):
                    return True
        return False


def _is_word_glob(parts: list[str]) -> bool:
    """Return True if a glob, split at its `*`, is `*word*`."""
    return len(parts) == 3 and not parts[0] and not parts[2]


def _matches_parts(parts: list[str], text: str) -> bool:
    """Return True if a glob, split at its `*`, fits the whole text."""
    prefix, suffix = parts[0], parts[-1]
    if len(text) < len(prefix) + len(suffix) or not (text.startswith(prefix) and text.endswith(suffix)):
        return False
    at, end = len(prefix), len(text) - len(suffix)
    for part in parts[1:-1]:
        # The leftmost place of a part leaves most room for the others, so there is no need to go back.
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def _rule_glob_source(glob: str) -> str:
    """Return the regular expression of a path glob of a rule, where a comma outside of braces is a comma.

    `_shell_glob_source` below is for the globs of a command, `opd.guard.shell.fields.glob_regex` for those over any text."""
    pieces, index, depth = [], 0, 0
    while index < len(glob):
        char = glob[index]
        if char in "{}":
            depth += 1 if char == "{" else -1
        if glob.startswith("/**", index) and glob[index + 3 : index + 4] in (("", "}", ",") if depth else ("",)):
            pieces.append("(?:/.*)?")
            index += 3
            continue
        if glob.startswith("**/", index):
            pieces.append("(?:.*/)?")
            index += 3
            continue
        regex_by_char = {"*": "[^/]*", "?": "[^/]", "{": "(?:", ",": "|" if depth else ",", "}": ")"}
        pieces.append(regex_by_char.get(char, re.escape(char)))
        index += 1
    return "".join(pieces)


def is_valid_glob(glob: str) -> bool:
    """Return True if a path glob of a rule can be compared with paths at all."""
    try:
        re.compile(_rule_glob_source(glob))
    except re.error:  # a brace without the other one
        return False
    return True


class PathGlobs:
    """Path globs that are compared together: is a path one of theirs, or may it be, once the shell has expanded its own globs?

    The paths are fields (`opd.guard.shell.fields`): each unquoted `*`, `?` or `[` in one is a mark, and so is text that is not
    known before the command runs."""

    def __init__(self, globs: Iterable[str], well_known: Iterable[str] = ()) -> None:
        """`well_known`: paths of what the rules protect, from `/` or from the working directory. A pattern that the shell would
        expand is compared with those that these globs fit, since nobody can list the files."""
        globs = list(globs)
        self._regex = _compile_alternatives(glob for glob in globs if not glob.startswith(OUTSIDE))
        outside = [glob.removeprefix(OUTSIDE) for glob in globs if glob.startswith(OUTSIDE)]
        self._outside = _compile_alternatives(outside) if outside else None
        # The globs are over absolute paths, so a relative name is tried as if it lay at the root.
        self._well_known = [p for p in well_known if self._regex.fullmatch(p if p[0] in "/*" else "/" + p)]

    def matches_path(self, path: str, cwd: str) -> bool:
        """Return True if one of the globs fits the absolute path, or if the path is a pattern that the shell may expand to a
        well-known path. `cwd`: the directory where the session begins."""
        text = show_field(path)
        if len(text) > MAX_PATH:
            return False
        if self._regex.fullmatch(text):
            return True
        if self._outside is not None and self._outside.fullmatch(text) and not _is_within_directory(text, cwd):
            return True
        if not has_glob(path) or not is_fully_known(path):
            return False
        if text.count("*") > MAX_STARS:
            return bool(self._well_known) and _has_own_letters(text)
        return any(_may_expand_to(text, name) for name in self._absolute_well_known(cwd))

    def may_expand_into(self, path: str, cwd: str) -> bool:
        """Return True if the shell may expand an absolute pattern to a well-known path, or to something below it, though nothing
        in the pattern names it: `/*/*`, `/$(ls / | head -1)/x`. Below `cwd`, the directory where the session begins, only
        patterns for names that begin with a dot count: most of what a project's own globs may expand to is its own."""
        if (not has_glob(path) and is_fully_known(path)) or len(path) > MAX_PATH:
            return False
        text = show_field(path)
        if text.count("*") > MAX_STARS or (_is_within_directory(text, cwd) and not _ANY_DOT.search(text)):
            return False
        parts = text.split("/")
        names = [name.removesuffix("/**").removesuffix("/*") for name in self._absolute_well_known(cwd)]
        if "**" in parts:
            return any(_matches_shell_glob(text, name) for name in names)
        return any(_may_expand_below(parts, name) for name in names)

    def _absolute_well_known(self, cwd: str) -> list[str]:
        return [name if name.startswith(("/", "**/")) else f"{cwd.rstrip('/')}/{name}" for name in self._well_known]


def _compile_alternatives(globs: Iterable[str]) -> re.Pattern[str]:
    """Return one regular expression for all these path globs of rules; without any it fits nothing."""
    return re.compile("|".join(f"(?:{_rule_glob_source(glob)})" for glob in globs) or r"(?!)", re.IGNORECASE)


def _may_expand_to(pattern: str, name: str) -> bool:
    """Return True if the shell may expand a pattern to a well-known path. Where that is `NAME/**`, anything in the directory
    counts; where it is `NAME/*`, only patterns that say nothing of the names in there. A pattern with `**` never counts."""
    parts = pattern.split("/")
    if "**" in parts:
        return False
    if name.endswith("/*"):
        depth = name.count("/")
        anything = len(parts) > depth and all(set(part) <= set("*?") for part in parts[depth:])
        return anything and _may_expand_to("/".join(parts[:depth]), name.removesuffix("/*"))
    if not name.endswith("/**"):
        return _has_own_letters(pattern) and _matches_shell_glob(pattern, name)
    directory = name.removesuffix("/**")
    if not directory.startswith("**/"):
        # The directory is at one place, so as many components as it has, from the root, must fit.
        head = "/".join(parts[: directory.count("/") + 1])
        return _has_own_letters(head) and _matches_shell_glob(head, directory)
    # The directory may lie at any depth: its components may fit anywhere in the pattern, side by side.
    suffix = directory.removeprefix("**/")
    length = suffix.count("/") + 1
    windows = ("/".join(parts[start : start + length]) for start in range(1, len(parts)))
    return any(_has_own_letters(window) and _matches_shell_glob(window, suffix) for window in windows)


def _may_expand_below(parts: list[str], name: str) -> bool:
    """Return True if the shell may expand a pattern, split at `/`, to a well-known path or to something below it. An unknown part
    (`…`) may be any name; a `*` is no name that begins with a dot."""
    name_parts = name.split("/")
    if name.startswith("**/"):
        return False
    for part, level in zip(parts[1:], name_parts[1:], strict=False):
        if (level.startswith(".") and part[:1] not in (".", "…")) or not _matches_shell_glob(
            part.replace("…", "*"), level
        ):
            return False
    return len(parts) >= len(name_parts)


def _matches_shell_glob(pattern: str, name: str) -> bool:
    """Return True if a glob of the shell fits the whole name."""
    regex = _compile_shell_glob(pattern)
    return regex is not None and regex.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _compile_shell_glob(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(_shell_glob_source(pattern))
    except re.error:  # a set such as [z-a], which fits nothing
        return None


def _is_within_directory(path: str, directory: str) -> bool:
    """Return True if a path is the directory or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


@lru_cache(maxsize=4096)
def _has_own_letters(text: str) -> bool:
    """Return True if every component with a glob has a letter or digit of its own: `*/*` may be anything and so means nothing."""
    parts = [part for part in text.split("/") if set(part) & set("*?[") and part != "**"]
    return all(any(c.isalnum() for c in part) for part in parts)


def _shell_glob_source(text: str) -> str:
    """Return the regular expression of a pattern in a command that the shell would expand to paths."""
    pieces, index = [], 0
    while index < len(text):
        end = text.find("]", index + 2) if text[index] == "[" else -1
        if text.startswith("**/", index):
            pieces.append("(?:.*/)?")
            index += 2
        elif end > 0:
            negation = "^" if text[index + 1] in "!^" else ""
            inside = re.escape(text[index + 1 + len(negation) : end]).replace(r"\-", "-")
            pieces.append(f"[{negation}{inside}]")
            index = end
        else:
            pieces.append({"*": "[^/]*", "?": "[^/]"}.get(text[index], re.escape(text[index])))
        index += 1
    return "".join(pieces)
