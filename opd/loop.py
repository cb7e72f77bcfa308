"""On-policy distillation, the whole method on one page.

    prompts ──Prompt──▶ engine ──Rollout──▶ teachers ──Arrow streams──▶ trainer ──weights, version+1──▶ engine
    (every domain       (vLLM)  (student    (each row by   (hidden states,  (ZeRO-3, exact    (sync: reload,
     in every step)              wrote it)   its domain's    per token)      divergence)       probe both sides)
                                             expert)             └──▶ target log ──▶ (a resume trains from it)

The schedule decides when the student writes (`opd.schedules`). With `sync` every sample trains the weights that wrote it. With
`one_step_off` the next step's samples are written while this step is scored and trained, and teachers begin to score them while the
new weights are pushed. Scored rows stream to the trainer. With `overlap` it begins before the last teacher is done; otherwise
teachers and trainer take turns on the same cores. The arithmetic is the same in all cases.

Prompts and seeds are functions of (seed, step); with `balance`, prompts also depend on the records of earlier steps. The only state
of a run is the trainer's weights and optimiser, the step, the policy version, the rollouts that were written ahead, and, with rewards,
what a baseline has learned.

    each step:     take → generate (→ teach) (→ reward) → score → log (→ credit) → train → push
    every K steps: checkpoint, written beside the next step; every E steps: evaluate
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opd.interfaces import (
    Checkpoints,
    Evaluator,
    Monitors,
    PromptSource,
    Reporter,
    Rewards,
    RolloutEngine,
    Schedule,
    TargetLog,
    TeacherPool,
    TextExperts,
    Traces,
    Trainer,
    WeightSync,
)
from opd.records.staleness import find_stale_samples, refuse_stale
from opd.records.step import StepRecord, build_step_record, measure_busy_seconds
from opd.records.types import Prompt, PushReport, RolloutBatch, SavedCheckpoint, StepReport
from opd.run.metrics import PhaseClock
from opd.run.paths import step_name

if TYPE_CHECKING:
    from opd.records.rewards import RewardStep
    from opd.stream.targets import TargetStream


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts that a merge is made of. `pipelines.build` makes them; tests use fakes."""

    prompts: PromptSource
    schedule: Schedule
    engine: RolloutEngine
    teachers: TeacherPool
    log: TargetLog
    trainer: Trainer
    sync: WeightSync
    evaluator: Evaluator
    monitors: Monitors
    traces: Traces
    checkpoints: Checkpoints
    reporter: Reporter
    rewards: Rewards | None = None
    """Judges rollouts for the policy gradient beside the divergence; None without `objective.reward`."""
    texts: TextExperts | None = None
    """Experts that only write text; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that a run takes, and what it does between them."""

    first_step: int
    last_step: int
    policy_version: int
    """Number of weight pushes that the engine has received before the first step."""
    checkpoint_every: int
    """Steps between checkpoints; there is also one after the last step."""
    evaluate_every: int
    """Steps between evaluations; 0: none during the merge."""
    overlap: bool
    """True: train while teachers still score. Meant for teachers and trainers that do not share cores."""

    def evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation follows the step."""
        return self.evaluate_every > 0 and step % self.evaluate_every == 0


def run(parts: Components, plan: Plan, stop: Callable[[], bool] = lambda: False) -> int:
    """Take the plan's steps, and return the number of the last one that was taken.

    After each step `stop()` is called; if it returns True, the run saves a checkpoint and ends.
    """
    version, clock = plan.policy_version, PhaseClock(parts.reporter.phase)
    saved: SavedCheckpoint | None = None
    following: _ScoredStep | None = None
    step = plan.first_step - 1
    for step in range(plan.first_step, plan.last_step + 1):
        scored = following or _score_rollouts(parts, step, version, clock)
        if step < plan.last_step:
            parts.schedule.begin_next(step + 1, version)
        if not plan.overlap:
            with clock("score"):
                scored.targets.wait_for_parts()
        reward = _compute_reward_step(parts, step, scored, clock)
        with clock("train"):
            trained = parts.trainer.train_step(step, scored.batch.rollouts, scored.targets, scored.stale, reward)
        with clock("rollout"):
            # The push below replaces the weights that an engine may still be writing with.
            parts.schedule.finish_writing()
        version += 1
        following = _score_rollouts(parts, step + 1, version, clock) if _begins_ahead(parts, plan, step) else None
        with clock("sync"):
            pushed = parts.sync.push(version)
        record = _make_record(parts, scored, trained, pushed)
        accuracy = _evaluate_weights(parts, step, clock) if plan.evaluates_after(step) else {}
        record = replace(
            record, accuracy=accuracy, replayed=scored.replayed, checkpoint=saved, phase_s=clock.take_seconds()
        )
        record = replace(
            record, busy_s=measure_busy_seconds(record, parts.schedule.take_busy_s(), scored.targets, trained)
        )
        record = replace(record, alarms=parts.monitors.judge(record, scored.batch.rollouts))
        parts.reporter.step(record)
        parts.traces.keep(step, scored.batch, trained)
        leaving = stop() or step == plan.last_step or record.ends_run
        with clock("checkpoint"):
            # The record comes first: a run that is killed in between resumes from an older checkpoint, and drops later records.
            # Room for two steps, because the next one is logged while a checkpoint of this one is written.
            saved = _take_committed(parts, wait=parts.log.lacks_room(1)) if parts.log.lacks_room(2) else None
            if leaving or step % plan.checkpoint_every == 0 or parts.log.lacks_room(2):
                parts.checkpoints.save(step, version, parts.schedule.carried(step))
            saved = _take_committed(parts, wait=leaving or parts.log.lacks_room(1)) or saved
        if leaving:
            break
    return step


def _take_committed(parts: Components, wait: bool) -> SavedCheckpoint | None:
    """Return the newest checkpoint that was committed since the last call, if any, after dropping the steps that it holds from the log.

    With `wait`, wait for one that is being written.
    """
    saved = parts.checkpoints.committed(wait=wait)
    if saved:
        parts.log.prune(saved.step)
    return saved


def _begins_ahead(parts: Components, plan: Plan, step: int) -> bool:
    """Return True if teachers begin to score step `step` + 1 while the weights of `step` are pushed; they do not need the push.

    The rollouts of the next step have to be written ahead for that. If an evaluation follows, they do not: its seconds would be
    counted as the teachers' work. With rewards they do not either, because rewards are judged and recorded one step at a time.
    """
    is_written_ahead = parts.schedule.STEPS_AHEAD > 0 and step < plan.last_step
    return is_written_ahead and parts.rewards is None and not plan.evaluates_after(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredStep:
    """A step's rollouts, and the stream of their teachers' scores, which may still be coming."""

    batch: RolloutBatch
    targets: TargetStream
    stale: frozenset[str]
    """Samples with tokens that older weights wrote than those that the step trains."""
    replayed: bool
    """True if the batch comes from the target log."""


def _score_rollouts(parts: Components, step: int, version: int, clock: PhaseClock) -> _ScoredStep:
    """Return the step from the target log. If the log lacks it, have the student write, teachers score, and the log record.

    `version`: version of the weights that the step trains. Raises: RunError for a row that is too old to be trained.
    """
    with clock("rollout"):
        prompts = parts.prompts.take(step)
        logged = parts.log.replay(step, version, prompts)
        batch = logged[0] if logged else _write_rollouts(parts, step, version, prompts)
        refuse_stale(batch.rollouts, version, parts.schedule.max_staleness)
        stale = find_stale_samples(batch.rollouts, version)
    if logged:
        parts.schedule.sleep_engines()
        with clock("score"):
            targets = logged[1] or parts.teachers.score(batch.rollouts)
        return _ScoredStep(batch=batch, targets=targets, stale=stale, replayed=True)
    with clock("score"):
        targets = parts.teachers.score(batch.rollouts, parts.log.begin(step))
        parts.log.record(step, version, prompts, batch, targets)
    return _ScoredStep(batch=batch, targets=targets, stale=stale, replayed=False)


def _write_rollouts(parts: Components, step: int, version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
    """Have the student write the step's rollouts; with experts that only write text, have these answer; with rewards, have all judged."""
    batch = parts.schedule.rollouts(step, version, prompts)
    batch = batch if parts.texts is None else parts.texts.teach(batch, prompts)
    return batch if parts.rewards is None else parts.rewards.judged(batch, prompts)


def _compute_reward_step(parts: Components, step: int, scored: _ScoredStep, clock: PhaseClock) -> RewardStep | None:
    """Compute the advantages of the optimiser step from the rollouts' rewards; None without rewards."""
    if parts.rewards is None:
        return None
    with clock("credit"):
        return parts.rewards.step(step, scored.batch.rollouts)


def _make_record(parts: Components, scored: _ScoredStep, trained: StepReport, pushed: PushReport) -> StepRecord:
    """Make the step's record; `run` adds what comes after the push: times, accuracy, alarms."""
    record = build_step_record(scored.batch, scored.targets, trained, pushed)
    record = record if parts.texts is None else replace(record, texts=parts.texts.sum_spending())
    if parts.rewards is None:
        return record
    return replace(record, reward=parts.rewards.record(scored.batch.rollouts, trained.policy))


def _evaluate_weights(parts: Components, step: int, clock: PhaseClock) -> dict[str, float]:
    """Evaluate the weights after this step, and report the result. Returns domain -> accuracy, 0..1."""
    with clock("evaluate"):
        evaluation = replace(parts.evaluator.evaluate(model=f"step {step}"), step=step)
    parts.reporter.evaluation(step_name(step), evaluation)
    return evaluation.accuracy
