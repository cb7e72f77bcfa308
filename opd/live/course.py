"""The course of a merge in few numbers: what a view needs from the records so far, without keeping all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean

from opd.records.step import StepRecord, compute_token_mean, select_domain

WINDOW = 20
"""Number of steps over which means are taken, because a single step of one domain is noisy."""
EVALUATE = "evaluate"
"""Name of the phase in which exams are taken during the merge; few steps have it."""


class Course:
    """Sums up the records of a merge, which it takes one by one, in order."""

    def __init__(self, steps: int, domains: Iterable[str] = (), records: Iterable[StepRecord] = ()) -> None:
        """`steps`: steps of the whole merge. `domains`: those to show first, in this order; others follow them."""
        self.steps = steps
        self.domains = dict.fromkeys(domains)
        self.before: Mapping[str, float] = {}
        """Accuracy of the student as it started, by domain."""
        self.expert: Mapping[str, float] = {}
        """Accuracy of each domain's expert."""
        self.clear: Collection[str] | None = None
        """The domains whose expert is better than the student beyond chance; None if that is not known."""
        self.accuracy: Mapping[str, float] = {}
        """Accuracy in the newest exam, by domain."""
        self.exam_step: int | None = None
        """Step after which the newest exam was taken."""
        self.checkpoint: int | None = None
        """Step of the newest checkpoint in the records."""
        self.recent: deque[StepRecord] = deque(maxlen=WINDOW)
        """Records of the last steps."""
        self.losses: list[float] = []
        """Loss of every step."""
        self.seconds = 0.0
        """Seconds of all steps."""
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
        self.domains |= dict.fromkeys(record.domains)
        if record.accuracy:
            self.exam_step, self.accuracy = record.step, record.accuracy
        if record.checkpoint:
            self.checkpoint = record.checkpoint.step

    @property
    def steps_done(self) -> int:
        """Number of steps that are done."""
        return self.recent[-1].step if self.recent else 0

    @property
    def left_s(self) -> float | None:
        """Estimated seconds for the remaining steps, exams included; None before the first step is done."""
        if not self.recent:
            return None
        exams = self._exam_s / len(self.losses)
        return (self.steps - self.steps_done) * (exams + fmean(_training_seconds(record) for record in self.recent))

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens per second over the last steps, without the time of exams."""
        seconds = sum(_training_seconds(record) for record in self.recent)
        return sum(record.response_tokens for record in self.recent) / seconds if seconds else None

    def recent_mean(self, domain: str, key: str) -> float | None:
        """Return the mean per token of a domain's field `key` over the last steps."""
        return compute_token_mean(select_domain(list(self.recent), domain), key)

    def first_mean(self, domain: str, key: str) -> float | None:
        """Return the mean per token of a domain's field `key` over the first steps."""
        return compute_token_mean(select_domain(self._first_records, domain), key)

    def latest_reward(self, domain: str) -> float | None:
        """Return a domain's mean reward in the newest of the last steps that has one; None if none has."""
        for record in reversed(self.recent):
            rewards = domain_rewards(record)
            if domain in rewards:
                return rewards[domain]
        return None


def _training_seconds(record: StepRecord) -> float:
    return record.seconds - record.phase_s.get(EVALUATE, 0.0)


def domain_rewards(record: StepRecord) -> dict[str, float]:
    """Return the mean reward of each domain that has one in this step."""
    if record.reward is not None:
        return {name: stats.reward for name, stats in record.reward.domains.items() if stats.episodes}
    return {name: stats.reward for name, stats in record.episodes.items() if stats.reward is not None}
