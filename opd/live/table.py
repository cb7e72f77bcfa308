"""The table of domains: as many columns as fit, the most wanted first, and as many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.cells import cell_len
from rich.text import Text

from opd.live.course import WINDOW
from opd.live.shapes import BAD, GOOD, STRONG, render_bar, shorten_middle
from opd.live.view import DomainView, View

NAME_WIDTH = (12, 40)
"""The least and the most cells of a domain's name."""
BAR_WIDTH = (8, 30)
GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers."""

    title: str
    key: str
    """Field of `DomainView`; a column that no domain has a value for is left out."""
    rank: int
    """Columns with a small number are the last to be left out."""
    show: Callable[[float], str]

    @property
    def width(self) -> int:
        return max(8, len(self.title))


def _format_loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _format_accuracy(value: float) -> str:
    return f"{value:.3f}"


def _format_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


COLUMNS = (
    Column("loss", "loss", 1, _format_loss),
    Column("at start", "first_loss", 6, _format_loss),
    Column("agreement", "agreement", 7, _format_percent),
    Column("tokens", "tokens", 8, lambda value: f"{value:.0f}"),
    Column("reward", "reward", 2, _format_accuracy),
    Column("before", "before", 4, _format_accuracy),
    Column("now", "now", 3, _format_accuracy),
    Column("expert", "expert", 5, _format_accuracy),
)
HEADROOM = "headroom"


def domain_table(view: View, width: int, height: int) -> list[Text]:
    """The table in at most so many lines; empty where not even one domain fits, or no number is known."""
    all_domains = view.domains
    if not all_domains or height < 2:
        return []
    columns, name_width, bar_width = _choose_columns(all_domains, width)
    if not columns:
        return []
    room = height - 1 - (len(all_domains) > 1 and height > 3)
    shown, left_out = _choose_domains(all_domains, room)
    lines = [_render_header(columns, name_width, bar_width)]
    lines += [_render_row(domain, columns, name_width, bar_width) for domain in shown]
    if left_out:
        lines.append(Text(shorten_middle(f"and {left_out} domains with a smaller loss", width)))
    if len(all_domains) > 1 and len(lines) < height:
        lines.append(_render_row(_all_of(view), columns, name_width, bar_width, STRONG))
    return lines


def _choose_domains(domains: Sequence[DomainView], room: int) -> tuple[list[DomainView], int]:
    """The domains that are shown, in their order, and how many are not: those with the smallest loss."""
    if len(domains) <= room:
        return list(domains), 0
    by_loss = sorted(domains, key=lambda domain: -(domain.loss or 0.0))[: max(0, room - 1)]
    names = {domain.name for domain in by_loss}
    return [domain for domain in domains if domain.name in names], len(domains) - len(names)


def _choose_columns(domains: Sequence[DomainView], width: int) -> tuple[list[Column], int, int]:
    """The columns that fit, the width of the names, and that of the headroom's bar: 0 where there is no headroom."""
    longest = max(cell_len(domain.name) for domain in domains)
    name_width = min(max(longest, NAME_WIDTH[0]), NAME_WIDTH[1], max(NAME_WIDTH[0], width // 4))
    free_cells = width - name_width
    number = GAP + 5
    bar_width = BAR_WIDTH[0] if any(d.headroom is not None for d in domains) and free_cells > 30 else 0
    free_cells -= bar_width + number + GAP if bar_width else 0
    fitting = set()
    usable = [column for column in COLUMNS if any(getattr(d, column.key) is not None for d in domains)]
    for column in sorted(usable, key=lambda column: column.rank):
        if column.width + GAP <= free_cells:
            fitting.add(column.key)
            free_cells -= column.width + GAP
    extra = min(free_cells, longest - name_width, NAME_WIDTH[1] - name_width)
    name_width, free_cells = name_width + max(0, extra), free_cells - max(0, extra)
    if bar_width:
        bar_width = min(BAR_WIDTH[1], bar_width + free_cells)
    return [column for column in COLUMNS if column.key in fitting], name_width, bar_width


def _render_header(columns: Sequence[Column], name_width: int, bar_width: int) -> Text:
    cells = ["domain".ljust(name_width), *(column.title.rjust(column.width) for column in columns)]
    if bar_width:
        cells.append(HEADROOM.ljust(bar_width + GAP + 5))
    return Text((" " * GAP).join(cells).rstrip(), STRONG)


def _render_row(
    domain: DomainView, columns: Sequence[Column], name_width: int, bar_width: int, style: str = ""
) -> Text:
    name = shorten_middle(domain.name, name_width)
    line = Text(name + " " * (name_width - cell_len(name)), style, end="")
    for column in columns:
        value = getattr(domain, column.key)
        text = "-" if value is None else column.show(value)
        line.append(" " * GAP + text.rjust(column.width)[: column.width], style)
    if bar_width and domain.headroom is not None:
        worse = domain.headroom < 0
        line.append(" " * GAP).append_text(render_bar(domain.headroom, bar_width, GOOD))
        line.append(" " * GAP + _format_percent(domain.headroom).rjust(5)[:5], BAD if worse else style)
    elif bar_width:
        line.append(" " * GAP + "-", style)
    return line


def _all_of(view: View) -> DomainView:
    """The last row: the loss of all domains together, and means of what exams and rewards say."""

    def mean(key: str) -> float | None:
        values = [getattr(domain, key) for domain in view.domains]
        return fmean(values) if values and None not in values else None

    return DomainView(
        name="all",
        loss=fmean(view.losses[-WINDOW:]) if view.losses else None,
        first_loss=fmean(view.losses[:WINDOW]) if view.losses else None,
        tokens=sum(domain.tokens or 0 for domain in view.domains),
        reward=mean("reward"),
        before=mean("before"),
        now=mean("now"),
        expert=mean("expert"),
        headroom=view.mean_headroom,
    )
