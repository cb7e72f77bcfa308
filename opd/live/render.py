"""Draw a view with rich, fitted into the lines and cells of the terminal.

Styles are bold and three of the terminal's own colours. These can be read on a light and on a dark background, unlike yellow,
cyan, white and dim text; dim is used only for the empty part of a bar. No information is in a colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log
from statistics import fmean

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from opd.live.course import WINDOW
from opd.live.live_state import FAILED, FINISHED
from opd.live.view import KILLED, RUNNING, DomainView, View
from opd.text import to_one_line

GOOD, BAD, LOOK, STRONG, FAINT = "green", "red", "magenta", "bold", "dim"
CUT, DOT, STEPS = "…", " · ", "▁▂▃▄▅▆▇█"
ASCII = str.maketrans({CUT: "~", "·": "|"} | dict(zip(STEPS, "__--==^^", strict=True)))
"""Replacements of our special characters on a terminal without Unicode."""
LONGEST = 2000
"""Most characters that are taken of a text that we did not write, such as a name or an error."""
STATE_STYLES = {RUNNING: STRONG, FINISHED: STRONG, FAILED: f"{STRONG} {BAD}", KILLED: f"{STRONG} {BAD}"}
"""State -> its style; any other state has the style `LOOK`, because the user should look at it. Green is used only for bars:
green text is pale on a light background."""
MOST_NOTES = 8
MOST_WHY = 6
"""Most lines of the reason why a merge ended early."""
NAMES = {
    "rollout": "the student writes",
    "score": "the teachers score",
    "credit": "rewards become advantages",
    "train": "the trainer trains",
    "sync": "new weights go to the engines",
    "evaluate": "an exam",
    "checkpoint": "a checkpoint is written",
}
"""Phase of a step -> what happens in it."""
BARS_FROM = 64
"""Smallest width in cells at which the headroom is also drawn as a bar."""
GAP = 2
"""Cells between two columns."""


class RunScreen:
    """A view as lines, no wider and no more than there is room for.

    If there is too little room, these are left out, in this order: empty lines, the curve, old notes, and domains with a
    small loss.
    """

    def __init__(self, view: View, height: int | None = None) -> None:
        """`height`: most lines. By default it is one less than the terminal has, because the cursor needs the last line."""
        self._view = view
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def draw(parts: Iterable[RenderableType]) -> list[list[Segment]]:
            return console.render_lines(Group(*parts), options, pad=False)

        view, width = self._view, options.max_width
        height = options.size.height - 1 if self._height is None else self._height
        head, notes = draw(_draw_head(view, width)), draw(_list_notes(view))
        facts = draw(_list_facts(view, width)) + draw(_list_reasons(view))[:MOST_WHY]
        facts += draw(make_sentence(hint, STRONG) for hint in view.hints)
        left = height - len(head) - len(facts)
        table = draw(_draw_domains(view, width, left - min(2, len(notes))))
        left -= len(table)
        # Two of the notes come before the empty lines between the blocks, the others after them.
        notes = notes[len(notes) - min(len(notes), max(min(2, left), left - 3, 0)) :]
        left -= len(notes)
        course = draw(_draw_course(view, width)) if left > 5 else []
        blocks = [block for block in (head, table, course, facts, notes) if block]
        empty = height - sum(map(len, blocks))
        lines: list[list[Segment]] = []
        for number, block in enumerate(blocks):
            lines += [[], *block] if 0 < number <= empty else block
        for line in lines[: max(0, height)]:
            for text, style, _ in line:
                yield Segment(text.translate(ASCII) if options.ascii_only else text, style)
            yield Segment.line()


def _draw_head(view: View, width: int) -> Iterator[RenderableType]:
    """Yield three lines: name, state and directory; the progress; and what the merge does now."""
    title = Table.grid(Column(), Column(no_wrap=True), Column(ratio=1, justify="right"), padding=(0, GAP), expand=True)
    state = Text(view.state, STATE_STYLES.get(view.state, f"{STRONG} {LOOK}"))
    title.add_row(ShortenedName(view.name, STRONG), state, ShortenedName(view.root))
    progress = Table.grid(Column(ratio=1), Column(no_wrap=True), padding=(0, GAP), expand=True)
    bar = make_bar(view.done / view.steps if view.steps else 0.0)
    progress.add_row(bar, Text(f"step {view.done} of {view.steps}", STRONG))
    yield from (title, progress, make_sentence(join_fitting(_describe_now(view), width)))


def _describe_now(view: View) -> list[str]:
    """Return phrases: the present phase with its duration, the time so far, and the time that is left."""
    parts = []
    if view.state == RUNNING:
        phase = NAMES.get(view.doing, view.doing) or "at work"
        parts.append(phase if view.doing_s is None else f"{phase}, {format_duration(view.doing_s)}")
    if view.elapsed_s is not None:
        parts.append(f"{format_duration(view.elapsed_s)} {'so far' if view.state == RUNNING else 'in all'}")
    if view.state == RUNNING and view.left_s is not None:
        parts.append(f"about {format_duration(view.left_s)} left")
    return parts


def _list_facts(view: View, width: int) -> Iterator[Text]:
    """Yield the lines about the last step, about speed and memory, and about the checkpoint."""
    if view.phases:
        total = sum(seconds for _, seconds in view.phases)
        digits = 1 if total >= 1 else 3
        took = f"step {view.done} took {total:.{digits}f} s: "
        parts = [f"{name} {seconds:.{digits}f}" for name, seconds in view.phases if seconds >= 0.5 / 10**digits]
        yield make_sentence(took + join_fitting(parts, width - len(took), ", "))
    speed = [] if view.tokens_per_s is None else [f"{view.tokens_per_s:,.0f} tokens/s"]
    speed += [] if view.gap is None else [f"gap {view.gap:.1e}"]
    memory = [f"{process} {format_bytes(nbytes)}" for process, nbytes in view.memory]
    if memory:
        memory[0] = f"memory {memory[0]}"
    if speed or memory:
        yield make_sentence(join_fitting([*speed, *memory], width, ", "))
    stored = [] if view.checkpoint is None else [f"checkpoint of step {view.checkpoint}"]
    stored += [] if view.exam_step is None else [f"now: the exam after step {view.exam_step}"]
    stored += [f"quarantined: {view.quarantined}"] if view.quarantined else []
    if stored:
        yield make_sentence(join_fitting(stored, width))


def _list_reasons(view: View) -> Iterator[Text]:
    """Yield the reason of an early end, not cut to one line, because the user has to read it."""
    for line in view.why.splitlines():
        yield Text(to_one_line(line, LONGEST), overflow="fold")


def _list_notes(view: View) -> Iterator[Text]:
    """Yield the last notes, the newest at the end; warnings stand out."""
    for note in view.notes[-MOST_NOTES:]:
        yield make_sentence(note, LOOK if note.startswith("warning") else "")


def _draw_course(view: View, width: int) -> Iterator[Text]:
    """Yield the curve of the loss from the first step to the last, on a logarithmic scale if all losses are above 0."""
    if len(view.losses) < 2:
        return
    values = [log(loss) for loss in view.losses] if min(view.losses) > 0 else view.losses
    first, last = f"loss {view.losses[0]:.4f} ", f" {view.losses[-1]:.4f}"
    yield make_sentence(first + draw_curve(values, width - len(first) - len(last)) + last)


def format_view(view: View) -> str:
    """Return the view as one line of text, for output without a screen."""
    parts = [f"{view.state}: step {view.done}/{view.steps}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:.0f} tok/s")
    return "  ".join((*parts, *_describe_now(view)))


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers in the table of domains."""

    title: str
    key: str
    """Field of `DomainView`; if no domain has a value for it, the column is left out."""
    rank: int
    """On a narrow terminal the columns with the largest ranks are left out first."""
    format: Callable[[float], str]

    @property
    def width(self) -> int:
        return max(7, len(self.title))

    def make_cell(self, domain: DomainView) -> Text:
        """Return the cell for a domain."""
        value: float | None = getattr(domain, self.key)
        if value is None:
            return Text("-")
        return Text(self.format(value), BAD if self.key == "headroom" and value < 0 else "")


def _format_loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _format_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


COLUMNS = (
    NumberColumn("loss", "loss", 1, _format_loss),
    NumberColumn("at start", "first_loss", 7, _format_loss),
    NumberColumn("agreement", "agreement", 8, _format_percent),
    NumberColumn("tokens", "tokens", 9, "{:.0f}".format),
    NumberColumn("reward", "reward", 3, "{:.3f}".format),
    NumberColumn("before", "before", 5, "{:.3f}".format),
    NumberColumn("now", "now", 4, "{:.3f}".format),
    NumberColumn("expert", "expert", 6, "{:.3f}".format),
    NumberColumn("headroom", "headroom", 2, _format_percent),
)


def _draw_domains(view: View, width: int, height: int) -> Iterator[RenderableType]:
    """Yield the table of domains in at most `height` lines; nothing if not even one domain fits, or if no number is known."""
    domains = view.domains
    # `room` is the number of domains that fit: one line is the header, one the row `all`, and one, if some domains are left
    # out, the line that says so.
    room = height - 1 - (len(domains) > 1)
    room -= len(domains) > room
    columns = [column for column in COLUMNS if any(getattr(domain, column.key) is not None for domain in domains)]
    bar_width = width // 8 if width >= BARS_FROM and any(domain.headroom is not None for domain in domains) else 0
    name_width = min(max(12, width // 4), max((len(domain.name) for domain in domains), default=0))
    while columns and sum(GAP + column.width for column in columns) > width - name_width - (
        bar_width and GAP + bar_width
    ):
        columns.remove(max(columns, key=lambda column: column.rank))
    if room < 1 or not columns:
        return
    table = Table("domain", box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=STRONG)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True, min_width=column.width)
    if bar_width:
        table.add_column(width=bar_width)
    largest = {domain.name for domain in sorted(domains, key=lambda domain: -(domain.loss or 0.0))[:room]}
    rows = [domain for domain in domains if domain.name in largest]
    for domain in (*rows, _summarize(view)) if len(domains) > 1 else rows:
        cells: list[RenderableType] = [ShortenedName(domain.name), *(column.make_cell(domain) for column in columns)]
        if bar_width and domain.headroom is not None:
            cells.append(make_bar(domain.headroom))
        table.add_row(*cells, style="" if domain in rows else STRONG)
    yield table
    if len(rows) < len(domains):
        yield make_sentence(f"and {len(domains) - len(rows)} domains with a smaller loss")


def _summarize(view: View) -> DomainView:
    """Return the row `all`: the loss over all domains, and the means of accuracies and rewards."""

    def mean(key: str) -> float | None:
        values = [getattr(domain, key) for domain in view.domains]
        return None if None in values else fmean(values)

    return DomainView(
        name="all",
        loss=fmean(view.losses[-WINDOW:]) if view.losses else None,
        first_loss=fmean(view.losses[:WINDOW]) if view.losses else None,
        tokens=sum(domain.tokens or 0 for domain in view.domains),
        headroom=view.mean_headroom,
        **{key: mean(key) for key in ("reward", "before", "now", "expert")},
    )


class ShortenedName:
    """A name on one line without control characters. If it is too wide, its middle is cut, since names differ at both ends."""

    def __init__(self, name: str, style: str = "") -> None:
        self._name = to_one_line(name, LONGEST)
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, cell_len(self._name)), min(40, cell_len(self._name)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten_middle(self._name, options.max_width), self._style, no_wrap=True)


def shorten_middle(text: str, width: int) -> str:
    """Return a text at most `width` cells wide, with `CUT` in place of its middle if it is wider."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return CUT[:width]
    tail = (width - 1) // 3
    end = text[len(text) - tail :]
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(text, width - 1 - cell_len(end)) + CUT + end


def make_sentence(text: str, style: str = "") -> Text:
    """Return a text on one line without control characters, which is cut at its end if it is too wide."""
    return Text(to_one_line(text, LONGEST), style, no_wrap=True, overflow="ellipsis")


def make_bar(share: float) -> ProgressBar:
    """Return a bar that is full at 1."""
    return ProgressBar(1.0, share, style=FAINT, complete_style=GOOD, finished_style=GOOD)


def draw_curve(values: Sequence[float], width: int) -> str:
    """Return a curve as one line of the characters `STEPS`, from the smallest value to the largest. If there are more values
    than `width`, neighbours are averaged."""
    values = [value for value in values if isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(points), max(points)
    return "".join(STEPS[min(7, int(8 * (point - low) / (high - low or 1)))] for point in points)


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units."""
    minutes, whole = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole:02d} s" if minutes else f"{whole} s"


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes < 1 << 30 else f"{nbytes / (1 << 30):.1f} GiB"


def join_fitting(parts: Sequence[str], width: int, between: str = DOT) -> str:
    """Join as many of the first parts as fit into `width`; the first part is there even if it is wider."""
    while len(parts) > 1 and cell_len(between.join(parts)) > width:
        parts = parts[:-1]
    return between.join(parts)
