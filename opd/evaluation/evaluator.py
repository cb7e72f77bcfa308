"""Evaluation by means of a rollout engine, and the two evaluations that a merge is compared with: the untrained student's and the
experts'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from opd.config.evaluate import EvaluateConfig
from opd.evaluation.lengths import by_length, right_moves
from opd.evaluation.statistics import confidence_interval, pass_at, standard_error
from opd.interfaces import Decoder, Evaluator, RolloutEngine, Verifier
from opd.records.drafts import add_histograms, compute_accepted_length
from opd.records.episodes import BROKEN, EpisodeResult
from opd.records.scores import DomainScore, Evaluation, ScoredAnswer
from opd.records.types import Completion, Prompt, Teacher
from opd.verifiers import judge_texts

KEPT_QUESTIONS = 5
"""Number of questions of each domain, from the first, of which all answers are kept to be read."""
KEPT_WRONG = 5
"""Most wrong answers to a domain's other questions that are kept as well."""
KEPT_FAILURES = 20
"""Most answers to a domain's other questions whose verifier raised that are kept as well."""

BEFORE, EXPERT, MERGED = "student before", "expert", "merged"
"""Names of a merge's evaluations, for people."""


@dataclass(frozen=True, slots=True)
class DomainExam:
    """Held-out prompts of one domain and the verifier that judges the answers."""

    prompts: tuple[Prompt, ...]
    verifier: Verifier


class Reward:
    """Implements `opd.interfaces.Verifier` for answers that are no episode because their prompt did not fit: all of them are wrong."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return 0.0

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def clip_reward(episode: EpisodeResult) -> float:
    """Return the episode's reward, cut to 0..1; 0 if the environment gave none or the episode broke."""
    return 0.0 if episode.stop_reason in BROKEN else min(1.0, max(0.0, episode.reward or 0.0))


class EngineEvaluator:
    """Implements `opd.interfaces.Evaluator` for the weights that the engine holds at the time."""

    def __init__(
        self,
        engine: RolloutEngine,
        exams: Mapping[str, DomainExam],
        settings: EvaluateConfig,
        tokenizer: Decoder,
        tell: Callable[[str], None],
        expert_exams: Mapping[str, DomainExam] | None = None,
    ) -> None:
        """`tell` gets a sentence about verifiers that raised. `expert_exams`: exams of the domains whose experts are asked otherwise
        than the student."""
        self._expert_exams = {**exams, **(expert_exams or {})}
        self._engine = engine
        self._exams = dict(exams)
        self._settings = settings
        self._tokenizer = tokenizer
        self._tell = tell

    def evaluate(self, domains: Sequence[str] | None = None, *, model: str, as_expert: bool = False) -> Evaluation:
        """Evaluate the named domains (default: all that have an exam) in one batch. Names without an exam are left out. `model`: the
        name of the model that answers, for people. `as_expert`: it is the expert of these domains, and reads what that reads."""
        names = self._exams if domains is None else [name for name in domains if name in self._exams]
        asked = self._expert_exams if as_expert else self._exams
        exams = {name: asked[name] for name in names}
        prompts = [prompt for exam in exams.values() for prompt in exam.prompts]
        n = self._settings.n
        completions = self._engine.answer(prompts, n=n, temperature=self._settings.temperature) if prompts else []
        by_domain = {domain: [c for c in completions if c.prompt.domain == domain] for domain in exams}
        answers = {domain: self._judge_answers(exams[domain], given) for domain, given in by_domain.items()}
        for domain, judged in answers.items():
            failed = [answer.error for answer in judged if answer.error]
            if failed:
                last_line = failed[0].strip().splitlines()[-1]
                # An answer without turns is no episode, so that it was a verifier that judged it.
                culprit = "verifier" if all(answer.turns is None for answer in judged) else "environment"
                self._tell(
                    f"{model}: the {culprit} of {domain} raised on {len(failed)} of {len(judged)} answers, counted as wrong: {last_line}"
                )
        return Evaluation(
            model=model,
            scores={
                domain: self._summarise_domain(exams[domain], judged, _measure_accepted_length(by_domain[domain]))
                for domain, judged in answers.items()
            },
            answers=tuple(answer for judged in answers.values() for answer in _choose_shown_answers(judged, n)),
        )

    def _judge_answers(self, exam: DomainExam, completions: Sequence[Completion]) -> list[ScoredAnswer]:
        """Return answers with their scores: an episode's reward, else what the verifier says, and 0 if that says nothing."""
        texts = [(c.prompt, c.text) for c in completions if c.episode is None]
        judgements = iter(judge_texts(exam.verifier, texts))
        answers = []
        for completion in completions:
            if completion.episode is not None:
                score, error = clip_reward(completion.episode), completion.episode.error
            else:
                judgement = next(judgements)
                score, error = judgement.score or 0.0, judgement.problem
            answers.append(self._make_answer(completion, score, error))
        return answers

    def _make_answer(self, completion: Completion, score: float, error: str) -> ScoredAnswer:
        prompt, episode = completion.prompt, completion.episode
        return ScoredAnswer(
            domain=prompt.domain,
            prompt_id=prompt.id,
            prompt=self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False),
            answer=prompt.answer,  # the reference; what the model answered is `text`
            text=completion.text,
            score=score,
            tokens=completion.num_tokens,
            truncated=completion.truncated,
            error=error,
            turns=episode.audit.turns if episode is not None else None,
            invalid_calls=episode.invalid_calls if episode is not None else 0,
        )

    def _summarise_domain(
        self, exam: DomainExam, answers: Sequence[ScoredAnswer], accepted_length: float | None
    ) -> DomainScore:
        """Return the score of one domain from all answers to its exam. `accepted_length`: tokens of a pass with a draft."""
        n = self._settings.n
        # The engine gives n answers to every prompt, also to one that does not fit, and those to a prompt lie side by side.
        scores = [[a.score for a in answers[i : i + n]] for i in range(0, len(answers), n)]
        low, high = confidence_interval(scores)
        turns = [a.turns for a in answers if a.turns is not None]
        # The moves of the tasks' own solutions (`opd.evaluation.lengths`), which only environments have.
        moves = {prompt.id: right_moves(prompt.metadata) for prompt in exam.prompts} if turns else {}
        moves_by_question = [moves.get(answer.prompt_id) for answer in answers[::n]]
        return DomainScore(
            accuracy=fmean(a.score for a in answers),
            stderr=standard_error(scores),
            low=low,
            high=high,
            questions=len(scores),
            samples=n,
            pass_at={str(k): pass_at(k, scores) for k in self._settings.pass_at},
            mean_tokens=fmean(a.tokens for a in answers),
            truncated=fmean(a.truncated for a in answers),
            failed=sum(bool(a.error) for a in answers),
            turns=fmean(turns) if turns else None,
            invalid_calls=sum(a.invalid_calls for a in answers),
            accepted_length=accepted_length,
            by_length=by_length(list(zip(moves_by_question, scores, strict=True))),
            by_question=tuple(map(fmean, scores)),
        )


def _measure_accepted_length(completions: Sequence[Completion]) -> float | None:
    """Return the mean number of tokens that a pass wrote; None if nothing was guessed."""
    histogram = add_histograms([completion.accepted for completion in completions])
    return compute_accepted_length(histogram) if sum(histogram) else None


def _choose_shown_answers(answers: Sequence[ScoredAnswer], n: int) -> list[ScoredAnswer]:
    """Return the answers of a domain that are kept for people: all to the first few questions, and of those to the others the first few
    that are wrong, and the first few whose verifier raised. `n`: answers to a question, which lie side by side."""
    first_answers, other_answers = answers[: KEPT_QUESTIONS * n], answers[KEPT_QUESTIONS * n :]
    wrong = [a for a in other_answers if a.score < 1 and not a.error][:KEPT_WRONG]
    return [*first_answers, *wrong, *[a for a in other_answers if a.error][:KEPT_FAILURES]]


def measure_student(evaluator: Evaluator, domains: Sequence[str], tell: Callable[[str], None]) -> Evaluation:
    """Evaluate the untrained student, whose weights the engine holds, on the named domains. `tell` gets a sentence about the result."""
    evaluation = evaluator.evaluate(domains, model=BEFORE)
    tell(
        f"before the merge: mean accuracy {fmean(evaluation.accuracy.values()):.3f} over {len(evaluation.scores)} domains"
        if evaluation.scores
        else "no domain has an exam"
    )
    return evaluation


def measure_experts(
    load_model: Callable[[Path], None],
    evaluator: Evaluator,
    student_accuracy: Mapping[str, float],
    teachers: Mapping[str, Teacher],
    open_full_model: Callable[[Teacher], AbstractContextManager[Path]],
    tell: Callable[[str], None],
) -> Evaluation:
    """Evaluate each domain's own teacher on it, as one evaluation; the engine holds the last teacher afterwards.

    `load_model` loads the model of a directory into the engine. `student_accuracy`: the student's accuracy by domain; domains that it
    lacks have no exam, and are left out. `open_full_model` gives a directory with a teacher's full model. It stays open while the
    teacher answers, because a worker of the engine that dies meanwhile loads the model anew.
    """
    scores: dict[str, DomainScore] = {}
    answers: tuple[ScoredAnswer, ...] = ()
    for domain, teacher in teachers.items():
        if domain in student_accuracy:
            with open_full_model(teacher) as directory:
                load_model(directory)
                evaluation = evaluator.evaluate([domain], model=f"expert {teacher.name}", as_expert=True)
            scores |= evaluation.scores
            answers += evaluation.answers
            tell(
                f"expert {teacher.name}: {scores[domain].accuracy:.3f} on {domain}, the student {student_accuracy[domain]:.3f}"
            )
    return Evaluation(model=EXPERT, scores=scores, answers=answers)
