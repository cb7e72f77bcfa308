"""Real Ray: answers that are made when another worker asks for them, and a door that is shut to everybody else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import numpy as np
import psutil
import pytest

from opd import cluster, leftovers
from opd.config.sections import ClusterConfig
from opd.errors import RunError


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 2):
        yield


@pytest.fixture(autouse=True)
def free_places() -> None:
    """Two workers have a place: those of the test before, failed or not, make room."""
    cluster.kill([pulse.actor for pulse in list(cluster._watched.values())])


def start_owner() -> Any:
    class Owner:  # here, so that it travels by value: workers cannot import this file
        def __init__(self) -> None:
            self.calls = 0

        def numbers(self, size: int, first: int) -> np.ndarray:
            self.calls += 1
            return np.arange(first, first + size, dtype=np.float32)

        def asked(self) -> int:
            return self.calls

        def pid(self) -> int:
            return os.getpid()

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def refuse(self) -> None:
            raise RunError("teacher odd: it does not want to")

    return cluster.spawn(Owner, name="owner", env=cluster.worker_env(2))


def start_reader() -> Any:
    class Reader:
        def total(self, handles: dict[str, cluster.Remote]) -> dict[str, float]:
            return {key: float(cluster.fetch(handle).sum()) for key, handle in handles.items()}

    return cluster.spawn(Reader, name="reader", env=cluster.worker_env(2))


def ask(actor: Any, method: str, *args: Any) -> Any:
    (answer,) = cluster.call([actor], method, [args], timeout_s=60)
    return answer


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_answer_is_made_when_it_is_fetched_and_by_whoever_fetches_it() -> None:
    owner, reader = start_owner(), start_reader()
    handles = {
        key: cluster.Remote(owner, "numbers", (100_000, first), 30.0) for key, first in (("zero", 0), ("one", 1))
    }
    assert ask(owner, "asked") == 0
    assert ask(reader, "total", handles) == {"zero": pytest.approx(4999950000.0), "one": pytest.approx(5000050000.0)}
    assert ask(owner, "asked") == 2
    np.testing.assert_array_equal(cluster.fetch(handles["one"]), np.arange(1, 100_001))
    assert ask(owner, "asked") == 3, "again for the next"


def test_an_answer_that_does_not_come_is_an_error_of_the_run() -> None:
    owner, reader = start_owner(), start_reader()
    slow = cluster.Remote(owner, "sleep", (4.0,), 1.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        cluster.fetch(slow)
    assert time.monotonic() - began < 3.5
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        ask(reader, "total", {"slow": slow})
    refusing = cluster.Remote(owner, "refuse", (), 30.0)
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        cluster.fetch(refusing)
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        ask(reader, "total", {"refusing": refusing})

    pid = ask(owner, "pid")
    cluster.kill([owner])
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)  # it may still answer until Ray's word has reached it
    numbers = cluster.Remote(owner, "numbers", (1, 0), 30.0)
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        cluster.fetch(numbers)
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        ask(reader, "total", {"numbers": numbers})


def test_nothing_of_ours_listens_beyond_this_machine() -> None:
    owner = start_owner()
    ask(owner, "asked")
    mine = psutil.Process()
    listening = {
        (process.name(), port.laddr)
        for process in (mine, *mine.children(recursive=True))
        for port in process.net_connections(kind="inet")
        if port.status == psutil.CONN_LISTEN
    }
    cluster.kill([owner])
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    addresses = {name: ip_address(at.ip.removeprefix("::ffff:")) for name, at in listening}
    assert {name: str(at) for name, at in addresses.items() if not at.is_loopback} == {}


def test_a_worker_says_where_the_cluster_reaches_its_machine() -> None:
    owner = start_owner()
    assert cluster.node_address(owner, timeout_s=30) == "127.0.0.1", "not the address of this machine's own name"
    cluster.kill([owner])


def test_every_process_carries_the_mark_of_its_driver() -> None:
    """Also under the titles that Ray's agents and workers give themselves."""
    owner = start_owner()
    ask(owner, "asked")
    wanted = {"gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::Owner"}
    deadline = time.monotonic() + 30
    while (found := titles_and_marks()).keys() < wanted and time.monotonic() < deadline:
        time.sleep(0.2)  # an agent has its title a moment after its start
    cluster.kill([owner])
    assert found.keys() >= wanted
    assert {title: mark for title, mark in found.items() if mark != leftovers.mark()} == {}


def titles_and_marks() -> dict[str, str | None]:
    """Of all processes below this one."""
    found: dict[str, str | None] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = process.cmdline()[0] if process.name().startswith("ray::") else process.name()
            found[title.split("(")[0].split(".")[0]] = process.environ().get(leftovers.VARIABLE)
    return found


def test_only_who_has_the_token_gets_an_answer() -> None:
    import ray

    code = (
        "from ray._raylet import GcsClient\n"
        f"print(len(GcsClient(address={ray.get_runtime_context().gcs_address!r}).get_all_node_info(timeout=5)))"
    )
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64

    def asks(**env: str) -> subprocess.CompletedProcess[str]:
        others = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
        return subprocess.run(
            [sys.executable, "-c", code], env=others | env, capture_output=True, text=True, timeout=60, check=False
        )

    assert asks(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).stdout == "1\n"
    for env in ({"RAY_AUTH_TOKEN": "0" * 64}, {"HOME": "/nonexistent"}):
        refused = asks(RAY_AUTH_MODE="token", **env)
        assert refused.returncode != 0 and refused.stdout == ""
    assert asks(RAY_AUTH_MODE="disabled").stdout == ""


# Workers that die or hang


def start_pair() -> list[Any]:
    """Two that wait for each other, as ranks do: the second fails when the first is gone."""

    class Half:
        def pid(self) -> int:
            return os.getpid()

        def last_words(self) -> None:
            print("I was about to say \x1b[31m something")

        def together(self, partner: int) -> None:
            while True:
                time.sleep(0.05)
                if partner and not psutil.pid_exists(partner):
                    raise ValueError("connection closed by peer")

    return [cluster.spawn(Half, name=f"half {i}", env=cluster.worker_env(2)) for i in range(2)]


def test_the_death_of_a_partner_explains_a_failure_and_comes_with_its_last_words() -> None:
    first, second = start_pair()
    pid = ask(first, "pid")
    ask(first, "last_words")
    refs = cluster.submit([first, second], "together", [[0], [pid]])
    time.sleep(3)  # until it has said that it lives, and where
    with pytest.raises(RunError):
        cluster.wait([first, second], refs, "together", timeout_s=2.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(cluster.WorkerDied, match=r"half 0: the worker died during `together`") as death:
        cluster.wait([first, second], refs, "together", timeout_s=60)
    assert death.value.actor is first
    assert "I was about to say \\x1b[31m something" in str(death.value)


def test_a_worker_that_is_stopped_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another one is waited for, which is not disturbed."""
    monkeypatch.setattr(cluster, "SILENT_S", 6.0)
    stopped, waiting = start_pair()
    pid, partner = ask(stopped, "pid"), ask(waiting, "pid")
    refs = cluster.submit([waiting], "together", [[0]])
    with pytest.raises(RunError, match="took longer than 8 s"):  # as long as both live, nobody is silent
        cluster.wait([waiting], refs, "together", timeout_s=8)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RunError, match="took longer than 14 s"):
        cluster.wait([waiting], refs, "together", timeout_s=14)
    assert gone(pid) and not gone(partner)
    with pytest.raises(
        cluster.WorkerDied, match=r"half 0: no sign of life for 6 s \(`together` was waited for\)"
    ) as death:
        ask(stopped, "pid")
    assert death.value.actor is stopped
    cluster.kill([waiting])

    stopped, other = start_pair()
    pid, _ = ask(stopped, "pid"), ask(other, "pid")
    refs = cluster.submit([stopped], "together", [[0]])
    time.sleep(3)  # until it has said that it lives
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(cluster.WorkerDied, match=r"half 0: no sign of life for 6 s") as death:
        cluster.wait([stopped], refs, "together", timeout_s=60)
    assert death.value.actor is stopped and time.monotonic() - began < 15


def test_ray_does_not_take_the_signals_of_the_driver() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ray_itself_dies() -> None:
    """Last: nothing works any more in this module. The driver is told soon, and its session ends."""
    (owner,) = start_pair()[:1]
    ask(owner, "pid")
    refs = cluster.submit([owner], "together", [[0]])
    (store,) = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
    store.kill()
    began = time.monotonic()
    with pytest.raises(cluster.WorkerDied, match="Ray itself is gone: its gcs_server ended with status -9"):
        cluster.wait([owner], refs, "together", timeout_s=60)
    assert time.monotonic() - began < 10
