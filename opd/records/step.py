"""The record of one step. It is a line of `metrics.jsonl`; the terminal's progress, sinks and the report read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Any, Self

from opd.records.drafts import summarise_engine
from opd.records.episodes import EpisodesRecord
from opd.records.json_fields import make_record
from opd.records.rewards import RewardRecord
from opd.records.staleness import count_ages
from opd.records.tails import is_looping
from opd.records.texts import TextSpending
from opd.records.types import DomainStats, PushReport, Rollout, RolloutBatch, SavedCheckpoint, StepReport

if TYPE_CHECKING:  # the stream needs pyarrow, which a reader of records does not
    from opd.stream.targets import TargetStream

OPTIONAL_FIELDS = (
    "reward",
    "texts",
    "indexer_loss",
    "draft",
    "looping_by_domain",
    "episodes",
    "restarted",
    "accuracy",
    "replayed",
    "checkpoint",
    "alarms",
)
"""Fields of a `StepRecord` that most steps do not have; a line of `metrics.jsonl` leaves them out if they are empty."""


DRAFT = "draft"
"""Name of the draft among the models that learn beside the student: in a step's report, and of its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainRecord:
    """Means over one domain's trained tokens. A mean is None if the teachers' payload does not give its numbers, or if no token of
    the domain was trained."""

    loss: float | None = None
    """The objective's value, nats."""
    student_entropy: float | None = None
    """Entropy of the student, nats."""
    teacher_entropy: float | None = None
    """Entropy of the teacher, nats."""
    argmax_agreement: float | None = None
    """Share of the tokens where student and teacher rank the same token first."""
    teacher_top1: float | None = None
    """Share of the tokens where the sampled token is the teacher's first."""
    clip_rate: float | None = None
    """Share of the tokens where the objective clipped."""
    student_mass: float | None = None
    """Student's probability of the tokens that a top-k teacher gave."""
    teacher_mass: float | None = None
    """Teacher's probability of the same tokens."""
    tokens: int = 0
    """Response tokens that carried loss."""
    samples: int = 0
    """Responses with a trained token."""
    end_loss: float | None = None
    """The objective's value at the tokens that end thoughts or turns, nats; None without `efforts`."""
    end_tokens: int | None = None
    """Number of these tokens."""

    @classmethod
    def from_stats(cls, stats: DomainStats) -> Self:
        """Make the record from a domain's sums."""
        sums = {
            "loss": stats.kl_sum,
            "student_entropy": stats.entropy_sum,
            "teacher_entropy": stats.teacher_entropy_sum,
            "argmax_agreement": stats.agree_sum,
            "teacher_top1": stats.teacher_top1_sum,
            "clip_rate": stats.clipped_sum,
            "student_mass": stats.student_mass_sum,
            "teacher_mass": stats.teacher_mass_sum,
        }
        means: dict[str, Any] = {
            name: total / stats.tokens for name, total in sums.items() if stats.tokens and not isnan(total)
        }
        ends = stats.end_tokens
        at_ends: dict[str, Any] = (
            {"end_loss": stats.end_sum / ends, "end_tokens": ends} if ends and not isnan(stats.end_sum) else {}
        )
        return cls(tokens=stats.tokens, samples=stats.samples, **means, **at_ends)

    def to_json(self) -> dict[str, float]:
        """Return name -> number, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRecord:
    """The trained tokens at some positions of their responses."""

    loss: float
    """Mean, nats a token."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """Numbers about a step's stream of rows from the teachers to the trainer."""

    parts: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    """Most bytes of parts that waited for the trainer at one time."""
    early_micro_batches: int = 0
    """Rounds of micro-batches that went to the ranks before the last row was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRecord:
    """A reading that reached one of its monitor's limits."""

    signal: str
    """Key of `opd.monitors.SIGNALS`."""
    domain: str
    """Domain of the reading; empty if it is about the whole step."""
    value: float
    """The reading."""
    limit: float
    """The limit that the value reached; if it reached several, that of the hardest action."""
    action: str
    """`warn`, `pause` or `stop`."""
    since: int
    """The step from which on this limit was reached in every step."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Signal, domain and action. An alarm of the step before with the same key is the same alarm, which goes on."""
        return self.signal, self.domain, self.action

    def ends_after(self, step: int) -> bool:
        """Return True if the alarm ends the run after this step. A pause does so only in its first step: after a resume it goes on."""
        return self.action == "stop" or (self.action == "pause" and self.since == step)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. The defaults stand for numbers that a file of an older release lacks."""

    step: int
    """Number of the step, from 1."""
    loss: float = 0.0
    """The optimised mean over the global batch, nats."""
    domains: Mapping[str, DomainRecord] = field(default_factory=dict)
    positions: Mapping[str, PositionRecord] = field(default_factory=dict)
    """Places in the response (`0`, `1`, `2-3`, `4-7` and so on) -> record."""
    response_tokens: int = 0
    """Tokens of all responses, whether they were trained or not."""
    prompt_tokens: int = 0
    truncated: int = 0
    """Responses that ended at their limit."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """Prompts that the step took, by domain, once for each response that was asked for, including those that were left out."""
    truncated_by_domain: Mapping[str, int] = field(default_factory=dict)
    """Responses that ended at their limit, of those that `DomainRecord.samples` counts."""
    looping_by_domain: Mapping[str, int] = field(default_factory=dict)
    """Responses of `truncated_by_domain` that reached their limit in a loop (`opd.records.tails`)."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Domain -> number of prompts and responses that were left out."""
    quarantined_reasons: Mapping[str, str] = field(default_factory=dict)
    """Id of a prompt or sample -> why it was left out."""
    episodes: Mapping[str, EpisodesRecord] = field(default_factory=dict)
    """Domain with an environment -> record."""
    reward: RewardRecord | None = None
    """The policy gradient beside the divergence; None without `objective.reward`."""
    texts: Mapping[str, TextSpending] = field(default_factory=dict)
    """Expert that only writes text -> what its answers have taken since the run began."""
    skipped: bool = False
    """True if no token was trained, as while a critic learns alone: there was no optimiser step."""
    restarted: tuple[str, ...] = ()
    """Workers that died and were started again."""
    stream: StreamRecord = StreamRecord()
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    lr: float = 0.0
    indexer_loss: float | None = None
    """Mean KL of the student's sparse indexers to the attention that they serve, nats a position; None if they learn nothing."""
    draft: Mapping[str, float] = field(default_factory=dict)
    """The draft's numbers: the trainer's, see `opd.draft.sums.DraftSums.summarise`, and those of engines that guess with it, see
    `opd.records.drafts.summarise_engine`; empty without a draft."""
    logprob_gap: float = 0.0
    """Mean |trainer - engine| log-prob of the sampled tokens, nats, without stale ones; 0 if all are stale."""
    drift: float = 0.0
    """The mean of `logprob_gap`, but over the stale tokens: how far the policy has moved since it wrote them."""
    token_ages: Mapping[str, int] = field(default_factory=dict)
    """Age -> number of trained tokens. The age is the number of pushes between the writing of a token and its training."""
    policy_version: int = 0
    """Version of the weights that were pushed after the step."""
    probe_gap: float = 0.0
    """Mean |trainer - engine| log-prob of the probe tokens after the push, nats."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds. `checkpoint` has the seconds after the step before, because this record is written before its own."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """`rollout`, `teachers`, `trainer` -> seconds of the step in which the role was at work."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Domain -> accuracy in an exam after this step; empty if there was none."""
    replayed: bool = False
    """True if the step's rollouts came from the target log."""
    checkpoint: SavedCheckpoint | None = None
    """The checkpoint that was committed after the step before."""
    alarms: tuple[AlarmRecord, ...] = ()
    """Limits of monitors that this step's readings reached."""

    @property
    def ends_run(self) -> bool:
        """True if a monitor ends the run after this step."""
        return any(alarm.ends_after(self.step) for alarm in self.alarms)

    @property
    def seconds(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phase_s.values())

    @property
    def utilisation(self) -> dict[str, float]:
        """Role -> share of the step's seconds in which it was at work."""
        return {role: busy / self.seconds for role, busy in self.busy_s.items()} if self.seconds else {}

    def to_json(self) -> dict[str, Any]:
        """Return a line of `metrics.jsonl`."""
        data = asdict(self)
        data["domains"] = {name: record.to_json() for name, record in self.domains.items()}
        data["episodes"] = {name: record.to_json() for name, record in self.episodes.items()}
        if self.reward is not None:
            data["reward"] = self.reward.to_json()
        return {key: value for key, value in data.items() if value or key not in OPTIONAL_FIELDS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; keys of a newer release are ignored. Raises: TypeError for data of another form."""
        return make_record(cls, data)


def select_domain(records: Sequence[StepRecord], domain: str) -> list[DomainRecord]:
    """Return a domain's records of these steps; steps in which it had no trained token are left out."""
    return [record.domains[domain] for record in records if domain in record.domains and record.domains[domain].tokens]


def compute_token_mean(stats: Sequence[DomainRecord | PositionRecord], key: str) -> float | None:
    """Return the mean of a field over the trained tokens; None where no record has it."""
    with_field = [record for record in stats if getattr(record, key) is not None]
    tokens = sum(record.tokens for record in with_field)
    return sum(getattr(record, key) * record.tokens for record in with_field) / tokens if tokens else None


def compute_end_loss(stats: Sequence[DomainRecord]) -> float | None:
    """Return the mean of `end_loss` over the tokens that end thoughts or turns; None where there are none."""
    ends = [
        (record.end_loss, record.end_tokens) for record in stats if record.end_loss is not None and record.end_tokens
    ]
    return sum(loss * count for loss, count in ends) / sum(count for _, count in ends) if ends else None


def compute_mean_length(records: Sequence[StepRecord], domain: str) -> float | None:
    """Return the mean number of trained tokens of a domain's responses; None if no token was trained.

    An episode counts as one response, however many segments it has.
    """
    tokens = responses = 0
    for record in records:
        stats, episodes = record.domains.get(domain), record.episodes.get(domain)
        if stats and stats.tokens:
            tokens += stats.tokens
            responses += (episodes.episodes if episodes else 0) or stats.samples
    return tokens / responses if responses else None


def build_step_record(
    batch: RolloutBatch, targets: TargetStream, train_report: StepReport, push_report: PushReport
) -> StepRecord:
    """Make a step's record from the results of its phases. The loop adds the seconds, and what happens after the push."""
    domain_by_sample = {r.sample_id: r.domain for r in batch.rollouts}
    quarantined_by_domain = Counter(q.domain for q in batch.quarantined)
    quarantined_by_domain.update(domain_by_sample[sample_id] for sample_id in targets.quarantined)
    trained_rollouts = _select_trained(batch, targets, train_report)
    return StepRecord(
        step=train_report.step,
        loss=train_report.loss,
        domains={name: DomainRecord.from_stats(stats) for name, stats in train_report.domains.items()},
        positions={
            _format_positions(num_bits): PositionRecord(loss=stats.kl_sum / stats.tokens, tokens=stats.tokens)
            for num_bits, stats in train_report.positions.items()
        },
        response_tokens=sum(len(r.response_ids) for r in batch.rollouts),
        prompt_tokens=sum(len(r.prompt_ids) for r in batch.rollouts),
        truncated=sum(r.truncated for r in batch.rollouts),
        prompts=_count_prompts(batch),
        truncated_by_domain=dict(Counter(r.domain for r in trained_rollouts if r.truncated)),
        looping_by_domain=dict(Counter(r.domain for r in trained_rollouts if is_looping(r))),
        quarantined=dict(quarantined_by_domain),
        quarantined_reasons={**{q.prompt_id: q.reason for q in batch.quarantined}, **targets.quarantined},
        episodes=_record_episodes(batch, train_report),
        skipped=train_report.skipped,
        restarted=(*batch.restarted, *targets.restarted),
        stream=StreamRecord(
            parts=targets.num_parts,
            bytes=targets.nbytes,
            peak_bytes=train_report.peak_bytes,
            early_micro_batches=train_report.early_micro_batches,
        ),
        grad_norm=train_report.grad_norm,
        lr=train_report.lr,
        indexer_loss=train_report.indexer_loss,
        draft={**train_report.companions.get(DRAFT, {}), **summarise_engine(batch.accepted, batch.speeds)},
        logprob_gap=train_report.logprob_gap,
        drift=train_report.drift,
        token_ages={str(age): tokens for age, tokens in count_ages(trained_rollouts, push_report.version - 1).items()},
        policy_version=push_report.version,
        probe_gap=push_report.gap,
    )


def measure_busy_seconds(
    record: StepRecord, rollout_s: float, targets: TargetStream, train_report: StepReport
) -> dict[str, float]:
    """Compute `StepRecord.busy_s` of a finished step. `rollout_s`: seconds in which engines wrote."""
    busy_s = {
        "rollout": rollout_s,
        "teachers": 0.0 if record.replayed else targets.busy_s,
        "trainer": record.phase_s["train"] - train_report.waited_s,
    }
    return {role: round(seconds, 4) for role, seconds in busy_s.items()}


def _select_trained(batch: RolloutBatch, targets: TargetStream, report: StepReport) -> list[Rollout]:
    """Return the rollouts with trained tokens, which `DomainRecord.samples` counts. A step without an optimiser step has none."""
    if report.skipped:
        return []
    return [r for r in batch.rollouts if r.num_trained and r.sample_id not in targets.quarantined]


def _record_episodes(batch: RolloutBatch, report: StepReport) -> dict[str, EpisodesRecord]:
    """Return domain -> record."""
    return {
        domain: EpisodesRecord.from_stats(
            stats, {turn: part for (d, turn), part in report.turns.items() if d == domain}
        )
        for domain, stats in batch.episodes.items()
    }


def _count_prompts(batch: RolloutBatch) -> dict[str, int]:
    """Return domain -> number of prompts that the step took, once for each response.

    An episode counts once, however many segments it has, in the domain of its first segment.
    """
    episodes: dict[str, str] = {}
    for rollout in batch.rollouts:
        episodes.setdefault(rollout.episode, rollout.domain)
    return dict(Counter(episodes.values()) + Counter(q.domain for q in batch.quarantined))


def _format_positions(num_bits: int) -> str:
    """Return the positions that a key of `StepReport.positions` stands for, which is their number of binary digits: 0 -> `0`, 1 -> `1`,
    3 -> `4-7`."""
    return str(num_bits) if num_bits < 2 else f"{2 ** (num_bits - 1)}-{2**num_bits - 1}"
