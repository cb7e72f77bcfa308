"""A baseline that lies there counts while models, prompts, settings and the merge beside it are those it was measured with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig, load_pipeline
from opd.errors import RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.records.scores import DomainScore, Evaluation
from pipelines.baselines import run
from pipelines.baselines.jobs import open_run, plan_jobs
from pipelines.inputs.read import read_inputs
from pipelines.merging.manifest import make_manifest

SCORE = DomainScore(accuracy=0.5, stderr=0, low=0, high=1, questions=6)


def finish(root: Path, config: PipelineConfig, steps: int) -> None:
    """Leave what a merge of so many steps leaves."""
    (root / "evaluation").mkdir(parents=True, exist_ok=True)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
    (root / "pipeline.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (root / "manifest.json").write_text(json.dumps(make_manifest(config, read_inputs(config))))
    lines = [json.dumps({"step": i + 1, "response_tokens": 10}) for i in range(steps)]
    (root / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    after = Evaluation(model="merged", scores={"upper": SCORE}, weights={"upper": f"of {steps} steps"})
    after.save(root / "evaluation" / "after.json")
    (root / "report.json").write_text("{}")


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> list[int]:
    """Off-policy training that is done at once; the steps of each."""
    steps: list[int] = []

    def imitate(job: Any, *_: Any) -> Any:
        steps.append(job.config.trainer.steps)
        shutil.copytree(tiny_model_dir, job.model)
        return run.make_result(job, {"upper": SCORE}, tokens=10 * steps[-1])

    monkeypatch.setattr(run, "_run_imitation", imitate)
    return steps


def compute(config: PipelineConfig, root: Path, *methods: str) -> tuple[list[BaselineResult], list[str]]:
    lines: list[str] = []
    return run.compute_results(plan_jobs(config, root, methods, None, None), lines.append), lines


def test_a_result_says_what_it_is_of(world: Any, imitated: list[int]) -> None:
    root, config = world.root / "run", load_pipeline(world.write())
    finish(root, config, 20)
    [off_policy, opd], _ = compute(open_run(root), root, "off_policy", "opd")
    assert [(r.merge_steps, r.merge_tokens, r.tokens) for r in (off_policy, opd)] == [(20, 200, 200)] * 2
    assert len(off_policy.weights) == 64 and opd.weights == "of 20 steps"
    assert off_policy.inputs and off_policy.inputs == opd.inputs


def test_after_more_steps_it_is_computed_again(world: Any, imitated: list[int]) -> None:
    root, config = world.root / "run", load_pipeline(world.write())
    finish(root, config, 20)
    compute(open_run(root), root, "off_policy", "opd")
    assert compute(open_run(root), root, "off_policy", "opd")[1] == [
        f"{name}: found {root / 'baselines' / name}.json, not computed again" for name in ("off_policy-1", "opd-1")
    ]
    finish(root, config, 40)
    [off_policy, opd], lines = compute(open_run(root), root, "off_policy", "opd")
    assert imitated == [20, 40]
    assert (off_policy.merge_steps, off_policy.tokens, opd.merge_tokens) == (40, 400, 400)
    assert opd.weights == "of 40 steps"
    assert lines[0].endswith(
        "measured beside 20 steps and 200 tokens of the merge, which has 40 and 400 now: computed again"
    )


def test_what_an_older_release_measured_is_left_as_it_is(world: Any, imitated: list[int]) -> None:
    root, config = world.root / "run", load_pipeline(world.write())
    finish(root, config, 20)
    [found], _ = compute(open_run(root), root, "off_policy")
    replace(found, weights="", inputs="", merge_steps=None, merge_tokens=None).save(
        root / "baselines" / "off_policy-1.json"
    )
    compute(open_run(root), root, "off_policy")
    assert imitated == [20], "it may have taken hours; the report says that it does not know"


def test_baselines_of_a_run_are_of_its_experts(world: Any, imitated: list[int]) -> None:
    root, config = world.root / "run", load_pipeline(world.write())
    finish(root, config, 20)
    file = world.root / "up" / "config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(RunDirError, match=r"experts changed since the run began: up \(config.json\)"):
        compute(open_run(root), root, "off_policy")
    assert imitated == []


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"trainer": {"steps": 3, "samples_per_step": 4}}, True),
        ({"trainer": {"steps": 2, "samples_per_step": 4, "lr": 0.1}}, True),
        ({"evaluate": {"samples": 3}}, True),
        ({"seed": 5}, True),
        ({"logging": {"tensorboard": False}}, False),
        ({"checkpoint": {"every": 7}}, False),
        ({}, False),
    ],
)
def test_without_a_run_it_is_bound_to_the_pipeline(
    change: dict[str, Any], again: bool, world: Any, imitated: list[int], tmp_path: Path
) -> None:
    compute(load_pipeline(world.write()), tmp_path / "out", "off_policy")
    world.data |= change
    compute(load_pipeline(world.write()), tmp_path / "out", "off_policy")
    assert len(imitated) == 1 + again


def test_without_a_run_it_is_bound_to_the_files(world: Any, imitated: list[int], tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    compute(config, tmp_path / "out", "off_policy")
    file = world.root / "upper.jsonl"
    file.write_text(file.read_text() + '{"prompt": "upp zzz=", "answer": "zzz"}\n')
    _, (line, *_) = compute(config, tmp_path / "out", "off_policy")
    assert line.endswith("made from other models, prompts or settings than those of now: computed again")


def test_a_shorter_merge_of_other_steps_is_begun_anew(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, config = world.root / "run", load_pipeline(world.write())
    began: list[int] = []

    def start(config: PipelineConfig, directory: Path) -> None:
        began.append(config.trainer.steps)
        finish(directory, config, config.trainer.steps)

    monkeypatch.setattr(run.merging, "start", start)
    for steps in (20, 40):
        finish(root, config, steps)
        jobs = plan_jobs(open_run(root), root, ["opd"], [0.5], None)
        run.compute_results(jobs, print, keep_models=True)
    assert began == [10, 20]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("what", ["settings", "prompts"])
def test_a_shorter_merge_of_other_settings_or_prompts_is_begun_anew(
    what: str, finished: bool, world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began: list[int] = []

    def start(config: PipelineConfig, directory: Path) -> None:
        began.append(config.evaluate.samples)
        finish(directory, config, config.trainer.steps)

    monkeypatch.setattr(run.merging, "start", start)
    monkeypatch.setattr(run.merging, "resume", lambda root: pytest.fail("its prompts or settings are others"))

    def compute_half() -> None:
        jobs = plan_jobs(load_pipeline(world.write()), tmp_path / "out", ["opd"], [0.5], None)
        run.compute_results(jobs, print, keep_models=True)

    compute_half()
    if not finished:
        (tmp_path / "out" / "baselines" / "runs" / "opd-0.5" / "report.json").unlink()
    if what == "settings":
        world.data["evaluate"] = {"samples": 3}
    else:
        file = world.root / "upper.jsonl"
        file.write_text(file.read_text() + '{"prompt": "upp zzz=", "answer": "zzz"}\n')
    compute_half()
    assert began == ([100, 3] if what == "settings" else [100, 100])


def test_a_shorter_merge_of_the_same_is_resumed(world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []

    def start(config: PipelineConfig, directory: Path) -> None:
        finish(directory, config, config.trainer.steps)
        done.append("start")

    def resume(directory: Path) -> None:
        (directory / "report.json").write_text("{}")
        done.append("resume")

    monkeypatch.setattr(run.merging, "start", start)
    monkeypatch.setattr(run.merging, "resume", resume)
    for _ in range(2):
        jobs = plan_jobs(load_pipeline(world.write()), tmp_path / "out", ["opd"], [0.5], None)
        run.compute_results(jobs, print, keep_models=True)
        jobs[0].result.unlink()
        (jobs[0].shorter_run.report).unlink()
        world.data["logging"] = {"tensorboard": False}
    assert done == ["start", "resume"]
