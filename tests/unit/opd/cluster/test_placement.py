"""What a worker asks of a node, and whether a node has it."""

from __future__ import annotations

import pytest

from opd.cluster import Node, Seat
from opd.cluster.placement import NODE, matches

HERE = Node(
    id="a1", address="10.0.0.1", here=True, has={"CPU": 2, "memory": 5e9, "node:10.0.0.1": 1, "GPU": 0.5}, labels={"pool": "x", NODE: "a1"}
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
    assert matches(value, wanted) is is_so


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
    assert Seat(worker="w", asks=asks, labels=labels).fits(HERE) is fits


def test_nodes_and_seats_in_words() -> None:
    assert str(HERE) == "10.0.0.1 (this one: 2 CPU, 0.5 GPU, label pool=x)"
    assert str(Seat(worker="w", asks={"CPU": 1.0}, labels={"pool": "x", NODE: "a1"})) == "1 CPU, label pool=x"
