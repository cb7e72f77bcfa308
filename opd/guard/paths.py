"""The patterns of rules: globs over text, where `*` is any text, and globs over paths.

In a path glob `**` is any depth, `*` and `?` stay inside one component, and `{a,b}` are alternatives. Text is searched from left to
right in one go, so that no command can make a comparison slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from opd.guard.shell.fields import has_glob, is_fully_known, show_field

OUTSIDE = "outside:"
"""Begins a glob that is compared only with paths outside of the directory where the session begins."""


MAX_STARS = 12
"""Wildcards of a path. Nobody needs more; one that has more counts as whatever it may be, because to try it would take long."""
MAX_PATH = 1024
"""Characters of a path that is compared; what a grader keeps has shorter ones."""


_ANY_DOT = re.compile(r"/\.[^\w/]+(?:/|$)")


class TextGlobs:
    """Many text globs as one question; case is ignored."""

    def __init__(self, globs: Iterable[str]) -> None:
        parts = [glob.lower().split("*") for glob in globs]
        self._exact = frozenset(pieces[0] for pieces in parts if len(pieces) == 1)
        self._within = [pieces[1] for pieces in parts if _is_within(pieces)]
        """The words of globs such as `*word*`. Most globs are such, and Python looks for a word faster than we compare parts."""
        self._parts = [pieces for pieces in parts if len(pieces) > 1 and not _is_within(pieces)]

    def matches_text(self, text: str) -> bool:
        """Return True if one of the globs fits the whole text."""
        return self.hold_one((text,))

    def hold_one(self, texts: Iterable[str]) -> bool:
        """Return True if one of the globs fits one of the texts."""
        for text in texts:
            lower = text.lower()
            if lower in self._exact:
                return True
            for word in self._within:
                if word in lower:
                    return True
            for parts in self._parts:
                if _matches_parts(parts, lower):
                    return True
        return False


def _is_within(parts: list[str]) -> bool:
    """Return True if a glob is `*word*`."""
    return len(parts) == 3 and not parts[0] and not parts[2]


def _matches_parts(parts: list[str], text: str) -> bool:
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


def glob_source(glob: str) -> str:
    """Return the regular expression of one glob."""
    pieces, index = [], 0
    while index < len(glob):
        char = glob[index]
        if glob.startswith("/**", index) and glob[index + 3 : index + 4] in ("", "}", ","):
            pieces.append("(?:/.*)?")
            index += 3
            continue
        if glob.startswith("**/", index):
            pieces.append("(?:.*/)?")
            index += 3
            continue
        pieces.append({"*": "[^/]*", "?": "[^/]", "{": "(?:", ",": "|", "}": ")"}.get(char, re.escape(char)))
        index += 1
    return "".join(pieces)


def is_valid_glob(glob: str) -> bool:
    """Return True if a glob can be compared with paths at all."""
    try:
        re.compile(glob_source(glob))
    except re.error:  # a brace without the other one
        return False
    return True


class PathGlobs:
    """Many globs as one question: is a path one of them, or may it be, once the shell has expanded its own globs?"""

    def __init__(self, globs: Iterable[str], such_as: Iterable[str] = ()) -> None:
        globs = list(globs)
        self._regex = _one_of(glob for glob in globs if not glob.startswith(OUTSIDE))
        outside = [glob.removeprefix(OUTSIDE) for glob in globs if glob.startswith(OUTSIDE)]
        self._outside = _one_of(outside) if outside else None
        self._such_as = [name for name in such_as if self._regex.fullmatch(name if name[0] in "/*" else "/" + name)]

    def matches_path(self, path: str, cwd: str) -> bool:
        """Return True if the absolute path is one of these, or a pattern that a well-known one of these fits."""
        text = show_field(path)
        if len(text) > MAX_PATH:
            return False
        if self._regex.fullmatch(text):
            return True
        if self._outside is not None and self._outside.fullmatch(text) and not _join_directory(text, cwd):
            return True
        if not has_glob(path) or not is_fully_known(path):
            return False
        if text.count("*") > MAX_STARS:
            return bool(self._such_as) and _says_something(text)
        return any(_leads_to(text, name) for name in self._well_known_names(cwd))

    def covered_by(self, path: str, cwd: str) -> bool:
        """Return True if the shell may expand an absolute pattern to a well-known path of these globs, or to something below it,
        though nothing in the pattern names it: `/*/*`, `/$(ls / | head -1)/x`. Below the directory where the session begins
        only patterns for names that begin with a dot count: most of what a project's own globs take in is its own."""
        if (not has_glob(path) and is_fully_known(path)) or len(path) > MAX_PATH:
            return False
        text = show_field(path)
        if text.count("*") > MAX_STARS or (_join_directory(text, cwd) and not _ANY_DOT.search(text)):
            return False
        parts = text.split("/")
        names = [name.removesuffix("/**").removesuffix("/*") for name in self._well_known_names(cwd)]
        if "**" in parts:
            return any(_expands_to(text, name) for name in names)
        return any(_takes_in(parts, name) for name in names)

    def _well_known_names(self, cwd: str) -> list[str]:
        return [name if name.startswith(("/", "**/")) else f"{cwd.rstrip('/')}/{name}" for name in self._such_as]


def _one_of(globs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{glob_source(glob)})" for glob in globs) or r"(?!)", re.IGNORECASE)


def _leads_to(pattern: str, name: str) -> bool:
    """Return True if the shell may expand a pattern to a well-known path. Where that is `NAME/**`, anything in the directory
    counts; where it is `NAME/*`, only patterns that say nothing of the names in there. A pattern with `**` never counts."""
    if "**" in pattern.split("/"):
        return False
    if name.endswith("/*"):
        depth = name.count("/")
        parts = pattern.split("/")
        anything = len(parts) > depth and all(set(part) <= set("*?") for part in parts[depth:])
        return anything and _leads_to("/".join(parts[:depth]), name.removesuffix("/*"))
    if not name.endswith("/**"):
        return _says_something(pattern) and _expands_to(pattern, name)
    directory = name.removesuffix("/**")
    parts, depth = pattern.split("/"), directory.count("/") + 1
    if not directory.startswith("**/"):
        head = "/".join(parts[:depth])
        return _says_something(head) and _expands_to(head, directory)
    suffix = directory.removeprefix("**/")
    windows = ("/".join(parts[start : start + depth - 1]) for start in range(1, len(parts)))
    return any(_says_something(window) and _expands_to(window, suffix) for window in windows)


def _takes_in(parts: list[str], name: str) -> bool:
    """Return True if a pattern, split at `/`, takes in a well-known path or something below it. An unknown part (`…`) may be any
    name; a `*` is no name that begins with a dot."""
    name_parts = name.split("/")
    if name.startswith("**/"):
        return False
    for part, own in zip(parts[1:], name_parts[1:], strict=False):
        if (own.startswith(".") and part[:1] not in (".", "…")) or not _expands_to(part.replace("…", "*"), own):
            return False
    return len(parts) >= len(name_parts)


def _expands_to(pattern: str, name: str) -> bool:
    regex = _compile_glob(pattern)
    return regex is not None and regex.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _compile_glob(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(_shell_pattern_regex(pattern))
    except re.error:  # a set such as [z-a], which fits nothing
        return None


def _join_directory(path: str, cwd: str) -> bool:
    return path == cwd or path.startswith(cwd.rstrip("/") + "/")


@lru_cache(maxsize=4096)
def _says_something(text: str) -> bool:
    """Return True if every component with a glob has a letter of its own: `*/*` may be anything and so means nothing."""
    parts = [part for part in text.split("/") if set(part) & set("*?[") and part != "**"]
    return all(any(c.isalnum() for c in part) for part in parts)


def _shell_pattern_regex(text: str) -> str:
    """Return the regular expression of a pattern that the shell would expand."""
    pieces, index = [], 0
    while index < len(text):
        end = text.find("]", index + 2) if text[index] == "[" else -1
        if text.startswith("**/", index):
            pieces.append("(?:.*/)?")
            index += 2
        elif end > 0:
            inside = re.escape(text[index + 1 : end].lstrip("!^")).replace(r"\-", "-")
            pieces.append(f"[{'^' if text[index + 1] in '!^' else ''}{inside}]")
            index = end
        else:
            pieces.append({"*": "[^/]*", "?": "[^/]"}.get(text[index], re.escape(text[index])))
        index += 1
    return "".join(pieces)
