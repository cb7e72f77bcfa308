"""Looks for paths that stand anywhere in the texts of a call: the last resort, for calls that no rule hits as they were read.

Such a text may be code in a language that we do not parse, the script of an editor, a query, or the value of a variable. If the path of
something protected stands in it, somebody should look at the call. Texts are also read from right to left, with their escapes resolved,
and with what is encoded in them decoded, because a path is seldom disguised by accident.
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
"""The most characters of a text that is also read in other ways. In a longer one only paths as they are written are found."""
LANGUAGES = PYTHONS | {"perl", "ruby", "node", "php", "awk", "gawk", "lua"}
"""Programs whose arguments may be code that puts a path together."""
MAX_JOINED = 6
"""The most quoted pieces of a text that are tried as the pieces of one path."""
MAX_PIECES = 64
"""The first quoted pieces of a text; later ones are not tried."""
_ABSOLUTE = re.compile(r"(?:(?<=file:/)|(?<![\w.~$)}\]*?…@-])(?<![\w:.~…@-]/))/(?:[\w.@+~*?{}\[\]^!…-]+/?)+")
_RELATIVE = re.compile(r"(?<![\w/.~$)}\]*?…@-])\.?[\w@+-][\w.@+-]*(?:/[\w.@+*?-]+)+")
_ROUTE = re.compile(
    r"(?:route|get|post|put|delete|patch|url|path|href|to|src|action|fetch|client\.\w+)\s*[(=:]\s*['\"`]?$"
)
"""Text in front of a path that is one of a web server, and not of a disk."""
_QUOTED = re.compile(r"'([^'\n]{0,64})'|\"([^\"\n]{0,64})\"|`([^`\n]{0,64})`")
"""A short text in quotes of any kind."""
_WORDS = re.compile(r"(?:%w|\bqw)\s*[\[({</|]([^\])}>/|]{1,256})")
"""A list of words in Ruby (`%w[a b]`) or Perl (`qw(a b)`)."""
_ASSIGNED = re.compile(r"\b(\w+)\s*=\s*(?:'([^'\n]{0,64})'|\"([^\"\n]{0,64})\")")
"""An assignment of a short text to a variable."""
_PUT_IN = re.compile(r"\$\{(\w+)\}|#\{(\w+)\}|\$(\w+)")
"""A place in a text where the value of a variable is put in."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[ :,]?){6,}")
_NUMBERS = re.compile(r"(?:0x[0-9a-fA-F]{2}|\d{2,3})(?:[\s,;)(+.]+(?:chr\(|char\()?(?:0x[0-9a-fA-F]{2}|\d{2,3})){5,}")


def find_mentions(calls: Sequence[ProgramCall], session: GuardSession) -> list[ProgramCall]:
    """Return those calls in whose texts paths stand, with these paths as their `mentions`."""
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
    """Return True if a text has no white space, so that all of it may be one argument."""
    return not any(map(str.isspace, text))


def collect_texts(call: ProgramCall) -> Iterator[str]:
    """Yield the texts of a call in which a path may stand: arguments, `inputs`, and values of variables that are set for it. Of Python
    code the strings are among the `inputs`, so its arguments are left out."""
    if call.program not in PYTHONS:
        has_files = bool(call.reads or call.writes)  # then its absolute paths are among these already
        yield from (arg for arg in call.argv if not (has_files and arg.startswith("/") and _is_operand(arg)))
    if call.program in LANGUAGES and len(call.argv) > 1:  # pieces of a path that the code puts together
        yield "".join(call.argv[-2:])
    yield from call.inputs
    yield from (tag.partition("=")[2] for tag in call.tags if "=" in tag)


@lru_cache(maxsize=1024)
def find_paths(text: str, operand: bool = False) -> tuple[str, ...]:
    """Return the paths with at least one `/` that stand in a text: first those that are written as they are, in the order of the text,
    then those in disguise. Of an operand only absolute ones count, since the call reads it if it is a relative path."""
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
    """Return the absolute paths in a text that are not those of a web server."""
    if "/" not in text:
        return []
    return [
        match[0].rstrip(".,")
        for match in _ABSOLUTE.finditer(text)
        if not _ROUTE.search(text, max(match.start() - 16, 0), match.start())
    ]


def _undisguise_text(text: str) -> Iterator[str]:
    """Yield the text, or a piece of it, in each way in which a path may be disguised in it: with escapes resolved, from right to left,
    decoded, with variables put in, and with words or quoted pieces joined."""
    if "\\" in text:
        yield unescape(text)
    # In a URL a slash may be `%2f`, and the first letter of `tests` `%74`.
    if "%2" in text or "%7" in text:
        yield unquote(text)
    # `stset` is `tests` from right to left. A text with a slash may be a path from right to left, or in rot13, which keeps slashes.
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
        # A path that is put together begins with a piece that begins with a slash, or is empty.
        if piece[:1] in ("/", "") and not _ROUTE.search(text, max(start - 16, 0), start):
            window = pieces[index : index + MAX_JOINED]
            yield "".join(window)
            yield "/" + "/".join(filter(None, (token.strip("/") for token in window)))


def _insert_variables(text: str) -> Iterator[str]:
    """Yield the text with the values of variables that it assigns put in, as Perl, Ruby, PHP and JavaScript do."""
    if "=" not in text or not ("$" in text or "#{" in text):
        return
    values = {name: a or b for name, a, b in _ASSIGNED.findall(text)}
    if values:
        yield _PUT_IN.sub(lambda match: values.get(match[1] or match[2] or match[3], match[0]), text)


def _decode_base64(token: str) -> Iterable[str]:
    try:
        # Two `=` are enough for any length, and more padding than needed is passed over.
        return [base64.b64decode(token.rstrip("=").translate(_STANDARD) + "==").decode("ascii")]
    except (binascii.Error, ValueError):
        return []


_STANDARD = str.maketrans("-_", "+/")


def _decode_hex(digits: str) -> Iterable[str]:
    try:
        return [bytes.fromhex(digits).decode("ascii")]
    except ValueError:
        return []
