"""The record of one step: a line of `metrics.jsonl`, and what progress, sinks and the report read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan
from typing import TYPE_CHECKING, Any, Self

from opd.types import DomainStats, PushReport, RolloutBatch, SavedCheckpoint, StepReport

if TYPE_CHECKING:  # it needs pyarrow
    from opd.stream.targets import TargetStream


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainRecord:
    """Means over one domain's trained tokens; None where the teachers' payload does not tell."""

    loss: float | None = None
    """The objective's value, nats."""
    student_entropy: float | None = None
    """Nats, like the next."""
    teacher_entropy: float | None = None
    argmax_agreement: float | None = None
    """Share of the tokens where student and teacher rank the same token first."""
    teacher_top1: float | None = None
    """Share of the tokens where the sampled token is the teacher's first."""
    clip_rate: float | None = None
    """Share of the tokens where the objective clipped."""
    student_mass: float | None = None
    """Student's probability of the tokens that a top-k teacher gave."""
    teacher_mass: float | None = None
    """Teacher's probability of them."""
    tokens: int = 0
    """Response tokens that carried loss."""
    samples: int = 0
    """Responses with a trained token."""

    @classmethod
    def of(cls, stats: DomainStats) -> Self:
        """The means of a domain's sums."""
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
        means = {name: total / max(1, stats.tokens) for name, total in sums.items() if not isnan(total)}
        return cls(**means, tokens=stats.tokens, samples=stats.samples)

    def to_json(self) -> dict[str, float]:
        """What is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRecord:
    """The trained tokens at some positions of their responses."""

    loss: float
    """Mean, nats a token."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """What passed from the teachers to the trainer."""

    parts: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    """Most bytes of parts that had come and were not yet trained."""
    early_micro_batches: int = 0
    """Rounds of micro-batches that the ranks had before the last row was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. The defaults are those of what a file of an older release does not have."""

    step: int
    """From 1."""
    loss: float = 0.0
    """The optimised mean over the global batch, nats."""
    domains: Mapping[str, DomainRecord] = field(default_factory=dict)
    positions: Mapping[str, PositionRecord] = field(default_factory=dict)
    """By places in the response: `0`, `1`, `2-3`, `4-7` and so on."""
    response_tokens: int = 0
    """Of all responses, whether they were trained or not."""
    prompt_tokens: int = 0
    truncated: int = 0
    """Responses that ended at their limit."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """Prompts that the step took, by domain, those that were left out among them."""
    truncated_by_domain: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Prompts and responses that were left out, by domain."""
    quarantined_reasons: Mapping[str, str] = field(default_factory=dict)
    """By the id of the prompt or of the sample."""
    skipped: bool = False
    """No token was trained, so that there was no optimiser step."""
    restarted: tuple[str, ...] = ()
    """Workers that died and were started again."""
    stream: StreamRecord = StreamRecord()
    grad_norm: float = 0.0
    """Before clipping."""
    lr: float = 0.0
    logprob_gap: float = 0.0
    """Mean |trainer - engine| log-prob of the sampled tokens, nats."""
    policy_version: int = 0
    """Of the weights that were pushed after the step."""
    probe_gap: float = 0.0
    """Mean |trainer - engine| log-prob of the probe tokens after the push, nats."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase; that of a checkpoint is the one after the step before."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """By domain, of an exam after this step; empty if there was none."""
    replayed: bool = False
    """The step's rows came from the target log."""
    checkpoint: SavedCheckpoint | None = None
    """The checkpoint that was committed after the step before."""

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(self.phase_s.values())

    def to_json(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`, without what this step does not have."""
        data = asdict(self)
        data["domains"] = {name: found.to_json() for name, found in self.domains.items()}
        optional = ("restarted", "accuracy", "replayed", "checkpoint")
        return {key: value for key, value in data.items() if value or key not in optional}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; keys of a newer release are left out. Raises: TypeError for anything else."""
        read = _known(cls, data)
        read["domains"] = {name: DomainRecord(**_known(DomainRecord, d)) for name, d in read.get("domains", {}).items()}
        read["positions"] = {name: PositionRecord(**found) for name, found in read.get("positions", {}).items()}
        read["restarted"] = tuple(read.get("restarted", ()))
        read["stream"] = StreamRecord(**_known(StreamRecord, read.get("stream", {})))
        if "checkpoint" in read:
            read["checkpoint"] = SavedCheckpoint(**read["checkpoint"])
        return cls(**read)


def _known(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: TypeError if this is no object of JSON."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.60} where {record.__name__} was expected")
    return {f.name: data[f.name] for f in fields(record) if f.name in data}


def step_record(batch: RolloutBatch, targets: TargetStream, trained: StepReport, pushed: PushReport) -> StepRecord:
    """What a step's phases say about it; the loop adds its seconds and what it did after the push."""
    domain_of = {r.sample_id: r.domain for r in batch.rollouts}
    left_out = Counter(q.domain for q in batch.quarantined) + Counter(domain_of[i] for i in targets.quarantined)
    return StepRecord(
        step=trained.step,
        loss=trained.loss,
        domains={name: DomainRecord.of(stats) for name, stats in trained.domains.items()},
        positions={
            _places(bits): PositionRecord(loss=stats.kl_sum / stats.tokens, tokens=stats.tokens)
            for bits, stats in trained.positions.items()
        },
        response_tokens=sum(len(r.response_ids) for r in batch.rollouts),
        prompt_tokens=sum(len(r.prompt_ids) for r in batch.rollouts),
        truncated=sum(r.truncated for r in batch.rollouts),
        prompts=dict(Counter(r.domain for r in batch.rollouts) + Counter(q.domain for q in batch.quarantined)),
        truncated_by_domain=dict(Counter(r.domain for r in batch.rollouts if r.truncated)),
        quarantined=dict(left_out),
        quarantined_reasons={**{q.prompt_id: q.reason for q in batch.quarantined}, **targets.quarantined},
        skipped=trained.skipped,
        restarted=(*batch.restarted, *targets.restarted),
        stream=StreamRecord(
            parts=targets.num_parts,
            bytes=targets.nbytes,
            peak_bytes=trained.peak_bytes,
            early_micro_batches=trained.early_micro_batches,
        ),
        grad_norm=trained.grad_norm,
        lr=trained.lr,
        logprob_gap=trained.logprob_gap,
        policy_version=pushed.version,
        probe_gap=pushed.gap,
    )


def _places(bits: int) -> str:
    """Key of `StepReport.positions` in words: 0 -> `0`, 1 -> `1`, 3 -> `4-7`."""
    return str(bits) if bits < 2 else f"{2 ** (bits - 1)}-{2**bits - 1}"
