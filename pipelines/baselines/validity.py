"""Bind baselines to their merge: is a stored result still valid, and what does a new one depend on?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experts.bound_files import model_digest
from experts.weight_files import weight_hashes
from opd.evaluation.baselines import BaselineResult
from opd.files import blake3_json
from opd.report.stale import describe_changed_budget
from opd.run.paths import RunPaths
from pipelines.baselines.jobs import BaselineJob
from pipelines.inputs.read import Inputs
from pipelines.merging.changes import refuse_changed_inputs, run_identity
from pipelines.merging.manifest import make_manifest, read_manifest
from pipelines.merging.results import read_progress

NOT_OF_A_MODEL = ("logging",)
"""Sections of a pipeline that no result depends on."""
ONLY_OF_TRAINING = ("objective", "schedule", "sync", "teachers", "trainer")
"""Sections that no merge of weights depends on."""


def refuse_other_inputs(root: Path, job: BaselineJob, inputs: Inputs) -> None:
    """Refuse a baseline whose student, experts or prompts are not those of the run directory's merge.

    Raises: RunDirError naming what has changed since that merge began. A run directory without a merge accepts all.
    """
    paths = RunPaths(root)
    if paths.manifest.exists():
        refuse_changed_inputs(read_manifest(paths), make_manifest(job.config, inputs), paths.manifest)


def explain_outdated(job: BaselineJob, result: BaselineResult, inputs: Inputs) -> str | None:
    """Return the reason to compute a result again; None if its digests show no reason."""
    merge = _merge_progress(job)
    result_progress = (result.merge_steps, result.merge_tokens)
    if merge and job.share is not None and result.merge_steps is not None and result_progress != merge:
        return describe_changed_budget((result.merge_steps, result.merge_tokens or 0), merge)
    if result.inputs and result.inputs != _inputs_digest(job, inputs):
        return "made from other models, prompts or settings than those of now"
    return None


def bind_to_inputs(job: BaselineJob, result: BaselineResult, inputs: Inputs) -> BaselineResult:
    """Add to a result the digests of its model and inputs. The model lies on disk; the exam of a merge has the digests."""
    steps, tokens = _merge_progress(job) or (None, None)
    weights = result.weights if job.method == "opd" else model_digest(job.model, weight_hashes(job.model))
    return replace(result, weights=weights, inputs=_inputs_digest(job, inputs), merge_steps=steps, merge_tokens=tokens)


def delete_other_merge(job: BaselineJob, inputs: Inputs) -> None:
    """Delete a shorter merge of other steps, settings, models or prompts: it must not be resumed, nor its exam be taken over."""
    paths = job.shorter_run
    if paths.pipeline.exists() and _manifest_digest(job, read_manifest(paths)) != _inputs_digest(job, inputs):
        shutil.rmtree(paths.root)


def _merge_progress(job: BaselineJob) -> tuple[int, int] | None:
    """Return the steps and response tokens of the run directory's merge; None if it has none."""
    paths = RunPaths(job.root)
    return read_progress(paths.metrics) if paths.pipeline.exists() else None


def _inputs_digest(job: BaselineJob, inputs: Inputs) -> str:
    """Return the digest of the contents of student, experts and prompts, and of the pipeline's keys that decide the method's
    result."""
    return _manifest_digest(job, make_manifest(job.config, inputs))


def _manifest_digest(job: BaselineJob, manifest: Mapping[str, Any]) -> str:
    """Return the digest of the facts in a manifest that decide the method's result."""
    without = NOT_OF_A_MODEL + (ONLY_OF_TRAINING if job.share is None else ())
    config = {key: value for key, value in manifest["config"].items() if key not in without}
    facts = {
        **run_identity({**manifest, "config": config}),
        "prompts": {domain: list(files.values()) for domain, files in manifest["prompts"].items()},
        "steps": None if job.share is None else manifest["config"]["trainer"]["steps"],
    }
    return blake3_json(facts)
