"""Experts by reinforcement without Ray: base, runs, places, manifests; what is kept, what goes on, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experts.registry import Registry
from experts.rl.spec import ReinforceSpec
from opd.config import load_pipeline
from opd.errors import ConfigError, OpdError, RegistryError, RunDirError, RunError
from opd.report import read_run
from opd.settings.yaml_files import validate_section
from pipelines.baselines.comparison import run_comparison
from pipelines.inputs.read import read_inputs
from pipelines.interrupts import Interrupted
from pipelines.merging import run as merging
from pipelines.merging.card import model_card
from pipelines.merging.manifest import make_manifest
from pipelines.reinforce import reinforce_experts
from pipelines.sizing.memory import estimate_memory
from tests.unit.pipelines.merging.test_rounds import Engines


@pytest.fixture
def engines(world: Any, monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines(world.root / "base")
    monkeypatch.setattr(merging, "_run_session", found.session)
    monkeypatch.setattr("opd.report.page.render_page", lambda *_: "")
    return found


def raw(**changes: Any) -> dict[str, Any]:
    return {
        "output_dir": "models",
        "base": {"model": "base"},
        "method": "ppo",
        "rollout": {"max_model_len": 32, "max_new_tokens": 8},
        "trainer": {"steps": 2, "samples_per_step": 4, "lr": 1e-3},
        "experts": {
            domain: {"domain": domain, "prompts": f"{domain}.jsonl", "eval": {"prompts": f"{domain}-eval.jsonl"}}
            for domain in ("reverse", "upper")
        },
        "registry": "registry",
    } | changes


def spec(**changes: Any) -> ReinforceSpec:
    return validate_section(ReinforceSpec, raw(**changes), "s.yaml")


said: list[str] = []


def go(**changes: Any) -> list[Path]:
    said.clear()
    return reinforce_experts(spec(**changes), said.append)


def test_each_expert_is_a_run_of_its_own_from_the_same_base_and_is_registered(engines: Engines) -> None:
    assert go() == [Path("models/reverse"), Path("models/upper")]
    assert engines.events == [
        *("reverse-ppo: student before on reverse", "reverse-ppo: train from 0", "reverse-ppo: trained"),
        *("reverse-ppo: merged on reverse", "upper-ppo: student before on upper", "upper-ppo: train from 0"),
        *("upper-ppo: trained", "upper-ppo: merged on upper"),
    ]
    manifest = Registry(Path("registry")).get("upper")
    assert (manifest.domain, manifest.model) == ("upper", str(Path("models/upper").absolute()))
    assert manifest.prompts == str(Path("upper.jsonl").absolute())
    lineage = manifest.training
    assert lineage is not None and lineage["method"] == "ppo"
    assert lineage["base"]["weights"] == manifest_of_base()
    assert lineage["objective"]["reward"]["baseline"]["kind"] == "critic"
    assert lineage["result"]["success"] == {"upper": [0.2, 0.5]}
    assert lineage["result"]["run"] == str(Path("runs/upper-ppo").absolute())
    assert Registry(Path("registry")).verify("upper") == []
    assert said[-1] == "upper: 0.20 → 0.50 on upper, report runs/upper-ppo/report.html"


def test_tasks_that_a_mapping_reads_are_not_registered_as_a_file(engines: Engines) -> None:
    """The file has other columns than ours, so nobody could read it by its path alone."""
    rows = [json.loads(line) for line in Path("upper.jsonl").read_text().splitlines()]
    Path("other.jsonl").write_text("\n".join(json.dumps({"question": r.pop("prompt"), **r}) for r in rows) + "\n")
    experts = raw()["experts"]
    experts["upper"]["prompts"] = {"path": "other.jsonl", "columns": {"prompt": "question"}}
    assert go(experts=experts) == [Path("models/reverse"), Path("models/upper")]
    registry = Registry(Path("registry"))
    assert registry.get("upper").prompts is None and registry.get("reverse").prompts is not None
    assert go(experts=experts) == [Path("models/reverse"), Path("models/upper")], "the same command finds it finished"


def manifest_of_base() -> dict[str, str]:
    from experts.model_dir import inspect_model

    return dict(inspect_model(Path("base")).weight_files)


def test_a_second_call_keeps_what_is_finished_and_registers_what_is_not(engines: Engines) -> None:
    go()
    Registry(Path("registry")).remove("upper")
    engines.events.clear()
    go()
    assert engines.events == [] and said == [f"{name}: finished before, kept" for name in ("reverse", "upper")]
    assert Registry(Path("registry")).names() == ["reverse", "upper"]


def test_an_interrupted_run_goes_on_from_its_checkpoint(engines: Engines) -> None:
    engines.fail_at = "upper-ppo: trained"
    with pytest.raises(RunError, match="killed"):
        go()
    assert Registry(Path("registry")).names() == ["reverse"] and not Path("models/upper").exists()
    engines.events.clear()
    go()
    assert "upper: going on in runs/upper-ppo" in said
    assert engines.events[0] == "upper-ppo: train from 2", "the exam before was measured by the first call"
    assert Registry(Path("registry")).names() == ["reverse", "upper"]


def test_a_run_that_is_through_but_not_in_its_place_is_not_run_again(engines: Engines, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise RunError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.reinforce.publish_model", full)
        with pytest.raises(RunError):
            go()
    engines.events.clear()
    go()
    assert not any(event.startswith("reverse-ppo") for event in engines.events)
    assert Path("models/reverse/model.safetensors").exists() and not list(Path("models").glob(".*"))


def test_ctrl_c_between_two_runs_is_not_lost(engines: Engines) -> None:
    engines.signals_at = "reverse-ppo: merged on reverse"
    with pytest.raises(Interrupted):
        go()
    assert Registry(Path("registry")).names() == ["reverse"]
    assert not any(event.startswith("upper-ppo") for event in engines.events)


def test_another_spec_does_not_take_over_a_directory_a_run_or_a_name(engines: Engines, world: Any) -> None:
    go()
    with pytest.raises(ConfigError, match="models/reverse"):
        go(seed=1)
    with pytest.raises(RegistryError, match="expert `reverse`"):
        go(output_dir="elsewhere")
    (world.root / "models").rename(world.root / "moved")
    with pytest.raises(RunDirError, match="seed"):
        go(seed=1)


def test_a_setting_of_the_machine_may_change_between_two_experts(engines: Engines) -> None:
    """As for a run that is resumed: memory ran out at the second expert, and the first one is what the spec would make."""
    go()
    made = Path("models/reverse/training.json").read_text()
    calmer = raw()["rollout"] | {"gpu_memory_utilization": 0.5, "kv_cache_gib": 2}
    assert go(rollout=calmer) == [Path("models/reverse"), Path("models/upper")]
    assert Path("models/reverse/training.json").read_text() == made
    with pytest.raises(ConfigError, match="models/reverse"):
        go(rollout=calmer | {"temperature": 0.5})


def test_everything_is_checked_before_anything_runs(engines: Engines) -> None:
    data = raw()
    data["experts"]["upper"]["trainer"] = {"steps": 0}
    with pytest.raises(ConfigError, match=r"experts\.upper: trainer\.steps"):
        reinforce_experts(validate_section(ReinforceSpec, data, "s.yaml"), said.append)
    data = raw()
    data["experts"]["upper"]["prompts"] = "nowhere.jsonl"
    with pytest.raises(OpdError, match="nowhere"):
        reinforce_experts(validate_section(ReinforceSpec, data, "s.yaml"), said.append)
    assert engines.events == [] and not Path("runs").exists()


# What a run without teachers is to the rest


@pytest.fixture
def alone(world: Any) -> Any:
    """The world's pipeline without teachers."""
    world.data |= {"experts": {}, "teachers": {"engine": "none"}}
    world.data["objective"] = {"kind": "none", "reward": {"baseline": "critic"}}
    return load_pipeline(world.write())


def test_its_inputs_manifest_card_and_memory_know_no_experts(alone: Any) -> None:
    inputs = read_inputs(alone)
    assert (inputs.experts, inputs.routes, inputs.teachers) == ({}, {}, {}) and set(inputs.exams) == {
        "reverse",
        "upper",
    }
    found = make_manifest(alone, inputs)
    assert found["experts"] == {} and set(found["prompts"]) == {"reverse", "upper"}
    assert "Trained by reinforcement" in model_card(alone, inputs) and "Expert" not in model_card(alone, inputs)
    needs = {need.part: need.nbytes for need in estimate_memory(alone, inputs)}
    assert not any(what.startswith("teachers") for what in needs)
    of_each_rank = 4  # gradients on their way to the sum over ranks
    copied = 12  # while a checkpoint is written
    assert needs["critic: weights, gradients, AdamW, and a copy for a checkpoint"] == (
        (20 + alone.trainer.ranks * of_each_rank + copied) * inputs.student.parameters
    )


def test_commands_that_ask_experts_refuse_it(alone: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts: `opd compare` needs some"):
        run_comparison(alone, tmp_path / "compare", [0], [], [], said.append)


def test_its_report_has_what_was_gained_without_a_headroom(engines: Engines) -> None:
    go()
    found = json.loads(Path("runs/upper-ppo/report.json").read_text())
    assert found["domains"]["upper"] | {"regression": 0} == {
        "before": 0.2, "after": 0.5, "expert": None, "headroom": None, "regression": 0,
        "before_interval": [pytest.approx(0.15), pytest.approx(0.25)], "expert_interval": None, "headroom_interval": None,
        "after_interval": [pytest.approx(0.45), pytest.approx(0.55)], "regression_interval": found["domains"]["upper"]["regression_interval"],
    }  # fmt: skip
    assert found["mean_headroom"] is None and read_run(Path("runs/upper-ppo")).without_teachers
