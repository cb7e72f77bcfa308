"""Merges one after the other, each from the student that the one before left; a pipeline of one round is one merge.

    RUN_DIR/round-1/, round-2/ ...   a run directory of `pipelines.merge` each     RUN_DIR/model/   that of the last round
    RUN_DIR/rounds.json              what each round works on, by content, as it was before the first began
    RUN_DIR/evaluation/              the very first student, the last model and the experts, on the domains of all rounds

A round is finished, under way, or not there: every step from one to the next can be taken again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd import checkpoints
from opd.config import PipelineConfig, load_pipeline, rounds_of
from opd.config.pipeline import RoundConfig
from opd.errors import RunDirError
from opd.evaluation.evaluator import BEFORE, EXPERT, MERGED
from opd.evaluation.scores import Evaluation, combined
from opd.files import atomic_write_text, replace_dir, sweep
from opd.metrics import steps_and_tokens
from opd.report import build_report, read_run, write_report
from opd.rounds import FORMAT, PLAN, directory
from pipelines import merge
from pipelines.build import RunPaths
from pipelines.evaluate import evaluate_models, lm_eval_text, lm_eval_weights, read_lm_eval
from pipelines.gpu_memory import refuse_crowded_gpus
from pipelines.interrupts import interrupts
from pipelines.manifest import manifest_of, resolved, write_inputs
from pipelines.memory import refuse_too_large
from pipelines.preflight import Inputs, check, check_rounds
from pipelines.resume import accept_changes, refuse_changed_inputs, unrecorded
from pipelines.template_date import as_recorded, on_day

Tell = Callable[[str], None]
Facts = dict[str, Any]
"""The manifest of a round, and its `teachers`: the digest of each domain's leading teacher."""


def start(config: PipelineConfig, root: Path, tell: Tell) -> dict[str, Any]:
    """Run all rounds in `root`, which must not exist. Returns the report.

    Raises: as `pipelines.merge.start`; what is wrong with a later round is told before the first begins.
    """
    if config.rounds == 1:
        return merge.start(config, root)
    merge.refuse_existing(root)
    configs = rounds_of(config)
    inputs = _check_all(configs)
    configs = [on_day(one, inputs[0].template_date) for one in configs]
    plan = [_facts(one, found) for one, found in zip(configs, inputs, strict=True)]
    temporary = merge.new_directory(root)
    _write(RunPaths(temporary), config, inputs[0], plan)
    replace_dir(temporary, root)
    with merge.locked(root):
        return _go_on(configs, root, plan, checkpoints.LATEST, tell)


def resume(
    root: Path,
    config: PipelineConfig | None,
    overrides: list[str] | None,
    wanted: str,
    tell: Tell,
) -> dict[str, Any]:
    """Go on in the round that was interrupted, or with the next one. As `pipelines.merge.resume`."""
    if not (root / PLAN).exists():
        return merge.resume(root, config, overrides, wanted)
    recorded = _read_plan(root)
    config = config or load_pipeline(RunPaths(root).pipeline, overrides)
    config = as_recorded(config, recorded[0]["config"], root / PLAN)
    configs = rounds_of(config)
    if len(configs) != len(recorded):
        raise RunDirError.at(
            root / PLAN,
            found=f"a pipeline of {len(configs)} rounds",
            wanted=f"{len(recorded)}, as when the run began",
            fix="put `rounds` back; for further rounds start a new merge from this run's model",
        )
    with merge.locked(root):
        sweep(root)
        first = _num_finished(configs, root)
        inputs = _check_all(configs[first:])
        found = [_facts(one, its) for one, its in zip(configs[first:], inputs, strict=True)]
        changes = []
        for before, now in zip(recorded[first:], found, strict=True):
            refuse_changed_inputs(before, now, root / PLAN)
            changes += unrecorded(before) + accept_changes(before["config"], now["config"], root / PLAN)
        if changes:
            _write(RunPaths(root), config, inputs[0], [*recorded[:first], *found])
        return _go_on(configs, root, [*recorded[:first], *found], wanted, tell)


def _check_all(configs: Sequence[PipelineConfig]) -> list[Inputs]:
    """What the rounds work on, which has to fit into this machine. Raises: OpdError."""
    inputs = check_rounds(configs)
    for config, its in zip(configs, inputs, strict=True):
        refuse_too_large(config, its)
        refuse_crowded_gpus(config, its)
    return inputs


def _facts(config: PipelineConfig, inputs: Inputs) -> Facts:
    teachers = {domain: teacher.digest for domain, teacher in inputs.teachers.items()}
    return {**manifest_of(config, inputs), "teachers": teachers}


def _write(paths: RunPaths, config: PipelineConfig, inputs: Inputs, plan: Sequence[Facts]) -> None:
    """The files that say what the rounds are; `inputs` are the first round's."""
    experts = {name: facts for one in plan for name, facts in one["experts"].items()}
    sizes = {name: size for one in plan for name, size in one["models"]["experts"].items()}
    write_inputs(
        paths,
        manifest_of(config, inputs)
        | {
            "config": resolved(config, inputs) | {"rounds": _rounds_key(config, plan)},
            "experts": experts,
            "models": {**plan[0]["models"], "experts": sizes},
        },
    )
    atomic_write_text(paths.root / PLAN, json.dumps({"format": FORMAT, "rounds": plan}, indent=1))


def _rounds_key(config: PipelineConfig, plan: Sequence[Facts]) -> Any:
    """`rounds` with absolute paths, as the checked pipelines of the rounds have them."""
    if isinstance(config.rounds, int):
        return config.rounds
    first = plan[0]["config"]
    return [{}, *(_difference(first, one["config"]) for one in plan[1:])]


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What `RoundConfig` has to say to make `other` of `first`."""
    found = {key: other[key] for key in RoundConfig.model_fields if other[key] != first[key]}
    for key in ("rollout", "teachers", "objective", "trainer"):
        if key in found and other[key].get("kind") == first[key].get("kind"):
            found[key] = {k: value for k, value in other[key].items() if value != first[key][k]}
    return found


def _read_plan(root: Path) -> list[Facts]:
    """Raises: RunDirError if it is damaged or of another release."""
    file = root / PLAN
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
    plan: list[Facts] = rounds
    return plan


def _num_finished(configs: Sequence[PipelineConfig], root: Path) -> int:
    """Rounds at the beginning that are finished."""
    for index, config in enumerate(configs):
        paths = RunPaths(directory(root, index + 1))
        measured = not config.evaluate.lm_eval.tasks or MERGED in read_lm_eval(paths.lm_eval)
        if not paths.report.exists() or not measured:
            return index
    return len(configs)


def _go_on(
    configs: Sequence[PipelineConfig], root: Path, plan: Sequence[Facts], wanted: str, tell: Tell
) -> dict[str, Any]:
    """The rounds that are left, and what is made of all of them."""
    finished = _num_finished(configs, root)
    if wanted not in (checkpoints.LATEST, checkpoints.LATEST_VALID) and (
        finished == len(configs) or not directory(root, finished + 1).exists()
    ):
        raise RunDirError.at(
            f"--resume-from {wanted}",
            found=f"{finished} of {len(configs)} rounds finished, and none under way",
            wanted="a round that was interrupted, to go back in",
            fix="leave the option out",
        )
    with interrupts() as signals:
        for index in range(finished, len(configs)):
            config, paths = configs[index], RunPaths(directory(root, index + 1))
            if index:
                student = RunPaths(directory(root, index)).model
                config = config.model_copy(update={"student": config.student.model_copy(update={"model": student})})
            if paths.root.exists():
                tell(f"round {index + 1} of {len(configs)}: going on")
                merge.resume(paths.root, config, None, wanted)
            elif index:
                tell(f"round {index + 1} of {len(configs)}: from the model of round {index}")
                _begin(config, root, index, plan, tell)
            else:
                tell(f"round 1 of {len(configs)}")
                merge.start(config, paths.root)
            if signals.asked() and index + 1 < len(configs):
                raise merge.Interrupted(config.trainer.steps, root, signals.number)
        return _finish(configs, root, plan, tell)


def _begin(config: PipelineConfig, root: Path, index: int, plan: Sequence[Facts], tell: Tell) -> None:
    """Start round `index`, from 0 and not the first, with what the one before measured. Raises: as `merge.start`."""
    before = RunPaths(directory(root, index))
    facts = _facts(config, check(config))
    refuse_changed_inputs(plan[index] | {"student": facts["student"]}, facts, root / PLAN)
    if before.checkpoints.exists() or before.targets.exists():
        tell(f"round {index} is finished: its checkpoints are deleted, its model stays")
        shutil.rmtree(before.checkpoints, ignore_errors=True)
        shutil.rmtree(before.targets, ignore_errors=True)
    known = known_evaluations(before, plan[index - 1], facts)
    merge.start(config, directory(root, index + 1), known)


def known_evaluations(paths: RunPaths, before: Facts, now: Facts) -> dict[str, str]:
    """What the next round need not measure: the model that the finished round left, and experts on the same exam.

    File of `evaluation/` -> its text. `before` are the facts of the finished round in `paths`, `now` those of the next.
    """
    exams = [d for d in now["config"]["domains"] if d in before["config"]["domains"] and _same_exam(d, before, now)]
    experts = [domain for domain in exams if before["teachers"][domain] == now["teachers"][domain]]
    known = {}
    for name, source, model, domains in (("before", "after", BEFORE, exams), ("expert", "expert", EXPERT, experts)):
        found = _only(Evaluation.load(paths.evaluation / f"{source}.json"), model, domains)
        if found.scores:
            if model == BEFORE:
                found = replace(found, step=0, tokens=0)  # of the next round
            known[f"{name}.json"] = found.as_text()
    public = read_lm_eval(paths.lm_eval)
    if public:
        weights = lm_eval_weights(paths.lm_eval)
        weights = {BEFORE: weights[MERGED]} if MERGED in weights else {}
        known[paths.lm_eval.name] = lm_eval_text({BEFORE: public[MERGED]}, weights)
    return known


def _same_exam(domain: str, before: Facts, now: Facts) -> bool:
    """Same questions, same judge, same limits; what the two rounds cannot differ in, `evaluate`, is not looked at."""

    def exam(facts: Facts) -> tuple[Any, ...]:
        config = facts["config"]
        return config["rollout"], config["domains"][domain]["eval"], list(facts["prompts"][domain].values())

    return exam(before) == exam(now)


def _only(found: Evaluation, model: str, domains: Sequence[str]) -> Evaluation:
    return Evaluation(
        model=model,
        scores={domain: score for domain, score in found.scores.items() if domain in domains},
        answers=tuple(answer for answer in found.answers if answer.domain in domains),
        weights={domain: digest for domain, digest in found.weights.items() if domain in domains},
    )


def _finish(configs: Sequence[PipelineConfig], root: Path, plan: Sequence[Facts], tell: Tell) -> dict[str, Any]:
    """Model, evaluations and report of the whole. The report is written last: it says that all is there."""
    paths = RunPaths(root)
    _take_model(RunPaths(directory(root, len(configs))).model, paths.model)
    paths.evaluation.mkdir(exist_ok=True)
    before, expert, after = (
        [
            Evaluation.load(RunPaths(directory(root, i + 1)).evaluation / f"{name}.json") for i in range(len(configs))
        ]
        for name in ("before", "expert", "after")
    )  # fmt: skip
    combined(expert, EXPERT).save(paths.evaluation / "expert.json")
    for name, measured, in_rounds, model in (
        ("before", before, configs, configs[0].student.model),
        ("after", after[::-1], configs[::-1], paths.model),
    ):
        if not (paths.evaluation / f"{name}.json").exists():  # else a finished run is resumed
            found = _elsewhere(measured, in_rounds, model, tell)
            steps, tokens = steps_and_tokens(read_run(root).records) if name == "after" else (0, 0)
            replace(found, step=steps, tokens=tokens).save(paths.evaluation / f"{name}.json")
    run = read_run(root)
    # Not the run's own: without a report it counts as unfinished, and so has no exam of its end.
    of_all = {
        name: Evaluation.load(paths.evaluation / f"{name}.json").accuracy for name in ("before", "expert", "after")
    }
    report = build_report(
        name=configs[0].name,
        **of_all,
        records=run.records,
        wall_s=sum(one.stored["wall_s"] for one in run.rounds if one.stored),
        versions=plan[-1]["versions"],
    )
    atomic_write_text(paths.report, json.dumps(report, indent=2))
    return write_report(root)


def _elsewhere(
    measured: Sequence[Evaluation], configs: Sequence[PipelineConfig], model_dir: Path, tell: Tell
) -> Evaluation:
    """The first of `measured`, and its model on the domains that only further ones have, by the exams of their rounds."""
    found = measured[0]
    for config, other in zip(configs, measured, strict=True):
        missing = [domain for domain in other.scores if domain not in found.scores]
        if missing:
            tell(f"{found.model}: on the domains of another round, {', '.join(missing)}")
            (more,) = evaluate_models(config, [model_dir], missing, tell).values()
            found = combined([found, more], found.model)
    return found


def _take_model(source: Path, target: Path) -> None:
    """The files once more under another name, without a second copy of their bytes where the file system can do that."""
    temporary = target.with_name(".tmp-model")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=_link)
    replace_dir(temporary, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; what else is wrong the copy runs into too
        shutil.copy2(source, target)
