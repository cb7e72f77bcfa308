"""All signals: how each is computed from records, what its number means, and which responses show it best.

A new signal needs a function and a `Signal` here, a line in `opd.monitors.SIGNALS`, and limits in `opd/config/monitors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean, median

from opd.records.step import StepRecord, compute_mean_length, compute_token_mean, select_domain
from opd.records.tails import measure_repetition
from opd.records.types import Rollout

WHOLE_STEP = ""
"""Stands in place of a domain if a reading is about all domains together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalHistory:
    """The steps from which a reading is taken. `over` is the signal's key in the pipeline: a number of steps."""

    first: Sequence[StepRecord]
    """The first `over` steps of the run."""
    before: Sequence[StepRecord]
    """The `over` steps before the newest one; fewer if there are not so many yet."""
    last: Sequence[StepRecord]
    """The last `over` steps, the newest at the end."""
    expert_tokens: Mapping[str, float]
    """Domain -> mean tokens of its expert's answers in the exam. Domains without an exam are left out."""
    tolerance: float
    """The gap between engine and trainer at which the run ends, in nats (`sync.tolerance`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A number to watch. For every signal a larger number is worse."""

    says: str
    """Meaning of a reading, in words, with `{value}` in place of the number."""
    advice: str
    """Remedies that the user may try."""
    read: Callable[[SignalHistory], Mapping[str, float]]
    """Returns the readings by domain, or one for `WHOLE_STEP`; a domain is left out if its records lack the number."""
    shown_by: Callable[[Rollout], float] | None = None
    """Strength of the signal in a response; the strongest become samples. None: a single response does not show it."""


def share_of_responses(
    steps: Sequence[StepRecord], count: Callable[[StepRecord], Mapping[str, int]]
) -> dict[str, float]:
    """Return domain -> share of its responses in these steps that `count` counts, from 0 to 1."""
    shares = {}
    for domain in _list_domains(steps):
        samples = sum(record.domains[domain].samples for record in steps if domain in record.domains)
        if samples:
            shares[domain] = sum(count(record).get(domain, 0) for record in steps) / samples
    return shares


def tokens_of_responses(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return domain -> mean number of trained tokens per response in these steps."""
    lengths = {domain: compute_mean_length(steps, domain) for domain in _list_domains(steps)}
    return {domain: length for domain, length in lengths.items() if length is not None}


def means_of_tokens(steps: Sequence[StepRecord], key: str) -> dict[str, float]:
    """Return domain -> mean of the field `key` over its trained tokens in these steps.

    A domain is left out if its records lack the field, which depends on the teachers' payload.
    """
    means = {domain: compute_token_mean(select_domain(steps, domain), key) for domain in _list_domains(steps)}
    return {domain: mean for domain, mean in means.items() if mean is not None}


def mean_probability(rollout: Rollout) -> float:
    """Return the mean probability with which the student sampled its tokens; 0 for an empty response."""
    positions = zip(rollout.trained_positions, rollout.sampled_mask, strict=True)
    probabilities = [exp(rollout.behaviour_logprobs[index]) for index, sampled in positions if sampled]
    return fmean(probabilities) if probabilities else 0.0


def _list_domains(steps: Sequence[StepRecord]) -> list[str]:
    return list(dict.fromkeys(domain for record in steps for domain in record.domains))


# Responses that repeat themselves without end are a sign of collapse. A teacher that does so itself teaches it in a few steps.
REPETITION = Signal(
    says="{value:.2f} of the responses run to their limit in a loop",
    advice="ask whether the domain's expert loops too; else lower trainer.lr or leave the domain out",
    read=lambda history: share_of_responses(history.last, lambda record: record.looping_by_domain),
    shown_by=lambda rollout: measure_repetition(rollout.response_ids),
)

TRUNCATION = Signal(
    says="{value:.2f} of the responses end at their limit, not by an end token",
    advice="raise rollout.max_new_tokens (or max_model_len), or look at the end tokens",
    read=lambda history: share_of_responses(history.last, lambda record: record.truncated_by_domain),
    shown_by=lambda rollout: float(rollout.truncated),
)


def _read_length(history: SignalHistory) -> Mapping[str, float]:
    """Compare the mean length with the larger of two: the expert's in its exam, and the student's own in the first steps.

    The latter is there because a student that has not learned the form of an answer may begin far above its expert.
    """
    start = tokens_of_responses(history.first)
    norms = {d: max(tokens, start[d]) for d, tokens in history.expert_tokens.items() if d in start}
    return {d: tokens / norms[d] for d, tokens in tokens_of_responses(history.last).items() if norms.get(d)}


LENGTH = Signal(
    says="responses are {value:.1f} times as long as the expert's answers, and as they were at the start",
    advice="look whether they still end as the expert's do; lower trainer.lr, or see docs/objectives.md",
    read=_read_length,
    shown_by=lambda rollout: float(len(rollout.response_ids)),
)


def _read_entropy(history: SignalHistory) -> Mapping[str, float]:
    """Return how far the student's entropy is below the teacher's. A low entropy alone is fine: experts on short answers have
    one too."""
    student = means_of_tokens(history.last, "student_entropy")
    teacher = means_of_tokens(history.last, "teacher_entropy")
    return {domain: teacher[domain] - entropy for domain, entropy in student.items() if domain in teacher}


# Reverse KL lowers the entropy when it makes the student choose one of several right answers.
ENTROPY = Signal(
    says="the student's entropy is {value:.2f} nats a token below its teacher's",
    advice="choose an objective that keeps the teacher's spread, such as forward_kl or jsd (docs/objectives.md)",
    read=_read_entropy,
    shown_by=mean_probability,
)


def _read_disagreement(history: SignalHistory) -> Mapping[str, float]:
    return {domain: 1 - top for domain, top in means_of_tokens(history.last, "teacher_top1").items()}


# It is measured on tokens that the student samples. Reverse KL hardly teaches tokens that the student never writes.
DISAGREEMENT = Signal(
    says="{value:.2f} of the student's tokens are not its teacher's first choice",
    advice="forward_kl also teaches what the student never writes (docs/objectives.md); `opd check` compares the two",
    read=_read_disagreement,
    shown_by=mean_probability,
)


def _read_stale_draft(history: SignalHistory) -> Mapping[str, float]:
    """Compare the trainer's estimate of the draft it has with what engines count with theirs, on the same text."""
    readings = {}
    for domain in _list_domains(history.last):
        keys = f"accepted_length/{domain}", f"engine_accepted_length/{domain}"
        pairs = [[record.draft[key] for key in keys] for record in history.last if set(keys) <= set(record.draft)]
        if pairs:
            readings[domain] = fmean(ours for ours, _ in pairs) / fmean(theirs for _, theirs in pairs)
    return readings


# Samples stay the student's with any draft, so a stale one is only slow.
STALE_DRAFT = Signal(
    says="the trainer expects {value:.2f} times the tokens that a pass of the engines writes with the draft",
    advice="the engines may hold an older draft: if it stays so, resume the run, which pushes the draft anew",
    read=_read_stale_draft,
)


def _read_draft_cost(history: SignalHistory) -> Mapping[str, float]:
    ratios = [
        record.draft["engine_plain_tokens_s"] / record.draft["engine_tokens_s"]
        for record in history.last
        if record.draft.get("engine_tokens_s")
    ]
    return {WHOLE_STEP: ratios[-1]} if ratios else {}


DRAFT_COST = Signal(
    says="without the draft the engines write {value:.2f} times as many tokens a second: its guesses do not pay here yet",
    advice="set rollout.num_speculative_tokens to 0, or fewer, unless longer training changes it; the draft learns all the same",
    read=_read_draft_cost,
)


def _read_gap(history: SignalHistory) -> Mapping[str, float]:
    gaps = [record.logprob_gap for record in history.last if _has_fresh_tokens(record)]
    return {WHOLE_STEP: fmean(gaps) / history.tolerance} if gaps else {}


def _has_fresh_tokens(record: StepRecord) -> bool:
    """Return True if the step trained on tokens that were sampled with its own weights, which have the age 0.

    Tokens of older weights say nothing about engine and trainer; a step with only such tokens has 0 as its gap.
    """
    return not record.skipped and (not record.token_ages or "0" in record.token_ages)


# Warns if the log-probs of engine and trainer drift apart, before `sync.tolerance` ends the run.
GAP = Signal(
    says="engine and trainer differ by {value:.2f} of sync.tolerance",
    advice="see docs/troubleshooting.md, `engine and trainer differ`",
    read=_read_gap,
)


def _read_grad_norm(history: SignalHistory) -> Mapping[str, float]:
    before = [record.grad_norm for record in history.before if not record.skipped]
    usual = median(before) if len(history.before) == len(history.last) and before else 0.0
    return {WHOLE_STEP: history.last[-1].grad_norm / usual} if usual else {}


GRAD_NORM = Signal(
    says="the gradient's norm is {value:.1f} times the median of the steps before",
    advice="lower trainer.lr or trainer.max_grad_norm if it happens again",
    read=_read_grad_norm,
)
