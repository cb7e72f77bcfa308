"""Evaluate every model of a merge on every domain: the student before, each expert and the merged model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experts.adapter import inspect_expert
from experts.model_dir import ModelInfo, token_map
from opd.config import PipelineConfig, split_rounds
from opd.errors import ConfigError, ModelError, RunDirError
from opd.evaluation.evaluator import BEFORE, MERGED
from opd.records.scores import FORMAT, Evaluation
from opd.records.types import Teacher
from opd.text import quote_for_shell
from pipelines.evaluation.models import (
    Subject,
    Tell,
    evaluate_subjects,
    exam_domains,
    make_own_subject,
    with_all_domains,
)
from pipelines.inputs.own_tokens import find_text_experts
from pipelines.inputs.prompts import load_own_exams
from pipelines.inputs.read import Inputs, as_teacher, read_rounds
from pipelines.inputs.template_date import with_template_date
from pipelines.shared_student import open_shared_student


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The evaluation of each model of a merge on each domain."""

    models: Mapping[str, Evaluation]
    """`student before`, every expert by name and, if there is one, `merged`; each on the same domains."""
    own: Mapping[str, tuple[str, ...]]
    """Model -> the domains that it teaches; the merged model has all of them."""

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `evaluation/matrix.json`."""
        models = {name: asdict(evaluation) for name, evaluation in self.models.items()}
        return {"format": FORMAT, "models": models, "own": {name: list(domains) for name, domains in self.own.items()}}


def evaluate_matrix(config: PipelineConfig, merged: Path | None, domains: Sequence[str] | None, tell: Tell) -> Matrix:
    """Evaluate the student before, every expert and, if there is one, the merged model on every (named) domain.

    All read the student's prompts, as in the merge, but for experts with tokens of their own, in which they read the same questions.
    With several rounds, the experts and domains of all rounds count.
    Raises: OpdError before the engine starts; RunError if it fails.
    """
    names = exam_domains(with_all_domains(config), domains)
    configs = split_rounds(config)
    rounds = read_rounds(configs)
    domains_by_teacher = _domains_by_expert(rounds)
    with open_shared_student(configs[0], rounds[0]) as (_, first_inputs):
        subjects = _matrix_subjects(config, [first_inputs, *rounds[1:]], list(domains_by_teacher), merged, names)
        models = evaluate_subjects(config, subjects, tell)
    every = tuple(dict.fromkeys(domain for round_inputs in rounds for domain in round_inputs.routes))
    own = {BEFORE: (), MERGED: every} | {
        teacher.name: taught_domains for teacher, taught_domains in domains_by_teacher.items()
    }
    return Matrix(models=models, own={name: own[name] for name in models})


def _domains_by_expert(rounds: Sequence[Inputs]) -> dict[Teacher, tuple[str, ...]]:
    """Return expert -> the domains that it teaches. If two rounds have experts of one name, the later name says its round.

    Experts that only write text are left out: they have no model here.
    """
    experts: dict[tuple[str, str], tuple[Teacher, list[str]]] = {}
    for number, round_inputs in enumerate(rounds, start=1):
        text_experts = find_text_experts(round_inputs.scoring)
        for domain, assigned in round_inputs.routes.items():
            for teacher in (a.teacher for a in assigned if a.teacher.name not in text_experts):
                key = teacher.name, teacher.digest
                if key not in experts:
                    is_taken = any(name == teacher.name for name, _ in experts)
                    experts[key] = (
                        replace(teacher, name=f"{teacher.name} (round {number})") if is_taken else teacher,
                        [],
                    )
                if domain not in experts[key][1]:
                    experts[key][1].append(domain)
    return {teacher: tuple(domains) for teacher, domains in experts.values()}


def _matrix_subjects(
    config: PipelineConfig,
    rounds: Sequence[Inputs],
    experts: Sequence[Teacher],
    merged: Path | None,
    names: Sequence[str],
) -> list[Subject]:
    """Check all models. Raises: OpdError for a merged model that is missing or not like the student, or an expert of its name."""
    inputs = rounds[0]
    models = [as_teacher(BEFORE, inputs.student, None), *experts]
    if merged is not None:
        if not merged.is_dir():
            raise RunDirError.at(
                merged,
                found="no such directory",
                wanted="the model of a finished merge",
                fix=f"finish it with `opd merge --resume {quote_for_shell(merged.parent)}`, or give the pipeline to leave it out",
            )
        info, _ = inspect_expert(merged)
        _refuse_other_vocabulary(merged, info, inputs.student)
        models.append(as_teacher(MERGED, info, None))
    if len({model.name for model in models}) < len(models):
        raise ConfigError.at(
            "experts",
            found=f"an expert called `{MERGED}`",
            wanted="another name",
            fix="rename the expert: the merged model has this name",
        )
    last = {name: exam for round_inputs in rounds for name, exam in round_inputs.exams.items()}
    exams = {name: last[name] for name in names}
    own_tokens = {
        expert.teacher.digest: (expert.info, round_inputs.own_tokenizers[name])
        for round_inputs in rounds
        for name, expert in round_inputs.experts.items()
        if name in round_inputs.own_tokenizers
    }
    config = with_template_date(with_all_domains(config), inputs.template_date)

    def make_subject(model: Teacher) -> Subject:
        if model in experts and model.digest in own_tokens:
            info, tokenizer = own_tokens[model.digest]
            return make_own_subject(config, model, info, tokenizer, load_own_exams(config, tokenizer, exams))
        room = config.rollout.max_model_len
        return Subject(model=model, exams=exams, tokenizer=inputs.tokenizer, reader=inputs.student, max_model_len=room)

    return [make_subject(model) for model in models]


def _refuse_other_vocabulary(path: Path, model: ModelInfo, student: ModelInfo) -> None:
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
