"""Evaluate models on the exams of a pipeline: check all of them first, then let one rollout engine hold each in turn.

model directories, or a merge's student and experts ── checked ──→ Subject ──→ rollout engine ──→ Evaluation
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
from experts.model_dir import ModelInfo, token_map
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
from pipelines.inputs.prompts import load_exams, load_training, refuse_leaks, registered_prompts, room_warnings
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
    vocab_size: int
    """Number of ids that this tokenizer knows."""
    eos_token_ids: tuple[int, ...]


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
    if config.student.model.is_dir():
        student = inspect_student(config)
        for path, (info, _) in inspections.items():
            refuse_other_vocabulary(path, info, student)
    else:
        tell(f"warning: {config.student.model} is not here, so vocabularies are not compared with the student's")
    subjects = []
    for path, (info, adapter) in inspections.items():
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
        model = as_teacher(str(path), info, adapter)
        subjects.append(
            Subject(
                model=model,
                exams=exams,
                tokenizer=tokenizer,
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
            )
        )
    _refuse_other_engines(subjects)
    return subjects


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


def refuse_other_vocabulary(path: Path, model: ModelInfo, student: ModelInfo) -> None:
    """Refuse a model whose tokens are not the student's. Raises: ModelError naming the first token that differs."""
    if model.vocab_hash == student.vocab_hash:
        return
    student_tokens, model_tokens = token_map(Path(student.path)), token_map(Path(model.path))
    token_id = min(
        i for i in student_tokens.keys() | model_tokens.keys() if student_tokens.get(i) != model_tokens.get(i)
    )
    raise ModelError.at(
        path,
        found=f"another vocabulary: {len(model_tokens)} tokens to the student's {len(student_tokens)}, and id {token_id} is "
        f"{model_tokens.get(token_id)!r}, not {student_tokens.get(token_id)!r}",
        wanted=f"the token ids of the pipeline's student, {student.path}",
        fix="evaluate it with a pipeline whose student has this vocabulary",
    )


def _refuse_shorter_context(path: Path, model: ModelInfo, room: int) -> None:
    if model.context is not None and room > model.context:
        raise ModelError.at(
            path,
            found=f"a context of {model.context} tokens",
            wanted=f"rollout.max_model_len = {room} or more",
            fix=f"--set rollout.max_model_len={model.context}",
        )


def _refuse_other_engines(subjects: Sequence[Subject]) -> None:
    """Refuse models that cannot share an engine, which has one set of token ids and one set of end tokens."""
    reference = subjects[0]
    for subject in subjects[1:]:
        for fact, value, reference_value in (
            ("tokens", subject.vocab_size, reference.vocab_size),
            ("end tokens", sorted(set(subject.eos_token_ids)), sorted(set(reference.eos_token_ids))),
        ):
            if value != reference_value:
                raise ModelError.at(
                    subject.model.name,
                    found=f"{fact} {value}",
                    wanted=f"{reference_value}, those of {reference.model.name}",
                    fix="evaluate the two one after the other",
                )


def evaluate_subjects(config: PipelineConfig, subjects: Sequence[Subject], tell: Tell) -> dict[str, Evaluation]:
    """Return name of a subject -> its evaluation. One engine serves all; it starts with the first model."""
    evaluations = {}
    with ray_session(config.cluster, config.rollout.workers), model_directory(subjects[0].model) as start:
        first_subject = subjects[0]
        config = choose_cache(config, start)
        spec = rollout_spec(config, start, first_subject.vocab_size, first_subject.eos_token_ids)
        place_rollouts(config)
        engine = rollout_engine(config)(spec, first_subject.tokenizer)
        engine.wait_ready()
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
