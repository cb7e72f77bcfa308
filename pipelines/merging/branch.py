"""Branch: begin a run from a checkpoint of another one, with its weights and optimiser, under a pipeline of its own.

    runs/a/checkpoints/step-000050/ ── the same files ──▶ runs/b/checkpoints/step-000050/
    runs/a/metrics.jsonl            ── steps 1 to 50  ──▶ runs/b/metrics.jsonl

From there on it is a run like any other, which has taken 50 steps: a resume, the report, balanced prompts and a budget of tokens
find these steps. With the pipeline of its origin it takes the very steps that its origin would take.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.config.balance import SamplesBalance
from opd.config.reward import BaselineConfig, CriticBaseline, EmaBaseline
from opd.errors import ConfigError, RunDirError
from opd.files import atomic_write_text
from opd.run import checkpoints
from opd.run.lineage import BRANCHED, LINEAGE, format_events, list_events_until
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths, step_name
from opd.settings.yaml_files import validate_section
from opd.stream import written_rollouts
from pipelines.build import prove_servers
from pipelines.inputs.template_date import as_recorded
from pipelines.merging.changes import (
    changed_keys,
    dotted_key,
    matches_pattern,
    refuse_foreign,
    run_identity,
    without_unread_weights,
)
from pipelines.merging.directory import link_files, lock_to_read, new_directory, refuse_existing
from pipelines.merging.manifest import read_manifest, write_inputs
from pipelines.merging.origin import Origin
from pipelines.merging.run import MergeRun, read_facts

DECIDE_ROLLOUTS = (
    "seed",
    "student.*",
    "domains.*",
    "balance*",
    "rollout.*",
    "schedule.mode",
    "guard*",
    "teachers.mask_tokens*",
)
"""Keys that decide what is written, and which tokens of it carry a loss. If one differs, responses that the origin had written ahead
are left behind."""

DECIDE_EXAMS = (
    "seed",
    "student.*",
    "domains.*.prompts*",
    "domains.*.eval*",
    "domains.*.environment*",
    "domains.*.agent*",
    "domains.*.guard*",
    "guard*",
    "evaluate.*",
    "rollout.*",
)
"""Keys that decide what an exam says of the start student and the experts. If none differs, the origin's exams are this run's, also
those that are not kept for other runs because code of the user's takes part: it is the same student, with the same questions."""


def begin_branch(config: PipelineConfig, origin: Origin, root: Path) -> MergeRun:
    """Begin a run in `root`, which must not exist, from the checkpoint of `origin`; from here on it can be resumed.

    Raises: OpdError before anything is written.
    """
    refuse_existing(root)
    recorded = read_manifest(origin.paths)
    origin_config = validate_section(PipelineConfig, recorded["config"], origin.paths.manifest)
    config = as_recorded(config, origin_config)
    _refuse_other_shape(config, origin_config, origin)
    config, inputs, manifest, notices = read_facts(config)
    _refuse_other_student(recorded["student"], manifest["student"], origin)
    _refuse_other_pattern(config, origin_config, origin)
    branch_config = validate_section(PipelineConfig, manifest["config"], origin.paths.manifest)
    changed = changed_keys(origin_config.model_dump(mode="json"), branch_config.model_dump(mode="json"))
    event = {
        "event": BRANCHED,
        "run": str(origin.paths.root.absolute()),
        "step": origin.step,
        "changed": {dotted_key(key): list(values) for key, values in changed.items()},
    }
    manifest |= {"identity": run_identity(manifest), LINEAGE: [*list_events_until(recorded, origin.step), event]}
    has_same_rollouts = not any(matches_pattern(key, DECIDE_ROLLOUTS) for key in changed) and _has_same_writers(
        config, recorded, manifest
    )
    has_same_files = all(recorded.get(part) == manifest.get(part) for part in ("prompts", "versions", "guard"))
    has_same_exams = has_same_files and not any(matches_pattern(key, DECIDE_EXAMS) for key in changed)
    with new_directory(root) as temporary:
        _link_checkpoint(origin, recorded["identity"], temporary, manifest["identity"], has_same_rollouts)
        if has_same_exams and config.evaluate.cache:
            _copy_exams(origin.paths, temporary)
        prove_servers(config, inputs, temporary)
        write_inputs(temporary, manifest)
    return MergeRun(
        config=config,
        inputs=inputs,
        paths=RunPaths(root),
        identity=manifest["identity"],
        notices=(*format_events([event]), *notices),
        resume_from=checkpoints.LATEST,
    )


def _has_same_writers(
    config: PipelineConfig, origin_manifest: Mapping[str, Any], branch_manifest: Mapping[str, Any]
) -> bool:
    """Return True if the manifests have the same files of rules, and the same experts where these write turns or mask tokens.

    The hashes of the files are compared: the keys of the pipeline have only their paths.
    """
    experts_write = any(domain.environment and domain.environment.teacher_turns for domain in config.domains.values())
    parts = ("guard", "experts") if experts_write or config.teachers.mask_tokens else ("guard",)
    return all(origin_manifest.get(part) == branch_manifest.get(part) for part in parts)


def _link_checkpoint(
    origin: Origin,
    origin_identity: Mapping[str, Any],
    paths: RunPaths,
    identity: Mapping[str, Any],
    keep_written_ahead: bool,
) -> None:
    """Put the origin's checkpoint and its records into a run directory, the checkpoint as one of the run with this `identity`.

    Responses that the origin had written ahead stay in the checkpoint only with `keep_written_ahead`.
    Raises: RunDirError for a checkpoint that is damaged or not the origin's.
    """
    target = paths.checkpoints / step_name(origin.step)
    with lock_to_read(origin.paths):  # a merge at work there might delete it meanwhile
        refuse_foreign(checkpoints.verify_checkpoint(origin.checkpoint), origin_identity)
        link_files(origin.checkpoint, target)
        if origin.paths.metrics.exists():
            shutil.copyfile(origin.paths.metrics, paths.metrics)
    MetricsFile(paths.metrics).rewind(origin.step)
    file = target / checkpoints.MANIFEST
    facts = json.loads(file.read_text(encoding="utf-8"))
    if not keep_written_ahead:
        for name in written_rollouts.FILES:
            (target / name).unlink(missing_ok=True)
            facts["files"].pop(name, None)
    # A new file replaces the hard link, so the origin's own manifest stays as it is.
    atomic_write_text(file, json.dumps({**facts, "identity": dict(identity)}, indent=2))


def _copy_exams(origin: RunPaths, paths: RunPaths) -> None:
    """Copy the exams of the start student and of the experts. The run takes the exam of an expert that has changed once more."""
    paths.evaluation.mkdir()
    for name in ("before", "expert"):
        if origin.evaluation_file(name).is_file():
            shutil.copyfile(origin.evaluation_file(name), paths.evaluation_file(name))


def _refuse_other_shape(config: PipelineConfig, origin_config: PipelineConfig, origin: Origin) -> None:
    """Refuse a pipeline that cannot go on from a checkpoint of the pipeline `origin_config`. Raises: ConfigError."""
    if config.rounds != 1:
        raise ConfigError.at(
            "rounds",
            found="several",
            wanted="1 with --from",
            fix="leave it out, or start the rounds from the model of a run",
        )
    if config.trainer.steps <= origin.step:
        raise ConfigError.at(
            "trainer.steps",
            found=f"{config.trainer.steps}, with a start at step {origin.step}",
            wanted=f"more than {origin.step}: the steps of the origin count",
            fix=f"for example --set trainer.steps={origin.step + config.trainer.steps}",
        )
    requirements, origin_requirements = _state_requirements(config), _state_requirements(origin_config)
    for key, reason in _origin_requirements(config).items():
        if requirements[key] != origin_requirements[key]:
            raise ConfigError.at(
                key,
                found=requirements[key],
                wanted=f"{origin_requirements[key]}, as in {origin.paths.root}: {reason}",
                fix="take the origin's, or start a new run whose student.model is a model that the origin left",
            )


def _state_requirements(config: PipelineConfig) -> dict[str, str]:
    """Return key -> what a checkpoint or the records are made for, in words."""
    lora, reward = config.student.lora, config.objective.reward
    adapters = lora.model_dump(mode="json", exclude={"export"}) if lora else {}
    return {
        "student.lora": ", ".join(f"{key} {value}" for key, value in adapters.items()) or "none",
        "objective.reward.baseline": _describe_baseline(reward.baseline) if reward else "none",
        "objective.reward.preference": "a discriminator" if reward and reward.preference else "none",
        "domains": ", ".join(sorted(config.domains)),
    }


def _describe_baseline(baseline: BaselineConfig) -> str:
    if not isinstance(baseline, CriticBaseline):
        return baseline.kind
    return f"critic, freeze_attention {str(baseline.freeze_attention).lower()}"  # a checkpoint has what is trained


def _origin_requirements(config: PipelineConfig) -> dict[str, str]:
    """Return key -> reason, for the keys that must be the origin's."""
    needed = {"student.lora": "it says which weights the checkpoint has"}
    reward = config.objective.reward
    if reward is not None and isinstance(reward.baseline, CriticBaseline | EmaBaseline):
        needed["objective.reward.baseline"] = "the checkpoint has what it learned"
    if reward is not None and reward.preference is not None:
        needed["objective.reward.preference"] = "the checkpoint has what it learned"
    if not isinstance(config.balance, SamplesBalance):
        needed["domains"] = f"balance {config.balance.kind} counts what each of them got in the steps before"
    return needed


def _refuse_other_pattern(config: PipelineConfig, origin_config: PipelineConfig, origin: Origin) -> None:
    """Refuse a branch whose student shares other indexers than its origin's. Raises: ConfigError."""
    own, wanted = (one.student.indexers and one.student.indexers.pattern for one in (config, origin_config))
    if own != wanted:
        raise ConfigError.at(
            "student.indexers.pattern",
            found=own or "none",
            wanted=f"{wanted or 'none'}, as in {origin.paths.root}: the checkpoint has the indexers that are kept",
            fix="take the origin's, or start a new run whose student.model is a model that the origin left",
        )


def _refuse_other_student(origin_files: Mapping[str, str], student_files: Mapping[str, str], origin: Origin) -> None:
    """Refuse a branch with another student than its origin; both are file name -> hash. Raises: RunDirError."""
    # An older release recorded hashes of weights only, so only these can be compared with its runs.
    comparable = {
        name: digest
        for name, digest in student_files.items()
        if "config.json" in origin_files or name.endswith(".safetensors")
    }
    origin_files = without_unread_weights(origin_files, comparable)
    differ = [name for name in {**origin_files, **comparable} if origin_files.get(name) != comparable.get(name)]
    if differ:
        raise RunDirError.at(
            "student.model",
            found=f"another student than that of {origin.paths.root}: {', '.join(differ)}",
            wanted="the student that the origin began with: the checkpoint holds what became of it",
            fix=f"set student.model to the origin's, which {origin.paths.pipeline} names",
        )
