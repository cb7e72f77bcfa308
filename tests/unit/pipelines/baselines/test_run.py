"""Computing baselines: the strength that wins, what is kept, what is not computed again. Engines are fakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError, RunDirError
from opd.records.scores import DomainScore, Evaluation
from opd.records.types import Completion, Prompt
from pipelines.baselines import run
from pipelines.baselines.jobs import plan_jobs
from pipelines.baselines.mergekit import Recipe
from pipelines.inputs.read import read_inputs

GOOD = 0.3
"""The strength at which a merged model is right on the prompts that strengths are chosen by."""


class FakeEngine:
    """A model merged with strength `GOOD` answers training prompts, every other one the questions of the exam."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self._merged_as = ""

    def load(self, model_dir: Path) -> None:
        assert (model_dir / "model.safetensors").is_file()
        self.loaded.append(model_dir.name)
        self._merged_as = (model_dir / "merged-as").read_text()

    def answer(self, prompts: Sequence[Prompt], **_: Any) -> list[Completion]:
        good = self._merged_as.endswith(f"-{GOOD:g}")
        # The world's training answers are small letters, those of its exams capitals.
        return [
            Completion(prompt=p, text=p.answer if good == p.answer.islower() else "?", num_tokens=1) for p in prompts
        ]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> FakeEngine:
    fake = FakeEngine()

    @contextmanager
    def rollout_engine(*_: Any) -> Iterator[FakeEngine]:
        yield fake

    def merge_weights(recipes: Mapping[str, Recipe], out: Path, **_: Any) -> None:
        shutil.rmtree(out, ignore_errors=True)
        for name in recipes:
            shutil.copytree(tiny_model_dir, out / name)
            (out / name / "merged-as").write_text(name)

    monkeypatch.setattr(run, "rollout_engine", rollout_engine)
    monkeypatch.setattr(run, "merge_weights", merge_weights)
    monkeypatch.setattr(run, "mergekit_environment", lambda tell: Path("home"))
    return fake


def compute(config: PipelineConfig, root: Path, *methods: str, keep: bool = False) -> tuple[list[Any], list[str]]:
    lines: list[str] = []
    return run.compute_results(plan_jobs(config, root, methods, None, None), lines.append, keep), lines


def test_the_strength_is_chosen_by_validation_and_not_by_the_exam(
    world: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    [ties, linear], _ = compute(load_pipeline(world.write()), tmp_path / "out", "ties", "linear")
    assert (ties.strength, ties.label, ties.accuracy) == (GOOD, "TIES 0.3", 0.0)
    assert ties.validation == {"0.1": 0.0, "0.3": 1.0, "0.5": 0.0, "1": 0.0, "1.5": 0.0, "2": 0.0, "3": 0.0}
    assert (linear.strength, linear.label, linear.accuracy, linear.validation) == (None, "Linear", 1.0, {})
    assert (ties.token_share, ties.tokens, ties.seed) == (None, None, 0)
    assert set(ties.scores) == {"reverse", "upper"}
    assert ties.scores["upper"].questions == 6
    assert engine.loaded[-2:] == ["ties", "linear"]


def test_few_merged_models_lie_on_disk_at_a_time(
    world: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_pipeline(world.write())
    nbytes = 4 * read_inputs(config).student.parameters
    monkeypatch.setattr(run, "MERGED_BYTES", 2 * nbytes + 1)
    parts: list[list[str]] = []
    fake = run.merge_weights

    def merge_weights(recipes: Mapping[str, Recipe], out: Path, **options: Any) -> None:
        parts.append(list(recipes))
        fake(recipes, out, **options)

    monkeypatch.setattr(run, "merge_weights", merge_weights)
    [ties, slerp], _ = compute(config, tmp_path / "out", "ties", "slerp")
    assert parts == [
        ["merged-ties-0.1", "merged-ties-0.3"],
        ["merged-ties-0.5", "merged-ties-1"],
        ["merged-ties-1.5", "merged-ties-2"],
        ["merged-ties-3", "merged-slerp"],
    ]
    assert (ties.strength, ties.accuracy, slerp.accuracy) == (GOOD, 0.0, 1.0)


def test_models_go_unless_they_are_to_be_kept(world: Any, engine: FakeEngine, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    compute(config, tmp_path / "out", "ties", "linear")
    assert list((tmp_path / "out" / "baselines" / "models").iterdir()) == []
    compute(config, tmp_path / "kept", "ties", "linear", keep=True)
    assert sorted(p.name for p in (tmp_path / "kept" / "baselines" / "models").iterdir()) == ["linear", "ties"]


def test_what_exists_is_not_computed_again(world: Any, engine: FakeEngine, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    compute(config, tmp_path / "out", "linear")
    file = tmp_path / "out" / "baselines" / "linear.json"
    file.write_text(file.read_text().replace('"Linear"', '"from disk"'))
    engine.loaded.clear()
    again, lines = compute(config, tmp_path / "out", "slerp", "linear")
    assert [result.label for result in again] == ["SLERP", "from disk"]
    assert engine.loaded == ["slerp"]
    assert [line for line in lines if line.startswith("linear")] == [f"linear: found {file}, not computed again"]


def test_adapters_are_merged_before_and_removed_after(
    world: Any,
    engine: FakeEngine,
    make_adapter: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    make_adapter(world.root / "adapter", world.root / "base")
    world.data["experts"]["up"] = {"model": "adapter", "base": "base", "domain": "upper"}
    seen: list[Path] = []
    fake = run.merge_weights

    def merge_weights(recipes: Mapping[str, Recipe], out: Path, **options: Any) -> None:
        seen.extend(Path(m["model"]) for m in recipes["merged-linear"]["models"])
        assert all((path / "model.safetensors").is_file() for path in seen)
        fake(recipes, out, **options)

    monkeypatch.setattr(run, "merge_weights", merge_weights)
    compute(load_pipeline(world.write()), tmp_path / "out", "linear")
    assert [path == world.root / "rev" for path in seen] == [True, False]
    assert not seen[1].exists()


def evaluated(root: Path, accuracy: float) -> None:
    """Leave what a finished merge leaves."""
    (root / "evaluation").mkdir(parents=True, exist_ok=True)
    score = DomainScore(accuracy=accuracy, stderr=0, low=0, high=1, questions=6)
    Evaluation(model="merged", scores={"reverse": score}).save(root / "evaluation" / "after.json")
    (root / "metrics.jsonl").write_text('{"step": 1, "response_tokens": 30}\n{"step": 2, "response_tokens": 50}\n')
    (root / "report.json").write_text("{}")


def test_the_whole_merge_is_the_run_itself_and_stays(world: Any, engine: FakeEngine, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    root = tmp_path / "run"
    evaluated(root, 0.75)
    (root / "pipeline.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    [found], _ = compute(config, root, "opd")
    assert (found.accuracy, found.tokens, found.token_share, found.label) == (0.75, 80, 1.0, "On-policy")
    assert (root / "pipeline.yaml").exists()
    assert (root / "report.json").exists()


def test_a_shorter_merge_is_run_measured_and_removed(
    world: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[int, Path]] = []

    def start(config: PipelineConfig, root: Path) -> None:
        started.append((config.trainer.steps, root))
        evaluated(root, 0.5)

    monkeypatch.setattr(run.merging, "start", start)
    jobs = plan_jobs(load_pipeline(world.write()), tmp_path / "out", ["opd"], [0.5], None)
    [found] = run.compute_results(jobs, lambda line: None)
    assert started == [(1, tmp_path / "out" / "baselines" / "runs" / "opd-0.5")]
    assert (found.accuracy, found.tokens) == (0.5, 80)
    assert not started[0][1].exists()


def test_an_unfinished_merge_is_no_baseline(world: Any, tmp_path: Path) -> None:
    config = load_pipeline(world.write())
    root = tmp_path / "run"
    evaluated(root, 0.75)
    (root / "evaluation" / "after.json").unlink()
    (root / "pipeline.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    with pytest.raises(RunDirError, match="a merge that is not finished"):
        compute(config, root, "opd")


def test_without_an_exam_there_is_nothing_to_compare(world: Any, tmp_path: Path) -> None:
    for domain in world.data["domains"].values():
        del domain["eval"]
    with pytest.raises(ConfigError, match="no domain with an eval"):
        compute(load_pipeline(world.write()), tmp_path / "out", "linear")
    assert not (tmp_path / "out").exists()


def test_one_at_a_time_in_a_run_directory(world: Any, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "out" / "baselines").mkdir(parents=True)
    with FileLock(tmp_path / "out" / "baselines" / ".lock"), pytest.raises(RunDirError, match="another `opd baseline`"):
        compute(load_pipeline(world.write()), tmp_path / "out", "linear")
