"""Ray: starting it, putting workers into actors, and calling them with a deadline. The one module that imports ray."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opd.address import LOOPBACK
from opd.config import ClusterConfig
from opd.errors import OpdError, RunError

LOCAL = "local"


class WorkerDied(RunError):
    """A worker's process is gone."""

    def __init__(self, actor: Any, message: str) -> None:
        super().__init__(message)
        self.actor = actor


@contextmanager
def ray_session(config: ClusterConfig, num_workers: int) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; stop it on exit.

    A local Ray listens on loopback only, has no dashboard, and asks for a token that lives as long as this process.
    Raises: RunError if it would listen elsewhere.
    """
    if config.address == LOCAL:
        _keep_to_this_machine()
    import ray

    if config.address == LOCAL:
        # CPUs are counted in workers, not cores: the phases take turns on the same cores.
        ray.init(
            num_cpus=num_workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=True,
        )
    else:
        ray.init(address=config.address, log_to_driver=False, logging_level="ERROR")
    try:
        if config.address == LOCAL:
            _refuse_open_ports(ray.util.get_node_ip_address())
        yield
    finally:
        ray.shutdown()


def _keep_to_this_machine() -> None:
    """Settings that Ray reads when it is imported.

    On Linux it turns 127.0.0.1 into the machine's outer address and listens there; without clusters it does not. Its own
    token lies in a file that other users may be able to read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


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


def spawn(cls: type, *args: Any, name: str, env: Mapping[str, str], gpus: float = 0) -> Any:
    """Start `cls(*args)` in its own process; returns at once, the first call waits for it."""
    import ray

    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": dict(env)}}
    actor = ray.remote(cls).options(**options).remote(*args)
    actor._opd_name = name
    return actor


def put(value: Any) -> Any:
    """A handle to a value that came from outside the cluster."""
    import ray

    return ray.put(value)


def kill(actors: Sequence[Any]) -> None:
    """End workers at once; whoever waits for one of their calls gets the RunError of a worker that died."""
    import ray

    for actor in actors:
        ray.kill(actor)


@dataclass(frozen=True, slots=True)
class Remote:
    """A worker's answer that is made when somebody fetches it, and again for the next; may travel to other workers."""

    actor: Any
    method: str
    args: tuple[Any, ...]
    timeout_s: float


def fetch(refs: Any) -> Any:
    """Values behind one handle or a list of handles, read without a copy where they are arrays.

    Raises: RunError if a `Remote`'s worker is dead or misses its deadline; that worker's own OpdError or RunError.
    """
    import ray

    if not isinstance(refs, Remote):
        return ray.get(refs)
    try:
        return ray.get(getattr(refs.actor, refs.method).remote(*refs.args), timeout=refs.timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"`{refs.method}` of another worker took longer than {refs.timeout_s:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except ray.exceptions.RayActorError as error:
        raise RunError(f"the worker that was asked for `{refs.method}` is dead: {error}") from None


def call(actors: Sequence[Any], method: str, argument_lists: Sequence[Sequence[Any]], *, timeout_s: float) -> list[Any]:
    """Call one method on each actor with its own arguments and wait for all results, in order.

    Raises: the worker's own OpdError or RunError; RunError naming the worker if it died or missed the deadline.
    """
    return wait(actors, submit(actors, method, argument_lists), method, timeout_s=timeout_s)


def submit(actors: Sequence[Any], method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Like `call`, but returns handles at once."""
    return [getattr(actor, method).remote(*args) for actor, args in zip(actors, argument_lists, strict=True)]


def wait(actors: Sequence[Any], refs: Sequence[Any], method: str, *, timeout_s: float) -> list[Any]:
    """Results of `submit`. Raises: as `call`."""
    import ray

    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending:
        # One at a time: when a rank fails, the others wait for it in a collective, and its error is the one that explains.
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False
        )
        if not ready:
            names = ", ".join(a._opd_name for a, r in zip(actors, refs, strict=True) if r in pending)
            raise RunError(
                f"{names}: `{method}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
            )
        _result(actors, refs, ready[0], method)
    return [_result(actors, refs, ref, method) for ref in refs]


def first(actors: Sequence[Any], refs: Sequence[Any], method: str, *, timeout_s: float) -> int:
    """Index of a call of `submit` that has ended, waiting for one. Raises: as `call`."""
    import ray

    ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s, fetch_local=False)
    if not ready:
        names = ", ".join(actor._opd_name for actor in actors)
        raise RunError(f"{names}: `{method}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s)")
    _result(actors, refs, ready[0], method)
    return list(refs).index(ready[0])


def _result(actors: Sequence[Any], refs: Sequence[Any], ref: Any, method: str) -> Any:
    import ray

    actor = actors[list(refs).index(ref)]
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except ray.exceptions.RayActorError as error:
        raise WorkerDied(
            actor,
            f"{actor._opd_name}: the worker died during `{method}`: {error}\nits output is under /tmp/ray/session_latest/logs",
        ) from None


def _cause(error: Any) -> Exception:
    """A refusal that we worded ourselves is shown as it is; Ray would wrap the worker's traceback around it."""
    return error.cause if isinstance(error.cause, OpdError | RunError) else error.as_instanceof_cause()
