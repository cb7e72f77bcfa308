"""Rounds without Ray: what each starts from, what is measured once, and where a resume goes on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from opd.config import load_pipeline, split_rounds
from opd.config.sections import CheckpointConfig
from opd.errors import ConfigError, ModelError, RunDirError, RunError
from opd.files import blake3_file
from opd.live.interfaces import Display
from opd.live.progress import RunReporter
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import StepRecord
from opd.records.types import WrittenFile
from opd.report import build_report, write_report
from opd.run.checkpoints import CheckpointStore
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from pipelines.baselines import jobs
from pipelines.evaluation.lm_eval import lm_eval_merge
from pipelines.interrupts import Interrupted
from pipelines.merging import rounds
from pipelines.merging import run as merging
from pipelines.merging.callbacks import TERMINAL

# By how often its weights were trained; experts are much better than that.
STUDENT = {0: 0.2, 1: 0.5, 2: 0.6, 3: 0.7}
EXPERT = 0.9


class OneFile:
    """A trainer whose whole state is one file."""

    def begin_save(self, path: Path) -> None:
        self._file = path / "rank-0.safetensors"
        self._file.write_bytes(b"weights")

    def saved(self, wait_s: float) -> list[WrittenFile]:
        return [WrittenFile(name=self._file.name, blake3=blake3_file(self._file), size=7, seconds=0.0)]


class Engines:
    """In place of `merging._session`: real files, made-up weights and accuracies.

    Training adds 1 to the weights, so that a model tells how many rounds it has behind it.
    """

    def __init__(self, base: Path) -> None:
        self._start = weight(base)
        self.events: list[str] = []
        self.asked: list[tuple[str, list[str]]] = []
        """The model and domains of every exam outside the rounds."""
        self.fail_at = ""
        """The event at which a kill comes, once."""
        self.signals_at = ""
        """The event at which somebody presses Ctrl-C."""

    def session(self, run: merging.MergeRun, checkpoint: Any, notices: Any, signals: Any) -> dict[str, Any]:
        config, inputs, paths = run.config, run.inputs, run.paths
        self._name, self._signals = paths.root.name, signals
        self.load(config.student.model)
        shown = Display()
        self.reporter = RunReporter(MetricsFile(paths.metrics), paths, shown)
        self.engine = self.evaluator = self.sync = self
        parts: Any = self
        before, expert = merging._take_starting_exams(parts, run, shown, {})
        self.event(f"train from {checkpoint.step if checkpoint else 0}")
        MetricsFile(paths.metrics).rewind(0)
        for step in range(1, config.trainer.steps + 1):
            MetricsFile(paths.metrics).write(StepRecord(step=step, response_tokens=10, phase_s={"train": 1.0}))
        trainer: Any = OneFile()
        store = CheckpointStore(
            paths.checkpoints, trainer, CheckpointConfig(), world_size=2, identity=run.identity, timeout_s=9
        )
        if not checkpoint:
            store.save(config.trainer.steps, config.trainer.steps)
            store.committed(wait=True)
        self.event("trained")
        shutil.rmtree(paths.model, ignore_errors=True)
        shutil.copytree(config.student.model, paths.model)
        tensors = load_file(paths.model / "model.safetensors")
        save_file({n: t + 1 for n, t in tensors.items()}, paths.model / "model.safetensors", {"format": "pt"})
        self.load(paths.model)
        after = self.evaluate(list(inputs.exams), model="merged")
        self.reporter.evaluation("after", after)
        report = build_report(
            config.name,
            {"before": before.accuracy, "expert": expert.accuracy, "after": after.accuracy},
            MetricsFile(paths.metrics).read(),
            wall_s=7.0,
            versions={},
        )
        paths.report.write_text(json.dumps(report))
        return write_report(paths.root)

    def elsewhere(self, config: Any, models: list[Path], wanted: list[str], tell: Any) -> dict[str, Evaluation]:
        """In place of `evaluate_models`: every model is poor at the domains of other rounds."""
        self.asked.append((models[0].name, wanted))
        assert set(wanted) <= set(config.domains)
        return {"x": Evaluation(model="x", scores=scores(dict.fromkeys(wanted, 0.1)))}

    def event(self, what: str) -> None:
        event = f"{self._name}: {what}"
        self.events.append(event)
        if event == self.fail_at:
            self.fail_at = ""
            raise RunError("killed")
        if event == self.signals_at:
            self._signals.number = signal.SIGINT

    def load(self, model_dir: Path) -> None:
        trained = weight(model_dir) - self._start
        self._accuracy = STUDENT.get(round(trained), EXPERT) if abs(trained - round(trained)) < 1e-3 else EXPERT

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        self.load(model_dir)

    def evaluate(self, domains: Any, *, model: str, as_expert: bool = False) -> Evaluation:
        if domains:
            self.event(f"{model} on {','.join(domains)}")
        return Evaluation(model=model, scores=scores(dict.fromkeys(domains, self._accuracy)))


def weight(model_dir: Path) -> float:
    return float(load_file(model_dir / "model.safetensors")["model.norm.weight"][0]) + (
        0 if "rev" not in model_dir.name and "up" not in model_dir.name else 0.5
    )


def scores(accuracy: Mapping[str, float]) -> dict[str, DomainScore]:
    return {
        d: DomainScore(accuracy=a, stderr=0.0, low=a - 0.05, high=a + 0.05, questions=6) for d, a in accuracy.items()
    }


@pytest.fixture
def engines(world: Any, monkeypatch: pytest.MonkeyPatch) -> Engines:
    world.data["rounds"] = 2
    found = Engines(world.root / "base")
    monkeypatch.setattr(merging, "_run_session", found.session)
    monkeypatch.setattr(rounds, "evaluate_models", found.elsewhere)
    monkeypatch.setattr("opd.report.page.render_page", lambda *_: "")
    return found


@pytest.fixture
def run(world: Any) -> Callable[..., dict[str, Any]]:
    """Starts, or goes on, as `opd merge` does."""

    def go(resumed: bool = False, overrides: list[str] | None = None, wanted: str = "latest") -> dict[str, Any]:
        said.clear()
        root = world.root / "run"
        if resumed:
            return rounds.reopen_rounds(root, None, overrides, wanted, said.append).carry_out()
        return rounds.begin_rounds(load_pipeline(world.write()), root, said.append).carry_out()

    return go


said: list[str] = []

ROUND_1 = [
    "round-1: student before on reverse,upper", "round-1: expert rev on reverse", "round-1: expert up on upper",
    "round-1: train from 0", "round-1: trained", "round-1: merged on reverse,upper",
]  # fmt: skip
ROUND_2 = ["round-2: train from 0", "round-2: trained", "round-2: merged on reverse,upper"]


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


def test_the_second_round_starts_from_the_first_and_measures_nothing_twice(
    engines: Engines, run: Callable[..., Any], world: Any
) -> None:
    report = run()
    assert engines.events == [*ROUND_1, *ROUND_2]
    root = world.root / "run"
    assert names(root) >= {
        "pipeline.yaml",
        "manifest.json",
        "rounds.json",
        "model",
        "report.json",
        "round-1",
        "round-2",
    }
    start = weight(world.root / "base")
    assert [weight(p) - start for p in (root / "round-1/model", root / "round-2/model", root / "model")] == [1, 2, 2]
    assert not (root / "model").is_symlink()
    assert not (root / "round-1" / "checkpoints").exists() and (root / "round-2" / "checkpoints").exists()
    assert any("checkpoints are deleted" in line for line in said)
    pipelines = [yaml.safe_load((root / f"round-{n}" / "pipeline.yaml").read_text()) for n in (1, 2)]
    assert [p["seed"] for p in pipelines] == [0, 1]
    assert [p["student"]["model"] for p in pipelines] == [str(world.root / "base"), str(root / "round-1" / "model")]

    assert {(d["before"], d["after"], d["expert"]) for d in report["domains"].values()} == {(0.2, 0.6, 0.9)}
    assert report["mean_headroom"] == pytest.approx(0.4 / 0.7)
    first, second = report["rounds"]
    assert first["domains"]["reverse"] | {"headroom": 0, "headroom_in_round": 0} == {
        "before": 0.2, "after": 0.5, "expert": 0.9, "headroom": 0, "headroom_in_round": 0}  # fmt: skip
    assert first["mean_headroom"] == first["mean_headroom_in_round"] == pytest.approx(0.3 / 0.7)
    assert second["domains"]["reverse"]["before"] == 0.5
    assert second["mean_headroom"] == pytest.approx(0.4 / 0.7)
    assert second["mean_headroom_in_round"] == pytest.approx(0.1 / 0.4)
    low, high = second["mean_headroom_interval"]
    assert low < 0.4 / 0.7 < high
    assert (report["steps"], report["response_tokens"], report["wall_s"]) == (4, 40, 14.0)
    assert json.loads((root / "report.json").read_text()) == report


def test_one_round_is_a_merge_as_ever(engines: Engines, run: Callable[..., Any], world: Any) -> None:
    world.data["rounds"] = 1
    report = run()
    assert not {"rounds.json", "round-1"} & names(world.root / "run")
    assert "rounds" not in report and engines.events == [e.replace("round-1", "run") for e in ROUND_1]


@pytest.mark.parametrize(
    ("kill", "again"),
    [
        ("round-1: expert up on upper", ["round-1: expert rev on reverse", *ROUND_1[2:], *ROUND_2]),
        ("round-1: trained", ["round-1: train from 2", *ROUND_1[4:], *ROUND_2]),
        ("round-1: merged on reverse,upper", ["round-1: train from 2", *ROUND_1[4:], *ROUND_2]),
        ("round-2: train from 0", ROUND_2),
        ("round-2: trained", ["round-2: train from 2", *ROUND_2[1:]]),
    ],
)
def test_a_round_that_was_killed_goes_on(
    kill: str, again: list[str], engines: Engines, run: Callable[..., Any], world: Any
) -> None:
    engines.fail_at = kill
    with pytest.raises(RunError, match="killed"):
        run()
    assert not (world.root / "run" / "report.json").exists()
    engines.events.clear()
    report = run(resumed=True)
    assert engines.events == again
    assert [r["mean_headroom"] for r in report["rounds"]] == pytest.approx([0.3 / 0.7, 0.4 / 0.7])
    engines.events.clear()
    assert run(resumed=True) == report, "a finished run gives its report again"
    assert engines.events == []


@pytest.mark.parametrize(
    "where", ["_begin_round", "reusable_evaluations", "_finish_rounds", "_link_model", "write_report"]
)
def test_killed_between_rounds(
    where: str, engines: Engines, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise RunError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(rounds, where, killed)
        with pytest.raises(RunError, match="killed"):
            run()
    report = run(resumed=True)
    assert engines.events == [*ROUND_1, *ROUND_2]
    assert [r["mean_headroom"] for r in report["rounds"]] == pytest.approx([0.3 / 0.7, 0.4 / 0.7])


def test_ctrl_c_in_the_last_step_of_a_round_does_not_begin_the_next(
    engines: Engines, run: Callable[..., Any], world: Any
) -> None:
    engines.signals_at = "round-1: trained"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"after step 2, .*--resume {world.root / 'run'}`") as stopped:
        run()
    assert stopped.value.number == signal.SIGINT and signal.getsignal(signal.SIGINT) == before
    assert engines.events == ROUND_1
    run(resumed=True)
    assert engines.events == [*ROUND_1, *ROUND_2]


def test_an_interruption_names_the_whole_run(world: Any) -> None:
    (world.root / "rounds.json").touch()
    assert f"--resume {world.root}`" in str(Interrupted(3, world.root / "round-2", 2))
    assert f"--resume {world.root / 'other'}`" in str(Interrupted(3, world.root / "other", 2))
    (world.root / "rounds.json").unlink()
    assert f"--resume {world.root / 'round-2'}`" in str(Interrupted(3, world.root / "round-2", 2))


@pytest.mark.parametrize("links", [True, False])
def test_the_model_is_whole_with_and_without_hard_links(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("no hard links here")

    if not links:
        monkeypatch.setattr("pipelines.merging.directory.os.link", refused)
    source, target = tmp_path / "round-2" / "model", tmp_path / "model"
    source.mkdir(parents=True)
    (source / "config.json").write_text("new")
    target.mkdir()
    (target / "old.json").touch()
    (tmp_path / ".tmp-model").mkdir()
    rounds._link_model(source, target)
    assert names(tmp_path) == {"model", "round-2"} and names(target) == {"config.json"}
    assert (target / "config.json").read_text() == "new"
    assert (target / "config.json").samefile(source / "config.json") is links
    shutil.rmtree(tmp_path / "round-2")
    assert (target / "config.json").read_text() == "new"


# What is wrong, before anything starts


def test_a_later_round_is_checked_before_the_first(engines: Engines, run: Callable[..., Any], world: Any) -> None:
    world.data["rounds"] = [{}, {"experts": {"rev": {"model": "nowhere", "domain": "reverse"}, "up": {"model": "up", "domain": "upper"}}}]  # fmt: skip
    with pytest.raises(ModelError, match="nowhere"):
        run()
    assert engines.events == [] and not (world.root / "run").exists()


def test_a_directory_that_exists_is_refused(run: Callable[..., Any], engines: Engines, world: Any) -> None:
    (world.root / "run").mkdir()
    with pytest.raises(RunDirError, match="that is no run"):
        run()
    (world.root / "run" / "pipeline.yaml").touch()
    with pytest.raises(RunDirError, match="--resume"):
        run()


def stop_in_round(number: int, engines: Engines, run: Callable[..., Any]) -> None:
    engines.fail_at = f"round-{number}: train from 0"
    with pytest.raises(RunError, match="killed"):
        run()


def test_a_resume_refuses_what_changed(
    engines: Engines, run: Callable[..., Any], world: Any, make_model_dir: Callable[..., Path]
) -> None:
    stop_in_round(1, engines, run)
    shutil.rmtree(world.root / "up")
    make_model_dir(world.root / "up", seed=9)
    with pytest.raises(RunDirError, match="experts changed since the run began: up"):
        run(resumed=True)


def test_inputs_that_change_while_a_round_goes_on_end_before_the_next(
    engines: Engines, run: Callable[..., Any], world: Any
) -> None:
    stop_in_round(2, engines, run)
    shutil.rmtree(world.root / "run" / "round-2")  # killed a moment earlier
    file = world.root / "run" / "rounds.json"
    plan = json.loads(file.read_text())
    plan["rounds"][1]["experts"]["up"]["weights"]["model.safetensors"] = "0" * 64
    file.write_text(json.dumps(plan))
    with pytest.raises(RunDirError, match="experts changed"):
        run(resumed=True)
    with pytest.raises(RunDirError, match="experts changed"):
        config = load_pipeline(world.root / "run" / "round-1" / "pipeline.yaml")
        whole: Any = SimpleNamespace(root=world.root / "run", tell=said.append)
        rounds._begin_round(config, 1, plan["rounds"], whole, TERMINAL)


@pytest.mark.parametrize("number", [1, 2])
def test_what_may_change_reaches_the_rounds_that_are_left(
    number: int, engines: Engines, run: Callable[..., Any], world: Any
) -> None:
    stop_in_round(number, engines, run)
    with pytest.raises(RunDirError, match=r"trainer\.lr"):
        run(resumed=True, overrides=["trainer.lr=0.5"])
    with pytest.raises(RunDirError, match="3 rounds"):
        run(resumed=True, overrides=["rounds=3"])
    engines.fail_at = "round-2: trained"
    with pytest.raises(RunError, match="killed"):
        run(resumed=True, overrides=["trainer.ranks=1"])
    run(resumed=True)
    ranks = [
        yaml.safe_load((world.root / "run" / f"round-{n}" / "pipeline.yaml").read_text())["trainer"]["ranks"]
        for n in (1, 2)
    ]
    assert ranks == [1 if number == 1 else 2, 1]


@pytest.mark.parametrize("number", [1, 2])
def test_going_back_needs_a_round_under_way(number: int, engines: Engines, run: Callable[..., Any], world: Any) -> None:
    engines.fail_at = f"round-{number}: trained"
    with pytest.raises(RunError, match="killed"):
        run()
    run(resumed=True, wanted="2")
    assert f"round-{number}: train from 2" in engines.events
    with pytest.raises(RunDirError, match="2 of 2 rounds finished, and none under way"):
        run(resumed=True, wanted="2")
    shutil.rmtree(world.root / "run" / "round-2")
    with pytest.raises(RunDirError, match="1 of 2 rounds finished, and none under way"):
        run(resumed=True, wanted="2")


def test_a_damaged_plan_is_named(engines: Engines, run: Callable[..., Any], world: Any) -> None:
    stop_in_round(1, engines, run)
    file = world.root / "run" / "rounds.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.raises(RunDirError, match="format 2"):
        run(resumed=True)
    file.write_text("{")
    with pytest.raises(RunDirError, match=r"rounds\.json"):
        run(resumed=True)


@pytest.mark.parametrize("target", ["pipeline", "run directory"])
def test_other_methods_take_one_round(target: str, engines: Engines, run: Callable[..., Any], world: Any) -> None:
    if target == "pipeline":
        with pytest.raises(ConfigError, match="rounds=1"):
            jobs.plan_jobs(load_pipeline(world.write()), world.root / "x", ["opd"], None, None)
        return
    run()
    with pytest.raises(RunDirError, match="run/round-1"):
        jobs.open_run(world.root / "run")
    assert jobs.open_run(world.root / "run" / "round-2").rounds == 1


# Rounds that differ


def test_other_experts_and_domains(
    engines: Engines, run: Callable[..., Any], world: Any, monkeypatch: pytest.MonkeyPatch, make_model_dir: Any
) -> None:
    make_model_dir(world.root / "up-2", seed=5)
    for file in ("upper", "upper-eval"):
        text = (world.root / f"{file}.jsonl").read_text()
        (world.root / f"{file.replace('upper', 'lower')}.jsonl").write_text(text.replace("upp ", "low "))
    domains = {d: {"prompts": f"{d}.jsonl", "eval": {"prompts": f"{d}-eval.jsonl"}} for d in ("upper", "lower")}
    world.data["rounds"] = [{}, {
        "experts": {"up": {"model": "up", "domain": "upper"}, "new": {"model": "up-2", "domain": "lower"}},
        "domains": domains, "trainer": {"steps": 3}, "seed": 40,
    }]  # fmt: skip
    engines.fail_at = "round-2: trained"
    with pytest.raises(RunError, match="killed"):
        run()
    monkeypatch.chdir("/")  # nothing may hang on where it was started
    report = run(resumed=True)
    assert engines.events[len(ROUND_1) : len(ROUND_1) + 2] == [
        "round-2: student before on lower", "round-2: expert new on lower"
    ]  # fmt: skip
    assert engines.asked == [("base", ["lower"]), ("model", ["reverse"])]
    found = {name: (d["before"], d["after"], d["expert"]) for name, d in report["domains"].items()}
    assert found == {"reverse": (0.2, 0.1, 0.9), "upper": (0.2, 0.6, 0.9), "lower": (0.1, 0.6, 0.9)}
    assert [sorted(r["domains"]) for r in report["rounds"]] == [["reverse", "upper"], ["lower", "upper"]]
    assert report["rounds"][1]["domains"]["lower"]["headroom"] == pytest.approx(0.5 / 0.8)
    assert report["rounds"][1]["domains"]["lower"]["headroom_in_round"] == pytest.approx(0.1 / 0.4)
    second = yaml.safe_load((world.root / "run/round-2/pipeline.yaml").read_text())
    assert (second["seed"], second["trainer"]["steps"], second["trainer"]["samples_per_step"]) == (40, 3, 4)
    kept = yaml.safe_load((world.root / "run/pipeline.yaml").read_text())["rounds"]
    assert kept[0] == {} and kept[1]["trainer"] == {"steps": 3} and set(kept[1]) == {"seed", "experts", "domains", "trainer"}  # fmt: skip
    assert set(json.loads((world.root / "run/manifest.json").read_text())["experts"]) == {"rev", "up", "new"}


def test_another_exam_is_measured_again(engines: Engines, run: Callable[..., Any], world: Any) -> None:
    domains = {**world.data["domains"], "upper": {"prompts": "upper.jsonl", "eval": {"prompts": "upper-eval.jsonl", "verifier": "last_line"}}}  # fmt: skip
    world.data["rounds"] = [{}, {"domains": domains}]
    run()
    assert engines.events[len(ROUND_1) :][:2] == ["round-2: student before on upper", "round-2: expert up on upper"]
    engines.events.clear()
    shutil.rmtree(world.root / "run")
    world.data["rounds"] = [{}, {"rollout": {"max_new_tokens": 9}}]  # which is the limit of answers
    run()
    assert [e.split(": ")[1] for e in engines.events[len(ROUND_1) :][:3]] == [
        "student before on reverse,upper", "expert rev on reverse", "expert up on upper",
    ]  # fmt: skip


def test_an_option_may_change_after_the_first_of_rounds_with_other_experts(
    engines: Engines, run: Callable[..., Any], world: Any, make_adapter: Callable[..., Path]
) -> None:
    make_adapter(world.root / "adapter", world.root / "base", base_model_name_or_path="base")
    other = {"late": {"model": "adapter", "domain": "upper"}}
    world.data["rounds"] = [{}, {"experts": other, "domains": {"upper": world.data["domains"]["upper"]}}]
    stop_in_round(2, engines, run)
    root = world.root / "run"
    before = {name: json.loads((root / "manifest.json").read_text())[name] for name in ("experts", "prompts", "models")}
    for ranks in (1, 4):
        engines.fail_at = "round-2: train from 0"
        with pytest.raises(RunError, match="killed"):
            run(resumed=True, overrides=["checkpoint.keep=2", f"trainer.ranks={ranks}"])
        first, second = split_rounds(load_pipeline(root / "pipeline.yaml"))
        assert (set(first.experts), set(second.experts)) == ({"rev", "up"}, {"late"})
        assert second.experts["late"].base == world.root / "base" and set(second.domains) == {"upper"}
        assert second.checkpoint.keep == 2 and second.trainer.ranks == ranks
    manifest = json.loads((root / "manifest.json").read_text())
    assert {name: manifest[name] for name in before} == before
    run(resumed=True)
    assert (root / "report.json").exists() and engines.asked == [("model", ["reverse"])]


def test_a_round_may_have_another_engine_of_teachers(engines: Engines, run: Callable[..., Any], world: Any) -> None:
    world.data["rounds"] = [{}, {"teachers": {"engine": "vllm"}}]
    stop_in_round(1, engines, run)
    first, second = split_rounds(load_pipeline(world.root / "run" / "pipeline.yaml"))
    assert (first.teachers.engine, second.teachers.engine) == ("transformers", "vllm")


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"environment": {"name": "maze", "max_turns": 16}}, False),
        ({"agent": {"command": ["python", "other.py"]}}, False),
        ({"guard": False}, False),
        ({"prompts": {"path": "/p.jsonl", "filter": {"column": "level", "equals": "hard"}}}, False),
        ({"prompts": {"path": "/p.jsonl", "limit": 9}, "eval": {"prompts": "/q.jsonl"}}, True),
    ],
)
def test_what_makes_another_exam(changed: dict[str, Any], same: bool, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.evaluation.mkdir()
    for name in ("after", "expert"):
        Evaluation(model=name, scores=scores({"d": 0.5})).save(paths.evaluation_file(name))

    def facts(**own: Any) -> dict[str, Any]:
        exam = changed.get("eval", {"holdout": 0.1})
        domain = {"prompts": "/p.jsonl", "environment": {"name": "maze", "max_turns": 4}, "agent": None, "guard": None}
        return {
            "config": {"rollout": {}, "domains": {"d": {**domain, "eval": exam, **own}}},
            "prompts": {"d": {"/p.jsonl": "1"}},
            "teachers": {"d": "2"},
        }

    known = rounds.reusable_evaluations(paths, facts(), facts(**changed))
    assert set(known) == ({"before.json", "expert.json"} if same else set())


def test_another_expert_under_the_same_name_is_measured(
    engines: Engines, run: Callable[..., Any], world: Any, make_model_dir: Any
) -> None:
    make_model_dir(world.root / "up-2", seed=5)
    world.data["rounds"] = [{}, {"experts": {**world.data["experts"], "up": {"model": "up-2", "domain": "upper"}}}]
    run()
    assert engines.events[len(ROUND_1)] == "round-2: expert up on upper"


def test_public_tasks_of_the_student_before_are_those_of_the_last_round(
    engines: Engines, run: Callable[..., Any], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("pipelines.inputs.read.check_tasks", lambda config: None)
    monkeypatch.setattr(
        "pipelines.evaluation.lm_eval.run_tasks",
        lambda settings, path, dtype: ran.append(str(path)) or {"t": {"acc": len(ran)}},
    )
    session = engines.session

    def with_tasks(run: merging.MergeRun, *rest: Any) -> Any:
        report = session(run, *rest)
        engines.event("tasks")
        lm_eval_merge(run.config, run.paths.model, run.paths.lm_eval)
        return report

    monkeypatch.setattr(merging, "_run_session", with_tasks)
    world.data["evaluate"] = {"lm_eval": ["gsm8k"]}
    engines.fail_at = "round-1: tasks"  # the report is there, the tasks are not
    with pytest.raises(RunError, match="killed"):
        run()
    run(resumed=True)
    assert [Path(path).parent.name + "/" + Path(path).name for path in ran] == [
        f"{world.root.name}/base", "round-1/model", "round-2/model",
    ]  # fmt: skip
    file = world.root / "run" / "round-2" / "evaluation" / "lm-eval.json"
    scores, weights = (json.loads(file.read_text())[key] for key in ("models", "weights"))
    assert scores == {"student before": {"t": {"acc": 2}}, "merged": {"t": {"acc": 3}}}
    earlier = json.loads((world.root / "run" / "round-1" / "evaluation" / "lm-eval.json").read_text())["weights"]
    assert weights["student before"] == earlier["merged"], "the model that the first round left"
