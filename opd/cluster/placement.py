"""Places for workers on the nodes of a cluster: what each worker needs, and how that is reserved with Ray's placement groups.

All workers of a role make a group, which Ray reserves as a whole; roles that share GPUs make one group together, with a bundle for each
GPU. A worker that is started again gets the place that it had or, if that node is gone, another one that the strategy of its group
allows.
"""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opd.cluster.daemons import convert_ray_errors
from opd.cluster.environment import VISIBLE_GPUS
from opd.cluster.errors import WorkerDied
from opd.errors import RunError

NODE = "ray.io/node-id"
"""Label that Ray gives every node; its value is the node's id."""
LOOK_S = 1.0
"""Seconds between two looks at what we wait for."""
SETTLE_S = 60.0
"""Seconds that we wait for Ray to declare a node dead that does not answer; Ray takes about half a minute."""
LISTED = 6
"""Most workers of a role, and most nodes, that an error names one by one."""
ONE_NODE_S = 15.0
"""Seconds that we wait for a node with room for a whole group before it is divided among several. A node gets room within seconds
after workers have ended there."""
ANSWER_S = 3.0
"""Seconds in which a node that lives has to accept a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedWorker:
    """A worker as its seat knows it, which has this worker alone or with others."""

    name: str
    """The worker's name, as `spawn_worker` gets it."""
    asks: Mapping[str, float]
    """Ray's name of a resource (CPU, GPU, custom ones) -> amount that the worker takes of the first of its bundles."""
    bundles: tuple[int, ...] = (0,)
    """Indices of the seat's bundles whose GPUs the worker computes on."""
    threads: int | None = None
    """Threads with which each process of the worker computes; None: what the worker's environment says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A part of a node for one worker, or for several that share GPUs."""

    workers: tuple[SeatedWorker, ...]
    bundles: tuple[Mapping[str, float], ...]
    """Resource -> amount of each bundle that Ray reserves: one for all resources, or, of shared GPUs, one for each GPU."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> selector for its value on the node, in the language of Ray's label selectors."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(worker.name for worker in self.workers)

    @property
    def asks(self) -> dict[str, float]:
        """Resource -> amount of all bundles."""
        resources = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in resources}

    def fits_node(self, node: Node) -> bool:
        """Return True if `node.has` is enough for this seat, and the node's labels are right."""
        enough = all(node.has.get(name, 0) >= amount for name, amount in self.asks.items())
        return enough and all(matches_selector(node.labels.get(key), selector) for key, selector in self.labels.items())

    def describe_request(self) -> str:
        """Return who asks for what, in words."""
        return f"{join_names(self.names)} {'asks' if len(self.workers) == 1 else 'ask'} for {self}"

    def __str__(self) -> str:
        return format_resources(self.asks, {key: value for key, value in self.labels.items() if key != NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """The workers of a role, or those of several roles that share GPUs."""

    key: str
    """Key of the pipeline that says where these workers go, for errors."""
    strategy: str
    """Ray's strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    seats: tuple[Seat, ...]
    one_node: bool = False
    """True if PACK means one node wherever one has room: the workers exchange weights and gradients all the time."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for seat in self.seats for name in seat.names)

    @property
    def shares_gpus(self) -> bool:
        return any(0 < worker.asks.get("GPU", 0) < 1 for seat in self.seats for worker in seat.workers)

    def combine_seats(self) -> Seat:
        """Return the seat that has all of the group on one node."""
        return Seat(
            workers=tuple(worker for seat in self.seats for worker in seat.workers),
            bundles=tuple(bundle for seat in self.seats for bundle in seat.bundles),
            labels={key: value for seat in self.seats for key, value in seat.labels.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    is_local: bool
    """True if this process is on it."""
    has: Mapping[str, float]
    """Resource -> amount that the node has in all; from `_list_free_nodes`, the amount that is free."""
    labels: Mapping[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return f"{self.address} ({'this one: ' if self.is_local else ''}{format_resources(_drop_internal_resources(self.has), labels)})"


@dataclass(frozen=True, slots=True)
class ReservedSeat:
    """The place that Ray has reserved for one worker."""

    worker: SeatedWorker
    seat: Seat
    group: Any
    """Ray's placement group."""
    first: int
    """Index of the seat's first bundle in the placement group."""

    @property
    def index(self) -> int:
        """Index of the worker's own bundle in the placement group."""
        return self.first + self.worker.bundles[0]

    def build_actor_options(self) -> dict[str, Any]:
        """Return Ray's options for an actor that is started in this place."""
        return self._build_options(self.worker.asks, self.index)

    def _build_options(self, asks: Mapping[str, float], index: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": asks.get("CPU", 0),
            "num_gpus": asks.get("GPU", 0),
            "resources": {name: amount for name, amount in asks.items() if name not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index),
        }

    def build_env(self) -> dict[str, str]:
        """Return the variables that the seat adds to the worker's environment. Raises: RunError, WorkerDied."""
        env = {} if self.worker.threads is None else {"OMP_NUM_THREADS": str(self.worker.threads)}
        return env if len(self.worker.bundles) == 1 else env | {VISIBLE_GPUS: ",".join(self._read_gpu_ids())}

    def _read_gpu_ids(self) -> list[str]:
        """Return Ray's ids of the GPUs of all bundles of the worker. Ray tells them only to who computes in a bundle, and gives a worker
        those of one bundle. Raises: RunError, WorkerDied."""
        import ray

        # The worker is not there yet, so its share is free.
        task = ray.remote(max_retries=0)(_read_own_gpu)
        asks = {"GPU": self.worker.asks["GPU"]}
        options = [self._build_options(asks, self.first + bundle) for bundle in self.worker.bundles]
        try:
            with convert_ray_errors():
                return list(ray.get([task.options(**chosen).remote() for chosen in options], timeout=SETTLE_S))
        except ray.exceptions.GetTimeoutError:
            raise RunError(f"{self.worker.name}: Ray has not said after {SETTLE_S:.0f} s which GPUs it has") from None

    def wait_for_node(self) -> None:
        """Wait until the node of this place accepts connections, or Ray knows that it is gone; for `SETTLE_S` at most.

        As long as Ray does not know that a node is dead, it would start a worker there, which would be dead too. Raises:
        WorkerDied if Ray is gone.
        """
        deadline = time.monotonic() + SETTLE_S
        while (
            (node := _read_bundle_nodes(self.group).get(self.index))
            and not _accepts_connections(node)
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_S)

    def describe_problem(self) -> str:
        """Describe why Ray has no node for this seat now; empty if it has one."""
        return "" if _read_bundle_nodes(self.group).get(self.index) else _describe_shortage(self.seat)


def _read_own_gpu() -> str:
    """Return Ray's id of the GPU of the bundle in which this task runs."""
    import ray

    (gpu,) = ray.get_gpu_ids()
    return str(gpu)


def matches_selector(value: str | None, selector: str) -> bool:
    """Return True if the value of a node's label fits a selector: `x`, `!x`, `in(x, y)` or `!in(x, y)`. `value`: None without label."""
    negated, plain = selector.startswith("!"), selector.removeprefix("!")
    match = re.fullmatch(r"in\((.*)\)", plain)
    values = [value_text.strip() for value_text in match[1].split(",")] if match else [plain]
    return (value in values) != negated


def format_resources(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return resources and labels in words."""
    parts = [f"{amount:g} {name}" for name, amount in sorted(resources.items())]
    return ", ".join([*parts, *(f"label {key}={value}" for key, value in sorted(labels.items()))])


def join_names(names: Sequence[str]) -> str:
    """Return workers' names in words: `trainer rank 0 to 7, rollout worker 0`, where a role has more than `LISTED` in a row."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        role, _, number = name.rpartition(" ")
        numbers.setdefault(role, []).append(int(number)) if number.isdigit() else numbers.setdefault(name, [])
    parts = []
    for role, ids in numbers.items():
        in_row = len(ids) > LISTED and ids == list(range(ids[0], ids[-1] + 1))
        parts += [f"{role} {ids[0]} to {ids[-1]}"] if in_row else [f"{role} {number}" for number in ids] or [role]
    return ", ".join(parts)


def join_nodes(nodes: Sequence[Node]) -> str:
    """Return nodes in words, the first `LISTED` of them one by one."""
    rest = [f"and {len(nodes) - LISTED} more"] if len(nodes) > LISTED else []
    return "; ".join([*map(str, nodes[:LISTED]), *rest])


def list_nodes() -> list[Node]:
    """Return the living nodes of the cluster, first the one on which this process runs. Raises: WorkerDied if Ray is gone."""
    import ray

    with convert_ray_errors():
        own_id, every = ray.get_runtime_context().get_node_id(), ray.nodes()
    live_nodes = [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            is_local=node["NodeID"] == own_id,
            has=node["Resources"],
            labels=node["Labels"],
        )
        for node in every
        if node["Alive"]
    ]
    return sorted(live_nodes, key=lambda node: (not node.is_local, node.address))


def reserve_seats(groups: Sequence[WorkerGroup], *, timeout_s: float) -> dict[str, str]:
    """Reserve a place for every worker of this session. Returns worker's name -> id of its node.

    From now on `spawn_worker` starts each worker in its place, also when it is started again. Raises: RunError past the deadline,
    which says which worker has no place and what the nodes have; WorkerDied if Ray is gone.
    """
    from opd.cluster.session import get_current_watch

    watch, deadline = get_current_watch(), time.monotonic() + timeout_s
    seats: list[ReservedSeat] = []
    try:
        for group in groups:
            seats += _reserve_group(group, deadline, timeout_s)
    except RunError as error:
        if not isinstance(error, WorkerDied):  # if Ray is gone there is nothing to remove
            _remove_placement_groups([seat.group for seat in seats])
        raise
    watch.seats |= {seat.worker.name: seat for seat in seats}
    return {seat.worker.name: _read_bundle_nodes(seat.group).get(seat.index, "") for seat in seats}


def _reserve_group(group: WorkerGroup, deadline: float, timeout_s: float) -> list[ReservedSeat]:
    """Reserve the places of a group. Raises: RunError, WorkerDied; then nothing of the group is reserved."""
    if group.one_node and group.strategy == "PACK" and len(group.seats) > 1:
        # Ray's PACK fills the node that has least room first, and would divide a group that another node could hold.
        combined = group.combine_seats()
        if any(combined.fits_node(node) for node in list_nodes()):
            reserved = _create_placement_group(group.seats, "STRICT_PACK")
            if _wait_until_reserved(reserved, min(deadline, time.monotonic() + ONE_NODE_S)):
                return _number_seats(group.seats, reserved)
            _remove_placement_groups([reserved])
    # All bundles of a seat are on one node, which only STRICT_PACK promises.
    divided = any(len(seat.bundles) > 1 for seat in group.seats) and group.strategy != "STRICT_PACK"
    blocks = [(seat,) for seat in group.seats] if divided else [group.seats]
    strategy = "STRICT_PACK" if divided else group.strategy
    reservations = [(block, _create_placement_group(block, strategy)) for block in blocks]
    for _, reserved in reservations:
        if not _wait_until_reserved(reserved, deadline):
            _remove_placement_groups([reserved for _, reserved in reservations])
            raise _make_shortage_error(group, timeout_s)
    return [seat for block, reserved in reservations for seat in _number_seats(block, reserved)]


def _create_placement_group(seats: Sequence[Seat], strategy: str) -> Any:
    """Ask Ray for the bundles of some seats. Returns the placement group, which Ray may not have reserved yet. Raises: WorkerDied."""
    from ray.util.placement_group import placement_group

    bundles = [dict(bundle) for seat in seats for bundle in seat.bundles]
    # Ray does not strip the values of `in(a, b)`: it would look for a label ` b`, with the space.
    selectors = [
        {key: value.replace(" ", "") for key, value in seat.labels.items()} for seat in seats for _ in seat.bundles
    ]
    with convert_ray_errors():
        return placement_group(bundles, strategy, bundle_label_selector=selectors)


def _number_seats(seats: Sequence[Seat], reserved: Any) -> list[ReservedSeat]:
    """Return the place of every worker of these seats, whose bundles a placement group has one after the other."""
    firsts = itertools.accumulate((len(seat.bundles) for seat in seats), initial=0)
    return [
        ReservedSeat(worker, seat, reserved, first)
        for seat, first in zip(seats, firsts, strict=False)
        for worker in seat.workers
    ]


def _wait_until_reserved(reserved: Any, deadline: float) -> bool:
    """Wait until Ray has reserved a placement group. Returns False past the deadline. Raises: WorkerDied."""
    while True:
        with convert_ray_errors():
            if reserved.wait(LOOK_S):
                return True
        if time.monotonic() > deadline:
            return False


def _remove_placement_groups(groups: Sequence[Any]) -> None:
    from ray.util.placement_group import remove_placement_group

    for reserved in {group.id: group for group in groups}.values():
        remove_placement_group(reserved)


def _make_shortage_error(group: WorkerGroup, timeout_s: float) -> RunError:
    """Return the error for a group that Ray had no place for. Raises: WorkerDied if Ray is gone."""
    free = _list_free_nodes()
    unplaced = next((seat for seat in group.seats if not any(seat.fits_node(node) for node in free)), group.seats[0])
    return RunError(
        f"{group.key}: no place for {join_names(group.names)} ({group.strategy.lower()}) after {timeout_s:.0f} s "
        f"(cluster.start_timeout_s): {_describe_shortage(unplaced)}"
    )


def _describe_shortage(seat: Seat) -> str:
    """Describe what a worker asks for, and what every node has in all and has free."""
    free = {node.id: _drop_internal_resources(node.has) for node in _list_free_nodes()}
    node_texts = [f"{node}, free: {format_resources(free.get(node.id, {}), {}) or 'nothing'}" for node in list_nodes()]
    return f"{seat.describe_request()}; nodes: {'; '.join(node_texts)}"


def _list_free_nodes() -> list[Node]:
    """Return the living nodes, where `has` is what each has free now."""
    from ray._private.state import available_resources_per_node

    with convert_ray_errors():
        free = available_resources_per_node()
    return [replace(node, has=free.get(node.id, {})) for node in list_nodes()]


def _read_bundle_nodes(reserved: Any) -> dict[int, str]:
    """Return index of a bundle -> id of its node, for a placement group. A bundle without a node is missing or has an empty id."""
    from ray.util.placement_group import placement_group_table

    with convert_ray_errors():
        node_ids: dict[int, str] = placement_group_table(reserved)["bundles_to_node_id"]
    return node_ids


def _accepts_connections(node_id: str) -> bool:
    """Return True if Ray's process on a node accepts a connection; False if Ray knows that the node is dead."""
    import ray

    with convert_ray_errors():
        info = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if info is None or not info["Alive"]:
        return False
    try:
        socket.create_connection((info["NodeManagerAddress"], info["NodeManagerPort"]), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _drop_internal_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources without those that Ray adds itself: a node's name, its memory, and entries of placement groups."""
    skip = ("memory", "object_store_memory")
    return {name: n for name, n in resources.items() if name not in skip and ":" not in name and "_group_" not in name}
