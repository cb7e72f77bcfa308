"""Train the experts of one spec: a base, then one fine-tuned model per expert, one after the other in this process.

    ExpertsSpec ─ _check ─→ lines, records ─ _train_base ─→ OUTPUT_DIR/base ─ _train_expert ─→ OUTPUT_DIR/NAME ─→ registry
                 (all input, before any compute)          (or base.model)     (each whole or not there)

A finished directory says in `training.json` how it was made; the same spec skips it, so an interrupted run goes on.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.episodes.rows import EpisodeRow, has_episodes, read_episodes
from experts.model_dir import inspect_model
from experts.registry import RECORD, Registry, training_record
from experts.spec import BASE, BaseSpec, ExpertsSpec, FromBase, FromScratch, LoraSettings, TrainSettings
from opd.errors import ConfigError, ModelError, PromptError, RegistryError
from opd.files import atomic_write_text, replace_dir
from opd.machine.processor import slow_bf16_warnings
from opd.prompts import PromptLine, find_source, load_tokenizer, read_prompt_lines
from opd.prompts.chat_templates import refuse_runaway_template
from opd.prompts.encode import ids_in_front

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from experts.sft import Example, TrainingRow

RESULT = "result"
"""Key of a record with the training's result. It is for people, and is ignored when records are compared."""
IN_FRONT = "ids_in_front"
"""Key of a record with the ids in front of plain prompts; left out if there are none."""
Progress = Callable[[str], None]
TrainingRecord = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One model directory to make."""

    name: str
    directory: Path
    lines: tuple[PromptLine | EpisodeRow, ...]
    train: TrainSettings | None
    """None for a base that keeps its random weights."""
    record: TrainingRecord
    """Everything that decides the weights, as `training.json` stores it."""
    is_users: bool = False
    """True for an existing base of the user's, which is not made here."""

    @property
    def is_finished(self) -> bool:
        return self.directory.exists()

    @property
    def has_prompts(self) -> bool:
        """True if a merge can read the lines. Conversations without a prompt column are for training only."""
        return all(isinstance(line, PromptLine) or line.asks for line in self.lines)


def train_experts(spec: ExpertsSpec, progress: Progress) -> list[Path]:
    """Train the models that are not finished yet; returns the experts' directories in the order of the spec.

    `progress` gets one line per tenth of a run: name, step, loss, elapsed time.
    Raises, before any training: PromptError (data, every row of it), ModelError (base), RegistryError (a name taken by another model),
    ConfigError (a directory made by another spec, LoRA modules that the base does not have).
    """
    base_job = build_base_job(spec)
    jobs = _expert_jobs(spec, base_job.record)
    registry = Registry(spec.registry) if spec.registry else None
    for job in [base_job, *jobs]:
        check_unclaimed(job, registry)
    _check_rows(spec, [base_job, *jobs])
    if spec.method == "lora" and not all(job.is_finished for job in jobs):
        add_adapters(_build_meta_model(spec.base), spec.lora)
    for line in _slow_types([base_job, *jobs]):
        progress(f"warning: {line}")
    make_base(spec, base_job, progress)
    for job in jobs:
        _make_expert(spec, job, spec.base_dir, progress)
        if registry:
            expert = spec.experts[job.name]
            register_expert(registry, job, expert.domain, expert.data if job.has_prompts else None)
    return [job.directory for job in jobs]


def _slow_types(jobs: Sequence[TrainingJob]) -> list[str]:
    """Return a warning if models are still to be trained in bfloat16 on cores that have no instructions for it."""
    bf16_keys = [f"{job.name}: train.bf16" for job in jobs if job.train and job.train.bf16 and not job.is_finished]
    warnings = slow_bf16_warnings(bf16_keys)
    if warnings:
        import torch  # here: a spec of which all is finished does not wait for it

        warnings = [] if torch.cuda.is_available() else warnings
    return warnings


def build_base_job(spec: FromBase) -> TrainingJob:
    """Return the base that the experts start from: one to make, or one that is there. Raises: PromptError, ModelError."""
    origin: TrainingRecord = {"weights": inspect_model(spec.base.model).weight_files} if spec.base.model else {}
    origin |= spec.base.template_reading
    if spec.base.existing_model:
        return TrainingJob(
            name=BASE, directory=spec.base.existing_model, lines=(), train=None, record=origin, is_users=True
        )
    lines, hashes = _read_lines(spec.base.data)
    how = spec.base.model_dump(mode="json", include={"from_scratch", "train"})
    how |= {"chat_template_kwargs": spec.chat_template_kwargs} if spec.chat_template_kwargs else {}
    record = {**origin, "seed": spec.seed, "data": hashes, **how}
    return TrainingJob(name=BASE, directory=spec.base_dir, lines=lines, train=spec.base.train, record=record)


def _expert_jobs(spec: ExpertsSpec, base: TrainingRecord) -> list[TrainingJob]:
    jobs = []
    for name, expert in spec.experts.items():
        lines, hashes = _read_lines([expert.data])
        record = {
            "base": base,
            "seed": spec.seed,
            "data": hashes,
            "method": spec.method,
            "train": expert.train.model_dump(mode="json"),
        }
        if spec.method == "lora":
            record["lora"] = spec.lora.model_dump(mode="json")
        if spec.chat_template_kwargs:
            record["chat_template_kwargs"] = spec.chat_template_kwargs
        jobs.append(
            TrainingJob(name=name, directory=spec.output_dir / name, lines=lines, train=expert.train, record=record)
        )
    return jobs


def _read_lines(paths: Sequence[Path]) -> tuple[tuple[PromptLine | EpisodeRow, ...], list[str]]:
    """Return all lines and the files' hashes. Raises: PromptError, also for a row without anything to learn."""
    lines = [line for path in paths for line in (read_episodes if has_episodes(path) else _read_completions)(path)]
    return tuple(lines), [find_source(path).content_hash() for path in paths]


def _read_completions(path: Path) -> list[PromptLine]:
    lines = read_prompt_lines(path)
    for number, line in enumerate(lines, start=1):
        if not line.prompt:
            raise PromptError.at(
                f"{path}, row {number}: prompt",
                found=f"{line.prompt!r}",
                wanted="text or messages that the completion follows: without them its first token has no prediction",
                fix="delete this row, or move the beginning of its completion into the prompt",
            )
        if line.completion is None or isinstance(line.prompt, str) != isinstance(line.completion, str):
            raise PromptError.at(
                f"{path}, row {number}: completion",
                found=f"{line.completion!r:.60}",
                wanted="text after a text prompt, chat messages after chat messages; or `messages`, a whole episode",
                fix="add the column: it is what the expert learns to answer",
            )
    return lines


def check_unclaimed(job: TrainingJob, registry: Registry | None) -> None:
    """Refuse a directory or a name that another spec or model has. Raises: ConfigError, RegistryError."""
    if job.is_users:
        return
    if job.is_finished and read_origin(job.directory) != job.record:
        raise ConfigError.at(
            job.directory,
            found="a directory that this spec, with these settings and data, did not make",
            wanted="a new directory, or the result of the same training",
            fix="remove it to train it again, or choose another output_dir",
        )
    if registry and job.name in registry.names() and registry.get(job.name).model != str(job.directory.resolve()):
        raise RegistryError.at(
            f"expert `{job.name}`",
            found=f"the name of {registry.get(job.name).model}",
            wanted=f"a name that is free, or that of {job.directory}",
            fix=f"`opd experts remove {job.name}`, or rename the expert in the spec",
        )


def _check_rows(spec: ExpertsSpec, jobs: Sequence[TrainingJob]) -> None:
    """Encode all rows that are still to be learned, and drop the result. So a row that cannot be learned is refused before any
    model is trained. Raises: PromptError, ModelError."""
    todo = [(job.name, job.lines, job.train) for job in jobs if job.train and not job.is_finished]
    if todo:
        tokenizer, ends = _load_row_tokenizer(spec)
        _refuse_other_beginnings(jobs, ids_in_front(tokenizer))
        for name, lines, train in todo:
            try:
                _encode_rows(spec, tokenizer, lines, train.max_length, ends)
            except (PromptError, ModelError) as error:
                raise type(error)(f"{name}: {error}") from None


def _refuse_other_beginnings(jobs: Sequence[TrainingJob], ids_before: list[int]) -> None:
    """Refuse to train beside experts whose plain prompts began otherwise: those of an earlier release, or of another
    `add_special_tokens`. Raises: ConfigError."""
    for job in jobs:
        plain = any(isinstance(line.prompt, str) for line in job.lines)
        recorded = (training_record(job.directory) or {}).get(IN_FRONT, []) if job.is_finished and plain else ids_before
        if recorded != ids_before:
            raise ConfigError.at(
                f"{job.directory / RECORD}: {IN_FRONT}",
                found=f"{recorded} in front of the prompts that `{job.name}` learned",
                wanted=f"{ids_before}, as the tokenizer of the base puts them there",
                fix=f"set add_special_tokens: {str(bool(recorded)).lower()} to go on as it began, or remove the directory to train "
                "it again",
            )


def _load_row_tokenizer(spec: FromBase) -> tuple[PreTrainedTokenizerBase, Sequence[int]]:
    """Return the tokenizer that encodes the rows of the base and its experts, and the ids that end a response."""
    from experts.suites.letters import build_tokenizer

    base = spec.base
    if base.model is None:
        return build_tokenizer(), ()
    tokenizer = load_tokenizer(base.model, spec.add_special_tokens)
    refuse_runaway_template(tokenizer, base.model)
    return tokenizer, inspect_model(base.model, hash_weights=False).eos_token_ids


def read_origin(directory: Path) -> TrainingRecord | None:
    """Return the part of a model's training record that decides its weights; None if there is no record."""
    record = training_record(directory)
    return None if record is None else {key: value for key, value in record.items() if key not in (RESULT, IN_FRONT)}


def make_base(spec: FromBase, job: TrainingJob, progress: Progress) -> None:
    """Make the base, unless it is finished already."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own lines take its place, here and for the experts
    if job.is_users:
        return
    if job.is_finished:
        progress(f"{job.name}: finished before, kept")
        return
    from transformers import set_seed

    set_seed(spec.training_seed)  # first: a base from scratch draws its weights
    model, tokenizer, stored = _load_start(spec.base)
    front: list[int] = []
    if job.train:
        reader, _ = _load_row_tokenizer(spec)
        front = ids_in_front(reader)
        _fit_model(spec, model, reader, job, job.train, progress)
    _save_model(model.to(stored), tokenizer, job, front)


def _load_start(base: BaseSpec) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """Return the model that the base's own training starts from, and the type in which it is stored."""
    if base.from_scratch is None:
        assert base.model is not None, "the spec has one of the two"
        return _load_base(base.model)
    model, tokenizer = _new_model(base.from_scratch)
    return model, tokenizer, model.dtype


def _build_meta_model(base: BaseSpec) -> PreTrainedModel:
    """Return the base's modules on the meta device."""
    import torch

    from opd.models.weights import Naming, load_config

    if base.model:
        model: PreTrainedModel = Naming(load_config(base.model), torch.float32).model
        return model
    assert base.from_scratch is not None, "the spec has one of the two"
    with torch.device("meta"):
        return _new_model(base.from_scratch)[0]


def _load_base(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """Return a model in float32, in which it is trained, its tokenizer, and the type in which it is stored."""
    import torch

    from opd.models.weights import load_causal_lm

    stored = getattr(torch, inspect_model(directory, hash_weights=False).dtype)
    return load_causal_lm(directory, torch.float32), load_tokenizer(directory), stored


def _make_expert(spec: ExpertsSpec, job: TrainingJob, base: Path, progress: Progress) -> None:
    if job.is_finished:
        progress(f"{job.name}: finished before, kept")
        return
    from transformers import set_seed

    assert job.train is not None
    set_seed(spec.training_seed)
    model, tokenizer, stored = _load_base(base)
    reader = load_tokenizer(base, spec.add_special_tokens)
    if spec.method == "lora":
        adapted = add_adapters(model, spec.lora)
        _fit_model(spec, adapted, reader, job, job.train, progress)
        model = adapted.merge_and_unload()
    else:
        _fit_model(spec, model, reader, job, job.train, progress)
    _save_model(model.to(stored), tokenizer, job, ids_in_front(reader))


def add_adapters(model: PreTrainedModel, lora: LoraSettings) -> PeftModel:
    """Return the model with new adapters. Raises: ConfigError if `target_modules` names modules that it does not have."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
    try:
        adapted: PeftModel = get_peft_model(model, config)
    except (ValueError, re.error) as error:  # re.error, because PEFT takes a text for a regular expression
        raise _no_modules_error(model, lora.target_modules, str(error)) from None
    return adapted


def _no_modules_error(model: PreTrainedModel, targets: str | list[str], reason: str) -> ConfigError:
    import torch

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return ConfigError.at(
        "lora.target_modules",
        found=f"{targets!r}: {reason}",
        wanted=f"modules of the base, such as {', '.join(sorted(linear))}, or all-linear",
        fix="correct the names",
    )


def _encode_rows(
    spec: FromBase,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[TrainingRow],
    max_length: int,
    ends: Sequence[int],
) -> list[Example]:
    """Encode rows with the settings of the spec. Raises: PromptError, ModelError."""
    from experts.sft import encode_lines

    base = spec.base
    return encode_lines(
        tokenizer, lines, max_length, ends, base.template_date, base.tool_call_parser, spec.chat_template_kwargs
    )


def _fit_model(
    spec: FromBase,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    job: TrainingJob,
    train: TrainSettings,
    progress: Progress,
) -> None:
    from experts.sft import fine_tune

    examples = _encode_rows(spec, tokenizer, job.lines, train.max_length, _find_end_ids(model))
    if len(examples) < len(job.lines):
        progress(
            f"{job.name}: left out {len(job.lines) - len(examples)} of {len(job.lines)} rows, longer than max_length {train.max_length}"
        )
    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        progress(f"{job.name}: step {step}/{train.max_steps}  loss {loss:.3f}  {time.monotonic() - start:.0f} s")

    fine_tune(model, examples, train, seed=spec.training_seed, scratch=staging_directory(job), report=report)


def _find_end_ids(model: Any) -> list[int]:
    """Return the ids that end a response according to the model's files, besides its tokenizer's end token."""
    generation_ids = model.generation_config.eos_token_id
    end_ids = model.config.eos_token_id if generation_ids is None else generation_ids
    return [] if end_ids is None else [end_ids] if isinstance(end_ids, int) else list(end_ids)


def _new_model(shape: FromScratch) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from experts.suites.letters import build_tokenizer

    tokenizer = build_tokenizer()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=shape.max_position_embeddings,
        # Llama's 0.02 is for wide models: in a narrow one, attention would stay flat for the first hundred steps.
        initializer_range=shape.hidden_size**-0.5,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model, tokenizer


def staging_directory(job: TrainingJob) -> Path:
    """Return the temporary directory in which a model is written before it is renamed to its place."""
    return job.directory.with_name(f".{job.name}.tmp")


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: TrainingJob, front: list[int]) -> None:
    """Write the model's directory under another name, then rename it. `front`: ids that stood in front of its plain prompts."""
    directory = staging_directory(job)
    shutil.rmtree(directory, ignore_errors=True)  # left by a run that was interrupted
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    publish_model(directory, job, {IN_FRONT: front} if front else {})


def publish_model(directory: Path, job: TrainingJob, extra: Mapping[str, Any]) -> None:
    """Add the record to a finished model's files and rename their directory to its place.

    `extra`: further keys of the record, `RESULT` and `IN_FRONT`.
    """
    record = {**job.record, **extra}
    atomic_write_text(directory / RECORD, json.dumps(record, indent=2) + "\n")
    replace_dir(directory, job.directory)


def register_expert(registry: Registry, job: TrainingJob, domain: str, prompts: Path | None) -> None:
    """Register the expert, or renew its entry if that describes other files in the same directory."""
    if job.name in registry.names():
        if not registry.verify(job.name):
            return
        registry.remove(job.name)
    registry.add(job.name, job.directory, domain, prompts)
