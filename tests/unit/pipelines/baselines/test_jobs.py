"""A command's request as results to compute: shares, seeds, budgets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError, RunDirError
from pipelines.baselines.jobs import METHODS, open_run, parse_methods, parse_seeds, parse_shares, plan_jobs, scale_steps


@pytest.fixture
def config(world: Any) -> PipelineConfig:
    world.data["trainer"] = {"steps": 40, "samples_per_step": 4, "warmup_steps": 10}
    world.data["evaluate"] = {"every": 5}
    world.data["seed"] = 7
    return load_pipeline(world.write())


def write_run(root: Path, config: PipelineConfig, tokens: list[int]) -> None:
    root.mkdir()
    (root / "pipeline.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": 1, "response_tokens": t, "domains": domains(t)}) + "\n" for t in tokens)
    )


def domains(tokens: int) -> dict[str, object]:
    """Three quarters of the tokens are of one domain."""
    return {name: {"loss": 0.1, "tokens": part} for name, part in (("a", tokens * 3 // 4), ("b", tokens // 4))}


def test_a_share_shrinks_steps_and_warm_up(config: PipelineConfig) -> None:
    tenth = scale_steps(config, 0.1)
    assert (tenth.trainer.steps, tenth.trainer.warmup_steps) == (4, 1)
    assert tenth.trainer.samples_per_step == 4
    assert tenth.evaluate.every == 0, "a short merge is measured at its end"
    assert scale_steps(config, 0.001).trainer.steps == 1
    assert scale_steps(config, 1.0).trainer == config.trainer


def test_methods_that_train_come_once_a_share_and_the_others_once(config: PipelineConfig, tmp_path: Path) -> None:
    jobs = plan_jobs(config, tmp_path / "none", ["linear", "off_policy"], [0.5, 1.0], None)
    assert [(j.name, j.share, j.config.trainer.steps, j.budget) for j in jobs] == [
        ("linear", None, 40, None),
        ("off_policy-0.5", 0.5, 20, None),
        ("off_policy-1", 1.0, 40, None),
    ]


def test_the_budget_is_what_the_merge_trained_on(config: PipelineConfig, tmp_path: Path) -> None:
    write_run(tmp_path / "run", config, [100, 200])
    jobs = plan_jobs(config, tmp_path / "run", ["mixed_sft", "slerp"], [0.25], None)
    assert [j.budget for j in jobs] == [{"a": 112.5 * 10, "b": 37.5 * 10}, None]


def test_another_seed_has_its_own_name_and_is_no_part_of_the_run(config: PipelineConfig, tmp_path: Path) -> None:
    write_run(tmp_path / "run", config, [100])
    [same] = plan_jobs(config, tmp_path / "run", ["opd"], None, 7)
    [other] = plan_jobs(config, tmp_path / "run", ["opd"], None, 8)
    [shorter] = plan_jobs(config, tmp_path / "run", ["opd"], [0.5], None)
    assert (same.name, same.own_run, same.merge.root) == ("opd-1", True, tmp_path / "run")
    assert (other.name, other.own_run, other.config.seed) == ("opd-1-seed-8", False, 8)
    assert (shorter.own_run, shorter.merge.root) == (False, tmp_path / "run" / "baselines" / "runs" / "opd-0.5")
    [fresh] = plan_jobs(config, tmp_path / "none", ["opd"], None, None)
    assert not fresh.own_run, "there is no merge that could be it"


def test_names_and_shares_are_read() -> None:
    assert parse_methods("ties, opd,ties") == ["ties", "opd"]
    assert parse_methods(",".join(METHODS)) == list(METHODS)
    assert parse_shares("0.1,1,0.1") == [0.1, 1.0]
    assert parse_seeds("0, 12") == [0, 12]


@pytest.mark.parametrize("text", ["tie", "", "linear,,ties", "LINEAR"])
def test_an_unknown_method_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--method(.|\n)*wanted: one of: linear, task_arithmetic"):
        parse_methods(text)


@pytest.mark.parametrize("text", ["0", "1.01", "-0.5", "nan", "inf", "half", "", "0.1,,1"])
def test_a_share_outside_0_to_1_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--share"):
        parse_shares(text)


@pytest.mark.parametrize("text", ["", "a", "-1", "1.5", "0,0", "1,01", ",".join(map(str, range(11)))])
def test_seeds_that_are_none_or_repeated_or_too_many_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_a_share_of_a_merge_of_weights_is_refused(config: PipelineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a merge of weights has no tokens"):
        plan_jobs(config, tmp_path / "none", ["linear", "ties"], [0.5], None)


def test_a_run_directory_without_a_pipeline_or_metrics_is_refused(config: PipelineConfig, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(RunDirError, match=r"no pipeline\.yaml"):
        open_run(root)
    (root / "pipeline.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    with pytest.raises(RunDirError, match=r"no metrics\.jsonl"):
        open_run(root)
    (root / "metrics.jsonl").touch()
    assert open_run(root) == config
    assert open_run(root, ["cluster.phase_timeout_s=9"]).cluster.phase_timeout_s == 9
    with pytest.raises(RunDirError, match=r"trainer\.lr"):
        open_run(root, ["trainer.lr=0.5"])
    with pytest.raises(ConfigError, match="--share"):
        open_run(root, ["trainer.steps=1", "trainer.lr_scheduler_type=constant"])
    with pytest.raises(RunDirError, match="no steps"):
        plan_jobs(config, root, ["off_policy"], None, None)
