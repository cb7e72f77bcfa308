"""Listening to workers, with a store and a clock that a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from opd import cluster


class Listening:
    """What workers said, what time it is, and who was killed."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: dict[bytes, bytes] = {}
        self.killed: list[Any] = []

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        return self.said.get(key)

    def listen(self, seconds: float) -> None:
        """As whoever waits does."""
        end = self.now + seconds
        while self.now < end:
            self.now += cluster.LOOK_S
            cluster._end_silent("generate")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    """Two workers, `one` and `two`."""
    made = Listening()
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: made)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(cluster, "kill", lambda actors: [made.killed.append(a._opd_name) for a in actors])
    monkeypatch.setattr(cluster, "_ended", {})
    workers = {key: cluster._Pulse(SimpleNamespace(_opd_name=key.decode())) for key in (b"one", b"two")}
    monkeypatch.setattr(cluster, "_watched", workers)
    return made


def speak(listening: Listening, seconds: float, *keys: bytes) -> None:
    for _ in range(round(seconds / cluster.LOOK_S)):
        for key in keys:
            count = int(listening.said.get(key, b"0").split()[0]) + 1
            listening.said[key] = f"{count} 77 127.0.0.1".encode()
        listening.listen(cluster.LOOK_S)


def test_a_worker_that_falls_silent_is_killed_in_time(listening: Listening) -> None:
    speak(listening, 300, b"one", b"two")
    speak(listening, cluster.SILENT_S - 2, b"one")
    assert listening.killed == []
    speak(listening, 6, b"one")
    assert set(listening.killed) == {"two"} and list(cluster._ended) == [b"two"]
    assert cluster._ended[b"two"] == "no sign of life for 40 s (`generate` was waited for); killed"
    assert cluster.SILENT_S + 6 < 60


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
        assert timeout == cluster.SILENT_S
        raise ray.exceptions.RpcError("Deadline Exceeded")

    monkeypatch.setattr(listening, "internal_kv_get", refuses)
    with pytest.raises(cluster.WorkerDied, match=r"Ray itself is gone: .*Deadline Exceeded") as death:
        listening.listen(2)
    assert death.value.actor is None


def test_a_daemon_that_ended_is_the_end_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: dict[str, int | None] = {"gcs_server": None, "raylet": None, "reaper": -9}
    processes = {
        kind: [SimpleNamespace(process=SimpleNamespace(poll=lambda s=status: s, returncode=status))]
        for kind, status in statuses.items()
    }
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(all_processes=processes))
    cluster._refuse_dead_ray()
    processes["raylet"][0].process = SimpleNamespace(poll=lambda: -9, returncode=-9)
    with pytest.raises(cluster.WorkerDied, match="Ray itself is gone: its raylet ended with status -9"):
        cluster._refuse_dead_ray()
    monkeypatch.setattr("ray._private.worker._global_node", None)
    cluster._refuse_dead_ray()
