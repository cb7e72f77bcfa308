"""Pieces of a screen: cut text, bars, curves, durations. Every piece fits the width that it is given.

Styles are bold and three of the terminal's own colours. Those read well on a light and on a dark ground, which yellow, cyan,
white and dim text do not; and no meaning hangs on a colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from opd.text import to_one_line

GOOD, BAD, LOOK, STRONG = "green", "red", "magenta", "bold"
STYLES = (GOOD, BAD, LOOK, STRONG)
"""All styles that a screen uses."""
FULL, EMPTY, CUT, DOT, STEPS = "━", "╌", "…", " · ", "▁▂▃▄▅▆▇█"
PLAIN = str.maketrans({FULL: "#", EMPTY: ".", CUT: "~", "·": "|"} | dict(zip(STEPS, "__--==^^", strict=True)))
"""ASCII replacements of these characters on a terminal that has no Unicode."""
LONGEST = 2000
"""Characters of a text of others that are looked at."""


def shorten_middle(text: str, width: int) -> str:
    """The text on one line, safe to show, and with its middle left out where it is too wide: names differ at both ends."""
    text = to_one_line(text, LONGEST)
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return CUT[:width]
    tail = (width - 1) // 3
    end = text[len(text) - tail :]
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(text, width - 1 - cell_len(end)) + CUT + end


def cut_end(text: str, width: int) -> str:
    """The same for sentences: they are cut at their end."""
    text = to_one_line(text, LONGEST)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + CUT[:width]


def render_bar(share: float | None, width: int, style: str = GOOD) -> Text:
    """A bar that is full at 1; blank where there is nothing to show."""
    if share is None:
        return Text(" " * width)
    full = round(min(1.0, max(0.0, share)) * width)
    return Text.assemble((FULL * full, style), EMPTY * (width - full))


def render_curve(values: Sequence[float], width: int) -> str:
    """The values from the smallest to the largest as one line of steps; neighbours are averaged where they do not fit."""
    values = [value for value in values if isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(points), max(points)
    if high == low:
        return STEPS[0] * count
    return "".join(STEPS[min(7, int(8 * (point - low) / (high - low)))] for point in points)


def format_duration(seconds: float) -> str:
    """A duration with its two largest units."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people."""
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"


def join_fitting(parts: Sequence[str], width: int, between: str = DOT) -> str:
    """The first of the parts, as many as fit side by side."""
    text, parts = "", [to_one_line(part, LONGEST) for part in parts]
    for part in parts:
        longer = text + between + part if text else part
        if cell_len(longer) > width:
            break
        text = longer
    return text or cut_end(parts[0], width) if parts else ""
