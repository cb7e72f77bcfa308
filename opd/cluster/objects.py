"""Values in Ray's object store, and calls that are only made when somebody fetches their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from opd.cluster.daemons import convert_ray_errors
from opd.cluster.errors import WorkerDied, unwrap_task_error
from opd.errors import RunError

R = TypeVar("R")


def put_object(value: Any) -> Any:
    """Put a value of this process into the object store, and return a handle to it. Raises: WorkerDied if Ray is gone."""
    import ray

    with convert_ray_errors():
        return ray.put(value)


def fetch_object(handle: Any) -> Any:
    """Return the value behind a handle; an array is not copied. Raises: WorkerDied if Ray is gone."""
    import ray

    with convert_ray_errors():
        return ray.get(handle)


def copy_on(node: str, handle: Any) -> Any:
    """Have the node with id `node` copy a value into its object store. Returns a handle to the copy at once.

    Whoever fetches through this handle gets the value from that node; through the original handle Ray would fetch it from any node
    that has it. A process that Ray keeps on the node for such tasks makes the copy, beside the workers. If the copy cannot be made,
    a call that is given the handle fails with the error of a lost value. Raises: WorkerDied if Ray is gone.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    with convert_ray_errors():
        return _copy_task().options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(handle)


@cache
def _copy_task() -> Any:
    """Return Ray's remote function that copies. It is made once, because Ray announces every remote function to all nodes."""
    import ray

    return ray.remote(_return_value)


def _return_value(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A handle of `put_object`, for code that knows nothing of Ray; it may be sent to workers."""

    handle: Any

    def fetch(self) -> Any:
        """Return the value. Raises: WorkerDied if Ray is gone."""
        return fetch_object(self.handle)


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[R]):
    """A call of a worker's method that is made every time somebody fetches its answer; it may be sent to other workers.

    `Worker.on_demand` makes it.
    """

    actor: Any
    """Ray's handle to the worker, which may travel where a `Worker` may not."""
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float

    def fetch(self) -> R:
        """Call the worker, and return its answer.

        Raises: RunError if the worker is dead or misses its deadline; the worker's own OpdError or RunError.
        """
        import ray

        try:
            ref = getattr(self.actor, self.method).remote(*self.args, **self.kwargs)
            answer: R = ray.get(ref, timeout=self.timeout_s)
            return answer
        except ray.exceptions.GetTimeoutError:
            raise RunError(f"`{self.method}` of another worker took longer than {self.timeout_s:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            raise unwrap_task_error(error) from None
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(f"the worker that was asked for `{self.method}` is dead: {error}") from None
