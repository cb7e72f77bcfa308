"""Judge the figures of `opd check`: find experts that are swapped, garbled, no better than the student, or already learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Literal

from pipelines.check.comparison import TeacherComparison

MASTERED = 0.99
"""Accuracy of the student and of the expert from which there is nothing left to learn."""
CLEAR = 0.2
"""Difference of accuracies that a few dozen prompts do not show by accident."""
SLACK = 1e-9
"""In floating point 1.0 - 0.8 is a little less than 0.2."""
FAR_APART = 0.3
"""Least share of tokens where student and teacher rank the same one first."""
GARBLED = 0.9
"""Share of ln V from which a teacher is no better than a guess among all tokens."""
SAME = 1e-4
"""Largest KL of a model to itself that rounding explains, nats."""
SHOWN_ANSWER = 40
"""Characters of an answer in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """Something that is wrong, or that the user should look at."""

    level: Literal["fail", "warn"]
    domain: str
    """The domain; empty for the whole pipeline."""
    message: str
    fix: str
    """Change to make in the pipeline, by its keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTeacher:
    """One teacher of one domain."""

    domain: str
    expert: str
    leads: bool
    """True for the domain's heaviest teacher; the others need not know the domain."""
    student_accuracy: float | None
    """None if the domain has no exam."""
    expert_accuracy: float | None
    """None if the domain has no exam, or if the teacher is unusable or not the heaviest."""
    compared: TeacherComparison
    knows_another: bool = False
    """True if it is no better than a guess on this domain, but better on another one."""
    frequent: tuple[str, float] = ("", 0.0)
    """The exam's most frequent right answer, and the share of the questions that it answers."""
    registered: bool = False
    """True for an expert of the registry, which `opd experts verify` knows."""
    rivals: Mapping[str, float] = field(default_factory=dict)
    """Accuracy of other experts on this domain; measured only where this one does not stand out."""


def judge_student(self_comparison: TeacherComparison) -> Iterator[CheckFinding]:
    """Yield a finding if the student, scored by itself, is not the same model: then trainer and scorer compute differently."""
    problem = self_comparison.broken
    if not problem and self_comparison.kl is not None and not self_comparison.kl <= SAME:  # NaN is not
        problem = f"the student scored by itself: KL {self_comparison.kl:.1e} nats, at most {SAME} wanted; trainer and scorer differ"
    if problem:
        fix = "see whether student.model is whole; if it is, its architecture is computed wrongly: please report it"
        yield CheckFinding(level="fail", domain="", message=problem, fix=fix)


def judge_teachers(teachers: Sequence[MeasuredTeacher], vocab_size: int) -> Iterator[CheckFinding]:
    """Yield all findings, in the order of the domains."""
    for teacher in teachers:
        problem = explain_garbled(teacher, vocab_size)
        if problem:
            yield _make_garbled_finding(teacher, problem)
            continue
        if teacher.leads:
            yield from _judge_accuracy(teacher)
        overlap = teacher.compared.overlap
        if overlap is not None and overlap < FAR_APART:
            yield CheckFinding(
                level="warn",
                domain=teacher.domain,
                message=f"expert `{teacher.expert}` and the student rank the same token first on {overlap:.0%} of the "
                f"student's tokens, less than {FAR_APART:.0%}: far apart",
                fix="begin with a larger trainer.warmup_steps and a smaller trainer.lr, or with a student that is nearer "
                "to the expert (the base that it was trained from); look at the prompts' form (chat template)",
            )


def is_unusable(compared: TeacherComparison) -> bool:
    """Return True for a teacher that cannot take an exam: it does not load, or its log-probs are not numbers."""
    return bool(compared.broken) or any(
        nll is not None and isnan(nll) for nll in (compared.prompt_nll, compared.answer_nll)
    )


def is_guess(compared: TeacherComparison, vocab_size: int) -> bool:
    """Return True if a teacher predicts neither the right answers nor the prompts better than a guess among all tokens would.

    False without answers: prompts alone are no evidence, because those of random letters or numbers are a guess to every model.
    """
    share = compared.guessing_ratio(vocab_size)
    return share is not None and not isnan(share) and compared.answer_nll is not None and share >= GARBLED


def predicts_texts(compared: TeacherComparison, vocab_size: int) -> bool:
    """Return True if a teacher predicts the texts of a domain better than a guess among all tokens would."""
    share = compared.guessing_ratio(vocab_size)
    return share is not None and share < GARBLED  # NaN is not


def explain_garbled(teacher: MeasuredTeacher, vocab_size: int) -> str:
    """Return why a teacher's weights are taken for garbled; empty if they are not.

    A guess is no verdict where something else speaks for the teacher: it knows another domain, beats the student in the exam (one
    that reasons first may not know bare answers), or ranks the student's tokens as the student does.
    """
    if is_unusable(teacher.compared):
        return teacher.compared.broken or "its log-probs are not numbers"
    gains = teacher.expert_accuracy is not None and teacher.expert_accuracy > (teacher.student_accuracy or 0.0)
    agrees = teacher.compared.overlap is not None and teacher.compared.overlap >= FAR_APART
    if teacher.knows_another or gains or agrees or not is_guess(teacher.compared, vocab_size):
        return ""
    share = teacher.compared.guessing_ratio(vocab_size)
    return f"NLL of its own domain is {share:.2f} of a blind guess's, ln {vocab_size}, and no better on any other"


def _judge_accuracy(teacher: MeasuredTeacher) -> Iterator[CheckFinding]:
    """Yield findings from the exam of the domain's heaviest teacher."""
    student, expert, domain = teacher.student_accuracy, teacher.expert_accuracy, teacher.domain
    if student is None or expert is None:
        yield CheckFinding(
            level="warn",
            domain=domain,
            message="not measured: the domain has no `eval`",
            fix=f"set domains.{domain}.eval: {{prompts: HELD_OUT.jsonl, verifier: exact_match}}",
        )
        return
    yield from _judge_gain(teacher, student, expert)
    answer, share = teacher.frequent
    if share >= CLEAR and not _is_clear(expert - share):
        yield CheckFinding(
            level="warn",
            domain=domain,
            message=f"always answering {answer[:SHOWN_ANSWER]!r} would score {share:.2f} on {domain}, expert "
            f"`{teacher.expert}` scores {expert:.2f}: has it learned more than this answer?",
            fix=f"give domains.{domain} prompts whose answers vary more, or train the expert longer; what the merge "
            "gains here says little",
        )


def _judge_gain(teacher: MeasuredTeacher, student: float, expert: float) -> Iterator[CheckFinding]:
    """Yield a finding if the student can learn nothing from this teacher, or more from a rival."""
    domain = teacher.domain
    rival = max(teacher.rivals, key=lambda name: teacher.rivals[name], default=None)
    if min(student, expert) >= MASTERED:
        yield CheckFinding(
            level="warn",
            domain=domain,
            message=f"nothing to learn: student {student:.2f}, expert `{teacher.expert}` {expert:.2f}",
            fix=f"leave domains.{domain} out, or keep it so that it is not forgotten; harder prompts would tell more",
        )
    elif rival is not None and _is_clear(teacher.rivals[rival] - expert):
        yield CheckFinding(
            level="fail",
            domain=domain,
            message=f"expert `{teacher.expert}` scores {expert:.2f} on {domain}, `{rival}` scores "
            f"{teacher.rivals[rival]:.2f}: swapped?",
            fix=f"set domains.{domain}.teachers: {rival}, or correct the model or domain of `{teacher.expert}`",
        )
    elif expert <= student:
        yield CheckFinding(
            level="fail",
            domain=domain,
            message=f"expert `{teacher.expert}` scores {expert:.2f} on {domain}, the student {student:.2f}: "
            "nothing to learn from it",
            fix=f"leave domains.{domain} out or train the expert longer; if it should know better, look at the "
            "prompts' form (chat template), domains.*.eval.verifier and evaluate.max_new_tokens",
        )


def _make_garbled_finding(teacher: MeasuredTeacher, problem: str) -> CheckFinding:
    return CheckFinding(
        level="fail",
        domain=teacher.domain,
        message=f"expert `{teacher.expert}`: {problem}: garbled weights?",
        fix=f"copy or save the model of experts.{teacher.expert} again"
        + (f", and see what `opd experts verify {teacher.expert}` says" if teacher.registered else ""),
    )


def is_doubtful(student: float, expert: float) -> bool:
    """Return True if there is no clear gain, and room for another expert to be clearly better."""
    return not _is_clear(expert - student) and _is_clear(1 - expert)


def _is_clear(difference: float) -> bool:
    """Return True if a difference of accuracies is too large to be an accident."""
    return difference >= CLEAR - SLACK
