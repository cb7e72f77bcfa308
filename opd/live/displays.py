"""The displays of `opd merge` while it goes on: a screen on a terminal, a line a step elsewhere, JSON for scripts, or nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from opd.live.course import Course, domain_rewards
from opd.live.interfaces import Display
from opd.live.memory import Memory
from opd.live.render import ScreenSize, render_view
from opd.live.shapes import format_duration
from opd.live.view import View, view_of
from opd.records.step import StepRecord
from opd.text import escape_control_characters

ON_SCREEN = {0: 2, 40: 8}
"""Lines of a terminal -> sentences that stay on the screen from there on; older ones scroll away above it."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """The facts that a display needs of a merge that begins or goes on."""

    name: str
    root: Path
    steps: int
    domains: tuple[str, ...] = ()
    records: Sequence[StepRecord] = ()
    """Those of the steps that are done."""


Displays = Callable[[RunStart], AbstractContextManager[Display]]
"""Makes the display of a merge."""


def _print_line(console: Console, line: str) -> None:
    """Write a sentence on one line, however long it is."""
    console.print(escape(escape_control_characters(line)), highlight=False, soft_wrap=True)


class Lines:
    """A line for every sentence and every step."""

    def __init__(self, console: Console, begun: RunStart) -> None:
        self._console = console
        self._course = Course(begun.steps, begun.domains, begun.records)

    def say(self, line: str) -> None:
        _print_line(self._console, line)

    def doing(self, activity: str) -> None: ...

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None: ...

    def step(self, record: StepRecord) -> None:
        self._course.add_record(record)
        self.say(f"step {record.step}/{self._course.steps}  " + "  ".join((*step_facts(record), *self._describe_time_left())))

    def _describe_time_left(self) -> tuple[str, ...]:
        seconds = self._course.left_s
        return (f"about {format_duration(seconds)} left",) if seconds else ()


class Silence:
    """Nothing: errors and the result are not the display's."""

    def say(self, line: str) -> None: ...

    def doing(self, activity: str) -> None: ...

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None: ...

    def step(self, record: StepRecord) -> None: ...


class JsonLines:
    """Every step as a line of JSON on standard output; sentences go to the display beside it."""

    def __init__(self, display: Display, steps: int) -> None:
        self.say, self.doing, self.exams = display.say, display.doing, display.exams
        self._steps = steps

    def step(self, record: StepRecord) -> None:
        print_json({"event": "step", "steps": self._steps} | record.to_json())


def print_json(data: Mapping[str, object]) -> None:
    """Write a line of JSON to standard output at once."""
    print(json.dumps(data), flush=True)


class Screen:
    """One screen, drawn again every second. Sentences that leave it stay above it, whole, where a terminal scrolls back to.

    A thread draws. It reads attributes that are replaced and never changed, so it sees each of them whole.
    """

    def __init__(self, console: Console, begun: RunStart) -> None:
        self._console = console
        self._course = Course(begun.steps, begun.domains, begun.records)
        self._begun = begun
        self._memory = Memory(os.getpid())
        self._notes: tuple[str, ...] = ()
        self._doing = ("", time.monotonic())
        self._began = self._stepped = time.monotonic()
        self._view = view_of(self._course)
        self._note_lines = max(count for lines, count in ON_SCREEN.items() if console.height >= lines)

    def __enter__(self) -> Screen:
        drawing = {"get_renderable": self._render_screen, "refresh_per_second": 1, "transient": True}
        self._live = Live(console=self._console, **drawing)  # type: ignore[arg-type]
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._scroll_notes(0)
        if self._course.recent:
            last = self._course.recent[-1]
            _print_line(self._console, f"step {last.step}/{self._course.steps}  " + "  ".join(step_facts(last)))

    def say(self, line: str) -> None:
        """Nothing is written here: a signal's handler says things too, in the middle of whatever the program writes."""
        self._notes = (*self._notes, line)

    def doing(self, activity: str) -> None:
        self._doing = (activity, time.monotonic())
        self._scroll_notes(self._note_lines)

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        self._course.before, self._course.expert, self._course.clear = before, expert, clear
        self._view = view_of(self._course)

    def step(self, record: StepRecord) -> None:
        self._course.add_record(record)
        self._stepped = time.monotonic()
        self._view = view_of(self._course)
        self._scroll_notes(self._note_lines)

    def _scroll_notes(self, count: int) -> None:
        """Move all sentences but the last few above the screen."""
        old_notes = self._notes[: len(self._notes) - count] if len(self._notes) > count else ()
        self._notes = self._notes[len(old_notes) :]
        for line in old_notes:
            _print_line(self._console, line)

    def _render_screen(self) -> Text:
        """The screen at this moment."""
        (activity, since), now, remaining = self._doing, time.monotonic(), self._view.left_s
        view = replace(
            self._view,
            name=self._begun.name,
            root=str(self._begun.root),
            doing=activity,
            doing_s=now - since,
            elapsed_s=now - self._began,
            left_s=None if remaining is None else max(0.0, remaining - (now - self._stepped)),
            memory=self._memory.read_usage(),
            notes=self._notes[-self._note_lines :],
        )
        return render_for_console(view, self._console)


def render_for_console(view: View, console: Console, height: int | None = None) -> Text:
    """The view for this console: a line less than it is high, which leaves the last one to the cursor."""
    room = ScreenSize(width=console.width, height=height or console.height - 1, unicode=not console.options.ascii_only)
    return Text("\n", no_wrap=True, overflow="crop", end="").join(render_view(view, room))


def step_facts(record: StepRecord) -> list[str]:
    """Return the parts of the line about a step."""
    speed = record.response_tokens / record.seconds if record.seconds else 0.0
    parts = [f"loss {record.loss:.4f}", f"{speed:.0f} tok/s", f"gap {record.probe_gap:.1e}"]
    if record.accuracy:
        parts.append(f"accuracy {fmean(record.accuracy.values()):.3f}")
    rewards = domain_rewards(record)
    if rewards:
        parts.append(f"reward {fmean(rewards.values()):.3f}")
    if record.quarantined:
        parts.append(f"quarantined {sum(record.quarantined.values())}")
    return parts


@contextmanager
def open_display(begun: RunStart) -> Iterator[Display]:
    """A screen if standard error is a terminal, else lines on it: standard output holds only results."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield Lines(console, begun)
        return
    with Screen(console, begun) as screen:
        yield screen


@contextmanager
def open_silent_display(begun: RunStart) -> Iterator[Display]:
    """Nothing."""
    yield Silence()


@contextmanager
def open_json_lines(begun: RunStart) -> Iterator[Display]:
    """JSON for the steps, and lines on standard error for the rest."""
    yield JsonLines(Lines(Console(stderr=True), begun), begun.steps)


@contextmanager
def open_json_only(begun: RunStart) -> Iterator[Display]:
    """JSON for the steps, and nothing else."""
    yield JsonLines(Silence(), begun.steps)


CHOICES: Mapping[tuple[bool, bool], Displays] = {
    (False, False): open_display,
    (True, False): open_silent_display,
    (False, True): open_json_lines,
    (True, True): open_json_only,
}
"""(`--quiet`, `--json`) -> how a merge is shown."""
