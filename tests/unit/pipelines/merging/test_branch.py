"""A run that starts from a checkpoint of another one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from opd.config import load_pipeline
from opd.config.domains import EnvironmentConfig
from opd.errors import ConfigError, OpdError, RunDirError, RunError
from opd.files import blake3_file
from opd.run import checkpoints
from opd.run.paths import RunPaths
from opd.stream import written_rollouts
from pipelines.merging import run as merging
from pipelines.merging.branch import DECIDE_EXAMS, _has_same_writers, begin_branch
from pipelines.merging.changes import matches_pattern
from pipelines.merging.origin import Origin, find_origin
from tests.unit.pipelines.merging.test_extension import files


def begin(origin: Path, root: Path, *overrides: str, step: int = 1) -> Any:
    config = load_pipeline(origin / "pipeline.yaml", [*overrides])
    return begin_branch(config, Origin(RunPaths(origin), step), root)


def with_written(origin: Path) -> None:
    """Give the checkpoint of step 1 responses that were written ahead."""
    directory = origin / "checkpoints" / "step-000001"
    facts = json.loads((directory / "checkpoint.json").read_text())
    for name in written_rollouts.FILES:
        (directory / name).write_text("{}")
        facts["files"][name] = {"blake3": blake3_file(directory / name), "bytes": 2}
    (directory / "checkpoint.json").write_text(json.dumps(facts))


def test_a_branch_has_the_steps_before_it_and_leaves_its_origin_alone(interrupted: Path, tmp_path: Path) -> None:
    before, root = files(interrupted), tmp_path / "branch"
    begin(interrupted, root, "trainer.lr=0.5", "objective={kind: forward_kl}")
    assert files(interrupted) == before
    assert [p.name for p in (root / "checkpoints").iterdir()] == ["step-000001"]
    assert [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()] == [1]
    manifest = json.loads((root / "manifest.json").read_text())
    (event,) = manifest["lineage"]
    assert (event["run"], event["step"]) == (str(interrupted), 1)
    assert event["changed"]["trainer.lr"] == [1e-06, 0.5] and "objective.kind" in event["changed"]
    ours, theirs = (
        checkpoints.verify_checkpoint(run / "checkpoints" / "step-000001").identity for run in (root, interrupted)
    )
    assert ours == manifest["identity"] != theirs, "a checkpoint of this run, not of its origin"
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(root)  # it is a run like any other


MASKED = "teachers.mask_tokens.up=['a']"
AHEAD = "schedule.mode=one_step_off"


@pytest.mark.parametrize(
    ("change", "kept"),
    [("trainer.lr=0.5", True), ("rollout.temperature=0.5", False), (AHEAD, False), (MASKED, False)],
)
def test_what_was_written_ahead_goes_along_if_it_would_be_written_again(
    change: str, kept: bool, interrupted: Path, tmp_path: Path
) -> None:
    with_written(interrupted)
    begin(interrupted, tmp_path / "branch", change)
    path = tmp_path / "branch" / "checkpoints" / "step-000001"
    listed = json.loads((path / "checkpoint.json").read_text())["files"]
    assert {name: (path / name).exists() for name in written_rollouts.FILES} == dict.fromkeys(
        written_rollouts.FILES, kept
    )
    assert {name: name in listed for name in written_rollouts.FILES} == dict.fromkeys(written_rollouts.FILES, kept)
    checkpoints.verify_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("trainer.lr=0.5", True),
        ("evaluate.samples=3", False),
        ("evaluate.cache=false", False),
        ("domains.upper.eval.verifier=last_line", False),
        ("rollout.max_new_tokens=3", False),
        ("domains.upper.prompts={path: upper.jsonl, limit: 2}", False),  # with `holdout` a part of them is asked
    ],
)
def test_exams_of_the_origin_are_not_taken_again(change: str, kept: bool, interrupted: Path, tmp_path: Path) -> None:
    (interrupted / "evaluation").mkdir(exist_ok=True)
    for name in ("before", "expert", "after"):
        (interrupted / "evaluation" / f"{name}.json").write_text(name)
    begin(interrupted, tmp_path / "branch", change)
    found = tmp_path / "branch" / "evaluation"
    assert ({p.name: p.read_text() for p in found.iterdir()} if found.exists() else {}) == (
        {"before.json": "before", "expert.json": "expert"} if kept else {}
    )


def test_a_guard_decides_exams() -> None:
    assert all(
        matches_pattern(key, DECIDE_EXAMS)
        for key in (("guard",), ("guard", "rules"), ("domains", "upper", "guard", "rules"))
    )


def test_exams_on_other_questions_are_taken_again(interrupted: Path, tmp_path: Path, world: Any) -> None:
    (interrupted / "evaluation").mkdir(exist_ok=True)
    (interrupted / "evaluation" / "before.json").write_text("before")
    exam = world.root / "upper-eval.jsonl"
    exam.write_text("".join(exam.read_text().splitlines(keepends=True)[1:]))
    begin(interrupted, tmp_path / "branch", "trainer.lr=0.5")
    assert not (tmp_path / "branch" / "evaluation").exists()


@pytest.mark.parametrize(("domain", "kept"), [({}, True), ({"teacher_turns": {"share": 0.5, "over_steps": 9}}, False)])
def test_turns_that_other_experts_wrote_ahead_are_left_behind(
    domain: dict[str, Any], kept: bool, interrupted: Path
) -> None:
    config = load_pipeline(interrupted / "pipeline.yaml")
    acting = config.domains["upper"].model_copy(update={"environment": EnvironmentConfig(name="maze", **domain)})
    acting_config = config.model_copy(update={"domains": {**config.domains, "upper": acting}})
    ours = json.loads((interrupted / "manifest.json").read_text())
    theirs = {**ours, "experts": {**ours["experts"], "up": {"weights": {"model.safetensors": "0"}}}}
    assert _has_same_writers(acting_config, ours, ours)
    assert _has_same_writers(acting_config, theirs, ours) is kept
    assert not _has_same_writers(config, {**ours, "guard": {"upper": {"0": "1"}}}, ours)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_origin_may_be_one_that_can_only_be_read(
    number: int, interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    checkpoint = interrupted / "checkpoints" / "step-000001"
    checkpoint.chmod(0o555)
    with FileLock(interrupted / ".lock"):
        monkeypatch.setattr("pipelines.merging.directory.FileLock", refused)
        with pytest.raises(RunDirError, match="another `opd merge` at work"):
            begin(interrupted, tmp_path / "branch")
    begin(interrupted, tmp_path / "branch")
    taken = tmp_path / "branch" / "checkpoints" / "step-000001"
    assert checkpoints.verify_checkpoint(taken).step == 1
    assert taken.stat().st_mode & 0o700 == 0o700, "the new run can delete it"


def test_the_cluster_is_asked_before_anything_is_written(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: Any) -> None:
        raise ConfigError("no cluster there")

    monkeypatch.setattr("pipelines.merging.run.refuse_unplaceable", refused)
    with pytest.raises(ConfigError, match="no cluster there"):
        begin(interrupted, tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("trainer.steps=1", "trainer.steps\n"),
        ("student.lora={r: 4}", "student.lora\n"),
        ("rounds=2", "rounds\n"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    change: str, where: str, interrupted: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=where):
        begin(interrupted, tmp_path / "branch", change)


def with_settings(origin: Path, **sections: Any) -> None:
    """Let the origin, which nothing has trained, have begun with other sections of its pipeline."""
    for file in (origin / "manifest.json", origin / "pipeline.yaml"):
        data = yaml.safe_load(file.read_text())
        data.get("config", data).update(sections)
        file.write_text(json.dumps(data))


@pytest.mark.parametrize(("frozen", "now"), [(False, "true"), (True, "false")])
def test_a_critic_keeps_the_layers_that_it_trains(frozen: bool, now: str, interrupted: Path, tmp_path: Path) -> None:
    reward = {"baseline": {"kind": "critic", "freeze_attention": frozen}}
    with_settings(interrupted, objective={"kind": "reverse_kl", "reward": reward})
    key = "objective.reward.baseline"
    with pytest.raises(ConfigError, match=rf"{key}\n  found:  critic, freeze_attention {now}\n.*{str(frozen).lower()}"):
        begin(interrupted, tmp_path / "branch", f"{key}.freeze_attention={now}")
    assert not (tmp_path / "branch").exists()
    begin(interrupted, tmp_path / "branch", f"{key}.gamma=0.9")


def test_balanced_domains_must_be_those_whose_records_there_are(interrupted: Path, tmp_path: Path) -> None:
    config = load_pipeline(interrupted / "pipeline.yaml", ["balance=tokens"])
    fewer = {name: one for name, one in config.domains.items() if name == "upper"}
    with pytest.raises(ConfigError, match=r"domains\n  found:  upper\n  wanted: reverse, upper"):
        begin_branch(
            config.model_copy(update={"domains": fewer}), Origin(RunPaths(interrupted), 1), tmp_path / "branch"
        )


def test_another_student_or_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    interrupted: Path, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    other = make_model_dir(tmp_path / "other", seed=9)
    with pytest.raises(RunDirError, match=r"student\.model\n.*another student.*model\.safetensors"):
        begin(interrupted, tmp_path / "branch", f"student.model={other}")
    (interrupted / "checkpoints" / "step-000001" / "rank-0.safetensors").write_bytes(b"wEights")
    with pytest.raises(OpdError, match="rank-0"):
        begin(interrupted, tmp_path / "branch")
    assert not [p.name for p in tmp_path.iterdir() if "branch" in p.name]


def test_a_checkpoint_is_named_by_its_run_and_step(interrupted: Path, tmp_path: Path) -> None:
    assert (find_origin(f"{interrupted}@1").step, find_origin(str(interrupted)).step) == (1, 2)
    with pytest.raises(RunDirError, match="checkpoints of steps 1, 2"):
        find_origin(f"{interrupted}@7")
    at = shutil.copytree(interrupted, tmp_path / "run@home")
    assert find_origin(str(at)).paths.root == at
    with pytest.raises(RunDirError, match=r"no pipeline\.yaml"):
        find_origin(f"{tmp_path / 'nowhere'}@1")
