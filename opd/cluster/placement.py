"""Places for workers on the nodes of a cluster: what each asks for, and reserving it with Ray's placement groups.

A group is all workers of a role. Ray reserves a group as a whole, and a worker that is started again gets the place that it had,
or, if that node is gone, another one that its group allows.
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
"""The label that Ray gives every node: its id."""
LOOK_S = 1.0
SETTLE_S = 60.0
"""How long to wait for Ray to call a node dead that does not answer; it takes half a minute."""
ANSWER_S = 3.0
"""Deadline for a node to take a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The resources and labels that one worker needs of a node."""

    worker: str
    """The worker's name, as `spawn_worker` gets it."""
    asks: Mapping[str, float]
    """Resource, as Ray calls it (CPU, GPU, custom ones) -> how much."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> what the node must have there, as Ray's label selectors say it."""
    threads: int | None = None
    """Threads that each process of the worker computes with; None: as it is started."""

    def fits_node(self, node: Node) -> bool:
        """Return True if the node, with nothing on it, has room for this worker."""
        enough = all(node.has.get(name, 0) >= amount for name, amount in self.asks.items())
        return enough and all(matches_selector(node.labels.get(key), selector) for key, selector in self.labels.items())

    def __str__(self) -> str:
        return format_resources(self.asks, {key: value for key, value in self.labels.items() if key != NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """The workers of a role."""

    key: str
    """The pipeline's key that says where they go."""
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
    """Resource -> how much of it the node has in all, whoever uses it now."""
    labels: Mapping[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return f"{self.address} ({'this one: ' if self.is_local else ''}{format_resources(_drop_internal_resources(self.has), labels)})"


@dataclass(frozen=True, slots=True)
class ReservedSeat:
    """A reserved seat."""

    seat: Seat
    group: Any
    """Ray's placement group."""
    index: int
    """Which bundle of the group it is."""

    def build_actor_options(self) -> dict[str, Any]:
        """Return the options of an actor that goes there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {name: amount for name, amount in self.seat.asks.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.seat.asks["CPU"],
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index),
        }

    def build_env(self) -> dict[str, str]:
        """Return the variables that its seat adds to the worker's environment."""
        return {} if self.seat.threads is None else {"OMP_NUM_THREADS": str(self.seat.threads)}

    def wait_for_node(self) -> None:
        """Return once the node of this place takes connections, or Ray knows that it is gone, at the latest after `SETTLE_S`.

        Until Ray knows, it would start a worker on the dead node, and then call that one dead too. Raises: WorkerDied if Ray is
        gone.
        """
        deadline = time.monotonic() + SETTLE_S
        while (
            (node := _read_bundle_nodes(self.group).get(self.index))
            and not _accepts_connections(node)
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_S)

    def describe_problem(self) -> str:
        """Describe why Ray has no node for it now; empty if it has one."""
        return "" if _read_bundle_nodes(self.group).get(self.index) else _describe_shortage(self.seat)


def matches_selector(value: str | None, selector: str) -> bool:
    """Return True if a node's label (None: it has none) is what a selector wants, by the rules of Ray."""
    negated, plain = selector.startswith("!"), selector.removeprefix("!")
    match = re.fullmatch(r"in\((.*)\)", plain)
    values = [value_text.strip() for value_text in match[1].split(",")] if match else [plain]
    return (value in values) != negated


def format_resources(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return resources and labels in words."""
    parts = [f"{amount:g} {name}" for name, amount in sorted(resources.items())]
    return ", ".join([*parts, *(f"label {key}={value}" for key, value in sorted(labels.items()))])


def list_nodes() -> list[Node]:
    """Return the nodes of the cluster that live, this process's first. Raises: WorkerDied if Ray is gone."""
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
    """Reserve a place for every worker of this session. Returns worker -> address of its node.

    From now on `spawn_worker` puts each there, also when it is started again. Raises: RunError past the deadline, which says who has no
    place, and what the nodes have; WorkerDied if Ray is gone.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    from opd.cluster.session import get_current_watch

    watch, deadline = get_current_watch(), time.monotonic() + timeout_s
    reservations = []
    with convert_ray_errors():
        for group in groups:
            bundles = [dict(seat.asks) for seat in group.seats]
            # Ray takes `in(a, b)`, and then looks for the label ` b`.
            selectors = [{key: value.replace(" ", "") for key, value in seat.labels.items()} for seat in group.seats]
            reservations.append((group, placement_group(bundles, group.strategy, bundle_label_selector=selectors)))
    try:
        for group, reserved in reservations:
            _wait_for_group(group, reserved, deadline, timeout_s)
    except RunError as error:
        for _, reserved in () if isinstance(error, WorkerDied) else reservations:
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
    """Describe what a worker asks for, and what nodes have and have free."""
    free = {node.id: _drop_internal_resources(node.has) for node in _list_free_nodes()}
    node_texts = [f"{node}, free: {format_resources(free.get(node.id, {}), {}) or 'nothing'}" for node in list_nodes()]
    return f"{seat.worker} asks for {seat}; nodes: {'; '.join(node_texts)}"


def _list_free_nodes() -> list[Node]:
    """Return the nodes with what they have free now."""
    from ray._private.state import available_resources_per_node

    with convert_ray_errors():
        free = available_resources_per_node()
    return [replace(node, has=free.get(node.id, {})) for node in list_nodes()]


def _read_bundle_nodes(reserved: Any) -> dict[int, str]:
    """Return bundle -> id of its node; empty while Ray has none for it."""
    from ray.util.placement_group import placement_group_table

    with convert_ray_errors():
        node_ids: dict[int, str] = placement_group_table(reserved)["bundles_to_node_id"]
    return node_ids


def _accepts_connections(node_id: str) -> bool:
    """Return True if Ray's process on a node takes a connection."""
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
    """Return the resources without those that Ray counts for itself: a node's own name and memory, and what groups have taken."""
    own = ("memory", "object_store_memory")
    return {name: n for name, n in resources.items() if name not in own and ":" not in name and "_group_" not in name}
