"""One merge from a checked pipeline to a model and a report; a new run or the rest of an interrupted one."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from experts.adapter import whole_model
from experts.bound_files import TOKENIZER_FILES
from opd import checkpoints, loop
from opd.cluster import WorkerDied, ray_session
from opd.config import PipelineConfig, load_pipeline, overlaps
from opd.errors import RunDirError, StorageError
from opd.evaluation.evaluator import BEFORE, MERGED, measure_before, measure_experts
from opd.evaluation.scores import Evaluation, combined
from opd.files import atomic_write_text, replace_dir, storing, sweep
from opd.metrics import MetricsFile
from opd.progress import Display, display
from opd.report import build_report, write_report
from opd.rounds import whole
from opd.sinks import open_sinks
from pipelines.build import RunPaths, build, num_workers
from pipelines.card import model_card
from pipelines.evaluate import lm_eval_merge
from pipelines.gpu_memory import refuse_crowded_gpus
from pipelines.interrupts import Interrupts, interrupts
from pipelines.layouts import record_layouts
from pipelines.manifest import manifest_of, read_manifest, renewed, versions, write_inputs
from pipelines.memory import refuse_too_large
from pipelines.preflight import Inputs, as_teacher, check
from pipelines.results import of_merged, take_back, trained
from pipelines.resume import (
    accept_changes,
    identity,
    refuse_changed_inputs,
    refuse_foreign,
    unrecorded,
    version_warnings,
)
from pipelines.template_date import as_recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What stays the same however often the workers are started again."""

    config: PipelineConfig
    inputs: Inputs
    paths: RunPaths
    identity: Mapping[str, Any]
    """As `pipelines.resume.identity` found it when the run began."""


class Interrupted(Exception):
    """The user pressed Ctrl-C, or somebody sent SIGTERM; the run left a checkpoint at `step`."""

    def __init__(self, step: int, root: Path, number: int) -> None:
        super().__init__(
            f"stopped after step {step}, checkpoint written; go on with `opd merge --resume {whole(root)}`"
        )
        self.number = number
        """Of the signal."""


def start(config: PipelineConfig, root: Path, known: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a new merge of one round in `root`, which must not exist. Returns the report.

    `known` has files of `evaluation/`, by name, with what was measured before: it is not measured again.
    Raises: OpdError before anything is written; RunError if the run cannot go on; Interrupted after Ctrl-C.
    """
    assert config.rounds == 1, "see pipelines.rounds"
    refuse_existing(root)
    inputs = check(config)
    refuse_too_large(config, inputs)
    notices = refuse_crowded_gpus(config, inputs)
    temporary = new_directory(root)
    manifest = manifest_of(config, inputs)
    manifest["identity"] = identity(manifest)
    write_inputs(RunPaths(temporary), manifest)
    if known:
        RunPaths(temporary).evaluation.mkdir()
        for name, text in known.items():
            atomic_write_text(RunPaths(temporary).evaluation / name, text)
    replace_dir(temporary, root)  # a run directory can be resumed from the moment it exists
    with locked(root), _says_what_is_intact(RunPaths(root)):
        run = Run(config=config, inputs=inputs, paths=RunPaths(root), identity=manifest["identity"])
        return _supervise(run, None, notices)


def refuse_existing(root: Path) -> None:
    """Raises: RunDirError."""
    if root.exists():
        raise RunDirError.at(
            root,
            found="a run directory that exists",
            wanted="a new one",
            fix=f"`opd merge --resume {root}` goes on with it; --run-dir names another",
        )


def new_directory(root: Path) -> Path:
    """An empty directory beside `root`, to be renamed to it. Raises: RunDirError if none can be made there."""
    temporary = root.with_name(f".tmp-{root.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise RunDirError.at(
            root,
            found=f"{error.filename}: {error.strerror}",
            wanted="a directory that can be made",
            fix="give another place with --run-dir, or correct the rights",
        ) from None
    return temporary


def resume(
    root: Path,
    config: PipelineConfig | None = None,
    overrides: list[str] | None = None,
    wanted: str = checkpoints.LATEST,
) -> dict[str, Any]:
    """Go on with an interrupted merge from a checkpoint, or from the start if it has none. As `start`.

    `config` in place of the run's own, and `overrides` on top of its own, may change what `pipelines.resume` lists;
    `wanted` is what `opd.checkpoints.choose` takes.
    """
    paths = RunPaths(root)
    if not paths.pipeline.exists():
        raise RunDirError.at(
            root,
            found="no pipeline.yaml",
            wanted="a run directory of `opd merge`",
            fix="check the path, or start a new run without --resume",
        )
    recorded = read_manifest(paths)
    config = as_recorded(config or load_pipeline(paths.pipeline, overrides), recorded["config"], paths.manifest)
    inputs = check(config)
    refuse_too_large(config, inputs)
    crowded = refuse_crowded_gpus(config, inputs)
    found = manifest_of(config, inputs)
    refuse_changed_inputs(recorded, found, paths.manifest)
    changes = accept_changes(recorded["config"], found["config"], paths.manifest)
    older = unrecorded(recorded)
    notices = version_warnings(recorded["versions"], found["versions"]) + older + changes + crowded
    with locked(root), _says_what_is_intact(paths):
        run = Run(config=config, inputs=inputs, paths=paths, identity=recorded["identity"])
        checkpoint = _go_on_from(run, wanted, notices)
        if changes or older:
            atomic_write_text(paths.manifest, json.dumps(renewed(recorded, found), indent=2))
            atomic_write_text(paths.pipeline, yaml.safe_dump(found["config"], sort_keys=False))
        return _supervise(run, checkpoint, notices)


def _go_on_from(run: Run, wanted: str, notices: list[str]) -> checkpoints.Checkpoint | None:
    """The checkpoint, verified and this run's own; later ones are set aside. Adds to `notices`.

    Raises: RunDirError, and then nothing but leftovers of a killed process has changed.
    """
    paths = run.paths
    for directory in (paths.root, paths.checkpoints, paths.targets):
        sweep(directory)
    checkpoint = checkpoints.choose(paths.checkpoints, wanted, notices.append)
    if checkpoint:
        refuse_foreign(checkpoint, run.identity)
        _refuse_fewer_steps(run.config, checkpoint.step)
        aside = checkpoints.supersede(paths.checkpoints, checkpoint.step)
        if aside:
            notices.append(f"set aside, since the run goes on from step {checkpoint.step}: {', '.join(aside)}")
    return checkpoint


def _supervise(run: Run, checkpoint: checkpoints.Checkpoint | None, notices: list[str]) -> dict[str, Any]:
    """The rest of the run; `notices` are said once there is a display.

    If a worker dies in a way that the step cannot mend, all are started again, and the run goes on from its last
    checkpoint, as a resume would; up to `cluster.max_restarts` times.
    """
    most = run.config.cluster.max_restarts
    with interrupts() as signals:
        for restart in itertools.count(1):
            try:
                return _session(run, checkpoint, notices, signals)
            except WorkerDied as error:
                if restart > most:
                    raise
                notices = [f"{error}", f"starting all workers again, {restart} of {most} times"]
                checkpoint = _go_on_from(run, checkpoints.LATEST, notices)
    raise AssertionError("the last attempt returns or raises")


def _session(
    run: Run, checkpoint: checkpoints.Checkpoint | None, notices: Sequence[str], signals: Interrupts
) -> dict[str, Any]:
    """The run from a checkpoint to its report, with workers of its own. Raises: WorkerDied."""
    began = time.monotonic()
    config, inputs, paths = run.config, run.inputs, run.paths
    done = checkpoint.step if checkpoint else 0
    metrics = MetricsFile(paths.metrics)
    metrics.rewind(done)
    take_back(paths, done, config.trainer.steps)
    earlier_s = sum(sum(record["phase_s"].values()) for record in metrics.read())
    with (
        display(config.trainer.steps, done) as shown,
        open_sinks(config.logging, paths.root, done) as sinks,
        ray_session(config.cluster, num_workers(config)),
    ):
        _introduce(run, notices, shown)
        parts = build(config, inputs, paths, shown, run.identity, sinks)
        record_layouts(parts, paths, shown.say)
        before, expert = _before_and_experts(parts, run, shown)
        with signals.asking(shown.say):
            _train(parts, run, checkpoint, shown, signals)
        _export(parts, run)
        parts.engine.load(paths.model)
        after = of_merged(parts.evaluator.evaluate(model=MERGED), paths.model, *trained(paths.metrics))
        parts.reporter.evaluation("after", after)
        report = build_report(
            name=config.name,
            before=before.accuracy,
            expert=expert.accuracy,
            after=after.accuracy,
            records=metrics.read(),
            wall_s=time.monotonic() - began + earlier_s,
            versions=versions(),
        )
    with storing(paths.report):
        atomic_write_text(paths.report, json.dumps(report, indent=2))
        report = write_report(paths.root)
    # Last, when the workers have given their memory back and the report is safe.
    lm_eval_merge(config, paths.model, paths.lm_eval)
    return report


def _introduce(run: Run, notices: Sequence[str], shown: Display) -> None:
    """What a person should know before the workers start."""
    for notice in (*run.inputs.warnings, *notices):
        shown.say(f"warning: {notice}")
    if run.inputs.template_date:
        day = run.inputs.template_date
        shown.say(f"the chat template writes a date: {day} in every prompt of this run (student.template_date)")
    workers = num_workers(run.config)
    shown.say(f"{run.config.name}: starting {workers} workers for {len(run.inputs.experts)} experts")


def _train(
    parts: loop.Parts, run: Run, checkpoint: checkpoints.Checkpoint | None, shown: Display, signals: Interrupts
) -> None:
    """The steps that are left. Raises: Interrupted if a signal came before the last one."""
    config = run.config
    if checkpoint:
        parts.log.prune(checkpoint.step)  # a kill between commit and prune leaves them
        parts.trainer.load(checkpoint.path.absolute())
        pushed = parts.sync.push(checkpoint.policy_version)
        shown.say(f"resumed from step {checkpoint.step}, engine and trainer agree to {pushed.gap:.1e} nats")
        if checkpoint.world_size != config.trainer.ranks:
            shown.say(f"its {checkpoint.world_size} ranks are {config.trainer.ranks} now: not bit for bit from here")
        if checkpoint.step >= config.trainer.steps:
            return
    plan = loop.Plan(
        first_step=checkpoint.step + 1 if checkpoint else 1,
        last_step=config.trainer.steps,
        policy_version=checkpoint.policy_version if checkpoint else 0,
        checkpoint_every=config.checkpoint.every,
        evaluate_every=config.evaluate.every,
        overlap=overlaps(config),
    )
    last = loop.run(parts, plan, signals.asked)
    if last < config.trainer.steps:
        raise Interrupted(last, run.paths.root, signals.number)


def _before_and_experts(parts: loop.Parts, run: Run, shown: Display) -> tuple[Evaluation, Evaluation]:
    """The student as it starts and each domain's expert; measured once per run: what lies on disk is taken from there,
    if it was measured on these models."""
    inputs, paths = run.inputs, run.paths
    student = as_teacher(BEFORE, inputs.student, None).digest

    def once(name: str, weights: Mapping[str, str], measure: Callable[[Sequence[str]], Evaluation]) -> Evaluation:
        file = paths.evaluation / f"{name}.json"
        known = Evaluation.load(file) if file.exists() else None
        missing = [d for d in inputs.exams if not (known and known.is_of(d, weights[d]))]
        if known and not missing:
            return known
        found = measure(missing)
        found = replace(found, weights={domain: weights[domain] for domain in found.scores})
        if known:
            found = combined([known, found], found.model)
        parts.reporter.evaluation(name, found)
        return found

    before = once(
        "before",
        dict.fromkeys(inputs.exams, student),
        lambda domains: replace(measure_before(parts.evaluator, domains, shown.say), step=0, tokens=0),
    )
    expert = once(
        "expert",
        {domain: teacher.digest for domain, teacher in inputs.teachers.items()},
        lambda domains: measure_experts(
            parts.engine,
            parts.evaluator,
            before.accuracy,
            run.config.student.model,
            {domain: inputs.teachers[domain] for domain in domains},
            lambda teacher: whole_model(teacher, paths.root / ".tmp-expert"),
            shown.say,
        ),
    )
    return before, expert


def _export(parts: loop.Parts, run: Run) -> None:
    """The merged model as a Hugging Face directory that plain transformers and vLLM load."""
    paths = run.paths
    temporary = paths.model.with_name(".tmp-model")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with storing(paths.model):
            temporary.mkdir()
            parts.trainer.export(temporary.absolute())
            for pattern in TOKENIZER_FILES:
                for file in run.config.student.model.glob(pattern):
                    shutil.copy(file, temporary / file.name)
            (temporary / "README.md").write_text(model_card(run.config, run.inputs), encoding="utf-8")
            replace_dir(temporary, paths.model)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room


def _refuse_fewer_steps(config: PipelineConfig, done: int) -> None:
    if done > config.trainer.steps:
        raise RunDirError.at(
            "trainer.steps",
            found=f"{config.trainer.steps}, with a checkpoint of step {done}",
            wanted=f"at least {done}",
            fix="raise it, or go back with --resume-from STEP",
        )


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """One driver per run directory; the lock goes with the process, however it ends."""
    try:
        with FileLock(root / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunDirError.at(
            root, found="another `opd merge` at work in it", wanted="one at a time", fix="wait for it or stop it"
        ) from None


@contextmanager
def _says_what_is_intact(paths: RunPaths) -> Iterator[None]:
    """A full disk ends the run with what it left and how to go on. Raises: StorageError."""
    try:
        with storing(paths.root):
            yield
    except StorageError as error:
        steps = checkpoints.steps_of(paths.checkpoints)
        intact = f"checkpoint of step {steps[-1]}" if steps else "the run directory; no checkpoint was due yet"
        raise StorageError(
            f"{error}\n  intact: {intact}\n  fix:    make room or mend the disk, then `opd merge --resume {whole(paths.root)}`"
        ) from None
