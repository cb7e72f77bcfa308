"""Ray: starting it, putting workers into actors, and calling them with a deadline. The one module that imports ray."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from opd import leftovers
from opd.address import LOOPBACK
from opd.config.sections import ClusterConfig
from opd.errors import OpdError, RunError
from opd.text import printable

LOCAL = "local"


LOOK_S = 2.0
"""How often a worker says that it lives, and how often whoever waits looks."""
SILENT_S = 40.0
"""A worker that has not said so for this long is hung, whatever it was doing: it is killed."""
EXPLAIN_S = 10.0
"""After one worker of a group failed, how long to wait for the death of another that may explain it."""
LOG_LINES = 20


class WorkerDied(RunError):
    """A worker's process, or Ray itself, is gone."""

    def __init__(self, message: str, actor: Any = None) -> None:
        super().__init__(message)  # alone, so that it can be pickled; a handle is of use in the driver only
        self.actor = actor


@contextmanager
def ray_session(config: ClusterConfig, num_workers: int) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; stop it on exit.

    A local Ray listens on loopback only, has no dashboard, and asks for a token that lives as long as this process. What
    an earlier driver left when it was killed is cleared first, and no process of this one outlives the session.
    Raises: RunError if it would listen elsewhere.
    """
    if config.address == LOCAL:
        _keep_to_this_machine()
    import ray

    leftovers.sweep()
    with _no_daemon_stands_still():
        try:
            with leftovers.marked(), _own_signals():
                if config.address == LOCAL:
                    # CPUs are counted in workers, not cores: the phases take turns on the same cores.
                    ray.init(
                        num_cpus=num_workers,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="ERROR",
                        configure_logging=True,
                    )
                    _refuse_open_ports(ray.util.get_node_ip_address())
                else:
                    ray.init(address=config.address, log_to_driver=False, logging_level="ERROR")
            yield
        except WorkerDied as error:
            if error.actor is None:
                leftovers.end_own()  # before Ray shuts down, which would wait for workers that do not answer
            raise
        finally:
            _watched.clear()
            _ended.clear()
            ray.shutdown()
            leftovers.end_own()  # what was stopped or hung does not go by itself


def _keep_to_this_machine() -> None:
    """Settings that Ray reads when it is imported.

    On Linux it turns 127.0.0.1 into the machine's outer address and listens there; without clusters it does not. Its own
    token lies in a file that other users may be able to read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts, and would end the driver in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _refuse_open_ports(node_address: str) -> None:
    if node_address not in LOOPBACK:
        raise RunError(
            f"Ray listens on {node_address}, beyond this machine: something in this process imported ray before "
            "cluster.address `local` could keep it to loopback"
        )


def worker_env(workers: int) -> dict[str, str]:
    """Environment of one of `workers` processes that compute at the same time on one machine.

    Two OpenMP jobs with all cores each slow each other down 40-fold, and spinning threads add to it: each role gets its
    share of the cores and waits passively.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


@dataclass
class _Pulse:
    """A worker as the driver hears it."""

    actor: Any
    last: bytes = b""
    """What it said last: a count, its pid and its machine."""
    silent_s: float = 0.0
    """For how long the driver has listened and heard nothing new."""
    looked_at: float = 0.0


_watched: dict[bytes, _Pulse] = {}
"""Workers of this driver by their key."""
_ended: dict[bytes, str] = {}
"""Workers that were killed because they had fallen silent, by their key -> what to tell whoever waits for them."""


class _Beating:
    """A worker's first base: says every `LOOK_S` that the process lives, from a thread of its own."""

    def __init__(self, key: bytes, *args: Any) -> None:
        threading.Thread(target=_beat, args=(key,), daemon=True, name="pulse").start()
        super().__init__(*args)

    def node_address(self) -> str:
        """Address of the machine that it runs on, as the cluster's other machines reach it."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address


def _beat(key: bytes) -> None:
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    where = f"{os.getpid()} {ray.util.get_node_ip_address()}"
    for count in itertools.count():
        _internal_kv_put(key, f"{count} {where}".encode(), overwrite=True, namespace=_PULSES)
        time.sleep(LOOK_S)


_PULSES = "opd"


def spawn(cls: type, *args: Any, name: str, env: Mapping[str, str], gpus: float = 0) -> Any:
    """Start `cls(*args)` in its own process; returns at once, the first call waits for it. Raises: WorkerDied if Ray is gone."""
    import ray

    _refuse_dead_ray()
    key = f"pulse {secrets.token_hex(8)}".encode()
    beating = type(cls.__name__, (_Beating, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": dict(env)}}
    with _ray_lives():
        actor = ray.remote(beating).options(**options).remote(key, *args)
    actor._opd_name = name
    actor._opd_pulse = key
    _watched[key] = _Pulse(actor)
    return actor


def put(value: Any) -> Any:
    """A handle to a value that came from outside the cluster. Raises: WorkerDied if Ray is gone."""
    import ray

    with _ray_lives():
        return ray.put(value)


def kill(actors: Sequence[Any]) -> None:
    """End workers at once; whoever waits for one of their calls gets the error of a worker that died.

    Ray's word reaches a worker that has not been listened to yet a moment later: until then it may still answer.
    """
    import ray

    for actor in actors:
        pulse = _watched.pop(getattr(actor, "_opd_pulse", b""), None)
        ray.kill(actor)
        if pulse is not None and pulse.last:
            _kill_here(pulse)


def _kill_here(pulse: _Pulse) -> None:
    """SIGKILL, if it runs on this machine: a process that is stopped does not hear Ray."""
    import ray

    _, pid, address = pulse.last.decode().split()
    if address == ray.util.get_node_ip_address():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Remote:
    """A worker's answer that is made when somebody fetches it, and again for the next; may travel to other workers."""

    actor: Any
    method: str
    args: tuple[Any, ...]
    timeout_s: float

    def fetch(self) -> Any:
        """Fetch the answer, for callers that know nothing of Ray: see `fetch`."""
        return fetch(self)


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that `put` took; may travel to workers."""

    handle: Any

    def fetch(self) -> Any:
        """Fetch the answer, for callers that know nothing of Ray: see `fetch`."""
        return fetch(self.handle)


def fetch(refs: Any) -> Any:
    """Values behind one handle or a list of handles, read without a copy where they are arrays.

    Raises: RunError if a `Remote`'s worker is dead or misses its deadline; that worker's own OpdError or RunError.
    """
    import ray

    if not isinstance(refs, Remote):
        with _ray_lives():
            return ray.get(refs)
    try:
        return ray.get(getattr(refs.actor, refs.method).remote(*refs.args), timeout=refs.timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"`{refs.method}` of another worker took longer than {refs.timeout_s:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except ray.exceptions.RayActorError as error:
        raise WorkerDied(f"the worker that was asked for `{refs.method}` is dead: {error}") from None


def call(actors: Sequence[Any], method: str, argument_lists: Sequence[Sequence[Any]], *, timeout_s: float) -> list[Any]:
    """Call one method on each actor with its own arguments and wait for all results, in order.

    Raises: the worker's own OpdError or RunError; RunError naming the worker if it died or missed the deadline.
    """
    return wait(actors, submit(actors, method, argument_lists), method, timeout_s=timeout_s)


def node_address(actor: Any, *, timeout_s: float) -> str:
    """Where a worker's machine is reached from the cluster's other machines. Raises: as `call`."""
    (address,) = call([actor], "node_address", [[]], timeout_s=timeout_s)
    return str(address)


def submit(actors: Sequence[Any], method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Like `call`, but returns handles at once. Raises: WorkerDied if Ray is gone."""
    _refuse_dead_ray()
    with _ray_lives():
        return [getattr(actor, method).remote(*args) for actor, args in zip(actors, argument_lists, strict=True)]


def wait(actors: Sequence[Any], refs: Sequence[Any], method: str, *, timeout_s: float) -> list[Any]:
    """Results of `submit`. Raises: as `call`."""
    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending:
        # One at a time: when a rank fails, the others wait for it in a collective, and its error is the one that explains.
        ready = _next_of(actors, pending, method, deadline, timeout_s)
        pending.remove(ready)
        try:
            _result(actors, refs, ready, method)
        except WorkerDied:
            raise
        except Exception:
            _raise_a_death(actors, refs, pending, method)
            raise
    return [_result(actors, refs, ref, method) for ref in refs]


def first(actors: Sequence[Any], refs: Sequence[Any], method: str, *, timeout_s: float) -> int:
    """Index of a call of `submit` that has ended, waiting for one. Raises: as `call`."""
    ready = _next_of(actors, refs, method, time.monotonic() + timeout_s, timeout_s)
    _result(actors, refs, ready, method)
    return list(refs).index(ready)


def _next_of(actors: Sequence[Any], pending: Sequence[Any], method: str, deadline: float, timeout_s: float) -> Any:
    """One that is ready, waiting for it. Raises: RunError past the deadline, WorkerDied if Ray is gone."""
    import ray

    while True:
        left_s = deadline - time.monotonic()
        with _ray_lives():
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, min(LOOK_S, left_s)), fetch_local=False)
        if ready:
            return ready[0]
        if left_s <= 0:
            names = ", ".join(actor._opd_name for actor in actors)
            raise RunError(
                f"{names}: `{method}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
            )
        _refuse_dead_ray()
        _end_silent(method)


def _refuse_dead_ray() -> None:
    """Raises: WorkerDied if one of Ray's own processes is gone; whoever asks it for something would wait for a minute, and
    then not live to tell."""
    for kind, process in _daemons():
        if process.poll() is not None:
            raise WorkerDied(f"Ray itself is gone: its {kind} ended with status {process.returncode}")


def _daemons() -> list[tuple[str, subprocess.Popen[bytes]]]:
    """Ray's own processes, where this driver started them."""
    import ray

    node = ray._private.worker._global_node
    started = {} if node is None else node.all_processes
    return [(kind, info.process) for kind in ("gcs_server", "raylet") for info in list(started.get(kind, ()))]


@contextmanager
def _no_daemon_stands_still() -> Iterator[None]:
    """Within, one that was stopped for `SILENT_S` is killed: then a call into Ray that waits for it, whatever its deadline,
    ends."""
    done = threading.Event()

    def look() -> None:
        stopped: Counter[int] = Counter()
        while not done.wait(LOOK_S):
            for _, process in _daemons():
                with contextlib.suppress(psutil.NoSuchProcess):
                    still = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                    stopped[process.pid] = stopped[process.pid] + 1 if still else 0
                    if stopped[process.pid] * LOOK_S > SILENT_S:
                        process.kill()

    thread = threading.Thread(target=look, daemon=True, name="daemons")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _end_silent(method: str) -> None:
    """Listen to every worker, whoever is waited for: one may be stuck behind another, which Ray frees when that one is
    killed. Their calls end with the error of a worker that died."""
    if not _watched:
        return
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    client = internal_kv_get_gcs_client()
    for key, pulse in list(_watched.items()):
        with _ray_lives():  # a deadline of its own: a store that stands still would be waited for without an end
            said = client.internal_kv_get(key, _PULSES.encode(), timeout=SILENT_S) or b""
        now = time.monotonic()
        if said != pulse.last or not said:
            pulse.last, pulse.silent_s = said, 0.0
        else:
            # No more than it listened: all of them may have slept, after Ctrl-Z or in a container that was paused.
            pulse.silent_s += min(now - pulse.looked_at, 2 * LOOK_S)
        pulse.looked_at = now
        if pulse.silent_s > SILENT_S:
            _ended[key] = f"no sign of life for {SILENT_S:.0f} s (`{method}` was waited for); killed{_log_tail(pulse)}"
            kill([pulse.actor])


def _raise_a_death(actors: Sequence[Any], refs: Sequence[Any], pending: Sequence[Any], method: str) -> None:
    """Raises: WorkerDied if one of the pending calls ends in its worker's death soon: then that is what the failure
    of another one meant, which had lost its partner."""
    import ray

    left, deadline = list(pending), time.monotonic() + EXPLAIN_S
    while left and time.monotonic() < deadline:
        ready, left = ray.wait(left, num_returns=1, timeout=deadline - time.monotonic(), fetch_local=False)
        for ref in ready:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError:
                _result(actors, refs, ref, method)
            except ray.exceptions.RayTaskError:
                continue  # it lost its partner too


def _result(actors: Sequence[Any], refs: Sequence[Any], ref: Any, method: str) -> Any:
    import ray

    actor = actors[list(refs).index(ref)]
    try:
        with _ray_lives():
            return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except ray.exceptions.RayActorError as error:
        key = getattr(actor, "_opd_pulse", b"")
        pulse = _watched.pop(key, _Pulse(actor))
        found = _ended.get(key) or f"the worker died during `{method}`: {str(error).strip()}{_log_tail(pulse)}"
        raise WorkerDied(f"{actor._opd_name}: {found}", actor) from None


@contextmanager
def _ray_lives() -> Iterator[None]:
    """Raises: WorkerDied if Ray's own processes are gone, whichever error it finds for that."""
    import ray

    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        raise
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise WorkerDied(f"Ray itself is gone: {str(error).strip()[:500]}") from None


def _log_tail(pulse: _Pulse) -> str:
    """The last lines that a worker of this machine wrote, with where they are; nothing if they are elsewhere."""
    import ray

    node = ray._private.worker._global_node
    if not pulse.last or node is None:
        return ""
    pid = pulse.last.decode().split()[1]
    files = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    shown = "".join(f"\n  | {printable(line)}" for line in lines[-LOG_LINES:])
    return f"\nits last words, in {files[0].parent}:{shown}" if shown else ""


def _cause(error: Any) -> Exception:
    """A refusal that we worded ourselves is shown as it is; Ray would wrap the worker's traceback around it."""
    return error.cause if isinstance(error.cause, OpdError | RunError) else error.as_instanceof_cause()
