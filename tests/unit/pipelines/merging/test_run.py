"""A merge's record of its experts, and the models handed to an engine that can only hold whole ones."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from experts.adapter import open_full_model
from opd.cluster import WorkerDied
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ModelError, Paused, RunDirError, RunError
from opd.live.interfaces import Display
from opd.machine import orphans
from opd.records.types import Teacher
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from pipelines.evaluation import lm_eval
from pipelines.evaluation.lm_eval import lm_eval_merge
from pipelines.inputs.read import read_inputs
from pipelines.interrupts import Interrupted
from pipelines.merging import run as merging
from pipelines.merging.changes import refuse_changed_inputs
from pipelines.merging.manifest import make_manifest, resolve_pipeline
from pipelines.merging.run import (
    MergeRun,
    _export_model,
    _raise_if_unfinished,
    _refuse_fewer_steps,
    _take_starting_exams,
)
from tests.exams import Measuring


@pytest.fixture
def mixed(world: Any, make_adapter: Callable[..., Path]) -> Any:
    """The world with an adapter of `base` in place of one of the two full models."""
    make_adapter(world.root / "adapters" / "up", world.root / "base", base_model_name_or_path="base")
    world.data["experts"]["up"]["model"] = "adapters/up"
    return world


def test_an_engine_gets_a_full_model_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    teacher = Teacher(name="full", model_dir=tiny_model_dir)
    with open_full_model(teacher, tmp_path / "scratch") as directory:
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
    with pytest.raises(InterruptedError), open_full_model(teacher, scratch) as directory:
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
    data = resolve_pipeline(config, read_inputs(config))
    assert {n: e["base"] for n, e in data["experts"].items()} == {"rev": None, "up": str(mixed.root / "base")}
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = read_inputs(validate_section(PipelineConfig, data, "pipeline.yaml"))
    assert again.teachers["upper"].adapter_dir == mixed.root / "adapters" / "up"


def test_a_resume_with_another_adapter_is_refused(mixed: Any) -> None:
    config = load_pipeline(mixed.write())
    before = make_manifest(config, read_inputs(config))
    assert "adapter" not in before["experts"]["rev"]
    refuse_changed_inputs(before, make_manifest(config, read_inputs(config)), mixed.root / "manifest.json")
    file = mixed.root / "adapters" / "up" / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(RunDirError, match="experts changed since the run began: up"):
        refuse_changed_inputs(before, make_manifest(config, read_inputs(config)), mixed.root / "manifest.json")


def test_a_run_cannot_end_before_its_checkpoint(world: Any) -> None:
    config = load_pipeline(world.write())  # of 2 steps
    for done in (0, 1, 2):
        _refuse_fewer_steps(config, done)
    with pytest.raises(RunDirError, match="2, with a checkpoint of step 3"):
        _refuse_fewer_steps(config, 3)


# Up to where the workers start


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def recorded(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_goes_on_from_the_newest_and_sweeps(interrupted: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunError, match="it would start now"):
            merging.resume(interrupted)
    assert names(interrupted / "checkpoints") == ["step-000001", "step-000002"]
    assert recorded(interrupted) == [1, 2]


def test_a_damaged_checkpoint_stops_a_resume_until_it_is_told_to_pass_over_it(interrupted: Path) -> None:
    (interrupted / "checkpoints" / "step-000002" / "rank-0.safetensors").write_bytes(b"wEights")
    with pytest.raises(RunDirError, match=r"step-000002/rank-0.safetensors\n"):
        merging.resume(interrupted)
    assert names(interrupted / "checkpoints") == ["step-000001", "step-000002"]
    assert recorded(interrupted) == [1, 2]
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(interrupted, resume_from="latest-valid")
    assert names(interrupted / "checkpoints") == ["step-000001", "superseded-step-000002"]
    assert recorded(interrupted) == [1]
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(interrupted)  # nothing remembers the damaged one


def test_a_checkpoint_from_elsewhere_is_refused(interrupted: Path) -> None:
    file = interrupted / "checkpoints" / "step-000002" / "checkpoint.json"
    data = json.loads(file.read_text())
    data["identity"]["experts"]["up"] = "0" * 64
    file.write_text(json.dumps(data))
    with pytest.raises(RunDirError, match="a checkpoint of another run: expert up differ"):
        merging.resume(interrupted)


def test_fewer_steps_than_the_checkpoint_has_are_refused(interrupted: Path) -> None:
    with pytest.raises(RunDirError, match="1, with a checkpoint of step 2"):
        merging.resume(interrupted, overrides=["trainer.steps=1"])
    with pytest.raises(RunError, match="it would start now"):
        merging.resume(interrupted)  # what was refused did not become the run's own


# A run that begins


def other_begins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another command begin a run in `root` while this one reads its inputs."""

    def read(config: PipelineConfig) -> Any:
        root.mkdir()
        (root / "metrics.jsonl").write_text("of the other")
        return read_inputs(config)

    monkeypatch.setattr(merging, "read_inputs", read)


def test_a_run_that_began_meanwhile_is_not_replaced(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = world.root / "run"
    other_begins(root, monkeypatch)
    with pytest.raises(RunDirError, match="that is no run"):
        merging.begin(load_pipeline(world.write()), root)
    assert names(root) == ["metrics.jsonl"] and (root / "metrics.jsonl").read_text() == "of the other"
    assert not list(world.root.glob(".tmp-*"))


def test_a_run_that_begins_clears_what_killed_commands_left_and_no_more(world: Any) -> None:
    number, start, namespace = orphans.driver_mark().split("-")
    gone = world.root / f".tmp-run-{2**22 + 1}-{start}-{namespace}"  # above the largest number of a process
    elsewhere = world.root / f".tmp-run-{number}-{start}-{int(namespace) + 1}"
    for directory in (gone, elsewhere):
        directory.mkdir()
    merging.begin(load_pipeline(world.write()), world.root / "run")
    assert list(world.root.glob(".tmp-*")) == [elsewhere], "another container's process may live"


# Evaluations of a run


def test_a_resume_finds_local_tasks_and_verifiers_from_anywhere(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.inputs.read.check_tasks", lambda config: None)
    world.data["evaluate"] = {"lm_eval": ["gsm8k", "tasks/mine.yaml"]}
    world.data["domains"]["upper"]["eval"]["verifier"] = {"kind": "regex", "pattern": "(.*)"}
    config = load_pipeline(world.write())
    data = yaml.safe_load(yaml.safe_dump(resolve_pipeline(config, read_inputs(config))))
    again = validate_section(PipelineConfig, data, "pipeline.yaml")
    assert again.evaluate.lm_eval.tasks == ["gsm8k", str(world.root / "tasks" / "mine.yaml")]
    assert again.domains["upper"].eval.verifier == config.domains["upper"].eval.verifier  # type: ignore[union-attr]


def test_student_and_experts_are_measured_once_in_a_run(world: Any) -> None:
    config = load_pipeline(world.write())
    paths = RunPaths(world.root / "run")
    run = MergeRun(config=config, inputs=read_inputs(config), paths=paths, identity={})
    paths.root.mkdir()
    shown = Display()

    def measure() -> tuple[list[str], Any]:
        parts: Any = Measuring(paths, shown)
        return parts.asked, _take_starting_exams(parts, run, shown, {})

    asked, found = measure()
    assert asked == ["student before", "hold rev", "expert rev", "hold up", "expert up", "load base"]
    assert [one.model for one in found] == ["student before", "expert"]
    assert sorted(f.name for f in paths.evaluation.iterdir()) == ["before.json", "expert.json"]
    assert measure() == ([], found)
    before = json.loads((paths.evaluation / "before.json").read_text())
    del before["scores"]["upper"]  # as the round before left it that had not this domain
    (paths.evaluation / "before.json").write_text(json.dumps(before))
    asked, again = measure()
    assert asked == ["student before"] and again == found
    (paths.evaluation / "expert.json").unlink()  # killed in between
    asked, again = measure()
    assert asked[0] == "hold rev" and again == found


def test_public_tasks_are_run_for_the_student_before_and_the_merged_model(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(
        lm_eval,
        "run_tasks",
        lambda settings, path, dtype: ran.append((str(path), dtype)) or {"gsm8k": {"acc,none": 0.5}},
    )
    file = world.root / "lm-eval.json"
    shutil.copytree(world.root / "rev", world.root / "run" / "model")
    lm_eval_merge(load_pipeline(world.write()), Path("run/model"), file)
    assert ran == [] and not file.exists()
    world.data["evaluate"] = {"lm_eval": ["gsm8k"]}
    world.data["rollout"]["dtype"] = "bfloat16"
    lm_eval_merge(load_pipeline(world.write()), Path("run/model"), file)
    assert ran == [("base", "bfloat16"), ("run/model", "bfloat16")]
    scores = {"gsm8k": {"acc,none": 0.5}}
    found = json.loads(file.read_text())
    weights = found.pop("weights")
    assert found == {"format": 1, "models": {"student before": scores, "merged": scores}}
    assert set(weights) == {"student before", "merged"} and weights["merged"] != weights["student before"]
    file.write_text(json.dumps(found | {"weights": weights | {"student before": "of another model"}}))
    lm_eval_merge(load_pipeline(world.write()), Path("run/model"), file)
    assert len(ran) == 4, "both again"


# The end of the steps


@pytest.mark.parametrize(
    ("ended", "last", "raised", "written"),
    [
        (None, 4, None, False),
        (None, 3, Interrupted, False),
        (Paused("look"), 3, Paused, True),
        (RunError("broken"), 4, RunError, True),  # after the last step too: such a model is not handed over
    ],
)
def test_what_ends_a_run_before_its_model_is_written(
    ended: Any, last: int, raised: Any, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Path] = []
    monkeypatch.setattr(merging, "write_report", lambda root: pages.append(root) or {})
    config = SimpleNamespace(trainer=SimpleNamespace(steps=4))
    run: Any = SimpleNamespace(config=config, paths=RunPaths(tmp_path))
    parts: Any = SimpleNamespace(monitors=SimpleNamespace(end_error=lambda: ended))
    signals: Any = SimpleNamespace(number=2)
    with pytest.raises(raised) if raised else nullcontext():
        _raise_if_unfinished(parts, run, last, signals)
    assert pages == [tmp_path] * written


# Workers that die


@pytest.mark.parametrize(("deaths", "sessions"), [(0, 1), (1, 2), (3, 4)])
def test_a_death_that_a_step_cannot_mend_starts_all_again_from_the_last_checkpoint(
    deaths: int, sessions: int, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int | None, list[str]]] = []

    def session(run: Any, checkpoint: Any, notices: Any, signals: Any) -> Any:
        seen.append((checkpoint and checkpoint.step, list(notices)))
        if len(seen) <= deaths:
            raise WorkerDied(f"trainer rank 0: death {len(seen)}")
        return {"steps": 2}

    monkeypatch.setattr(merging, "_run_session", session)
    assert merging.resume(interrupted) == {"steps": 2}
    assert [step for step, _ in seen] == [2] * sessions
    for number, (_, notices) in enumerate(seen[1:], start=1):
        assert notices == [f"trainer rank 0: death {number}", f"starting all workers again, {number} of 3 times"]


def test_after_a_signal_no_worker_is_started_again(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's SIGTERM goes to every process: workers that die of it were started again, for one more step."""
    tried: list[int] = []

    def session(run: Any, checkpoint: Any, notices: Any, signals: Any) -> Any:
        tried.append(1)
        signals.number = signal.SIGTERM
        raise WorkerDied("rollout worker 0: ended")

    monkeypatch.setattr(merging, "_run_session", session)
    told = r"last checkpoint of step 2; go on with .* no worker is started again: rollout worker 0: ended$"
    with pytest.raises(Interrupted, match=told) as ended:
        merging.resume(interrupted)
    assert ended.value.number == signal.SIGTERM and len(tried) == 1
    assert f"`opd merge --resume {interrupted}`" in str(ended.value)


def test_too_many_deaths_end_the_run_with_the_last_one(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[int] = []

    def session(*_: Any) -> Any:
        died.append(1)
        raise WorkerDied(f"rollout worker 0: death {len(died)}")

    monkeypatch.setattr(merging, "_run_session", session)
    with pytest.raises(RunError, match="death 2"):
        merging.resume(interrupted, overrides=["cluster.max_restarts=1"])
    assert len(died) == 2


def test_a_worker_that_fails_to_start_twice_for_one_reason_ends_the_run(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["ValueError: port taken", "ValueError: no disk", "ValueError: no disk"])
    pids = iter(range(1, 9))

    def session(*_: Any) -> Any:
        raise WorkerDied(f"rollout worker 0: (pid={next(pids)}) died", start_error=next(reasons))

    monkeypatch.setattr(merging, "_run_session", session)
    with pytest.raises(RunError, match="pid=3"):
        merging.resume(interrupted, overrides=["cluster.max_restarts=8"])


def test_another_failure_is_not_tried_again(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def session(*_: Any) -> Any:
        tried.append(1)
        raise RunError("step 3: gradient norm nan")

    monkeypatch.setattr(merging, "_run_session", session)
    with pytest.raises(RunError, match="gradient norm nan"):
        merging.resume(interrupted)
    assert len(tried) == 1


def test_a_run_records_how_it_was_called_and_what_it_is_made_of(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_run_session", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/opd", "merge", "pipeline.yaml", "--set", "name=a b"])
    merging.start(load_pipeline(world.write()), world.root / "run")
    manifest = json.loads((world.root / "run" / "manifest.json").read_text())
    assert manifest["command"] == "opd merge pipeline.yaml --set 'name=a b'"
    weights = load_file(world.root / "base" / "model.safetensors")
    assert manifest["models"]["student"]["parameters"] == sum(t.numel() for t in weights.values())
    assert set(manifest["models"]["experts"]) == {"rev", "up"}
    assert merging.resume(world.root / "run") == {}, "neither is compared"


class Exporting:
    """A trainer that writes a word where its weights would be."""

    def export(self, path: Path) -> None:
        (path / "model.safetensors").write_text("merged")

    def export_adapter(self, path: Path) -> None:
        (path / "adapter_model.safetensors").write_text("adapter")


@pytest.mark.parametrize("wanted", ["merged", "adapter"])
def test_an_adapter_is_left_beside_the_model_if_it_is_wanted(world: Any, wanted: str) -> None:
    world.data["student"]["lora"] = {"r": 4, "export": wanted}
    config, paths = load_pipeline(world.write()), RunPaths(world.root / "run")
    paths.root.mkdir()
    parts: Any = SimpleNamespace(trainer=Exporting())
    _export_model(parts, MergeRun(config=config, inputs=read_inputs(config), paths=paths, identity={}))
    assert (paths.model / "model.safetensors").read_text() == "merged" and (paths.model / "tokenizer.json").is_file()
    assert sorted(p.name for p in paths.root.iterdir()) == (["adapter", "model"] if wanted == "adapter" else ["model"])
    if wanted == "adapter":
        assert [p.name for p in paths.adapter.iterdir()] == ["adapter_model.safetensors"]


def test_directories_named_like_tokenizer_files_do_not_cost_the_model(world: Any) -> None:
    (world.root / "base" / "tokenizer_old").mkdir()
    (world.root / "base" / "vocab.d").mkdir()
    config, paths = load_pipeline(world.write()), RunPaths(world.root / "run")
    paths.root.mkdir()
    parts: Any = SimpleNamespace(trainer=Exporting())
    _export_model(parts, MergeRun(config=config, inputs=read_inputs(config), paths=paths, identity={}))
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= {p.name for p in paths.model.iterdir()}


def test_a_student_that_was_moved_away_leaves_the_merged_weights(world: Any) -> None:
    config, paths = load_pipeline(world.write()), RunPaths(world.root / "run")
    run = MergeRun(config=config, inputs=read_inputs(config), paths=paths, identity={})
    paths.root.mkdir()
    student = world.root / "base"
    student.rename(student.with_name("elsewhere"))
    parts: Any = SimpleNamespace(trainer=Exporting())
    with pytest.raises(RunError, match="no tokenizer files") as error:
        _export_model(parts, run)
    kept = next(path for path in paths.root.rglob("model.safetensors"))
    assert kept.read_text() == "merged" and str(kept.parent) in str(error.value)
    student.with_name("elsewhere").rename(student)
    _export_model(parts, run)
    assert [p.name for p in paths.root.iterdir()] == ["model"]


def test_what_the_model_needs_at_the_end_is_read_before_anything_is_written(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(world.root / "base" / "LICENSE"))

    monkeypatch.setattr("pipelines.merging.card.find_licences", refuse)
    with pytest.raises(ModelError, match="LICENSE\n  found:  Permission denied"):
        merging.start(load_pipeline(world.write()), world.root / "run")
    assert not (world.root / "run").exists()
