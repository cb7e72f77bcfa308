"""Arrays of the shell. An array is kept as one text, with the mark `BREAK` between its items; a plain variable is one without."""

from __future__ import annotations

import re
from collections.abc import Iterable

from opd.guard.shell.fields import BREAK, KNOWN_TO_TEXT
from opd.guard.shell.nodes import Assignment

_INDEX = re.compile(r"[0-9]{1,9}")
_KEY = re.compile(r"\[\w+\]=")
ALL_ITEMS = ("[@]", "[*]")
"""Indices that mean all items."""


def join_items(fields: Iterable[str]) -> str:
    """Return the value of an array with these items. An item such as `[3]=x` becomes `x`, at its place in the list and not at 3."""
    return BREAK.join(_KEY.sub("", field.translate(KNOWN_TO_TEXT), count=1) for field in fields)


def assign_variable(variables: dict[str, str], node: Assignment, value: str) -> None:
    """Assign `value` to the variable, array or item that `node` names, or append it. An item whose index is no number, or too large,
    becomes the last one."""
    base, bracket, index = node.name.partition("[")
    old_value = variables.get(base, "")
    items = old_value.split(BREAK) if old_value else []
    position = int(index[:-1]) if _INDEX.fullmatch(index[:-1]) else len(items)
    if bracket and position < len(items):
        items[position] = items[position] + value if node.append else value
        variables[base] = BREAK.join(items)
    elif bracket or (node.append and node.items is not None):
        variables[base] = BREAK.join([*items, value])
    else:
        variables[base] = old_value + value if node.append else value


def select_item(value: str, index: str) -> str:
    """Return the item of an array at an index with its brackets. An empty index means the first item, and one that is no number all
    of them. An item that is not there is empty."""
    items = value.split(BREAK)
    if not index:
        return items[0]
    if not _INDEX.fullmatch(index[1:-1]):
        return value
    return items[int(index[1:-1])] if int(index[1:-1]) < len(items) else ""
