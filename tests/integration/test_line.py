"""New weights from machine to machine in a real Ray: nodes on this machine, each with an object store of its own."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.push import machines
from opd import cluster
from opd.cluster import Worker
from opd.config.sections import ClusterConfig
from opd.models.buckets import Bucket, WeightStream
from opd.rollouts.weight_broadcast import pass_buckets
from tests.integration.parts import config, start_engine, start_sync, start_trainer, stop

Make = Callable[..., Path]
MIB = 1 << 20
COUNT = 6


class Taker:
    """Takes buckets as an engine does, and notes which."""

    def __init__(self) -> None:
        self._sums: list[int] = []

    def begin_stream(self, model_dir: Path, *, whole: bool) -> None:
        self._sums.clear()

    def take_bucket(self, bucket: Bucket) -> None:
        self._sums.append(zlib.crc32(bucket.data))

    def sums(self) -> list[int]:
        return self._sums


@pytest.fixture
def four_nodes() -> Iterator[Any]:
    with machines(4) as nodes, cluster.ray_session(ClusterConfig(address=nodes.address), 4):
        yield nodes


def bucket(i: int) -> Bucket:
    return Bucket((), np.random.default_rng(i).integers(0, 255, MIB, np.uint8))


WANTED = [zlib.crc32(bucket(i).data) for i in range(COUNT)]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """Worker, and the nodes that had a bucket just before the worker was given it."""
    import ray
    from ray.experimental import get_object_locations

    found: list[tuple[str, set[str]]] = []
    submit = Worker.submit

    def look(worker: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "take_bucket":
            ray.wait([args[0]], timeout=60, fetch_local=False)
            found.append((worker.name, set(get_object_locations([args[0]])[args[0]]["node_ids"])))
        return submit(worker, method, *args, **kwargs)

    monkeypatch.setattr(Worker, "submit", look)
    return found


def takers() -> tuple[list[Any], dict[str, str]]:
    """A worker on each node, this process's node last, and worker -> node."""
    made = [cluster.spawn_worker(Taker, name=f"taker {i}", env={}) for i in range(4)]
    node = {worker.name: worker.node_id().wait_for_result(timeout_s=60) for worker in made}
    here = cluster.list_nodes()[0].id
    assert len(set(node.values())) == 4 and here in node.values()
    return sorted(made, key=lambda worker: node[worker.name] == here), node


def stream(before: Callable[[int], None] = lambda i: None) -> WeightStream:
    def buckets() -> Iterator[Any]:
        for i in range(COUNT):
            before(i)
            yield cluster.put_object(bucket(i))

    known: dict[str, Any] = {"model_dir": Path("/student"), "whole": True}
    return WeightStream(buckets=buckets(), node=cluster.list_nodes()[0].id, **known)


def test_each_machine_gets_buckets_from_the_one_before_it_alone(
    four_nodes: Any, given: list[tuple[str, set[str]]]
) -> None:
    workers, node = takers()
    pass_buckets(workers, stream(), timeout_s=60)
    first, second, third, here = (node[worker.name] for worker in workers)
    # A machine that makes a copy may have fetched the bucket when its worker is given it; the trainer's worker is given it then too.
    where = {
        first: [{here}, {here, first}],
        here: [{here}, {here, first}],
        second: [{first}, {first, second}],
        third: [{second}],
    }
    for name, had in given:
        assert had in where[node[name]], name
    assert Counter(name for name, _ in given) == dict.fromkeys(node, COUNT)
    assert [worker.submit(Taker.sums).wait_for_result(timeout_s=60) for worker in workers] == [WANTED] * 4


@pytest.mark.slow
def test_a_machine_that_dies_in_the_middle_costs_the_others_nothing(four_nodes: Any) -> None:
    """Its copies are lost with it, also that of a bucket that the next machine has not taken yet."""
    workers, node = takers()
    (dying,) = [one for one in four_nodes.list_all_nodes() if one.node_id == node[workers[1].name]]

    def before(i: int) -> None:
        if i == 3:
            four_nodes.remove_node(dying, allow_graceful=False)

    pass_buckets(workers, stream(before), timeout_s=120)
    left = [worker for worker in workers if worker is not workers[1]]
    assert [worker.submit(Taker.sums).wait_for_result(timeout_s=60) for worker in left] == [WANTED] * 3


@pytest.mark.slow
def test_engines_on_two_machines_get_the_weights_one_from_the_other(
    tmp_path: Path, make_model_dir: Make, tiny_tokenizer: Any, given: list[tuple[str, set[str]]]
) -> None:
    """Trainer and vLLM; the probe compares both engines with the trainer, before and after one of them is started again."""
    with machines(3) as nodes, cluster.ray_session(ClusterConfig(address=nodes.address), 3):
        student, other = (make_model_dir(tmp_path / str(seed), seed=seed) for seed in (0, 1))
        cfg = config(student, ranks=1)
        cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"workers": 2})})
        trainer = start_trainer(cfg)
        engine = start_engine(cfg, student, tiny_tokenizer)
        # Ray sends what is smaller than 100 KiB beside the call, not through the object stores.
        sync = start_sync("network", trainer, engine, keeps_weights=True, bucket=150_000)
        for version in (1, 2):
            engine.load(other)
            assert sync.measure_gap() > 0.05
            assert sync.push(version).gap < 1e-5
        rank = trainer._ranks[0].node_id().wait_for_result(timeout_s=60)
        first, second = (worker.node_id().wait_for_result(timeout_s=60) for worker in engine._workers)
        assert len({rank, first, second}) == 3
        where = [[{rank}, {rank, first}], [{first}]]
        for worker, possible in zip(engine._workers, where, strict=True):
            had = [nodes for name, nodes in given if name == worker.name and nodes]  # a small one is in no store
            assert len(had) > 2 and all(nodes in possible for nodes in had)
        engine._workers[1].kill()
        deadline = time.monotonic() + 120
        while not engine._restarted:  # a worker that is killed may answer once more
            assert sync.measure_gap() < 1e-5 and time.monotonic() < deadline
        assert sync.measure_gap() < 1e-5
        stop(engine, trainer)
