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

from opd.cluster.daemons import ray_lives
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
    """What one worker asks of a node."""

    worker: str
    """The worker's name, as `spawn` gets it."""
    asks: Mapping[str, float]
    """Resource, as Ray calls it (CPU, GPU, custom ones) -> how much."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> what the node must have there, as Ray's label selectors say it."""
    threads: int | None = None
    """Threads that each process of the worker computes with; None: as it is started."""

    def fits(self, node: Node) -> bool:
        """Whether the node, with nobody on it, can have this worker."""
        enough = all(node.has.get(name, 0) >= amount for name, amount in self.asks.items())
        return enough and all(matches(node.labels.get(key), wanted) for key, wanted in self.labels.items())

    def __str__(self) -> str:
        return shown(self.asks, {key: value for key, value in self.labels.items() if key != NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
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
    here: bool
    """Whether this process is on it."""
    has: Mapping[str, float]
    """Resource -> how much of it the node has in all, whoever uses it now."""
    labels: Mapping[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return f"{self.address} ({'this one: ' if self.here else ''}{shown(_amounts(self.has), labels)})"


@dataclass(frozen=True, slots=True)
class Place:
    """A reserved seat."""

    seat: Seat
    group: Any
    """Ray's placement group."""
    index: int
    """Which bundle of the group it is."""

    def options(self) -> dict[str, Any]:
        """The options of an actor that goes there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {name: amount for name, amount in self.seat.asks.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.seat.asks["CPU"],
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index),
        }

    def env(self) -> dict[str, str]:
        """What its seat adds to the worker's environment."""
        return {} if self.seat.threads is None else {"OMP_NUM_THREADS": str(self.seat.threads)}

    def settle(self) -> None:
        """Return once the node of this place takes connections, or Ray knows that it is gone, at the latest after `SETTLE_S`.

        Until Ray knows, it would start a worker on the dead node, and then call that one dead too. Raises: WorkerDied if Ray is
        gone.
        """
        deadline = time.monotonic() + SETTLE_S
        while (node := _nodes_of(self.group).get(self.index)) and not _answers(node) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def problem(self) -> str:
        """Why Ray has no node for it now; empty if it has."""
        return "" if _nodes_of(self.group).get(self.index) else _nowhere(self.seat)


def matches(value: str | None, wanted: str) -> bool:
    """Whether a node's label, None if it has none, is what a selector wants, by the rules of Ray."""
    negated, plain = wanted.startswith("!"), wanted.removeprefix("!")
    several = re.fullmatch(r"in\((.*)\)", plain)
    values = [one.strip() for one in several[1].split(",")] if several else [plain]
    return (value in values) != negated


def shown(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Resources and labels in words."""
    words = [f"{amount:g} {name}" for name, amount in sorted(resources.items())]
    return ", ".join([*words, *(f"label {key}={value}" for key, value in sorted(labels.items()))])


def nodes() -> list[Node]:
    """The nodes of the cluster that live, this process's first. Raises: WorkerDied if Ray is gone."""
    import ray

    with ray_lives():
        here, every = ray.get_runtime_context().get_node_id(), ray.nodes()
    found = [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            here=node["NodeID"] == here,
            has=node["Resources"],
            labels=node["Labels"],
        )
        for node in every
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (not node.here, node.address))


def reserve(groups: Sequence[Group], *, timeout_s: float) -> dict[str, str]:
    """Reserve a place for every worker of this session. Returns worker -> address of its node.

    From now on `spawn` puts each there, also when it is started again. Raises: RunError past the deadline, which says who has no
    place, and what the nodes have; WorkerDied if Ray is gone.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    from opd.cluster.session import current_watch

    watch, deadline = current_watch(), time.monotonic() + timeout_s
    asked = []
    with ray_lives():
        for group in groups:
            bundles = [dict(seat.asks) for seat in group.seats]
            # Ray takes `in(a, b)`, and then looks for the label ` b`.
            selectors = [{key: value.replace(" ", "") for key, value in seat.labels.items()} for seat in group.seats]
            asked.append((group, placement_group(bundles, group.strategy, bundle_label_selector=selectors)))
    try:
        for group, reserved in asked:
            _wait(group, reserved, deadline, timeout_s)
    except RunError as error:
        for _, reserved in () if isinstance(error, WorkerDied) else asked:
            remove_placement_group(reserved)
        raise
    watch.places |= {
        seat.worker: Place(seat, reserved, index) for group, reserved in asked for index, seat in enumerate(group.seats)
    }
    address = {node.id: node.address for node in nodes()}
    found: dict[str, str] = {}
    for group, reserved in asked:
        by_index = _nodes_of(reserved)
        found |= {seat.worker: address.get(by_index[index], "") for index, seat in enumerate(group.seats)}
    return found


def _wait(group: Group, reserved: Any, deadline: float, timeout_s: float) -> None:
    """Wait until Ray has a place for a whole group. Raises: RunError, WorkerDied."""
    while True:
        with ray_lives():
            if reserved.wait(LOOK_S):
                return
        if time.monotonic() > deadline:
            names = ", ".join(seat.worker for seat in group.seats)
            free = _free()
            stuck = next((seat for seat in group.seats if not any(seat.fits(node) for node in free)), group.seats[0])
            raise RunError(
                f"{group.key}: no place for {names} ({group.strategy.lower()}) after {timeout_s:.0f} s "
                f"(cluster.start_timeout_s): {_nowhere(stuck)}"
            )


def _nowhere(seat: Seat) -> str:
    """What a worker asks for, and what nodes have and have free."""
    free = {node.id: _amounts(node.has) for node in _free()}
    told = [f"{node}, free: {shown(free.get(node.id, {}), {}) or 'nothing'}" for node in nodes()]
    return f"{seat.worker} asks for {seat}; nodes: {'; '.join(told)}"


def _free() -> list[Node]:
    """The nodes with what they have free now."""
    from ray._private.state import available_resources_per_node

    with ray_lives():
        free = available_resources_per_node()
    return [replace(node, has=free.get(node.id, {})) for node in nodes()]


def _nodes_of(reserved: Any) -> dict[int, str]:
    """Bundle -> id of its node; empty while Ray has none for it."""
    from ray.util.placement_group import placement_group_table

    with ray_lives():
        found: dict[int, str] = placement_group_table(reserved)["bundles_to_node_id"]
    return found


def _answers(node_id: str) -> bool:
    """Whether Ray's process on a node takes a connection."""
    import ray

    with ray_lives():
        found = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if found is None or not found["Alive"]:
        return False
    try:
        socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray counts for itself: a node's own name and memory, and what groups have taken."""
    own = ("memory", "object_store_memory")
    return {name: n for name, n in resources.items() if name not in own and ":" not in name and "_group_" not in name}
