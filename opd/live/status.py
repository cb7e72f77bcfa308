"""The state of a run directory, from its files alone: is the merge running, has it ended, or was it killed?"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from opd.errors import RunDirError
from opd.live.course import Course
from opd.live.live_state import FINISHED, PAUSED, STOPPED, LiveState, read_live_state
from opd.live.memory import measure_memory
from opd.live.progress import describe_incidents
from opd.live.view import KILLED, RUNNING, View, build_view
from opd.report.run import RunFiles, read_run
from opd.report.summary import find_clear_domains
from opd.run.checkpoints import list_checkpoint_steps
from opd.run.paths import RunPaths
from opd.text import quote_for_shell

DEEPEST = 3
"""Number of levels below a directory that are searched for run directories."""


def read_view(root: Path) -> View:
    """Build the view of a run directory. Raises: RunDirError if it is no run directory, or if a file is damaged."""
    run, paths = read_run(root), _under_way(RunPaths(root))
    course, now = _read_course(run), read_live_state(paths.live)
    state = _merge_state(run, now)
    checkpoints = list_checkpoint_steps(paths.checkpoints)
    view = replace(
        build_view(course),
        name=str(run.pipeline.get("name", root.name)),
        root=str(root),
        state=state,
        elapsed_s=run.stored["wall_s"] if run.stored and state == FINISHED else course.seconds or None,
        checkpoint=checkpoints[-1] if checkpoints else None,
        notes=now.notes if now else tuple(line for record in course.recent for line in describe_incidents(record)),
    )
    if state == RUNNING and now:
        view = replace(
            view,
            doing=now.doing,
            doing_s=_seconds_since(paths.live.stat().st_mtime),
            elapsed_s=_seconds_since(datetime.fromisoformat(now.began).timestamp()),
            memory=measure_memory(now.pid) if now.host == socket.gethostname() else (),
        )
    return replace(view, why=_explain_stop(view, now), hints=_next_steps(view, now))


def is_held(lock: Path) -> bool:
    """Return True if a process holds the lock of a run directory. The system frees the lock whenever the process ends."""
    try:
        file = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _under_way(paths: RunPaths) -> RunPaths:
    """Return the run directory in which a merge works or worked last: for a merge in rounds, that of the newest round."""
    number = 1
    while paths.round_dir(number).root.exists():
        number += 1
    return paths if number == 1 else paths.round_dir(number - 1)


def _read_course(run: RunFiles) -> Course:
    course = Course(run.planned_steps or len(run.records), run.pipeline.get("domains", {}), run.records)
    course.before = run.before.accuracy if run.before else {}
    course.expert = run.expert.accuracy if run.expert else {}
    course.clear = find_clear_domains(run.before, run.expert)
    if run.during:
        course.exam_step = max(run.during)
        course.accuracy = run.during[course.exam_step].accuracy
    if run.after:
        course.exam_step, course.accuracy = course.steps_done, run.after.accuracy
    return course


def _merge_state(run: RunFiles, now: LiveState | None) -> str:
    if is_held(RunPaths(run.root).lock):
        return RUNNING
    if run.finished:
        return FINISHED
    # An older release wrote no live state; `FINISHED` stays in it if the merge was extended and not resumed yet.
    if now is None or now.ended == FINISHED:
        return STOPPED
    return now.ended or KILLED


def _explain_stop(view: View, now: LiveState | None) -> str:
    """Return why a merge is neither running nor finished; empty if it is, or if that is not known."""
    if view.state in (RUNNING, FINISHED) or now is None:
        return ""
    if view.state == KILLED:
        return f"it ended without a word, while: {now.doing or 'it began'}"
    return now.why


def _next_steps(view: View, now: LiveState | None) -> tuple[str, ...]:
    """Return suggestions for what the user may do next."""
    root = quote_for_shell(view.root)
    if view.state == FINISHED:
        return (f"next: opd report {root}", f"model: {RunPaths(Path(view.root)).model}")
    if view.state == RUNNING:
        kill = f", or `kill {now.pid}` on {now.host}" if now else ""
        return (f"to end it after its step, with a checkpoint: Ctrl-C where it runs{kill}",)
    goes_on = "from its start" if view.checkpoint is None else f"after step {view.checkpoint}"
    look = (f"look first: {RunPaths(Path(view.root)).report_page}",) if view.state == PAUSED else ()
    return (*look, f"next: opd merge --resume {root}   (goes on {goes_on})")


def _seconds_since(moment: float) -> float:
    return max(0.0, datetime.now(UTC).timestamp() - moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a list of runs."""

    root: Path
    view: View
    """View of the run; if its files are damaged, only the state is set, and says what is damaged."""
    written: datetime
    """Time of the newest file in it."""
    size: int
    """Bytes on the disk."""


def list_runs(directory: Path) -> Iterator[RunRow]:
    """Yield all runs below a directory, damaged ones included, sorted by path. Runs inside of a run are not listed."""
    for root in _find_run_directories(directory, DEEPEST):
        written, size = _on_disk(root)
        try:
            view = read_view(root)
        except RunDirError as error:
            view = View(steps=0, state=f"damaged: {str(error).splitlines()[0]}")
        yield RunRow(root=root, view=view, written=written, size=size)


def _find_run_directories(directory: Path, depth: int) -> Iterator[Path]:
    if RunPaths(directory).is_run:
        yield directory
    elif depth:
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _find_run_directories(path, depth - 1)


def _on_disk(root: Path) -> tuple[datetime, int]:
    """Return the time of the newest file below a directory, and the bytes that its files take. Hard links count once."""
    newest, sizes = 0.0, {}
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                facts = Path(directory, name).lstat()
            except FileNotFoundError:
                continue  # the running merge has just deleted it
            newest = max(newest, facts.st_mtime)
            sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return datetime.fromtimestamp(newest).astimezone(), sum(sizes.values())
