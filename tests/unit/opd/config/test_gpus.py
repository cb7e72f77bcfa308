"""GPUs that roles share: what is refused before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.config.devices import WorkerGpus, rollout_devices, teacher_devices, trainer_devices
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        validate_section(PipelineConfig, VALID | sections, "p.yaml")
    return str(error.value)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 2), (1, 4), (2.0, 2), (0.3, 1), (1, 1), (0.3, 2), (0.5, 8)])
def test_ranks_with_gpus_of_their_own_and_those_that_share(gpus: float, ranks: int) -> None:
    """Ranks that share are beside engines and scorers, each on a GPU on which no other rank is."""
    trainer = VALID["trainer"] | {"ranks": ranks}
    config = validate_section(PipelineConfig, VALID | {"trainer": trainer, "cluster": {"trainer_gpus": gpus}}, "p.yaml")
    devices = trainer_devices(config.cluster)
    assert devices == WorkerGpus(1, gpus) if 0 < gpus < 1 else devices == WorkerGpus(int(gpus))
    assert devices.is_shared == (0 < gpus < 1)


def test_an_engine_whose_workers_are_not_known_shares_with_one_rank_alone() -> None:
    shares = {"rollout_gpus": 0.4, "trainer_gpus": 0.4}
    message = refusal(cluster=shares, rollout={"engine": "my:Engine"})
    assert message.startswith(
        "p.yaml: cluster.rollout_gpus\n  found:  0.4 with rollout.engine my:Engine and trainer.ranks 2"
    )
    alone = VALID | {"cluster": shares, "rollout": {"engine": "my:Engine"}, "trainer": VALID["trainer"] | {"ranks": 1}}
    validate_section(PipelineConfig, alone, "p.yaml")
    validate_section(PipelineConfig, VALID | {"cluster": shares}, "p.yaml")


@pytest.mark.parametrize("changed", [{"strategy": "spread"}, {"label_selector": {"pool": "far"}}])
def test_roles_that_share_gpus_are_on_the_same_nodes(changed: Any) -> None:
    cluster = {"address": "auto", "rollout_gpus": 0.4, "trainer_gpus": 0.4, "placement": {"rollout": changed}}
    message = refusal(cluster=cluster)
    assert message.startswith("p.yaml: cluster.placement.rollout\n") and "those of cluster.placement.trainer" in message
    both = cluster | {"placement": {"rollout": changed, "trainer": changed}}
    validate_section(PipelineConfig, VALID | {"cluster": both}, "p.yaml")
    validate_section(PipelineConfig, VALID | {"cluster": cluster | {"rollout_gpus": 1}}, "p.yaml")


def test_a_divided_engine_on_shared_gpus_is_on_one_node() -> None:
    spread = {role: {"strategy": "spread"} for role in ("rollout", "trainer")}
    cluster = {"address": "auto", "rollout_gpus": 0.4, "trainer_gpus": 0.4, "placement": spread}
    message = refusal(cluster=cluster, rollout={"tensor_parallel_size": 2})
    assert "cluster.placement.trainer.strategy" in message and "pack or strict_pack" in message


def test_a_cpu_engine_does_not_sleep() -> None:
    message = refusal(rollout={"sleep": True})
    assert message.startswith("p.yaml: rollout.sleep\n") and "cluster.rollout_gpus" in message
    data = VALID | {"rollout": {"sleep": True}, "cluster": {"rollout_gpus": 0.4}}
    assert validate_section(PipelineConfig, data, "p.yaml").rollout.sleep


def test_teachers_stay_on_a_gpu_that_is_there_and_undivided() -> None:
    message = refusal(teachers={"gpu_memory": "4GiB"})
    assert (
        message.startswith("p.yaml: teachers.gpu_memory\n")
        and "4294967296 bytes with cluster.teacher_gpus 0" in message
    )
    message = refusal(teachers={"gpu_memory": 1, "device_map": "auto"}, cluster={"teacher_gpus": 2})
    assert message.startswith("p.yaml: teachers.gpu_memory\n") and "with teachers.device_map" in message
    data = VALID | {"teachers": {"gpu_memory": "4GiB"}, "cluster": {"teacher_gpus": 0.5}}
    validate_section(PipelineConfig, data, "p.yaml")


@pytest.mark.parametrize("gpus", [1.5, 2])
def test_a_process_of_an_engine_has_no_more_than_a_gpu(gpus: float) -> None:
    message = refusal(rollout={"tensor_parallel_size": 2}, cluster={"rollout_gpus": gpus})
    assert message.startswith("p.yaml: cluster.rollout_gpus\n")
    assert f"found:  {gpus:g} with rollout.tensor_parallel_size 2" in message and "wanted: at most 1" in message
    teachers = {"engine": "vllm", "tensor_parallel_size": 4}
    message = refusal(teachers=teachers, cluster={"teacher_gpus": gpus})
    assert message.startswith("p.yaml: cluster.teacher_gpus\n") and "teachers.tensor_parallel_size 4" in message


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(0, WorkerGpus(0)), (1, WorkerGpus(2)), (0.5, WorkerGpus(2, 0.5))],
    ids=["cpu", "own", "shared"],
)
def test_an_engine_of_two_processes_has_two_gpus_a_share_of_two_or_none(gpus: float, devices: WorkerGpus) -> None:
    sections = {
        "rollout": {"tensor_parallel_size": 2},
        "teachers": {"engine": "vllm", "tensor_parallel_size": 2},
        "cluster": {"rollout_gpus": gpus, "teacher_gpus": gpus},
    }
    config = validate_section(PipelineConfig, VALID | sections, "p.yaml")
    assert rollout_devices(config.cluster, config.rollout) == devices
    assert teacher_devices(config.cluster, config.teachers) == devices


AUTO = {"device_map": "auto"}


@pytest.mark.parametrize(
    ("gpus", "teachers", "where", "words"),
    [
        (
            1,
            AUTO | {"max_memory": {"gpu0": "1GiB"}},
            "teachers.max_memory",
            "found:  'gpu0'|wanted: numbers of a scoring",
        ),
        (1, AUTO | {"max_memory": {-1: "1GiB"}}, "teachers.max_memory", "found:  -1|from 0, and cpu and disk"),
        (1, AUTO | {"max_memory": {True: "1GiB"}}, "teachers.max_memory", "found:  True|from 0, and cpu and disk"),
        (1, AUTO | {"max_memory": {0: "much"}}, "teachers.max_memory.0", "found:  'much'|a size such as 512MiB"),
        (1, AUTO | {"max_memory": {0: 0}}, "teachers.max_memory.0", "found:  0|above 0"),
        (1, AUTO | {"max_memory": "40GiB"}, "teachers.max_memory", "a mapping of keys"),
        (1, {"device_map": "balanced"}, "teachers.device_map", "found:  'balanced'|wanted: auto"),
        (1, {"device_map": {"model.layers.0": 0}}, "teachers.device_map", "wanted: auto"),
        (
            1,
            {"max_memory": {0: "1GiB", "cpu": 1}},
            "teachers.max_memory",
            "found:  0, cpu, without|teachers.device_map auto",
        ),
        (
            2,
            AUTO | {"max_memory": {0: 1, 1: 1, 2: 1}},
            "teachers.max_memory",
            "GPU 2, with cluster.teacher_gpus 2|0, 1;",
        ),
        (
            0,
            AUTO | {"max_memory": {0: 1, "cpu": 1}},
            "teachers.max_memory",
            "GPU 0, with cluster.teacher_gpus 0|has no GPU",
        ),
        (2, AUTO | {"max_memory": {0: 1, "cpu": 1}}, "teachers.max_memory", "no GPU 1, with|reserved for nobody"),
        (1, AUTO | {"max_memory": {"cpu": 1}}, "teachers.max_memory", "no GPU 0, with|reserved for nobody"),
        (1.5, AUTO, "cluster.teacher_gpus", "found:  1.5 with teachers.device_map auto|a whole number"),
        (0.5, AUTO, "teachers.max_memory", "nothing, with cluster.teacher_gpus 0.5|the most bytes on GPU 0"),
    ],
)
def test_a_teacher_is_divided_among_what_its_worker_has(gpus: float, teachers: Any, where: str, words: str) -> None:
    message = refusal(teachers=teachers, cluster={"teacher_gpus": gpus})
    assert message.startswith(f"p.yaml: {where}\n"), message
    assert all(word in message for word in words.split("|")), message


@pytest.mark.parametrize(
    ("gpus", "max_memory"),
    [(0, {}), (2, {}), (0, {"cpu": "1GiB", "disk": "1TiB"}), (2, {0: "1GiB", "1": "2GiB"}), (0.5, {0: 1, "cpu": 2})],
)
def test_maps_that_a_worker_can_follow(gpus: float, max_memory: dict[Any, Any]) -> None:
    data = VALID | {"teachers": AUTO | {"max_memory": max_memory}, "cluster": {"teacher_gpus": gpus}}
    config = validate_section(PipelineConfig, data, "p.yaml")
    shares = 0 < gpus < 1
    assert teacher_devices(config.cluster, config.teachers) == WorkerGpus(
        1 if shares else int(gpus), gpus if shares else 1
    )
    again = PipelineConfig.model_validate_json(config.model_dump_json())
    assert again == config, "JSON's keys are text"


def test_a_cache_of_fewer_bits_is_for_gpus() -> None:
    message = refusal(rollout={"kv_cache_dtype": "fp8"})
    assert message.startswith("p.yaml: rollout.kv_cache_dtype\n") and "wanted: auto: a CPU engine" in message
    data = VALID | {"rollout": {"kv_cache_dtype": "fp8"}, "cluster": {"rollout_gpus": 1}}
    assert validate_section(PipelineConfig, data, "p.yaml").rollout.kv_cache_dtype == "fp8"
    assert "rollout.kv_cache_dtype" in refusal(rollout={"kv_cache_dtype": "int3"}, cluster={"rollout_gpus": 1})


@pytest.mark.parametrize("size", [0, -1, 1.5, "two"])
def test_sizes_that_are_none(size: Any) -> None:
    assert refusal(rollout={"tensor_parallel_size": size}).startswith("p.yaml: rollout.tensor_parallel_size\n")


def push_kind(**sections: Any) -> str:
    trainer = VALID["trainer"] | {"ranks": 1}
    return validate_section(PipelineConfig, VALID | {"trainer": trainer} | sections, "p.yaml").push_kind


def test_weights_go_directly_where_both_ends_are_on_gpus() -> None:
    gpus = {"rollout_gpus": 0.4, "trainer_gpus": 0.4}
    assert push_kind() == "shared_memory"
    assert push_kind(cluster={"rollout_gpus": 1}) == push_kind(cluster={"trainer_gpus": 1}) == "shared_memory"
    assert push_kind(cluster=gpus) == push_kind(cluster=gpus | {"address": "auto"}) == "direct"
    assert push_kind(cluster=gpus, sync={"kind": "network"}) == "network"
    assert push_kind(sync={"kind": "direct"}) == "direct", "by gloo"
    divided = {"tensor_parallel_size": 2}
    whole = {"rollout_gpus": 1, "trainer_gpus": 1}
    assert push_kind(cluster=whole, rollout=divided) == "direct"
    assert push_kind(cluster=whole | {"address": "auto"}, rollout=divided) == "shared_memory", "loopback alone"
    assert push_kind(cluster=gpus, rollout={"engine": "mine:Engine"}) == "shared_memory"


def test_nothing_goes_directly_between_a_gpu_and_a_cpu() -> None:
    message = refusal(sync={"kind": "direct"}, cluster={"rollout_gpus": 1})
    assert message.startswith("p.yaml: sync.kind\n") and "direct with cluster.rollout_gpus 1" in message
