"""A worker's demands on a node, whether a node meets them, and whether the node lives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from opd.cluster import Node, Seat, SeatedWorker, placement
from opd.cluster.placement import NODE, ReservedSeat, WorkerGroup, join_names, join_nodes, matches_selector

HERE = Node(
    id="a1", address="10.0.0.1", is_local=True, has={"CPU": 2, "memory": 5e9, "node:10.0.0.1": 1, "GPU": 0.5}, labels={"pool": "x", NODE: "a1"}
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "wanted", "is_so"),
    [
        ("x", "x", True),
        ("x", "y", False),
        (None, "y", False),
        ("x", "!x", False),
        ("x", "!y", True),
        (None, "!y", True),
        ("x", "in(x, y)", True),
        ("y", "in(x,y)", True),
        ("z", "in(x, y)", False),
        (None, "in(x)", False),
        ("x", "!in(x, y)", False),
        (None, "!in(x, y)", True),
    ],
)
def test_labels_are_selected_as_ray_does(value: str | None, wanted: str, is_so: bool) -> None:
    assert matches_selector(value, wanted) is is_so


def seat(asks: dict[str, float], labels: dict[str, str] | None = None) -> Seat:
    return Seat(workers=(SeatedWorker(name="w", asks=asks),), bundles=(asks,), labels=labels or {})


@pytest.mark.parametrize(
    ("asks", "labels", "fits"),
    [
        ({"CPU": 2}, {}, True),
        ({"CPU": 3}, {}, False),
        ({"CPU": 1, "GPU": 0.5}, {"pool": "x"}, True),
        ({"CPU": 1, "disk": 1}, {}, False),
        ({"CPU": 1}, {"pool": "!x"}, False),
        ({"CPU": 1}, {NODE: "b2"}, False),
    ],
)
def test_a_seat_fits_a_node(asks: dict[str, float], labels: dict[str, str], fits: bool) -> None:
    assert seat(asks, labels).fits_node(HERE) is fits


def test_nodes_and_seats_in_words() -> None:
    assert str(HERE) == "10.0.0.1 (this one: 2 CPU, 0.5 GPU, label pool=x)"
    assert str(seat({"CPU": 1.0}, {"pool": "x", NODE: "a1"})) == "1 CPU, label pool=x"
    ranks = [f"trainer rank {rank}" for rank in range(8)]
    assert join_names([*ranks, "teacher worker 0", "comparing worker"]) == (
        "trainer rank 0 to 7, teacher worker 0, comparing worker"
    )
    assert join_names(ranks[:2]) == "trainer rank 0, trainer rank 1"
    assert join_nodes([HERE] * 9) == "; ".join([str(HERE)] * 6) + "; and 3 more"


def test_a_seat_of_workers_that_share_gpus_asks_for_all_of_them() -> None:
    """Two GPUs: a rank on each, and an engine on both."""
    ranks = [SeatedWorker(name=f"rank {n}", asks={"CPU": 1, "GPU": 0.5}, bundles=(n,)) for n in (0, 1)]
    engine = SeatedWorker(name="engine 0", asks={"CPU": 4, "GPU": 0.5}, bundles=(0, 1))
    both = Seat(workers=(*ranks, engine), bundles=({"CPU": 5, "GPU": 1}, {"CPU": 1, "GPU": 1}))
    assert both.asks == {"CPU": 6, "GPU": 2}
    assert both.describe_request() == "rank 0, rank 1, engine 0 ask for 6 CPU, 2 GPU"
    group = WorkerGroup(key="k", strategy="PACK", seats=(both, both))
    assert group.shares_gpus and group.combine_seats().asks == {"CPU": 12, "GPU": 4}
    assert not WorkerGroup(key="k", strategy="PACK", seats=(seat({"GPU": 2}),)).shares_gpus
    second = ReservedSeat(ranks[1], both, group="group", first=2)
    assert second.index == 3, "of the second seat's bundles"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stand in for Ray: the node of a worker's place, and whether it lives; a door where that node answers."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        known = SimpleNamespace(node="a1", alive=True, door=door, slept=[], then=lambda: None)
        address, port = door.getsockname()
        at = {"NodeManagerAddress": address, "NodeManagerPort": port}
        monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "a1", "Alive": known.alive, **at}])
        monkeypatch.setattr(placement, "_read_bundle_nodes", lambda group: {0: known.node} if known.node else {})

        def sleep(seconds: float) -> None:
            known.slept.append(seconds)
            known.then()

        known.clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0)
        monkeypatch.setattr(placement, "time", known.clock)
        yield known


PLACE = ReservedSeat(seat({"CPU": 1}).workers[0], seat({"CPU": 1}), group="group", first=0)


def test_a_place_on_a_node_that_answers_or_on_none_is_settled(cluster: SimpleNamespace) -> None:
    PLACE.wait_for_node()
    cluster.node = None  # Ray looks for one
    PLACE.wait_for_node()
    assert cluster.slept == []


@pytest.mark.parametrize("knows", [True, False])
def test_a_worker_waits_until_ray_knows_that_its_node_is_gone(cluster: SimpleNamespace, knows: bool) -> None:
    """Check both cases: Ray calls the node dead before it has another one, or still thinks that it lives."""
    cluster.door.close()
    cluster.alive = not knows

    def then() -> None:
        if len(cluster.slept) == 3:
            cluster.node = None

    cluster.then = then
    PLACE.wait_for_node()
    assert len(cluster.slept) == 3


def test_it_does_not_wait_for_ever(cluster: SimpleNamespace) -> None:
    cluster.door.close()
    cluster.clock.monotonic = iter(range(0, 1000, 25)).__next__
    PLACE.wait_for_node()
    assert len(cluster.slept) == 2
