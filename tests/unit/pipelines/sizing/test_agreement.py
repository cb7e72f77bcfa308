"""`opd check`, `opd plan` and `opd init` ask one sum: the same number for the same role, and one answer to whether a merge fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from pipelines.catalog import find_pipeline
from pipelines.inputs.lora import size_of_lora
from pipelines.inputs.read import read_inputs, read_teachers
from pipelines.plan.models import read_models
from pipelines.plan.plan import fits_cluster, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec
from pipelines.propose.models import ExpertFacts
from pipelines.propose.sizes import build_merge_models
from pipelines.sizing import gpu_memory, memory
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.gpu_memory import fits_machine, gpu_roles, refuse_crowded_gpus
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.memory import estimate_memory, refuse_too_large
from pipelines.sizing.models import MergeModels
from tests.unit.pipelines.propose.test_columns import write

GIB = 1 << 30
PIPELINES = ("quickstart", "smollm2", "rewards", "cluster", "merge-7b", "merge-70b")
"""Shipped ones whose domains have a teacher each."""
CLUSTERS = ("two-cores", "two-cores-bf16", "8-gpus", "32-gpus", "256-gpus")


@pytest.fixture
def tiny(world: Any, make_adapter: Callable[..., Path]) -> Callable[[str, bool], PipelineConfig]:
    """A shipped pipeline on tiny models; with `adapters` its experts are adapters, and its student trains some."""
    file = world.root / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 1 << 17}))
    shutil.rmtree(world.root / "up")
    shutil.copytree(world.root / "base", world.root / "up")
    make_adapter(world.root / "low", world.root / "base")

    def read(name: str, adapters: bool) -> PipelineConfig:
        config = load_pipeline(find_pipeline(name))
        data = config.model_dump(mode="json", exclude_unset=True)
        expert = {"model": "low", "base": "base"} if adapters else {"model": "up"}
        data["student"] = {"model": "base"} | ({"lora": {"r": 4}} if adapters else {})
        data["experts"] = {domain: expert | {"domain": domain} for domain in config.domains}
        for section in ("rollout", "teachers"):
            if "tensor_parallel_size" in data.get(section, {}):
                data[section]["tensor_parallel_size"] = 2  # the tiny model has two heads
        for domain in data["domains"].values():
            domain.pop("teachers", None)
            domain.setdefault("prompts", "reverse.jsonl")
        return PipelineConfig.model_validate(data)

    return read


def by_check(config: PipelineConfig) -> MergeModels:
    teaching = read_teachers(config)
    lora = size_of_lora(config, teaching.student)
    return MergeModels(student=teaching.student, scorers=teaching.scorers, scoring=teaching.scoring, lora=lora)


def by_init(config: PipelineConfig, check: MergeModels) -> MergeModels:
    seen = {
        name: ExpertFacts(model=Path("up"), base=None, info=expert.info, adapter=expert.adapter)
        for name, expert in check.scorers.items()
    }
    models = build_merge_models(check.student, seen, {})
    return MergeModels(student=models.student, scorers=models.scorers, scoring=models.scoring, lora=check.lora)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_role_has_one_figure(name: str, adapters: bool, tiny: Any) -> None:
    config = tiny(name, adapters)
    check, plan = by_check(config), read_models(config).merge
    init = by_init(config, check)
    assert estimate_memory(config, plan) == estimate_memory(config, check) == estimate_memory(config, init)
    roles = gpu_roles(config, check)
    assert gpu_roles(config, plan) == roles == gpu_roles(config, init)
    assert bool(roles) == bool(config.cluster.rollout_gpus)
    for cluster in CLUSTERS:
        hardware = load_spec(cluster).hardware
        answers = {fits_machine(config, models, hardware) for models in (check, plan, init)}
        assert len(answers) == 1, cluster


def test_a_plan_prints_the_figures_of_the_check(tiny: Any) -> None:
    config, needs = tiny("quickstart", False), {}
    for need in estimate_memory(config, by_check(config)):
        role = need.part.partition(":")[0]
        needs[role] = needs.get(role, 0) + need.nbytes
    made = make_plan(config, load_spec("two-cores"))
    assert made.room[0].needed == sum(needs.values())
    assert made.fullest["trainer rank"] == memory.TRAINER_PROCESS + needs["trainer"] // config.trainer.ranks
    assert made.fullest["rollout engine"] == memory.ROLLOUT_PROCESS + needs["rollout"]
    assert made.fullest["scoring worker"] == memory.TEACHER_PROCESS + needs["teachers"]


def spec_of(machine: MachineFacts) -> ClusterSpec:
    """One machine as `opd plan` sees it."""
    base = load_spec("8-gpus" if machine.gpus else "two-cores").model_dump(exclude={"placement"})
    sizes: dict[str, Any] = {"cores": machine.cores, "memory": machine.memory}
    if machine.gpus:
        sizes |= {"gpus": len(machine.gpus), "gpu_memory": min(machine.gpus)}
    return ClusterSpec.model_validate(base | {"machine": sizes})


def is_refused(
    config: PipelineConfig, models: MergeModels, machine: MachineFacts, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Return True if `opd check` and `opd merge` refuse it on that machine."""
    monkeypatch.setattr(memory, "machine_bytes", lambda: machine.memory)
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: list(machine.gpus))
    config = choose_numbers(config, models, machine)
    try:
        refuse_too_large(config, models)
        refuse_crowded_gpus(config, models)
    except ConfigError:
        return True
    return False


MACHINES = [
    MachineFacts(cores=2, memory=4 * GIB),
    MachineFacts(cores=4, memory=24 * GIB, bf16=True),
    *(MachineFacts(cores=16, memory=64 * GIB, gpus=(80 * GIB,) * gpus) for gpus in (1, 2, 3, 4, 8)),
    MachineFacts(cores=16, memory=64 * GIB, gpus=(8 * GIB,)),
    MachineFacts(cores=16, memory=64 * GIB, gpus=(2 * GIB,)),
]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_what_init_writes_for_a_machine_its_check_and_plan_accept(
    machine: MachineFacts, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.root / "pipeline.yaml").unlink()
    monkeypatch.setattr("pipelines.sizing.machine.read_machine", lambda: machine)
    words = [f"{a}{b}c" for a in "abcdefghij" for b in "abcdef"]
    for file in ("rev", "up"):
        write(world.root / f"{file}.csv", [{"prompt": f"{file} {word}=", "answer": word[::-1]} for word in words])
    command = ["init", "--student", "base", "--expert", "rev", "--expert", "up", "--prompts", "rev.csv"]
    shown = CliRunner().invoke(app, [*command, "--prompts", "up.csv"])
    assert shown.exit_code == 0, shown.output
    config = load_pipeline(world.root / "pipeline.yaml")
    fits = "may not fit" not in shown.stderr
    assert fits == (min(machine.gpus, default=80 * GIB) > 2 * GIB), "too small for two contexts and a share"
    assert is_refused(config, read_inputs(config), machine, monkeypatch) != fits
    assert fits_cluster(config, spec_of(machine)) == fits


def test_roles_on_one_gpu_add_up_and_others_do_not(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollout and scoring engine on halves of a GPU, beside a trainer on its own: a plan counts both, and the trainer elsewhere. The smallest
    share has room for the weights, and none for a sequence."""
    data = tiny("cluster", False).model_dump(mode="json")
    data["cluster"] |= {"address": "local", "rollout_gpus": 0.5, "teacher_gpus": 0.5, "trainer_gpus": 1}
    data["trainer"]["ranks"] = data["rollout"]["workers"] = 1
    for share, gpus, fits in ((0.4, 2, True), (0.6, 2, False), (0.4, 1, False), (5e-5, 2, False)):
        data["rollout"]["gpu_memory_utilization"] = share
        data["teachers"] = {"engine": "vllm", "gpu_memory_utilization": share}
        config = PipelineConfig.model_validate(data)
        machine = MachineFacts(cores=16, memory=64 * GIB, gpus=(40 * GIB,) * gpus)
        assert is_refused(config, by_check(config), machine, monkeypatch) != fits
        assert fits_cluster(config, spec_of(machine)) == fits
