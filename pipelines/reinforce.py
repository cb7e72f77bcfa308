"""Make experts by reinforcement: a base, then one run without teachers for each expert, then its place and its manifest.

    ReinforceSpec ─ check ─→ OUTPUT_DIR/base ─→ RUNS/NAME-METHOD, a run as of `opd merge` ─→ OUTPUT_DIR/NAME ─→ registry

What is finished is kept and what was interrupted goes on, so the same command takes the whole to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experts.registry import Registry
from experts.rl.recipe import pipeline_data
from experts.rl.spec import ReinforceSpec
from experts.train import (
    RESULT,
    TrainingJob,
    build_base_job,
    check_unclaimed,
    make_base,
    publish_model,
    read_origin,
    register_expert,
    staging_directory,
)
from opd.config import PipelineConfig
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.prompts import find_source
from opd.report import read_run
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from opd.text import Tell
from pipelines.interrupts import Interrupted
from pipelines.merging import rounds
from pipelines.merging.callbacks import TERMINAL, MergeCallbacks
from pipelines.merging.changes import refused_keys
from pipelines.merging.directory import link_files


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReinforcedExpert:
    """One expert to make."""

    config: PipelineConfig
    job: TrainingJob
    domain: str
    prompts: Path | None
    """The tasks, with which it is registered; None where a mapping reads them, because a registry knows files alone."""
    paths: RunPaths

    @property
    def has_run(self) -> bool:
        """Return True if its run is finished, with a model and a report."""
        is_complete = all(path.exists() for path in (self.paths.model, self.paths.report, self.paths.report_page))
        return is_complete and read_run(self.paths.root).finished


def reinforce_experts(spec: ReinforceSpec, tell: Tell, callbacks: MergeCallbacks = TERMINAL) -> list[Path]:
    """Make the experts that are not finished yet. Returns their directories in the order of the spec.

    Raises: OpdError before the base is made, or before the run of an expert begins; RunError if a run cannot go on;
    Interrupted after Ctrl-C, with a checkpoint.
    """
    base = build_base_job(spec)
    experts = [_make_expert_run(spec, name, base) for name in spec.experts]
    registry = Registry(spec.registry) if spec.registry else None
    for job in (base, *(expert.job for expert in experts)):
        check_unclaimed(job, registry)
    make_base(spec, base, tell)
    # One handler for all runs: a Ctrl-C between two of them must not get lost.
    with callbacks.signals() as signals:
        for expert in experts:
            _train_expert(expert, tell, callbacks)
            if registry:
                register_expert(registry, expert.job, expert.domain, expert.prompts)
            if signals.should_leave() and expert is not experts[-1]:
                raise Interrupted(expert.config.trainer.steps, expert.paths.root, signals.number)
    return [expert.job.directory for expert in experts]


def build_pipeline(spec: ReinforceSpec, name: str) -> PipelineConfig:
    """Return the pipeline of one expert of the spec. Raises: ConfigError naming the key of the pipeline that is wrong."""
    return validate_section(PipelineConfig, pipeline_data(spec, name), f"experts.{name}")


def record_expert(config: PipelineConfig, spec: ReinforceSpec, base: dict[str, Any], prompts: str) -> dict[str, Any]:
    """Return everything that decides the expert's weights. `base` is what made the base, `prompts` the hash of the tasks."""
    decides = {"domains", "rollout", "teachers", "objective", "trainer", "schedule"} | (
        {"guard"} if config.guard else set()
    )
    facts = config.model_dump(mode="json", include=decides)
    for name, domain in facts["domains"].items():
        # Not the path: of the tasks the contents are hashed, and an exam decides no weight.
        del domain["prompts"], domain["eval"]["prompts"]
        domain |= _task_options(config.domains[name].prompts)
    return {"method": spec.method, "base": base, "seed": spec.seed, "prompts": prompts, **facts}


def _task_options(prompts: Path | PromptsConfig | None) -> dict[str, Any]:
    """Return the keys of a mapping other than the location of its tasks: rows, columns and the like; empty if there are none."""
    assert prompts is not None, "an expert has tasks"
    options = as_prompts_config(prompts).model_dump(mode="json", exclude={"path"}, exclude_defaults=True)
    return {"prompts": options} if options else {}


def _make_expert_run(spec: ReinforceSpec, name: str, base: TrainingJob) -> _ReinforcedExpert:
    config = build_pipeline(spec, name)
    tasks = spec.experts[name].prompts
    source = find_source(tasks)
    directory = spec.output_dir / name
    record = _keep_compatible_record(directory, record_expert(config, spec, base.record, source.content_hash()))
    return _ReinforcedExpert(
        config=config,
        job=TrainingJob(name=name, directory=directory, lines=(), train=None, record=record),
        domain=spec.experts[name].domain,
        prompts=tasks if isinstance(tasks, Path) else None,
        paths=RunPaths(spec.runs / config.name),
    )


def _keep_compatible_record(directory: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an expert that is there already, if it differs from `record` only in what a resumed run may change
    too, such as a GPU's share of memory; else `record`."""
    stored_record = read_origin(directory)
    return record if stored_record is None or refused_keys(stored_record, record) else stored_record


def _train_expert(expert: _ReinforcedExpert, tell: Tell, callbacks: MergeCallbacks) -> None:
    """Take an expert's run to its end and its model to its place."""
    name, paths = expert.job.name, expert.paths
    if expert.job.is_finished:
        tell(f"{name}: finished before, kept")
        return
    if paths.root.exists():
        work = rounds.reopen_rounds(paths.root, expert.config, None, "latest", tell)  # refuses the run of another spec
        tell(f"{name}: going on in {paths.root}")
    else:
        work = rounds.begin_rounds(expert.config, paths.root, tell)
    if not expert.has_run:
        work.carry_out(callbacks)
    result = _run_result(paths)
    link_files(paths.model, staging_directory(expert.job))
    publish_model(staging_directory(expert.job), expert.job, {RESULT: result})
    for domain, (before, after) in result["success"].items():
        tell(f"{name}: {before:.2f} → {after:.2f} on {domain}, report {paths.report_page}")


def _run_result(paths: RunPaths) -> dict[str, Any]:
    """Return the result of a finished run: for people, and for the manifest."""
    report = read_run(paths.root).stored
    assert report is not None
    return {
        "run": str(paths.root.absolute()),
        "steps": report["steps"],
        "response_tokens": report["response_tokens"],
        "wall_s": report["wall_s"],
        "success": {name: [scores["before"], scores["after"]] for name, scores in report["domains"].items()},
    }
