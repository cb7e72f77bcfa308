"""One turn of one side: a process, its steps as it tells of them, its memory while it works. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.merging.case import LIMITS, OURS, Case, Step, Turn, unequal
from benchmarks.merging.memory import anonymous, cpu_s, end_family, family, machine_cpu_s, shared, title

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.5
"""Pause between two looks at the memory."""
END_S = 300.0
"""Deadline for a process to end after its last step: ours still writes checkpoint, model and report."""


@dataclass(frozen=True, kw_only=True)
class Interpreters:
    """Interpreters of the sides, and the most time for a step."""

    ours: str
    trl: str | None
    step_timeout_s: float
    """Deadline of a step, and of everything before the first."""

    def command(self, side: str) -> list[str]:
        if side in LIMITS:
            return [self.ours, "-m", "benchmarks.merging.limits"]
        if side == OURS:
            return [self.ours, "-m", "benchmarks.merging.ours"]
        assert self.trl is not None
        return [self.trl, "-m", "benchmarks.merging.other"]


def take_turn(case: Case, side: str, number: int, interpreters: Interpreters) -> Turn:
    """A process from its start to its end. Raises: SystemExit if it fails, hangs, or does other work than the case says."""
    turn = Turn(side=side, round=number)
    with tempfile.TemporaryFile("w+") as log, Child(case, side, interpreters, log) as child:
        if side in LIMITS:
            turn.figures = child.told()
        else:
            for index in range(case.warm_up + case.steps):
                if index == case.warm_up:
                    turn.start_s, turn.start_peak_bytes = child.age, child.take_peak()
                step = child.step()
                problem = unequal(case, step)
                if problem:
                    raise SystemExit(f"{side}, {case.name}: {problem}")
                if index >= case.warm_up:
                    turn.steps.append(step)
        turn.peak_bytes, turn.memory, turn.others = child.take_peak(), child.memory, child.others
        child.finish()
    return turn


class Child:
    """A process that tells of each step and then waits."""

    def __init__(self, case: Case, side: str, interpreters: Interpreters, log: IO[str]) -> None:
        self._name, self._log = f"{side}, {case.name}", log
        self._timeout_s = interpreters.step_timeout_s
        self._anonymous = self._shared = 0
        self.memory: dict[str, int] = {}
        """Name of a process -> its most anonymous bytes so far."""
        self._began, self._machine_cpu_s = time.monotonic(), machine_cpu_s()
        read, write = os.pipe()
        more = [side] if side in LIMITS else []
        self._process = subprocess.Popen(
            [*interpreters.command(side), json.dumps(asdict(case)), str(write), *more],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[write],
            env=environment(),
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(write)
        self._pipe = os.fdopen(read, encoding="utf-8")
        self._cpu_s = self._cpu_now = 0.0
        self.others = 0.0
        """Share of the machine's cores that other programs had until the process last told something."""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        if self._process.poll() is None:
            end_family(self._process.pid)
        self._process.wait()

    @property
    def age(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._began

    def take_peak(self) -> int:
        """Most anonymous memory that was seen since the last call, and the most of files and shared memory after a step."""
        peak, self._anonymous, self._shared = self._anonymous + self._shared, 0, 0
        return peak

    def step(self) -> Step:
        """The next step, with its CPU time; the first one's is from the start of the process."""
        said, before = self.told(), self._cpu_s
        self._cpu_s = self._cpu_now
        return Step(**said, cpu_s=self._cpu_s - before)

    def told(self) -> dict[str, Any]:
        """Return what the process says next, after which it is looked at and sent on."""
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while not selector.select(LOOK_S):
                self._look(family(self._process.pid))
                if time.monotonic() > deadline:
                    raise SystemExit(f"{self._name}: nothing in {self._timeout_s:.0f} s{self._last_words()}")
        line = self._pipe.readline()
        if not line:
            raise SystemExit(f"{self._name}: the process ended{self._last_words()}")
        pids = family(self._process.pid)
        self._look(pids)
        self._cpu_now = cpu_s(pids)
        others_s = machine_cpu_s() - self._machine_cpu_s - self._cpu_now
        self.others = max(0.0, others_s / (self.age * (os.cpu_count() or 1)))
        self._shared = max(self._shared, shared(pids))
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(line)
        return said

    def _look(self, pids: list[int]) -> None:
        found = anonymous(pids)
        self._anonymous = max(self._anonymous, sum(found.values()))
        for pid, held in found.items():
            name = title(pid)
            self.memory[name] = max(held, self.memory.get(name, 0))

    def finish(self) -> None:
        """Let the process end. Raises: SystemExit if it does not, or fails."""
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{self._name}: still there {END_S:.0f} s after its last step{self._last_words()}"
            ) from None
        if status:
            raise SystemExit(f"{self._name}: exit status {status}{self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        return "\n" + self._log.read()[-3000:]


def environment() -> dict[str, str]:
    """All cores for whoever computes, as `opd` gives them to its workers; nobody asks a hub."""
    given = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **given}
