"""The places of a pipeline's workers: what each asks, and which wishes no node can grant. The nodes are records here."""

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
    describe_divided_trainer,
    list_worker_groups,
    local_worker_names,
    refuse_impossible_placement,
    refuse_on_nodes,
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
    return [group.names for group in groups]


def test_every_worker_of_a_merge_has_a_seat_by_the_name_that_it_is_started_with(config: PipelineConfig) -> None:
    found = list_worker_groups(changed(config, {}, rollout={"workers": 2}))
    ranks = ("trainer rank 0", "trainer rank 1")
    assert names(found) == [ranks, ("rollout worker 0", "rollout worker 1"), ("teacher worker 0",)]
    assert {group.strategy for group in found} == {"PACK"}
    assert all(
        seat.asks == {"CPU": 1} and seat.labels == {} and seat.workers[0].threads is None
        for g in found
        for seat in g.seats
    )


def test_a_critic_has_ranks_of_its_own_and_served_teachers_have_no_seat(config: PipelineConfig) -> None:
    served = list_worker_groups(changed(config, {}, teachers={"engine": "flight", "address": "grpc://localhost:1"}))
    assert names(served) == [("trainer rank 0", "trainer rank 1"), ("rollout worker 0",)]
    domains = {
        name: d | {"eval": d["eval"] | {"verifier": "exact_match"}}
        for name, d in config.model_dump()["domains"].items()
    }
    objective = {"reward": {"baseline": {"kind": "critic"}}}
    assert names(list_worker_groups(changed(config, {}, domains=domains, objective=objective)))[1] == (
        "critic rank 0",
        "critic rank 1",
    )


def test_what_a_role_asks_for(config: PipelineConfig) -> None:
    teachers = {"strategy": "spread", "cpus": 3, "label_selector": {"pool": "!head"}, "resources": {"big": 0.5}}
    (group,) = list_worker_groups(changed(config, {"teacher_gpus": 1, "placement": {"teachers": teachers}}), {TEACHERS})
    assert (group.key, group.strategy) == ("cluster.placement.teachers", "SPREAD")
    (seat,) = group.seats
    assert seat.asks == {"CPU": 3, "GPU": 1, "big": 0.5} and seat.labels == {"pool": "!head"}
    assert seat.workers[0].threads == 3


def test_an_engine_of_several_gpus_has_them_in_one_place(config: PipelineConfig) -> None:
    divided = changed(
        config, {"rollout_gpus": 1, "trainer_gpus": 1, "teacher_gpus": 1}, rollout={"tensor_parallel_size": 4}
    )
    (group,) = list_worker_groups(divided, {ROLLOUT})
    assert [seat.asks for seat in group.seats] == [{"CPU": 1, "GPU": 4}]


@pytest.mark.parametrize(("cpus", "size", "threads"), [(8, 1, 8), (8, 2, 4), (9, 4, 2), (1, 2, 1)])
def test_the_processes_of_an_engine_share_its_cpus(config: PipelineConfig, cpus: int, size: int, threads: int) -> None:
    """Each with as many threads as there are CPUs, they would slow each other down many times over."""
    places = {"rollout": {"cpus": cpus}, "teachers": {"cpus": cpus}, "trainer": {"cpus": cpus}}
    divided = {"tensor_parallel_size": size}
    made = changed(config, {"placement": places}, rollout=divided, teachers={"engine": "vllm"} | divided)
    found = [(seat.asks["CPU"], seat.workers[0].threads) for group in list_worker_groups(made) for seat in group.seats]
    assert found == [(cpus, cpus)] * 2 + [(cpus, threads)] * 2


SHARES = {"rollout_gpus": 0.4, "teacher_gpus": 0.2, "trainer_gpus": 0.4}


def test_rank_engine_and_scorer_with_shares_have_a_bundle_together(config: PipelineConfig) -> None:
    cpus = {"rollout": {"cpus": 4}, "teachers": {"cpus": 2}, "trainer": {"resources": {"fast": 1}}}
    shared = changed(config, SHARES | {"placement": cpus}, rollout={"workers": 2}, teachers={"workers": 2})
    (group,) = list_worker_groups(shared)
    assert (group.key, group.strategy, group.one_node) == ("cluster.placement.trainer", "PACK", True)
    assert [seat.names for seat in group.seats] == [
        (f"trainer rank {i}", f"rollout worker {i}", f"teacher worker {i}") for i in (0, 1)
    ]
    for seat in group.seats:
        assert seat.bundles == ({"CPU": 7, "GPU": 1, "fast": 1},)
        rank, engine, scorer = seat.workers
        assert rank.asks == {"CPU": 1, "GPU": 0.4, "fast": 1} and rank.threads is None
        assert engine.asks == {"CPU": 4, "GPU": 0.4} and engine.threads == 4
        assert scorer.asks == {"CPU": 2, "GPU": 0.2} and scorer.threads == 2


def test_a_role_of_whole_gpus_is_beside_those_that_share(config: PipelineConfig) -> None:
    shared, ranks = list_worker_groups(changed(config, SHARES | {"trainer_gpus": 1}))
    assert shared.names == ("rollout worker 0", "teacher worker 0") and not shared.one_node
    assert [seat.asks for seat in ranks.seats] == [{"CPU": 1, "GPU": 1}] * 2 and ranks.one_node


def test_a_critic_shares_with_the_ranks(config: PipelineConfig) -> None:
    domains = {
        name: d | {"eval": d["eval"] | {"verifier": "exact_match"}}
        for name, d in config.model_dump()["domains"].items()
    }
    thirds = dict.fromkeys(SHARES, 0.25)
    objective = {"reward": {"baseline": {"kind": "critic"}}}
    (group,) = list_worker_groups(changed(config, thirds, domains=domains, objective=objective))
    assert [seat.names[:2] for seat in group.seats] == [(f"trainer rank {i}", f"critic rank {i}") for i in (0, 1)]


def test_a_divided_engine_shares_its_gpus_with_as_many_ranks(config: PipelineConfig) -> None:
    """All of its GPUs are on one node."""
    divided = {"tensor_parallel_size": 2, "workers": 2}
    (group,) = list_worker_groups(
        changed(config, SHARES, rollout=divided, trainer={"ranks": 4}, teachers={"workers": 4})
    )
    assert [len(seat.bundles) for seat in group.seats] == [2, 2]
    second = {worker.name: worker for worker in group.seats[1].workers}
    assert second["rollout worker 1"].bundles == (0, 1) and second["rollout worker 1"].asks["GPU"] == 0.4
    assert second["trainer rank 2"].bundles == (0,) and second["trainer rank 3"].bundles == (1,)
    assert [bundle["CPU"] for bundle in group.seats[1].bundles] == [3, 2]


def test_a_users_engine_has_room_beside_the_workers_that_we_know(config: PipelineConfig) -> None:
    mine = changed(config, SHARES, rollout={"engine": "my:Engine"}, trainer={"ranks": 1})
    (group,) = list_worker_groups(mine)
    (seat,) = group.seats
    assert seat.names == ("trainer rank 0", "teacher worker 0") and seat.asks["GPU"] == pytest.approx(0.6)


def test_what_a_command_starts_beside_the_engines_shares_their_gpu(config: PipelineConfig) -> None:
    (group,) = list_worker_groups(changed(config, SHARES), {ROLLOUT, TEACHERS}, ["comparing worker"])
    assert group.names == ("rollout worker 0", "comparing worker")


def test_shared_gpus_that_no_node_has_are_refused(config: PipelineConfig) -> None:
    shared = changed(config, SHARES | {"teacher_gpus": 0}, rollout={"tensor_parallel_size": 16}, trainer={"ranks": 16})
    with pytest.raises(ConfigError, match=r"trainer rank 0 to 15, rollout worker 0 ask for 17 CPU, 16 GPU"):
        refuse_impossible_placement(list_worker_groups(shared), frozenset(), NODES)


def test_ranks_on_several_nodes_are_said(config: PipelineConfig) -> None:
    two = changed(config, {}, trainer={"ranks": 4})
    nodes = {f"trainer rank {rank}": NODES[rank // 3] for rank in range(4)}
    assert describe_divided_trainer(two, nodes) == (
        "the trainer's 4 ranks are on several nodes (3 on 10.0.0.1, 1 on 10.0.0.2), because none had room for all of them: weights "
        "and gradients cross the network in every micro-batch"
    )
    assert describe_divided_trainer(two, dict.fromkeys(nodes, NODES[0])) is None


def test_who_has_least_choice_chooses_first(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that have to be here, and teachers that have to be on one node, are not left without room by the ranks."""
    reserved: list[WorkerGroup] = []

    def reserve_seats(groups: list[WorkerGroup], **_: Any) -> dict[str, str]:
        reserved[:] = groups
        return {name: NODES[1].id for group in groups for name in group.names}

    monkeypatch.setattr(placement.cluster, "reserve_seats", reserve_seats)
    monkeypatch.setattr(placement.cluster, "list_nodes", lambda: NODES)
    ranks, engines, scorers = ("trainer rank 0", "trainer rank 1"), ("rollout worker 0",), ("teacher worker 0",)
    assert set(reserve_places(config)) == {*ranks, *engines, *scorers}
    assert names(reserved) == [ranks, engines, scorers], "all may go anywhere"
    reserve_places(config, local_workers=local_worker_names(config))
    assert names(reserved) == [engines, ranks, scorers]
    reserve_places(changed(config, {"placement": {"teachers": {"label_selector": {"pool": "far"}}}}))
    assert names(reserved) == [scorers, ranks, engines]


def test_workers_of_a_users_engine_are_not_known(config: PipelineConfig) -> None:
    assert names(list_worker_groups(changed(config, {}, rollout={"engine": "my:Engine"}), {ROLLOUT})) == []


def test_one_machine_is_not_asked(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.cluster, "ray_session", lambda *_: pytest.fail("Ray is asked"))
    monkeypatch.setattr(placement.cluster, "reserve_seats", lambda groups, **_: reserved.extend(groups))
    reserved: list[WorkerGroup] = []
    alone = changed(config, {"address": "local"})
    refuse_unplaceable(alone)
    assert reserve_places(alone) == {} and reserved == []
    assert reserve_places(changed(alone, SHARES | {"trainer_gpus": 1})) == {}
    assert names(reserved) == [("rollout worker 0", "teacher worker 0")], "only GPUs that roles share"


def test_a_divided_engine_is_reached_directly_on_one_node_alone(config: PipelineConfig) -> None:
    gpus, alone = {"rollout_gpus": 1, "trainer_gpus": 1}, node("10.0.0.1", here=True, gpu=8)
    direct = changed(config, gpus, sync={"kind": "direct"}, rollout={"tensor_parallel_size": 2})
    refuse_on_nodes(direct, [alone])
    with pytest.raises(
        ConfigError, match=r"^sync\.kind\n  found:  direct with rollout\.tensor_parallel_size 2 on 2 nodes"
    ):
        refuse_on_nodes(direct, [alone, node("10.0.0.2", gpu=8)])
    for possible in (
        changed(direct, gpus, sync={"kind": "network"}),
        changed(direct, gpus, rollout={"tensor_parallel_size": 1}),
    ):
        refuse_on_nodes(possible, [alone, node("10.0.0.2", gpu=8)])


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
    refuse_impossible_placement(list_worker_groups(wanted), local_worker_names(wanted), NODES)


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
            ["5 CPU for trainer rank 0, rollout worker 0,", "at most the 4 CPU of this machine: 10.0.0.1 (this one: 4 CPU,"],
        ),
        ({}, {"trainer": {"ranks": 11}}, ["13 CPU for trainer rank 0 to 10, rollout worker 0", "at most the 12 CPU of all nodes"]),
    ],
)  # fmt: skip
def test_what_no_node_can_have_is_refused_with_what_they_have(
    config: PipelineConfig, cluster: Any, sections: Any, words: list[str]
) -> None:
    wanted = changed(config, cluster, **sections)
    with pytest.raises(ConfigError) as refusal:
        refuse_impossible_placement(list_worker_groups(wanted), local_worker_names(wanted), NODES)
    told = str(refusal.value)
    assert all(word in told for word in words), told
    assert "memory" not in told.replace("shared memory", "") and "id-" not in told, "what Ray counts for itself"


def test_a_push_that_needs_no_shared_memory_keeps_nobody_here(config: PipelineConfig) -> None:
    assert local_worker_names(config) == {"rollout worker 0", "trainer rank 0"}
    assert local_worker_names(changed(config, {}, sync={"kind": "network"})) == frozenset()
    far = changed(config, {"placement": {"rollout": {"label_selector": {"pool": "far"}}}})
    refuse_impossible_placement(list_worker_groups(far), frozenset(), NODES)


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
