"""Real Ray: answers that are made when another worker asks for them, and a door that is shut to everybody else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from opd import cluster
from opd.cluster import RemoteCall, Seat, SeatedWorker, Worker, WorkerDied, WorkerGroup, watching
from opd.cluster.session import get_current_watch
from opd.config.sections import ClusterConfig
from opd.errors import RunError
from opd.machine import orphans

ROOT = Path(__file__).parents[2]
TITLES = {"gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::Owner"}
"""Of the processes of a session whose only worker is an `Owner`."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    before = os.umask(0)  # Ray's own processes inherit it
    try:
        with cluster.ray_session(ClusterConfig(), 2):
            os.umask(before)
            yield
    finally:
        os.umask(before)


@pytest.fixture(autouse=True)
def free_places() -> None:
    """Two workers have a place: those of the test before, failed or not, make room."""
    make_room()


def make_room() -> None:
    """End all workers."""
    for worker in get_current_watch().workers:
        worker.kill()


def by_value() -> tuple[type, type, type]:
    """Classes of workers. Inside of a function, so that they travel by value: workers cannot import this file."""

    class Owner:
        def __init__(self) -> None:
            self.calls = 0

        def numbers(self, size: int, first: int) -> np.ndarray:
            self.calls += 1
            return np.arange(first, first + size, dtype=np.float32)

        def asked(self) -> int:
            return self.calls

        def summed(self, size: int) -> tuple[float, np.ndarray]:
            if size < 0:
                raise RunError("no numbers")
            numbers = np.ones(size)
            return float(numbers.sum()), numbers

        def pid(self) -> int:
            return os.getpid()

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def threads(self) -> str:
            return os.environ["OMP_NUM_THREADS"]

        def refuse(self) -> None:
            raise RunError("teacher odd: it does not want to")

    class Reader:
        def total(self, handles: dict[str, RemoteCall[np.ndarray]]) -> dict[str, float]:
            return {key: float(handle.fetch().sum()) for key, handle in handles.items()}

    class Half:
        """One of two that wait for each other, as ranks do: it fails when the other is gone."""

        def pid(self) -> int:
            return os.getpid()

        def last_words(self) -> None:
            print("I was about to say \x1b[31m something")

        def together(self, partner: int) -> None:
            while True:
                time.sleep(0.05)
                if partner and not psutil.pid_exists(partner):
                    raise ValueError("connection closed by peer")

    return Owner, Reader, Half


Owner, Reader, Half = by_value()


def start(cls: type, name: str) -> Worker[Any]:
    return cluster.spawn_worker(cls, name=name, env=cluster.worker_env(2))


def start_owner() -> Worker[Any]:
    return start(Owner, "owner")


def start_reader() -> Worker[Any]:
    return start(Reader, "reader")


def ask(worker: Worker[Any], method: Callable[..., Any], *args: Any) -> Any:
    return worker.submit(method, *args).wait_for_result(timeout_s=60)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_answer_is_made_when_it_is_fetched_and_by_whoever_fetches_it() -> None:
    owner, reader = start_owner(), start_reader()
    handles = {key: owner.on_demand(30.0, Owner.numbers, 100_000, first) for key, first in (("zero", 0), ("one", 1))}
    assert ask(owner, Owner.asked) == 0
    assert ask(reader, Reader.total, handles) == {
        "zero": pytest.approx(4999950000.0),
        "one": pytest.approx(5000050000.0),
    }
    assert ask(owner, Owner.asked) == 2
    np.testing.assert_array_equal(handles["one"].fetch(), np.arange(1, 100_001))
    assert ask(owner, Owner.asked) == 3, "again for the next"


def test_of_a_pair_only_the_first_comes_here_and_the_second_where_its_handle_goes() -> None:
    owner, other = start_owner(), start_owner()
    pending, handle = owner.submit_pair(Owner.summed, 1 << 20)
    assert pending.wait_for_result(timeout_s=60) == 1 << 20
    numbers = cluster.fetch_object(handle)
    assert numbers.nbytes == 8 << 20 and not numbers.flags.writeable, "a view into shared memory"
    failing, _ = other.submit_pair(Owner.summed, -1)
    with pytest.raises(RunError, match="no numbers"):
        failing.wait_for_result(timeout_s=60)


def test_an_answer_that_does_not_come_is_an_error_of_the_run() -> None:
    owner, reader = start_owner(), start_reader()
    slow = owner.on_demand(1.0, Owner.sleep, 4.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        slow.fetch()
    assert time.monotonic() - began < 3.5
    with pytest.raises(RunError, match=r"^`sleep` of another worker took longer than 1 s$"):
        ask(reader, Reader.total, {"slow": slow})
    refusing = owner.on_demand(30.0, Owner.refuse)
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        refusing.fetch()
    with pytest.raises(RunError, match=r"^teacher odd: it does not want to$"):
        ask(reader, Reader.total, {"refusing": refusing})

    pid = ask(owner, Owner.pid)
    owner.kill()
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)  # it may still answer until Ray's word has reached it
    numbers = owner.on_demand(30.0, Owner.numbers, 1, 0)
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        numbers.fetch()
    with pytest.raises(RunError, match=r"^the worker that was asked for `numbers` is dead"):
        ask(reader, Reader.total, {"numbers": numbers})


@dataclass(frozen=True)
class Session:
    """This session's state while it had a single worker."""

    listening: set[tuple[str, str]]
    """Name of a process, and an address at which it listens."""
    address: str
    """Address of its machine in the cluster, as the worker says."""
    marks: dict[str, str | None]
    """Title of a process -> the mark that it carries."""


@pytest.fixture(scope="module")
def session(ray: None) -> Session:
    make_room()
    owner = start_owner()
    ask(owner, Owner.asked)
    deadline = time.monotonic() + 30
    while (marks := titles_and_marks()).keys() < TITLES and time.monotonic() < deadline:
        time.sleep(0.2)  # an agent has its title a moment after its start
    found = Session(listening=listening(), address=owner.node_address(timeout_s=30), marks=marks)
    owner.kill()
    return found


def listening() -> set[tuple[str, str]]:
    """Of this process and all below it."""
    mine = psutil.Process()
    return {
        (process.name(), port.laddr.ip.removeprefix("::ffff:"))
        for process in (mine, *mine.children(recursive=True))
        for port in process.net_connections(kind="inet")
        if port.status == psutil.CONN_LISTEN
    }


def titles_and_marks() -> dict[str, str | None]:
    """Of all processes below this one."""
    found: dict[str, str | None] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = process.cmdline()[0] if process.name().startswith("ray::") else process.name()
            found[title.split("(")[0].split(".")[0]] = process.environ().get(orphans.VARIABLE)
    return found


def test_nothing_of_ours_listens_beyond_this_machine(session: Session) -> None:
    assert {"gcs_server", "raylet"} <= {name for name, _ in session.listening}
    assert [(name, at) for name, at in session.listening if not ip_address(at).is_loopback] == []


def test_other_users_get_at_none_of_rays_files_whatever_the_umask() -> None:
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert (session / "sockets" / "plasma_store").is_socket()
    around = session.parents[1].stat()
    assert around.st_mode & 0o777 == 0o700 and around.st_uid == os.getuid()
    assert session.stat().st_mode & 0o007, "Ray itself would let them in"


def test_the_files_of_a_session_go_with_it_or_with_the_next_one_after_an_error() -> None:
    """In a process of its own: this one has a session under way."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom opd import cluster\nfrom opd.config.sections import ClusterConfig\n"
        "from opd.errors import RunError\nplace = Path(os.environ['RAY_TMPDIR'])\n"
        "try:\n    with cluster.ray_session(ClusterConfig(), 1):\n        assert len(list(place.iterdir())) == 1\n        raise RunError('x')\n"
        "except RunError:\n    (kept,) = place.iterdir()\n    assert list(kept.glob('r/session_latest/logs/*'))\n"
        "with cluster.ray_session(ClusterConfig(), 1):\n    assert len(list(place.iterdir())) == 1 and not kept.exists()\n"
        "assert not list(place.iterdir())"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        env = os.environ | {"RAY_TMPDIR": place, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


def test_a_worker_says_where_the_cluster_reaches_its_machine(session: Session) -> None:
    assert session.address == "127.0.0.1", "not the address of this machine's own name"


def test_every_process_carries_the_mark_of_its_driver(session: Session) -> None:
    """Also under the titles that Ray's agents and workers give themselves."""
    assert session.marks.keys() >= TITLES
    assert {title: mark for title, mark in session.marks.items() if mark != orphans.driver_mark()} == {}


def test_ray_starts_no_process_before_a_worker_wants_one(session: Session) -> None:
    """A worker has an environment of its own, so it could not take one that was started beforehand."""
    assert "ray::Owner" in session.marks
    assert "ray::IDLE" not in session.marks


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


def start_pair() -> list[Worker[Any]]:
    return [start(Half, f"half {i}") for i in range(2)]


def test_the_death_of_a_partner_explains_a_failure_and_comes_with_its_last_words() -> None:
    first, second = start_pair()
    pid = ask(first, Half.pid)
    ask(first, Half.last_words)
    pending = [first.submit(Half.together, 0), second.submit(Half.together, pid)]
    time.sleep(3)  # until it has said that it lives, and where
    with pytest.raises(RunError):
        cluster.wait_for_all(pending, timeout_s=2.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(cluster.WorkerDied, match=r"half 0: the worker died during `together`") as death:
        cluster.wait_for_all(pending, timeout_s=60)
    assert death.value.worker is first
    assert "I was about to say \\x1b[31m something" in str(death.value)


def test_a_worker_that_is_stopped_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another one is waited for, which is not disturbed, and is then stopped itself."""
    monkeypatch.setattr(watching, "SILENT_S", 6.0)
    stopped, waiting = start_pair()
    pid, partner = ask(stopped, Half.pid), ask(waiting, Half.pid)
    pending = waiting.submit(Half.together, 0)
    with pytest.raises(RunError, match="took longer than 8 s"):  # as long as both live, nobody is silent
        pending.wait_for_result(timeout_s=8)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RunError, match="took longer than 14 s"):
        pending.wait_for_result(timeout_s=14)
    assert gone(pid) and not gone(partner)
    with pytest.raises(
        cluster.WorkerDied, match=r"half 0: no sign of life for 6 s \(`together` was waited for\)"
    ) as death:
        ask(stopped, Half.pid)
    assert death.value.worker is stopped

    os.kill(partner, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(cluster.WorkerDied, match=r"half 1: no sign of life for 6 s") as death:
        pending.wait_for_result(timeout_s=60)
    assert death.value.worker is waiting and time.monotonic() - began < 15


def test_ray_does_not_take_the_signals_of_the_driver() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def seat_of(name: str, asks: dict[str, float], threads: int | None = None) -> Seat:
    return Seat(workers=(SeatedWorker(name=name, asks=asks, threads=threads),), bundles=(asks,))


def test_a_worker_goes_to_the_place_that_is_reserved_for_its_name() -> None:
    from ray.util import remove_placement_group

    seat = seat_of("owner", {"CPU": 2.0}, threads=3)
    places = cluster.reserve_seats([WorkerGroup(key="here", strategy="STRICT_PACK", seats=(seat,))], timeout_s=60)
    try:
        assert places == {"owner": cluster.list_nodes()[0].id}
        owner = start_owner()
        assert ask(owner, Owner.threads) == "3"
        other = replace(seat_of("reader", {"CPU": 1.0}), labels={"pool": "none"})
        late = r"^there: no place for reader \(pack\) after 2 s .*reader asks for 1 CPU, label pool=none; nodes: 127.0.0.1 "
        with pytest.raises(RunError, match=late):
            cluster.reserve_seats([WorkerGroup(key="there", strategy="PACK", seats=(other,))], timeout_s=2)
    finally:
        for place in get_current_watch().seats.values():
            remove_placement_group(place.group)
        get_current_watch().seats.clear()


@pytest.mark.parametrize("variables", [{"PYTHONPATH": str(ROOT)}, {}], ids=["a path", "as installed"])
def test_a_worker_searches_the_current_directory_last(variables: dict[str, str], tmp_path: Path) -> None:
    """A file named like one of our packages does not stand in for it; a module that is nowhere else is found."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    code = "import opd; print(opd.ROOT)"
    asked = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    if asked.stdout.strip() != str(ROOT):
        pytest.skip("another checkout is installed")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for name in ("opd", "teachers", "ray"):
        (here / f"{name}.py").write_text("raise SystemExit('the file of the current directory was run')\n")
    (here / "mine.py").write_text("FOUND = True\n")
    script = elsewhere / "script.py"
    script.write_text(
        "from opd import cluster\n"
        "from opd.config.sections import ClusterConfig\n"
        "def main():\n"
        "    class Looking:\n"
        "        def look(self):\n"
        "            import mine, teachers\n"
        "            return mine.FOUND, teachers.__file__\n"
        "    with cluster.ray_session(ClusterConfig(), 1):\n"
        "        worker = cluster.spawn_worker(Looking, name='looking worker', env={})\n"
        "        print(*worker.submit(Looking.look).wait_for_result(timeout_s=120))\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=here, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(ROOT / "teachers" / "__init__.py")]


def test_a_constructor_that_fails_alike_twice_can_be_told() -> None:
    class Failing:
        def __init__(self) -> None:
            raise ValueError("VLLM_PORT 'tcp://10.0.0.7:8000' appears to be a URI.\nSee the manual.")

        def look(self) -> None: ...

    errors = []
    for _ in range(2):
        worker = cluster.spawn_worker(Failing, name="failing worker", env={})
        with pytest.raises(WorkerDied) as died:
            worker.submit(Failing.look).wait_for_result(timeout_s=120)
        errors.append(died.value)
    assert str(errors[0]) != str(errors[1]), "pids differ"
    assert errors[0].start_error == errors[1].start_error
    assert errors[0].start_error.startswith("ValueError: VLLM_PORT 'tcp://10.0.0.7:8000' appears to be a URI.")


def test_ray_itself_dies() -> None:
    """Last: nothing works any more in this module. The driver is told soon, and its session ends."""
    (owner,) = start_pair()[:1]
    ask(owner, Half.pid)
    pending = owner.submit(Half.together, 0)
    (store,) = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
    store.kill()
    began = time.monotonic()
    with pytest.raises(cluster.WorkerDied, match="Ray itself is gone: its gcs_server ended with status -9"):
        pending.wait_for_result(timeout_s=60)
    assert time.monotonic() - began < 10
