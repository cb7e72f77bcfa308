"""Places for workers on the nodes of a cluster: what each worker needs, and how that is reserved with Ray's placement groups.

All workers of a role make a group, which Ray reserves as a whole. A worker that is started again gets the place that it had or, if
that node is gone, another one that the strategy of its group allows.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opd.cluster.daemons import convert_ray_errors
from opd.cluster.errors import WorkerDied
from opd.errors import RunError

NODE = "ray.io/node-id"
"""Label that Ray gives every node; its value is the node's id."""
LOOK_S = 1.0
"""Seconds between two looks at what we wait for."""
SETTLE_S = 60.0
"""Seconds that we wait for Ray to declare a node dead that does not answer; Ray takes about half a minute."""
ANSWER_S = 3.0
"""Seconds in which a node that lives has to accept a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The resources and labels that one worker needs of a node."""

    worker: str
    """The worker's name, as `spawn_worker` gets it."""
    asks: Mapping[str, float]
    """Ray's name of a resource (CPU, GPU, custom ones) -> amount."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> selector for its value on the node, in the language of Ray's label selectors."""
    threads: int | None = None
    """Threads with which each process of the worker computes; None: what the worker's environment says."""

    def fits_node(self, node: Node) -> bool:
        """Return True if `node.has` is enough for this worker, and the node's labels are right."""
        enough = all(node.has.get(name, 0) >= amount for name, amount in self.asks.items())
        return enough and all(matches_selector(node.labels.get(key), selector) for key, selector in self.labels.items())

    def __str__(self) -> str:
        return format_resources(self.asks, {key: value for key, value in self.labels.items() if key != NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """The workers of a role."""

    key: str
    """Key of the pipeline that says where these workers go, for errors."""
    strategy: str
    """Ray's strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    is_local: bool
    """Whether this process is on it."""
    has: Mapping[str, float]
    """Resource -> amount that the node has in all; from `_list_free_nodes`, the amount that is free."""
    labels: Mapping[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return f"{self.address} ({'this one: ' if self.is_local else ''}{format_resources(_drop_internal_resources(self.has), labels)})"


@dataclass(frozen=True, slots=True)
class ReservedSeat:
    """A seat with the place that Ray has reserved for it."""

    seat: Seat
    group: Any
    """Ray's placement group."""
    index: int
    """Index of the seat's bundle in the placement group."""

    def build_actor_options(self) -> dict[str, Any]:
        """Return Ray's options for an actor that is started in this place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {name: amount for name, amount in self.seat.asks.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.seat.asks["CPU"],
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index),
        }

    def build_env(self) -> dict[str, str]:
        """Return the variables that the seat adds to the worker's environment."""
        return {} if self.seat.threads is None else {"OMP_NUM_THREADS": str(self.seat.threads)}

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
    """Reserve a place for every worker of this session. Returns worker's name -> address of its node.

    From now on `spawn_worker` starts each worker in its place, also when it is started again. Raises: RunError past the deadline,
    which says which worker has no place and what the nodes have; WorkerDied if Ray is gone.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    from opd.cluster.session import get_current_watch

    watch, deadline = get_current_watch(), time.monotonic() + timeout_s
    reservations = []
    with convert_ray_errors():
        for group in groups:
            bundles = [dict(seat.asks) for seat in group.seats]
            # Ray does not strip the values of `in(a, b)`: it would look for a label ` b`, with the space.
            selectors = [{key: value.replace(" ", "") for key, value in seat.labels.items()} for seat in group.seats]
            reservations.append((group, placement_group(bundles, group.strategy, bundle_label_selector=selectors)))
    try:
        for group, reserved in reservations:
            _wait_for_group(group, reserved, deadline, timeout_s)
    except RunError as error:
        if not isinstance(error, WorkerDied):  # if Ray is gone there is nothing to remove
            for _, reserved in reservations:
                remove_placement_group(reserved)
        raise
    watch.seats |= {
        seat.worker: ReservedSeat(seat, reserved, index)
        for group, reserved in reservations
        for index, seat in enumerate(group.seats)
    }
    address = {node.id: node.address for node in list_nodes()}
    addresses: dict[str, str] = {}
    for group, reserved in reservations:
        by_index = _read_bundle_nodes(reserved)
        addresses |= {seat.worker: address.get(by_index[index], "") for index, seat in enumerate(group.seats)}
    return addresses


def _wait_for_group(group: WorkerGroup, reserved: Any, deadline: float, timeout_s: float) -> None:
    """Wait until Ray has a place for a whole group. Raises: RunError, WorkerDied."""
    while True:
        with convert_ray_errors():
            if reserved.wait(LOOK_S):
                return
        if time.monotonic() > deadline:
            names = ", ".join(seat.worker for seat in group.seats)
            free = _list_free_nodes()
            unplaced = next(
                (seat for seat in group.seats if not any(seat.fits_node(node) for node in free)), group.seats[0]
            )
            raise RunError(
                f"{group.key}: no place for {names} ({group.strategy.lower()}) after {timeout_s:.0f} s "
                f"(cluster.start_timeout_s): {_describe_shortage(unplaced)}"
            )


def _describe_shortage(seat: Seat) -> str:
    """Describe what a worker asks for, and what every node has in all and has free."""
    free = {node.id: _drop_internal_resources(node.has) for node in _list_free_nodes()}
    node_texts = [f"{node}, free: {format_resources(free.get(node.id, {}), {}) or 'nothing'}" for node in list_nodes()]
    return f"{seat.worker} asks for {seat}; nodes: {'; '.join(node_texts)}"


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
    own = ("memory", "object_store_memory")
    return {name: n for name, n in resources.items() if name not in own and ":" not in name and "_group_" not in name}
