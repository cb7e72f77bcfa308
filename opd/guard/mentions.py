"""Paths that stand literally in what a call is given, however it is written: the last resort where no rule read it.

A language that we do not parse, an editor's script, a query, the value of a variable: if the path of something protected stands
there, somebody should look. Texts are also read from right to left, with their escapes resolved, and with what is encoded in them
decoded, since such a path seldom stands there by accident.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from urllib.parse import unquote

from opd.guard.facts import PYTHONS, ProgramCall
from opd.guard.session import GuardSession
from opd.guard.shell.fields import TO_MARKS, TO_TEXT
from opd.guard.shell.reader import unescape

MAX_TEXT = 1 << 16
"""Characters of a text that is read in other ways, too."""
LANGUAGES = PYTHONS | {"perl", "ruby", "node", "php", "awk", "gawk", "lua"}
MAX_JOINED = 6
MAX_PIECES = 64
"""Quoted pieces of a text that are tried as the pieces of one path."""
_ABSOLUTE = re.compile(r"(?:(?<=file:/)|(?<![\w.~$)}\]*?…@-])(?<![\w:.~…@-]/))/(?:[\w.@+~*?{}\[\]^!…-]+/?)+")
_RELATIVE = re.compile(r"(?<![\w/.~$)}\]*?…@-])\.?[\w@+-][\w.@+-]*(?:/[\w.@+*?-]+)+")
_ROUTE = re.compile(
    r"(?:route|get|post|put|delete|patch|url|path|href|to|src|action|fetch|client\.\w+)\s*[(=:]\s*['\"`]?$"
)
"""Text before a path that a web server has, and not a disk."""
_QUOTED = re.compile(r"'([^'\n]{0,64})'|\"([^\"\n]{0,64})\"|`([^`\n]{0,64})`")
_WORDS = re.compile(r"(?:%w|\bqw)\s*[\[({</|]([^\])}>/|]{1,256})")
_ASSIGNED = re.compile(r"\b(\w+)\s*=\s*(?:'([^'\n]{0,64})'|\"([^\"\n]{0,64})\")")
_PUT_IN = re.compile(r"\$\{(\w+)\}|#\{(\w+)\}|\$(\w+)")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[ :,]?){6,}")
_NUMBERS = re.compile(r"(?:0x[0-9a-fA-F]{2}|\d{2,3})(?:[\s,;)(+.]+(?:chr\(|char\()?(?:0x[0-9a-fA-F]{2}|\d{2,3})){5,}")


def find_mentions(calls: Sequence[ProgramCall], session: GuardSession) -> list[ProgramCall]:
    """Return the calls in whose texts paths stand, with these paths as their `mentions`."""
    mentioning_calls = []
    for call in calls:
        paths = dict.fromkeys(
            session.resolve_path(posixpath.join(session.begins_at, path.translate(TO_MARKS)))
            for text in collect_texts(call)
            for path in find_paths(text, _is_operand(text))
        )
        if paths:
            mentioning_calls.append(replace(call, mentions=tuple(paths)))
    return mentioning_calls


def _is_operand(text: str) -> bool:
    return not any(map(str.isspace, text))


def collect_texts(call: ProgramCall) -> Iterator[str]:
    """Yield the texts that a call is given. The code of Python is among them as its strings, without comments."""
    if call.program not in PYTHONS:
        read = bool(call.reads or call.writes)
        yield from (arg for arg in call.argv if not (read and arg.startswith("/") and _is_operand(arg)))
    if call.program in LANGUAGES and len(call.argv) > 1:  # pieces of a path that the code puts together
        yield "".join(call.argv[-2:])
    yield from call.inputs
    yield from (tag.partition("=")[2] for tag in call.tags if "=" in tag)


@lru_cache(maxsize=1024)
def find_paths(text: str, operand: bool = False) -> tuple[str, ...]:
    """Return the paths with at least one `/` that stand in a text, in the order of the text, those in encoded pieces last. Of an
    operand only absolute ones: where it is a relative path, the call reads it."""
    if len(text) < 4:
        return ()
    if len(text) > MAX_TEXT:
        return tuple(dict.fromkeys(_find_absolute_paths(text)))
    text = text.translate(TO_TEXT)
    paths = _find_absolute_paths(text)
    if not operand and "/" in text:
        paths += [match[0] for match in _RELATIVE.finditer(text)]
    for variant in _undisguise_text(text):
        paths += _find_absolute_paths(variant)
    return tuple(dict.fromkeys(paths))


def _find_absolute_paths(text: str) -> list[str]:
    if "/" not in text:
        return []
    return [
        match[0].rstrip(".,")
        for match in _ABSOLUTE.finditer(text)
        if not _ROUTE.search(text, max(match.start() - 16, 0), match.start())
    ]


def _undisguise_text(text: str) -> Iterator[str]:
    """Yield the text decoded in each way in which something in it may be encoded."""
    if "\\" in text:
        yield unescape(text)
    # In a URL `%2f` is a slash, and `%74` the first letter of `tests`.
    if "%2" in text or "%7" in text:
        yield unquote(text)
    # `stset` is `tests` from right to left.
    if "stset" in text or "/" in text:
        yield text[::-1]
        yield codecs.encode(text, "rot13")
    for match in _BASE64.finditer(text):
        yield from _decode_base64(match[0])
    for match in _HEX.finditer(text):
        yield from _decode_hex(re.sub("[ :,]", "", match[0]))
    for match in _NUMBERS.finditer(text):
        numbers = [int(token, 0) for token in re.findall(r"0x[0-9a-fA-F]+|[1-9]\d*", match[0])]
        yield "".join(map(chr, numbers))
    yield from _insert_variables(text)
    for match in _WORDS.finditer(text):
        yield "/" + "/".join(match[1].split())
    quoted = list(islice(_QUOTED.finditer(text), MAX_PIECES))
    pieces = [match[1] or match[2] or match[3] or "" for match in quoted]
    for index, piece in enumerate(pieces[:-1]):
        start = quoted[index].start()
        if piece[:1] in ("/", "") and not _ROUTE.search(
            text, max(start - 16, 0), start
        ):  # the first piece of a path that is put together, or joined
            window = pieces[index : index + MAX_JOINED]
            yield "".join(window)
            yield "/" + "/".join(filter(None, (token.strip("/") for token in window)))


def _insert_variables(text: str) -> Iterator[str]:
    """Yield the text with its own variables put in, in the ways of Perl, Ruby, PHP and JavaScript."""
    if "=" not in text or not ("$" in text or "#{" in text):
        return
    values = {name: a or b for name, a, b in _ASSIGNED.findall(text)}
    if values:
        yield _PUT_IN.sub(lambda match: values.get(match[1] or match[2] or match[3], match[0]), text)


def _decode_base64(token: str) -> Iterable[str]:
    try:
        # Two `=` always do: more padding than needed is passed over.
        return [base64.b64decode(token.rstrip("=").translate(_STANDARD) + "==").decode("ascii")]
    except (binascii.Error, ValueError):
        return []


_STANDARD = str.maketrans("-_", "+/")


def _decode_hex(digits: str) -> Iterable[str]:
    try:
        return [bytes.fromhex(digits).decode("ascii")]
    except ValueError:
        return []
