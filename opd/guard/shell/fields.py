"""Fields: what a word becomes. A field is a string in which some characters are marks.

Marks stand for what the shell would still act on (an unquoted `*` is not the character `*`) and for what nobody can know
before the command runs. They lie in Unicode's private area, and a command that has characters of it is not read at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

UNKNOWN = "\ue000"
"""Some text that is not known: the output of a program, a variable that nobody set."""
STAR, ANY_CHARACTER, CHARACTER_SET = "\ue001", "\ue002", "\ue003"
"""Unquoted `*`, `?` and `[`."""
OPEN, COMMA, CLOSE = "\ue004", "\ue005", "\ue006"
"""Unquoted `{`, `,` and `}`."""
BREAK = "\ue007"
"""The mark between one field and the next."""
UNSET = "\ue008"
"""A variable that nobody set: nothing, or something of the environment."""
MARKS = re.compile("[\ue000-\ue008]")
_BRACES = re.compile(f"[{OPEN}{COMMA}{CLOSE}]")
TO_MARKS = str.maketrans({"*": STAR, "?": ANY_CHARACTER, "[": CHARACTER_SET, "{": OPEN, ",": COMMA, "}": CLOSE})
TO_TEXT = str.maketrans(
    {
        UNKNOWN: "…",
        UNSET: "…",
        STAR: "*",
        ANY_CHARACTER: "?",
        CHARACTER_SET: "[",
        OPEN: "{",
        COMMA: ",",
        CLOSE: "}",
        BREAK: " ",
    }
)
BRACES_TO_TEXT = str.maketrans({OPEN: "{", COMMA: ",", CLOSE: "}"})
"""For marks of braces that turned out to be characters."""
KNOWN_TO_TEXT = {mark: text for mark, text in TO_TEXT.items() if mark not in (ord(UNKNOWN), ord(UNSET))}
"""For text in which nothing but the unknown keeps its mark."""
MAX_FIELDS = 256


def show_field(field: str) -> str:
    """Return the field as a person would write it; what is not known is an ellipsis."""
    return field if field.isascii() else field.translate(TO_TEXT)  # most have no mark, and to translate is slow


def is_fully_known(field: str) -> bool:
    """Return True if nothing of the field depends on what runs before."""
    return UNKNOWN not in field and UNSET not in field


def has_glob(field: str) -> bool:
    return STAR in field or ANY_CHARACTER in field or CHARACTER_SET in field


def expand_braces(field: str, spend: Callable[[int], None]) -> list[str]:
    """Return the fields that brace expansion makes of one: `a{b,c}` is `ab` and `ac`, `{1..3}` is 1, 2, 3. `spend` gets
    the number of characters that are looked at."""
    results: list[str] = []
    waiting = [field]
    while waiting and len(results) + len(waiting) < MAX_FIELDS:
        candidate = waiting.pop(0)
        spend(len(candidate))
        alternatives = _first_brace(candidate)
        if alternatives is None:
            results.append(candidate)
        else:
            waiting = alternatives + waiting
    return results + waiting


def _first_brace(field: str) -> list[str] | None:
    """Expand the first pair of braces in the field that says something."""
    for offsets in sorted(_find_brace_pairs(field)):
        parts = [field[start + 1 : end] for start, end in pairwise(offsets)]
        chosen = parts if len(parts) > 1 else _expand_sequence(parts[0])
        if chosen:
            return [field[: offsets[0]] + part + field[offsets[-1] + 1 :] for part in chosen]
    return None


def _find_brace_pairs(field: str) -> list[list[int]]:
    """For each pair of braces its places: the opening one, its own commas, the closing one."""
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
    """Return a shell glob, with marks or as plain text, as a regular expression over one string; `*` also matches `/`.

    It never goes back behind a piece between two `*`, so that it takes no longer than to read the text once for each piece.
    `backwards` is for a text from right to left, `shortest` for the shortest beginning of a text that fits.
    """
    pieces = _glob_pieces(show_field(pattern))
    if backwards:
        pieces = [piece[::-1] for piece in pieces[::-1]]
    prefix, *inner = ("".join(piece) for piece in pieces)
    last = [(".*?" if shortest else ".*") + inner.pop()] if inner else []
    source = "".join([prefix, *(f"(?>.*?{piece})" for piece in inner if piece), *last])
    try:
        return re.compile(source, re.DOTALL)
    except re.error:
        text = show_field(pattern)
        return re.compile(re.escape(text[::-1] if backwards else text))


def _glob_pieces(text: str) -> list[list[str]]:
    """Return the parts between the `*` of a glob, as regular expressions of one character each."""
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
