"""Functions that wait for workers' answers, with a deadline, and find out what a failure means."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opd.cluster.daemons import convert_ray_errors, refuse_dead_ray
from opd.cluster.errors import LostValue, WorkerDied, parse_start_error, unwrap_task_error
from opd.cluster.pulse import LOOK_S
from opd.cluster.watching import read_log_tail
from opd.errors import RunError

if TYPE_CHECKING:
    from opd.cluster.workers import Pending

R = TypeVar("R")

EXPLAIN_S = 10.0
"""Seconds that we wait, after a worker failed, for the death of another one that may explain the failure."""


def wait_for_all(pending: Sequence[Pending[R]], *, timeout_s: float) -> list[R]:
    """Wait for all answers, and return them in order.

    Raises: a worker's own OpdError or RunError; WorkerDied if a worker died or Ray is gone; its subclass LostValue if a call could
    not begin, because an argument of it is lost; RunError with the workers' names past the deadline.
    """
    open_calls, deadline = list(pending), time.monotonic() + timeout_s
    while open_calls:
        # Answers are read as they come: when a rank fails, the others wait for it in a collective operation. Its error comes
        # first, and explains theirs.
        ready = _wait_next(pending, open_calls, deadline, timeout_s)
        open_calls.remove(ready)
        try:
            _read_answer(ready)
        except WorkerDied:
            raise
        except Exception:
            _raise_partner_death(open_calls)
            raise
    return [_read_answer(call) for call in pending]


def wait_first(pending: Sequence[Pending[Any]], *, timeout_s: float, since: float | None = None) -> int:
    """Wait until one answer has come, and return its index. The deadline counts from `since` (by `time.monotonic`), or from now.

    Raises: what `wait_for_all` raises.
    """
    began = time.monotonic() if since is None else since
    ready = _wait_next(pending, pending, began + timeout_s, timeout_s)
    _read_answer(ready)
    return list(pending).index(ready)


def _wait_next(
    calls: Sequence[Pending[R]], open_calls: Sequence[Pending[R]], deadline: float, timeout_s: float
) -> Pending[R]:
    """Wait until one of `open_calls` has its answer, and return that call. `calls`: all calls that were made together, for errors.

    Raises: RunError past the deadline, WorkerDied if Ray is gone.
    """
    import ray

    method = open_calls[0].method
    while True:
        left_s = deadline - time.monotonic()
        handles = [call.handle for call in open_calls]
        with convert_ray_errors():
            # The answer is not fetched here, because it may be large and meant for another worker.
            ready, _ = ray.wait(handles, num_returns=1, timeout=max(0.0, min(LOOK_S, left_s)), fetch_local=False)
        if ready:
            return open_calls[handles.index(ready[0])]
        if left_s <= 0:
            names = ", ".join(call.worker.name for call in calls)
            raise RunError(
                f"{names}: `{method}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
            )
        refuse_dead_ray()
        open_calls[0].worker.watch.kill_silent_workers(method)


def _read_answer(pending: Pending[R]) -> R:
    """Read an answer that has come. Raises: what `wait_for_all` raises."""
    import ray

    try:
        with convert_ray_errors():
            answer: R = ray.get(pending.handle)
            return answer
    except ray.exceptions.RayTaskError as error:
        loss = _describe_lost_argument(error.cause)
        if loss:
            raise LostValue(f"{pending.worker.name}: `{pending.method}` was {loss}") from None
        raise unwrap_task_error(error) from None
    except LostValue as error:
        pending.worker.kill()  # it may still live, but the caller will replace it
        raise WorkerDied(f"{pending.worker.name}: {error} (the answer to `{pending.method}`)", pending.worker) from None
    except ray.exceptions.RayActorError as error:
        raise _build_death_error(pending, error) from None


def _describe_lost_argument(error: Any) -> str:
    """Describe the lost argument because of which a method did not begin; empty if the method itself raised `error`.

    The text completes "the method was ...".
    """
    import ray

    exceptions = ray.exceptions
    if isinstance(error, exceptions.RayActorError):
        return f"to get the answer of a worker that died: {error}"
    # The argument lay on a node that died, or a process that is gone was to copy it.
    node_errors = (
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.TaskUnschedulableError,
        exceptions.OutOfMemoryError,
    )
    return "given a value that is lost" if isinstance(error, (exceptions.ObjectLostError, *node_errors)) else ""


def _build_death_error(pending: Pending[Any], error: Any) -> WorkerDied:
    """Build the error that says which worker died, during which method and, as far as we know, why."""
    worker = pending.worker
    last_words = read_log_tail(worker.pulse) if worker.watch.stop_watching(worker) else ""
    reason = worker.pulse.kill_reason or f"the worker died during `{pending.method}`: {str(error).strip()}{last_words}"
    return WorkerDied(f"{worker.name}: {reason}", worker, parse_start_error(error))


def _raise_partner_death(pending: Sequence[Pending[Any]]) -> None:
    """Wait up to `EXPLAIN_S` for the death of another worker, after one has failed. Raises: WorkerDied if one of `pending` died.

    If a worker dies, its partners fail too, and often their errors come first. The death is then the better explanation.
    """
    import ray

    open_calls, deadline = {call.handle: call for call in pending}, time.monotonic() + EXPLAIN_S
    while open_calls and time.monotonic() < deadline:
        ready, _ = ray.wait(list(open_calls), num_returns=1, timeout=deadline - time.monotonic(), fetch_local=False)
        for handle in ready:
            call = open_calls.pop(handle)
            try:
                ray.get(handle)
            except ray.exceptions.RayActorError as error:
                raise _build_death_error(call, error) from None
            except ray.exceptions.RayTaskError:
                continue  # this worker failed as well, but did not die
