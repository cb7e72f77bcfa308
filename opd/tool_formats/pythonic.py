"""The convention of Llama 3.2, Llama 4 and ToolACE: a Python list of calls, which is the whole turn.

[add(a=1, b=2), add(a=3, b=4)]
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.tool_formats.records import BadCall, WrittenCalls

_BEGINS = re.compile(r"\[\s*[A-Za-z_]\w*\s*\(")
_TOO_LARGE = 10**4300
"""Python writes no longer number as text, but reads one in hexadecimal."""
_OF_JSON = {"true": True, "false": False, "null": None}
"""Names that models write for Python's."""


class Pythonic:
    """One list. Text before or after it makes it unreadable, if it calls a tool that is there; other lists are text."""

    begins, ends = _BEGINS, ""
    instructions = """To call them, answer with a Python list of calls and nothing else:
[NAME(ARGUMENT="VALUE"), NAME(ARGUMENT="VALUE")]"""

    def __init__(self, *marks: str) -> None:
        """`marks` may stand around the list."""
        self.marks = marks

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        bare = text
        for mark in self.marks:
            bare = bare.replace(mark, "")
        bare = bare.strip()
        if _BEGINS.match(bare):
            return WrittenCalls(tuple(map(_call, _read_list(bare))), "")
        names = "|".join(re.escape(tool.name) for tool in tools)
        if (names and re.search(rf"\[\s*({names})\s*\(", bare)) or bare != text.strip():
            raise BadCall("a list of calls has to be the whole turn")
        return WrittenCalls((), text)

    def write(self, calls: Sequence[ToolCall]) -> str:
        def written(call: ToolCall) -> str:
            return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"

        return f"[{', '.join(map(written, calls))}]"


def _read_list(text: str) -> list[ast.expr]:
    """Return the elements of the list. Raises: BadCall if the text is no list."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as \d in a string
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadCall(f"no Python list of calls: {error}") from None
    if not isinstance(tree, ast.List):
        raise BadCall("a list of calls has to be the whole turn")
    return tree.elts


def _call(node: ast.expr) -> ToolCall:
    """Read a call. Raises: BadCall if it is no call with named arguments that are literals."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise BadCall("wanted calls alone in the list, such as NAME(ARGUMENT=3)")
    arguments = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    if node.args or len(arguments) < len(node.keywords):
        raise BadCall(f"{node.func.id:.60}: every argument needs its name, as in {node.func.id:.60}(ARGUMENT=3)")
    return ToolCall(name=node.func.id, arguments={key: _read_literal(value) for key, value in arguments.items()})


def _read_literal(node: ast.expr | None) -> Any:
    """Return the value of a literal that JSON has, too. Raises: BadCall for anything else."""
    match node:
        case ast.Constant(value=int() as value) if value >= _TOO_LARGE:
            raise BadCall("a number of more than 4300 digits")
        case ast.Constant(value=float() as value) if math.isinf(value):
            raise BadCall("a number that is too large")
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _OF_JSON:
            return _OF_JSON[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value) as number) if (
            not isinstance(value, bool)
        ):
            return -_read_literal(number)
        case ast.List(elts=elements):
            return [_read_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {_read_literal(key): _read_literal(value) for key, value in zip(keys, values, strict=True)}
    raise BadCall(
        "arguments have to be texts in quotes, numbers, True, False, None, and lists and dictionaries of them"
    )
