"""Works out values of Python expressions without running them: constants, however they are put together, joined or decoded.

An operation on texts is carried out only if its result is short, because a few characters of code can ask for gigabytes.
"""

from __future__ import annotations

import ast
import base64
import binascii
import codecs
import posixpath
import re
import string
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from opd.guard.shell.nodes import UnreadableCommand

MAX_TEXT = 1 << 16
"""The most characters of a result."""
_WIDE = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
"""A conversion of `%` whose width or precision has four digits or more, or comes from a value (`*`)."""
_SLOW = {"bz2", "punycode", "idna"}
"""Codecs that make gigabytes out of a line, or take long."""
MAX_STEPS = 20_000
"""The most expressions that are worked out for one program. A part of a long expression counts each time that it is worked out."""
UNKNOWABLE = object()
"""Stands for a value that depends on what runs."""


def decompress(data: bytes, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress data that is complete and not too long. Raises: ValueError, zlib.error."""
    stream = zlib.decompressobj(wbits)
    output = stream.decompress(data, MAX_TEXT + 1)
    if not stream.eof or stream.unused_data:
        raise ValueError("cut, too long or followed by more")
    return output


_DECODERS: dict[str, Callable[[Any], bytes]] = {
    "base64.b64decode": base64.b64decode,
    "base64.urlsafe_b64decode": base64.urlsafe_b64decode,
    "base64.b32decode": base64.b32decode,
    "base64.b16decode": base64.b16decode,
    "base64.a85decode": base64.a85decode,
    "base64.b85decode": base64.b85decode,
    "binascii.unhexlify": binascii.unhexlify,
    "binascii.a2b_base64": binascii.a2b_base64,
    "bytes.fromhex": bytes.fromhex,
    "bytearray.fromhex": bytes.fromhex,
    "zlib.decompress": decompress,
}
"""Function that decodes a text -> ours for the same."""
_METHODS = frozenset((
    "join", "replace", "strip", "lstrip", "rstrip", "lower", "upper", "decode", "encode", "format", "title", "swapcase",
))  # fmt: skip
"""Methods of a text that are worked out."""
_PATHS = frozenset((
    "pathlib.Path", "pathlib.PurePath", "pathlib.PosixPath", "str", "os.fspath", "os.path.abspath", "os.path.realpath",
))  # fmt: skip
"""Functions that give a path back as a text, or join several: a path is a text here."""
_CONSTANTS = {"os.sep": "/", "os.curdir": ".", "os.pardir": "..", "os.path.sep": "/", "sys.executable": "python3"}


class Folder:
    """Works out the values of expressions of one program. Whoever reads the program sets `aliases` and `values`."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        """Name that an import binds -> the dotted name that it stands for."""
        self.values: dict[str, Any] = {}
        """Variable -> its value, if that is known."""
        self._steps = 0
        self.decoded = False
        """True once a value came out of text that was encoded, or disguised in another way."""

    def dotted_name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression; `?` stands for a part that has no name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted_name(node.value)}.{node.attr}"
        if isinstance(node, ast.Call):
            called = self.dotted_name(node.func)
            arguments = [self.fold_value(arg) for arg in node.args]
            if called in ("__import__", "importlib.import_module") and arguments and isinstance(arguments[0], str):
                return arguments[0]
            if called == "getattr" and len(arguments) > 1 and isinstance(arguments[1], str):
                return f"{self.dotted_name(node.args[0])}.{arguments[1]}"
        return "?"

    def fold_value(self, node: ast.AST) -> Any:
        """Return the value of an expression; UNKNOWABLE if it depends on what runs, would raise, or is too long. Raises:
        UnreadableCommand if the program takes more than `MAX_STEPS`."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise UnreadableCommand("code that takes too long to read")
        try:
            value = self._fold_node(node)
        except UnreadableCommand:
            raise
        except (ValueError, TypeError, AttributeError, OverflowError, LookupError, zlib.error):
            return UNKNOWABLE
        return UNKNOWABLE if isinstance(value, str | bytes | list) and len(value) > MAX_TEXT else value

    def _fold_node(self, node: ast.AST) -> Any:
        """Return the value of one node. Raises: whatever the operation raises on such values."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.values.get(node.id, UNKNOWABLE)
        if isinstance(node, ast.Attribute):
            return _CONSTANTS.get(self.dotted_name(node), UNKNOWABLE)
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.fold_value(item) for item in node.elts]
            return UNKNOWABLE if UNKNOWABLE in items else items
        if isinstance(node, ast.JoinedStr):
            parts = [self.fold_value(part) for part in node.values]
            return UNKNOWABLE if UNKNOWABLE in parts else join_parts(parts)
        if isinstance(node, ast.FormattedValue):
            return self.fold_value(node.value)
        if isinstance(node, ast.BinOp):
            return self._fold_operation(node)
        if isinstance(node, ast.Subscript):
            return self._fold_subscript(node)
        return self._fold_call(node) if isinstance(node, ast.Call) else UNKNOWABLE

    def _fold_operation(self, node: ast.BinOp) -> Any:
        left, right = self.fold_value(node.left), self.fold_value(node.right)
        if left is UNKNOWABLE or right is UNKNOWABLE:
            return UNKNOWABLE
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return join_paths([left, right])
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            return format_percent(left, right)
        if isinstance(node.op, ast.Mult) and isinstance(left, str) and isinstance(right, int):
            return left * min(right, 256)
        return UNKNOWABLE

    def _fold_subscript(self, node: ast.Subscript) -> Any:
        sequence = self.fold_value(node.value)
        if sequence is UNKNOWABLE or not isinstance(sequence, str | bytes | list):
            return UNKNOWABLE
        if isinstance(node.slice, ast.Slice):
            parts = (node.slice.lower, node.slice.upper, node.slice.step)
            start, stop, step = (None if part is None else ast.literal_eval(part) for part in parts)
            self.decoded = self.decoded or step == -1  # a text from right to left is a disguise, too
            return sequence[start:stop:step]
        return sequence[ast.literal_eval(node.slice)]

    def _fold_call(self, node: ast.Call) -> Any:
        """Return the result of a call of a function or method that we know, else UNKNOWABLE."""
        called = self.dotted_name(node.func)
        if called == "map" and len(node.args) == 2 and self.dotted_name(node.args[0]) == "chr":
            self.decoded = True
            numbers = self.fold_value(node.args[1])
            return UNKNOWABLE if numbers is UNKNOWABLE else [chr(n) for n in numbers]
        arguments = [self.fold_value(arg) for arg in node.args]
        if UNKNOWABLE in arguments:
            return UNKNOWABLE
        if called in _DECODERS:
            self.decoded = True
            return _DECODERS[called](arguments[0])
        if called == "codecs.decode":
            self.decoded = True
            refuse_slow(arguments[1] if len(arguments) > 1 else "utf-8")
            return codecs.decode(arguments[0], *arguments[1:2])
        if called in ("chr", "bytes", "bytearray"):
            self.decoded = True
            return chr(arguments[0]) if called == "chr" else _bounded_bytes(arguments[0])
        if called == "reversed":
            return list(arguments[0])[::-1]
        if called == "os.path.join" or (called in _PATHS and len(arguments) > 1):
            return join_paths(arguments)
        if called in _PATHS and arguments:
            return join_parts(arguments)
        if called in ("pathlib.Path.home", "pathlib.Path.cwd", "os.getcwd"):
            return "~" if called.endswith("home") else "."
        if called == "os.path.expanduser":
            return arguments[0]
        return self._fold_method_call(node, arguments)

    def _fold_method_call(self, node: ast.Call, arguments: list[Any]) -> Any:
        if not isinstance(node.func, ast.Attribute):
            return UNKNOWABLE
        receiver, method = self.fold_value(node.func.value), node.func.attr
        if receiver is UNKNOWABLE or not isinstance(receiver, str | bytes):
            return UNKNOWABLE
        if method in ("joinpath", "with_name") and isinstance(receiver, str):
            return join_paths([receiver if method == "joinpath" else posixpath.dirname(receiver), *arguments])
        if method == "decode" and arguments and arguments[0] in ("rot13", "rot_13", "hex"):
            self.decoded = True
        return call_text_method(receiver, method, arguments) if method in _METHODS and not node.keywords else UNKNOWABLE


def _bounded_bytes(argument: Any) -> bytes:
    """Return `bytes(argument)`; for a large number not so many bytes, but enough for `fold_value` to refuse the value as too long."""
    return bytes(min(argument, MAX_TEXT + 1)) if isinstance(argument, int) else bytes(argument)


def _refuse_long(characters: int) -> None:
    """Refuse a text of more than `MAX_TEXT` characters. Raises: ValueError."""
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


def refuse_slow(codec: Any) -> None:
    """Refuse a codec that is slow, or none. Raises: LookupError."""
    if codecs.lookup(codec).name in _SLOW:
        raise LookupError(codec)
