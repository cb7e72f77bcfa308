"""Values in Ray's object store, and calls that are made when somebody fetches the answer."""

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
    """Return a handle to a value that came from outside the cluster. Raises: WorkerDied if Ray is gone."""
    import ray

    with convert_ray_errors():
        return ray.put(value)


def fetch_object(handle: Any) -> Any:
    """Return the value behind a handle, read without a copy where it is an array. Raises: WorkerDied if Ray is gone."""
    import ray

    with convert_ray_errors():
        return ray.get(handle)


def copy_on(node: str, handle: Any) -> Any:
    """Return a handle to a copy of a value, which a node fetches into its object store and has for others; returns at once.

    It is another value than the first, because Ray would fetch that one from any node that has it. A process that Ray keeps on the
    node for such work makes the copy, while the workers do theirs. Whoever is given a copy that cannot be made gets the error
    of a value that is lost. `node`: its id. Raises: WorkerDied if Ray is gone.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    with convert_ray_errors():
        return _copy_task().options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(handle)


@cache
def _copy_task() -> Any:
    """Return the call that makes a copy. There is one, because Ray tells all nodes of each that is made."""
    import ray

    return ray.remote(_return_value)


def _return_value(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value that `put_object` took; may travel to workers."""

    handle: Any

    def fetch(self) -> Any:
        """Return the value, for code that knows nothing of Ray. Raises: WorkerDied if Ray is gone."""
        return fetch_object(self.handle)


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[R]):
    """A call that a worker gets whenever somebody fetches the answer; may travel to other workers.

    `Worker.on_demand` makes it.
    """

    actor: Any
    """Ray's handle to the worker, which may travel where a `Worker` may not."""
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float

    def fetch(self) -> R:
        """Return the answer, for code that knows nothing of Ray.

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
