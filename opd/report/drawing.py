"""Draw plots for report.html. matplotlib draws an SVG, whose colours come from the page, be it light or dark.

A figure is drawn in placeholder colours, one for each colour variable of the page. In the text of the SVG each placeholder
is then replaced by its variable. Text stays text, in the page's font. Nothing refers to anything outside the page.
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
"""Line styles of matplotlib, in the order in which domains get them."""
NAMES = ("ink", "muted", "grid", "before", "expert", "merged", "good", "bad", *(f"s{i}" for i in range(SERIES)))
COLOURS = {name: f"#0a0b{index + 1:02x}" for index, name in enumerate(NAMES)}
"""Colour variable of the page -> the placeholder colour in which matplotlib draws it."""

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
"""Inches; about the width of a phone's screen, so that text is not shrunk there."""
HEIGHT = 2.9
"""Inches."""

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
FONT = re.compile(r"font: ((?:\w+ )*?)([\d.]+px) [^;]*")
"""Matplotlib's style of a text: words such as `bold`, the size, and the family, which is dropped for the page's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure of the page."""

    name: str
    """The HTML id of the plot without its beginning `plot-`."""
    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """Pairs of a colour variable and what it stands for; empty if the page's list of domains serves as legend."""
    note: str = ""
    wide: bool = False
    """True if it is too wide for half of the page. On a small screen it then scrolls."""


Draw = Callable[[Axes], None]


def draw_plot(name: str, title: str, draw: Draw, *, width: float = WIDTH, height: float = HEIGHT, **more: Any) -> Plot:
    """Have `draw` draw on one set of axes and return the plot. `width` and `height` are in inches, `more` are further fields."""
    # Ids in the SVG are derived from the salt, and no date is stored, so the same run gives the same bytes.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none", edgecolor="none")
        draw(figure.add_subplot(facecolor="none"))
        text = io.StringIO()
        # `savefig` would draw everything twice.
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    wide = width > WIDTH
    return Plot(name=name, title=title, svg=theme_svg(text.getvalue(), name, title, wide), wide=wide, **more)


def theme_svg(svg: str, name: str, title: str, wide: bool = False) -> str:
    """Prepare the SVG of a figure for the page: with ids that no other figure has, the page's colours and font, and a title
    for screen readers. A `wide` figure is never shrunk."""
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
    """Return the colour and line style of the domain with this index."""
    return {"color": COLOURS[f"s{index % SERIES}"], "linestyle": DASHES[index // SERIES % len(DASHES)]}


def format_thousands(value: float) -> str:
    """Format a number with three digits and a unit: 12345 as `12.3k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # from here on it is rounded to at least 1 of this unit
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
