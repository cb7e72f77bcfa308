"""Workers on GPUs that roles share, under a real Ray that is told of GPUs which are not there: who gets which.

The placement is the product's. The workers are light ones with the names of a merge's, which say what Ray has given them; in the last
test they are the engine, the scorer and the ranks of a whole merge, which compute on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.cluster import ray_session, session
from opd.cluster.session import get_current_watch
from opd.config import PipelineConfig
from opd.settings.yaml_files import validate_section
from pipelines import build
from pipelines.merging import run as merging
from pipelines.placement import describe_divided_trainer, list_worker_groups, reserve_places
from tests.integration.conftest import two_domain_pipeline
from tests.placed import PlacedWorker, read_place

SHARES = {"rollout_gpus": 0.4, "teacher_gpus": 0.2, "trainer_gpus": 0.4}
SERVED = {"engine": "flight", "address": "grpc://127.0.0.1:1"}
TIMEOUT_S = 120

pytestmark = pytest.mark.timeout(900)


def pipeline(ranks: int, engines: int, scorers: int, **sections: Any) -> PipelineConfig:
    data: dict[str, Any] = {
        "name": "shared",
        "student": {"model": "base"},
        "experts": {"math": {"model": "m", "domain": "math"}},
        "domains": {"math": {"prompts": "math.jsonl"}},
        "rollout": {"workers": engines},
        "teachers": {"workers": scorers} if scorers else SERVED,
        "trainer": {"steps": 3, "samples_per_step": 8, "ranks": ranks},
        "cluster": SHARES,
    }
    for name, keys in sections.items():
        data[name] = data.get(name, {}) | keys
    return validate_section(PipelineConfig, data, "p.yaml")


@contextmanager
def local_session(config: PipelineConfig, gpus: int) -> Iterator[None]:
    """A Ray of this machine that counts `gpus` GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        count_gpus(patch, gpus)
        with ray_session(config.cluster, build.num_workers(config)):
            yield


def count_gpus(patch: pytest.MonkeyPatch, gpus: int) -> None:
    """Have a Ray of this machine count `gpus` GPUs."""
    session._restrict_ray_to_loopback()  # Ray reads what this sets as it is imported
    import ray

    patch.setattr(ray, "init", functools.partial(ray.init, num_gpus=gpus))


@contextmanager
def fake_cluster(*gpus: int) -> Iterator[str]:
    """The address of a cluster with a node for each number of GPUs."""
    session._restrict_ray_to_loopback()
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for number in gpus:
            nodes.add_node(num_cpus=16, num_gpus=number, object_store_memory=80 << 20, include_dashboard=False)
        nodes.wait_for_nodes()
        yield nodes.address
    finally:
        nodes.shutdown()


def ask_places(config: PipelineConfig) -> dict[str, tuple[str, str, list[str]]]:
    """Reserve the places of a merge, start a probe in each, and return name -> what it says."""
    reserve_places(config)
    names = [name for group in list_worker_groups(config) for name in group.names]
    probes = [cluster.spawn_worker(PlacedWorker, name=name, env={}) for name in names]
    answers = cluster.wait_for_all([probe.submit(PlacedWorker.place) for probe in probes], timeout_s=TIMEOUT_S)
    return dict(zip(names, answers, strict=True))


def assert_each_gpu_has_its_rank_engine_and_scorer(places: dict[str, tuple[str, str, list[str]]], gpus: int) -> None:
    used = set()
    for index in range(gpus):
        trio = [places[f"{role} {index}"] for role in ("trainer rank", "rollout worker", "teacher worker")]
        assert trio[0] == trio[1] == trio[2], f"rank, engine and scorer {index} are on one GPU: {trio}"
        node, visible, counted = trio[0]
        assert [visible] == counted
        used.add((node, visible))
    assert len(used) == gpus and len(places) == 3 * gpus


def test_four_gpus_of_one_machine_have_a_rank_an_engine_and_a_scorer_each() -> None:
    config = pipeline(4, 4, 4)
    with local_session(config, 4):
        places = ask_places(config)
        assert_each_gpu_has_its_rank_engine_and_scorer(places, 4)
        # A worker that is started again has the GPU that it had.
        first = next(worker for worker in get_current_watch().workers if worker.name == "rollout worker 2")
        first.kill()
        again = cluster.spawn_worker(PlacedWorker, name="rollout worker 2", env={})
        assert again.submit(PlacedWorker.place).wait_for_result(timeout_s=TIMEOUT_S) == places["rollout worker 2"]


def test_an_engine_of_two_processes_sees_the_gpus_of_two_ranks() -> None:
    config = pipeline(4, 2, 0, rollout={"tensor_parallel_size": 2})
    with local_session(config, 4):
        places = ask_places(config)
        visible = [places[f"trainer rank {rank}"][1] for rank in range(4)]
        assert len(set(visible)) == 4
        assert places["rollout worker 0"][1] == ",".join(visible[:2])
        assert places["rollout worker 1"][1] == ",".join(visible[2:])


def test_two_machines_of_two_gpus() -> None:
    with fake_cluster(2, 2) as address:
        config = pipeline(4, 4, 4, cluster=SHARES | {"address": address}, sync={"kind": "network"})
        with ray_session(config.cluster, 0):
            places = ask_places(config)
            assert_each_gpu_has_its_rank_engine_and_scorer(places, 4)
            nodes = [places[f"trainer rank {rank}"][0] for rank in range(4)]
            assert len(set(nodes[:2])) == len(set(nodes[2:])) == 1, "neighbours are on one machine"


def test_a_trainer_is_on_one_machine_wherever_one_has_room() -> None:
    """Ray's own PACK fills the machine with least room first. Where no machine has room, that is said."""
    whole = {"trainer_gpus": 1, "rollout_gpus": 0, "teacher_gpus": 0}
    with fake_cluster(2, 4) as address:
        config = pipeline(4, 1, 1, cluster=whole | {"address": address}, sync={"kind": "network"})
        with ray_session(config.cluster, 0):
            nodes = reserve_places(config)
            ranks = {nodes[f"trainer rank {rank}"].id for rank in range(4)}
            assert len(ranks) == 1 and describe_divided_trainer(config, nodes) is None
        six = pipeline(6, 1, 1, cluster=whole | {"address": address}, sync={"kind": "network"})
        with ray_session(six.cluster, 0):
            said = describe_divided_trainer(six, reserve_places(six))
            assert said is not None and "the trainer's 6 ranks are on several nodes" in said


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 8])
def test_a_merge_on_gpus_that_all_roles_share(
    gpus: int, tmp_path: Path, make_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole merge of tiny models: real engines, scorers and ranks, which compute on the CPU, in the places of so many GPUs."""
    data = two_domain_pipeline(tmp_path, make_model_dir)
    data["rollout"]["workers"] = gpus
    data["teachers"] = {"workers": gpus}
    data["trainer"] |= {"steps": 2, "ranks": gpus, "samples_per_step": 2 * gpus}
    data["evaluate"] = {"every": 0}
    config = validate_section(PipelineConfig, data, "p.yaml")
    on_gpus = validate_section(PipelineConfig, data | {"cluster": SHARES}, "p.yaml")
    places: dict[str, tuple[str, str, list[str]]] = {}

    def reserve(_: PipelineConfig, **more: Any) -> Any:
        return reserve_places(on_gpus, **more)

    def record_places(*args: Any) -> None:
        import ray

        workers = get_current_watch().workers
        answers = ray.get([worker._actor.__ray_call__.remote(read_place) for worker in workers], timeout=TIMEOUT_S)
        places.update({worker.name: place for worker, place in zip(workers, answers, strict=True)})

    count_gpus(monkeypatch, gpus)
    monkeypatch.setattr(merging, "reserve_places", reserve)
    monkeypatch.setattr(merging, "record_layouts", record_places)
    merging.start(config, tmp_path / "run")
    assert (tmp_path / "run" / "report.json").is_file()
    assert_each_gpu_has_its_rank_engine_and_scorer(places, gpus)
