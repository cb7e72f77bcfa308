"""Listening to workers, with a store and a clock that a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from opd.cluster import Worker, WorkerDied, watching
from opd.cluster.pulse import LOOK_S, SILENT_S, Pulse
from opd.cluster.watching import WorkerWatch


class Listening:
    """Record of what workers said, what time it is, and who was killed."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: dict[bytes, bytes] = {}
        self.killed: list[str] = []
        self.watch = WorkerWatch()
        self.one, self.two = (Worker[Any](None, name, Pulse(name.encode()), self.watch) for name in ("one", "two"))

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        return self.said.get(key)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def listen(self, seconds: float) -> None:
        """As whoever waits does."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            self.watch.kill_silent_workers("generate")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    """Two workers, `one` and `two`."""
    made = Listening()
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: made)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    monkeypatch.setattr(Worker, "kill", lambda worker: made.killed.append(worker.name))
    for worker in (made.one, made.two):
        made.watch.add(worker)
    return made


def speak(listening: Listening, seconds: float, *keys: bytes) -> None:
    for _ in range(round(seconds / LOOK_S)):
        for key in keys:
            count = int(listening.said.get(key, b"0").split()[0]) + 1
            listening.said[key] = f"{count} 77 127.0.0.1".encode()
        listening.listen(LOOK_S)


def test_a_worker_that_falls_silent_is_killed_in_time(listening: Listening) -> None:
    speak(listening, 300, b"one", b"two")
    speak(listening, SILENT_S - 2, b"one")
    assert listening.killed == []
    speak(listening, 6, b"one")
    assert set(listening.killed) == {"two"} and listening.one.pulse.kill_reason == ""
    assert listening.two.pulse.kill_reason == "no sign of life for 40 s (`generate` was waited for); killed"
    assert SILENT_S + 6 < 60


def test_one_that_has_not_begun_to_speak_is_not_silent(listening: Listening) -> None:
    speak(listening, 300, b"one")
    assert listening.killed == []


def test_nobody_is_silent_while_the_driver_does_not_listen(listening: Listening) -> None:
    """All of them were stopped for an hour, or the driver did something else; then they speak again, but not at once."""
    speak(listening, 10, b"one", b"two")
    listening.now += 3600
    listening.listen(20)
    assert listening.killed == []
    speak(listening, 10, b"one")
    listening.listen(2)
    assert listening.killed == []
    speak(listening, 20, b"one")
    assert set(listening.killed) == {"two"}


def test_a_store_that_does_not_answer_is_the_end_of_ray(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuses(key: bytes, namespace: bytes, timeout: float) -> bytes:
        assert timeout == LOOK_S
        listening.now += timeout
        raise ray.exceptions.RpcError("Deadline Exceeded")

    monkeypatch.setattr(listening, "internal_kv_get", refuses)
    began = listening.now
    with pytest.raises(WorkerDied, match=r"Ray itself is gone: .*Deadline Exceeded") as death:
        listening.listen(2)
    assert death.value.worker is None
    assert SILENT_S < listening.now - began < SILENT_S + 10


def test_a_store_that_is_slow_once_is_asked_again(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    answers = iter([ray.exceptions.RpcError("Deadline Exceeded"), b"1 77 127.0.0.1", b"1 77 127.0.0.1"])

    def slow(key: bytes, namespace: bytes, timeout: float) -> bytes:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(listening, "internal_kv_get", slow)
    listening.listen(2)
    assert listening.killed == []


def test_a_store_that_ends_while_it_is_asked_is_named_at_once(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked once for 40 s, it kept the driver waiting, and Ray ended the driver after a minute without a word of ours."""
    import ray

    status: list[int | None] = [None]
    store = SimpleNamespace(process=SimpleNamespace(poll=lambda: status[0], returncode=0))
    node = SimpleNamespace(all_processes={"gcs_server": [store]})

    def ends(key: bytes, namespace: bytes, timeout: float) -> bytes:
        listening.now += timeout
        status[0] = 0
        raise ray.exceptions.RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr("ray._private.worker._global_node", node)
    monkeypatch.setattr(listening, "internal_kv_get", ends)
    began = listening.now
    with pytest.raises(WorkerDied, match="Ray itself is gone: its gcs_server ended with status 0"):
        listening.listen(2)
    assert listening.now - began < 10


def test_a_worker_that_was_forgotten_is_not_listened_to(listening: Listening) -> None:
    speak(listening, 10, b"one", b"two")
    assert listening.watch.stop_watching(listening.two) and not listening.watch.stop_watching(listening.two)
    speak(listening, SILENT_S + 10, b"one")
    assert listening.killed == [] and listening.watch.workers == [listening.one]


def test_one_that_is_never_heard_is_given_up_after_its_deadline_and_its_place_says_why(listening: Listening) -> None:
    """Ray has nowhere to start it, and would wait for ever."""
    listening.watch._start_timeout_s = 90
    listening.watch.seats["two"] = cast(
        Any, SimpleNamespace(describe_problem=lambda: "two asks for 1 CPU; nodes: 10.0.0.1 (0 CPU)")
    )
    speak(listening, 88, b"one")
    assert listening.killed == []
    speak(listening, 8, b"one")
    assert set(listening.killed) == {"two"} and listening.one.pulse.kill_reason == ""
    assert listening.two.pulse.kill_reason == (
        "not started after 90 s (cluster.start_timeout_s): no node has room for it: two asks for 1 CPU; nodes: 10.0.0.1 (0 CPU)"
    )
