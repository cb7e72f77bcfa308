"""A run that is made longer: its pipeline, its rates, its manifest, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig, load_pipeline
from opd.errors import RunDirError, RunError
from opd.run.lineage import format_events, list_commands, list_events_until
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from pipelines.merging import run as merging
from pipelines.merging.extension import Extension, plan_extension
from pipelines.specs import learning_rate


def extend(root: Path, more: int) -> None:
    """Up to where the workers would start."""
    with pytest.raises(RunError, match="it would start now"):
        merging.extend(root, plan_extension(RunPaths(root), more)).carry_out()


def files(root: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def decaying(root: Path, kind: str = "linear") -> None:
    """Let the run, which nothing has trained, have begun with a decay."""
    for file in (root / "manifest.json", root / "pipeline.yaml"):
        data = yaml.safe_load(file.read_text())
        data.get("config", data)["trainer"]["lr_scheduler_type"] = kind
        file.write_text(json.dumps(data))


def rates(root: Path) -> list[float]:
    config = load_pipeline(root / "pipeline.yaml")
    rate = learning_rate(config.trainer)
    return [rate.rate_at_step(step) for step in range(1, config.trainer.steps + 1)]


def test_an_extended_run_is_the_longer_run_from_its_last_checkpoint_on(interrupted: Path) -> None:
    before = yaml.safe_load((interrupted / "pipeline.yaml").read_text())
    extend(interrupted, 3)
    after = yaml.safe_load((interrupted / "pipeline.yaml").read_text())
    before["trainer"]["steps"] = 5
    assert after == before, "under a constant rate the pipeline is that of the longer run"
    manifest = json.loads((interrupted / "manifest.json").read_text())
    assert manifest["config"] == after
    (event,) = manifest["lineage"]
    assert (event["event"], event["after_step"], event["steps"]) == ("extended", 2, [2, 5])
    assert format_events([event]) == ["extended after step 2 from 2 to 5 steps"]
    assert list_commands(manifest) == [manifest["command"], event["command"]]
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(interrupted)  # it goes on to step 5, and asks for nothing


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_under_a_decay_the_steps_taken_keep_their_rates(kind: str, interrupted: Path) -> None:
    decaying(interrupted, kind)
    short = rates(interrupted)
    extend(interrupted, 4)
    whole = load_pipeline(interrupted / "pipeline.yaml").trainer.model_copy(update={"extended": ()})
    assert rates(interrupted) == [*short, *(learning_rate(whole).rate_at_step(step) for step in range(3, 7))]
    (event,) = json.loads((interrupted / "manifest.json").read_text())["lineage"]
    assert format_events([event])[0].endswith(f"up to there the {kind} decay was that of 2 steps")


@pytest.mark.parametrize("kind", ["constant", "linear"])
@pytest.mark.parametrize("killed_at", ["manifest.json", "pipeline.yaml"])
def test_a_kill_between_manifest_and_pipeline_loses_no_extension(
    killed_at: str, kind: str, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decaying(interrupted, kind)
    before = files(interrupted)
    rename = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.name == killed_at:
            raise InterruptedError
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(InterruptedError):
            merging.extend(interrupted, plan_extension(RunPaths(interrupted), 3)).carry_out()
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(interrupted)
    assert not RunPaths(interrupted).next_pipeline.exists()
    if killed_at == "manifest.json":
        assert (interrupted / "pipeline.yaml").read_bytes() == before[interrupted / "pipeline.yaml"]
        extend(interrupted, 3)
    config = load_pipeline(interrupted / "pipeline.yaml")
    assert config.trainer.steps == 5
    assert [(one.at, one.steps) for one in config.trainer.extended] == ([(2, 2)] if kind == "linear" else [])
    assert len(json.loads((interrupted / "manifest.json").read_text())["lineage"]) == 1


def test_the_rates_of_a_run_that_was_extended_twice_and_of_its_branch(world: Any) -> None:
    world.data["trainer"] |= {"steps": 4, "lr_scheduler_type": "linear"}
    config = load_pipeline(world.write())
    twice = (
        Extension(further_steps=6, at=7)
        .extended_pipeline(Extension(further_steps=4, at=4).extended_pipeline(config))
        .trainer
    )
    assert [(one.at, one.steps) for one in twice.extended] == [(4, 4), (7, 8)] and twice.steps == 14
    # A branch that starts at step 2 has taken steps whose decay would have ended at step 4.
    early = Extension(further_steps=6, at=3).extended_pipeline(
        Extension(further_steps=4, at=4).extended_pipeline(config)
    )
    assert [(one.at, one.steps) for one in early.trainer.extended] == [(3, 4)]
    validate_section(PipelineConfig, early.model_dump(mode="json"), "pipeline.yaml")


def test_the_same_command_again_does_not_add_its_steps_twice(interrupted: Path) -> None:
    extend(interrupted, 3)
    before = files(interrupted)
    with pytest.raises(RunDirError, match=r"extended to 5 steps and has come to step 2\n.*\n.*--resume"):
        merging.extend(interrupted, plan_extension(RunPaths(interrupted), 3))
    assert files(interrupted) == before


def test_without_a_checkpoint_a_run_cannot_be_made_longer(interrupted: Path) -> None:
    for step in (1, 2):
        (interrupted / "checkpoints" / f"step-{step:06d}").rename(interrupted / f"away-{step}")
    with pytest.raises(RunDirError, match="found:  no checkpoint"):
        plan_extension(RunPaths(interrupted), 3)


def test_a_round_cannot_be_made_longer(interrupted: Path) -> None:
    (interrupted / "rounds.json").write_text("{}")
    for root in (interrupted, interrupted / "round-1"):
        root.mkdir(exist_ok=True)
        (root / "pipeline.yaml").touch()
        with pytest.raises(RunDirError, match="a merge in several rounds"):
            plan_extension(RunPaths(root), 3)


def test_a_branch_has_only_the_past_of_its_start() -> None:
    past = [{"event": "branched", "step": 5}, {"event": "extended", "after_step": 20}]
    assert list_events_until({"lineage": past}, 4) == [] and list_events_until({"lineage": past}, 5) == past[:1]
    assert list_events_until({"lineage": past}, 20) == past[:1] and list_events_until({"lineage": past}, 21) == past


def test_other_entries_than_those_of_growing_merges_are_refused(world: Any) -> None:
    for wrong in ([{"at": 3, "steps": 2}], [{"at": 1, "steps": 2}], [{"at": 2, "steps": 4}, {"at": 1, "steps": 6}]):
        world.data["trainer"]["extended"] = wrong
        with pytest.raises(ValueError, match=r"trainer\.extended"):
            load_pipeline(world.write())
