"""One merge from a checked pipeline to a model and a report; a new run or the rest of an interrupted one.

begin    a new run directory ───────┐
reopen   an interrupted run ────────┼─→ MergeRun ── carry_out ─→ _run_session: workers, exams, the loop, model, report
extend   a run, for further steps ──┘                   └─ repeated with new workers if one dies that a step cannot replace
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd import loop
from opd.cluster import WorkerDied, ray_session
from opd.config import PipelineConfig, is_overlapped, load_pipeline
from opd.errors import ModelError, RunDirError, RunError, StorageError
from opd.evaluation.evaluator import MERGED
from opd.files import atomic_write_text, raise_storage_errors, replace_dir, sweep_temporary_files
from opd.live.displays import RunStart
from opd.live.interfaces import Display
from opd.records.scores import Evaluation
from opd.report import build_report, clear_domains, write_report
from opd.run import checkpoints
from opd.run.checkpoints import Checkpoint
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from opd.sinks import open_sinks
from opd.text import quote_for_shell
from pipelines.build import build_merge, num_workers, prove_servers
from pipelines.evaluation.lm_eval import lm_eval_merge
from pipelines.inputs.indexers import spell_pattern
from pipelines.inputs.judges import find_judges, open_judges
from pipelines.inputs.probes import measure_missing_probes
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.inputs.template_date import as_recorded
from pipelines.interrupts import Interrupted, Interrupts
from pipelines.merging import card
from pipelines.merging.callbacks import TERMINAL, MergeCallbacks
from pipelines.merging.changes import (
    accept_changes,
    changed_rules,
    refuse_changed_inputs,
    refuse_columns_of_registered_prompts,
    refuse_foreign,
    refuse_lost_records,
    run_identity,
    version_warnings,
    warn_unrecorded,
)
from pipelines.merging.directory import (
    explain_what_is_intact,
    lock_run_directory,
    new_directory,
    refuse_existing,
    refuse_no_run,
)
from pipelines.merging.exams import StartingExams, measure_own_exams
from pipelines.merging.extension import Extension
from pipelines.merging.journal import Journal
from pipelines.merging.layouts import record_layouts
from pipelines.merging.manifest import (
    finish_inputs,
    library_versions,
    make_manifest,
    own_pipeline,
    read_manifest,
    renew_manifest,
    replace_inputs,
    write_inputs,
)
from pipelines.merging.results import add_model_digest, read_progress, withdraw_results
from pipelines.merging.side_files import read_accompanying_files
from pipelines.placement import describe_divided_trainer, local_worker_names, refuse_unplaceable, reserve_places
from pipelines.shared_student import share_student_indexers
from pipelines.sizing.auto import choose_numbers, local_machine
from pipelines.sizing.gpu_memory import refuse_crowded_gpus
from pipelines.sizing.memory import refuse_too_large


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRun:
    """A merge of one round (see `pipelines.merging.rounds`) in its run directory, which has been checked.

    It stays the same however often the workers are started again.
    """

    config: PipelineConfig
    inputs: Inputs
    paths: RunPaths
    identity: Mapping[str, Any]
    """Result of `pipelines.merging.changes.run_identity` when the run began."""
    notices: tuple[str, ...] = ()
    """Notices for the user before the workers start."""
    resume_from: str | None = None
    """The checkpoint to go on from, as `opd.run.checkpoints.choose_checkpoint` takes it; None for a run that begins."""
    new_manifest: Mapping[str, Any] | None = None
    """The manifest with the changes of this resume; None if the one in the run directory is still right."""
    callbacks: MergeCallbacks = TERMINAL
    """Display, signals and sinks of the run; `carry_out` sets them on its own copy."""

    def carry_out(self, callbacks: MergeCallbacks = TERMINAL) -> dict[str, Any]:
        """Take the run to its end. Returns the report.

        If a worker dies and the step cannot replace it, all workers are started again, and the run goes on from its last
        checkpoint, as a resume would. This happens up to `cluster.max_restarts` times, and not if a worker fails to start with
        exactly the same error text as the last time.
        Raises: RunDirError for a checkpoint that cannot be used, before any compute; RunError if the run cannot go on;
        Interrupted after Ctrl-C, also if a worker dies then.
        """
        notices, max_restarts = list(self.notices), self.config.cluster.max_restarts
        with lock_run_directory(self.paths), explain_what_is_intact(self.paths), Journal(self.paths) as journal:
            callbacks = replace(callbacks, display=journal.write_beside(callbacks.display))
            # A run that begins has nothing in its directory to choose from or to clear away.
            checkpoint = _choose_start(self, self.resume_from, notices) if self.resume_from else None
            if self.new_manifest:
                replace_inputs(self.paths, self.new_manifest)
            else:
                # A kill in an earlier `replace_inputs` may have left the new pipeline waiting.
                finish_inputs(self.paths)
            # All rounds of a merge share its probes.
            inputs = measure_missing_probes(self.inputs, notices.append, RunPaths(self.paths.merge_root).probes)
            run = replace(self, callbacks=callbacks, inputs=inputs)
            # One handler for all attempts: a Ctrl-C while workers start again must not get lost.
            start_error = ""
            with callbacks.signals() as signals:
                for attempt in itertools.count(1):
                    try:
                        return _run_session(run, checkpoint, notices, signals)
                    except WorkerDied as error:
                        if attempt > max_restarts or (error.start_error and error.start_error == start_error):
                            raise
                        start_error = error.start_error
                        notices = [f"{error}", f"starting all workers again, {attempt} of {max_restarts} times"]
                        checkpoint = _choose_start(self, checkpoints.LATEST, notices)
                        if signals.should_leave():  # a scheduler's SIGTERM may have gone to the workers, too
                            step = checkpoint.step if checkpoint else 0
                            raise Interrupted(step, self.paths.root, signals.number, died=error) from None
        raise AssertionError("the last attempt returns or raises")


def start(
    config: PipelineConfig,
    root: Path,
    evaluation_files: Mapping[str, str] | None = None,
    callbacks: MergeCallbacks = TERMINAL,
) -> dict[str, Any]:
    """Begin a new run, as `begin` does, and carry it out. Returns the report."""
    return begin(config, root, evaluation_files).carry_out(callbacks)


def resume(
    root: Path,
    config: PipelineConfig | None = None,
    overrides: list[str] | None = None,
    resume_from: str = checkpoints.LATEST,
    callbacks: MergeCallbacks = TERMINAL,
) -> dict[str, Any]:
    """Reopen an interrupted run, as `reopen` does, and carry it out. Returns the report."""
    return reopen(root, config, overrides, resume_from).carry_out(callbacks)


def start_or_resume(config: PipelineConfig, root: Path) -> dict[str, Any]:
    """Take the merge in `root` to its end: a new one if nothing is there, else the rest of the one that is. Returns the report."""
    return resume(root) if root.exists() else start(config, root)


def begin(config: PipelineConfig, root: Path, evaluation_files: Mapping[str, str] | None = None) -> MergeRun:
    """Begin a new merge of one round, whose run directory `root` must not exist; from here on it can be resumed.

    `evaluation_files`: name -> text of files of `evaluation/` that were measured before and are not measured again.
    Experts that only write text, and judges, show first that they answer. Raises: OpdError, and then there is no run directory.
    """
    assert config.rounds == 1, "see pipelines.merging.rounds"
    refuse_existing(root)
    config, inputs, manifest, notices = read_facts(config)
    manifest["identity"] = run_identity(manifest)
    with new_directory(root) as temporary:
        whole = RunPaths(RunPaths(root).merge_root)
        for asked, own in ((whole.texts, temporary.texts), (whole.scores, temporary.scores)):
            if asked.exists():  # before the first round began
                shutil.copyfile(asked, own)
        prove_servers(config, inputs, temporary)
        write_inputs(temporary, manifest)
        if evaluation_files:
            temporary.evaluation.mkdir()
            for name, text in evaluation_files.items():
                atomic_write_text(temporary.evaluation / name, text)
    # From here on `opd merge --resume` works, even without a checkpoint.
    return MergeRun(
        config=config, inputs=inputs, paths=RunPaths(root), identity=manifest["identity"], notices=tuple(notices)
    )


def read_facts(config: PipelineConfig) -> tuple[PipelineConfig, Inputs, dict[str, Any], list[str]]:
    """Read and check all that a merge needs of files, machine and cluster.

    Returns the pipeline with its open numbers chosen, the inputs, their manifest, and warnings. Raises: OpdError.
    """
    inputs = read_inputs(config)
    config = spell_pattern(config)
    config = choose_numbers(config, inputs, local_machine(config))
    refuse_too_large(config, inputs)
    warnings = refuse_crowded_gpus(config, inputs)
    refuse_unplaceable(config)
    # The merged model gets a copy of these files at its end: one that cannot be read fails now, not after hours.
    read_accompanying_files(config, inputs)
    return config, inputs, make_manifest(config, inputs), warnings


def reopen(
    root: Path,
    config: PipelineConfig | None = None,
    overrides: list[str] | None = None,
    resume_from: str = checkpoints.LATEST,
) -> MergeRun:
    """Reopen an interrupted merge, to go on from a checkpoint, or from the start if it has none.

    `config` replaces the run's own pipeline, `overrides` change it; both may change only what `pipelines.merging.changes`
    lists; `resume_from` is what `opd.run.checkpoints.choose_checkpoint` takes. Raises: OpdError, and then nothing is written.
    """
    paths = RunPaths(root)
    refuse_no_run(paths)
    recorded = read_manifest(paths)
    config = config or load_pipeline(own_pipeline(paths, recorded), overrides)
    return _make_resumed_run(paths, recorded, config, resume_from)


def extend(root: Path, extension: Extension, overrides: list[str] | None = None) -> MergeRun:
    """Reopen a finished or stopped merge to take further steps from its newest checkpoint.

    `overrides` are those of `reopen`. Raises: OpdError, and then nothing is written.
    """
    paths = RunPaths(root)
    old_manifest = read_manifest(paths)
    recorded = extension.extended_manifest(old_manifest, paths)
    config = extension.extended_pipeline(load_pipeline(own_pipeline(paths, old_manifest), overrides))
    run = _make_resumed_run(paths, recorded, config, checkpoints.LATEST)
    notices = (*extension.extension_notices(config), *run.notices)
    return replace(run, notices=notices, new_manifest=run.new_manifest or recorded)


def _make_resumed_run(
    paths: RunPaths, recorded: Mapping[str, Any], config: PipelineConfig, resume_from: str
) -> MergeRun:
    """Return the run that goes on with `config`, compared with the manifest `recorded`. Raises: OpdError."""
    config = as_recorded(config, validate_section(PipelineConfig, recorded["config"], paths.manifest))
    config, inputs, manifest, warnings = read_facts(config)
    refuse_changed_inputs(recorded, manifest, paths.manifest)
    changes = accept_changes(recorded["config"], manifest["config"], paths.manifest)
    refuse_columns_of_registered_prompts(recorded, config, inputs, paths.manifest)
    release_warnings = warn_unrecorded(recorded)
    steps = checkpoints.list_checkpoint_steps(paths.checkpoints)
    # A run that goes on from the checkpoint of its last step takes no further step, so other rules change nothing in it.
    if resume_from != checkpoints.LATEST or not steps or steps[-1] < config.trainer.steps:
        release_warnings += changed_rules(recorded, config)
    return MergeRun(
        config=config,
        inputs=inputs,
        paths=paths,
        identity=recorded["identity"],
        notices=(*version_warnings(recorded["versions"], manifest["versions"]), *release_warnings, *changes, *warnings),
        resume_from=resume_from,
        # Other versions of libraries change nothing here: the manifest keeps those that the run began with.
        new_manifest=renew_manifest(recorded, manifest) if changes or release_warnings else None,
    )


def _choose_start(run: MergeRun, resume_from: str, notices: list[str]) -> Checkpoint | None:
    """Choose and verify the checkpoint to go on from, and set later ones aside. Adds to `notices`; None: there is no checkpoint.

    Raises: RunDirError; then nothing has changed, except that the temporary files of a killed process are deleted.
    """
    paths = run.paths
    for directory in (paths.root, paths.checkpoints, paths.targets):
        sweep_temporary_files(directory)
    checkpoint = checkpoints.choose_checkpoint(paths.checkpoints, resume_from, notices.append)
    if checkpoint:
        refuse_foreign(checkpoint, run.identity)
        _refuse_fewer_steps(run.config, checkpoint.step)
        refuse_lost_records(run.config, paths, checkpoint.step)
        newer_checkpoints = checkpoints.set_newer_aside(paths.checkpoints, checkpoint.step)
        if newer_checkpoints:
            names = ", ".join(newer_checkpoints)
            notices.append(f"set aside, since the run goes on from step {checkpoint.step}: {names}")
    return checkpoint


def _refuse_fewer_steps(config: PipelineConfig, step: int) -> None:
    if step > config.trainer.steps:
        raise RunDirError.at(
            "trainer.steps",
            found=f"{config.trainer.steps}, with a checkpoint of step {step}",
            wanted=f"at least {step}",
            fix="raise it, or go back with --resume-from STEP",
        )


def _run_session(
    run: MergeRun, checkpoint: Checkpoint | None, notices: Sequence[str], signals: Interrupts
) -> dict[str, Any]:
    """Take the run from a checkpoint to its report, with new workers. Returns the report.

    Raises: WorkerDied, and what `_raise_if_unfinished` raises.
    """
    session_start = time.monotonic()
    paths = run.paths
    config, inputs = share_student_indexers(run.config, run.inputs, paths.student)
    start_step = checkpoint.step if checkpoint else 0
    metrics = MetricsFile(paths.metrics)
    metrics.rewind(start_step)
    withdraw_results(paths, start_step, config.trainer.steps)
    records, domains = metrics.read(), tuple(config.domains)
    earlier_s = sum(record.seconds for record in records)
    run_start = RunStart(config.name, paths.root, config.trainer.steps, domains, records)
    with (
        run.callbacks.display(run_start) as display,
        open_sinks(config.logging, paths.root, start_step) as sinks,
        ExitStack() as session,
    ):
        _announce_start(run, notices, display)
        open_judges(inputs.every_exam, paths.scores)
        own_exams = measure_own_exams(config, inputs, paths, display)
        session.enter_context(ray_session(config.cluster, num_workers(config)))
        _reserve_workers(config, display)
        parts = build_merge(config, inputs, paths, display, run.identity, [*sinks, *run.callbacks.sinks])
        record_layouts(parts, paths, display.say)
        parts.sync.begin()  # compares engines and trainer
        begun = replace(run, config=config, inputs=inputs)
        before, expert = _take_starting_exams(parts, begun, display, own_exams)
        parts.monitors.begin(records, expert)
        with signals.handle_first_signal(display.say):
            if checkpoint:
                _load_checkpoint(parts, checkpoint, config.trainer.ranks, display)
            last_step = loop.run(parts, _plan_steps(config, checkpoint), signals.should_leave)
        _raise_if_unfinished(parts, run, last_step, signals)
        display.doing("the merged model is written")
        _export_model(parts, run)
        display.doing("the exam of the merged model")
        # The engines load the exported files, so that these take the exam, and not the weights of the last push.
        parts.sync.hold(paths.model, shape_of=config.student.model)
        steps, tokens = read_progress(paths.metrics)
        after = add_model_digest(parts.evaluator.evaluate(model=MERGED), paths.model, steps, tokens)
        parts.reporter.evaluation("after", after)
        wall_s = earlier_s + time.monotonic() - session_start
    exams = {"before": before.accuracy, "expert": expert.accuracy, "after": after.accuracy}
    report = _write_report(run, exams, wall_s)
    # The harness comes last: the workers have freed their memory, and the report is safe.
    lm_eval_merge(config, paths.model, paths.lm_eval)
    return report


def _raise_if_unfinished(parts: loop.Components, run: MergeRun, last: int, signals: Interrupts) -> None:
    """Raise unless the run has taken its last step; `last` is the last one that it took.

    Raises: RunError if a monitor ends the run (Paused is one), after the report page that shows why is written; Interrupted after
    a signal.
    """
    end_error = parts.monitors.end_error()
    if end_error is not None:
        with raise_storage_errors(run.paths.report_page):
            write_report(run.paths.merge_root)
        raise end_error
    if last < run.config.trainer.steps:
        raise Interrupted(last, run.paths.root, signals.number)


def _announce_start(run: MergeRun, notices: Sequence[str], display: Display) -> None:
    """Print the warnings, and say which workers start now."""
    for notice in (*run.inputs.warnings, *notices):
        display.say(f"warning: {notice}")
    if run.inputs.template_date:
        day = run.inputs.template_date
        display.say(f"the chat template writes a date: {day} in every prompt of this run (student.template_date)")
    workers = num_workers(run.config)
    purpose = f"for {len(run.inputs.experts)} experts" if run.inputs.experts else "to learn from rewards alone"
    display.say(f"{run.config.name}: starting {workers} workers {purpose}")
    display.doing("workers start")


def _reserve_workers(config: PipelineConfig, display: Display) -> None:
    """Reserve a place in the cluster for every worker before the first one loads. Raises: RunError past the deadline."""
    nodes = reserve_places(config, local_workers=local_worker_names(config))
    for node_id, node in {node.id: node for node in nodes.values()}.items():
        display.say(f"on {node.address}: {', '.join(name for name, at in nodes.items() if at.id == node_id)}")
    divided = describe_divided_trainer(config, nodes)
    if divided:
        display.say(f"warning: {divided}")


def _load_checkpoint(parts: loop.Components, checkpoint: Checkpoint, ranks: int, display: Display) -> None:
    """Load the checkpoint into the trainer and the log of targets, and push its weights to the engines."""
    parts.log.prune(checkpoint.step)  # a run that was killed between commit and prune still has these
    parts.log.bring_back(checkpoint.step + 1, checkpoint.path)
    parts.trainer.load(checkpoint.path.absolute())
    if parts.rewards is not None:
        parts.rewards.load(checkpoint.path.absolute())
    pushed = parts.sync.push(checkpoint.policy_version)
    display.say(f"resumed from step {checkpoint.step}, engine and trainer agree to {pushed.gap:.1e} nats")
    if checkpoint.world_size != ranks:
        display.say(f"its {checkpoint.world_size} ranks are {ranks} now: not bit for bit from here")


def _plan_steps(config: PipelineConfig, checkpoint: Checkpoint | None) -> loop.Plan:
    """Return the steps that are left; none if the checkpoint is of the last step."""
    return loop.Plan(
        first_step=checkpoint.step + 1 if checkpoint else 1,
        last_step=config.trainer.steps,
        policy_version=checkpoint.policy_version if checkpoint else 0,
        checkpoint_every=config.checkpoint.every,
        evaluate_every=config.evaluate.every,
        overlap=is_overlapped(config),
    )


def _take_starting_exams(
    parts: loop.Components, run: MergeRun, display: Display, own: Mapping[str, Evaluation]
) -> tuple[Evaluation, Evaluation]:
    """Return the exams of the student before training and of each domain's expert. `own`: of `measure_own_exams`."""
    student, expert = StartingExams(parts, run.config, run.inputs, run.paths, display, own).measure_exams()
    display.exams(student.accuracy, expert.accuracy, clear_domains(student.scores, expert.scores))
    return student, expert


def _export_model(parts: loop.Components, run: MergeRun) -> None:
    """Export the merged model, which plain transformers and vLLM can load, and LoRA's adapter if it is wanted."""
    paths = run.paths
    temporary = paths.scratch_path("model")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with raise_storage_errors(paths.model):
            temporary.mkdir()
            parts.trainer.export(temporary.absolute())
            if run.config.draft is not None:
                parts.trainer.export_companions(temporary.absolute())
            _write_accompanying_files(run, temporary)
            replace_dir(temporary, paths.model)
            if run.config.student.lora and run.config.student.lora.export == "adapter":
                temporary.mkdir()
                parts.trainer.export_adapter(temporary.absolute())
                replace_dir(temporary, paths.adapter)
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this gives the room back
        raise


def _write_accompanying_files(run: MergeRun, weights: Path) -> None:
    """Write the tokenizer's files and the card beside the weights. Raises: RunError that says where the weights are; StorageError."""
    try:
        contents = read_accompanying_files(run.config, run.inputs)
    except ModelError as error:  # the files could be read when the run began
        raise RunError(
            f"{error}\n  intact: the merged weights, in {weights}\n"
            f"  fix:    put the file back, then `opd merge --resume {quote_for_shell(run.paths.merge_root)}`"
        ) from None
    for name, content in contents.items():
        (weights / name).write_bytes(content)


def _write_report(run: MergeRun, exams: Mapping[str, Mapping[str, float]], wall_s: float) -> dict[str, Any]:
    """Write report.json and report.html, and the model's card with the results. Returns the report."""
    paths = run.paths
    records = MetricsFile(paths.metrics).read()
    judges = {domain: judge.sum_spending() for domain, judge in find_judges(run.inputs.exams).items()}
    report = build_report(run.config.name, exams, records, wall_s=wall_s, versions=library_versions(), judges=judges)
    with raise_storage_errors(paths.report):
        atomic_write_text(paths.report, json.dumps(report, indent=2))
        full = write_report(paths.root)
    with raise_storage_errors(paths.model):
        card_text = card.model_card(run.config, run.inputs, read_manifest(paths), full)
        atomic_write_text(paths.model / card.NAME, card_text)
    return full
