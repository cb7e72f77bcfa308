"""Make the objects of a merge from its pipeline: the only module that knows every concrete class."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig, max_staleness, sync_tolerance
from opd.config.balance import SamplesBalance
from opd.config.reward import BaselineConfig, CriticBaseline, EmaBaseline, GroupBaseline
from opd.credit import CREDITS
from opd.credit.critic import CriticCredit
from opd.credit.ema import EmaCredit
from opd.credit.group import GroupCredit
from opd.credit.interfaces import Credit
from opd.evaluation.evaluator import EngineEvaluator
from opd.interfaces import PromptSource, RolloutEngine, Schedule, Sink, TargetLog
from opd.live.interfaces import Display
from opd.live.progress import RunReporter
from opd.loop import Components
from opd.monitors.acting import RunMonitors
from opd.prompts import Balance, BalancedPrompts, MixedPrompts, samples_by_weight
from opd.reward.preference import PreferenceRewards
from opd.reward.stream import CREDIT, PREFERENCE, RewardStream
from opd.reward.verified import VerifiedRewards
from opd.rollouts.decoding import end_ids
from opd.rollouts.episodes.drift import DriftOptions
from opd.rollouts.transformers import TransformersRolloutEngine
from opd.rollouts.vllm import RolloutSpec, VLLMRolloutEngine
from opd.run.checkpoints import CheckpointSource, CheckpointStore, CompanionSaver
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.schedules import SCHEDULES
from opd.schedules.spec import ScheduleSpec
from opd.settings.strict import DTYPE_BYTES
from opd.settings.user_objects import import_object
from opd.stream.log import ArrowTargetLog
from opd.sync import SYNCS
from opd.sync.proof import ProvenSync, SyncSpec, choose_probe_sequences
from opd.tool_formats.thoughts import TAGS
from opd.traces.trace_files import TraceFiles
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.inputs.drift import drift_options
from pipelines.inputs.judges import open_judges, prove_judges
from pipelines.inputs.read import Inputs
from pipelines.inputs.user_engine import import_users_engine
from pipelines.routes import preferred_domains
from pipelines.sizing.target_log import choose_log_limit
from pipelines.specs import (
    TrainingFeatures,
    critic_spec,
    flight_spec,
    pool_spec,
    preference_spec,
    rollout_spec,
    teacherless_spec,
    text_spec,
    trainer_spec,
)
from pipelines.teacher_groups import TeacherGroup, divide_by_engine
from teachers.flight.client import FlightPool
from teachers.joined_pools import JoinedPool, JoinedPools
from teachers.no_teachers import TeacherlessPool
from teachers.pool import Pool
from teachers.texts.teaching import FirstAnswer, TextTeaching

ROLLOUT_ENGINES: dict[str, type[VLLMRolloutEngine]] = {
    "vllm": VLLMRolloutEngine,
    "transformers": TransformersRolloutEngine,
}
"""`rollout.engine` -> class of the rollout engine."""


def _start_own_pool(group: TeacherGroup, vocab_size: int) -> Pool:
    place = {"first_worker": group.first_worker, "other_processes": group.other_processes}
    return Pool(pool_spec(group.config, vocab_size, **place), group.scoring)


def _start_flight_pool(group: TeacherGroup, vocab_size: int) -> FlightPool:
    return FlightPool(flight_spec(group.config, vocab_size), group.scoring)


def _start_teacherless_pool(group: TeacherGroup, vocab_size: int) -> TeacherlessPool:
    return TeacherlessPool(teacherless_spec(group.config))


AnyPool = Pool | FlightPool | TeacherlessPool
POOLS: dict[str, Callable[[TeacherGroup, int], AnyPool]] = {
    "transformers": _start_own_pool,
    "vllm": _start_own_pool,
    "openai": _start_own_pool,
    "flight": _start_flight_pool,
    "text": _start_teacherless_pool,
    "trainer": _start_teacherless_pool,
    "none": _start_teacherless_pool,
}
"""`teachers.engine` -> function that starts the pool."""


def num_workers(config: PipelineConfig) -> int:
    """Return the number of processes that a merge runs beside the driver."""
    trained_models = 1 + len(config.objective.judging_models)
    scoring_workers = sum(section.scoring_workers for section in config.engines)
    return config.rollout.workers + scoring_workers + trained_models * config.trainer.ranks


def build_merge(
    config: PipelineConfig,
    inputs: Inputs,
    paths: RunPaths,
    display: Display,
    identity: Mapping[str, Any],
    sinks: Sequence[Sink] = (),
) -> Components:
    """Start every worker and put the merge together; `identity` goes into every checkpoint.

    Raises: RunError if a worker does not come up.
    """
    texts = _build_texts(config, inputs, paths, display)
    engine, trainer, pool = _start_roles(config, inputs, display, paths.judge_answers.absolute())
    metrics = MetricsFile(paths.metrics)
    prompts = prompt_source(config, inputs, metrics)
    if isinstance(prompts, BalancedPrompts):  # each step's record decides how the next one is dealt out
        sinks = [prompts, *sinks]
    credit = _build_credit(config, inputs, display)
    preference = _build_preference(config, inputs, display, texts)
    saved = CompanionSaver(trainer, credit, CREDIT) if credit else trainer
    log = ArrowTargetLog(
        paths.targets,
        pool,
        inputs.student.vocab_size,
        display.say,
        config.cluster.phase_timeout_s,
        keeps_targets=config.target_log.keep == "targets",
        max_bytes=choose_log_limit(config, inputs),
    )
    return Components(
        prompts=prompts,
        schedule=_build_schedule(config, prompts, engine, log),
        engine=engine,
        teachers=pool,
        log=log,
        trainer=trainer,
        sync=_build_sync(config, inputs, trainer, engine, display),
        evaluator=EngineEvaluator(
            engine, inputs.exams, config.evaluate, inputs.tokenizer, display.say, inputs.expert_exams
        ),
        monitors=RunMonitors(config.monitors, paths, inputs.tokenizer, sync_tolerance(config)),
        traces=TraceFiles(paths, inputs.tokenizer, config.checkpoint.every, config.trainer.steps),
        checkpoints=_build_checkpoints(
            config, paths, CompanionSaver(saved, preference, PREFERENCE) if preference else saved, identity
        ),
        reporter=RunReporter(metrics, paths, display, sinks),
        rewards=_build_rewards(config, inputs, credit, preference, texts) if credit else None,
        texts=texts,
    )


def _build_schedule(config: PipelineConfig, prompts: PromptSource, engine: RolloutEngine, log: TargetLog) -> Schedule:
    spec = ScheduleSpec(
        prompts=prompts,
        engine=engine,
        log=log,
        max_staleness=max_staleness(config),
        timeout_s=config.cluster.phase_timeout_s,
        sleeps=config.rollout.sleep,
    )
    return SCHEDULES[config.schedule.mode](spec)


def _build_credit(config: PipelineConfig, inputs: Inputs, display: Display) -> Credit | None:
    """Return the object that turns rewards into advantages, ready; None without `objective.reward`. Raises: RunError."""
    if config.objective.reward is None:
        return None
    baseline = config.objective.reward.baseline
    if isinstance(baseline, CriticBaseline):
        credit: Credit = CriticCredit(critic_spec(config, baseline, inputs.student.vocab_size))
    else:
        credit = build_credit(baseline)
    if config.objective.has_critic:
        display.doing("the critic loads")
    credit.wait_ready()
    return credit


def _build_texts(config: PipelineConfig, inputs: Inputs, paths: RunPaths, display: Display) -> TextTeaching | None:
    """Return the experts that only write text, each of which has answered; None if there are none. Raises: ConfigError, StorageError."""
    spec = text_spec(config, inputs.routes, inputs.student.eos_token_ids)
    if spec is None:
        return None
    display.doing("experts that only write text answer")
    texts = TextTeaching(spec, inputs.tokenizer, paths.texts)
    texts.prove({domain: inputs.prompts[domain][0] for domain in spec.domains}, paths.merge_root)
    return texts


def prove_servers(config: PipelineConfig, inputs: Inputs, paths: RunPaths) -> None:
    """Have every expert that only writes text answer one prompt, and every judge score one answer, before there is a run.

    Files of the directory that is to become the run's keep what they wrote. Raises: ConfigError, StorageError.
    """
    prove_texts(config, inputs, paths.texts)
    open_judges(inputs.every_exam, paths.scores)
    list(prove_judges(inputs.exams))


def prove_texts(config: PipelineConfig, inputs: Inputs, path: Path) -> list[FirstAnswer]:
    """Have every expert that only writes text answer one prompt, before there is a run. Returns the answers.

    The file `path` keeps them, and those that it has are not asked for again. Raises: ConfigError, StorageError.
    """
    spec = text_spec(config, inputs.routes, inputs.student.eos_token_ids)
    if spec is None:
        return []
    prompts = {domain: inputs.prompts[domain][0] for domain in spec.domains}
    return TextTeaching(spec, inputs.tokenizer, path).prove(prompts)


def _build_preference(
    config: PipelineConfig, inputs: Inputs, display: Display, texts: TextTeaching | None
) -> PreferenceRewards | None:
    """Return the rewards of a discriminator, ready; None without `objective.reward.preference`. Raises: RunError."""
    reward = config.objective.reward
    if reward is None or reward.preference is None:
        return None
    assert texts is not None, "refused when the pipeline is read"
    spec = preference_spec(config, reward.preference, inputs.student.vocab_size)
    preference = PreferenceRewards(spec, preferred_domains(config, inputs.routes), texts, inputs.tokenizer)
    display.doing("the discriminator loads")
    preference.wait_ready()
    return preference


def build_credit(baseline: BaselineConfig) -> Credit:
    """Return the credit of an `objective.reward.baseline` without a model of its own."""
    if isinstance(baseline, EmaBaseline):
        return EmaCredit(baseline.decay)
    if isinstance(baseline, GroupBaseline):
        return GroupCredit(baseline.divide_by_std)
    plain: Credit = import_object(CREDITS[baseline.kind])()
    return plain


def _build_rewards(
    config: PipelineConfig,
    inputs: Inputs,
    credit: Credit,
    preference: PreferenceRewards | None,
    texts: TextTeaching | None,
) -> RewardStream:
    """Return the stream that adds the rewards to each step."""
    reward = config.objective.reward
    assert reward is not None
    preferred = preference.domains if preference else frozenset()
    rewarded = [name for name, domain in config.domains.items() if domain.is_rewarded and name not in preferred]
    verifiers = {name: inputs.exams[name].verifier for name in rewarded if not config.domains[name].has_episodes}
    verified = VerifiedRewards(verifiers, inputs.tokenizer, inputs.student.eos_token_ids, reward.timeout_s)
    return RewardStream(reward, {*rewarded, *preferred}, verified, credit, preference, texts)


def _build_sync(
    config: PipelineConfig, inputs: Inputs, trainer: DeepSpeedTrainer, engine: VLLMRolloutEngine, display: Display
) -> ProvenSync:
    # Domains take turns, as far as the shortest one goes, so that the probe has prompts of all of them.
    every_prompt = (p for prompts in zip(*inputs.prompts.values(), strict=False) for p in prompts)
    spec = SyncSpec(
        trainer=trainer,
        engine=engine,
        probe=choose_probe_sequences(every_prompt, config.sync.probe_tokens, config.rollout.max_model_len),
        tolerance=sync_tolerance(config),
        adapts_tolerance=config.sync.tolerance is None,
        sends_draft=config.rollout.num_speculative_tokens > 0,
        keeps_weights=SCHEDULES[config.schedule.mode].STEPS_AHEAD > 0,
        nbytes=inputs.pushed * DTYPE_BYTES[config.trainer.dtype],
        tell=display.say,
    )
    return SYNCS[config.push_kind](spec)


def start_rollouts(
    config: PipelineConfig, inputs: Inputs, *, training: bool = False, judged: Path | None = None
) -> VLLMRolloutEngine:
    """Start rollout engines with the student; returns before they are ready.

    With `training` they know which tokens carry no loss (`Inputs.untrained`) and how each domain counters drift; without, only
    which domains' prompts are prefixes. `judged` is the run's file with the answers of the guard's judge.
    """
    student_facts = (config.student.model, inputs.student.vocab_size, inputs.student.eos_token_ids)
    drift = drift_options(config, inputs.routes)
    if training:
        options = TrainingFeatures(untrained=inputs.untrained, drift=drift, judged=judged)
    else:
        prefixes = {domain: DriftOptions(replay=True) for domain, cure in drift.items() if cure.replay}
        options = TrainingFeatures(drift=prefixes, judged=judged)
    spec = rollout_spec(config, *student_facts, options)
    return rollout_engine(config)(spec, inputs.tokenizer)


def rollout_engine(config: PipelineConfig) -> Callable[[RolloutSpec, Any], VLLMRolloutEngine]:
    """Return the class that `rollout.engine` names. Raises: ConfigError for a user's class that cannot be imported."""
    name = config.rollout.engine
    if name in ROLLOUT_ENGINES:
        return ROLLOUT_ENGINES[name]
    engine_class: Callable[[RolloutSpec, Any], VLLMRolloutEngine] = import_users_engine(name)
    return engine_class


class _StartUp:
    """Progress of the start-up: tells the user for which workers the run waits, and which are up."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._began = time.monotonic()
        self._up: list[str] = []

    def wait(self, role_name: str, role: VLLMRolloutEngine | DeepSpeedTrainer | AnyPool | JoinedPools) -> None:
        """Wait until a role is ready. Raises: RunError."""
        up = f" ({', '.join(self._up)}: up)" if self._up else ""
        self._display.doing(f"loading: {role_name}{up}")
        role.wait_ready()
        if role_name not in self._up and not isinstance(role, TeacherlessPool):
            self._up.append(role_name)
            self._display.say(f"{role_name}: up after {time.monotonic() - self._began:.0f} s")


def _start_roles(
    config: PipelineConfig, inputs: Inputs, display: Display, judged: Path | None = None
) -> tuple[VLLMRolloutEngine, DeepSpeedTrainer, AnyPool | JoinedPools]:
    """Start all workers side by side, except for those that must be ready before the others start. Raises: RunError."""
    groups = divide_by_engine(config, inputs.scoring)

    def start_pools(*, remote: bool) -> dict[int, AnyPool]:
        return {
            index: POOLS[group.config.teachers.engine](group, inputs.student.vocab_size)
            for index, group in enumerate(groups)
            if remote != bool(group.config.teachers.scoring_workers)
        }

    start_up = _StartUp(display)
    pools = start_pools(remote=True)
    for remote_pool in pools.values():
        # This costs no core here, and a wrong token should show before anything else starts.
        start_up.wait("teachers", remote_pool)
    engine = start_rollouts(config, inputs, training=True, judged=judged)
    if 0 < config.cluster.rollout_gpus < 1:
        # vLLM measures its GPU at the start, and counts memory that others take meanwhile as its own.
        start_up.wait("rollout engine", engine)
    pools |= start_pools(remote=False)
    pool = pools[0] if len(groups) == 1 else _join_pools(config, groups, [pools[index] for index in range(len(groups))])
    trainer = DeepSpeedTrainer(
        trainer_spec(config, inputs.student.vocab_size, inputs.scoring, _find_end_token_ids(config, inputs))
    )
    # The engine takes longest: meanwhile the trainer's ranks and the teachers prove how rows may be laid out for their models.
    start_up.wait("trainer", trainer)
    start_up.wait("teachers", pool)
    start_up.wait("rollout engine", engine)
    return engine, trainer, pool


def _find_end_token_ids(config: PipelineConfig, inputs: Inputs) -> list[int]:
    """Return the tokens at which an effort shows: those that end thoughts, or in their lack those that end turns."""
    if not config.efforts:
        return []
    vocabulary = inputs.tokenizer.get_vocab()
    ends = [vocabulary[end] for _, end in TAGS if end in vocabulary]
    return ends or sorted(end_ids(inputs.tokenizer, inputs.student.eos_token_ids))


def _join_pools(config: PipelineConfig, groups: Sequence[TeacherGroup], pools: Sequence[AnyPool]) -> JoinedPools:
    """Return one pool of those of all groups."""
    asked = [
        domain
        for group, pool in zip(groups, pools, strict=True)
        if not isinstance(pool, TeacherlessPool)
        for domain in group.scoring
    ]
    joined = [
        JoinedPool(
            pool=pool,
            # A domain that another pool scores too needs no row without an answer.
            domains=frozenset(group.scoring).difference(asked if isinstance(pool, TeacherlessPool) else ()),
            has_own_numbers=isinstance(pool, Pool),
        )
        for group, pool in zip(groups, pools, strict=True)
    ]
    return JoinedPools(
        joined,
        numbered_workers=sum(group.config.teachers.scoring_workers for group in groups),
        max_quarantined=config.teachers.max_quarantined,
        timeout_s=config.cluster.phase_timeout_s,
    )


def _build_checkpoints(
    config: PipelineConfig, paths: RunPaths, trainer: CheckpointSource, identity: Mapping[str, Any]
) -> CheckpointStore:
    return CheckpointStore(
        paths.checkpoints,
        trainer,
        config.checkpoint,
        world_size=config.trainer.ranks,
        identity=identity,
        timeout_s=config.cluster.phase_timeout_s,
    )


def prompt_source(config: PipelineConfig, inputs: Inputs, metrics: MetricsFile) -> MixedPrompts | BalancedPrompts:
    """Return the prompts of every step; `metrics` has the records of the steps that the run has taken."""
    weights, total, orders = (
        config.domain_weights,
        config.trainer.samples_per_step // config.rollout.n,
        config.prompt_orders,
    )
    if isinstance(config.balance, SamplesBalance):
        return MixedPrompts(inputs.prompts, samples_by_weight(total, weights), config.seed, config.rollout.n, orders)
    balance = Balance(config.balance, weights, total, config.seed)
    ahead = SCHEDULES[config.schedule.mode].STEPS_AHEAD
    return BalancedPrompts(inputs.prompts, balance, config.seed, metrics.read(), config.rollout.n, ahead, orders)
