"""Merges one after the other, each from the model that the one before left. Each is a round; a pipeline of one round is one merge.

    RUN_DIR/round-1/, round-2/ ...   each a run directory of `pipelines.merging.run`
    RUN_DIR/model/                   the model of the last round
    RUN_DIR/rounds.json              the inputs of each round, with hashes, as they were before the first began
    RUN_DIR/evaluation/              the very first student, the last model and the experts, on the domains of all rounds

A round is finished, under way, or has no directory yet. Every step from one round to the next can be repeated after a kill.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig, as_begun, load_pipeline, split_rounds
from opd.config.pipeline import RoundConfig
from opd.errors import RunDirError
from opd.evaluation.evaluator import BEFORE, EXPERT, MERGED
from opd.files import atomic_write_text, replace_dir, sweep_temporary_files
from opd.records.scores import Evaluation, combine_evaluations
from opd.records.sums import sum_by_key
from opd.records.texts import TextSpending
from opd.report import build_report, read_run, write_report
from opd.run import checkpoints
from opd.run.metrics import count_steps_and_tokens
from opd.run.paths import MERGE_EVALUATIONS, RunPaths
from opd.settings.yaml_files import validate_section
from opd.text import Tell
from pipelines.build import prove_servers
from pipelines.evaluation.lm_eval import lm_eval_text, lm_eval_weights, read_lm_eval
from pipelines.evaluation.models import evaluate_models
from pipelines.inputs.indexers import spell_pattern
from pipelines.inputs.read import Inputs, read_inputs, read_rounds
from pipelines.inputs.template_date import as_recorded, with_template_date
from pipelines.interrupts import Interrupted
from pipelines.merging import run as merging
from pipelines.merging.callbacks import TERMINAL, MergeCallbacks
from pipelines.merging.changes import (
    accept_changes,
    refuse_changed_inputs,
    refuse_columns_of_registered_prompts,
    warn_unrecorded,
)
from pipelines.merging.directory import link_files, lock_run_directory, new_directory, refuse_existing
from pipelines.merging.manifest import make_manifest, with_absolute_paths, write_inputs
from pipelines.merging.run import MergeRun
from pipelines.sizing.auto import choose_numbers, keep_numbers, local_machine
from pipelines.sizing.gpu_memory import refuse_crowded_gpus
from pipelines.sizing.memory import refuse_too_large

FORMAT = 1
"""The format of `rounds.json`."""
RoundFacts = dict[str, Any]
"""The manifest of a round, and its `teachers`: domain -> digest of its leading teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A merge in several rounds, checked."""

    config: PipelineConfig
    """The pipeline with all its rounds."""
    configs: list[PipelineConfig]
    """The pipeline of each round."""
    root: Path
    """The run directory of the whole merge."""
    plan: list[RoundFacts]
    """The inputs of each round; for an interrupted run, as they were recorded when the run began."""
    resume_from: str | None
    """The checkpoint of the round under way to go on from; None for a run that begins."""
    tell: Tell
    """Takes sentences for the user."""

    def carry_out(self, callbacks: MergeCallbacks = TERMINAL) -> dict[str, Any]:
        """Take all rounds to their end. Returns the report. Raises: what `pipelines.merging.run.MergeRun.carry_out` raises."""
        with lock_run_directory(RunPaths(self.root)):
            if self.resume_from is None:
                return _merge_rounds(self, self.plan, checkpoints.LATEST, callbacks)
            sweep_temporary_files(self.root)
            return _merge_rounds(self, _recheck_rounds(self), self.resume_from, callbacks)


def begin_rounds(config: PipelineConfig, root: Path, tell: Tell) -> MergeRun | Rounds:
    """Begin a new merge, whose run directory `root` must not exist; from here on it can be resumed.

    Raises: OpdError before anything is written. All rounds are checked before the first begins.
    """
    if config.rounds == 1:
        return merging.begin(config, root)
    refuse_existing(root)
    configs, inputs = _check_all(split_rounds(config))
    config = keep_numbers(config, configs[0])
    config, *configs = [
        with_template_date(round_config, inputs[0].template_date) for round_config in (config, *configs)
    ]
    plan = [_make_facts(round_config, round_inputs) for round_config, round_inputs in zip(configs, inputs, strict=True)]
    with new_directory(root) as temporary:
        for round_config, round_inputs in zip(configs, inputs, strict=True):
            prove_servers(round_config, round_inputs, temporary)
        _write_rounds(temporary, config, plan)
    return Rounds(config=config, configs=configs, root=root, plan=plan, resume_from=None, tell=tell)


def reopen_rounds(
    root: Path, config: PipelineConfig | None, overrides: list[str] | None, resume_from: str, tell: Tell
) -> MergeRun | Rounds:
    """Reopen an interrupted merge, to go on in its round or with the next one. See `pipelines.merging.run.reopen`."""
    paths = RunPaths(root)
    if not paths.rounds.exists():
        return merging.reopen(root, config, overrides, resume_from)
    recorded = _read_plan(paths.rounds)
    config = config or load_pipeline(paths.pipeline, overrides)
    recorded_configs = [validate_section(PipelineConfig, facts["config"], paths.rounds) for facts in recorded]
    config = as_recorded(config, recorded_configs[0])
    configs = split_rounds(config)
    if len(configs) != len(recorded):
        raise RunDirError.at(
            paths.rounds,
            found=f"a pipeline of {len(configs)} rounds",
            wanted=f"{len(recorded)}, as when the run began",
            fix="put `rounds` back; for further rounds start a new merge from this run's model",
        )
    # Once more for each round, which may have domains of its own.
    configs = [as_recorded(new, old) for new, old in zip(configs, recorded_configs, strict=True)]
    return Rounds(config=config, configs=configs, root=root, plan=recorded, resume_from=resume_from, tell=tell)


def _recheck_rounds(run: Rounds) -> list[RoundFacts]:
    """Return the plan with the inputs of the rounds that are left as they are now, after a check that they may go on with these.

    The plan on disk is replaced if anything has changed.
    Raises: OpdError, and then nothing is written.
    """
    paths, num_finished = RunPaths(run.root), _count_finished(run.configs, run.root)
    configs, inputs = _check_all(run.configs[num_finished:])
    new_plan = [_make_facts(config, round_inputs) for config, round_inputs in zip(configs, inputs, strict=True)]
    changes = []
    for old, new, config, round_inputs in zip(run.plan[num_finished:], new_plan, configs, inputs, strict=True):
        refuse_changed_inputs(old, new, paths.rounds)
        refuse_columns_of_registered_prompts(old, config, round_inputs, paths.rounds)
        changes += warn_unrecorded(old) + accept_changes(old["config"], new["config"], paths.rounds)
    plan = [*run.plan[:num_finished], *new_plan]
    if changes:
        _write_rounds(paths, run.config, plan)
    return plan


def _check_all(configs: Sequence[PipelineConfig]) -> tuple[list[PipelineConfig], list[Inputs]]:
    """Read the inputs of all rounds, choose their open numbers, and check that each round fits into this machine. Raises: OpdError."""
    inputs = read_rounds(configs)
    chosen = []
    for config, round_inputs in zip(configs, inputs, strict=True):
        chosen.append(choose_numbers(spell_pattern(config), round_inputs, local_machine(config)))
        refuse_too_large(chosen[-1], round_inputs)
        refuse_crowded_gpus(chosen[-1], round_inputs)
    return chosen, inputs


def _make_facts(config: PipelineConfig, inputs: Inputs) -> RoundFacts:
    teachers = {domain: teacher.digest for domain, teacher in inputs.teachers.items()}
    return {**make_manifest(config, inputs), "teachers": teachers}


def _write_rounds(paths: RunPaths, config: PipelineConfig, plan: Sequence[RoundFacts]) -> None:
    """Write `rounds.json`, and manifest and pipeline of the whole merge."""
    experts = {name: facts for round_facts in plan for name, facts in round_facts["experts"].items()}
    sizes = {name: size for round_facts in plan for name, size in round_facts["models"]["experts"].items()}
    first_manifest = {key: facts for key, facts in plan[0].items() if key != "teachers"}
    models = {**first_manifest["models"], "experts": sizes}
    whole = {"config": _whole_pipeline(config, plan), "experts": experts, "models": models}
    write_inputs(paths, first_manifest | whole)
    atomic_write_text(paths.rounds, json.dumps({"format": FORMAT, "rounds": plan}, indent=1))


def _whole_pipeline(config: PipelineConfig, plan: Sequence[RoundFacts]) -> dict[str, Any]:
    """Return the pipeline of all rounds, with the absolute paths and the adapters' bases that the rounds' own pipelines have."""
    data = with_absolute_paths(config)
    for name, expert in data["experts"].items():
        for round_expert in (round_facts["config"]["experts"].get(name) for round_facts in plan):
            if isinstance(round_expert, dict) and round_expert["model"] == expert["model"]:
                expert["base"] = round_expert["base"]
    if isinstance(config.rounds, list):
        # By way of JSON, because the plan may have been read from a file, with lists in place of tuples.
        first_config, *later_configs = json.loads(json.dumps([data, *(facts["config"] for facts in plan[1:])]))
        data["rounds"] = [{}, *(_round_difference(first_config, later_config) for later_config in later_configs)]
    return data


def _round_difference(first_config: Mapping[str, Any], later_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `RoundConfig` that turns `first_config` into `later_config`."""
    changes = {key: later_config[key] for key in RoundConfig.model_fields if later_config[key] != first_config[key]}
    for key in ("rollout", "teachers", "objective", "trainer"):
        if key in changes and later_config[key].get("kind") == first_config[key].get("kind"):
            equal_items = first_config[key].items()
            changes[key] = {k: value for k, value in later_config[key].items() if (k, value) not in equal_items}
    return changes


def _read_plan(file: Path) -> list[RoundFacts]:
    """Read rounds.json. Raises: RunDirError if it is damaged or of another release."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        number, rounds = data["format"], data["rounds"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError.at(
            file, found=f"{type(error).__name__}: {error}", wanted="the rounds of a run", fix="put the file back"
        ) from None
    if number != FORMAT:
        raise RunDirError.at(
            file,
            found=f"format {number}",
            wanted=f"format {FORMAT}",
            fix="resume with the release of opd-merge that began the run",
        )
    return [{**facts, "config": as_begun(facts["config"])} for facts in rounds]


def _count_finished(configs: Sequence[PipelineConfig], root: Path) -> int:
    """Return the number of finished rounds, counted from the first."""
    for index, config in enumerate(configs):
        paths = RunPaths(root).round_dir(index + 1)
        measured = not config.evaluate.lm_eval.tasks or MERGED in read_lm_eval(paths.lm_eval)
        if not paths.report.exists() or not measured:
            return index
    return len(configs)


def _merge_rounds(
    run: Rounds, plan: Sequence[RoundFacts], resume_from: str, callbacks: MergeCallbacks
) -> dict[str, Any]:
    """Merge the rounds that are left, then make the results of the whole. Returns the report."""
    configs, run_paths, num = run.configs, RunPaths(run.root), len(run.configs)
    finished = _count_finished(configs, run.root)
    if resume_from not in (checkpoints.LATEST, checkpoints.LATEST_VALID) and (
        finished == num or not run_paths.round_dir(finished + 1).root.exists()
    ):
        raise RunDirError.at(
            f"--resume-from {resume_from}",
            found=f"{finished} of {num} rounds finished, and none under way",
            wanted="an interrupted round, in which the run can go back",
            fix="leave the option out",
        )
    with callbacks.signals() as signals:
        for index in range(finished, num):
            config, paths = configs[index], run_paths.round_dir(index + 1)
            if index:  # the student is the model of the round before
                student = config.student.model_copy(update={"model": run_paths.round_dir(index).model})
                config = config.model_copy(update={"student": student})
            if paths.root.exists():
                run.tell(f"round {index + 1} of {num}: going on")
                merging.resume(paths.root, config, None, resume_from, callbacks)
            elif index:
                run.tell(f"round {index + 1} of {num}: from the model of round {index}")
                _begin_round(config, index, plan, run, callbacks)
            else:
                run.tell(f"round 1 of {num}")
                merging.start(config, paths.root, callbacks=callbacks)
            if signals.should_leave() and index + 1 < num:
                raise Interrupted(config.trainer.steps, run.root, signals.number)
        return _finish_rounds(run, plan)


def _begin_round(
    config: PipelineConfig, index: int, plan: Sequence[RoundFacts], run: Rounds, callbacks: MergeCallbacks
) -> None:
    """Start a round that is not the first, with the evaluations of the round before; `index` counts from 0.

    Raises: what `pipelines.merging.run.start` raises.
    """
    run_paths = RunPaths(run.root)
    previous = run_paths.round_dir(index)
    facts = _make_facts(config, read_inputs(config))
    # The student is the model that the round before left, so the plan, which is older, cannot have its hash.
    refuse_changed_inputs(plan[index] | {"student": facts["student"]}, facts, run_paths.rounds)
    if previous.checkpoints.exists() or previous.targets.exists():
        run.tell(f"round {index} is finished: its checkpoints are deleted, its model stays")
        shutil.rmtree(previous.checkpoints, ignore_errors=True)
        shutil.rmtree(previous.targets, ignore_errors=True)
    evaluation_files = reusable_evaluations(previous, plan[index - 1], facts)
    merging.start(config, run_paths.round_dir(index + 1).root, evaluation_files, callbacks)


def reusable_evaluations(paths: RunPaths, old_facts: RoundFacts, new_facts: RoundFacts) -> dict[str, str]:
    """Return the evaluations that the next round need not repeat, as name of a file of `evaluation/` -> its text.

    They are those of the model that the finished round left, and of experts that take the same exam again. `old_facts` are those of
    the finished round in `paths`, `new_facts` those of the next.
    """
    exams = [
        d
        for d in new_facts["config"]["domains"]
        if d in old_facts["config"]["domains"] and _is_same_exam(d, old_facts, new_facts)
    ]
    experts = [domain for domain in exams if old_facts["teachers"][domain] == new_facts["teachers"][domain]]
    evaluation_files = {}
    for name, source, model, domains in (("before", "after", BEFORE, exams), ("expert", "expert", EXPERT, experts)):
        evaluation = _restrict_evaluation(Evaluation.load(paths.evaluation_file(source)), model, domains)
        if evaluation.scores:
            if model == BEFORE:
                evaluation = replace(evaluation, step=0, tokens=0)  # the next round starts from this model
            evaluation_files[paths.evaluation_file(name).name] = evaluation.as_text()
    scores = read_lm_eval(paths.lm_eval)
    if scores:
        weights = lm_eval_weights(paths.lm_eval)
        weights = {BEFORE: weights[MERGED]} if MERGED in weights else {}
        evaluation_files[paths.lm_eval.name] = lm_eval_text({BEFORE: scores[MERGED]}, weights)
    return evaluation_files


def _is_same_exam(domain: str, old_facts: RoundFacts, new_facts: RoundFacts) -> bool:
    """Return True if questions, verifier, limits, and the environment or program that the student acts in are the same.

    Rounds cannot differ in the pipeline's own `evaluate` and `guard`, so these are not compared.
    """

    def exam_parts(facts: RoundFacts) -> tuple[Any, ...]:
        settings, prompt_hashes = facts["config"]["domains"][domain], list(facts["prompts"][domain].values())
        # With `holdout` the exam asks a part of the training prompts.
        asked_rows = settings["prompts"] if settings["eval"] and settings["eval"].get("holdout") else None
        acts_in = [settings.get(key) for key in ("environment", "agent", "guard")]
        return facts["config"]["rollout"], settings["eval"], asked_rows, acts_in, prompt_hashes

    return exam_parts(old_facts) == exam_parts(new_facts)


def _restrict_evaluation(evaluation: Evaluation, model: str, domains: Sequence[str]) -> Evaluation:
    """Return the results on these domains alone, as those of `model`, without step and tokens."""
    return Evaluation(
        model=model,
        scores={domain: score for domain, score in evaluation.scores.items() if domain in domains},
        answers=tuple(answer for answer in evaluation.answers if answer.domain in domains),
        weights={domain: digest for domain, digest in evaluation.weights.items() if domain in domains},
        cached={domain: source for domain, source in evaluation.cached.items() if domain in domains},
    )


def _finish_rounds(run: Rounds, plan: Sequence[RoundFacts]) -> dict[str, Any]:
    """Make model, evaluations and report of the whole. The report comes last: it is the sign that all is complete. Returns it."""
    configs, paths = run.configs, RunPaths(run.root)
    rounds = [paths.round_dir(index + 1) for index in range(len(configs))]
    _link_model(rounds[-1].model, paths.model)
    paths.evaluation.mkdir(exist_ok=True)
    measured = {
        name: [Evaluation.load(merge_round.evaluation_file(name)) for merge_round in rounds]
        for name in MERGE_EVALUATIONS
    }
    combine_evaluations(measured["expert"], EXPERT).save(paths.evaluation_file("expert"))
    # The first evaluation of each list is of the very first student, or of the last model. The later ones are of other models, and
    # only tell which further domains there are.
    begun = rounds[0].student if rounds[0].student.is_dir() else configs[0].student.model
    for name, evaluations, in_rounds, model in (
        ("before", measured["before"], configs, begun),
        ("after", measured["after"][::-1], configs[::-1], paths.model),
    ):
        if not paths.evaluation_file(name).exists():  # it exists if a finished run is resumed
            evaluation = _complete_evaluations(evaluations, in_rounds, model, run.tell)
            steps, tokens = count_steps_and_tokens(read_run(run.root).records) if name == "after" else (0, 0)
            replace(evaluation, step=steps, tokens=tokens).save(paths.evaluation_file(name))
    files = read_run(run.root)
    # Read from the files: `read_run` gives no final exam, because a run without a report counts as unfinished.
    exams = {name: Evaluation.load(paths.evaluation_file(name)).accuracy for name in MERGE_EVALUATIONS}
    wall_s = sum(merge_round.stored["wall_s"] for merge_round in files.rounds if merge_round.stored)
    asked = [merge_round.stored.get("judges", {}) for merge_round in files.rounds if merge_round.stored]
    judges = sum_by_key({name: TextSpending(**spent) for name, spent in part.items()} for part in asked)
    report = build_report(
        configs[0].name, exams, files.records, wall_s=wall_s, versions=plan[-1]["versions"], judges=judges
    )
    atomic_write_text(paths.report, json.dumps(report, indent=2))
    return write_report(run.root)


def _complete_evaluations(
    measured: Sequence[Evaluation], configs: Sequence[PipelineConfig], model_dir: Path, tell: Tell
) -> Evaluation:
    """Complete the first of `measured`: its model also takes the exams of domains that only other rounds have."""
    evaluation = measured[0]
    for config, round_evaluation in zip(configs, measured, strict=True):
        missing = [domain for domain in round_evaluation.scores if domain not in evaluation.scores]
        if missing:
            tell(f"{evaluation.model}: on the domains of another round, {', '.join(missing)}")
            (addition,) = evaluate_models(config, [model_dir], missing, tell).values()
            evaluation = combine_evaluations([evaluation, addition], evaluation.model)
    return evaluation


def _link_model(source: Path, target: Path) -> None:
    """Give the model's files a second name in `target`, which is replaced as a whole."""
    temporary = target.with_name(f".tmp-{target.name}")
    link_files(source, temporary)
    replace_dir(temporary, target)
