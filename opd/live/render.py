"""A view as lines of text that fill a screen: a pure function of the view and the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from textwrap import wrap

from rich.cells import cell_len
from rich.text import Text

from opd.live.now import FAILED, FINISHED
from opd.live.shapes import (
    BAD,
    DOT,
    LONGEST,
    LOOK,
    PLAIN,
    STRONG,
    cut_end,
    format_bytes,
    format_duration,
    join_fitting,
    render_bar,
    render_curve,
    shorten_middle,
)
from opd.live.table import domain_table
from opd.live.view import KILLED, RUNNING, View
from opd.text import to_one_line

STATE_STYLES = {RUNNING: STRONG, FINISHED: STRONG, FAILED: f"{STRONG} {BAD}", KILLED: f"{STRONG} {BAD}"}
"""Any other state is one to look at. Green is for bars alone: as text it is pale on a light ground."""
MOST_NOTES = 8
MOST_WHY = 6
"""Lines of the reason why a merge ended early."""
GAP = 2
"""Cells between the title and the run directory."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenSize:
    """The room for a view."""

    width: int
    height: int
    unicode: bool = True
    """True if the terminal shows more than ASCII."""


def render_view(view: View, room: ScreenSize) -> list[Text]:
    """Lines that are at most as wide and at most as many as there is room for; nothing wraps.

    What matters least gives way first: empty lines, the curve, old notes, domains with a small loss.
    """
    head, facts = _render_head(view, room.width), _render_facts(view, room.width)
    free_lines = room.height - len(head) - len(facts)
    notes = _render_notes(view.notes, room.width)
    table = domain_table(view, room.width, free_lines - min(2, len(notes)))
    free_lines -= len(table)
    blanks = 3
    note_count = max(min(2, free_lines), free_lines - blanks, 0)
    notes = notes[-note_count:] if note_count else []
    free_lines -= len(notes)
    blocks = [head, table, facts, notes]
    if (course := _render_course(view, room.width)) and free_lines > len(course) + len(blocks):
        blocks.insert(2, course)
        free_lines -= len(course)
    lines = list(blocks[0])
    for block in blocks[1:]:
        if block and free_lines > 0:
            lines.append(Text())
            free_lines -= 1
        lines += block
    return [_plain_line(line, room) for line in lines[: max(0, room.height)]]


def _plain_line(line: Text, room: ScreenSize) -> Text:
    """The line in characters that the terminal has, and never too wide, whatever the width."""
    if not room.unicode:
        line.plain = line.plain.translate(PLAIN)
    line.truncate(room.width)
    line.no_wrap = True
    return line


def _render_head(view: View, width: int) -> list[Text]:
    """The name and the state, the progress, and what goes on."""
    title = Text(shorten_middle(view.name, max(8, width // 2)), STRONG)
    title.append("  " + view.state, STATE_STYLES.get(view.state, f"{STRONG} {LOOK}"))
    free_cells = width - title.cell_len - GAP
    if view.root and free_cells >= 8:
        root = shorten_middle(view.root, free_cells)
        title.append(" " * (GAP + free_cells - cell_len(root)) + root)
    steps = f"  step {view.done} of {view.steps}"
    progress = render_bar(view.done / view.steps if view.steps else 0.0, max(0, width - len(steps)))
    progress.append(steps, STRONG)
    return [title, progress, Text(join_fitting(_goes_on(view), width))]


def _goes_on(view: View) -> list[str]:
    """Render the present phase, its duration, and the time that is left."""
    parts = []
    if view.state == RUNNING:
        activity = NAMES.get(view.doing, view.doing) or "at work"
        parts.append(activity if view.doing_s is None else f"{activity}, {format_duration(view.doing_s)}")
    if view.elapsed_s is not None:
        parts.append(
            f"{format_duration(view.elapsed_s)} so far"
            if view.state == RUNNING
            else f"{format_duration(view.elapsed_s)} in all"
        )
    if view.state == RUNNING and view.left_s is not None:
        parts.append(f"about {format_duration(view.left_s)} left")
    return parts


def _render_facts(view: View, width: int) -> list[Text]:
    """The last step, speed, memory and checkpoint, and what to do next."""
    lines = []
    if view.phases:
        total = sum(seconds for _, seconds in view.phases)
        digits = 1 if total >= 1 else 3
        parts = [f"{name} {seconds:.{digits}f}" for name, seconds in view.phases if seconds >= 0.5 / 10**digits]
        prefix = f"step {view.done} took {total:.{digits}f} s: "
        lines.append(Text(prefix + join_fitting(parts, width - len(prefix), ", ")))
    speed = []
    if view.tokens_per_s is not None:
        speed.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.gap is not None:
        speed.append(f"gap {view.gap:.1e}")
    if line := _with_memory(join_fitting(speed, width), view, width):
        lines.append(Text(line))
    details = []
    if view.checkpoint is not None:
        details.append(f"checkpoint of step {view.checkpoint}")
    if view.exam_step is not None:
        details.append(f"now: the exam after step {view.exam_step}")
    if view.quarantined:
        details.append(f"quarantined: {view.quarantined}")
    if details:
        lines.append(Text(join_fitting(details, width)))
    lines += [Text(cut_end(line, width)) for line in _wrap_reason(view.why, width)[:MOST_WHY]]
    return lines + [Text(cut_end(hint, width), STRONG) for hint in view.hints]


def _wrap_reason(reason: str, width: int) -> list[str]:
    """Each line of the reason over as many lines as it needs: it is what a user has to read."""
    lines = [to_one_line(line, LONGEST) for line in reason.splitlines()]
    return [part for line in lines for part in wrap(line, max(1, width))]


def _with_memory(line: str, view: View, width: int) -> str:
    """The line with the memory of as many as fit behind it, the driver's first."""
    for number, (owner, nbytes) in enumerate(view.memory):
        separator = ", " if number else f"{DOT if line else ''}memory "
        longer = f"{line}{separator}{owner} {format_bytes(nbytes)}"
        if cell_len(longer) > width:
            break
        line = longer
    return line


def _render_course(view: View, width: int) -> list[Text]:
    """The loss from the first step to the last, on a logarithmic scale where it has one."""
    if len(view.losses) < 2:
        return []
    values = [log(loss) for loss in view.losses] if min(view.losses) > 0 else view.losses
    head, tail = f"loss {view.losses[0]:.4f} ", f" {view.losses[-1]:.4f}"
    return [Text(head + render_curve(values, width - len(head) - len(tail)) + tail)]


def _render_notes(notes: Sequence[str], width: int) -> list[Text]:
    """The last notes, the newest at the end; warnings stand out."""
    return [
        Text(cut_end(note, width), LOOK if note.startswith("warning") else "")
        for note in notes[max(0, len(notes) - MOST_NOTES) :]
    ]


def one_line_of(view: View) -> str:
    """The view in one line, for where there is no screen."""
    parts = [f"{view.state}: step {view.done}/{view.steps}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:.0f} tok/s")
    return "  ".join((*parts, *_goes_on(view)))
