"""`opd check --cluster`: what a merge would refuse on machines that are described, and the sums where it refuses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cli import app
from opd.config import load_pipeline
from pipelines.check.described import UNREAD, check_on_cluster
from pipelines.inputs.read import read_inputs
from pipelines.plan.spec import load_spec
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.memory import estimate_memory
from tests.unit.test_cli import refused

GPUS = {"rollout_gpus": 0.3, "teacher_gpus": 0.3, "trainer_gpus": 0.4}


def check(world: Any, spec: str, **machine: Any) -> Result:
    """Run the command on a world's pipeline and a shipped spec, with some facts of its machines changed."""
    data = load_spec(spec).model_dump()
    data |= {key: data[key] | value if isinstance(value, dict) else value for key, value in machine.items()}
    file = world.root / "spec.yaml"
    file.write_text(yaml.safe_dump(data))
    return CliRunner().invoke(app, ["check", str(world.write()), "--cluster", str(file)])


@pytest.fixture
def on_gpus(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A merge with all roles on one GPU; this machine has none."""
    monkeypatch.chdir(world.root)
    world.data["cluster"] = dict(GPUS)
    world.data["trainer"]["ranks"] = 1
    world.data["rollout"]["gpu_memory_utilization"] = 0.3
    return world


def test_the_sums_are_those_of_the_merge_on_that_machine(world: Any) -> None:
    config, spec = load_pipeline(world.write()), load_spec("two-cores")
    (report,) = check_on_cluster(config, spec)
    inputs = read_inputs(config)
    assert list(report.memory) == estimate_memory(choose_numbers(config, inputs, spec.hardware), inputs)
    assert report.gpus == ()
    accepted = check(world, "two-cores")
    assert accepted.exit_code == 0 and "nothing is refused on two-cores" in accepted.stderr
    assert "the cluster spec" in accepted.stdout and "24.00" in accepted.stdout


def test_each_phase_of_a_gpu_is_shown(on_gpus: Any) -> None:
    on_gpus.data["rollout"]["sleep"] = True
    (report,) = check_on_cluster(load_pipeline(on_gpus.write()), load_spec("1-gpu-80gb"))
    assert [row[0] for row in report.gpus] == [
        "engines write",
        "teachers score, ranks train",
        "new weights are pushed",
    ]
    assert {row[3] for row in report.gpus} == {"79.00"}


@pytest.mark.parametrize(
    ("spec", "machine", "words"),
    [
        ("two-cores", {"memory": "1GiB"}, ["memory\n", "machine with 1.00", "the machines of the cluster spec"]),
        ("two-cores", {}, ["cluster\n", "3 workers that need 1 GPUs, and 0 in the spec"]),
        ("1-gpu-80gb", {"gpu_memory": "2GiB"}, ["GPU memory\n", "on a GPU with 2.00"]),
    ],
)
def test_what_a_machine_has_no_room_for_is_refused(
    spec: str, machine: dict[str, Any], words: list[str], on_gpus: Any
) -> None:
    refused(check(on_gpus, spec, machine=machine), *words)


def test_more_ranks_than_gpus_are_refused(on_gpus: Any) -> None:
    on_gpus.data["trainer"]["ranks"] = 2
    refused(check(on_gpus, "1-gpu-80gb"), "cluster\n", "need 2 GPUs, and 1 in the spec")
    assert check(on_gpus, "8-gpus").exit_code == 0


def test_a_merge_on_one_machine_is_checked_on_one_of_several(on_gpus: Any) -> None:
    on_gpus.data["trainer"]["ranks"] = 9
    refused(check(on_gpus, "16-gpus"), "need 9 GPUs, and 8 in the spec")
    on_gpus.data["cluster"]["address"] = "auto"
    assert check(on_gpus, "16-gpus").exit_code == 0
    on_gpus.data["trainer"]["ranks"] = 1
    on_gpus.data["cluster"]["address"] = "local"
    assert "checked on one of the 2 machines" in check(on_gpus, "16-gpus").stdout


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"cluster": {"placement": {"trainer": {"strategy": "strict_spread"}}}, "trainer": {"ranks": 3}},
            ["cluster.placement.trainer", "strict_spread", "3 nodes"],
        ),
        (
            {"sync": {"kind": "direct"}, "rollout": {"tensor_parallel_size": 2}, "cluster": {"rollout_gpus": 1}},
            ["sync.kind\n", "direct with rollout.tensor_parallel_size 2 on 2 nodes", "set sync.kind to network"],
        ),
    ],
    ids=["a node for each rank", "direct pushes to divided engines"],
)
def test_what_the_nodes_of_a_cluster_cannot_do_is_refused(
    sections: dict[str, Any], words: list[str], on_gpus: Any
) -> None:
    on_gpus.data["cluster"] = {"address": "auto", "trainer_gpus": 1}
    for name, section in sections.items():
        on_gpus.data[name] = on_gpus.data.get(name, {}) | section
    refused(check(on_gpus, "16-gpus"), *words)


def test_models_may_be_their_configurations(on_gpus: Any) -> None:
    for name in ("base", "rev", "up"):
        for file in (on_gpus.root / name).iterdir():
            if file.name != "config.json":
                file.unlink()
    accepted = check(on_gpus, "1-gpu-80gb")
    assert accepted.exit_code == 0, accepted.output
    assert f"note: {UNREAD}" in accepted.stdout
    (on_gpus.root / "up" / "config.json").unlink()
    refused(check(on_gpus, "1-gpu-80gb"), "config.json", "no such file")


def test_prompts_have_to_be_here(on_gpus: Any) -> None:
    (on_gpus.root / "base" / "model.safetensors").unlink()
    (on_gpus.root / "reverse.jsonl").unlink()
    refused(check(on_gpus, "1-gpu-80gb"), "reverse.jsonl")


def test_every_round_is_checked(on_gpus: Any) -> None:
    on_gpus.data["rounds"] = [{}, {"trainer": {"micro_batch_tokens": 1 << 24}}]
    refused(check(on_gpus, "1-gpu-80gb"), "memory")
    on_gpus.data["rounds"] = 2
    assert "round 2" not in check(on_gpus, "1-gpu-80gb").stdout


def test_a_spec_that_is_not_there_is_refused(world: Any) -> None:
    refused(CliRunner().invoke(app, ["check", str(world.write()), "--cluster", "none.yaml"]), "none.yaml", "1-gpu-24gb")
