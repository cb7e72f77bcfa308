"""Handles to workers: whose method is called, and what is said of a worker that dies. Ray is a few functions here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from opd.cluster import LostValue, Worker, WorkerDied, spawn_worker, wait_first, wait_for_all, waiting
from opd.cluster.pulse import Pulse
from opd.cluster.watching import WorkerWatch
from opd.errors import RunError


class Counter:
    """The object that runs in the worker."""

    def add(self, number: int, times: int = 1) -> int:
        return number * times

    def divide(self, number: int, by: int = 1) -> tuple[str, int]:
        return f"{number} by {by}", number // by

    def fail(self) -> None: ...


class Actor:
    """Stands for Ray's handle: every call is kept, and its answer is a function that gives it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: list[Callable[[], Any]] = []

    def __getattr__(self, method: str) -> Any:
        class Remote:
            @staticmethod
            def options(num_returns: int) -> Any:
                assert num_returns == 2
                return Remote

            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> Any:
                self.asked.append((method, args, kwargs))
                return self.answers.pop(0)

        if method.startswith("_"):
            raise AttributeError(method)
        return Remote


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come one after the other, the last one first."""
    import ray

    def wait(handles: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [handles[-1]], list(handles[:-1])

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda handle, **_: handle())


@pytest.fixture
def watch() -> WorkerWatch:
    return WorkerWatch()


def start(watch: WorkerWatch, name: str, *answers: Callable[[], Any]) -> tuple[Worker[Counter], Actor]:
    """A worker that gives these answers, one after the other."""
    actor = Actor()
    actor.answers += answers
    worker: Worker[Counter] = Worker(actor, name, Pulse(name.encode()), watch)
    watch.add(worker)
    return worker, actor


def dies() -> Any:
    import ray

    raise ray.exceptions.RayActorError(error_msg="its process is gone")


def fails() -> Any:
    import ray

    raise ray.exceptions.RayTaskError("fail", "traceback", RunError("step 3: connection closed by peer"))


def test_a_method_is_called_by_reference(watch: WorkerWatch) -> None:
    worker, actor = start(watch, "counter 0", lambda: 6, lambda: 8)
    pending = worker.submit(Counter.add, 3, times=2)
    assert (pending.worker, pending.method) == (worker, "add")
    assert worker.submit(Counter.add, 8).wait_for_result(timeout_s=1) == 8
    assert actor.asked == [("add", (3,), {"times": 2}), ("add", (8,), {})]
    assert pending.wait_for_result(timeout_s=1) == 6


def test_a_pair_comes_as_an_answer_and_a_handle_that_nobody_fetches(watch: WorkerWatch) -> None:
    worker, actor = start(watch, "counter 0")
    actor.answers.append((lambda: "about it", dies))  # type: ignore[arg-type]
    pending, handle = worker.submit_pair(Counter.divide, 7, by=2)
    assert (pending.worker, pending.method, handle) == (worker, "divide", dies)
    assert pending.wait_for_result(timeout_s=1) == "about it"
    assert actor.asked == [("divide", (7,), {"by": 2})]


def test_an_answer_on_demand_is_asked_for_each_time_it_is_fetched(watch: WorkerWatch) -> None:
    worker, actor = start(watch, "counter 0", lambda: 1, lambda: 2)
    later = worker.on_demand(5.0, Counter.add, 3, times=2)
    assert actor.asked == []
    assert [later.fetch(), later.fetch()] == [1, 2]
    assert actor.asked == [("add", (3,), {"times": 2})] * 2


def test_answers_come_in_order_whichever_came_first(watch: WorkerWatch) -> None:
    asked = [start(watch, f"counter {i}", lambda i=i: i)[0].submit(Counter.add, i) for i in range(3)]
    assert wait_for_all(asked, timeout_s=1) == [0, 1, 2]
    assert wait_first(asked[:2], timeout_s=1) == 1


def test_a_death_is_told_with_worker_and_method_and_the_worker_no_longer_listened_to(watch: WorkerWatch) -> None:
    worker, _ = start(watch, "counter 7", dies)
    with pytest.raises(WorkerDied, match=r"^counter 7: the worker died during `fail`: its process is gone") as death:
        worker.submit(Counter.fail).wait_for_result(timeout_s=1)
    assert death.value.worker is worker and watch.workers == []


def test_a_worker_that_was_to_get_a_dead_ones_answer_is_not_dead_itself(watch: WorkerWatch) -> None:
    import ray

    def orphaned() -> Any:
        lost = ray.exceptions.RayActorError(error_msg="its process is gone")
        raise ray.exceptions.RayTaskError("add", "traceback", lost)

    worker, _ = start(watch, "counter 7", orphaned)
    with pytest.raises(WorkerDied, match=r"^counter 7: `fail` was to get the answer of a worker that died") as death:
        worker.submit(Counter.fail).wait_for_result(timeout_s=1)
    assert death.value.worker is None and watch.workers == [worker]


def test_the_death_of_a_worker_that_was_silent_is_told_by_its_reason(watch: WorkerWatch) -> None:
    worker, _ = start(watch, "counter 7", dies)
    worker.pulse.kill_reason = "no sign of life for 40 s (`add` was waited for); killed"
    with pytest.raises(WorkerDied, match=r"^counter 7: no sign of life for 40 s \(`add` was waited for\); killed$"):
        worker.submit(Counter.fail).wait_for_result(timeout_s=1)


def test_an_answer_that_is_lost_with_its_node_is_the_death_of_its_worker(
    watch: WorkerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can start a worker again asks it anew."""
    import ray

    def lost() -> Any:
        raise ray.exceptions.ObjectLostError("ab" * 28, None, "")

    def given_lost() -> Any:
        raise ray.exceptions.RayTaskError("add", "traceback", ray.exceptions.ObjectLostError("ab" * 28, None, ""))

    killed: list[str] = []
    monkeypatch.setattr(Worker, "kill", lambda worker: killed.append(worker.name))
    worker, _ = start(watch, "counter 7", lost, given_lost)
    with pytest.raises(WorkerDied, match=r"^counter 7: a value is lost with the node that had it") as death:
        worker.submit(Counter.add, 1).wait_for_result(timeout_s=1)
    assert death.value.worker is worker and killed == ["counter 7"]
    with pytest.raises(WorkerDied, match=r"^counter 7: `add` was given a value that is lost$") as other:
        worker.submit(Counter.add, 1).wait_for_result(timeout_s=1)
    assert other.value.worker is None, "another one of its kind would be given the same"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("WorkerCrashedError", {}),
        ("NodeDiedError", {"message": "its node is gone"}),
        ("TaskUnschedulableError", {"error_message": "no such node"}),
        ("OutOfMemoryError", {"message": "killed"}),
        ("RayActorError", {"error_msg": "its process is gone"}),
    ],
)
def test_a_call_that_was_given_what_could_not_be_made_can_be_made_again(
    watch: WorkerWatch, name: str, known: dict[str, str]
) -> None:
    """It did not begin, and the worker lives."""
    import ray

    def given_lost() -> Any:
        raise ray.exceptions.RayTaskError("add", "traceback", getattr(ray.exceptions, name)(**known))

    worker, _ = start(watch, "counter 7", given_lost, lambda: 5)
    with pytest.raises(LostValue, match=r"^counter 7: `add` was ") as lost:
        worker.submit(Counter.add, 1).wait_for_result(timeout_s=1)
    assert lost.value.worker is None and worker.submit(Counter.add, 5).wait_for_result(timeout_s=1) == 5


def test_a_partners_death_explains_a_failure(watch: WorkerWatch) -> None:
    failing, dead = start(watch, "counter 0", fails)[0], start(watch, "counter 1", dies)[0]
    with pytest.raises(WorkerDied, match=r"^counter 1: the worker died during `fail`"):
        wait_for_all([dead.submit(Counter.fail), failing.submit(Counter.fail)], timeout_s=1)
    alone, other = start(watch, "counter 0", fails)[0], start(watch, "counter 1", fails)[0]
    with pytest.raises(RunError, match=r"^step 3: connection closed by peer$"):
        wait_for_all([alone.submit(Counter.fail), other.submit(Counter.fail)], timeout_s=1)


def test_a_missed_deadline_names_all_who_were_asked_together(
    watch: WorkerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    asked = [start(watch, f"counter {i}", lambda: None)[0].submit(Counter.fail) for i in range(2)]
    came = iter([([asked[1].handle], []), ([], []), ([], [])])
    monkeypatch.setattr(ray, "wait", lambda handles, **_: next(came))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=iter([0.0, 0.0, 2.0]).__next__))
    with pytest.raises(RunError, match=r"^counter 0, counter 1: `fail` took longer than 1 s \(cluster.phase_timeout_s"):
        wait_for_all(asked, timeout_s=1)


def test_nothing_is_started_outside_of_a_session() -> None:
    """Ray would start by itself, and listen beyond this machine."""
    with pytest.raises(WorkerDied, match="its session has ended, or was not begun"):
        spawn_worker(Counter, name="counter 0", env={})


def test_a_process_bound_to_one_core_computes_with_one_thread() -> None:
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "from opd.cluster.environment import worker_env; print(worker_env(1)['OMP_NUM_THREADS'])",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == "1"
