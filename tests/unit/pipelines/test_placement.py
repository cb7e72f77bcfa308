"""Where a pipeline's workers go: what each asks, and which wishes no node can grant. The nodes are records here."""

from __future__ import annotations

from typing import Any

import pytest

from opd.cluster import Node, WorkerGroup
from opd.cluster.placement import NODE
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from pipelines import placement
from pipelines.placement import (
    ROLLOUT,
    TEACHERS,
    local_worker_names,
    groups_of,
    refuse_impossible_placement,
    refuse_unplaceable,
    reserve_places,
)


def node(name: str, here: bool = False, cpu: float = 4, gpu: float = 0, **labels: str) -> Node:
    has = {"CPU": cpu, "memory": 1e9, f"node:{name}": 1.0} | ({"GPU": gpu, "big": 1.0} if gpu else {})
    return Node(id=f"id-{name}", address=name, is_local=here, has=has, labels=labels | {NODE: f"id-{name}"})


NODES = [node("10.0.0.1", here=True, pool="head"), node("10.0.0.2", pool="far"), node("10.0.0.3", gpu=8, pool="gpus")]


@pytest.fixture
def config(world: Any) -> PipelineConfig:
    world.data["cluster"] = {"address": "auto"}
    world.data["trainer"]["ranks"] = 2
    return load_pipeline(world.write())


def changed(config: PipelineConfig, cluster: Any, **sections: Any) -> PipelineConfig:
    sections["cluster"] = cluster
    data = config.model_dump()
    return PipelineConfig.model_validate(data | {name: data[name] | keys for name, keys in sections.items()})


def names(groups: list[WorkerGroup]) -> list[tuple[str, ...]]:
    return [tuple(seat.worker for seat in group.seats) for group in groups]


def test_every_worker_of_a_merge_has_a_seat_by_the_name_that_it_is_started_with(config: PipelineConfig) -> None:
    found = groups_of(changed(config, {}, rollout={"workers": 2}))
    ranks = ("trainer rank 0", "trainer rank 1")
    assert names(found) == [("rollout worker 0", "rollout worker 1"), ("teacher worker 0",), ranks]
    assert {group.strategy for group in found} == {"PACK"}
    assert all(
        seat.asks == {"CPU": 1} and seat.labels == {} and seat.threads is None for g in found for seat in g.seats
    )


def test_a_critic_has_ranks_of_its_own_and_served_teachers_have_no_seat(config: PipelineConfig) -> None:
    served = groups_of(changed(config, {}, teachers={"engine": "flight", "address": "grpc://localhost:1"}))
    assert names(served) == [("rollout worker 0",), ("trainer rank 0", "trainer rank 1")]
    domains = {
        name: d | {"eval": d["eval"] | {"verifier": "exact_match"}}
        for name, d in config.model_dump()["domains"].items()
    }
    objective = {"reward": {"baseline": {"kind": "critic"}}}
    assert names(groups_of(changed(config, {}, domains=domains, objective=objective)))[-1] == (
        "critic rank 0",
        "critic rank 1",
    )


def test_what_a_role_asks_for(config: PipelineConfig) -> None:
    teachers = {"strategy": "spread", "cpus": 3, "label_selector": {"pool": "!head"}, "resources": {"big": 0.5}}
    (group,) = groups_of(changed(config, {"teacher_gpus": 0.5, "placement": {"teachers": teachers}}), {TEACHERS})
    assert (group.key, group.strategy) == ("cluster.placement.teachers", "SPREAD")
    (seat,) = group.seats
    assert seat.asks == {"CPU": 3, "GPU": 0.5, "big": 0.5} and seat.labels == {"pool": "!head"} and seat.threads == 3


def test_an_engine_of_several_gpus_has_them_in_one_place(config: PipelineConfig) -> None:
    divided = changed(
        config, {"rollout_gpus": 1, "trainer_gpus": 1, "teacher_gpus": 1}, rollout={"tensor_parallel_size": 4}
    )
    (group,) = groups_of(divided, {ROLLOUT})
    assert [seat.asks for seat in group.seats] == [{"CPU": 1, "GPU": 4}]


@pytest.mark.parametrize(("cpus", "size", "threads"), [(8, 1, 8), (8, 2, 4), (9, 4, 2), (1, 2, 1)])
def test_the_processes_of_an_engine_share_its_cpus(config: PipelineConfig, cpus: int, size: int, threads: int) -> None:
    """Each with as many threads as there are CPUs, they would slow each other down many times over."""
    places = {"rollout": {"cpus": cpus}, "teachers": {"cpus": cpus}, "trainer": {"cpus": cpus}}
    divided = {"tensor_parallel_size": size}
    made = changed(config, {"placement": places}, rollout=divided, teachers={"engine": "vllm"} | divided)
    found = [(seat.asks["CPU"], seat.threads) for group in groups_of(made) for seat in group.seats]
    assert found == [(cpus, threads)] * 2 + [(cpus, cpus)] * 2


def test_workers_of_a_users_engine_are_not_known(config: PipelineConfig) -> None:
    assert names(groups_of(changed(config, {}, rollout={"engine": "my:Engine"}), {ROLLOUT})) == []


def test_one_machine_is_not_asked(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.cluster, "ray_session", lambda *_: pytest.fail("Ray is asked"))
    alone = changed(config, {"address": "local"})
    refuse_unplaceable(alone)
    assert reserve_places(alone) == {}


@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"placement": {"teachers": {"label_selector": {"pool": "gpus"}, "resources": {"big": 1}}}},
        {"placement": {"trainer": {"strategy": "strict_spread", "cpus": 2}}},
        {"placement": {"trainer": {"strategy": "strict_pack"}, "teachers": {"cpus": 4}}},
        {"placement": {"trainer": {"label_selector": {"pool": "in(head, far)"}}}, "teacher_gpus": 8},
    ],
)
def test_what_can_be_had_is_not_refused(config: PipelineConfig, cluster: Any) -> None:
    wanted = changed(config, cluster)
    refuse_impossible_placement(groups_of(wanted), local_worker_names(wanted), NODES)


@pytest.mark.parametrize(
    ("cluster", "sections", "words"),
    [
        (
            {"placement": {"teachers": {"label_selector": {"pool": "none"}}}},
            {},
            ["cluster.placement.teachers\n", "teacher worker 0 asks for 1 CPU, label pool=none;", "10.0.0.2 (4 CPU, label pool=far)"],
        ),
        ({"placement": {"teachers": {"resources": {"big": 2}}}}, {}, ["1 CPU, 2 big; the nodes: 10.0.0.1 (this one: 4 CPU"]),
        ({"teacher_gpus": 9}, {}, ["teacher worker 0 asks for 1 CPU, 9 GPU", "8 GPU"]),
        ({"trainer_gpus": 1}, {}, ["cluster.placement.trainer\n", "trainer rank 0 asks for 1 CPU, 1 GPU, on this machine (10.0.0.1)"]),
        (
            {"placement": {"rollout": {"label_selector": {"pool": "far"}}}},
            {},
            ["cluster.placement.rollout.label_selector\n", "label pool=far, and this machine is 10.0.0.1", "its shared memory"],
        ),
        (
            {"placement": {"trainer": {"label_selector": {"pool": "!head"}}}},
            {},
            ["cluster.placement.trainer.label_selector\n", "wanted: trainer rank 0 on this machine"],
        ),
        (
            {"placement": {"rollout": {"strategy": "spread"}}},
            {"rollout": {"workers": 2}},
            ["cluster.placement.rollout.strategy\n", "found:  spread", "rollout worker 0, rollout worker 1 on this machine"],
        ),
        (
            {"placement": {"trainer": {"strategy": "strict_spread"}}},
            {"trainer": {"ranks": 4}},
            ["4 nodes for trainer rank 0, trainer rank 1, trainer rank 2, trainer rank 3, and 3 have what each asks for"],
        ),
        (
            {"placement": {"trainer": {"strategy": "strict_pack", "cpus": 3}}},
            {},
            ["found:  strict_pack;", "one node with 6 CPU for trainer rank 0, trainer rank 1"],
        ),
        (
            {},
            {"rollout": {"workers": 4}},
            ["5 CPU for rollout worker 0,", "trainer rank 0", "at most the 4 CPU of this machine: 10.0.0.1 (this one: 4 CPU,"],
        ),
        ({}, {"trainer": {"ranks": 11}}, ["13 CPU for rollout worker 0", "at most the 12 CPU of all nodes"]),
    ],
)  # fmt: skip
def test_what_no_node_can_have_is_refused_with_what_they_have(
    config: PipelineConfig, cluster: Any, sections: Any, words: list[str]
) -> None:
    wanted = changed(config, cluster, **sections)
    with pytest.raises(ConfigError) as refusal:
        refuse_impossible_placement(groups_of(wanted), local_worker_names(wanted), NODES)
    told = str(refusal.value)
    assert all(word in told for word in words), told
    assert "memory" not in told.replace("shared memory", "") and "id-" not in told, "what Ray counts for itself"


def test_a_push_that_needs_no_shared_memory_keeps_nobody_here(config: PipelineConfig) -> None:
    assert local_worker_names(config) == {"rollout worker 0", "trainer rank 0"}
    assert local_worker_names(changed(config, {}, sync={"kind": "network"})) == frozenset()
    far = changed(config, {"placement": {"rollout": {"label_selector": {"pool": "far"}}}})
    refuse_impossible_placement(groups_of(far), frozenset(), NODES)


def test_a_cluster_that_is_not_there_is_a_wrong_address(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr("ray.init", refuses)
    with pytest.raises(
        ConfigError, match=r"^cluster\.address\n  found:  auto: Could not find any running Ray instance"
    ):
        refuse_unplaceable(config)
