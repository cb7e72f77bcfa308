"""Faults, one at a time, on a merge of tiny models: `python -m tests.chaos`.

A cell of the matrix is a role, a moment and a signal. A merge is started, watched from outside until the moment, and one
process of the role gets the signal. Then the merge must end with the weights of an undisturbed one, by itself or after
`--resume`, and leave nothing behind. Nothing in the product helps to hit the moment: Ray puts the method that a worker is
in into its process title, and the run directory shows the rest.

The rollout engine and the vLLM worker are one process here: vLLM runs inside the Ray actor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from opd.files import blake3_file
from opd.machine.orphans import SHARED_MEMORY
from opd.run.paths import RunPaths
from tests.conftest import build_model_dir
from tests.integration.conftest import two_domain_pipeline

ROOT = Path(__file__).parents[1]
STEPS, EVERY, STEP = 6, 2, 5
"""Steps of a merge, of which every second leaves a checkpoint; the step in which most moments lie. When it begins, the
checkpoint of step 2 is committed, step 3 is in the target log and step 4's checkpoint is being written."""
DEADLINE_S = 420.0
NOTICE_S = 60.0
"""A worker that was stopped must be noticed within this time."""
SETTLE_S = 15.0
"""Time that a process may take to go after its driver went."""

LONGER = [
    f"--set={key}={value}"
    for key, value in {"trainer.steps": 12, "evaluate.every": 1, "cluster.max_restarts": 7}.items()
]
"""A merge with all faults of a role in a row, from step `STEP` on."""

TITLES = {"trainer": "ray::TrainerRank", "engine": "ray::VLLMWorker", "teacher": "ray::TeacherWorker"}
DAEMONS = {"raylet": "raylet", "gcs": "gcs_server"}
ROLES = ("driver", *TITLES, *DAEMONS)
MOMENTS = ("rollout", "scoring", "backward", "push", "write", "commit", "evaluation")
MENDED = ("engine", "teacher")
"""Roles of which one process is started again alone."""
STOPS = (
    ("trainer", "backward"),
    ("engine", "rollout"),
    ("teacher", "scoring"),
    ("raylet", "scoring"),
    ("gcs", "rollout"),
)
"""Roles and moments at which a process is stopped, not killed."""


@dataclass(frozen=True, order=True)
class Cell:
    """One fault."""

    role: str
    moment: str
    signal: str = "KILL"

    def __str__(self) -> str:
        return f"{self.role}:{self.moment}" + (f":{self.signal}" if self.signal != "KILL" else "")


MATRIX = [Cell(role, moment) for moment in MOMENTS for role in ROLES] + [Cell(*stop, "STOP") for stop in STOPS]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a merge with one fault."""

    exits: list[int | None]
    """Exit status of the merge, and of each resume; None: it did not end before the deadline."""
    same_weights: bool
    restarts: int
    """Times that all workers were started again within a command."""
    mended: list[str]
    """Workers that were started again alone."""
    idle: bool
    """The process that was hit had nothing to do at the moment."""
    notice_s: float | None
    """From SIGSTOP until the stopped process was ended."""
    seconds: float
    orphans: list[str]
    leftovers: list[str]
    complaints: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.complaints


# Watching a merge


def read_title(pid: int) -> str:
    """Ray puts the method that a worker is in into its process title."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Merge:
    """A merge under way, seen from outside."""

    def __init__(self, args: Sequence[str | Path], run: Path, place: Path) -> None:
        """`place` is where it is started and where its temporary files go."""
        self.run = run
        self.errors = place / f"stderr-{len(list(place.glob('stderr-*')))}"
        temporary = place / "tmp"
        temporary.mkdir(exist_ok=True)
        with self.errors.open("w") as stderr:
            self.driver = psutil.Popen(
                [sys.executable, "-m", "cli", "merge", *map(str, args)],
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.seen: dict[psutil.Process, str] = {}
        """Every process that was seen below the driver -> its name."""

    def look(self) -> None:
        """Look up processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.driver.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen[process] = read_title(process.pid)[:60] or process.name()

    def of_role(self, role: str) -> list[int]:
        """Pids, as of the last `look`."""
        if role == "driver":
            return [self.driver.pid]
        if role in DAEMONS:
            return [p.pid for p in self.seen if p.is_running() and p.name() == DAEMONS[role]]
        return [p.pid for p in self.seen if read_title(p.pid).startswith(TITLES[role])]

    @property
    def records(self) -> int:
        """Steps that are in metrics.jsonl."""
        try:
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def logged(self, step: int) -> bool:
        """The step's targets are complete."""
        return (self.run / "targets" / f"step-{step:06d}").exists()

    def wait(self, deadline_s: float) -> int | None:
        """Exit status; None if it did not end in time, and then it is ended here."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                return int(self.driver.wait(timeout=2))
            self.look()
        self.look()
        self.driver.kill()
        self.driver.wait()
        return None

    def living(self) -> dict[psutil.Process, str]:
        """Processes of this merge that are still there."""
        return {p: name for p, name in self.seen.items() if lives(p)}


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_method(merge: Merge, role: str, *methods: str) -> int | None:
    """Pid of a worker of this role that is in one of these methods."""
    for pid in merge.of_role(role):
        if read_title(pid).removeprefix(TITLES[role]).removeprefix(".") in methods:
            return pid
    return None


def writing(merge: Merge) -> Path | None:
    """The checkpoint that is not committed yet."""
    return next((merge.run / "checkpoints").glob(".tmp-step-*"), None)


def whole(directory: Path) -> bool:
    """Every rank's file is there, as large as its header says."""
    ranks = [directory / f"rank-{rank}.safetensors" for rank in range(2)]
    return (directory / "trainer.json").exists() and all(map(complete, ranks))


def complete(file: Path) -> bool:
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(length))
            size = os.fstat(data.fileno()).st_size  # of the file that was opened: its name may have changed
    except (FileNotFoundError, ValueError):
        return False
    ends = [facts["data_offsets"][1] for name, facts in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends)


def being(merge: Merge, moment: str, step: int) -> int | None:
    """Pid of the process that shows that the merge is in this moment of a step, or None if it is not."""
    if moment in ("write", "commit"):
        directory = writing(merge)
        if directory is None:
            return None
        return merge.driver.pid if whole(directory) == (moment == "commit") else None
    if merge.records != step - 1:
        return None
    if moment in ("rollout", "evaluation"):
        return in_method(merge, "engine", "generate") if merge.logged(step) == (moment == "evaluation") else None
    if moment == "push":
        return in_method(merge, "trainer", "export") or in_method(merge, "engine", "load")
    if moment == "scoring":
        return None if merge.logged(step) else in_method(merge, "teacher", "next_part")
    return in_method(merge, "trainer", "accumulate_micro_batch")


@contextlib.contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """These processes stand still within, so that the moment does not pass between the look and the shot."""
    held = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                held.append(pid)
        yield
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def strike(merge: Merge, cell: Cell, step: int = STEP) -> tuple[psutil.Process, bool]:
    """Wait for the moment and send the signal. Returns who got it, and whether it was idle.

    Raises: RuntimeError if the moment did not come.
    """
    deadline, looked = time.monotonic() + DEADLINE_S, 0.0
    while merge.driver.poll() is None and time.monotonic() < deadline:
        if time.monotonic() > looked + 1.0:
            merge.look()
            looked = time.monotonic()
        shown = being(merge, cell.moment, step)
        if shown is None:
            time.sleep(0.0005 if merge.records >= EVERY else 0.05)
            continue
        victims = merge.of_role(cell.role)
        with frozen([*merge.of_role("driver"), *merge.of_role("trainer"), shown]):
            if being(merge, cell.moment, step) is None or not victims:
                continue
            # Of two ranks the second: the first one writes alone what both have gathered.
            victim = shown if shown in victims else victims[-1]
            title = read_title(victim)
            idle = cell.role in TITLES and title == TITLES[cell.role]
            process = psutil.Process(victim)
            if cell.signal == "KILL":
                os.kill(victim, signal.SIGKILL)
        if cell.signal == "STOP":  # after the others go on, who may be the same
            os.kill(victim, signal.SIGSTOP)
        return process, idle
    raise RuntimeError(f"{cell}: the moment did not come, the merge ended with {merge.driver.poll()}")


# A cell


def play(cell: Cell, file: Path, weights: str, place: Path) -> Outcome:
    """One merge with its fault. Raises: RuntimeError if the moment did not come."""
    began = time.monotonic()
    run = place / "run"
    merge = Merge([file, "--run-dir", run], run, place)
    commands = [merge]
    try:
        victim, idle = strike(merge, cell)
        struck = time.monotonic()
        notice_s = None
        if cell.signal == "STOP":
            while lives(victim) and time.monotonic() < struck + 3 * NOTICE_S:
                time.sleep(0.1)
            notice_s = None if lives(victim) else round(time.monotonic() - struck, 1)
        exits = [merge.wait(DEADLINE_S)]
        if exits[0] != 0 and run.exists():
            commands.append(Merge(["--resume", run], run, place))
            exits.append(commands[-1].wait(DEADLINE_S))
        orphans = [name for command in commands for name in remaining(command)]
    finally:
        for command in commands:
            end(command)
    return judge([cell], commands, place, weights, exits, orphans, idle, notice_s, began)


def play_in_a_row(cells: Sequence[Cell], file: Path, weights: str, place: Path) -> Outcome:
    """One merge with all these faults, each a step after the one before. Raises: as `play`."""
    began = time.monotonic()
    run = place / "run"
    commands = [Merge([file, "--run-dir", run, *LONGER], run, place)]
    exits: list[int | None] = []
    try:
        for step, cell in enumerate(cells, start=STEP):
            strike(commands[-1], cell, step)
            if cell.role == "driver":
                exits.append(commands[-1].wait(DEADLINE_S))
                commands.append(Merge(["--resume", run], run, place))
        exits.append(commands[-1].wait(len(cells) * DEADLINE_S))
        orphans = [name for command in commands for name in remaining(command)]
    finally:
        for command in commands:
            end(command)
    return judge(cells, commands, place, weights, exits, orphans, False, None, began)


def judge(
    cells: Sequence[Cell],
    commands: Sequence[Merge],
    place: Path,
    weights: str,
    exits: list[int | None],
    orphans: list[str],
    idle: bool,
    notice_s: float | None,
    began: float,
) -> Outcome:
    run = commands[0].run
    told = [command.errors.read_text() for command in commands]
    model = run / "model" / "model.safetensors"
    outcome = Outcome(
        exits=exits,
        same_weights=model.exists() and blake3_file(model) == weights,
        restarts=sum(text.count("starting all workers again") for text in told),
        mended=mended(run),
        idle=idle,
        notice_s=notice_s,
        seconds=round(time.monotonic() - began),
        orphans=orphans,
        leftovers=[*left(commands, place), *unfinished(run)],
    )
    outcome.complaints.extend(complaints(cells, outcome))
    return outcome


def remaining(merge: Merge) -> list[str]:
    """Names of processes that did not go when the commands had ended."""
    deadline = time.monotonic() + SETTLE_S
    while (found := merge.living()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return list(found.values())


def end(merge: Merge) -> None:
    """Leave nothing of a cell to the next, whatever became of it."""
    for process in (merge.driver, *merge.seen):
        if lives(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def mended(run: Path) -> list[str]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [name for line in lines for name in json.loads(line).get("restarted", ())]


def left(commands: Sequence[Merge], place: Path) -> list[str]:
    """List what our drivers left in shared memory and in their own directory for temporary files."""
    pids = [str(merge.driver.pid) for merge in commands]
    shared = [path for path in SHARED_MEMORY.glob("opd-run-*") if path.name.split("-")[2] in pids]
    return [str(path) for path in (*shared, *(place / "tmp").glob("opd-*"))]


def unfinished(run: Path) -> list[str]:
    """Temporary files in the run directory."""
    paths = RunPaths(run)
    return [str(path.relative_to(run)) for path in run.rglob(".*") if path not in (paths.lock, paths.live)]


def complaints(cells: Sequence[Cell], outcome: Outcome) -> list[str]:
    """List the outcome's differences from what is promised; `cells` are of one role."""
    cell = cells[-1]
    wanted = [-signal.SIGKILL] * len(cells) + [0] if cell.role == "driver" else [0]
    found = []
    if outcome.exits != wanted:
        found.append(f"exit status {outcome.exits}, wanted {wanted}")
    if not outcome.same_weights:
        found.append("other weights")
    # In a row a fault may hit the worker that is being started after the one before: its second death, and all start again.
    if cell.role in MENDED and len(cells) == 1 and outcome.restarts:
        found.append("all workers were started again, not one")
    if cell.signal == "STOP" and (outcome.notice_s is None or outcome.notice_s > NOTICE_S):
        found.append(f"noticed after {outcome.notice_s} s")
    found += [f"orphan: {name}" for name in outcome.orphans]
    found += [f"left: {name}" for name in outcome.leftovers]
    return found


# The matrix


def write_pipeline(root: Path) -> Path:
    """The two-domain merge of the integration tests, with two ranks and an evaluation in the step of the faults."""
    data = two_domain_pipeline(root, build_model_dir)
    data["trainer"] |= {"steps": STEPS, "ranks": 2}
    data["checkpoint"] = {"every": EVERY}
    data["evaluate"] = {"every": STEP}
    path = root / "pipeline.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def undisturbed(file: Path, more: Sequence[str] = ()) -> str:
    """Hash of the weights of a merge that nothing happens to. Raises: RuntimeError if it fails."""
    with place_of_its_own() as place:
        run = place / "run"
        merge = Merge([file, "--run-dir", run, *more], run, place)
        if merge.wait(DEADLINE_S) != 0:
            raise RuntimeError(f"the undisturbed merge failed: {merge.errors.read_text()}")
        return blake3_file(run / "model" / "model.safetensors")


@contextlib.contextmanager
def place_of_its_own() -> Iterator[Path]:
    """A directory that is no checkout of the repository."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        yield Path(name)


class Results:
    """`results.json`: what was played so far."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "results.json"
        self.data: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        for key in ("weights", "cells", "rows"):
            self.data.setdefault(key, {})

    def put(self, kind: str, name: str, value: Any) -> None:
        self.data[kind][name] = value
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self.data, indent=1))

    def forget_failures(self) -> None:
        for kind in ("cells", "rows"):
            self.data[kind] = {name: found for name, found in self.data[kind].items() if not found["complaints"]}
        self._write()


def run_cells(
    cells: Sequence[Cell], directory: Path, say: Callable[[str], None], in_a_row: Sequence[str] = ()
) -> dict[str, Any]:
    """Play what `directory/results.json` does not have yet: these cells, then all moments of these roles in one merge
    each. Returns all results."""
    results = Results(directory)
    file = directory.absolute() / "pipeline.yaml"
    if not file.exists():
        write_pipeline(directory.absolute())
    games = [("cells", str(cell), [cell]) for cell in cells]
    games += [("rows", role, [Cell(role, moment) for moment in MOMENTS]) for role in in_a_row]
    for kind, name, part in games:
        if name in results.data[kind]:
            continue
        if kind not in results.data["weights"]:
            results.put("weights", kind, undisturbed(file, LONGER if kind == "rows" else ()))
        weights = results.data["weights"][kind]
        with place_of_its_own() as place:
            try:
                many = kind == "rows"
                outcome = play_in_a_row(part, file, weights, place) if many else play(part[0], file, weights, place)
            except RuntimeError as error:
                say(f"{name}: {error}")
                keep(place, directory / f"failed-{name}".replace(":", "-"))
                continue
            results.put(kind, name, asdict(outcome))
            say(row(part, asdict(outcome)))
            if not outcome.passed:
                keep(place, directory / f"failed-{name}".replace(":", "-"))
    return results.data


def keep(place: Path, directory: Path) -> None:
    """Keep what the commands said."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for errors in place.glob("stderr-*"):
        shutil.copy(errors, directory)


COLUMNS = ("role", "moment", "signal", "outcome", "exit", "weights", "mended", "all again", "noticed", "seconds")


def row(cells: Sequence[Cell], outcome: Mapping[str, Any] | None) -> str:
    """A line of a Markdown table."""
    start = (cells[0].role, ", ".join(cell.moment for cell in cells), f"SIG{cells[0].signal}")
    if outcome is None:
        return f"| {' | '.join((*start, 'not run', *[''] * 6))} |"
    fields = (
        "; ".join(outcome["complaints"]) or "as promised" + (" (was idle)" if outcome["idle"] else ""),
        ", ".join(map(str, outcome["exits"])),
        "same" if outcome["same_weights"] else "OTHER",
        str(len(outcome["mended"]) or "-"),
        str(outcome["restarts"] or "-"),
        f"{outcome['notice_s']} s" if outcome["notice_s"] is not None else "-",
        str(outcome["seconds"]),
    )
    return f"| {' | '.join((*start, *fields))} |"


def parse_cell(text: str) -> Cell:
    parts = text.split(":")
    cell = Cell(*parts) if 2 <= len(parts) <= 3 else None
    if cell is None or cell.role not in ROLES or cell.moment not in MOMENTS or cell.signal not in ("KILL", "STOP"):
        raise argparse.ArgumentTypeError(f"{text}: wanted ROLE:MOMENT or ROLE:MOMENT:STOP")
    return cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", nargs="*", type=parse_cell, metavar="ROLE:MOMENT[:STOP]", help="Default: all.")
    parser.add_argument(
        "--in-a-row",
        nargs="*",
        choices=ROLES,
        default=[],
        help="All moments of a role in one merge, one after the other.",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/chaos"), help="Default: %(default)s")
    parser.add_argument("--again", action="store_true", help="Play once more what did not go as promised.")
    options = parser.parse_args()
    if options.again:
        Results(options.dir).forget_failures()
    cells = MATRIX if options.cells is None and not options.in_a_row else options.cells or []
    found = run_cells(cells, options.dir, lambda line: print(line, file=sys.stderr, flush=True), options.in_a_row)
    print("\n".join([f"| {' | '.join(COLUMNS)} |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]))
    for cell in cells:
        print(row([cell], found["cells"].get(str(cell))))
    for role in options.in_a_row:
        print(row([Cell(role, moment) for moment in MOMENTS], found["rows"].get(role)))
    played = [found["cells"].get(str(cell)) for cell in cells] + [found["rows"].get(role) for role in options.in_a_row]
    return 0 if all(outcome is not None and not outcome["complaints"] for outcome in played) else 1


if __name__ == "__main__":
    sys.exit(main())
