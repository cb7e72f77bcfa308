"""Time of the guard's stage one for a call, on our labelled commands.

    python benchmarks/guard.py

Every command is checked in a session of its own, without a judge, in several rounds; a command's time is its median. Rules are
read and compiled once, before. No figure is judged here; the issue that asked for the guard allows 2 ms a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from opd.guard.guard import Guard  # noqa: E402
from opd.guard.labelled_cases import Case, shipped_cases  # noqa: E402
from opd.guard.rules import RuleSet, shipped_rules  # noqa: E402
from opd.records.environments import ToolCall  # noqa: E402 - found without an installation

LONG = [
    ("heredoc of 200 lines", "cat > a.py <<'EOF'\n" + "x = [i * 2 for i in range(10)]\n" * 200 + "EOF"),
    ("Python of 200 lines", "python3 - <<'EOF'\n" + "print(open('data.txt').read())\n" * 200 + "EOF"),
    ("100 commands", "; ".join(f"sed -i 's/a/b/' src/file{i}.py" for i in range(100))),
]
"""Calls that are longer than any labelled one: they are over the bound, and are shown apart."""


def medians_ms(guard: Guard, steps: Sequence[ToolCall], rounds: int) -> list[float]:
    """Median time of each call in milliseconds, without what comes before it in its trajectory.

    A round checks every call once: a pause of the machine then spoils one round of many calls, not all rounds of one.
    """
    times = [[_seconds(guard, step) for step in steps] for _ in range(rounds)]
    return [1e3 * statistics.median(its) for its in zip(*times, strict=True)]


def _seconds(guard: Guard, step: ToolCall) -> float:
    session = guard.session()
    began = time.perf_counter()
    guard.check_rules(step, session)
    return time.perf_counter() - began


def measured(guard: Guard, cases: Sequence[Case], rounds: int) -> dict[str, float]:
    """Median, percentiles and worst of the commands' times."""
    times = sorted(medians_ms(guard, [case.steps[-1] for case in cases], rounds))
    return {
        "median_ms": statistics.median(times),
        "p90_ms": times[int(0.9 * len(times))],
        "p99_ms": times[int(0.99 * len(times))],
        "max_ms": times[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the guard's stage one for a call.")
    parser.add_argument("--rounds", type=int, default=11, help="times that each command is checked")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    began = time.perf_counter()
    guard = Guard(RuleSet([shipped_rules()]))
    start_ms = 1e3 * (time.perf_counter() - began)
    cases = shipped_cases()
    found = measured(guard, cases, args.rounds)
    calls = [ToolCall(name="bash", arguments={"command": text}) for _, text in LONG]
    long = dict(zip((name for name, _ in LONG), medians_ms(guard, calls, args.rounds), strict=True))
    print(f"reading and compiling the rules, once: {start_ms:.0f} ms")
    print(
        f"{len(cases)} labelled commands: " + ", ".join(f"{name[:-3]} {value:.2f} ms" for name, value in found.items())
    )
    for name, value in long.items():
        print(f"{name}: {value:.1f} ms")
    if args.json:
        figures = {"machine": machine(1), "rounds": args.rounds, "commands": len(cases), "start_ms": start_ms}
        args.json.write_text(
            json.dumps(figures | {"labelled": found, "long_ms": long}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
