"""Operations of Python on texts that are carried out only if the result is short, because a few characters of code can ask for
gigabytes."""

from __future__ import annotations

import codecs
import posixpath
import re
import string
import zlib
from collections.abc import Callable, Sequence
from typing import Any

MAX_TEXT = 1 << 16
"""The most characters of a result."""
_WIDE = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
"""A conversion of `%` whose width or precision has four digits or more, or comes from a value (`*`)."""
_SLOW = {"bz2", "punycode", "idna"}
"""Codecs that make gigabytes out of a line, or take long."""


def _refuse_long(characters: int) -> None:
    """Raises: ValueError if a text of so many characters is longer than `MAX_TEXT`."""
    if characters > MAX_TEXT:
        raise ValueError("too long")


def _shown_length(value: Any) -> int:
    """Return a bound of the length of a value as text, give or take a few characters. Raises: TypeError for a list, whose length says
    little: it may hold another list many times over."""
    if isinstance(value, list):
        raise TypeError("a list is not shown")
    if isinstance(value, str | bytes):
        return len(value) * (1 if isinstance(value, str) else 4) + 3
    return value.bit_length() if isinstance(value, int) else 64


def _refuse_shown(pattern: str, values: Sequence[Any], times: int) -> None:
    """Refuse a pattern with `times` places for values if the result may be too long, with all places filled by the longest value and as
    wide as the numbers in the pattern allow. Raises: ValueError, TypeError."""
    width = 999 if re.search(r"\d\d", pattern) else 9
    _refuse_long(times * max(map(_shown_length, values), default=0) + times * width)


def join_paths(parts: Sequence[Any]) -> str:
    """Return `os.path.join(*parts)`. Raises: ValueError if it may be too long, TypeError."""
    _refuse_long(sum(map(len, parts)))
    return posixpath.join(*parts)


def join_parts(parts: Sequence[Any]) -> str:
    """Return the parts as texts, one behind the other, as an f-string does. Raises: ValueError if that may be too long, TypeError."""
    _refuse_long(sum(map(_shown_length, parts)))
    return "".join(map(str, parts))


def format_percent(pattern: str, values: Any) -> str:
    """Return `pattern % values`, where a list stands for a tuple. Raises: ValueError if it may be too long, TypeError."""
    arguments = tuple(values) if isinstance(values, list) else (values,)
    if _WIDE.search(pattern):
        raise ValueError("too wide")
    _refuse_shown(pattern, arguments, min(pattern.count("%"), len(arguments)))
    return pattern % arguments


def call_text_method(receiver: str | bytes, method: str, arguments: Sequence[Any]) -> Any:
    """Return the result of a method of a text. Raises: ValueError if that is too long, AttributeError if there is no such
    method, and all that the method raises."""
    function: Callable[..., Any] = getattr(receiver, method)
    if method == "format" and isinstance(receiver, str):
        _refuse_long_format(receiver, arguments)
    elif method == "join":
        _refuse_long(len(receiver) * len(arguments[0]) + sum(map(len, arguments[0])))
    elif method == "replace":
        _refuse_long(receiver.count(arguments[0]) * len(arguments[1]))
    elif method in ("decode", "encode") and arguments:
        refuse_slow(arguments[0])
    return function(*arguments)


def _refuse_long_format(pattern: str, arguments: Sequence[Any]) -> None:
    """Refuse a pattern of `str.format` that may make a text that is too long. Raises: ValueError, TypeError."""
    fields = [(name, spec or "") for _, name, spec, _ in string.Formatter().parse(pattern) if name is not None]
    if any("{" in spec or re.search(r"\d{4,}", spec) for _, spec in fields):
        raise ValueError("too wide")
    _refuse_shown(pattern, arguments, len(fields))


def decompress(data: bytes, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress data that is complete and not too long. Raises: ValueError, zlib.error."""
    stream = zlib.decompressobj(wbits)
    output = stream.decompress(data, MAX_TEXT + 1)
    if not stream.eof or stream.unused_data:
        raise ValueError("cut, too long or followed by more")
    return output


def refuse_slow(codec: Any) -> None:
    """Raises: LookupError for a codec that is slow, or none."""
    if codecs.lookup(codec).name in _SLOW:
        raise LookupError(codec)
