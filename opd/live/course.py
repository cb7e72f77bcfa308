"""The course of a merge in few numbers: what a view needs of all records so far, without keeping them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from opd.records.step import DomainRecord, StepRecord, select_domain, compute_token_mean

WINDOW = 20
"""Steps that a mean is taken over: a single step of one domain is noisy."""
EVALUATE = "evaluate"
"""The phase of an exam during the merge, which few steps have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveExam:
    """Accuracies by domain, 0..1, after a step."""

    step: int
    accuracy: Mapping[str, float]


class Course:
    """Takes records one by one, in order."""

    def __init__(self, steps: int, domains: Iterable[str] = (), records: Iterable[StepRecord] = ()) -> None:
        """`steps` is how many the merge has in all; `domains` come in this order, and any others behind them."""
        self.steps = steps
        self.before: Mapping[str, float] = {}
        """Accuracy of the student as it started, by domain."""
        self.expert: Mapping[str, float] = {}
        """Accuracy of each domain's expert."""
        self.clear: Collection[str] | None = None
        """The domains whose expert is better beyond chance; None: not known."""
        self.exam: LiveExam | None = None
        """The newest exam after a step."""
        self.checkpoint: int | None = None
        """The newest checkpoint that is known of."""
        self.recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self.losses: list[float] = []
        """Loss of every step."""
        self.seconds = 0.0
        """Seconds of all steps."""
        self._domains = dict.fromkeys(domains)
        self._first_records: list[StepRecord] = []
        self._exam_s = 0.0
        for record in records:
            self.add_record(record)

    def add_record(self, record: StepRecord) -> None:
        """Take the record of the next step."""
        self.recent.append(record)
        if len(self._first_records) < WINDOW:
            self._first_records.append(record)
        self.losses.append(record.loss)
        self.seconds += record.seconds
        self._exam_s += record.phase_s.get(EVALUATE, 0.0)
        self._domains |= dict.fromkeys(record.domains)
        if record.accuracy:
            self.exam = LiveExam(step=record.step, accuracy=record.accuracy)
        if record.checkpoint:
            self.checkpoint = record.checkpoint.step

    @property
    def steps_done(self) -> int:
        """Steps that are done."""
        return self.recent[-1].step if self.recent else 0

    @property
    def domains(self) -> list[str]:
        return list(self._domains)

    @property
    def left_s(self) -> float | None:
        """Seconds that the steps which are left will take, exams among them; None before the first step."""
        if not self.recent:
            return None
        exams = self._exam_s / len(self.losses)
        return (self.steps - self.steps_done) * (exams + fmean(_training_seconds(record) for record in self.recent))

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens a second over the last steps, exams left out."""
        seconds = sum(_training_seconds(record) for record in self.recent)
        return sum(record.response_tokens for record in self.recent) / seconds if seconds else None

    def recent_mean(self, domain: str, key: str) -> float | None:
        """Mean of a domain's number over the last steps, a token."""
        return _mean_per_token(list(self.recent), domain, key)

    def first_mean(self, domain: str, key: str) -> float | None:
        """The same over the first steps."""
        return _mean_per_token(self._first_records, domain, key)

    def latest_reward(self, domain: str) -> float | None:
        """Mean reward of a domain in the last step that has one."""
        for record in reversed(self.recent):
            rewards = domain_rewards(record)
            if domain in rewards:
                return rewards[domain]
        return None


def _mean_per_token(records: Sequence[StepRecord], domain: str, key: str) -> float | None:
    stats: list[DomainRecord] = select_domain(records, domain)
    return compute_token_mean(stats, key)


def _training_seconds(record: StepRecord) -> float:
    return record.seconds - record.phase_s.get(EVALUATE, 0.0)


def domain_rewards(record: StepRecord) -> dict[str, float]:
    """The mean reward of each domain that has one."""
    if record.reward is not None:
        return {name: stats.reward for name, stats in record.reward.domains.items() if stats.episodes}
    return {name: stats.reward for name, stats in record.episodes.items() if stats.reward is not None}
