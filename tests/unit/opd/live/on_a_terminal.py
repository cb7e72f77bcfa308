"""The display of a made-up merge. Run on a pseudo-terminal: what it shows then is what a user sees."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from opd.live import displays
from opd.live.displays import RunStart
from pipelines.interrupts import interrupts
from tests.unit.opd.live.made import DOMAINS, LONG, NOTES, course, record


def main(how: str) -> None:
    domains = LONG if how == "long" else DOMAINS
    clock = [1000.0]
    displays.time = SimpleNamespace(monotonic=lambda: clock[0])  # type: ignore[assignment]
    displays.Memory.read_usage = lambda self: (("driver", 900 << 20), ("workers", 5300 << 20))  # type: ignore[method-assign]
    before = [record(step, domains, exam=step % 50 == 0) for step in range(1, 121)]
    known = course(domains=domains)
    with displays.open_display(RunStart("ten-experts", Path("runs/ten-experts"), 300, domains, before)) as screen:
        screen.doing("workers start")
        for line in NOTES[:4]:
            screen.say(line)
        clock[0] += 21
        screen.doing("the exam of the student before the merge")
        screen.exams(known.before, known.expert)
        for line in NOTES[4:]:
            screen.say(line)
        for step in (121, 122):
            clock[0] += 3
            screen.step(record(step, domains))
        screen.doing("rollout")
        if how == "error":
            with interrupts() as signals, signals.handle_first_signal(screen.say):
                signal.raise_signal(signal.SIGINT)
        clock[0] += 3
        screen._live.refresh()  # type: ignore[attr-defined]
        print("\a", end="", file=sys.__stderr__, flush=True)  # whoever looks on looks now
        if how == "error":
            raise SystemExit(3)


if __name__ == "__main__":
    main(sys.argv[1])
