"""The arms of `benchmarks.rewards`, its budget of tokens, its table, and what it uses of `benchmarks.variants`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks import budget, rewards, variants
from benchmarks.budget import Budget
from benchmarks.variants import Place, Variant
from experts.rl.spec import ReinforceSpec
from experts.spec import find_spec
from opd.config import PipelineConfig
from opd.records.episodes import EpisodesRecord
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import DomainRecord, StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.settings.yaml_files import load_yaml, validate_section
from pipelines import api
from pipelines.baselines.jobs import METHODS
from pipelines.catalog import find_pipeline
from pipelines.interrupts import Interrupted
from pipelines.merging import run as merging
from pipelines.merging.callbacks import MergeCallbacks
from pipelines.reinforce import build_pipeline


def answers(step: int, tokens: int, responses: int = 4) -> StepRecord:
    """A step of a domain of one turn."""
    return StepRecord(step=step, response_tokens=tokens, prompts={"a": responses})


def acts(step: int, tokens: int, responses: int = 4) -> StepRecord:
    """A step of a game, whose environment writes as much again."""
    return StepRecord(
        step=step,
        response_tokens=2 * tokens,
        prompts={"b": responses},
        domains={"b": DomainRecord(tokens=tokens)},
        episodes={"b": EpisodesRecord()},
    )


EXPERTS = {"a": [answers(1, 20), answers(2, 20)], "b": [acts(1, 100), acts(2, 60)]}


def score(accuracy: float, half: float) -> DomainScore:
    return DomainScore(accuracy=accuracy, stderr=half / 2, low=accuracy - half, high=accuracy + half, questions=100)


def write_run(paths: RunPaths, after: dict[str, float], half: float, records: Sequence[StepRecord] = ()) -> None:
    """A run directory by hand: base 0.2, experts 0.6, the intervals of experts and merged model `half` wide to each side."""
    paths.evaluation.mkdir(parents=True)
    for exam, found in (("before", dict.fromkeys(after, 0.2)), ("expert", dict.fromkeys(after, 0.6)), ("after", after)):
        scores = {domain: score(accuracy, half) for domain, accuracy in found.items()}
        Evaluation(model=exam, scores=scores).save(paths.evaluation_file(exam))
    for record in records:
        MetricsFile(paths.metrics).write(record)
    paths.report.write_text(json.dumps({"wall_s": 60.0, "response_tokens": 10**6}))


def place_in(folder: Path) -> Place:
    return Place(folder, folder / "pipeline.yaml", folder)


@pytest.mark.parametrize("arm", rewards.MERGES, ids=lambda arm: arm.name)
def test_every_merge_is_one_of_the_shipped_pipeline(arm: Variant) -> None:
    objective = api.load_pipeline("rewards", arm.settings).objective
    assert (objective.reward.weight if objective.reward else None) == (0.5 if "reward" in arm.name else None)
    assert objective.extrapolate == (1.25 if "beyond" in arm.name else 1.0)


def test_the_baselines_are_methods_and_arms_have_names_of_their_own() -> None:
    names = [*(arm.name for arm in rewards.MERGES), rewards.AT_ONCE.name, *rewards.BASELINES]
    assert len({name.replace(" ", "-") for name in names}) == len(names)
    assert set(rewards.BASELINES) <= set(METHODS)


def test_what_quick_trains_is_valid_and_small() -> None:
    spec = validate_section(ReinforceSpec, rewards.tiny_spec(load_yaml(find_spec("rewards-experts"))), "spec")
    assert {name: build_pipeline(spec, name).trainer.steps for name in spec.experts} == dict.fromkeys(rewards.TINY, 2)
    assert [file.parts[2] for file in spec.base.data] == list(rewards.TINY)
    for name in ("rewards", "rewards-at-once"):
        config = validate_section(PipelineConfig, rewards.tiny_pipeline(load_yaml(find_pipeline(name))), name)
        assert (list(config.domains), config.trainer.steps) == (list(rewards.TINY), 2)
        assert config.student.model == spec.base_dir


def test_the_budget_is_what_experts_and_merge_were_trained_on() -> None:
    assert rewards.token_budget(EXPERTS, [acts(1, 7), answers(2, 3)]) == 40 + 160 + 7 + 3


def test_a_step_of_all_domains_has_as_many_responses_of_each() -> None:
    assert rewards.tokens_per_step(EXPERTS, 12) == 12 * (40 / 8 + 160 / 8) / 2
    longer = EXPERTS | {"a": [*EXPERTS["a"], *(answers(step, 20) for step in range(3, 30))]}
    assert rewards.tokens_per_step(longer, 12) == 150, "how long an expert was trained does not count"


def test_a_budget_asks_to_leave_when_it_is_spent() -> None:
    found = Budget(100, [answers(1, 30), acts(2, 30)])
    with found.listening() as asked:
        found.step(answers(3, 39))
        assert (found.left, asked.should_leave()) == (1, False)
        found.step(answers(4, 5))
        assert (found.left, asked.should_leave()) == (-4, True)


def test_steps_that_are_taken_again_count_once() -> None:
    found = Budget(100)
    for step in (1, 2, 3, 2):
        found.step(answers(step, 30))
    assert found.left == 40
    found.step(answers(3, 30))
    assert found.left == 10


def test_steps_after_the_last_checkpoint_are_not_spent(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in range(1, 6):
        MetricsFile(paths.metrics).write(answers(step, 10))
    assert budget.taken(paths) == []
    for step in (2, 4):
        (paths.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    assert [record.step for record in budget.taken(paths)] == [1, 2, 3, 4]


class Training:
    """A run of at most five steps of 30 tokens, each with a checkpoint."""

    def __init__(self, paths: RunPaths, ctrl_c: int = 0) -> None:
        self.paths = paths
        self.ctrl_c = ctrl_c

    def carry_out(self, around: MergeCallbacks) -> None:
        metrics, (sink,) = MetricsFile(self.paths.metrics), around.sinks
        self.paths.root.mkdir(exist_ok=True)
        with around.signals() as signals:
            for step in range(len(metrics.read()) + 1, 6):
                metrics.write(answers(step, 30))
                (self.paths.checkpoints / f"step-{step:06d}").mkdir(parents=True)
                sink.step(answers(step, 30))
                signals.number = signals.number or (2 if step == self.ctrl_c else 0)
                if signals.should_leave() and step < 5:
                    raise Interrupted(step, self.paths.root, signals.number)
        self.paths.report.write_text("{}")


def test_training_within_a_budget_goes_on_after_ctrl_c_and_stops_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, config, calls = RunPaths(tmp_path / "run"), api.load_pipeline("rewards"), []
    monkeypatch.setattr(merging, "begin", lambda *_: calls.append("begin") or Training(paths, ctrl_c=1))
    monkeypatch.setattr(merging, "reopen", lambda *_: calls.append("reopen") or Training(paths))
    with pytest.raises(SystemExit, match="the same command goes on"):
        budget.train_within(100, config, paths)
    for _ in range(2):
        budget.train_within(100, config, paths)
        assert [record.step for record in budget.taken(paths)] == [1, 2, 3, 4] and not paths.report.exists()
    assert calls == ["begin", "reopen"]
    for tokens, asked in ((200, config), (100, config.model_copy(update={"seed": config.seed + 1}))):
        with pytest.raises(SystemExit, match=r"run: begun with other settings \((tokens|seed)\)"):
            budget.train_within(tokens, asked, paths)


def test_training_that_needs_all_its_steps_ends_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, calls = RunPaths(tmp_path / "run"), []
    monkeypatch.setattr(merging, "begin", lambda *_: calls.append("begin") or Training(paths))
    for _ in range(2):
        budget.train_within(1000, api.load_pipeline("rewards"), paths)
        assert paths.report.exists()
    assert calls == ["begin"]


def test_trainings_that_are_not_finished_are_named(tmp_path: Path) -> None:
    data = rewards.tiny_spec(load_yaml(find_spec("rewards-experts"))) | {"runs": str(tmp_path)}
    spec = validate_section(ReinforceSpec, data, "spec")
    first, second = (RunPaths(tmp_path / f"{name}-ppo") for name in rewards.TINY)
    write_run(first, {"between": 0.5}, 0.1, [answers(1, 20)])
    second.root.mkdir()
    MetricsFile(second.metrics).write(answers(1, 20))
    with pytest.raises(SystemExit, match=r"training in \S+number-ppo: `make rl`"):
        rewards.training_records(spec)
    second.report.write_text("{}")
    assert rewards.training_records(spec) == {name: [answers(1, 20)] for name in rewards.TINY}


def test_a_domain_is_above_its_expert_by_more_than_the_interval_and_the_table_counts_it(tmp_path: Path) -> None:
    after = {"a": 0.7, "b": 0.6}
    rows = {}
    for half in (0.05, 0.1):  # the difference of 0.1 has an interval of sqrt(2) times that
        paths = RunPaths(tmp_path / f"{half}")
        write_run(paths, after, half, [acts(1, 1234)])
        found = variants.outcome(paths, Variant("opd", ("x=1",)), 0)
        assert (found.tokens, found.wall_s, found.settings) == (1234, 60.0, ("x=1",))
        assert found.intervals["after"]["a"] == (0.7 - half, 0.7 + half)
        rows[half] = (found.above, rewards.table([found]).splitlines()[2])
    assert rows[0.05] == (["a"], "| opd | 0.650 | 1.125 | 1.0 | 1,234 |")
    assert rows[0.1] == ([], "| opd | 0.650 | 1.125 | 0.0 | 1,234 |")


def test_the_table_has_means_over_seeds_with_intervals(tmp_path: Path) -> None:
    found = []
    for seed, (accuracy, tokens) in enumerate([(0.5, 1000), (0.6, 1200), (0.7, 1400)]):
        paths = RunPaths(tmp_path / f"{seed}")
        write_run(paths, {"a": accuracy}, 0.01, [answers(1, tokens)])
        found.append(variants.outcome(paths, rewards.OPD, seed))
    lines = rewards.table([*found, variants.outcome(paths, Variant("ties", ()), 0)]).splitlines()
    assert lines[2] == "| opd | 0.600 ± 0.248 | 1.000 ± 0.621 | 0.3 ± 1.4 | 1,200 ± 497 |"
    assert lines[3] == "| ties | 0.700 | 1.250 | 1.0 | 1,400 |"
    assert lines[5] == "Mean success of the base: 0.200; of the experts, each on its own domain: 0.600."


def test_without_a_better_expert_there_is_no_headroom(tmp_path: Path) -> None:
    scores = {"a": score(0.6, 0.1)}
    exams = dict.fromkeys(("before", "expert", "after"), scores)
    found = variants.measured(rewards.OPD, 0, exams, 5, 1.0)
    assert found.mean_headroom is None and " - |" in rewards.table([found]).splitlines()[2]


def test_all_at_once_ends_at_its_budget_with_a_branch_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, args = place_in(tmp_path), rewards.parsed(["--set", "trainer.ranks=1"])
    write_run(where.run("opd", 3), {"a": 0.6}, 0.01, [answers(1, 2000), answers(2, 2000)])
    asked: dict[str, object] = {}

    def train_within(tokens: int, config: PipelineConfig, paths: RunPaths) -> None:
        asked.update(tokens=tokens, steps=config.trainer.steps, seed=config.seed, ranks=config.trainer.ranks)
        (paths.checkpoints / "step-000002").mkdir(parents=True)

    def carry_out(where: Place, paths: RunPaths, begin: Sequence[str]) -> None:
        asked.update(begin=list(begin))
        write_run(paths, {"a": 0.4}, 0.01, [answers(step, 1400) for step in (1, 2, 3)])

    monkeypatch.setattr(rewards, "train_within", train_within)
    monkeypatch.setattr(rewards, "carry_out", carry_out)
    found = rewards.at_once(args, where, 3, EXPERTS)
    a_step = 128 * 12.5
    assert asked["tokens"] == 4000 + 200 - a_step and asked["steps"] == 3  # 1.1 * 4200 / 1600, rounded up
    assert (asked["seed"], asked["ranks"]) == (3, 1)
    last = ["--set", "seed=3", "--set", "trainer.ranks=1", "--set", "trainer.steps=3"]
    origin = tmp_path / "rewards-at-once-until-the-last-step-3"
    assert asked["begin"] == [str(tmp_path / "rewards-at-once.yaml"), "--from", f"{origin}@2", *last]
    assert (found.tokens, found.mean_headroom) == (4200, pytest.approx(0.5))


def test_all_at_once_that_needs_all_its_steps_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = place_in(tmp_path)
    write_run(where.run("opd", 0), {"a": 0.6}, 0.01, [answers(1, 2000)])
    monkeypatch.setattr(
        rewards, "train_within", lambda _, __, paths: write_run(paths, {"a": 0.4}, 0.01, [answers(1, 9)])
    )
    assert rewards.at_once(rewards.parsed([]), where, 0, EXPERTS).tokens == 9


@pytest.mark.parametrize(("first", "named"), [(True, [*rewards.BASELINES]), (False, ["off_policy"])])
def test_merges_of_weights_are_made_with_the_first_seed_only(first: bool, named: list[str]) -> None:
    assert rewards.wanted(rewards.ARMS, first) == named
    assert rewards.wanted(["opd", "ties"], first) == (["ties"] if first else [])


def test_arms_that_nobody_asked_for_are_left_out_but_for_the_one_that_the_others_are_measured_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(rewards, "merge", lambda where, variant, *_: made.append(variant.name))
    monkeypatch.setattr(rewards, "at_once", lambda *_: made.append("at once"))
    monkeypatch.setattr(rewards, "baselines", lambda where, seed, methods: made.append(methods) or ())
    asked = {
        "opd-beyond": ["opd", "opd beyond", []],
        "rewards-at-once": ["opd", "at once", []],
        "ties": ["opd", ["ties"]],
    }
    for arm, wanted in asked.items():
        made.clear()
        list(rewards.of_one_seed(rewards.parsed(["--arms", arm]), place_in(tmp_path), 0, EXPERTS))
        assert made == wanted
    with pytest.raises(SystemExit):
        rewards.parsed(["--arms", "opd beyond"])


def test_seeds_that_have_no_interval_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["1", "1"], [str(seed) for seed in range(11)]):
        with pytest.raises(SystemExit):
            rewards.parsed(["--seeds", *wrong])
        assert "each once, at most 10" in capsys.readouterr().err


def test_a_run_is_begun_resumed_or_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, calls = place_in(tmp_path), []
    where.pipeline.write_text("name: p")
    monkeypatch.setattr(variants, "opd", lambda log, cwd, *words: calls.append((log.name, words)))
    paths = where.run("opd with reward", 2)
    begin = ["p.yaml", *variants.given(2, ["a=1"], ("b=2",))]
    variants.carry_out(where, paths, begin)
    root = str(tmp_path / "opd-with-reward-2")
    settings = ("--set", "seed=2", "--set", "a=1", "--set", "b=2")
    assert calls.pop() == ("opd-with-reward-2.log", ("merge", "p.yaml", *settings, "--run-dir", root))
    paths.root.mkdir()
    for file in (paths.manifest, paths.pipeline):
        file.touch()
    variants.carry_out(where, paths, begin)
    assert calls.pop() == ("opd-with-reward-2.log", ("merge", "--resume", root))
    paths.report.touch()
    variants.carry_out(where, paths, begin)
    assert calls == []


def test_a_run_of_other_questions_is_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = place_in(tmp_path)
    where.pipeline.write_text("name: on validation questions")
    monkeypatch.setattr(variants, "opd", lambda log, cwd, *words: where.run("opd", 0).root.mkdir())
    variants.carry_out(where, where.run("opd", 0), ["p.yaml"])
    with pytest.raises(SystemExit, match=r"opd-0: begun with other settings \(opd merge\): name another folder"):
        variants.carry_out(where, where.run("opd", 0), ["p.yaml", "--set", "trainer.lr=1"])
    where.pipeline.write_text("name: on the exam")
    with pytest.raises(SystemExit, match=r"other settings \(pipeline\)"):
        variants.carry_out(where, where.run("opd", 0), ["p.yaml"])


@pytest.mark.parametrize("name", ["rewards", "rewards-at-once"])
@pytest.mark.parametrize("questions", ["exam", "validation"])
def test_questions_are_the_exams_or_a_share_of_the_prompts(name: str, questions: str, tmp_path: Path) -> None:
    data, args = load_yaml(find_pipeline(name)), argparse.Namespace(questions=questions, holdout=0.25)
    shipped = yaml.safe_dump(data)
    config = api.load_pipeline(variants.written(data, tmp_path / "runs" / "pipeline.yaml", args))
    for domain, section in yaml.safe_load(shipped)["domains"].items():
        found = config.domains[domain].eval
        assert found is not None and (found.holdout, found.prompts is None) == (
            (None, False) if questions == "exam" else (0.25, True)
        )
        verifier = section["eval"].get("verifier", "exact_match")
        assert (found.verifier == "exact_match") == (verifier == "exact_match")


def test_a_command_that_fails_ends_the_comparison_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)opd merge nowhere.yaml ended with 2 \(.*log\):.*nowhere"):
        variants.opd(tmp_path / "log", tmp_path, "merge", "nowhere.yaml")
