"""Fields: a field is what a word of a command becomes once it is expanded, an argument say. It is a string with marks in it.

A mark is a character that stands for something else than itself: for what the shell would still act on (an unquoted `*` is a mark,
a quoted one is the character `*`), or for what nobody can know before the command runs. Marks are characters of Unicode's private
area; a command that has such characters is not read at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

UNKNOWN = "\ue000"
"""Some text that is not known, such as the output of a program."""
STAR, ANY_CHARACTER, CHARACTER_SET = "\ue001", "\ue002", "\ue003"
"""Unquoted `*`, `?` and `[`."""
OPEN, COMMA, CLOSE = "\ue004", "\ue005", "\ue006"
"""Unquoted `{`, `,` and `}`."""
BREAK = "\ue007"
"""The end of one field and the beginning of the next, also between the items of an array."""
UNSET = "\ue008"
"""The value of a variable that the episode did not set: nothing, or something from the environment."""
MARKS = re.compile("[\ue000-\ue008]")
"""Any mark."""
_BRACES = re.compile(f"[{OPEN}{COMMA}{CLOSE}]")
TO_MARKS = str.maketrans({"*": STAR, "?": ANY_CHARACTER, "[": CHARACTER_SET, "{": OPEN, ",": COMMA, "}": CLOSE})
"""Translates unquoted characters to their marks."""
TO_TEXT = {ord(mark): chr(character) for character, mark in TO_MARKS.items()}
TO_TEXT |= {ord(UNKNOWN): "…", ord(UNSET): "…", ord(BREAK): " "}
"""Translates marks to what a person would write; of what is not known, to an ellipsis."""
BRACES_TO_TEXT = str.maketrans({OPEN: "{", COMMA: ",", CLOSE: "}"})
"""Translates the marks of braces that are left after brace expansion, and so are characters."""
KNOWN_TO_TEXT = {mark: text for mark, text in TO_TEXT.items() if mark not in (ord(UNKNOWN), ord(UNSET))}
"""Translates all marks to text but those of what is not known."""
MAX_FIELDS = 256
"""The most fields that a word may become; of more, the first are kept."""


def show_field(field: str) -> str:
    """Return the field as a person would write it; what is not known is an ellipsis."""
    return field if field.isascii() else field.translate(TO_TEXT)  # most have no mark, and to translate is slow


def is_fully_known(field: str) -> bool:
    """Return True if no part of the field is unknown."""
    return UNKNOWN not in field and UNSET not in field


def has_glob(field: str) -> bool:
    """Return True if the field has an unquoted `*`, `?` or `[`."""
    return STAR in field or ANY_CHARACTER in field or CHARACTER_SET in field


def expand_braces(field: str, spend: Callable[[int], None]) -> list[str]:
    """Return the fields that brace expansion makes of a field: `a{b,c}` becomes `ab` and `ac`, `{1..3}` becomes 1, 2, 3. `spend` is
    told the number of characters that are looked at."""
    results: list[str] = []
    waiting = [field]
    while waiting and len(results) + len(waiting) < MAX_FIELDS:
        candidate = waiting.pop(0)
        spend(len(candidate))
        alternatives = _expand_first_brace(candidate)
        if alternatives is None:
            results.append(candidate)
        else:
            waiting = alternatives + waiting
    return results + waiting


def _expand_first_brace(field: str) -> list[str] | None:
    """Return the fields that the first pair of braces with commas or a sequence in it makes; None if there is no such pair."""
    for offsets in sorted(_find_brace_pairs(field)):
        parts = [field[start + 1 : end] for start, end in pairwise(offsets)]
        alternatives = parts if len(parts) > 1 else _expand_sequence(parts[0])
        if alternatives:
            return [field[: offsets[0]] + part + field[offsets[-1] + 1 :] for part in alternatives]
    return None


def _find_brace_pairs(field: str) -> list[list[int]]:
    """Return for each pair of braces the indices of the opening one, of the commas that belong to it, and of the closing one."""
    pairs: list[list[int]] = []
    opened: list[list[int]] = []
    for match in _BRACES.finditer(field):
        if match[0] == OPEN:
            opened.append([match.start()])
        elif opened:
            opened[-1].append(match.start())
            if match[0] == CLOSE:
                pairs.append(opened.pop())
    return pairs


def _expand_sequence(text: str) -> list[str]:
    """Return the members of `1..3` or `a..c`; none if the text is no sequence."""
    if match := re.fullmatch(r"(-?\d{1,6})\.\.(-?\d{1,6})", text):
        low, high = int(match[1]), int(match[2])
        step = 1 if low <= high else -1
        return [str(n) for n in range(low, high + step, step)[:MAX_FIELDS]]
    if match := re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", text):
        low, high = ord(match[1]), ord(match[2])
        step = 1 if low <= high else -1
        return [chr(n) for n in range(low, high + step, step)]
    return []


def glob_regex(pattern: str, backwards: bool = False, shortest: bool = False) -> re.Pattern[str]:
    """Return a regular expression for a shell glob, with marks or as plain text; `*` also matches `/`.

    With `backwards` it fits the text written from right to left, and with `shortest` its `match` finds the shortest beginning that
    fits. Each piece between two `*` is an atomic group: once found it is not looked for again, so that a match takes no longer than
    to read the text once for each piece.
    """
    pieces = _glob_pieces(show_field(pattern))
    if backwards:
        pieces = [piece[::-1] for piece in pieces[::-1]]
    prefix, *inner = ("".join(piece) for piece in pieces)
    last = [(".*?" if shortest else ".*") + inner.pop()] if inner else []
    source = "".join([prefix, *(f"(?>.*?{piece})" for piece in inner if piece), *last])
    try:
        return re.compile(source, re.DOTALL)
    except re.error:  # a set such as `[z-a]`: then the glob fits only itself
        text = show_field(pattern)
        return re.compile(re.escape(text[::-1] if backwards else text))


def _glob_pieces(text: str) -> list[list[str]]:
    """Return the pieces between the `*` of a glob. A piece is a list of regular expressions, each for one character."""
    pieces: list[list[str]] = [[]]
    index = 0
    while index < len(text):
        char = text[index]
        end = text.find("]", index + 2) if char == "[" else -1
        if char == "*" or char == "…":
            pieces.append([])
        elif char == "?":
            pieces[-1].append(".")
        elif end > 0:
            inside = text[index + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            pieces[-1].append("[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]")
            index = end
        else:
            pieces[-1].append(re.escape(char))
        index += 1
    return pieces
