"""What a merge records of its experts, and what it hands to an engine that can only hold whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import pipelines.evaluate
from experts.adapter import whole_model
from opd.config import PipelineConfig, load_pipeline, validate
from opd.errors import RunDirError
from opd.evaluation.scores import DomainScore, Evaluation
from opd.metrics import MetricsFile
from opd.progress import RunReporter
from opd.types import Teacher
from pipelines import preflight
from pipelines.build import RunPaths
from pipelines.evaluate import lm_eval_merge
from pipelines.merge import _before_and_experts, _manifest, _refuse_changed_inputs, _resolved
from pipelines.preflight import check


@pytest.fixture
def mixed(world: Any, make_adapter: Callable[..., Path]) -> Any:
    """The world with an adapter of `base` in place of one of the two full models."""
    make_adapter(world.root / "adapters" / "up", world.root / "base", base_model_name_or_path="base")
    world.data["experts"]["up"]["model"] = "adapters/up"
    return world


def test_an_engine_gets_a_full_model_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    teacher = Teacher(name="full", model_dir=tiny_model_dir)
    with whole_model(teacher, tmp_path / "scratch") as directory:
        assert directory == tiny_model_dir
    assert tiny_model_dir.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_gets_an_adapter_merged_for_as_long_as_it_reads(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], merged_plainly: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_model_dir)
    want = load_file(merged_plainly(tiny_model_dir, adapter, tmp_path / "want") / "model.safetensors")
    scratch = tmp_path / "run" / ".tmp-expert"
    scratch.mkdir(parents=True)
    (scratch / "left.by.a.killed.run").touch()
    teacher = Teacher(name="lora", model_dir=tiny_model_dir, adapter_dir=adapter)
    with pytest.raises(InterruptedError), whole_model(teacher, scratch) as directory:
        assert sorted(p.name for p in directory.iterdir()) == sorted(p.name for p in tiny_model_dir.iterdir())
        found = load_file(directory / "model.safetensors")
        assert set(found) == set(want)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-6)
        raise InterruptedError
    assert list(scratch.parent.iterdir()) == [], "removed however the reading ended"


def test_a_resume_needs_neither_the_current_directory_nor_a_guess(
    mixed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = load_pipeline(mixed.write())
    resolved = _resolved(config, check(config))
    assert {n: e["base"] for n, e in resolved["experts"].items()} == {"rev": None, "up": str(mixed.root / "base")}
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = check(validate(PipelineConfig, resolved, "pipeline.yaml"))
    assert again.teachers["upper"].adapter_dir == mixed.root / "adapters" / "up"


def test_a_resume_with_another_adapter_is_refused(mixed: Any) -> None:
    config = load_pipeline(mixed.write())
    before = _manifest(config, check(config))
    assert "adapter" not in before["experts"]["rev"]
    _refuse_changed_inputs(before, _manifest(config, check(config)), RunPaths(mixed.root))
    file = mixed.root / "adapters" / "up" / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(RunDirError, match="experts changed since the run began: up"):
        _refuse_changed_inputs(before, _manifest(config, check(config)), RunPaths(mixed.root))


# Evaluations of a run


def test_a_resume_finds_local_tasks_and_verifiers_from_anywhere(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_tasks", lambda config: None)
    world.data["evaluate"] = {"lm_eval": ["gsm8k", "tasks/mine.yaml"]}
    world.data["domains"]["upper"]["eval"]["verifier"] = {"kind": "regex", "pattern": "(.*)"}
    config = load_pipeline(world.write())
    resolved = yaml.safe_load(yaml.safe_dump(_resolved(config, check(config))))
    again = validate(PipelineConfig, resolved, "pipeline.yaml")
    assert again.evaluate.lm_eval.tasks == ["gsm8k", str(world.root / "tasks" / "mine.yaml")]
    assert again.domains["upper"].eval.verifier == config.domains["upper"].eval.verifier  # type: ignore[union-attr]


class Measuring:
    """An engine, an evaluator and a reporter that write down what they are asked for."""

    def __init__(self, paths: RunPaths, shown: Any) -> None:
        self.reporter = RunReporter(MetricsFile(paths.metrics), paths.evaluation, shown)
        self.engine = self.evaluator = self
        self.asked: list[str] = []

    def load(self, model_dir: Path) -> None:
        self.asked.append(f"load {model_dir.name}")

    def evaluate(self, domains: Any = None, *, model: str) -> Evaluation:
        self.asked.append(model)
        score = DomainScore(accuracy=0.5, stderr=0.1, low=0.3, high=0.7, questions=6)
        return Evaluation(model=model, scores=dict.fromkeys(domains or ("reverse", "upper"), score))


def test_student_and_experts_are_measured_once_in_a_run(world: Any) -> None:
    config = load_pipeline(world.write())
    inputs, paths = check(config), RunPaths(world.root / "run")
    paths.root.mkdir()
    shown: Any = type("Shown", (), {"say": lambda self, line: None})()

    def measure() -> tuple[list[str], Any]:
        parts: Any = Measuring(paths, shown)
        return parts.asked, _before_and_experts(parts, inputs, paths, config, shown)

    asked, found = measure()
    assert asked == ["student before", "load rev", "expert rev", "load up", "expert up", "load base"]
    assert [one.model for one in found] == ["student before", "expert"]
    assert sorted(f.name for f in paths.evaluation.iterdir()) == ["before.json", "expert.json"]
    assert measure() == ([], found)
    (paths.evaluation / "expert.json").unlink()  # killed in between
    asked, again = measure()
    assert asked[0] == "load rev" and again == found


def test_public_tasks_are_run_for_the_student_before_and_the_merged_model(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(
        pipelines.evaluate,
        "run_tasks",
        lambda settings, path, dtype: ran.append((str(path), dtype)) or {"gsm8k": {"acc,none": 0.5}},
    )
    file = world.root / "lm-eval.json"
    lm_eval_merge(load_pipeline(world.write()), Path("run/model"), file)
    assert ran == [] and not file.exists()
    world.data["evaluate"] = {"lm_eval": ["gsm8k"]}
    world.data["rollout"]["dtype"] = "bfloat16"
    lm_eval_merge(load_pipeline(world.write()), Path("run/model"), file)
    assert ran == [("base", "bfloat16"), ("run/model", "bfloat16")]
    scores = {"gsm8k": {"acc,none": 0.5}}
    assert json.loads(file.read_text()) == {"format": 1, "models": {"student before": scores, "merged": scores}}
