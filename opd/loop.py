"""On-policy distillation, the whole method on one page.

    prompts ──Prompt──▶ engine ──Rollout──▶ teachers ──Arrow streams──▶ trainer ──weights, version+1──▶ engine
    (every domain       (vLLM)  (student    (each row by   (hidden states,  (ZeRO-3, exact    (sync: reload,
     in every step)              wrote it)   its domain's    per token)      reverse KL)       probe both sides)
                                             expert)             └──▶ target log ──▶ (a resume trains from it)

The schedule is synchronous: every sample is trained by the very weights that wrote it. Scored rows stream to the
trainer, which with `overlap` begins before the last teacher is done; without, the phases take turns on the same cores.
Either way it is the same arithmetic. Prompts and seeds are functions of (seed, step): the only state of a run is the
trainer's weights and optimiser, the step, and the policy version.

    each step:     take → generate → score → log → train → push
    every K steps: checkpoint, written beside the next step; every E steps: evaluate
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any

from opd.interfaces import (
    Checkpoints,
    Evaluator,
    PromptSource,
    Reporter,
    RolloutEngine,
    TargetLog,
    TeacherPool,
    Trainer,
    WeightSync,
)
from opd.metrics import PhaseClock
from opd.types import DomainStats, PushReport, RolloutBatch, StepReport

if TYPE_CHECKING:
    from opd.stream.targets import TargetStream


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a merge is made of; `pipelines.build` puts it together, tests put fakes in."""

    prompts: PromptSource
    engine: RolloutEngine
    teachers: TeacherPool
    log: TargetLog
    trainer: Trainer
    sync: WeightSync
    evaluator: Evaluator
    checkpoints: Checkpoints
    reporter: Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a run starts and ends, and what it does on the way."""

    first_step: int
    last_step: int
    policy_version: int
    """Pushes that the engine has received before the first step."""
    checkpoint_every: int
    evaluate_every: int
    """0: not during the merge."""
    overlap: bool
    """Train while teachers still score: for those that do not share their cores."""


def run(parts: Parts, plan: Plan, stop: Callable[[], bool] = lambda: False) -> int:
    """Take the plan's steps; after each, `stop()` may ask to checkpoint and leave. Returns the last step taken."""
    version = plan.policy_version
    clock = PhaseClock()
    saving: dict[str, Any] = {}
    step = plan.first_step - 1
    for step in range(plan.first_step, plan.last_step + 1):
        with clock("rollout"):
            prompts = parts.prompts.take(step)
            logged = parts.log.replay(step, version, prompts)
            batch = logged[0] if logged else parts.engine.generate(prompts, step=step, policy_version=version)
        with clock("score"):
            targets = logged[1] if logged else parts.teachers.score(batch.rollouts)
            if not logged:
                parts.log.record(step, version, prompts, batch, targets)
            if not plan.overlap:
                targets.collect()
        with clock("train"):
            trained = parts.trainer.train_step(step, batch.rollouts, targets)
        with clock("sync"):
            version += 1
            pushed = parts.sync.push(version)

        accuracy: dict[str, float] = {}
        if plan.evaluate_every and step % plan.evaluate_every == 0:
            with clock("evaluate"):
                found = replace(parts.evaluator.evaluate(model=f"step {step}"), step=step)
            parts.reporter.evaluation(f"step-{step:06d}", found)
            accuracy = found.accuracy
        record = _record(batch, targets, trained, pushed, accuracy, clock.take())
        parts.reporter.step(record | ({"replayed": True} if logged else {}) | saving)
        leaving = stop() or step == plan.last_step
        with clock("checkpoint"):
            # After the record: a kill in between resumes from the checkpoint before, and that rewinds the records.
            if leaving or step % plan.checkpoint_every == 0:
                parts.checkpoints.save(step, version)
            saved = parts.checkpoints.committed(wait=leaving)
            if saved:
                parts.log.prune(saved.step)
            saving = {"checkpoint": asdict(saved)} if saved else {}
        if leaving:
            break
    return step


def _record(
    batch: RolloutBatch,
    targets: TargetStream,
    trained: StepReport,
    pushed: PushReport,
    accuracy: dict[str, float],
    phase_s: dict[str, float],
) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    restarted = [*batch.restarted, *targets.restarted]
    domain_of = {r.sample_id: r.domain for r in batch.rollouts}
    left_out = Counter(q.domain for q in batch.quarantined) + Counter(domain_of[i] for i in targets.quarantined)
    return {
        "step": trained.step,
        "loss": trained.loss,
        "domains": {name: _domain_record(stats) for name, stats in trained.domains.items()},
        "positions": {
            _places(bits): {"loss": stats.kl_sum / stats.tokens, "tokens": stats.tokens}
            for bits, stats in trained.positions.items()
        },
        "response_tokens": sum(len(r.response_ids) for r in batch.rollouts),
        "prompt_tokens": sum(len(r.prompt_ids) for r in batch.rollouts),
        "truncated": sum(r.truncated for r in batch.rollouts),
        "truncated_by_domain": dict(Counter(r.domain for r in batch.rollouts if r.truncated)),
        "quarantined": dict(left_out),
        "quarantined_reasons": {**{q.prompt_id: q.reason for q in batch.quarantined}, **targets.quarantined},
        "skipped": trained.skipped,
        **({"restarted": restarted} if restarted else {}),
        "stream": {
            "parts": targets.num_parts,
            "bytes": targets.nbytes,
            "peak_bytes": trained.peak_bytes,
            "early_micro_batches": trained.early_micro_batches,
        },
        "grad_norm": trained.grad_norm,
        "lr": trained.lr,
        "logprob_gap": trained.logprob_gap,
        "policy_version": pushed.version,
        "probe_gap": pushed.gap,
        "phase_s": phase_s,
        **({"accuracy": accuracy} if accuracy else {}),
    }


def _places(bits: int) -> str:
    """Key of `StepReport.positions` in words: 0 -> `0`, 1 -> `1`, 3 -> `4-7`."""
    return str(bits) if bits < 2 else f"{2 ** (bits - 1)}-{2**bits - 1}"


def _domain_record(stats: DomainStats) -> dict[str, Any]:
    """Means over the domain's trained tokens; what the teachers' payload does not tell is left out."""
    means = {
        "loss": stats.kl_sum,
        "student_entropy": stats.entropy_sum,
        "teacher_entropy": stats.teacher_entropy_sum,
        "argmax_agreement": stats.agree_sum,
        "teacher_top1": stats.teacher_top1_sum,
        "clip_rate": stats.clipped_sum,
        "student_mass": stats.student_mass_sum,
        "teacher_mass": stats.teacher_mass_sum,
    }
    known = {name: total / max(1, stats.tokens) for name, total in means.items() if not isnan(total)}
    return {**known, "tokens": stats.tokens, "samples": stats.samples}
