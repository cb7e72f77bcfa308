"""Draw the plots of report.html: matplotlib draws an SVG, which takes its colours from the page, light or dark.

A figure is drawn in placeholder colours, one for each colour variable of the page, and the SVG text then names the
variable instead. Text stays text, in the page's font. Nothing refers to anything outside the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SERIES = 10
"""Colours for domains; the eleventh domain has the first colour again, dashed."""
DASHES = ("-", "--", ":", "-.")
NAMES = ("ink", "muted", "grid", "before", "expert", "merged", "good", "bad", *(f"s{i}" for i in range(SERIES)))
COLOURS = {name: f"#0a0b{index + 1:02x}" for index, name in enumerate(NAMES)}
"""Variable of the page -> the placeholder that stands for it while drawing."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text instead of outlines
    "text.parse_math": False,  # a dollar sign in a label is text
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 9,
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.7,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "text.color": COLOURS["ink"],
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
}
WIDTH = 5.0
"""Inches: about a phone's screen, so that text is not shrunk there."""
HEIGHT = 2.9

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
FONT = re.compile(r"font: ((?:\w+ )*?)([\d.]+px) [^;]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure of the page."""

    name: str
    """Its HTML id, after `plot-`."""
    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """Colour variable and what it stands for; empty where the page's list of domains is the legend."""
    note: str = ""
    wide: bool = False
    """Too wide for half of the page; on a small screen it scrolls."""


Draw = Callable[[Axes], None]


def draw_plot(name: str, title: str, draw: Draw, *, width: float = WIDTH, height: float = HEIGHT, **more: Any) -> Plot:
    """Draw on one set of axes."""
    # Ids in the SVG come from the salt, and no date is stored: the same run gives the same bytes.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none", edgecolor="none")
        draw(figure.add_subplot(facecolor="none"))
        text = io.StringIO()
        # `savefig` would draw all of it twice.
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    wide = width > WIDTH
    return Plot(name=name, title=title, svg=theme_svg(text.getvalue(), name, title, wide), wide=wide, **more)


def theme_svg(svg: str, name: str, title: str, wide: bool = False) -> str:
    """Prepare the SVG of one figure for a page of several: its own ids, the page's colours and font, a name for screen readers.

    A `wide` one is never shrunk.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith("metadata"):
                parent.remove(child)
    prefix = f"{name}-"
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                value = prefix + value
                series = re.fullmatch(r"domain-(\d+)", element.attrib[key])
                if series:
                    element.set("data-domain", series[1])
            elif key == f"{{{XLINK}}}href":
                value = value.replace("#", f"#{prefix}", 1)
            elif key == "style":
                value = FONT.sub(r"\1font-size: \2", value)
            element.set(key, _colour_value(value.replace("url(#", f"url(#{prefix}")))
    width, _ = (root.attrib.pop(key) for key in ("width", "height"))
    if wide:
        root.set("style", f"min-width: {width}")
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")


def _colour_value(value: str) -> str:
    for name, placeholder in COLOURS.items():
        value = value.replace(placeholder, f"var(--{name})")
    return value


def domain_style(index: int) -> dict[str, Any]:
    """Colour and dash of the domain of this number."""
    return {"color": COLOURS[f"s{index % SERIES}"], "linestyle": DASHES[index // SERIES % len(DASHES)]}


def format_thousands(value: float) -> str:
    """12345 -> `12k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # three digits of anything from there on are 1 of the unit
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
