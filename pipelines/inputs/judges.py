"""Judges on servers: what they cannot judge, or not so often, is refused, and each shows that it judges before there is a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from opd.config import PipelineConfig
from opd.errors import ConfigError, RunError
from opd.evaluation.evaluator import DomainExam
from opd.prompts import samples_by_weight
from opd.records.types import Prompt
from opd.servers.answers_file import AnswersFile
from opd.verifiers.judge import RubricJudge


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstJudgement:
    """The score by which a judge shows that it judges."""

    domain: str
    prompt: Prompt
    """The prompt, whose row's own answer was judged."""
    score: float
    """In 0..1."""
    seconds: float


def find_judges(exams: Mapping[str, DomainExam]) -> dict[str, RubricJudge]:
    """Return domain -> its judge, for domains that have one."""
    return {name: exam.verifier for name, exam in exams.items() if isinstance(exam.verifier, RubricJudge)}


def open_judges(every: Iterable[Mapping[str, DomainExam]], path: Path) -> None:
    """Have the judges of all these exams keep in this file what they write; what it has is not asked for again. Raises: StorageError."""
    judges = [judge for exams in every for judge in find_judges(exams).values()]
    if judges:
        file = AnswersFile(path)
        for judge in judges:
            judge.keep_in(file)


def prove_judges(exams: Mapping[str, DomainExam]) -> Iterator[FirstJudgement]:
    """Have every judge score the answer that a row has. Raises: ConfigError for one that gives no score; StorageError."""
    for domain, judge in find_judges(exams).items():
        prompt, began = exams[domain].prompts[0], time.monotonic()
        try:
            (judgement,) = judge.judge_answers([(prompt, prompt.answer)])
            score, problem = judgement.score, judgement.problem
        except RunError as error:
            score, problem = None, str(error)
        if score is None:
            low, high = judge.config.range
            raise ConfigError.at(
                f"domains.{domain}.eval.verifier",
                found=problem,
                wanted=f"a judge that gives the answer of prompt {prompt.id} a score from {low:g} to {high:g}",
                fix="see that it does, or change the keys of the verifier",
            )
        yield FirstJudgement(domain=domain, prompt=prompt, score=score, seconds=time.monotonic() - began)


def refuse_many_judgements(config: PipelineConfig, exams: Mapping[str, DomainExam]) -> None:
    """Refuse a merge that may need more calls of a judge than it may make. Raises: ConfigError."""
    per_step = samples_by_weight(config.trainer.samples_per_step // config.rollout.n, config.domain_weights)
    times = 3 + (config.trainer.steps // config.evaluate.every if config.evaluate.every else 0)
    for domain, judge in find_judges(exams).items():
        rewarded = config.objective.reward is not None and config.domains[domain].is_rewarded
        in_steps = config.trainer.steps * round(per_step[domain] + 0.5) * config.rollout.n if rewarded else 0
        in_exams = times * len(exams[domain].prompts) * config.evaluate.n
        limit = judge.config.max_calls
        if limit is not None and in_steps + in_exams + 1 > limit:
            raise ConfigError.at(
                f"domains.{domain}.eval.verifier.max_calls",
                found=f"{limit}, and up to {in_steps} responses and {in_exams} answers in exams to judge",
                wanted="a call for each: a run that stops half way has spent its calls for nothing",
                fix=f"raise it to {in_steps + in_exams + 1}, or take fewer steps, samples or questions",
            )
