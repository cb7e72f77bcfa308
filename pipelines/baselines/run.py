"""`opd baseline`: other ways of merging the same experts, measured on the same exams."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from filelock import FileLock, Timeout

from experts.adapter import whole_model
from opd.errors import ConfigError, RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.evaluation.evaluator import DomainExam, EngineEvaluator
from opd.evaluation.scores import DomainScore, Evaluation
from opd.files import replace_dir
from opd.metrics import MetricsFile
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines import merge as merging
from pipelines.baselines.engine import rollout_engine
from pipelines.baselines.imitation import Completions, experts_author, file_author, read_completions, train_off_policy
from pipelines.baselines.jobs import TRAINED_METHODS, Job
from pipelines.baselines.mergekit import Recipe, environment, merge_weights
from pipelines.baselines.weights import WEIGHT_METHODS, check_one_architecture, validation_exams
from pipelines.preflight import Inputs, check


def compute(jobs: Sequence[Job], tell: Callable[[str], None], keep_models: bool = False) -> list[BaselineResult]:
    """Every job's result: read where it exists, else computed. The jobs are of one run directory and one seed.

    Raises: OpdError before any compute; RunError if one fails (those before it are on disk); Interrupted after Ctrl-C in
    a merge.
    """
    todo = [job for job in jobs if not job.result.exists()]
    for job in (job for job in jobs if job not in todo):
        tell(f"{job.name}: found {job.result}, not computed again")
    if todo:
        inputs = check(todo[0].config)  # shares have no part in what is checked
        completions = _check_all(todo, inputs)
        with _locked(todo[0].root / "baselines"):
            for job, result in _compute(todo, inputs, completions, tell):
                result.save(job.result)
                tell(f"{job.name}: mean accuracy {result.accuracy:.3f} after {result.wall_s:.0f} s")
                if not keep_models:
                    for path in (job.model, job.shorter_run):
                        shutil.rmtree(path, ignore_errors=True)
    return [BaselineResult.load(job.result) for job in jobs]


def _check_all(jobs: Sequence[Job], inputs: Inputs) -> Completions:
    """Everything that can be wrong before compute; the completions, if a method needs them. Raises: OpdError."""
    config = jobs[0].config
    if not inputs.exams:
        raise ConfigError.at(
            "domains",
            found="no domain with an eval",
            wanted="at least one: baselines are compared by their accuracy",
            fix="set domains.NAME.eval",
        )
    methods = {job.method for job in jobs}
    for name in [name for name in WEIGHT_METHODS if name in methods]:
        check_one_architecture(name, inputs)
        if WEIGHT_METHODS[name].grid:
            validation_exams(config, inputs)
    for job in jobs:
        if job.own_run and not job.merge.report.exists():
            raise RunDirError.at(
                job.root,
                found="a merge that is not finished",
                wanted="a finished one: `opd` with all of its steps is the merge itself",
                fix=f"`opd merge --resume {job.root}`",
            )
    return read_completions(config, inputs) if "mixed_sft" in methods else {}


def _compute(
    jobs: Sequence[Job], inputs: Inputs, completions: Completions, tell: Callable[[str], None]
) -> Iterator[tuple[Job, BaselineResult]]:
    """Merges of weights first, which share one process of mergekit and one engine."""
    weights = [job for job in jobs if job.method in WEIGHT_METHODS]
    if weights:
        yield from _merge_weights(weights, inputs, tell)
    for job in (job for job in jobs if job.method not in WEIGHT_METHODS):
        tell(f"{job.name}: begins")
        began = time.monotonic()
        found = _merge_on_policy(job) if job.method == "opd" else _imitate(job, inputs, completions, _named(tell, job))
        yield job, _result(job, found, time.monotonic() - began)


def _result(job: Job, found: _Found, wall_s: float) -> BaselineResult:
    label = {**{n: m.label for n, m in WEIGHT_METHODS.items()}, **TRAINED_METHODS}[job.method]
    return BaselineResult(
        method=job.method,
        label=label if found.strength is None else f"{label} {found.strength:g}",
        strength=found.strength,
        token_share=job.share,
        tokens=found.tokens,
        seed=job.config.seed,
        scores=found.scores,
        validation=found.validation,
        wall_s=round(wall_s, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """As in `BaselineResult`."""

    scores: dict[str, DomainScore]
    strength: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    tokens: int | None = None


def _merge_weights(
    jobs: Sequence[Job], inputs: Inputs, tell: Callable[[str], None]
) -> Iterator[tuple[Job, BaselineResult]]:
    """The time of mergekit's process is shared out evenly among the methods."""
    home = environment(tell)
    merged = jobs[0].model.with_name(".tmp-merged")
    config = jobs[0].config
    recipes: dict[str, Recipe] = {}
    began = time.monotonic()
    with ExitStack() as adapters:
        experts = [
            adapters.enter_context(whole_model(e.teacher, merged.with_name(f".tmp-expert-{name}")))
            for name, e in inputs.experts.items()
        ]
        for job in jobs:
            method = WEIGHT_METHODS[job.method]
            recipes |= {_candidate(job, s): method.recipe(inputs.student, experts, s) for s in method.strengths()}
        tell(f"weights: {len(recipes)} merges for {', '.join(job.name for job in jobs)}")
        merge_weights(recipes, merged, seed=config.seed, timeout_s=config.cluster.phase_timeout_s, home=home)
    with rollout_engine(config, inputs) as engine:
        shared_s = (time.monotonic() - began) / len(jobs)
        for job in jobs:
            began = time.monotonic()
            found = _best(job, inputs, merged, engine, _named(tell, job))
            replace_dir(merged / _candidate(job, found.strength), job.model)
            yield job, _result(job, found, shared_s + time.monotonic() - began)
    shutil.rmtree(merged)


def _candidate(job: Job, strength: float | None) -> str:
    """Name of a merged model; never one of mergekit's own words, such as a method's name."""
    return f"merged-{job.name}" if strength is None else f"merged-{job.name}-{strength:g}"


def _best(job: Job, inputs: Inputs, merged: Path, engine: VLLMRolloutEngine, tell: Callable[[str], None]) -> _Found:
    """The exam of the strength that is best on the validation prompts, of several the weakest."""
    method = WEIGHT_METHODS[job.method]
    validation: dict[float, float] = {}
    if method.grid:
        exams = validation_exams(job.config, inputs)
        for strength in method.grid:
            engine.load(merged / _candidate(job, strength))
            validation[strength] = fmean(_examine(engine, exams, job, inputs, tell).accuracy.values())
            tell(f"strength {strength:g}: {validation[strength]:.3f} on validation prompts")
    chosen = max(validation, key=lambda strength: validation[strength]) if validation else None
    engine.load(merged / _candidate(job, chosen))
    return _Found(
        scores=_examine(engine, inputs.exams, job, inputs, tell).scores,
        strength=chosen,
        validation={f"{strength:g}": value for strength, value in validation.items()},
    )


def _imitate(job: Job, inputs: Inputs, completions: Completions, tell: Callable[[str], None]) -> _Found:
    author = (
        file_author(job.config, completions)
        if job.method == "mixed_sft"
        else experts_author(job.config, inputs, job.model.with_name(".tmp-expert"))
    )
    tokens = train_off_policy(job.config, inputs, author, job.budget, job.model, tell)
    with rollout_engine(job.config, inputs) as engine:
        engine.load(job.model)
        scores = _examine(engine, inputs.exams, job, inputs, tell).scores
    return _Found(scores=scores, tokens=tokens)


def _merge_on_policy(job: Job) -> _Found:
    """The run directory's own merge, or another one with fewer steps; one that was interrupted goes on."""
    paths = job.merge
    if not paths.report.exists():
        if paths.root.exists():
            merging.resume(paths.root)
        else:
            merging.start(job.config, paths.root)
    tokens = sum(record["response_tokens"] for record in MetricsFile(paths.metrics).read())
    return _Found(scores=Evaluation.load(paths.evaluation / "after.json").scores, tokens=tokens)


def _examine(
    engine: VLLMRolloutEngine,
    exams: Mapping[str, DomainExam],
    job: Job,
    inputs: Inputs,
    tell: Callable[[str], None],
) -> Evaluation:
    """The model that the engine holds."""
    return EngineEvaluator(engine, exams, job.config.evaluate, inputs.tokenizer, tell).evaluate(model=job.name)


def _named(tell: Callable[[str], None], job: Job) -> Callable[[str], None]:
    return lambda line: tell(f"{job.name}: {line}")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One `opd baseline` per run directory; the lock goes with the process, however it ends."""
    (directory / "models").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunDirError.at(
            directory,
            found="another `opd baseline` at work in it",
            wanted="one at a time",
            fix="wait for it or stop it",
        ) from None
