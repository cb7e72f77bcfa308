"""`opd evaluate`: models on the exams of a pipeline, side by side or every expert on every domain, and on public tasks.

models, or a pipeline's student and experts ── checked ─┬─→ one rollout engine, each model loaded in turn ─→ Evaluation
                                                        └─→ lm-evaluation-harness, a process each ─→ its scores
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from experts.adapter import inspect_expert, whole_model
from experts.bound_files import model_digest
from experts.model_dir import ModelInfo, token_map, weight_hashes
from opd.cluster import ray_session
from opd.config import PipelineConfig, rounds_of
from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError, ModelError, RunDirError
from opd.evaluation.evaluator import BEFORE, MERGED, DomainExam, EngineEvaluator
from opd.evaluation.harness import TaskScores, check_tasks, run_tasks
from opd.evaluation.scores import FORMAT, Evaluation
from opd.files import atomic_write_text
from opd.prompts import is_here, is_hub_name
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.types import Teacher
from pipelines.exams import load_exams, load_training, refuse_leaks, room_warnings
from pipelines.preflight import Inputs, as_teacher, check_rounds, inspect_student, load_tokenizer
from pipelines.template_date import dated

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to be examined."""

    model: Teacher
    """Its name is the one in tables and files."""
    exams: Mapping[str, DomainExam]
    tokenizer: Any
    """By which its prompts were encoded."""
    vocab_size: int
    """Ids that this tokenizer knows."""
    eos_token_ids: tuple[int, ...]


# Models side by side


def evaluate_models(
    config: PipelineConfig, model_dirs: Sequence[Path], domains: Sequence[str] | None, tell: Tell
) -> dict[str, Evaluation]:
    """Every model (a full one, or a LoRA adapter whose base can be found) on the named domains, by its path.

    Raises: OpdError before the engine starts; RunError if it fails.
    """
    subjects = check_models(config, model_dirs, domains, tell)
    return _examine(config, subjects, tell)


def check_models(
    config: PipelineConfig, model_dirs: Sequence[Path], domains: Sequence[str] | None, tell: Tell
) -> list[Subject]:
    """Read and check all that an evaluation needs; no compute. Raises: OpdError for the first thing that is wrong."""
    names = examined_domains(config, domains)
    inspected = {path: inspect_expert(path) for path in dict.fromkeys(model_dirs)}
    if config.student.model.is_dir():
        student = inspect_student(config)
        for path, (info, _) in inspected.items():
            _refuse_other_vocabulary(path, info, student)
    else:
        tell(f"warning: {config.student.model} is not here, so vocabularies are not compared with the student's")
    subjects = []
    for path, (info, adapter) in inspected.items():
        _refuse_shorter_context(path, info, config.rollout.max_model_len)
        tokenizer = load_tokenizer(Path(info.path))
        config = dated(config, tokenizer)
        notices: list[str] = []
        exams = load_exams(config, tokenizer, names, notices.append)
        named = {d: c.prompts for d, c in config.domains.items() if c.prompts is not None}
        there = {d: source for d, source in named.items() if is_here(source) or is_hub_name(source)}
        refuse_leaks(exams, load_training(config, there, tokenizer))
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
    """Of several rounds the domains of each, by the exam of the last that has it: a model has been through all of them."""
    domains = {name: domain for one in rounds_of(config) for name, domain in one.domains.items()}
    return config.model_copy(update={"domains": domains})


def examined_domains(config: PipelineConfig, domains: Sequence[str] | None) -> list[str]:
    """Those named, or all that have an exam. Raises: ConfigError for one that has none, or if none has."""
    measured = [name for name, domain in config.domains.items() if domain.eval]
    for name in domains or []:
        if name not in measured:
            raise ConfigError.at(
                "--domains",
                found=f"{name}, " + ("a domain without an `eval`" if name in config.domains else "no domain"),
                wanted=f"domains with an `eval`: {', '.join(measured) or 'there are none'}",
                fix=f"correct the name, or give domains.{name}.eval" if name in config.domains else "correct the name",
            )
    if not measured:
        raise ConfigError.at(
            "domains",
            found=f"no `eval` in {', '.join(config.domains)}",
            wanted="held-out prompts in at least one domain",
            fix="set domains.NAME.eval: {prompts: HELD_OUT.jsonl}",
        )
    return list(domains) if domains else measured


def _refuse_other_vocabulary(path: Path, model: ModelInfo, student: ModelInfo) -> None:
    if model.vocab_hash == student.vocab_hash:
        return
    ours, theirs = token_map(Path(student.path)), token_map(Path(model.path))
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise ModelError.at(
        path,
        found=f"another vocabulary: {len(theirs)} tokens to the student's {len(ours)}, and id {first} is "
        f"{theirs.get(first)!r}, not {ours.get(first)!r}",
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
    """One engine keeps all of them to the same token ids and stops them at the same ones."""
    first = subjects[0]
    for other in subjects[1:]:
        for what, found, wanted in (
            ("tokens", other.vocab_size, first.vocab_size),
            ("end tokens", sorted(set(other.eos_token_ids)), sorted(set(first.eos_token_ids))),
        ):
            if found != wanted:
                raise ModelError.at(
                    other.model.name,
                    found=f"{what} {found}",
                    wanted=f"{wanted}, those of {first.model.name}",
                    fix="evaluate the two one after the other",
                )


# Everyone on every domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What each model of a merge can do on each of its domains."""

    models: Mapping[str, Evaluation]
    """`student before`, every expert by name and, if there is one, `merged`; each on the same domains."""
    own: Mapping[str, tuple[str, ...]]
    """By model: the domains that it teaches; those of the merged model are all."""

    def as_json(self) -> dict[str, Any]:
        """What `evaluation/matrix.json` holds."""
        models = {name: asdict(found) for name, found in self.models.items()}
        return {"format": FORMAT, "models": models, "own": {name: list(mine) for name, mine in self.own.items()}}


def evaluate_matrix(config: PipelineConfig, merged: Path | None, domains: Sequence[str] | None, tell: Tell) -> Matrix:
    """The student before, every expert and, if there is one, the merged model, each on each (named) domain.

    All read the student's prompts, as in the merge. Of several rounds: the experts and domains of each.
    Raises: OpdError before the engine starts; RunError if it fails.
    """
    names = examined_domains(with_all_domains(config), domains)
    rounds = check_rounds(rounds_of(config))
    taught = _taught(rounds)
    subjects = _matrix_subjects(config, rounds, list(taught), merged, names)
    models = _examine(config, subjects, tell)
    every = tuple(dict.fromkeys(domain for one in rounds for domain in one.routes))
    own = {BEFORE: (), MERGED: every} | {teacher.name: mine for teacher, mine in taught.items()}
    return Matrix(models=models, own={name: own[name] for name in models})


def _taught(rounds: Sequence[Inputs]) -> dict[Teacher, tuple[str, ...]]:
    """Every expert with the domains that it teaches; one that has the name of an earlier round's says which round it is of."""
    found: dict[tuple[str, str], tuple[Teacher, list[str]]] = {}
    for number, one in enumerate(rounds, start=1):
        for domain, assigned in one.routes.items():
            for teacher in (part.teacher for part in assigned):
                key = teacher.name, teacher.digest
                if key not in found:
                    taken = any(name == teacher.name for name, _ in found)
                    found[key] = replace(teacher, name=f"{teacher.name} (round {number})") if taken else teacher, []
                if domain not in found[key][1]:
                    found[key][1].append(domain)
    return {teacher: tuple(domains) for teacher, domains in found.values()}


def _matrix_subjects(
    config: PipelineConfig,
    rounds: Sequence[Inputs],
    experts: Sequence[Teacher],
    merged: Path | None,
    names: Sequence[str],
) -> list[Subject]:
    """Raises: OpdError for a merged model that is not there or not the student's kind, or an expert with its name."""
    inputs = rounds[0]
    models = [as_teacher(BEFORE, inputs.student, None), *experts]
    if merged is not None:
        if not merged.is_dir():
            raise RunDirError.at(
                merged,
                found="no such directory",
                wanted="the model of a finished merge",
                fix=f"finish it with `opd merge --resume {merged.parent}`, or give the pipeline to leave it out",
            )
        info, _ = inspect_expert(merged)
        _refuse_other_vocabulary(merged, info, inputs.student)
        models.append(as_teacher(MERGED, info, None))
    if len({model.name for model in models}) < len(models):
        raise ConfigError.at(
            "experts", found=f"an expert called `{MERGED}`", wanted="another name", fix="the merged model has this one"
        )
    last = {name: exam for one in rounds for name, exam in one.exams.items()}
    exams = {name: last[name] for name in names}
    ends = inputs.student.eos_token_ids
    size = inputs.student.vocab_size
    return [
        Subject(model=m, exams=exams, tokenizer=inputs.tokenizer, vocab_size=size, eos_token_ids=ends) for m in models
    ]


def _examine(config: PipelineConfig, subjects: Sequence[Subject], tell: Tell) -> dict[str, Evaluation]:
    """One engine for all; the first model is the one that it starts with."""
    found = {}
    with ray_session(config.cluster, config.rollout.workers), _whole(subjects[0].model) as start:
        first = subjects[0]
        engine = VLLMRolloutEngine(config, start, first.vocab_size, first.eos_token_ids, first.tokenizer)
        engine.wait_ready()
        for subject in subjects:
            if subject is not first:
                with _whole(subject.model) as directory:
                    engine.load(directory)
            evaluator = EngineEvaluator(engine, subject.exams, config.evaluate, subject.tokenizer, tell)
            evaluation = evaluator.evaluate(model=subject.model.name)
            untrained: dict[str, Any] = {"step": 0, "tokens": 0} if subject.model.name == BEFORE else {}
            digests = dict.fromkeys(evaluation.scores, subject.model.digest)
            evaluation = replace(evaluation, weights=digests, **untrained)
            found[subject.model.name] = evaluation
            mean = fmean(evaluation.accuracy.values())
            tell(f"{subject.model.name}: mean accuracy {mean:.3f} over {len(evaluation.scores)} domains")
    return found


@contextmanager
def _whole(model: Teacher) -> Iterator[Path]:
    with (
        TemporaryDirectory(prefix="opd-evaluate-") as scratch,
        whole_model(model, Path(scratch) / "model") as directory,
    ):
        yield directory


# Public tasks


def lm_eval_models(settings: LMEvalConfig, model_dirs: Sequence[Path], dtype: str, tell: Tell) -> dict[str, TaskScores]:
    """Every model on the tasks, by its path. Raises: OpdError before anything runs; RunError if the harness fails."""
    check_tasks(settings)
    inspected = {path: inspect_expert(path) for path in dict.fromkeys(model_dirs)}
    found = {}
    for path, (info, adapter) in inspected.items():
        model = as_teacher(str(path), info, adapter)
        tell(f"{path}: lm-evaluation-harness, {', '.join(settings.tasks)}")
        with _whole(model) as directory:
            found[str(path)] = run_tasks(settings, directory, dtype)
    return found


def lm_eval_merge(config: PipelineConfig, merged: Path, file: Path) -> None:
    """The pipeline's tasks, if it has any, for the student before, unless `file` has it, and the merged model; written to
    `file`."""
    settings = config.evaluate.lm_eval
    if settings.tasks:
        models = {BEFORE: config.student.model, MERGED: merged}
        weights = {name: model_digest(path, weight_hashes(path)) for name, path in models.items()}
        known = read_lm_eval(file) if lm_eval_weights(file).get(BEFORE, weights[BEFORE]) == weights[BEFORE] else {}
        found = {name: scores for name, scores in known.items() if name == BEFORE}
        found |= {n: run_tasks(settings, path, config.rollout.dtype) for n, path in models.items() if n not in found}
        atomic_write_text(file, lm_eval_text(found, weights))


def lm_eval_text(models: Mapping[str, TaskScores], weights: Mapping[str, str]) -> str:
    """The file of `lm_eval_merge`: scores by model, and digests of the models."""
    return json.dumps({"format": FORMAT, "models": models, "weights": weights}, indent=1)


def read_lm_eval(file: Path) -> dict[str, TaskScores]:
    """Scores by model; empty without a file."""
    models: dict[str, TaskScores] = _lm_eval_file(file).get("models", {})
    return models


def lm_eval_weights(file: Path) -> dict[str, str]:
    """Digests by model; empty without a file, or where an older release wrote it."""
    weights: dict[str, str] = _lm_eval_file(file).get("weights", {})
    return weights


def _lm_eval_file(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return data


# Tables


def score_rows(found: Evaluation) -> list[tuple[str, ...]]:
    """Domain, accuracy, 95 % interval, questions x answers, then pass@k for each k above 1, length, truncated, failed."""
    return [
        (
            domain,
            f"{s.accuracy:.3f}",
            f"{s.low:.3f} to {s.high:.3f}",
            f"{s.questions} x {s.samples}" if s.samples > 1 else str(s.questions),
            *(f"{value:.3f}" for k, value in s.pass_at.items() if k != "1"),
            f"{s.mean_tokens:.1f}",
            f"{s.truncated:.0%}",
            str(s.failed),
        )
        for domain, s in found.scores.items()
    ]


def score_columns(found: Evaluation) -> tuple[str, ...]:
    """Headings of `score_rows`."""
    first = next(iter(found.scores.values()))
    passes = (f"pass@{k}" for k in first.pass_at if k != "1")
    return ("domain", "accuracy", "95 % interval", "questions", *passes, "tokens", "truncated", "verifier failed")


def compare_rows(models: Mapping[str, Evaluation]) -> list[tuple[str, ...]]:
    """Domain, then for each model its accuracy with the 95 % interval; a last row with the means."""
    first = next(iter(models.values()))
    rows = [
        (domain, *(f"{(s := m.scores[domain]).accuracy:.3f} ({s.low:.2f} to {s.high:.2f})" for m in models.values()))
        for domain in first.scores
    ]
    return [*rows, ("mean", *(f"{fmean(m.accuracy.values()):.3f}" for m in models.values()))]


def matrix_rows(matrix: Matrix) -> list[tuple[str, ...]]:
    """Model, its accuracy on each domain (`*`: one that it teaches), and the mean gained (+) or lost (-) against the
    student before on its own domains and on the others."""
    before = matrix.models[BEFORE].accuracy

    def gain(found: Evaluation, domains: Sequence[str]) -> str:
        return f"{fmean(found.accuracy[d] - before[d] for d in domains):+.3f}" if domains else "-"

    rows = []
    for name, found in matrix.models.items():
        own = [d for d in found.scores if d in matrix.own[name]]
        others = [d for d in found.scores if d not in own] if name != BEFORE else []
        marked = (f"{value:.2f}{'*' if domain in own else ''}" for domain, value in found.accuracy.items())
        rows.append((name, *marked, gain(found, own), gain(found, others)))
    return rows
