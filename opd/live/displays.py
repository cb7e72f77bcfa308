"""The displays of a running `opd merge`: a screen on a terminal, else a line for each step, JSON for scripts, or nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.live import Live

from opd.live.course import Course, domain_rewards
from opd.live.interfaces import Display
from opd.live.memory import Memory
from opd.live.render import RunScreen, format_duration
from opd.live.view import build_view
from opd.records.step import StepRecord
from opd.text import escape_control_characters

ON_SCREEN = {0: 2, 40: 8}
"""Smallest height of a terminal, in lines -> how many sentences stay on the screen. Older ones scroll away above it."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Facts that a display needs about a merge that begins or is resumed."""

    name: str
    root: Path
    steps: int
    domains: tuple[str, ...] = ()
    records: Sequence[StepRecord] = ()
    """Records of the steps that are done."""


Displays = Callable[[RunStart], AbstractContextManager[Display]]
"""Makes the display of a merge."""


def _print_line(console: Console, line: str) -> None:
    """Write a sentence on one line, however long it is."""
    console.out(escape_control_characters(line), highlight=False)


class Lines(Display):
    """Prints a line for every sentence and every step."""

    def __init__(self, console: Console, begun: RunStart) -> None:
        self._console = console
        self._course = Course(begun.steps, begun.domains, begun.records)

    def say(self, line: str) -> None:
        _print_line(self._console, line)

    def step(self, record: StepRecord) -> None:
        self._course.add_record(record)
        left = self._course.left_s
        self.say(_format_step(record, self._course.steps) + (f"  about {format_duration(left)} left" if left else ""))


class JsonLines(Display):
    """Prints every step as a line of JSON on standard output, and passes sentences to another display."""

    def __init__(self, display: Display, steps: int) -> None:
        self._beside = display
        self._steps = steps

    def say(self, line: str) -> None:
        self._beside.say(line)

    def step(self, record: StepRecord) -> None:
        print_json({"event": "step", "steps": self._steps} | record.to_json())


def print_json(data: Mapping[str, object]) -> None:
    """Write a line of JSON to standard output at once."""
    print(json.dumps(data), flush=True)


class Screen(Display):
    """One screen, drawn again every second. Sentences that leave it are printed above it, in full, where the user can scroll.

    A thread draws. It reads attributes whose values are replaced and never changed in place, so it needs no lock.
    """

    def __init__(self, console: Console, begun: RunStart) -> None:
        self._console = console
        self._course = Course(begun.steps, begun.domains, begun.records)
        self._begun = begun
        self._memory = Memory(os.getpid())
        self._notes: tuple[str, ...] = ()
        self._doing = ("", time.monotonic())
        self._began = self._stepped = time.monotonic()
        self._view = build_view(self._course)
        self._most_notes = max(most for lines, most in ON_SCREEN.items() if console.height >= lines)
        self._live = Live(console=console, get_renderable=self._render_screen, refresh_per_second=1, transient=True)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._scroll_notes(0)
        if self._course.recent:
            _print_line(self._console, _format_step(self._course.recent[-1], self._course.steps))

    def say(self, line: str) -> None:
        """Keep the sentence for the thread. Nothing is printed here, because a signal handler may call this while the program
        is printing."""
        self._notes = (*self._notes, line)

    def doing(self, activity: str) -> None:
        self._doing = (activity, time.monotonic())
        self._scroll_notes(self._most_notes)

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        self._course.before, self._course.expert, self._course.clear = before, expert, clear
        self._view = build_view(self._course)

    def step(self, record: StepRecord) -> None:
        self._course.add_record(record)
        self._stepped = time.monotonic()
        self._view = build_view(self._course)
        self._scroll_notes(self._most_notes)

    def _scroll_notes(self, most: int) -> None:
        """Print all sentences except the last `most` above the screen, and forget them."""
        above = self._notes[: max(0, len(self._notes) - most)]
        self._notes = self._notes[len(above) :]
        for line in above:
            _print_line(self._console, line)

    def _render_screen(self) -> RunScreen:
        """Return the screen at this moment."""
        (phase, since), now, remaining = self._doing, time.monotonic(), self._view.left_s
        view = replace(
            self._view,
            name=self._begun.name,
            root=str(self._begun.root),
            doing=phase,
            doing_s=now - since,
            elapsed_s=now - self._began,
            left_s=None if remaining is None else max(0.0, remaining - (now - self._stepped)),
            memory=self._memory.read_usage(),
            notes=self._notes[-self._most_notes :],
        )
        return RunScreen(view)


def _format_step(record: StepRecord, steps: int) -> str:
    return f"step {record.step}/{steps}  " + "  ".join(step_facts(record))


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


def open_display(begun: RunStart) -> AbstractContextManager[Display]:
    """Return a screen if standard error is a terminal, else lines there. Standard output is for results only."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        return nullcontext(Lines(console, begun))
    return Screen(console, begun)


CHOICES: Mapping[tuple[bool, bool], Displays] = {
    (False, False): open_display,
    (True, False): lambda begun: nullcontext(Display()),
    (False, True): lambda begun: nullcontext(JsonLines(Lines(Console(stderr=True), begun), begun.steps)),
    (True, True): lambda begun: nullcontext(JsonLines(Display(), begun.steps)),
}
"""(`--quiet`, `--json`) -> the display of a merge."""
