"""Made-up merges to look at."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.live.course import Course
from opd.live.live_state import FAILED, FINISHED
from opd.live.render import RunScreen
from opd.live.view import KILLED, View, build_view
from opd.records.step import DomainRecord, StepRecord
from opd.records.types import SavedCheckpoint

DOMAINS = ("math", "code", "law", "medicine", "poetry", "chess", "sorting", "geometry", "translation", "summaries")
LONG = tuple(f"a-domain-whose-name-is-as-long-as-a-name-may-be-{name}" for name in DOMAINS)
NOTES = (
    "warning: the student's template has no system turn",
    "rollout engine: up after 12 s",
    "trainer: up after 19 s",
    "teachers: up after 24 s",
    "before the merge: mean accuracy 0.210 over 10 domains",
    "expert math-7b: 0.930 on math, the student 0.130",
    "warning: step 83: truncation: domain poetry: 0.91 of the responses end at their limit (monitors.truncation.warn is "
    "0.9); raise rollout.max_new_tokens, or look at the samples",
)


def record(step: int, domains: tuple[str, ...] = DOMAINS, exam: bool = False) -> StepRecord:
    """A step's record; the numbers follow from the step, and get better."""
    parts = {
        name: DomainRecord(
            loss=(1 + i / 10) * 2.5 / (1 + step / 8), argmax_agreement=step / (step + 30), tokens=90 + 7 * i
        )
        for i, name in enumerate(domains)
    }
    phases = {"checkpoint": 0.0, "rollout": 0.91, "score": 0.49, "train": 0.74, "sync": 0.33}
    return StepRecord(
        step=step,
        loss=sum(part.loss or 0.0 for part in parts.values()) / len(parts),
        domains=parts,
        response_tokens=1410,
        phase_s=phases | ({"evaluate": 1.85} if exam else {}),
        probe_gap=1.5e-6,
        accuracy={name: min(1.0, 0.2 + step / 160) for name in domains} if exam else {},
        checkpoint=SavedCheckpoint(step=step - 1, background_s=0.2, size=9) if step % 25 == 1 and step > 1 else None,
    )


def course(done: int = 122, domains: tuple[str, ...] = DOMAINS) -> Course:
    """The course of a merge of 300 steps with an exam every 50."""
    found = Course(300, domains, (record(step, domains, exam=step % 50 == 0) for step in range(1, done + 1)))
    found.before = {name: 0.13 + i / 50 for i, name in enumerate(domains)}
    found.expert = {name: 0.99 - i / 100 for i, name in enumerate(domains)}
    return found


def running(domains: tuple[str, ...] = DOMAINS) -> View:
    return replace(
        build_view(course(domains=domains)),
        name="ten-experts",
        root="runs/ten-experts",
        doing="rollout",
        doing_s=3.2,
        elapsed_s=342.0,
        memory=(("driver", 900 << 20), ("workers", 5300 << 20), ("Ray", 400 << 20)),
        notes=NOTES,
    )


def starting() -> View:
    return replace(
        build_view(Course(300, DOMAINS)),
        name="ten-experts",
        root="runs/ten-experts",
        doing="loading: trainer (rollout engine: up)",
        doing_s=7.0,
        elapsed_s=21.0,
        memory=(("driver", 700 << 20), ("workers", 2300 << 20)),
        notes=NOTES[:2],
    )


def killed() -> View:
    return replace(
        running(),
        quarantined=2,
        state=KILLED,
        left_s=None,
        memory=(),
        why="it ended without a word, while: rollout",
        hints=("next: opd merge --resume runs/ten-experts   (goes on after step 100)",),
    )


def failed() -> View:
    why = "step 122: monitor gap: all domains: 0.9\n  saw:    monitors/step-000122.json\n  fix:    lower trainer.lr"
    return replace(killed(), state=FAILED, why=why)


def finished() -> View:
    return replace(
        build_view(course(300)),
        name="ten-experts",
        root="runs/ten-experts",
        state=FINISHED,
        elapsed_s=7444.0,
        left_s=None,
        hints=("next: opd report runs/ten-experts", "model: runs/ten-experts/model"),
    )


VIEWS = {
    "running": running(),
    "long-names": running(LONG),
    "starting": starting(),
    "killed": killed(),
    "failed": failed(),
    "finished": finished(),
}
SIZES = {"80x24": (80, 23), "160x50": (160, 49)}
SNAPSHOTS = Path(__file__).parent / "snapshots"


def draw(view: View, width: int, height: int, **console: Any) -> str:
    """Draw a view as a terminal gets it; without colours unless the console has some."""
    kind = {"color_system": None, "file": StringIO(), "force_terminal": True, "legacy_windows": False} | console
    screen = Console(width=width, height=height + 1, **kind)
    with screen.capture() as capture:
        screen.print(RunScreen(view))
    return capture.get()


def text_of(view: View, width: int, height: int) -> str:
    """The lines of a view, without styles."""
    return "".join(f"{line.rstrip()}\n" for line in draw(view, width, height).splitlines())


if __name__ == "__main__":  # writes the snapshots again: look at what changed before you commit it
    SNAPSHOTS.mkdir(exist_ok=True)
    for kind, view in VIEWS.items():
        for name, (width, height) in SIZES.items():
            (SNAPSHOTS / f"{kind}-{name}.txt").write_text(text_of(view, width, height), encoding="utf-8")
