"""Read and check everything that a merge needs, before any compute: models, vocabularies, domains, prompts.

This reads headers, JSON and prompts. It loads no model and uses no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from experts.adapter import AdapterInfo, inspect_expert
from experts.bound_files import model_digest
from experts.model_dir import ModelInfo, inspect_model, refuse_other_tokens
from experts.registry import ExpertManifest, Registry, default_root
from experts.teacher_check import check_fits
from experts.weight_files import Hashes
from experts.weight_values import check_finite
from opd.config import PipelineConfig
from opd.config.domains import STUDENT, ExpertConfig, RegisteredExperts
from opd.config.evaluate import EvaluateConfig
from opd.config.expert_engines import name_student_key
from opd.config.teachers import FlightTeachers, NoTeachers
from opd.errors import ConfigError, ModelError, PromptError
from opd.evaluation.evaluator import DomainExam
from opd.evaluation.harness import check_tasks
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.machine.processor import slow_bf16_warnings
from opd.models.lora import ADAPTER_WEIGHTS
from opd.prompts import PromptTable, encode
from opd.prompts.chat_templates import refuse_runaway_template
from opd.records.types import Probe, Teacher, WeightedTeacher
from opd.settings.user_objects import is_import_name
from opd.sinks import refuse_missing
from pipelines.inputs.architectures import (
    refuse_engine_args,
    refuse_unmeasurable,
    refuse_unscorable,
    refuse_untrainable,
)
from pipelines.inputs.base_experts import refuse_other_bases
from pipelines.inputs.drift import check_drift
from pipelines.inputs.environments import check_environments, refuse_other_tasks
from pipelines.inputs.indexers import warn_of_short_context
from pipelines.inputs.judges import refuse_many_judgements
from pipelines.inputs.lora import size_of_lora
from pipelines.inputs.own_tokens import build_encoders, reads_own_tokens, refuse_unfit_tokens
from pipelines.inputs.prompts import (
    example_ids,
    find_prompts,
    load_exams,
    load_own_exams,
    load_training,
    refuse_equal_efforts,
    refuse_leaks,
    refuse_unread_variables,
    refuse_unrewardable,
    room_warnings,
)
from pipelines.inputs.teacher_prompts import (
    add_teacher_prompts,
    load_teacher_tokenizers,
    refuse_unfit_prompts,
    with_teacher_columns,
)
from pipelines.inputs.template_date import set_template_date
from pipelines.inputs.text_teachers import refuse_unaskable, refuse_unfit_texts
from pipelines.inputs.transformers_engine import TRANSFORMERS_ENGINE, refuse_beyond_transformers
from pipelines.inputs.user_engine import refuse_unfit, refuse_unplaced
from pipelines.routes import START, RoutedExpert, preferred_domains, route_domains, scoring_routes
from pipelines.sizing.cache import refuse_small_cache
from pipelines.sizing.gpu_memory import refuse_idle_gpus
from pipelines.sizing.memory import refuse_no_room
from pipelines.sizing.models import MergeModels, divide_models, refuse_past_context
from teachers.flight.access import read_root_certs, read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching(MergeModels):
    """The checked assignment of teachers to domains: the part of `Inputs` that needs no prompts."""

    routes: dict[str, tuple[WeightedTeacher, ...]]
    """Domain -> its experts, the heaviest first; their weights add up to 1. `scoring` differs from it only for domains whose target
    lies beyond the experts."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Teaching):
    """The inputs of a merge, checked."""

    exams: dict[str, DomainExam]
    expert_exams: dict[str, DomainExam]
    """Exams of the domains whose experts are asked otherwise than the student: without the tag of the effort."""
    own_tokenizers: dict[str, Any]
    """Expert -> its tokenizer, of those that read tokens of their own."""
    own_exams: dict[str, DomainExam]
    """Domain -> the same questions as in `exams` in tokens of its leading teacher's own; other domains are left out."""
    untrained: dict[str, frozenset[int]]
    """Domain -> token ids that one of its teachers never writes."""
    tokenizer: Any
    template_date: date | None = None
    """The day that the chat template writes into prompts; None if the student's template asks for no date."""

    @property
    def teachers(self) -> dict[str, Teacher]:
        """Domain -> the teacher with the largest weight, with which the student is compared; empty without teachers."""
        return {domain: assigned[0].teacher for domain, assigned in self.routes.items()}

    @property
    def every_exam(self) -> tuple[dict[str, DomainExam], ...]:
        """All exams, as the student, experts without tags and experts with tokens of their own take them."""
        return self.exams, self.expert_exams, self.own_exams

    def registered_prompts(self, domain: str) -> Path | None:
        """Return the prompts that the domain's leading expert was registered with; None if there are none."""
        return _registered_prompts(self.experts, self.routes, domain)


def read_teachers(config: PipelineConfig) -> Teaching:
    """Read and check student and experts. Raises: OpdError for the first thing that is wrong."""
    student = inspect_student(config)
    by_name = _read_experts(config, student)
    _refuse_broken_weights(student, by_name, config)
    warnings = _warn_of_twins(by_name, config)
    for name, expert in by_name.items():
        warnings += check_fits(student, expert.info, name, own_tokens=reads_own_tokens(config, name))
    taught = not isinstance(config.teachers, NoTeachers)
    routes, notices = route_domains(config, by_name) if taught else ({}, [])
    start = RoutedExpert(teacher=as_teacher(START, student, None), domain="", info=student, prompts=None)
    refuse_other_bases(config, by_name, start.teacher.digest)
    scoring = scoring_routes(config, routes, start.teacher)
    everyone = by_name | {START: start}
    scorers = {a.teacher.name: everyone[a.teacher.name] for assigned in scoring.values() for a in assigned}
    import_lightly(TRANSFORMERS)  # not earlier, so that the refusals above come without the seconds of this import
    refuse_unfit_prompts(config, scorers, scoring)
    refuse_unfit_tokens(config, scoring)
    refuse_unfit_texts(config, routes)
    teaching = Teaching(
        student=student, scorers=scorers, routes=routes, scoring=scoring, warnings=(*warnings, *notices)
    )
    for group_config, models in divide_models(config, teaching):
        refuse_unscorable(group_config, models.scorers)
        refuse_no_room(group_config, models.scorers)
    return teaching


def refuse_what_is_not_here(config: PipelineConfig) -> None:
    """Refuse a pipeline for which something is missing on this machine. Raises: ConfigError.

    That may be the user's engine, one of its methods or a way to its workers, the package of a sink, or the token or
    certificate of a server. GPUs that would be reserved for no role are refused too.
    """
    refuse_idle_gpus(config)
    if is_import_name(config.rollout.engine):
        refuse_unfit(config)
        refuse_unplaced(config)
    elif config.rollout.engine == TRANSFORMERS_ENGINE:
        refuse_beyond_transformers(config)
    else:
        refuse_engine_args(config)
    refuse_missing(config.logging)
    for section in config.engines:
        if isinstance(section, FlightTeachers):
            read_token(section.token_file)
            read_root_certs(section.tls_root_certs)


def read_inputs(config: PipelineConfig, exam: EvaluateConfig | None = None) -> Inputs:
    """Read and check everything that a pipeline names; `exam` replaces its section `evaluate`.

    Raises: OpdError (a ValueError) for the first thing that is wrong.
    """
    exam = exam or config.evaluate
    refuse_what_is_not_here(config)
    teaching = read_teachers(config)
    by_name, routes = teaching.scorers, teaching.routes
    refuse_untrainable(config, teaching.student)
    refuse_small_cache(config, teaching)
    lora = size_of_lora(config, teaching.student)
    leading = {domain: by_name[assigned[0].teacher.name] for domain, assigned in routes.items()}
    refuse_unmeasurable(
        config, {d: own for d, own in leading.items() if not reads_own_tokens(config, own.teacher.name)}
    )
    tokenizer = load_tokenizer(config.student.model, config.student.puts_in_front)
    refuse_unread_variables(config, tokenizer)
    own_tokenizers = {
        name: load_tokenizer(Path(expert.info.path))
        for name, expert in by_name.items()
        if reads_own_tokens(config, name)
    }
    encoders = build_encoders(teaching.student, tokenizer, own_tokenizers, by_name)
    teacher_tokenizers = load_teacher_tokenizers(config, tokenizer, own_tokenizers)
    config = set_template_date(config, tokenizer, *teacher_tokenizers.values())
    sources = {d: find_prompts(d, c, _registered_prompts(by_name, routes, d)) for d, c in config.domains.items()}
    sources = with_teacher_columns(config, routes, sources)
    notices = [*_warn_of_slow_types(config), *warn_of_short_context(config)]
    every = load_training(config, sources, tokenizer, notices.append)
    refuse_equal_efforts(config, every)
    exams = load_exams(config, tokenizer, tell=notices.append, samples=exam.samples, sources=sources)
    own_exams: dict[str, DomainExam] = {}
    for domain, name in ((domain, own.teacher.name) for domain, own in leading.items() if domain in exams):
        if name in own_tokenizers and name not in config.teacher_prompts:  # see `StartingExams.measure_exams`
            own_exams |= load_own_exams(config, teacher_tokenizers[name], {domain: exams[domain]}, sources)
    refuse_leaks(exams, every)
    check_tasks(exam.lm_eval)
    notices += [notice for table in every.values() for notice in _empty_prompt_warnings(table)]
    prompts = {domain: table.select_prompts(table.lengths > 0) for domain, table in every.items()}
    _refuse_all_too_long(prompts, config.rollout.max_model_len)
    check_environments(config, prompts, tokenizer, teaching.student.eos_token_ids)
    refuse_other_tasks(config, prompts, exams)
    refuse_unrewardable(config, prompts, exams, preferred_domains(config, routes))
    refuse_unaskable(config, routes, prompts)
    refuse_many_judgements(config, exams)
    check_drift(config, routes, prompts)
    return Inputs(
        student=teaching.student,
        scorers=by_name,
        routes=routes,
        scoring=add_teacher_prompts(
            config,
            teacher_tokenizers,
            encoders,
            tokenizer,
            prompts,
            teaching.scoring,
            teaching.student.eos_token_ids,
            notices.append,
        ),
        prompts=prompts,
        exams=exams,
        expert_exams=load_exams(
            config, tokenizer, _select_untagged(config, routes), samples=exam.samples, sources=sources, effort=False
        ),
        own_tokenizers={name: teacher_tokenizers[name] for name in own_tokenizers},
        own_exams=own_exams,
        untrained=_untrained_tokens(config, teaching.routes, tokenizer),
        tokenizer=tokenizer,
        lora=lora,
        template_date=config.student.template_date,
        warnings=(*teaching.warnings, *notices, *room_warnings(exams, config.rollout.max_model_len)),
    )


def read_rounds(configs: Sequence[PipelineConfig]) -> list[Inputs]:
    """Return the inputs of every round, read with the first student. That is enough, because a merge changes nothing that is
    checked. Raises: OpdError."""
    inputs_by_key: dict[str, Inputs] = {}
    keys = [config.model_dump_json(exclude={"seed"}) for config in configs]  # the seed does not change what is checked
    for key, config in zip(keys, configs, strict=True):
        if key not in inputs_by_key:
            inputs_by_key[key] = read_inputs(config)
    return [inputs_by_key[key] for key in keys]


def refuse_without_experts(config: PipelineConfig, command: str) -> None:
    """Refuse a pipeline without teachers for a command that needs some. Raises: ConfigError."""
    if isinstance(config.teachers, NoTeachers):
        raise ConfigError.at(
            "teachers.engine",
            found="none",
            wanted=f"experts: {command} needs some",
            fix="take a merge; `opd report` and `opd evaluate` show what a run without teachers has learned",
        )


def inspect_student(config: PipelineConfig, hash_weights: bool = True) -> ModelInfo:
    """Return the student's facts. Raises: ModelError; ConfigError if the rollout context is longer than the model's."""
    student = inspect_model(config.student.model, hash_weights)
    refuse_past_context(config, student)
    return student


def load_tokenizer(model_dir: Path, add_special_tokens: bool = True) -> Any:
    """Return the tokenizer of a model directory, loaded by `opd.prompts.load_tokenizer` and checked.

    Raises: ModelError if its ids are not those of tokenizer.json, or if its chat template takes too much time or memory.
    """
    tokenizer = encode.load_tokenizer(model_dir, add_special_tokens)
    refuse_other_tokens(model_dir, tokenizer)
    refuse_runaway_template(tokenizer, model_dir)
    return tokenizer


def _read_experts(config: PipelineConfig, student: ModelInfo) -> dict[str, RoutedExpert]:
    hashes: Hashes = {}  # shared, because adapters may have the same base, and hashing a base takes long
    inline = {
        name: _read_inline_expert(name, expert, student, hashes) for name, expert in config.inline_experts.items()
    }
    if not isinstance(config.experts, RegisteredExperts):
        return inline
    registry = Registry(config.registry or default_root())
    names = names_in_use(config.experts, registry)
    for name in inline.keys() & names:
        raise ConfigError.at(
            "experts.use",
            found=f"an expert called `{name}`, which is the student in {name_student_key(config, name)}",
            wanted="another name in the registry",
            fix=f"add it again under another name, and `opd experts remove {name}`",
        )
    return {name: _read_registered_expert(registry, name, hashes) for name in names} | inline


def _read_inline_expert(name: str, expert: ExpertConfig, student: ModelInfo, hashes: Hashes) -> RoutedExpert:
    info, adapter = inspect_expert(expert.own_dir, expert.base, hashes) if expert.own_dir else (student, None)
    teacher = replace(as_teacher(name, info, adapter), has_model=expert.model is not None)
    return RoutedExpert(teacher=teacher, domain=expert.domain, info=info, adapter=adapter, prompts=None)


def _read_registered_expert(registry: Registry, name: str, hashes: Hashes) -> RoutedExpert:
    manifest: ExpertManifest = registry.get(name)
    problems = registry.verify(name, hashes)
    if problems:
        raise ModelError.at(
            f"expert {name}",
            found="; ".join(problems),
            wanted="the files as they were registered",
            fix=f"`opd experts remove {name}` and add it again",
        )
    return RoutedExpert(
        teacher=as_teacher(name, manifest.info, manifest.adapter, manifest.probe.probe if manifest.probe else None),
        domain=manifest.domain,
        info=manifest.info,
        adapter=manifest.adapter,
        prompts=Path(manifest.prompts) if manifest.prompts else None,
    )


def as_teacher(name: str, info: ModelInfo, adapter: AdapterInfo | None, probe: Probe | None = None) -> Teacher:
    """Describe a model for the teacher pool and for results. Models with equal weights and equal config have one digest."""
    model_dir = Path(info.path)
    base = model_digest(model_dir, info.weight_files)
    if adapter is None:
        return Teacher(name=name, model_dir=model_dir, digest=base, probe=probe)
    digest = model_digest(model_dir, info.weight_files, adapter.files)
    return Teacher(
        name=name, model_dir=model_dir, adapter_dir=Path(adapter.path), digest=digest, base_digest=base, probe=probe
    )


def names_in_use(experts: RegisteredExperts, registry: Registry) -> list[str]:
    """Return the names of `experts.use`, or all registered ones for `all`. Raises: ConfigError for a name that comes twice."""
    names = registry.names() if experts.use == "all" else experts.use
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ConfigError.at(
            "experts.use", found=f"`{twice[0]}` twice", wanted="each expert once", fix="delete one of the two"
        )
    return names


def _select_untagged(config: PipelineConfig, routes: Mapping[str, Sequence[WeightedTeacher]]) -> list[str]:
    """Return the domains whose leading expert reads the student's prompt without the tag of the effort."""
    prompts = {
        domain: config.teacher_prompts[assigned[0].teacher.name]
        for domain, assigned in routes.items()
        if assigned[0].teacher.name in config.teacher_prompts and not reads_own_tokens(config, assigned[0].teacher.name)
    }
    return [
        domain
        for domain, prompt in prompts.items()
        if config.domains[domain].effort is not None and prompt.effort is False and not prompt.has_messages
    ]


def _untrained_tokens(
    config: PipelineConfig, routes: Mapping[str, Sequence[WeightedTeacher]], tokenizer: Any
) -> dict[str, frozenset[int]]:
    """Return `teachers.mask_tokens` as ids, by domain. Raises: ConfigError for an unknown expert or token."""
    vocabulary = tokenizer.get_vocab()
    names = sorted({a.teacher.name for assigned in routes.values() for a in assigned})
    for name, tokens in config.teachers.mask_tokens.items():
        if name not in names:
            raise ConfigError.at(
                "teachers.mask_tokens",
                found=name,
                wanted=f"experts of this pipeline: {', '.join(names)}",
                fix="correct or remove the name",
            )
        for token in tokens:
            if token not in vocabulary:
                raise ConfigError.at(
                    f"teachers.mask_tokens.{name}",
                    found=f"{token!r}, which the tokenizer does not know as one token",
                    wanted="single tokens as tokenizer.json spells them",
                    fix="correct it; text of several tokens cannot be masked",
                )
    never = {name: [vocabulary[t] for t in tokens] for name, tokens in config.teachers.mask_tokens.items()}
    return {
        domain: frozenset(i for a in assigned for i in never.get(a.teacher.name, ()))
        for domain, assigned in routes.items()
    }


def _registered_prompts(
    experts: Mapping[str, RoutedExpert], routes: Mapping[str, Sequence[WeightedTeacher]], domain: str
) -> Path | None:
    return experts[routes[domain][0].teacher.name].prompts if domain in routes else None


def _refuse_broken_weights(student: ModelInfo, experts: Mapping[str, RoutedExpert], config: PipelineConfig) -> None:
    """Check every number of the student and of experts outside the registry, which checks its own. Raises: ModelError."""
    looked_at: set[tuple[str, ...]] = set()
    directories = [(student.path, student.weight_files)]
    if not isinstance(config.experts, RegisteredExperts):
        for expert in experts.values():
            directories.append((expert.info.path, expert.info.weight_files))
            if expert.adapter is not None:
                directories.append((expert.adapter.path, {ADAPTER_WEIGHTS: expert.adapter.files[ADAPTER_WEIGHTS]}))
    for path, files in directories:
        key = tuple(sorted(files.values()))
        if key not in looked_at:
            check_finite(Path(path), list(files))
            looked_at.add(key)


def _warn_of_twins(experts: Mapping[str, RoutedExpert], config: PipelineConfig) -> list[str]:
    """Return a warning for each expert that has the same weights as another one, unless a prompt tells them apart, or it is the student
    on purpose."""
    students = {name for name, expert in config.inline_experts.items() if expert.model == STUDENT}
    experts = {
        name: expert
        for name, expert in experts.items()
        if name not in {*config.teacher_prompts, *students} and expert.teacher.has_model
    }
    name_by_digest: dict[str, str] = {}
    return [
        f"experts `{name_by_digest[digest]}` and `{name}` have the same weights: one teacher under two names"
        for name, digest in ((name, expert.teacher.digest) for name, expert in experts.items())
        if name_by_digest.setdefault(digest, name) != name
    ]


def _warn_of_slow_types(config: PipelineConfig) -> list[str]:
    """Return a warning if a role computes in bfloat16 on this machine's cores and they have no instructions for it."""
    gpus, teachers = config.cluster, config.teachers
    scores_here = any(section.scoring_workers and not section.elsewhere for section in config.engines)
    is_slow = {
        "rollout.dtype": not gpus.rollout_gpus and config.rollout.dtype == "bfloat16",
        "teachers.dtype": scores_here and not gpus.teacher_gpus and teachers.dtype == "bfloat16",
        "trainer.dtype": not gpus.trainer_gpus and config.trainer.dtype == "bfloat16",
    }
    return slow_bf16_warnings([key for key, slow in is_slow.items() if slow])


def _empty_prompt_warnings(prompts: PromptTable) -> list[str]:
    """Return warnings about prompts without text. Raises: PromptError if no prompt of a file has text."""
    empty = prompts.lengths == 0
    count = int(empty.sum())
    if count == len(prompts):
        raise PromptError.at(
            prompts.rows.label,
            found=f"{count} prompts without text",
            wanted="at least one that asks something",
            fix="is the column `prompt` the right one?",
        )
    sentence = f"{count} of {len(prompts)} prompts have no text and are left out: {example_ids(prompts, empty)}"
    return [f"{prompts.rows.label}: {sentence}"] if count else []


def _refuse_all_too_long(prompts: Mapping[str, PromptTable], room: int) -> None:
    """Refuse a domain whose prompts are all too long, because the run would quarantine them and never train the domain."""
    for table in prompts.values():
        shortest = int(table.lengths.min())
        if shortest >= room:
            raise PromptError.at(
                table.rows.label,
                found=f"no prompt shorter than {shortest} tokens",
                wanted=f"prompts below rollout.max_model_len = {room}",
                fix="raise rollout.max_model_len or shorten the prompts",
            )
