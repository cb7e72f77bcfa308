"""Arrays of the shell: a variable whose value has a mark between its items."""

from __future__ import annotations

import re
from collections.abc import Iterable

from opd.guard.shell.fields import BREAK, KNOWN_TO_TEXT
from opd.guard.shell.nodes import Assignment

_INDEX = re.compile(r"[0-9]{1,9}")
_KEY = re.compile(r"\[\w+\]=")
ALL_ITEMS = ("[@]", "[*]")


def join_items(fields: Iterable[str]) -> str:
    """Return the value of an array with these items. Of `[3]=x` the place is not kept."""
    return BREAK.join(_KEY.sub("", field.translate(KNOWN_TO_TEXT), count=1) for field in fields)


def assign_variable(variables: dict[str, str], node: Assignment, value: str) -> None:
    """Set or extend a variable, an array or one item of it; an item whose place is not known comes last."""
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
    """Return the item of an array at `[index]`; all of them where the place is not known. Without an index it is the first."""
    items = value.split(BREAK)
    if not index:
        return items[0]
    if not _INDEX.fullmatch(index[1:-1]):
        return value
    return items[int(index[1:-1])] if int(index[1:-1]) < len(items) else ""
