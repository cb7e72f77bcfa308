"""New weights pass from machine to machine: who gets which bucket from where and when, and what a death costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from opd import cluster
from opd.cluster import LostValue, WorkerDied
from opd.errors import RunError
from opd.models.buckets import WeightStream
from opd.rollouts.weight_broadcast import group_by_machine, pass_buckets

TRAINER = "trainer"


@dataclass(eq=False)
class Handle:
    """Stands for a value in the store of a node; it is lost if it could not be copied there."""

    bucket: int
    node: str
    origin: Handle | None = None
    """The value that it is still to be copied from."""
    lost: bool = False
    readers: set[str] = field(default_factory=set)
    """Nodes that have fetched it."""


@dataclass
class World:
    """Nodes with object stores, which may die, and what is sent between them."""

    dead: set[str] = field(default_factory=set)
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    """From, to, bucket."""
    asked: list[tuple[str, int, str]] = field(default_factory=list)
    """Worker, bucket, and the node that has what it is given."""
    handles: WeakSet[Handle] = field(default_factory=WeakSet)
    """Those that somebody still holds."""
    most: Counter[str] = field(default_factory=Counter)
    """Most of them that each node ever had."""
    copied: Counter[str] = field(default_factory=Counter)
    """Copies that each node was asked for."""
    late: bool = False
    """Copies are made when somebody is given them, not at once."""

    def put(self, bucket: int, node: str, origin: Handle | None = None) -> Handle:
        made = Handle(bucket, node, origin)
        self.handles.add(made)
        self.most |= Counter(one.node for one in self.handles)
        return made

    def read(self, node: str, handle: Handle) -> None:
        """Have a value on a node. Raises: LostValue."""
        self.make(handle)
        if node in handle.readers:
            return
        if handle.lost or handle.node in self.dead:
            raise LostValue(f"bucket {handle.bucket} was on {handle.node}")
        if node == handle.node:
            return
        self.sent.append((handle.node, node, handle.bucket))
        handle.readers.add(node)

    def copy_on(self, node: str, handle: Handle) -> Handle:
        """Stands for `opd.cluster.copy_on`: it returns at once, so a copy that cannot be made is found out by who is given it."""
        self.copied[node] += 1
        made = self.put(handle.bucket, node, handle)
        if not self.late:
            self.make(made)
        return made

    def make(self, handle: Handle) -> None:
        """Make a copy that is not made yet."""
        origin, handle.origin = handle.origin, None
        if origin is None:
            return
        try:
            self.read(handle.node, origin)
        except LostValue:
            handle.lost = True
        handle.lost |= handle.node in self.dead


class Engine:
    """Stands for a worker on a node. As in a process of its own, a call does its work after all others were made, and one that
    is dead answers nothing any more."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.node = world, name, name[0]
        self.taken: list[int] = []
        self.begun: list[tuple[Path, bool]] = []
        self.dead = False
        self.before: Callable[[str, int], None] = lambda method, bucket: None
        """Called before it does what it is asked, with the bucket or -1."""

    def submit(self, method: Any, *args: Any, **kwargs: Any) -> Answer:
        if method.__name__ == "take_bucket":
            (handle,) = args
            self.world.asked.append((self.name, handle.bucket, handle.node))
            return Answer(self, "take_bucket", handle)
        assert method.__name__ == "begin_stream"
        return Answer(self, "begin_stream", None, lambda: self.begun.append((args[0], kwargs["whole"])))

    def node_id(self) -> Answer:
        return Answer(self, "node_id", None, lambda: self.node)

    def dies_in(self, method: str, bucket: int = -1, *, node: bool = False) -> None:
        """It dies when it is asked for that, alone or with its node and all that is there."""

        def die(asked: str, which: int) -> None:
            if (asked, which) == (method, bucket):
                self.dead = True
                self.world.dead |= {self.node} if node else set()

        self.before = die


@dataclass(eq=False)
class Answer:
    """Stands for `opd.cluster.Pending`."""

    worker: Engine
    method: str
    handle: Handle | None
    work: Callable[[], Any] = lambda: None

    def wait_for_result(self, *, timeout_s: float) -> Any:
        worker, bucket = self.worker, -1 if self.handle is None else self.handle.bucket
        assert timeout_s == 7
        worker.before(self.method, bucket)
        if worker.dead or worker.node in worker.world.dead:
            raise WorkerDied(f"{worker.name} died in {self.method}", worker)  # type: ignore[arg-type]
        if self.handle is not None:
            worker.world.read(worker.node, self.handle)
            worker.taken.append(bucket)
        return self.work()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(cluster, "copy_on", made.copy_on)
    return made


def engines(world: World, names: str) -> list[Any]:
    """Workers by name; the first letter is the node."""
    return [Engine(world, name) for name in names.split()]


def send(
    world: World, workers: Sequence[Any], count: int, *, source: str | None = TRAINER, node: str = TRAINER
) -> None:
    """Pour so many buckets, made on `node`, where the stream says that they are made on `source`."""
    buckets = (world.put(bucket, node) for bucket in range(count))
    known: dict[str, Any] = {"model_dir": Path("/student"), "whole": True, "node": source}
    pass_buckets(workers, WeightStream(buckets=buckets, **known), timeout_s=7)


def test_each_machine_sends_a_bucket_once_to_the_next(world: World) -> None:
    workers = engines(world, "A0 B0 A1 C0 B1")
    send(world, workers, 4)
    hops = [(TRAINER, "A"), ("A", "B"), ("B", "C")]
    assert sorted(world.sent) == sorted((*hop, bucket) for hop in hops for bucket in range(4))
    assert all(one.taken == [0, 1, 2, 3] and one.begun == [(Path("/student"), True)] for one in workers)


def test_in_every_step_each_machine_takes_what_the_one_before_took_last(world: World) -> None:
    send(world, engines(world, "A0 A1 B0 C0"), 3)
    first = [[("A0", b, TRAINER), ("A1", b, TRAINER)] for b in range(3)]
    second, third = [("B0", b, "A") for b in range(3)], [("C0", b, "B") for b in range(3)]
    assert world.asked == [
        *first[0],
        *[*first[1], second[0]],
        *[*first[2], second[1], third[0]],
        *[second[2], third[1]],
        *[third[2]],
    ]


@pytest.mark.parametrize("source", [TRAINER, "A", None])
def test_on_one_machine_all_take_the_trainers_own_handles_and_no_copy_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    monkeypatch.setattr(cluster, "copy_on", None)
    workers = engines(world, "A0 A1 A2")
    seen: list[list[int]] = []
    workers[2].before = lambda method, bucket: seen.append([len(one.taken) for one in workers])
    send(world, workers, 3, source=source)
    assert world.asked == [(f"A{i}", b, TRAINER) for b in range(3) for i in range(3)]
    assert seen[2:] == [[1, 1, 0], [2, 2, 1], [3, 3, 2]]
    assert world.sent == [(TRAINER, "A", b) for b in range(3)], "the machine gets each once"


def test_a_lone_worker_is_not_asked_where_it_is(world: World) -> None:
    (one,) = workers = engines(world, "A0")
    one.node_id = None
    send(world, workers, 2)
    assert one.taken == [0, 1]


def test_engines_on_the_trainers_machine_take_beside_the_first_other_one(world: World) -> None:
    workers = engines(world, "T0 A0 T1 B0")
    send(world, workers, 3, source="T", node="T")
    assert sorted(world.sent) == sorted([(x, y, b) for x, y in (("T", "A"), ("A", "B")) for b in range(3)])
    assert all(one.taken == [0, 1, 2] for one in workers)
    assert [one for one in world.asked if one[0] in ("T0", "T1", "A0")][:3] == [
        ("A0", 0, "T"),
        ("T0", 0, "T"),
        ("T1", 0, "T"),
    ]


def test_one_machine_beside_the_trainers_is_no_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "copy_on", None)
    send(world, engines(world, "T0 A0"), 2, source="T", node="T")
    assert world.asked == [(name, b, "T") for b in range(2) for name in ("A0", "T0")]


def test_where_the_trainer_is_not_known_its_machine_is_one_in_the_line(world: World) -> None:
    workers = engines(world, "A0 T0 B0")
    send(world, workers, 2, source=None, node="T")
    assert [
        (m.node, len(m.workers), m.local_workers) for m in group_by_machine({w: w.node for w in workers}, None)
    ] == [
        ("A", 1, []),
        ("T", 1, []),
        ("B", 1, []),
    ]
    assert all(one.taken == [0, 1] for one in workers)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_more_machines_than_buckets(world: World, count: int) -> None:
    workers = engines(world, "A0 B0 C0 D0 E0")
    send(world, workers, count)
    assert all(one.taken == list(range(count)) and one.begun for one in workers)
    assert sorted(world.sent) == sorted(
        (x, y, b) for x, y in zip([TRAINER, *"ABCD"], "ABCDE", strict=True) for b in range(count)
    )


def test_a_store_has_a_few_buckets_however_many_there_are(world: World) -> None:
    send(world, engines(world, "A0 B0 C0 D0"), 40)
    # What is copied now, what the next machine takes, and what is kept in case that this is lost.
    assert world.most == {TRAINER: 2, "A": 3, "B": 3, "C": 2} and world.copied == {"A": 40, "B": 40, "C": 40}
    assert not world.handles, "nothing stays"


# Deaths


@pytest.mark.parametrize("method", ["node_id", "begin_stream", "take_bucket"])
@pytest.mark.parametrize("name", ["A0", "A1", "B0", "C1"])
def test_a_worker_that_dies_misses_the_rest_and_nobody_else_does(world: World, name: str, method: str) -> None:
    workers = engines(world, "A0 A1 B0 B1 C0 C1")
    (dying,) = [one for one in workers if one.name == name]
    dying.dies_in(method, 2 if method == "take_bucket" else -1)
    send(world, workers, 5)
    for one in workers:
        assert one.taken == (list(range(5)) if one is not dying else [0, 1] if method == "take_bucket" else [])
    assert max(Counter(world.sent).values()) == 1 and Counter(x for x, *_ in world.sent) == {TRAINER: 5, "A": 5, "B": 5}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("node", [False, True])
def test_without_the_engines_of_a_machine_the_next_takes_from_the_one_before(
    world: World, node: bool, late: bool
) -> None:
    """While the second machine dies with bucket 2, the third takes bucket 1, which it may have fetched before."""
    world.late = late
    workers = engines(world, "A0 B0 C0 D0")
    workers[1].dies_in("take_bucket", 2, node=node)
    send(world, workers, 6)
    assert [one.taken for one in workers] == [list(range(6)), [0, 1], list(range(6)), list(range(6))]
    source = ["B", "A" if node and late else "B", *"AAAA"]
    assert [one for one in world.sent if one[1] == "C"] == [(source[b], "C", b) for b in range(6)]
    assert sum(x == TRAINER for x, *_ in world.sent) == 6


@pytest.mark.parametrize("late", [False, True])
def test_without_the_first_machine_the_second_takes_from_the_trainer(world: World, late: bool) -> None:
    world.late = late
    workers = engines(world, "A0 B0 C0")
    workers[0].dies_in("take_bucket", 1, node=True)
    send(world, workers, 4)
    assert [one.taken for one in workers] == [[0], [0, 1, 2, 3], [0, 1, 2, 3]]
    source = [TRAINER if late else "A", *3 * [TRAINER]]
    assert [one for one in world.sent if one[1] == "B"] == [(source[b], "B", b) for b in range(4)]


def test_without_the_last_machine_nothing_is_copied_for_it(world: World) -> None:
    workers = engines(world, "A0 B0 C0")
    workers[2].dies_in("take_bucket", 0)
    send(world, workers, 6)
    assert [one.taken for one in workers] == [*[list(range(6))] * 2, []]
    assert world.copied == {"A": 6, "B": 2}, "the two that were under way when it died"


def test_when_all_are_dead_no_bucket_is_asked_for_any_more(world: World) -> None:
    workers = engines(world, "A0 A1 B0")
    for one, bucket in zip(workers, (1, 2, 0), strict=True):
        one.dies_in("take_bucket", bucket)
    asked: list[int] = []

    def buckets() -> Iterator[Handle]:
        for bucket in range(9):
            asked.append(bucket)
            yield world.put(bucket, TRAINER)

    pass_buckets(workers, WeightStream(model_dir=Path("/student"), whole=True, buckets=buckets()), timeout_s=7)
    assert asked == [0, 1, 2] and [one.taken for one in workers] == [[0], [0, 1], []]


@pytest.mark.parametrize("method", ["node_id", "begin_stream"])
@pytest.mark.parametrize("names", ["A0 A1", "A0 B0", "T0 A0 B0"])
def test_when_all_die_before_the_first_bucket_none_is_asked_for(world: World, names: str, method: str) -> None:
    workers = engines(world, names)
    for one in workers:
        one.dies_in(method)
    asked: list[int] = []

    def buckets() -> Iterator[Handle]:
        asked.append(0)
        yield world.put(0, TRAINER)

    stream = WeightStream(model_dir=Path("/student"), whole=True, buckets=buckets(), node="T")
    pass_buckets(workers, stream, timeout_s=7)
    assert not asked and not any(one.taken for one in workers)


def test_a_bucket_that_is_lost_with_both_machines_that_kept_it_ends_the_push(world: World) -> None:
    """Whoever calls starts all workers again then; the engines that wait for it could not go on."""
    workers = engines(world, "A0 B0 C0 D0")

    def both(method: str, bucket: int) -> None:
        if (method, bucket) == ("take_bucket", 1):
            world.dead |= {"A", "B"}

    workers[2].before = both
    with pytest.raises(LostValue, match="bucket 2") as raised:
        send(world, workers, 6)
    assert raised.value.worker is None


def test_an_engine_that_had_the_bucket_is_not_given_it_twice(world: World) -> None:
    """One of two on a machine fetched it just before it was lost."""
    workers = engines(world, "A0 B0 B1 C0")
    workers[2].before = lambda method, bucket: world.dead.add("A") if bucket == 1 else None
    world.read, read = (
        (  # type: ignore[method-assign]
            lambda node, handle: (
                read(node, handle)
                if handle.node not in world.dead
                else (_ for _ in ()).throw(LostValue(f"bucket {handle.bucket}"))
            )
        ),
        world.read,
    )
    send(world, workers, 4)
    assert [one.taken for one in workers[1:]] == [[0, 1, 2, 3]] * 3


def test_an_error_of_an_engine_is_everybodys(world: World) -> None:
    workers = engines(world, "A0 B0")

    def fails(method: str, bucket: int) -> None:
        if bucket == 1:
            raise RunError("vLLM refused a weight")

    workers[1].before = fails
    with pytest.raises(RunError, match="refused a weight"):
        send(world, workers, 3)
