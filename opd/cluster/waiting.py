"""Waiting for workers' answers, with a deadline, and finding out what a failure meant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opd.cluster.daemons import ray_lives, refuse_dead_ray
from opd.cluster.errors import LostValue, WorkerDied, cause, start_error
from opd.cluster.pulse import LOOK_S
from opd.cluster.watching import log_tail
from opd.errors import RunError

if TYPE_CHECKING:
    from opd.cluster.workers import Pending

R = TypeVar("R")

EXPLAIN_S = 10.0
"""After one worker of a group failed, how long to wait for the death of another that may explain it."""


def wait(pending: Sequence[Pending[R]], *, timeout_s: float) -> list[R]:
    """Wait for all answers, and return them in order.

    Raises: a worker's own OpdError or RunError; WorkerDied if one died or Ray is gone, LostValue among these if one could not
    begin because what it was given is lost; RunError with the workers' names past the deadline.
    """
    left, deadline = list(pending), time.monotonic() + timeout_s
    while left:
        # One at a time: when a rank fails, the others wait for it in a collective, and its error explains theirs.
        ready = _next_of(pending, left, deadline, timeout_s)
        left.remove(ready)
        try:
            _answer(ready)
        except WorkerDied:
            raise
        except Exception:
            _raise_a_death(left)
            raise
    return [_answer(one) for one in pending]


def first(pending: Sequence[Pending[Any]], *, timeout_s: float, since: float | None = None) -> int:
    """Wait until one answer has come, and return its index. The deadline counts from `since` (`time.monotonic`), else from now.

    Raises: what `wait` raises.
    """
    began = time.monotonic() if since is None else since
    ready = _next_of(pending, pending, began + timeout_s, timeout_s)
    _answer(ready)
    return list(pending).index(ready)


def _next_of(asked: Sequence[Pending[R]], left: Sequence[Pending[R]], deadline: float, timeout_s: float) -> Pending[R]:
    """Wait until one of `left` has its answer, and return it; `asked` are all calls that were made together.

    Raises: RunError past the deadline, WorkerDied if Ray is gone.
    """
    import ray

    method = left[0].method
    while True:
        left_s = deadline - time.monotonic()
        handles = [one.handle for one in left]
        with ray_lives():
            ready, _ = ray.wait(handles, num_returns=1, timeout=max(0.0, min(LOOK_S, left_s)), fetch_local=False)
        if ready:
            return left[handles.index(ready[0])]
        if left_s <= 0:
            names = ", ".join(one.worker.name for one in asked)
            raise RunError(
                f"{names}: `{method}` took longer than {timeout_s:.0f} s (cluster.phase_timeout_s / start_timeout_s)"
            )
        refuse_dead_ray()
        left[0].worker.watch.end_silent(method)


def _answer(pending: Pending[R]) -> R:
    """Read an answer that has come. Raises: what `wait` raises."""
    import ray

    try:
        with ray_lives():
            answer: R = ray.get(pending.handle)
            return answer
    except ray.exceptions.RayTaskError as error:
        lost = _lost_argument(error.cause)
        if lost:
            raise LostValue(f"{pending.worker.name}: `{pending.method}` was {lost}") from None
        raise cause(error) from None
    except LostValue as error:
        pending.worker.kill()  # it may live, and another one is about to take its place
        raise WorkerDied(f"{pending.worker.name}: {error} (the answer to `{pending.method}`)", pending.worker) from None
    except ray.exceptions.RayActorError as error:
        raise _death(pending, error) from None


def _lost_argument(found: Any) -> str:
    """Which argument a method could not be given, so that it did not begin; empty if an error is the method's own."""
    import ray

    known = ray.exceptions
    if isinstance(found, known.RayActorError):
        return f"to get the answer of a worker that died: {found}"
    # What it was given lay on a node that died, or was to be copied by a process that is gone.
    gone = (known.WorkerCrashedError, known.NodeDiedError, known.TaskUnschedulableError, known.OutOfMemoryError)
    return "given a value that is lost" if isinstance(found, (known.ObjectLostError, *gone)) else ""


def _death(pending: Pending[Any], error: Any) -> WorkerDied:
    """The error that says which worker died during which method, and why, as far as we know."""
    worker = pending.worker
    last_words = log_tail(worker.pulse) if worker.watch.forget(worker) else ""
    found = worker.pulse.ended or f"the worker died during `{pending.method}`: {str(error).strip()}{last_words}"
    return WorkerDied(f"{worker.name}: {found}", worker, start_error(error))


def _raise_a_death(pending: Sequence[Pending[Any]]) -> None:
    """Look for a worker's death behind another one's failure. Raises: WorkerDied if one of the pending calls ends so soon.

    A worker that lost its partner fails too, and often first; the partner's death is then the better explanation.
    """
    import ray

    left, deadline = {one.handle: one for one in pending}, time.monotonic() + EXPLAIN_S
    while left and time.monotonic() < deadline:
        ready, _ = ray.wait(list(left), num_returns=1, timeout=deadline - time.monotonic(), fetch_local=False)
        for handle in ready:
            one = left.pop(handle)
            try:
                ray.get(handle)
            except ray.exceptions.RayActorError as error:
                raise _death(one, error) from None
            except ray.exceptions.RayTaskError:
                continue  # it lost its partner too
