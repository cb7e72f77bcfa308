"""The state of a run directory: at work, ended in each way, killed; and many of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from opd.errors import RunDirError
from opd.live.live_state import FAILED, FINISHED, PAUSED, STOPPED, LiveState, read_live_state
from opd.live.status import is_held, list_runs, read_view
from opd.live.view import KILLED, RUNNING
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import AlarmRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths, step_name
from tests.unit.opd.live.made import DOMAINS, record
from tests.unit.sources import ROOT

NOW = LiveState(
    pid=os.getpid(), host=socket.gethostname(), began="2026-11-23T03:00:00+00:00", doing="rollout", notes=("hi",)
)


def a_run(root: Path, steps: int = 12, now: LiveState | None = NOW) -> RunPaths:
    """A merge of 20 steps that has taken some, with an exam after step 10 and a checkpoint of it."""
    paths = RunPaths(root)
    paths.evaluation.mkdir(parents=True)
    config = {
        "name": "two",
        "domains": {key: {} for key in DOMAINS[:2]},
        "experts": {"e": {}},
        "trainer": {"steps": 20},
    }
    paths.pipeline.write_text(yaml.safe_dump(config, sort_keys=False))
    paths.manifest.write_text("{}")
    for name, accuracy in (("before", 0.2), ("expert", 1.0)):
        score = DomainScore(
            accuracy=accuracy, stderr=0.1, low=0.9 * accuracy, high=min(1.0, 1.1 * accuracy), questions=9
        )
        Evaluation(model=name, scores=dict.fromkeys(DOMAINS[:2], score)).save(paths.evaluation_file(name))
    for step in range(1, steps + 1):
        MetricsFile(paths.metrics).write(record(step, DOMAINS[:2], exam=step == 10))
    (paths.checkpoints / step_name(10)).mkdir(parents=True)
    if now:
        now.write(paths.live, paths.scratch_path("live"))
    return paths


def test_a_merge_at_work(tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run")
    with FileLock(paths.lock):
        seen = read_view(paths.root)
    assert (seen.state, seen.done, seen.steps, seen.doing, seen.notes) == (RUNNING, 12, 20, "rollout", ("hi",))
    assert seen.doing_s is not None and seen.doing_s < 60 and seen.elapsed_s is not None and seen.elapsed_s >= 0
    assert seen.memory and seen.memory[0][0] == "driver" and seen.memory[0][1] > 1 << 20
    assert seen.left_s == pytest.approx(8 * (2.47 + 1.85 / 12))
    assert [(d.name, d.before, d.expert) for d in seen.domains] == [("math", 0.2, 1.0), ("code", 0.2, 1.0)]
    assert seen.mean_headroom == pytest.approx((0.2 + 10 / 160 - 0.2) / 0.8) and seen.exam_step == 10
    assert f"`kill {os.getpid()}`" in seen.hints[0]
    chance = DomainScore(accuracy=0.3, stderr=0.1, low=0.1, high=0.6, questions=9)
    expert = Evaluation.load(paths.evaluation_file("expert"))
    replace(expert, scores=expert.scores | {"code": chance}).save(paths.evaluation_file("expert"))
    assert [d.headroom is None for d in read_view(paths.root).domains] == [False, True], "no better beyond chance"
    assert read_view(paths.root).state == KILLED, "nobody holds the lock, and there is no last word"


def test_the_question_who_is_at_work_keeps_nobody_out(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    assert not is_held(lock) and not lock.exists()
    with FileLock(lock):
        assert is_held(lock)
    assert not is_held(lock)
    with FileLock(lock, timeout=0):
        pass


@pytest.mark.parametrize(
    ("ended", "why", "hint"),
    [
        (STOPPED, "stopped after step 12, checkpoint written", "next: opd merge --resume {root}"),
        (PAUSED, "step 12: monitor length", "look first: {root}/report.html"),
        (FAILED, "rollout worker 0: gone", "next: opd merge --resume {root}"),
        ("", "it ended without a word, while: rollout", "next: opd merge --resume {root}"),
    ],
)
def test_how_a_merge_ended(ended: str, why: str, hint: str, tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run", now=replace(NOW, ended=ended, why=why if ended else ""))
    seen = read_view(paths.root)
    assert (seen.state, seen.why, seen.memory) == (ended or KILLED, why, ())
    assert seen.hints[0].startswith(hint.format(root=paths.root)) and "after step 10" in seen.hints[-1]


def test_a_merge_that_failed_before_its_first_step_tells_no_time(tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run", now=replace(NOW, ended=FAILED, why="rollout worker 0: gone"))
    assert read_view(paths.root).elapsed_s
    paths.metrics.write_text("")
    assert read_view(paths.root).elapsed_s is None, "`0 s in all` would be wrong"


def test_a_run_that_left_no_word_is_stopped_and_its_records_give_the_notes(tmp_path: Path) -> None:
    """Older releases had no such file."""
    paths = a_run(tmp_path / "run", now=None)
    alarm = AlarmRecord(signal="truncation", domain="math", value=0.91, limit=0.9, action="warn", since=13)
    MetricsFile(paths.metrics).write(replace(record(13, DOMAINS[:2]), alarms=(alarm,)))
    seen = read_view(paths.root)
    assert (seen.state, seen.why, seen.done) == (STOPPED, "", 13)
    assert len(seen.notes) == 1 and seen.notes[0].startswith("warning: step 13: truncation: domain math: 0.91")


def test_a_finished_merge(tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run", steps=20, now=replace(NOW, ended=FINISHED))
    domains = {key: {"before": 0.2, "after": 0.6, "expert": 1.0, "headroom": 0.5} for key in DOMAINS[:2]}
    report = {
        "name": "two",
        "steps": 20,
        "domains": domains,
        "mean_headroom": 0.5,
        "worst_headroom": 0.5,
        "wall_s": 77.0,
    }
    more = {"phase_s": {}, "response_tokens": 9, "response_tokens_per_s": 1.0, "versions": {}}
    paths.report.write_text(json.dumps(report | more))
    score = DomainScore(accuracy=0.6, stderr=0.1, low=0.1, high=1.0, questions=9)
    Evaluation(model="merged", scores=dict.fromkeys(DOMAINS[:2], score)).save(paths.evaluation_file("after"))
    seen = read_view(paths.root)
    assert (seen.state, seen.elapsed_s, seen.exam_step) == (FINISHED, 77.0, 20)
    assert seen.mean_headroom == pytest.approx(0.5)
    assert seen.hints == (f"next: opd report {paths.root}", f"model: {paths.model}")


def test_a_merge_in_rounds_is_one_merge(tmp_path: Path) -> None:
    whole = a_run(tmp_path / "run", steps=0, now=None)
    plan = [{"config": {"trainer": {"steps": 20}}}] * 2
    whole.rounds.write_text(json.dumps({"format": 1, "rounds": plan}))
    a_run(whole.round_dir(1).root, steps=20)
    paths = a_run(whole.round_dir(2).root, steps=3, now=replace(NOW, notes=("the second",)))
    with FileLock(whole.lock), FileLock(paths.lock):
        seen = read_view(whole.root)
    assert (seen.state, seen.done, seen.steps, seen.notes) == (RUNNING, 23, 40, ("the second",))


def test_a_file_of_another_form_is_no_word(tmp_path: Path) -> None:
    file = tmp_path / ".live.json"
    for text in ("", "[]", '{"notes": 3}', '{"pid": "1", "notes": []}', '{"notes": [1]}'):
        file.write_text(text)
        assert read_live_state(file) is None
    NOW.write(file, tmp_path / ".tmp")
    assert read_live_state(file) == NOW


def test_all_runs_of_a_directory(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "b" / "seed-1", now=replace(NOW, ended=STOPPED))
    killed = a_run(runs / "a")
    (killed.root / "model").mkdir()
    (killed.root / "model" / "weights").write_bytes(b"x" * 100_000)
    os.link(killed.root / "model" / "weights", killed.root / "again")
    a_run(runs / "a" / "baselines" / "runs" / "inside")
    damaged = a_run(runs / "c")
    damaged.metrics.write_text("{\n")
    rows = list(list_runs(runs))
    assert [(row.root.relative_to(runs).as_posix(), row.view.state.split(":")[0]) for row in rows] == [
        ("a", KILLED), ("b/seed-1", STOPPED), ("c", "damaged"),
    ]  # fmt: skip
    assert (rows[0].view.done, rows[0].view.steps) == (12, 20) and rows[0].view.mean_headroom == pytest.approx(0.078125)
    assert 100_000 < rows[0].size < 180_000, "hard links count once"
    with pytest.raises(RunDirError):
        read_view(runs)


KILLED_MERGE = """
import sys, time
from pathlib import Path
from contextlib import nullcontext
from opd.live.displays import RunStart
from opd.live.interfaces import Display
from opd.run.paths import RunPaths
from pipelines.merging.directory import lock_run_directory
from pipelines.merging.journal import Journal

paths = RunPaths(Path(sys.argv[1]))
with lock_run_directory(paths), Journal(paths) as journal, journal.write_beside(lambda begun: nullcontext(Display()))(RunStart("two", paths.root, 20)) as shown:
    shown.say("about to die")
    shown.doing("train")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_merge_that_is_really_killed(tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run", now=None)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_MERGE, str(paths.root)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        alive = read_view(paths.root)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert (alive.state, alive.doing, alive.notes) == (RUNNING, "train", ("about to die",))
    dead = read_view(paths.root)
    assert (dead.state, dead.why) == (KILLED, "it ended without a word, while: train")
