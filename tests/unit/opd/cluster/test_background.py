"""Work in a thread: its result, its errors, its deadline, and its end with the session."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from opd.cluster import BackgroundCall, WorkerDied, background
from opd.cluster.background import end_background
from opd.errors import RunError


def test_it_runs_beside_and_gives_its_result() -> None:
    go = threading.Event()
    work = BackgroundCall(lambda: go.wait(10) and threading.current_thread().name, "rollouts of step 3")
    go.set()
    assert work.result(timeout_s=10) == "rollouts of step 3"


@pytest.mark.parametrize("error", [RunError("no"), WorkerDied("engine died"), TimeoutError("its own"), SystemExit(3)])
def test_what_it_raises_is_raised_where_its_result_is_wanted(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        BackgroundCall(fail, "n").result(timeout_s=10)


def test_a_wait_has_a_deadline_and_says_for_what() -> None:
    go = threading.Event()
    work = BackgroundCall(lambda: go.wait(10), "rollouts of step 3")
    with pytest.raises(RunError, match=r"rollouts of step 3: not there after 0 s \(cluster.phase_timeout_s\)"):
        work.result(timeout_s=0.05)
    go.set()
    assert work.result(timeout_s=10)


def test_a_session_ends_the_workers_of_a_thread_that_is_left_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "refuse_dead_ray", lambda: None)
    dead, ended = threading.Event(), list[str]()

    def write() -> None:
        dead.wait(10)
        ended.append("thread")

    def kill() -> None:
        ended.append("worker")
        dead.set()

    worker: Any = SimpleNamespace(kill=kill)
    BackgroundCall(write, "n")
    end_background([worker])
    assert ended == ["worker", "thread"]
    end_background([worker])
    assert ended == ["worker", "thread"], "without a thread there is nothing to end"


def test_without_ray_a_thread_is_waited_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise WorkerDied("Ray itself is gone")

    monkeypatch.setattr(background, "refuse_dead_ray", gone)
    go, ended = threading.Event(), list[bool]()
    BackgroundCall(lambda: ended.append(go.wait(10)), "n")
    threading.Timer(0.05, go.set).start()
    end_background([SimpleNamespace(kill=lambda: pytest.fail("nobody answers"))])  # type: ignore[list-item]
    assert ended == [True]
