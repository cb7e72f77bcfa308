"""Results of Python's operations on texts, worked out only if the result is short: a few characters of code can ask for
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
_WIDE = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
"""A conversion with a width or a precision that is long, or comes from a value."""
_SLOW = {"bz2", "punycode", "idna"}
"""Codecs that make gigabytes out of a line, or take long."""


def _refuse_long(characters: int) -> None:
    """Raises: ValueError if a text of so many characters is not worth making."""
    if characters > MAX_TEXT:
        raise ValueError("too long")


def _shown_length(value: Any) -> int:
    """Return an upper bound of the characters that show a value. Raises: TypeError for a list: it may hold another one many times
    over, so that its length says little."""
    if isinstance(value, list):
        raise TypeError("a list is not shown")
    if isinstance(value, str | bytes):
        return len(value) * (1 if isinstance(value, str) else 4) + 3
    return value.bit_length() if isinstance(value, int) else 64


def _refuse_shown(pattern: str, values: Sequence[Any], times: int) -> None:
    """Refuse a pattern with `times` places for values, if the result may be too long. Raises: ValueError, TypeError."""
    width = 999 if re.search(r"\d\d", pattern) else 9
    _refuse_long(times * max(map(_shown_length, values), default=0) + times * width)


def join_paths(parts: Sequence[Any]) -> str:
    """`os.path.join`."""
    _refuse_long(sum(map(len, parts)))
    return posixpath.join(*parts)


def join_parts(parts: Sequence[Any]) -> str:
    """Return the text of an f-string."""
    _refuse_long(sum(map(_shown_length, parts)))
    return "".join(map(str, parts))


def format_percent(pattern: str, values: Any) -> str:
    """`pattern % values`."""
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
    """Refuse a pattern that would make a long text. Raises: ValueError."""
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
