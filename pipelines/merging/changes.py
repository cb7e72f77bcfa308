"""Decide whether a run may go on: compare its inputs with what was recorded, and accept or refuse the differences.

A run is bound to the bytes of its student, experts and prompts, and to every key of its pipeline that decides what is
computed. The lists below are all the keys that may be changed when a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import PipelineConfig
from opd.config.balance import SamplesBalance
from opd.config.prompts import CHAT_COLUMNS, as_prompts_config
from opd.errors import RunDirError
from opd.files import blake3_json
from opd.prompts import open_rows
from opd.prompts.table import SYSTEM, TOOLS, VARIABLES
from opd.run.checkpoints import Checkpoint
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section

if TYPE_CHECKING:
    from pipelines.inputs.read import Inputs

SAME_WEIGHTS = (
    "checkpoint.*",
    "target_log.*",
    "evaluate.every",
    "evaluate.cache",
    "monitors.*",
    "sync.*",
    "cluster.*_timeout_s",
    "cluster.max_restarts",
    "schedule.overlap",
    "schedule.max_staleness",
    "teachers.queue",
    "rollout.sleep",
    "teachers.memory",
    "teachers.gpu_memory",
    "teachers.max_quarantined",
    "teachers.address",
    "teachers.tls_root_certs",
    "teachers.token_file",
    "teachers.servers.*",
    "teachers.api_key_env",
    "teachers.server_timeout_s",
    "teachers.base_url",
    "teachers.max_calls",
    "teachers.max_cost",
    "teachers.price*",
    "trainer.head_memory",
    "trainer.activation_offloading",
    "objective.reward.timeout_s",
    "domains.*.environment.max_broken",
    "domains.*.environment.step_timeout_s",
    "domains.*.agent.max_broken",
    "domains.*.agent.timeout_s",
    "domains.*.agent.parallel",
    "domains.*.eval.verifier.base_url",
    "domains.*.eval.verifier.api_key_env",
    "domains.*.eval.verifier.server_timeout_s",
    "domains.*.eval.verifier.max_calls",
    "domains.*.eval.verifier.max_cost",
    "domains.*.eval.verifier.price*",
    "domains.*.eval.verifier.max_quarantined",
    "guard.judge.base_url",
    "guard.judge.api_key_env",
    "guard.cache",
    # Paths: the contents of these files are compared by hash.
    "student.model",
    "student.lora.export",
    "registry",
    "experts.*.model",
    "experts.*.base",
    "domains.*.prompts",
    "domains.*.prompts.path",
    "domains.*.eval.prompts",
    "domains.*.eval.prompts.path",
    "guard.rules",
    "guard.judge.model",
    "domains.*.guard.rules",
)
"""Keys that may be changed because the weights do not depend on them."""

SAME_BUT_FOR_ROUNDING = (
    "trainer.ranks",
    "trainer.micro_batch_tokens",
    "trainer.gradient_checkpointing",
    "trainer.mlp_tile_tokens",
    "trainer.compile",
    "trainer.bucket",
    "objective.chunk",
    "objective.compile",
    "objective.reward.compare_every",
    "rollout.workers",
    "rollout.max_num_seqs",
    # A cache without room for all sequences divides a batch.
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "teachers.workers",
    "teachers.kv_cache_gib",
    "teachers.gpu_memory_utilization",
    "teachers.device_map",
    "teachers.max_memory*",
    "cluster.address",
    "cluster.*_gpus",
    "cluster.placement.*",
)
"""Keys that may be changed but change the order of sums: the run goes on, but not bit for bit."""

OWN_ENGINES = ("experts.*.engine", "experts.engines.*")
"""Keys of an expert's own engine, whose keys are those of `teachers`."""

STEPS = "trainer.steps"
"""This key may be changed as long as the learning rate of a step does not depend on it."""

TEMPLATE_DATE = "student.template_date"
"""This key may be added to a run that an older release began without it."""

COLUMN_TRAITS = SYSTEM | TOOLS | VARIABLES
"""Traits of a prompt that may come from columns of their own."""

UNREAD = "null (not read)"
"""Stands for a column of prompts that the pipeline says not to read."""

Key = tuple[str, ...]
"""The keys on the way to a value. They are not joined, because names may have dots."""


def changed_keys(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[Key, tuple[Any, Any]]:
    """Return key -> (recorded, current), for every key that differs between two resolved pipelines."""
    old, new = _flatten(_spell_out_prompts(recorded)), _flatten(_spell_out_prompts(current))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def accept_changes(recorded: Mapping[str, Any], current: Mapping[str, Any], manifest: Path) -> list[str]:
    """Return sentences about changes that are allowed. Raises: RunDirError with a table of those that are not."""
    # To validate both adds the defaults of keys that are newer than the release that began the run.
    recorded, current = (
        validate_section(PipelineConfig, pipeline, manifest).model_dump(mode="json") for pipeline in (recorded, current)
    )
    changes = changed_keys(recorded, current)
    constant = recorded["trainer"]["lr_scheduler_type"] == "constant"
    free = [key for key in changes if matches_pattern(key, (*SAME_WEIGHTS, *([STEPS] if constant else ())))]
    free += [key for key, (old, _) in changes.items() if matches_pattern(key, [TEMPLATE_DATE]) and old is None]
    rounding = [key for key in changes if matches_pattern(key, SAME_BUT_FOR_ROUNDING)]
    refused = {dotted_key(key): change for key, change in changes.items() if key not in (*free, *rounding)}
    if refused:
        steps = [f"{STEPS} (only with a constant learning rate)"] if STEPS in refused else []
        raise RunDirError.at(
            RunPaths(manifest.parent).pipeline,
            found=f"keys that differ from those the run began with\n{_change_table(refused)}",
            wanted="these keys as they were; "
            + ", ".join([*steps, "checkpoint.*, evaluate.every, cluster.*"])
            + ", trainer.ranks and what else docs/resume.md lists may change",
            fix="put them back, or start a new run in another directory",
        )
    accepted = {dotted_key(key): changes[key] for key in (*free, *rounding)}
    notices = [f"{key}: {_format_value(old)} before, {_format_value(new)} now" for key, (old, new) in accepted.items()]
    if rounding:
        keys = ", ".join(map(dotted_key, rounding))
        notices.append(f"not bit for bit from here: {keys} changed, which changes the order of sums")
    return notices


def refused_keys(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ and decide what is computed, `trainer.steps` and `student.template_date` among them."""
    free = (*SAME_WEIGHTS, *SAME_BUT_FOR_ROUNDING)
    return [dotted_key(key) for key in changed_keys(recorded, current) if not matches_pattern(key, free)]


def run_identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run, which its checkpoints carry: hashes of the student, the experts and the keys that may not
    change.

    It is made once, when the run begins: a later release may know more keys, and would make another hash of the same pipeline.
    """
    free = (*SAME_WEIGHTS, *SAME_BUT_FOR_ROUNDING, STEPS)
    fixed_keys = {
        dotted_key(key): value for key, value in _flatten(manifest["config"]).items() if not matches_pattern(key, free)
    }
    return {
        "config": blake3_json(fixed_keys),
        "student": blake3_json(manifest["student"]),
        "experts": {name: blake3_json(facts) for name, facts in manifest["experts"].items()},
    }


def refuse_foreign(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run. Raises: RunDirError naming what differs between the two."""
    recorded = checkpoint.identity
    experts = {name: identity["experts"].get(name) == digest for name, digest in recorded.get("experts", {}).items()}
    differences = [key for key in ("config", "student") if recorded.get(key) != identity[key]]
    differences += [f"expert {name}" for name, is_same in experts.items() if not is_same]
    differences += [f"expert {name}" for name in identity["experts"] if name not in experts]
    if differences:
        raise RunDirError.at(
            checkpoint.path,
            found=f"a checkpoint of another run: {', '.join(differences)} differ",
            wanted="one that this run wrote",
            fix="take it out of the run directory, or name another with --resume-from",
        )


def refuse_lost_records(config: PipelineConfig, paths: RunPaths, step: int) -> None:
    """Refuse to go on from `step` with balanced prompts, which follow from the records of all steps before, if some of these
    are gone. Raises: RunDirError."""
    if isinstance(config.balance, SamplesBalance):
        return
    try:
        steps = [record.step for record in MetricsFile(paths.metrics).read()]
        description = f"records of {len(steps)} steps, and a checkpoint of step {step}"
    except (ValueError, TypeError) as error:
        steps, description = [], f"a line that is no record: {error}"
    if steps[:step] != list(range(1, step + 1)):
        raise RunDirError.at(
            paths.metrics,
            found=description,
            wanted=f"a record of each of the steps 1 to {step}: with balance {config.balance.kind} they decide the next prompts",
            fix="put the file back, or start a new run",
        )


def refuse_changed_inputs(recorded: Mapping[str, Any], current: Mapping[str, Any], manifest: Path) -> None:
    """Refuse to go on with other files than the run began with. Raises: RunDirError naming the student, experts or domains."""
    if warn_unrecorded(recorded):
        current = _weights_only(current)  # no more was recorded to compare with
    for part in ("student", "experts", "prompts", "guard", "teacher_templates"):
        old, new = recorded.get(part, {}), current.get(part, {})
        if part == "prompts":  # keyed by absolute path, but files may have moved
            old, new = ({name: list(files.values()) for name, files in side.items()} for side in (old, new))
        old = without_unread_weights(old, new)
        if old != new:
            names = [_name_change(k, old, new) for k in {**old, **new} if old.get(k) != new.get(k)]
            raise RunDirError.at(
                manifest,
                found=f"{part.replace('_', ' ')} changed since the run began: {', '.join(names)}",
                wanted="the same files",
                fix="put them back, or start a new run",
            )


def without_unread_weights(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded hashes without those of safetensors beside a model's own, which older releases recorded too."""
    unread: set[str] = set()
    if any(name.endswith(".safetensors") for name in current):
        unread = {name for name in recorded.keys() - current.keys() if name.endswith(".safetensors")}
    return {
        name: without_unread_weights(facts, current[name])
        if isinstance(facts, Mapping) and isinstance(current.get(name), Mapping)
        else facts
        for name, facts in recorded.items()
        if name not in unread
    }


def refuse_columns_of_registered_prompts(
    recorded: Mapping[str, Any], config: PipelineConfig, inputs: Inputs, manifest: Path
) -> None:
    """Refuse a run that an older release began on prompts of the registry, if that release did not read a column that is read now.

    For prompts that the pipeline itself names, `opd.config.as_begun` adds to it which columns are not read. Raises: RunDirError.
    """
    if "chat_template_kwargs" in recorded["config"]["student"]:
        return  # this key came with the release that reads these columns
    for name, domain in config.domains.items():
        source = inputs.registered_prompts(name)
        if domain.prompts is not None or source is None or not inputs.prompts[name].with_trait(COLUMN_TRAITS).any():
            continue
        columns = ("system",) if domain.has_episodes else CHAT_COLUMNS
        passed_over = open_rows(as_prompts_config(source).without_columns(*columns)).unread
        if read := [column for column in columns if column in passed_over]:
            raise RunDirError.at(
                manifest,
                found=f"domains.{name}: the registry's {source} has columns that the release which began this run passed over: "
                + ", ".join(read),
                wanted="the prompts that the run began with",
                fix="resume with that release, or start a new run",
            )


def warn_unrecorded(recorded: Mapping[str, Any]) -> list[str]:
    """Return a warning about a run that an older release began, with hashes of weights only.

    Such a run goes on: nothing is known to be wrong with it, and a refusal would lose its steps. The new manifest records the hashes
    of all files as they are now, so that later resumes compare with these. Empty for any other run.
    """
    if "config.json" in recorded["student"]:
        return []
    return [
        "this run was begun by a release that recorded hashes of weights only: whether config.json, tokenizer, chat template "
        "or generation_config.json of the student, or an expert's config.json, were edited since is not known; they are "
        "recorded now, and may not change from here"
    ]


def changed_rules(recorded: Mapping[str, Any], config: PipelineConfig) -> list[str]:
    """Return a warning about a run that an older release began, if this release takes its next steps differently."""
    rules = other_rules(recorded, config)
    if not rules:
        return []
    return [
        f"this run was begun by a release that decided otherwise {'; '.join(rules)}: from here it is decided as in a run that begins "
        "now, so the weights become others than that release would have made"
    ]


def other_rules(recorded: Mapping[str, Any], config: PipelineConfig) -> list[str]:
    """Return what the release that began a run decided otherwise, as far as it matters to its pipeline."""
    return list(_rules_of_format_3(config)) if recorded["format"] < 4 else []


def _rules_of_format_3(config: PipelineConfig) -> Iterator[str]:
    """Yield the rules that releases of format 3 decided otherwise, as far as they matter to this pipeline."""
    prompts = config.trainer.samples_per_step // config.rollout.n
    by_samples = isinstance(config.balance, SamplesBalance)
    if not by_samples or len(set(config.domain_weights.values())) > 1 or prompts % len(config.domains):
        yield "how many prompts of each domain a step has"
    if config.trainer.lr_scheduler_type != "constant" and not config.trainer.min_lr_ratio:
        yield "how fast the learning rate falls to 0"
    objective = config.objective
    if objective.weighting != "token_mean" and any(domain.has_episodes for domain in config.domains.values()):
        yield "how much an episode of several segments weighs"
    if config.rollout.temperature != 1 and (objective.reward is not None or objective.kind == "sampled"):
        yield "which tokens are too old to be trained"
    if objective.has_critic and objective.HAS_DIVERGENCE:
        yield "whether to train on the divergence while the critic learns alone"


def _weights_only(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest without the hashes that releases of format 2 did not record: files other than weights."""
    student = {name: digest for name, digest in manifest["student"].items() if name.endswith(".safetensors")}
    experts = {
        name: {key: value for key, value in facts.items() if key != "config"}
        for name, facts in manifest["experts"].items()
    }
    return {**manifest, "student": student, "experts": experts}


def _name_change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Name what has changed: a file of the student, a domain, or an expert with its files that differ."""
    sides = [_flatten(side[name]) for side in (old, new) if isinstance(side.get(name), Mapping)]
    if len(sides) < 2:
        return name
    old_facts, new_facts = sides
    differing = [key for key in {**old_facts, **new_facts} if old_facts.get(key) != new_facts.get(key)]
    # A file's key is (kind, name); an expert's `domains` is the one key without a second part.
    return f"{name} ({', '.join(dict.fromkeys(dotted_key(key[1:]) or 'domains' for key in differing))})"


def version_warnings(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return one sentence for each library that is not the one the run began with."""
    return [
        f"{name} {recorded.get(name, 'was absent')} when the run began, {current.get(name, 'absent')} now: "
        "the weights may differ in their last bits"
        for name in {**recorded, **current}
        if recorded.get(name) != current.get(name)
    ]


def matches_pattern(key: Key, patterns: Iterable[str]) -> bool:
    """Return True if one of the patterns matches the key: part by part between the dots. A `*` at its end matches further parts too."""
    return any(_fits_pattern(spelling, key) for pattern in patterns for spelling in _spell_pattern(pattern))


def _spell_pattern(pattern: str) -> Iterator[str]:
    """Yield the pattern, and for a key of `teachers` those of the same key of an expert's own engine."""
    yield pattern
    section, _, key = pattern.partition(".")
    if section == "teachers":
        yield from (f"{engine}.{key}" for engine in OWN_ENGINES)


def _fits_pattern(pattern: str, key: Key) -> bool:
    parts = pattern.split(".")
    alike = all(fnmatchcase(name, part) for name, part in zip(key, parts, strict=False))
    return alike and (len(key) == len(parts) or (len(key) > len(parts) and pattern.endswith("*")))


def dotted_key(key: Key) -> str:
    """Return the key as people write it."""
    return ".".join(key)


def _flatten(data: Mapping[str, Any], above: Key = ()) -> dict[Key, Any]:
    """Flatten nested mappings; an empty mapping counts as no key."""
    flat: dict[Key, Any] = {}
    for name, value in data.items():
        key = (*above, str(name))
        flat |= _flatten(value, key) if isinstance(value, Mapping) else {key: value}
    return flat


def _spell_out_prompts(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pipeline with each path to prompts as the mapping that it is short for: both mean the same."""
    domains = {}
    for name, domain in pipeline.get("domains", {}).items():
        exam = domain.get("eval")
        exam = exam and {**exam, "prompts": _prompts_mapping(exam.get("prompts"))}
        domains[name] = {**domain, "prompts": _prompts_mapping(domain.get("prompts")), "eval": exam}
    return {**pipeline, "domains": domains}


def _prompts_mapping(prompts: Any) -> Any:
    prompts_config = as_prompts_config(Path(prompts)).model_dump(mode="json") if isinstance(prompts, str) else prompts
    if not isinstance(prompts_config, Mapping):
        return prompts_config
    # None says not to read a column. Without a text for it, that would equal a column that is not mentioned and keeps its name.
    columns = {
        column: UNREAD if name is None else name for column, name in (prompts_config.get("columns") or {}).items()
    }
    return {**prompts_config, "columns": columns}


def _format_value(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _change_table(changes: Mapping[str, tuple[Any, Any]]) -> str:
    rows = [
        ("key", "the run", "now"),
        *((key, _format_value(old), _format_value(new)) for key, (old, new) in changes.items()),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
