"""Workers, which are objects in processes of their own, and the handles through which their methods are called."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from opd.cluster.daemons import convert_ray_errors, refuse_dead_ray
from opd.cluster.objects import RemoteCall
from opd.cluster.pulse import Pulse, PulsingWorker
from opd.cluster.session import get_current_watch
from opd.cluster.waiting import wait_for_all
from opd.cluster.watching import WorkerWatch

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")


class Worker(Generic[T]):
    """A handle to an object of class T in a process of its own; `spawn_worker` makes it.

    A method is called by passing the function: `worker.submit(TrainerRank.export, path)`. So a type checker knows its arguments
    and its result.
    """

    def __init__(self, actor: Any, name: str, pulse: Pulse, watch: WorkerWatch) -> None:
        self.name = name
        """The worker's name in errors, such as `trainer rank 0`."""
        self.pulse = pulse
        """The driver's knowledge of the worker's pulse."""
        self.watch = watch
        """The watch of its session."""
        self._actor = actor

    def submit(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Call a method, and return at once. A worker carries out its calls one after the other, in order.

        If an argument is a handle (from `put_object`, or `Pending.handle`), the method gets the value behind it. Raises:
        WorkerDied if Ray is gone.
        """
        return self._submit(method.__name__, *args, **kwargs)

    def submit_pair(
        self, method: Callable[Concatenate[T, P], tuple[A, B]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Pending[A], Any]:
        """Call a method that returns a pair, and return at once: the first value to come, and a handle to the second.

        They come at the same time, but the second, which may be large, comes to this process only if its handle is fetched. Raises:
        WorkerDied if Ray is gone.
        """
        refuse_dead_ray()
        with convert_ray_errors():
            first, second = getattr(self._actor, method.__name__).options(num_returns=2).remote(*args, **kwargs)
        return Pending(self, method.__name__, first), second

    def on_demand(
        self, timeout_s: float, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[R]:
        """Return a call that is made when somebody fetches its answer, here or in another worker; it then has `timeout_s` seconds."""
        return RemoteCall(self._actor, method.__name__, args, kwargs, timeout_s)

    def node_address(self, *, timeout_s: float) -> str:
        """Return the address at which other machines of the cluster reach the worker's machine.

        Raises: what `wait_for_all` raises.
        """
        address: str = self._submit(PulsingWorker.node_address.__name__).wait_for_result(timeout_s=timeout_s)
        return address

    def node_id(self) -> Pending[str]:
        """Ask for Ray's id of the node on which the worker runs; all workers of a node share its object store."""
        return self._submit(PulsingWorker.node_id.__name__)

    def kill(self) -> None:
        """End the worker at once. Whoever waits for one of its calls gets WorkerDied.

        If its first beat has not come yet, its process id is not known. Then only Ray ends it, a moment later, and it may answer
        until then.
        """
        import ray

        was_watched = self.watch.stop_watching(self)
        ray.kill(self._actor)
        if was_watched and self.pulse.last_message:
            self.pulse.kill_process()

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        refuse_dead_ray()
        with convert_ray_errors():
            return Pending(self, method, getattr(self._actor, method).remote(*args, **kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class Pending(Generic[R]):
    """A call that was submitted, with the answer to come."""

    worker: Worker[Any]
    method: str
    handle: Any
    """Handle to the answer, like one from `put_object`."""

    def wait_for_result(self, *, timeout_s: float) -> R:
        """Wait for the answer. Raises: what `wait_for_all` raises."""
        (answer,) = wait_for_all([self], timeout_s=timeout_s)
        return answer


def spawn_worker(cls: type[T], *args: Any, name: str, env: Mapping[str, str], gpus: float = 0) -> Worker[T]:
    """Start `cls(*args)` in a process of its own. Returns without waiting for the constructor; the first call waits for it.

    The worker goes to the place that `reserve_seats` has reserved for its name. If the node there has just died, this first waits
    until Ray knows that. Without a reserved place Ray chooses a node with room. Raises: WorkerDied if Ray is gone.
    """
    import ray

    watch = get_current_watch()
    refuse_dead_ray()
    pulse = Pulse(f"pulse {secrets.token_hex(8)}".encode())
    beating = type(cls.__name__, (PulsingWorker, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    # Ray must not restart the worker itself, because it could not give the weights back to it.
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
    seat = watch.seats.get(name)
    if seat is not None:
        seat.wait_for_node()
        options |= seat.build_actor_options()
        env = {**env, **seat.build_env()}
    options["runtime_env"] = {"env_vars": dict(env)}
    with convert_ray_errors():
        actor = ray.remote(beating).options(**options).remote(pulse.key, *args)
    worker: Worker[T] = Worker(actor, name, pulse, watch)
    watch.add(worker)
    return worker
