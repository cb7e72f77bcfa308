"""Roles on one GPU: what each takes, which share it, and when the sum is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig, load_pipeline
from opd.config.devices import WorkerGpus
from opd.environments.maze import Maze
from opd.errors import ConfigError
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.merging.run import begin
from pipelines.sizing import gpu_memory, memory, micro_batch
from pipelines.sizing.gpu_memory import (
    ASLEEP,
    CONTEXT,
    GpuRole,
    gpu_roles,
    gpu_sizes,
    memory_phases,
    place_roles,
    refuse_crowded_gpus,
)

GIB = 1 << 30
PARAMETERS = 87_104
"""Of the tiny model."""
ONE_GPU = {"rollout_gpus": 0.3, "teacher_gpus": 0.3, "trainer_gpus": 0.4}


@pytest.fixture
def inputs(world: Any) -> tuple[PipelineConfig, Inputs]:
    config = load_pipeline(world.write())
    return config, read_inputs(config)


@pytest.fixture
def acting(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The expert of the first domain writes turns of its episodes."""
    monkeypatch.chdir(world.root)
    for file, seed in (("mazes", 0), ("mazes-eval", 1)):
        rows = Maze.tasks(6, seed=seed, size=4, mazes=0)
        (world.root / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = {"share": 0.5, "over_steps": 3}
    world.data["domains"]["reverse"] |= {
        "prompts": "mazes.jsonl",
        "environment": {"name": "maze", "max_turns": 7, "teacher_turns": turns},
        "eval": {"prompts": "mazes-eval.jsonl"},
    }
    world.data["rollout"]["max_model_len"] = 128
    return world


def changed(config: PipelineConfig, **sections: Any) -> PipelineConfig:
    data = config.model_dump()
    return PipelineConfig.model_validate(data | {name: data[name] | keys for name, keys in sections.items()})


def on_one_gpu(config: PipelineConfig, share: float = 0.5, **sections: Any) -> PipelineConfig:
    rollout = {"gpu_memory_utilization": share} | sections.pop("rollout", {})
    return changed(config, cluster=ONE_GPU, trainer={"ranks": 1}, rollout=rollout, **sections)


def test_a_merge_on_the_cpu_asks_nothing_of_a_gpu(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: pytest.fail("nobody needs to know"))
    assert refuse_crowded_gpus(*inputs) == []


def test_what_each_role_takes(inputs: Any) -> None:
    config, found = on_one_gpu(inputs[0]), inputs[1]
    engine, teacher, rank = gpu_roles(config, found)
    sequence = config.rollout.max_model_len * 2 * 2 * 64 * 4  # keys and values of 64 numbers in 2 layers
    assert (engine.share, engine.least) == (
        0.5,
        4 * PARAMETERS + memory.engine_activations(config, found) + sequence,
    )
    assert (teacher.resident, teacher.share) == (4 * PARAMETERS, 0)
    assert rank.resident == (20 + 4) * PARAMETERS + memory.heads_bytes(config, found)
    assert rank.passing == 4 * PARAMETERS + micro_batch.micro_batch_bytes(config, found)
    halves = gpu_roles(changed(config, trainer={"ranks": 2}, cluster={"trainer_gpus": 1}), found)
    assert [role.resident - memory.heads_bytes(config, found) for role in halves[2:]] == [(10 + 4) * PARAMETERS] * 2


def test_a_lora_trainer_keeps_a_copy_of_the_weights_and_the_state_of_its_adapters(world: Any) -> None:
    world.data["student"]["lora"] = {"r": 4, "targets": ["q_proj"]}
    config = on_one_gpu(load_pipeline(world.write()))
    found = read_inputs(config)
    *_, rank = gpu_roles(config, found)
    assert found.trained == 2 * 4 * 2 * 64
    assert rank.resident == 4 * PARAMETERS + (20 + 4) * found.trained + memory.heads_bytes(config, found)


def test_a_critic_beside_a_lora_trainer_converts_all_of_its_gradients(world: Any) -> None:
    world.data["student"]["lora"] = {"r": 4, "targets": ["q_proj"]}
    world.data["objective"] = {"reward": {"baseline": {"kind": "critic"}}}
    config = on_one_gpu(load_pipeline(world.write()))
    found = read_inputs(config)
    tiny = {
        "trainer": {"ranks": 1, "micro_batch_tokens": 16},
        "rollout": {"max_model_len": 8},
        "objective": {"chunk": 1},
    }
    *_, rank, critic = gpu_roles(changed(config, **tiny), found)
    assert critic.name == "critic rank" and critic.resident == (20 + 4) * PARAMETERS
    assert rank.passing < critic.passing == 4 * PARAMETERS + 4 * PARAMETERS, "gathered weights, gradients in float32"


def test_an_expert_that_writes_turns_has_a_share_of_its_own(acting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_one_gpu(load_pipeline(acting.write()), 0.45)
    found = read_inputs(config)
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [8 * GIB])
    with pytest.raises(ConfigError) as error:
        refuse_crowded_gpus(config, found)
    message = str(error.value)
    assert "7.79 rollout engine and the expert's" in message and "sleep" not in message
    share = message.split("set rollout.gpu_memory_utilization to ")[1].split()[0]
    assert refuse_crowded_gpus(on_one_gpu(load_pipeline(acting.write()), float(share)), found) == []


def test_teachers_elsewhere_take_nothing_and_an_engine_its_share(inputs: Any) -> None:
    config, found = on_one_gpu(inputs[0]), inputs[1]
    served = changed(config, teachers={"engine": "flight", "address": "grpc://127.0.0.1:1"})
    assert [role.name for role in gpu_roles(served, found)] == ["rollout engine", "trainer rank"]
    engine = changed(config, teachers={"engine": "vllm", "gpu_memory_utilization": 0.2})
    assert [(r.name, r.share) for r in gpu_roles(engine, found)][1] == ("scoring engine", 0.2)


def test_teachers_that_stay_are_counted(inputs: Any) -> None:
    config, found = inputs
    one, _ = memory.scoring_bytes(config, found)

    def kept(gpu_memory: int) -> int:
        (role,) = gpu_roles(changed(config, teachers={"gpu_memory": gpu_memory}, cluster={"teacher_gpus": 1}), found)
        return role.resident

    assert [kept(n) for n in (0, 1, one, one + 1, 2 * one, 3 * one)] == [one, one, one, one + 1, 2 * one, 2 * one]


def test_a_divided_teacher_has_its_share_on_each_gpu_and_the_rest_in_memory(inputs: Any) -> None:
    config, found = inputs
    weights, passing = memory.scoring_bytes(config, found)

    def teacher(gpus: int, max_memory: dict[Any, int]) -> tuple[int, int]:
        given = {"device_map": "auto", "max_memory": max_memory}
        (one,) = gpu_roles(changed(config, teachers=given, cluster={"teacher_gpus": gpus}), found)
        assert one.passing == passing, "a pass is on one GPU at a time"
        needs = memory.estimate_memory(changed(config, teachers=given, cluster={"teacher_gpus": gpus}), found)
        return one.resident, sum(need.nbytes for need in needs if need.part.startswith("teachers"))

    body = found.read_body(found.student)
    layer = 4 * max(body.largest, PARAMETERS // body.blocks)
    assert teacher(1, {}) == (weights, 0)
    assert teacher(8, {}) == (int(weights / 8 + 1.25 * layer), 0)
    assert teacher(2, {0: 1000, 1: 2000, "cpu": GIB}) == (2000, weights - 3000)
    assert teacher(1, {0: 1000, "cpu": 5000, "disk": GIB}) == (1000, 5000), "what stays in files is no memory"
    on_cpu = changed(config, teachers={"device_map": "auto", "max_memory": {"cpu": 5000, "disk": GIB}})
    sizes = {need.part: need.nbytes for need in memory.estimate_memory(on_cpu, found)}
    assert sizes["teachers: weights"] == 2 * 5000, "two experts"


def test_a_teacher_that_is_larger_than_all_it_may_have_is_refused(world: Any) -> None:
    world.data["teachers"] = {"device_map": "auto", "max_memory": {"cpu": 4 * PARAMETERS - 1}}
    with pytest.raises(ConfigError) as refused:
        read_inputs(load_pipeline(world.write()))
    message = str(refused.value)
    assert message.startswith("teachers.max_memory\n  found:  cpu 0.000324 GiB\n"), message
    assert "wanted: room for the 0.000324 GiB of weights of expert `" in message and "or disk, which leaves" in message
    world.data["teachers"]["max_memory"]["disk"] = 1
    read_inputs(load_pipeline(world.write()))


def role(gpus: float, what: str = "r", **more: Any) -> GpuRole:
    return GpuRole(name=what, gpus=WorkerGpus(1, gpus) if gpus < 1 else WorkerGpus(int(gpus)), **more)


@pytest.mark.parametrize(
    ("roles", "placed"),
    [
        ([(0.3, "e"), (0.3, "s"), (0.4, "t")], ["est"]),
        ([(0.5, "e"), (0.5, "s"), (0.5, "t")], ["et", "s"]),
        ([(1, "e"), (0.5, "s"), (1, "t")], ["s", "e", "t"]),
        ([(2, "e")], ["e", "e"]),
        ([(0.4, "e")] * 2 + [(0.1, "s")] * 4 + [(0.4, "t")] * 2, ["esst", "esst"]),
    ],
)
def test_shares_are_on_the_gpus_that_are_dealt_to_them(roles: list[tuple[float, str]], placed: list[str]) -> None:
    made = [role(gpus, name, apart=name != "s") for gpus, name in roles]
    assert ["".join(r.name for r in together) for together in place_roles(made)] == placed


def test_every_gpu_of_a_machine_holds_a_rank_an_engine_and_a_scorer(
    inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of the plan of eight GPUs, which a merge takes; with whole GPUs for each it is told the way out."""
    workers = {"rollout": {"workers": 8, "gpu_memory_utilization": 0.4}, "teachers": {"workers": 8}}
    eight = changed(inputs[0], cluster=ONE_GPU, trainer={"ranks": 8}, **workers)
    names = [[role.name for role in gpu] for gpu in place_roles(gpu_roles(eight, inputs[1]))]
    assert names == [["rollout engine", "scoring worker", "trainer rank"]] * 8
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [80 * GIB] * 8)
    assert refuse_crowded_gpus(eight, inputs[1]) == []
    assert begin(eight, tmp_path / "run").notices == ()
    whole = changed(eight, cluster=dict.fromkeys(ONE_GPU, 1))
    with pytest.raises(ConfigError, match="24 workers that need 24 GPUs, and 8 here") as refused:
        refuse_crowded_gpus(whole, inputs[1])
    assert "cluster.rollout_gpus 0.4, cluster.teacher_gpus 0.2 and cluster.trainer_gpus 0.4" in str(refused.value)
    large = changed(eight, rollout={"gpu_memory_utilization": 0.9, "sleep": True})
    assert refuse_crowded_gpus(large, inputs[1]) == [], "it takes turns with the others"


def test_an_engine_that_sleeps_leaves_its_share_to_those_who_compute() -> None:
    trainer = role(0.4, "trainer", resident=10 * GIB, passing=20 * GIB)
    engine = role(0.6, "engine", share=0.5, share_key="k", sleeps=True)
    writing, computing = memory_phases([engine, trainer])
    assert writing.total(80 * GIB) == 2 * CONTEXT + 50 * GIB
    assert computing.total(80 * GIB) == ASLEEP + CONTEXT + 30 * GIB
    (always,) = memory_phases([role(0.6, "engine", share=0.5, share_key="k"), trainer])
    assert always.total(80 * GIB) == 2 * CONTEXT + 70 * GIB


def test_a_push_wakes_the_weights_alone_and_adds_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = role(0.4, "trainer", resident=10 * GIB, passing=5 * GIB, pushing=20 * GIB)
    engine = role(0.6, "engine", share=0.5, share_key="k", sleeps=True, weights=38 * GIB, pushing=2 * GIB)
    writing, computing, pushing = memory_phases([engine, trainer])
    assert (writing.name, computing.name, pushing.name) == ("writing", "computing", "pushing")
    assert pushing.total(80 * GIB) == ASLEEP + CONTEXT + 70 * GIB > writing.total(80 * GIB)
    awake = role(0.6, "engine", share=0.5, share_key="k", pushing=2 * GIB)
    computing, pushing = memory_phases([awake, trainer])
    assert computing.total(80 * GIB) == 2 * CONTEXT + 55 * GIB
    assert pushing.total(80 * GIB) == 2 * CONTEXT + 72 * GIB
    with pytest.raises(ConfigError, match="engine that takes new weights") as refused:
        gpu_memory._refuse_crowded_gpu([engine, trainer], 70 * GIB)
    assert "fix:    set sync.kind to network if it is direct: its buffers" in str(refused.value)


def test_buffers_of_a_direct_push_are_on_the_gpu_and_others_are_not(inputs: Any) -> None:
    config, found = on_one_gpu(inputs[0], rollout={"sleep": True}), inputs[1]
    largest, layer, bucket = 4 * 64 * 128, 2 * 4 * 64 * 128, 4 * PARAMETERS
    engine, _, rank = gpu_roles(config, found)
    assert config.push_kind == "direct"
    assert (engine.weights, engine.pushing, rank.pushing) == (
        4 * PARAMETERS,
        layer + 2 * bucket,
        largest + 2 * bucket,
    )
    engine, _, rank = gpu_roles(changed(config, sync={"kind": "network"}), found)
    assert (engine.pushing, rank.pushing) == (layer, 4 * PARAMETERS), "the probe gathers more than the push"


def test_a_sum_beyond_the_gpu_is_refused_and_shown_with_the_share_that_fits(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default share of 0.85 beside a trainer and a teacher: what fails today when a worker asks for its first byte."""
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [8 * GIB])
    with pytest.raises(ConfigError) as error:
        refuse_crowded_gpus(on_one_gpu(inputs[0], 0.85), inputs[1])
    message = str(error.value)
    assert (
        message.startswith("GPU memory\n  found:  about ") and "GiB on a GPU with 8.00: 7.39 rollout engine" in message
    )
    assert "+ 0.59 scoring worker" in message and "trainer rank" in message
    share = message.split("set rollout.gpu_memory_utilization to ")[1].split()[0]
    assert "set rollout.sleep to true" in message
    assert refuse_crowded_gpus(on_one_gpu(inputs[0], float(share)), inputs[1]) == [], "the way out is one"
    with pytest.raises(ConfigError):
        refuse_crowded_gpus(on_one_gpu(inputs[0], float(share) + 0.02), inputs[1])


def test_sleep_is_no_way_out_where_it_is_refused(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [8 * GIB])
    config = on_one_gpu(inputs[0], 0.85, schedule={"mode": "one_step_off"})
    with pytest.raises(ValueError, match="false"):
        changed(config, rollout={"sleep": True})
    with pytest.raises(ConfigError) as error:
        refuse_crowded_gpus(config, inputs[1])
    assert "sleep" not in str(error.value)


def test_sleep_makes_room_for_a_large_micro_batch(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [8 * GIB])
    large = {"trainer": {"ranks": 1, "micro_batch_tokens": 400_000}}
    awake = changed(on_one_gpu(inputs[0], 0.5), **large)
    with pytest.raises(ConfigError, match=r"set rollout\.sleep to true"):
        refuse_crowded_gpus(awake, inputs[1])
    assert refuse_crowded_gpus(changed(awake, rollout={"sleep": True}), inputs[1]) == []


def test_a_share_that_does_not_hold_the_weights_is_refused(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [1 << 20])
    with pytest.raises(
        ConfigError,
        match=r"^rollout\.gpu_memory_utilization\n  found:  0\.1 of 0\.00 GiB, and weights, activations and the longest sequence",
    ):
        refuse_crowded_gpus(
            changed(inputs[0], cluster={"rollout_gpus": 1}, rollout={"gpu_memory_utilization": 0.1}), inputs[1]
        )


def test_too_few_gpus_are_refused_at_once(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for them until start_timeout_s."""
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [80 * GIB])
    four = changed(inputs[0], cluster={"rollout_gpus": 1, "teacher_gpus": 1, "trainer_gpus": 1})
    with pytest.raises(ConfigError, match="4 workers that need 4 GPUs, and 1 here"):
        refuse_crowded_gpus(four, inputs[1])
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [80 * GIB] * 4)
    assert refuse_crowded_gpus(four, inputs[1]) == []


def test_without_a_gpu_in_sight_the_sum_is_told_and_nothing_refused(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "gpu_sizes", list)
    (notice,) = refuse_crowded_gpus(on_one_gpu(inputs[0]), inputs[1])
    assert notice.startswith("this process sees no GPU: whether a GPU has room for what it is given is not checked")
    assert (
        "0.59 GiB and 0.5 of the GPU for the rollout engine" in notice and "0.59 GiB for the scoring worker" in notice
    )
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: pytest.fail("they are another machine's"))
    (notice,) = refuse_crowded_gpus(changed(on_one_gpu(inputs[0]), cluster={"address": "10.0.0.1:6379"}), inputs[1])
    assert notice.startswith("the GPUs are other machines'")


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        (None, [143771, 40960]),
        ("1", [40960]),
        ("", []),
        ("1,0", [40960, 143771]),
        ("7", []),
        ("GPU-bb", [40960]),
        ("GPU-bb,GPU-aa1", [40960, 143771]),
        ("1,7,0", [40960]),  # CUDA looks no further than a GPU that is not there
        ("MIG-cc", []),
    ],
)
def test_sizes_are_the_drivers(
    visible: str | None, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU-aa11, 143771, NVIDIA H200\\nGPU-bb22, 40960, NVIDIA A100\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tool))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_sizes() == [size << 20 for size in sizes]
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert gpu_sizes() == []
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("there is no such tool"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert gpu_sizes() == []


def test_a_divided_engine_is_on_several_gpus_with_a_part_of_the_weights_on_each(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(
        inputs[0],
        rollout={"tensor_parallel_size": 2},
        teachers={"engine": "vllm", "tensor_parallel_size": 2},
        cluster={"rollout_gpus": 1, "teacher_gpus": 1},
    )
    engine, teacher = gpu_roles(config, inputs[1])
    whole = gpu_roles(changed(inputs[0], cluster={"rollout_gpus": 1}), inputs[1])[0]
    assert (engine.gpus, engine.least) == (WorkerGpus(2), whole.least // 2)
    assert (teacher.gpus, teacher.least) == (WorkerGpus(2), 2 * PARAMETERS)
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [80 * GIB] * 3)
    with pytest.raises(ConfigError, match="2 workers that need 4 GPUs, and 3 here"):
        refuse_crowded_gpus(config, inputs[1])
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [80 * GIB] * 4)
    assert refuse_crowded_gpus(config, inputs[1]) == []


def test_offloaded_state_is_counted_in_the_machines_memory(inputs: tuple[PipelineConfig, Inputs]) -> None:
    config, read = inputs
    ranks = config.trainer.ranks
    on_gpus = changed(config, cluster={"trainer_gpus": 1})
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    offloaded = changed(on_gpus, trainer={"deepspeed": {"zero_optimization": offload}})
    (before, *_), (after, *_) = (gpu_roles(c, read) for c in (on_gpus, offloaded))
    state = memory.trainer_state_bytes(on_gpus, read)
    assert state == 20 * PARAMETERS
    assert before.resident - after.resident == state // ranks
    hosts = [sum(need.nbytes for need in memory.estimate_memory(c, read)) for c in (on_gpus, offloaded)]
    assert hosts[1] - hosts[0] == state


def test_each_group_that_gathers_by_itself_has_a_copy_of_the_weights(inputs: tuple[PipelineConfig, Inputs]) -> None:
    config, read = inputs
    four = changed(config, trainer={"ranks": 4})
    groups = changed(four, trainer={"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}})
    weights = [memory.trainer_state(c, read)["weights"] for c in (four, groups)]
    assert weights == [4 * PARAMETERS, 4 * PARAMETERS + 2 * 4 * PARAMETERS]


def test_activations_at_checkpoints_move_from_the_gpu_to_the_machines_memory(
    inputs: tuple[PipelineConfig, Inputs],
) -> None:
    config, read = inputs
    stays = changed(config, trainer={"ranks": 2, "gradient_checkpointing": True}, cluster={"trainer_gpus": 1})
    moves = changed(stays, trainer={"activation_offloading": True})
    before, after = ([role for role in gpu_roles(c, read) if role.name == "trainer rank"] for c in (stays, moves))
    checkpoints = micro_batch.checkpoint_bytes(stays, read)
    assert checkpoints > 1000 * 2 * read.student.hidden_size
    assert before[0].passing - after[0].passing == checkpoints
    hosts = [sum(need.nbytes for need in memory.estimate_memory(c, read)) for c in (stays, moves)]
    assert hosts[1] - hosts[0] == 2 * checkpoints


def test_ranks_that_share_rows_hold_part_of_the_activations_and_the_exchange(
    inputs: tuple[PipelineConfig, Inputs],
) -> None:
    config, read = inputs
    alone, shared = (changed(config, trainer={"ranks": 2, "sequence_parallel_size": size}) for size in (1, 2))
    hidden = read.student.hidden_size
    rest = micro_batch.micro_batch_bytes(changed(alone, trainer={"micro_batch_tokens": 16}), read)
    sizes = [micro_batch.micro_batch_bytes(c, read) for c in (alone, shared)]
    body = read.read_body(read.student).activation_width(hidden, checkpointing=False)
    tokens = (sizes[0] - rest) // (4 * body)
    assert tokens > 1000
    fewer = sizes[0] - sizes[1]
    assert fewer == pytest.approx(tokens * 2 * (body - micro_batch.EXCHANGE_COPIES * hidden), rel=0.2)
