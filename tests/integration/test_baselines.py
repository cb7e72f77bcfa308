"""Baselines for real: mergekit's arithmetic, and a student that learns what the rollout engine let its experts write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.config import PipelineConfig
from opd.evaluation.baselines import BaselineResult
from opd.settings.yaml_files import validate_section
from pipelines.baselines.jobs import plan_jobs
from pipelines.baselines.mergekit import environment_dir, merge_weights
from pipelines.baselines.run import compute_results
from pipelines.baselines.weights import WEIGHT_METHODS
from pipelines.inputs.read import read_inputs

Tensors = dict[str, torch.Tensor]


def expected(method: str, base: Tensors, experts: list[Tensors], strength: float) -> Tensors:
    """By the definition of each method."""

    def one(name: str) -> torch.Tensor:
        stacked = torch.stack([expert[name] for expert in experts])
        if method == "linear":
            return stacked.mean(0)
        return base[name] + strength * (stacked - base[name]).sum(0)

    return {name: one(name) for name in base}


@pytest.mark.skipif(not environment_dir().exists(), reason="mergekit is not installed; `opd baseline` does it")
def test_merges_of_weights_are_what_their_names_say(pipeline: dict[str, Any], tmp_path: Path) -> None:
    inputs = read_inputs(validate_section(PipelineConfig, pipeline, "pipeline.yaml"))
    experts = [Path(expert.info.path) for expert in inputs.experts.values()]
    strengths = {"linear": 0.0, "task_arithmetic": 0.3}
    recipes = {
        f"merged-{name}": WEIGHT_METHODS[name].mergekit_recipe(inputs.student, experts, strength or None)
        for name, strength in strengths.items()
    }
    merge_weights(recipes, tmp_path / "out", seed=0, timeout_s=120, home=environment_dir())
    tensors = [load_file(path / "model.safetensors") for path in (Path(inputs.student.path), *experts)]
    for name, strength in strengths.items():
        found = load_file(tmp_path / "out" / f"merged-{name}" / "model.safetensors")
        want = expected(name, tensors[0], tensors[1:], strength)
        assert set(found) == set(want)
        for key, tensor in want.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=f"{name}: {key}")


def test_the_student_learns_what_its_experts_write(pipeline: dict[str, Any], tmp_path: Path) -> None:
    pipeline["trainer"] |= {"steps": 8, "samples_per_step": 32}
    config = validate_section(PipelineConfig, pipeline, "pipeline.yaml")
    lines: list[str] = []
    [result] = compute_results(
        plan_jobs(config, tmp_path / "out", ["off_policy"], [0.5], None), lines.append, keep_models=True
    )

    losses = [float(line.split("loss ")[1]) for line in lines if "loss" in line]
    assert len(losses) == 4, "half of the steps"
    assert losses[-1] < losses[0]
    assert (result.token_share, result.seed, set(result.scores)) == (0.5, 0, set(pipeline["domains"]))
    assert 4 * 32 <= (result.tokens or 0) <= 4 * 32 * 8, "one to eight tokens a response"
    assert BaselineResult.load(tmp_path / "out" / "baselines" / "off_policy-0.5.json") == result
    found = load_file(tmp_path / "out" / "baselines" / "models" / "off_policy-0.5" / "model.safetensors")
    before = load_file(Path(pipeline["student"]["model"]) / "model.safetensors")
    assert all((found[name] - before[name]).abs().max() > 0 for name in before)
