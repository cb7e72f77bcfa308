"""Evaluate models on the exams of a pipeline: check all of them first, then let one rollout engine hold each in turn.

model directories, or a merge's student and experts ── checked ──→ Subject ──→ rollout engine ──→ Evaluation

Models with other tokens than the student's read the same questions in tokens of their own, and have an engine of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from experts.adapter import inspect_expert, open_full_model
from experts.model_dir import ModelInfo
from opd.cluster import ray_session
from opd.config import PipelineConfig, split_rounds
from opd.errors import ConfigError, ModelError
from opd.evaluation.evaluator import BEFORE, DomainExam, EngineEvaluator
from opd.prompts import is_here, is_hub_name
from opd.records.scores import Evaluation
from opd.records.types import Teacher
from opd.settings.suggestions import did_you_mean
from opd.text import Tell
from pipelines.build import rollout_engine
from pipelines.draft import find_served_draft, read_served_shape, turn_off_guesses
from pipelines.inputs.prompts import (
    load_exams,
    load_own_exams,
    load_training,
    refuse_leaks,
    registered_prompts,
    room_warnings,
)
from pipelines.inputs.read import as_teacher, inspect_student, load_tokenizer
from pipelines.inputs.template_date import set_template_date
from pipelines.placement import place_rollouts
from pipelines.sizing.auto import choose_cache
from pipelines.specs import rollout_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and the exams that it takes."""

    model: Teacher
    """The model; its name is used in tables and files."""
    exams: Mapping[str, DomainExam]
    tokenizer: Any
    """The tokenizer that encoded the prompts of its exams."""
    reader: ModelInfo
    """The model whose tokens these are: the subject itself, or the student with whom it shares them."""
    max_model_len: int
    """Most tokens of a prompt and its answer."""

    @property
    def engine_facts(self) -> tuple[Any, ...]:
        """The facts in which subjects are equal that can share an engine."""
        reader = self.reader
        return reader.vocab_hash, reader.vocab_size, frozenset(reader.eos_token_ids), self.max_model_len


def evaluate_models(
    config: PipelineConfig, model_dirs: Sequence[Path], domains: Sequence[str] | None, tell: Tell
) -> dict[str, Evaluation]:
    """Return path of a model -> its evaluation on the named domains. A LoRA adapter will do if its base can be found.

    Raises: OpdError before the engine starts; RunError if it fails.
    """
    subjects = check_models(config, model_dirs, domains, tell)
    return evaluate_subjects(config, subjects, tell)


def check_models(
    config: PipelineConfig, model_dirs: Sequence[Path], domains: Sequence[str] | None, tell: Tell
) -> list[Subject]:
    """Read and check all that an evaluation needs, without compute. Raises: OpdError for the first thing that is wrong."""
    names = exam_domains(config, domains)
    inspections = {path: inspect_expert(path) for path in dict.fromkeys(model_dirs)}
    student = inspect_student(config, hash_weights=False) if config.student.model.is_dir() else None
    if student is None:
        tell(f"warning: {config.student.model} is not here, so vocabularies are not compared with the student's")
    subjects = []
    for path, (info, adapter) in inspections.items():
        model = as_teacher(str(path), info, adapter)
        if student is not None and info.vocab_hash != student.vocab_hash:
            tell(f"{path} has another vocabulary than the student: it answers in tokens of its own")
            own_tokenizer, student_tokenizer = load_tokenizer(Path(info.path)), load_tokenizer(config.student.model)
            config = set_template_date(config, own_tokenizer, student_tokenizer)
            exams = load_own_exams(config, own_tokenizer, load_exams(config, student_tokenizer, names))
            subjects.append(make_own_subject(config, model, info, own_tokenizer, exams))
            continue
        _refuse_shorter_context(path, info, config.rollout.max_model_len)
        tokenizer = load_tokenizer(Path(info.path), config.student.puts_in_front)
        config = set_template_date(config, tokenizer)
        notices: list[str] = []
        exams = load_exams(config, tokenizer, names, notices.append)
        prompt_sources = {d: c.prompts for d, c in config.domains.items() if c.prompts is not None}
        readable_prompts = {d: source for d, source in prompt_sources.items() if is_here(source) or is_hub_name(source)}
        refuse_leaks(exams, load_training(config, readable_prompts, tokenizer))
        for warning in (*notices, *room_warnings(exams, config.rollout.max_model_len)):
            tell(f"warning: {warning}")
        room = config.rollout.max_model_len
        subjects.append(Subject(model=model, exams=exams, tokenizer=tokenizer, reader=info, max_model_len=room))
    return subjects


def make_own_subject(
    config: PipelineConfig, model: Teacher, info: ModelInfo, tokenizer: Any, exams: Mapping[str, DomainExam]
) -> Subject:
    """Return a model that takes exams in tokens of its own, in which questions have other lengths than in the student's: none that
    fits its context is left out. `exams`: of `load_own_exams`."""
    longest = max((len(prompt.token_ids) for exam in exams.values() for prompt in exam.prompts), default=0)
    needed = longest + (config.evaluate.max_new_tokens or config.rollout.max_new_tokens)
    room = max(config.rollout.max_model_len, needed)
    room = room if info.context is None else min(room, info.context)
    return Subject(model=model, exams=exams, tokenizer=tokenizer, reader=info, max_model_len=room)


def with_all_domains(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with the domains of all its rounds, each as in the last round that has it. A domain without prompts
    gets those that its expert was registered with. Raises: RegistryError."""
    domains = {}
    for round_config in split_rounds(config):
        for name, domain in round_config.domains.items():
            prompts = domain.prompts or registered_prompts(round_config, name, only_here=True)
            domains[name] = domain.model_copy(update={"prompts": prompts})
    return config.model_copy(update={"domains": domains})


def exam_domains(config: PipelineConfig, domains: Sequence[str] | None) -> list[str]:
    """Return the named domains, or all that have an exam. Raises: ConfigError for a named one without an exam, or if no domain
    has one."""
    exam_names = [name for name, domain in config.domains.items() if domain.eval]
    for name in domains or []:
        if name not in exam_names:
            raise ConfigError.at(
                "--domains",
                found=f"{name}, " + ("a domain without an `eval`" if name in config.domains else "no domain"),
                wanted=f"domains with an `eval`: {', '.join(exam_names) or 'there are none'}",
                fix=f"correct the name, or give domains.{name}.eval"
                if name in config.domains
                else did_you_mean(name, exam_names, "correct the name"),
            )
    if not exam_names:
        raise ConfigError.at(
            "domains",
            found=f"no `eval` in {', '.join(config.domains)}",
            wanted="held-out prompts in at least one domain",
            fix="set domains.NAME.eval: {prompts: HELD_OUT.jsonl}",
        )
    return list(domains) if domains else exam_names


def _refuse_shorter_context(path: Path, model: ModelInfo, room: int) -> None:
    if model.context is not None and room > model.context:
        raise ModelError.at(
            path,
            found=f"a context of {model.context} tokens",
            wanted=f"rollout.max_model_len = {room} or more",
            fix=f"--set rollout.max_model_len={model.context}",
        )


def evaluate_subjects(config: PipelineConfig, subjects: Sequence[Subject], tell: Tell) -> dict[str, Evaluation]:
    """Return name of a subject -> its evaluation. Those that have their tokens in common share an engine, but for a model with a
    draft: if the pipeline lets engines guess, it has an engine that guesses with this draft."""
    alike: dict[tuple[Any, ...], list[Subject]] = {}
    for subject in subjects:
        draft = find_served_draft(subject.model.model_dir) if config.rollout.num_speculative_tokens else None
        alike.setdefault((*subject.engine_facts, draft), []).append(subject)
    evaluations: dict[str, Evaluation] = {}
    for (*_, draft), group in alike.items():
        evaluations |= _evaluate_alike(with_room(config, group[0]), group, draft, tell)
    return {subject.model.name: evaluations[subject.model.name] for subject in subjects}


def with_room(config: PipelineConfig, subject: Subject) -> PipelineConfig:
    """Return the pipeline with the context of the engine in which a subject answers."""
    rollout = config.rollout.model_copy(update={"max_model_len": subject.max_model_len})
    return config.model_copy(update={"rollout": rollout})


def _evaluate_alike(
    config: PipelineConfig, subjects: Sequence[Subject], draft: Path | None, tell: Tell
) -> dict[str, Evaluation]:
    """Return name of a subject -> its evaluation. One engine serves all; it starts with the first model. `draft`: its files, if it is to
    guess."""
    evaluations = {}
    config = turn_off_guesses(config) if draft is None else config
    with ray_session(config.cluster, config.rollout.workers), model_directory(subjects[0].model) as start:
        first_subject = subjects[0]
        config = choose_cache(config, start)
        spec = rollout_spec(config, start, first_subject.reader.vocab_size, first_subject.reader.eos_token_ids)
        place_rollouts(config)
        if draft is not None:
            shape = read_served_shape(start, draft, first_subject.reader.vocab_size)
            spec = replace(spec, engine=replace(spec.engine, draft=shape))
        engine = rollout_engine(config)(spec, first_subject.tokenizer)
        engine.wait_ready()
        if draft is not None:
            from safetensors.torch import load_file  # imports torch

            engine.load_draft(load_file(draft / "model.safetensors"))
        for subject in subjects:
            if subject is not first_subject:
                with model_directory(subject.model) as directory:
                    engine.load(directory)
            evaluator = EngineEvaluator(engine, subject.exams, config.evaluate, subject.tokenizer, tell)
            evaluation = evaluator.evaluate(model=subject.model.name)
            untrained: dict[str, Any] = {"step": 0, "tokens": 0} if subject.model.name == BEFORE else {}
            digests = dict.fromkeys(evaluation.scores, subject.model.digest)
            evaluation = replace(evaluation, weights=digests, **untrained)
            evaluations[subject.model.name] = evaluation
            mean = fmean(evaluation.accuracy.values())
            tell(f"{subject.model.name}: mean accuracy {mean:.3f} over {len(evaluation.scores)} domains")
    return evaluations


@contextmanager
def model_directory(model: Teacher) -> Iterator[Path]:
    """Give a directory with the whole model within the block; an adapter is merged into its base for that time."""
    with (
        TemporaryDirectory(prefix="opd-evaluate-") as scratch,
        open_full_model(model, Path(scratch) / "model") as directory,
    ):
        yield directory
