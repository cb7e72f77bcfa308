"""`opd baseline`: other ways of merging the same experts, measured on the same exams."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout

from experts.adapter import open_full_model
from opd.config import PipelineConfig
from opd.errors import ConfigError, RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.evaluation.evaluator import DomainExam, EngineEvaluator
from opd.files import replace_dir
from opd.records.scores import DomainScore, Evaluation
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.run.paths import RunPaths
from opd.text import quote_for_shell
from pipelines.baselines.episodes import cut_notice
from pipelines.baselines.imitation import (
    Completions,
    experts_author,
    file_author,
    read_completions,
    rollout_engine,
    train_off_policy,
)
from pipelines.baselines.jobs import TRAINED_METHODS, BaselineJob
from pipelines.baselines.mergekit import merge_weights, mergekit_environment
from pipelines.baselines.validity import bind_to_inputs, delete_other_merge, explain_outdated, refuse_other_inputs
from pipelines.baselines.weights import WEIGHT_METHODS, check_one_architecture, validation_exams
from pipelines.inputs.indexers import refuse_shared_indexers
from pipelines.inputs.own_tokens import find_own_tokens, find_text_experts
from pipelines.inputs.read import Inputs, read_inputs, refuse_without_experts
from pipelines.merging import run as merging
from pipelines.merging.results import read_progress

MERGED_BYTES = 2 << 30
"""Most bytes of merged models on disk at a time, besides the best model of each method. One model is always allowed."""


WITHOUT_EXPERTS = ("mixed_sft", "opd")
"""Methods in which no expert's weights are merged and none writes."""


def compute_results(
    jobs: Sequence[BaselineJob], tell: Callable[[str], None], keep_models: bool = False
) -> list[BaselineResult]:
    """Return every job's result. A result of the same inputs and the same merge is read from disk, any other is computed.

    All jobs have the same run directory and seed.

    Raises: OpdError before any compute; RunError if one fails (those before it are on disk); Interrupted after Ctrl-C in a
    merge.
    """
    if not jobs:  # a comparison's later seeds, where no method depends on the seed
        return []
    refuse_without_experts(jobs[0].config, "`opd baseline`")
    inputs = read_inputs(jobs[0].config)  # the share does not change what is checked
    refuse_other_inputs(jobs[0].root, jobs[0], inputs)
    todo = [job for job in jobs if not _has_valid_result(job, inputs, tell)]
    if todo:
        completions = check_methods(todo[0].config, inputs, [job.method for job in todo])
        _refuse_unfinished(todo)
        with _lock_run_directory(RunPaths(todo[0].root)):
            for job, result in _compute_jobs(todo, inputs, completions, tell):
                bind_to_inputs(job, result, inputs).save(job.result)
                tell(f"{job.name}: mean accuracy {result.accuracy:.3f} after {result.wall_s:.0f} s")
                if not keep_models:
                    for path in (job.model, job.shorter_run.root):
                        shutil.rmtree(path, ignore_errors=True)
    return [BaselineResult.load(job.result) for job in jobs]


def _has_valid_result(job: BaselineJob, inputs: Inputs, tell: Callable[[str], None]) -> bool:
    """Return True if there is a valid result of this job already."""
    if not job.result.exists():
        return False
    reason = explain_outdated(job, BaselineResult.load(job.result), inputs)
    tell(f"{job.name}: found {job.result}, " + (f"{reason}: computed again" if reason else "not computed again"))
    return reason is None


def check_methods(config: PipelineConfig, inputs: Inputs, methods: Sequence[str]) -> Completions:
    """Refuse inputs that these methods cannot use; returns the completions if a method needs them.

    Raises: OpdError.
    """
    refuse_shared_indexers(config, "a baseline")
    if not inputs.exams:
        raise ConfigError.at(
            "domains",
            found="no domain with an eval",
            wanted="at least one: baselines are compared by their accuracy",
            fix="set domains.NAME.eval",
        )
    for name in find_text_experts(inputs.scoring):
        raise ConfigError.at(
            f"experts.{name}",
            found="an expert without a model here, which only writes text",
            wanted="experts with models: methods merge their weights, or have them write in the student's tokens",
            fix="compare a pipeline without this expert",
        )
    for name in methods:
        for expert in find_own_tokens(inputs.scoring) if name not in WITHOUT_EXPERTS else ():
            raise ConfigError.at(
                f"--method {name}",
                found=f"expert `{expert}`, which reads tokens of its own",
                wanted="experts with the student's tokenizer: the method merges their weights, or has them write in the student's tokens",
                fix=f"give --method {','.join(WITHOUT_EXPERTS)}, or compare a pipeline without this expert",
            )
        if name in WEIGHT_METHODS:
            check_one_architecture(name, inputs)
            if WEIGHT_METHODS[name].grid:
                validation_exams(config, inputs)
    return read_completions(config, inputs) if "mixed_sft" in methods else {}


def _refuse_unfinished(jobs: Sequence[BaselineJob]) -> None:
    for job in jobs:
        if job.own_run and not job.merge.evaluation_file("after").exists():
            raise RunDirError.at(
                job.root,
                found="a merge that is not finished",
                wanted="a finished one: `opd` with all of its steps is the merge itself",
                fix=f"`opd merge --resume {quote_for_shell(job.root)}`",
            )


def _compute_jobs(
    jobs: Sequence[BaselineJob], inputs: Inputs, completions: Completions, tell: Callable[[str], None]
) -> Iterator[tuple[BaselineJob, BaselineResult]]:
    """Compute merges of weights first, because they share one process of mergekit and one engine."""
    weights = [job for job in jobs if job.method in WEIGHT_METHODS]
    if weights:
        yield from _merge_weights(weights, inputs, tell)
    for job in (job for job in jobs if job.method not in WEIGHT_METHODS):
        tell(f"{job.name}: begins")
        began = time.monotonic()
        result = (
            _merge_on_policy(job, inputs)
            if job.method == "opd"
            else _run_imitation(job, inputs, completions, _prefix_lines(tell, job))
        )
        yield job, replace(result, wall_s=round(time.monotonic() - began, 1))


def make_result(job: BaselineJob, scores: dict[str, DomainScore], **measured: Any) -> BaselineResult:
    """Return the result of a job; `measured` are further fields of it."""
    label = {**{n: m.label for n, m in WEIGHT_METHODS.items()}, **TRAINED_METHODS}[job.method]
    if measured.get("strength") is not None:
        label += f" {measured['strength']:g}"
    facts: dict[str, Any] = {"method": job.method, "label": label, "token_share": job.share, "seed": job.config.seed}
    return BaselineResult(**facts, scores=scores, **{"wall_s": 0.0, **measured})


def _merge_weights(
    jobs: Sequence[BaselineJob], inputs: Inputs, tell: Callable[[str], None]
) -> Iterator[tuple[BaselineJob, BaselineResult]]:
    """Merge and evaluate candidates in the order of the jobs, a few on disk at a time; each job keeps its best so far."""
    home, config = mergekit_environment(tell), jobs[0].config
    merged = jobs[0].model.with_name(".tmp-merged")
    candidates = [(job, strength) for job in jobs for strength in WEIGHT_METHODS[job.method].list_strengths()]
    at_a_time = max(1, MERGED_BYTES // (4 * inputs.student.parameters))
    trials = {job.name: _Trials(job, inputs, _prefix_lines(tell, job)) for job in jobs}
    with ExitStack() as adapters, rollout_engine(config, inputs) as engine:
        experts = [
            adapters.enter_context(open_full_model(e.teacher, merged.with_name(f".tmp-expert-{name}")))
            for name, e in inputs.experts.items()
            if e.adapter is not None or e.info.path != inputs.student.path  # the student itself adds nothing
        ]
        for start in range(0, len(candidates), at_a_time):
            batch = candidates[start : start + at_a_time]
            tell(f"weights: merges {start + 1} to {start + len(batch)} of {len(candidates)}")
            recipes = {
                _candidate_name(job, strength): WEIGHT_METHODS[job.method].mergekit_recipe(
                    inputs.student, experts, strength
                )
                for job, strength in batch
            }
            began = time.monotonic()
            merge_weights(recipes, merged, seed=config.seed, timeout_s=config.cluster.phase_timeout_s, home=home)
            each_s = (time.monotonic() - began) / len(batch)
            for job, strength in batch:
                trials[job.name].add(engine, merged / _candidate_name(job, strength), strength, each_s)
                # The last strength of this method: the best of its models is known.
                if strength == WEIGHT_METHODS[job.method].list_strengths()[-1]:
                    yield job, trials[job.name].best_result(engine)
    shutil.rmtree(merged)


def _candidate_name(job: BaselineJob, strength: float | None) -> str:
    """Name of a merged model. It must not be a word of mergekit's, such as a method's name."""
    return f"merged-{job.name}" if strength is None else f"merged-{job.name}-{strength:g}"


class _Trials:
    """Trials of one method's strengths: the model that is best on the validation prompts is kept, of equals the first."""

    def __init__(self, job: BaselineJob, inputs: Inputs, tell: Callable[[str], None]) -> None:
        self._job = job
        self._inputs = inputs
        self._tell = tell
        self._wall_s = 0.0
        self._best: float | None = None
        self._validation: dict[float, float] = {}
        self._exams = validation_exams(job.config, inputs) if WEIGHT_METHODS[job.method].grid else {}

    def add(self, engine: VLLMRolloutEngine, model: Path, strength: float | None, merging_s: float) -> None:
        """Evaluate a merged model, and keep it as the job's model if it is the best. `merging_s`: seconds that the merge took."""
        began = time.monotonic()
        if strength is not None:
            engine.load(model)
            evaluation = _evaluate_held_model(engine, self._exams, self._job, self._inputs, self._tell)
            self._validation[strength] = fmean(evaluation.accuracy.values())
            self._tell(f"strength {strength:g}: {self._validation[strength]:.3f} on validation prompts")
        if strength is None or self._best is None or self._validation[strength] > self._validation[self._best]:
            self._best = strength
            replace_dir(model, self._job.model)
        self._wall_s += merging_s + time.monotonic() - began

    def best_result(self, engine: VLLMRolloutEngine) -> BaselineResult:
        """Return the result of the best model in the exam."""
        began = time.monotonic()
        engine.load(self._job.model)
        return make_result(
            self._job,
            _evaluate_held_model(engine, self._inputs.exams, self._job, self._inputs, self._tell).scores,
            strength=self._best,
            validation={f"{strength:g}": value for strength, value in self._validation.items()},
            wall_s=round(self._wall_s + time.monotonic() - began, 1),
        )


def _run_imitation(
    job: BaselineJob, inputs: Inputs, completions: Completions, tell: Callable[[str], None]
) -> BaselineResult:
    author = (
        file_author(job.config, completions)
        if job.method == "mixed_sft"
        else experts_author(job.config, inputs, job.model.with_name(".tmp-expert"))
    )
    if job.method == "mixed_sft" and (notice := cut_notice(completions.values(), job.config.rollout.max_model_len)):
        tell(notice)
    tokens = train_off_policy(job.config, inputs, author, job.budget, job.model, tell)
    with rollout_engine(job.config, inputs) as engine:
        engine.load(job.model)
        scores = _evaluate_held_model(engine, inputs.exams, job, inputs, tell).scores
    return make_result(job, scores, tokens=tokens)


def _merge_on_policy(job: BaselineJob, inputs: Inputs) -> BaselineResult:
    """Take the run directory's own merge, or run one with fewer steps; an interrupted one goes on."""
    paths = job.merge
    delete_other_merge(job, inputs)
    if not paths.report.exists():
        merging.start_or_resume(job.config, paths.root)
    after = Evaluation.load(paths.evaluation_file("after"))
    _, tokens = read_progress(paths.metrics)
    return make_result(job, after.scores, tokens=tokens, weights=next(iter(after.weights.values()), ""))


def _evaluate_held_model(
    engine: VLLMRolloutEngine,
    exams: Mapping[str, DomainExam],
    job: BaselineJob,
    inputs: Inputs,
    tell: Callable[[str], None],
) -> Evaluation:
    """Evaluate the model that the engine holds."""
    return EngineEvaluator(engine, exams, job.config.evaluate, inputs.tokenizer, tell).evaluate(model=job.name)


def _prefix_lines(tell: Callable[[str], None], job: BaselineJob) -> Callable[[str], None]:
    return lambda line: tell(f"{job.name}: {line}")


@contextmanager
def _lock_run_directory(paths: RunPaths) -> Iterator[None]:
    """Allow one `opd baseline` per run directory. The system frees the lock when the process ends, however it ends."""
    paths.baseline_models.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(paths.baselines_lock, timeout=0):
            yield
    except Timeout:
        raise RunDirError.at(
            paths.baselines,
            found="another `opd baseline` at work in it",
            wanted="one at a time",
            fix="wait for it or stop it",
        ) from None
