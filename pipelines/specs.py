"""Turn a pipeline's settings into the spec of each engine. No other module makes a spec from a `PipelineConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.cluster import LOCAL
from opd.config import PipelineConfig, has_short_first_round, scored_model_len, sync_tolerance
from opd.config.payloads import TEXT
from opd.config.reward import CriticBaseline, PreferenceConfig
from opd.config.sections import TrainerConfig
from opd.config.teachers import FlightTeachers, OpenAITeachers, TransformersTeachers, VLLMTeachers
from opd.credit.critic import CriticSpec
from opd.credit.gae import CUT_REASONS, GaeSpec
from opd.draft.shape import DraftShape
from opd.records.types import TeacherPrompts, WeightedTeacher
from opd.reward.preference import PreferenceSpec
from opd.rollouts.episodes.drift import DriftOptions
from opd.rollouts.vllm import RolloutSpec
from opd.rollouts.worker import EngineOptions
from opd.servers.budget import CallBudget
from opd.servers.text_server import TextServerSpec
from opd.settings.strict import NUMPY_SEEDS, TORCH_SEEDS
from opd.train.base_scoring import BaseScoring, BaseTeacher
from opd.train.companions import CompanionSpec
from opd.train.compiled_layers import EAGER_ATTENTION_TOKENS
from opd.train.critic import CriticEngineSpec
from opd.train.critic_rank import CriticOptions
from opd.train.deepspeed import TrainerSpec
from opd.train.discriminator import DiscriminatorSpec
from opd.train.discriminator_rank import DiscriminatorOptions
from opd.train.lora import LoraOptions
from opd.train.optimizer import AdamWOptions
from opd.train.rank import RankOptions
from opd.train.schedule import LearningRate
from opd.train.student import IndexerTermSpec
from opd.train.turns import TurnWeights
from opd.train.zero import ModelOptions
from pipelines.cores import roles_at_once
from pipelines.inputs.environments import episode_options
from pipelines.routes import base_teacher_weights, domain_payload, preferred_domains, text_routes
from teachers.flight.client import FlightSpec
from teachers.no_teachers import TeacherlessSpec
from teachers.pool import PoolSpec
from teachers.scorers import ScorerOptions, Server
from teachers.texts.teaching import TextDomain, TextTeachingSpec

if TYPE_CHECKING:
    from experts.sft import ImitationSpec


Scoring = Mapping[str, tuple[WeightedTeacher, ...]]
"""Domain -> the teachers that score its responses, with their weights."""
NO_SCORING: Scoring = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFeatures:
    """Settings of rollout engines in training, and not in exams."""

    untrained: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Explained at `Inputs.untrained`."""
    drift: Mapping[str, DriftOptions] = field(default_factory=dict)
    """Domain -> what is done about compounding drift."""
    judged: Path | None = None
    """The run's file of what the guard's judge answered."""


def rollout_spec(
    config: PipelineConfig,
    model_dir: Path,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    training: TrainingFeatures | None = None,
) -> RolloutSpec:
    """Return the spec of rollout engines that begin with the model in `model_dir`; `vocab_size` is the tokenizer's."""
    training = training or TrainingFeatures()
    rollout = config.rollout
    episodes = episode_options(config, training.judged)
    return RolloutSpec(
        engine=_engine_options(config, model_dir, vocab_size, acts=bool(episodes)),
        stop_token_ids=tuple(stop_token_ids),
        untrained=training.untrained,
        episodes=episodes,
        drift=training.drift,
        workers=rollout.workers,
        gpus=config.cluster.rollout_gpus,
        kv_cache_gib=rollout.kv_cache_gib,
        roles=roles_at_once(config),
        seed=config.seed,
        n=rollout.n,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        max_answer_tokens=config.evaluate.max_new_tokens or rollout.max_new_tokens,
        start_timeout_s=config.cluster.start_timeout_s,
        timeout_s=config.cluster.phase_timeout_s,
    )


def _engine_options(config: PipelineConfig, model_dir: Path, vocab_size: int, *, acts: bool) -> EngineOptions:
    """Return the options of one rollout engine. `acts`: it plays episodes, whose turns begin alike."""
    rollout = config.rollout
    return EngineOptions(
        model_dir=model_dir,
        dtype=rollout.dtype,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        vocab_size=vocab_size,
        share_prompts=rollout.shares_prefixes or acts,
        sleep=rollout.sleep,
        tensor_parallel_size=rollout.tensor_parallel_size,
        kv_cache_dtype=rollout.kv_cache_dtype,
        engine_args=rollout.engine_args,
        draft=_served_draft(config, vocab_size),
        num_speculative_tokens=rollout.num_speculative_tokens,
        add_special_tokens=config.student.puts_in_front,
    )


def _served_draft(config: PipelineConfig, vocab_size: int) -> DraftShape | None:
    """Return the shape of the draft that rollout engines guess with; None if they do not."""
    if config.draft is None or not config.rollout.num_speculative_tokens:
        return None
    from pipelines.draft import draft_shape  # imports code of transformers, which takes a second

    return draft_shape(config.student.model, config.draft, vocab_size)


def trainer_spec(
    config: PipelineConfig, vocab_size: int, scoring: Scoring = NO_SCORING, end_token_ids: Sequence[int] = ()
) -> TrainerSpec:
    """Return the spec of the trainer; `vocab_size` is the tokenizer's. `scoring`: `Teaching.scoring`. `end_token_ids`: see `RankOptions`."""
    return TrainerSpec(
        rank=replace(rank_options(config, vocab_size, scoring), end_token_ids=tuple(end_token_ids)),
        rate=learning_rate(config.trainer),
        domain_weights={name: domain.loss_weight for name, domain in config.domains.items()},
        teacher_prompts=base_teacher_prompts(config, scoring),
        weighs_turns=any(turn_weights(config)),
        share_prompts=config.rollout.shares_prefixes,
        short_first=has_short_first_round(config),
        queue_bytes=config.teachers.queue,
        tolerance=sync_tolerance(config),
        **shared_ranks_settings(config),
    )


def shared_ranks_settings(config: PipelineConfig) -> dict[str, Any]:
    """Return the fields of `RanksSpec` that the trainer, the critic and the discriminator have in common."""
    return {
        "micro_batch_tokens": config.trainer.micro_batch_tokens,
        "gpus": config.cluster.trainer_gpus,
        "roles": roles_at_once(config),
        "one_machine": config.cluster.address == LOCAL,
        "start_timeout_s": config.cluster.start_timeout_s,
    }


def copy_model_options(config: PipelineConfig, vocab_size: int, name: str) -> dict[str, Any]:
    """Return the trainer's `ModelOptions` for a model beside the student, called `name`."""
    trainer = rank_options(config, vocab_size)
    return {own.name: getattr(trainer, own.name) for own in fields(ModelOptions)} | {"name": name}


def critic_spec(config: PipelineConfig, baseline: CriticBaseline, vocab_size: int) -> CriticSpec:
    """Return the spec of the critic: the trainer's ranks, steps and optimiser, and a learning rate of its own."""
    rate = learning_rate(config.trainer)
    engine = CriticEngineSpec(
        rank=critic_options(config, baseline, vocab_size),
        rate=replace(rate, peak=rate.peak * baseline.lr_ratio),
        **shared_ranks_settings(config),
    )
    return CriticSpec(
        engine=engine,
        gae=GaeSpec(
            gamma=baseline.gamma,
            policy_lambda=baseline.policy_lambda,
            critic_lambda=baseline.critic_lambda,
            bootstrap=CUT_REASONS if baseline.bootstrap else frozenset(),
        ),
        updates=baseline.updates,
        warm_up=baseline.warm_up,
    )


def preference_spec(config: PipelineConfig, preference: PreferenceConfig, vocab_size: int) -> PreferenceSpec:
    """Return the spec of the discriminator: the trainer's ranks, steps and optimiser, and a learning rate of its own."""
    rate, options = learning_rate(config.trainer), copy_model_options(config, vocab_size, "discriminator")
    engine = DiscriminatorSpec(
        rank=DiscriminatorOptions(**options, chunk=config.objective.chunk),
        rate=replace(rate, peak=rate.peak * preference.lr_ratio),
        **shared_ranks_settings(config),
    )
    return PreferenceSpec(
        engine=engine,
        controls=preference.controls,
        length_ratio=preference.length_ratio,
        updates=preference.updates,
        warm_up=preference.warm_up,
    )


def critic_options(config: PipelineConfig, baseline: CriticBaseline, vocab_size: int) -> CriticOptions:
    """Return the options of one rank of the critic: the trainer's, where the pipeline has no others for it."""
    options = copy_model_options(config, vocab_size, "critic")
    if baseline.max_grad_norm is not None:
        options["max_grad_norm"] = baseline.max_grad_norm
    return CriticOptions(**options, value_clip=baseline.value_clip, freeze_attention=baseline.freeze_attention)


def rank_options(config: PipelineConfig, vocab_size: int, scoring: Scoring = NO_SCORING) -> RankOptions:
    """Return the options of one rank of the trainer; arguments as for `trainer_spec`."""
    trainer = config.trainer
    return RankOptions(
        name="student",
        model_dir=config.student.model,
        world_size=trainer.ranks,
        dtype=trainer.dtype,
        vocab_size=vocab_size,
        objective=config.objective,
        domain_objectives=config.own_objectives,
        temperature=config.rollout.temperature,
        adamw=adamw_options(trainer),
        max_grad_norm=trainer.max_grad_norm,
        grad_accum_dtype=trainer.grad_accum_dtype,
        gradient_checkpointing=trainer.gradient_checkpointing,
        activation_offloading=trainer.activation_offloading,
        mlp_tile_tokens=trainer.mlp_tile_tokens,
        compile=trainer.compile,
        companions=companion_specs(config, vocab_size),
        indexers=indexers_spec(config),
        sequence_parallel_size=trainer.sequence_parallel_size,
        eager_attention=eager_attention(config),
        bucket=trainer.bucket,
        deepspeed=trainer.deepspeed.settings,
        head_memory_bytes=trainer.head_memory,
        turn_weights=turn_weights(config),
        lora=lora_options(config),
        base_scoring=base_scoring(config, scoring),
        timeout_s=config.cluster.phase_timeout_s,
        lends_memory=config.rollout.sleep and config.cluster.trainer_gpus > 0,
    )


def companion_specs(config: PipelineConfig, vocab_size: int) -> tuple[CompanionSpec, ...]:
    """Return the specs of the models that learn beside the student."""
    if config.draft is None:
        return ()
    from pipelines.draft import draft_spec  # imports code of transformers, which takes a second

    return (draft_spec(config, config.draft, vocab_size),)


def indexers_spec(config: PipelineConfig) -> IndexerTermSpec | None:
    """Return the spec with which the student's sparse indexers learn; None if they do not."""
    indexers = config.student.indexers
    if indexers is None or not indexers.loss_weight:
        return None
    from opd.indexers.student import LearningIndexersSpec  # imports torch

    return LearningIndexersSpec(loss_weight=indexers.loss_weight)


def eager_attention(config: PipelineConfig) -> bool:
    """Return True if the trainer's ranks attend by written out scores.

    They do where compiling fuses these, rows are short and there is no GPU.
    """
    short = config.rollout.max_model_len <= EAGER_ATTENTION_TOKENS
    return config.trainer.compile and short and config.cluster.trainer_gpus == 0


def turn_weights(config: PipelineConfig) -> dict[str, TurnWeights]:
    """Return domain -> weights of its turns, for domains whose turns do not all weigh the same."""
    weights = {name: domain.environment.turn_weights for name, domain in config.domains.items() if domain.environment}
    return {name: TurnWeights(**settings.model_dump()) for name, settings in weights.items() if settings is not None}


def lora_options(config: PipelineConfig) -> LoraOptions | None:
    """Return the adapters of the pipeline's student; None if its own weights are trained."""
    lora = config.student.lora
    if lora is None:
        return None
    targets = lora.targets if isinstance(lora.targets, str) else tuple(lora.targets)
    return LoraOptions(r=lora.r, alpha=lora.alpha, targets=targets, seed=config.seed % TORCH_SEEDS)


def base_scoring(config: PipelineConfig, scoring: Scoring) -> BaseScoring | None:
    """Return the settings by which trainer ranks score with teachers on the student's base; None if they do not."""
    teachers = {weighted.teacher.name: weighted.teacher for assigned in scoring.values() for weighted in assigned}
    on_base = tuple(
        BaseTeacher(
            name=name,
            weights=weights,
            adapter_dir=teachers[name].adapter_dir if name in teachers else None,
            probe=teachers[name].probe if name in teachers else None,
            decay=config.inline_experts[name].ema if name in config.inline_experts else None,
        )
        for name, weights in base_teacher_weights(config, scoring).items()
    )
    if not on_base:
        return None
    domain = next(iter(on_base[0].weights))
    assigned = scoring.get(domain, ())
    payload = domain_payload(config, assigned) if assigned else config.teachers.payload
    return BaseScoring(teachers=on_base, payload=payload, top_k=config.objective_of(domain).top_k)


def base_teacher_prompts(config: PipelineConfig, scoring: Scoring) -> dict[str, dict[str, TeacherPrompts]]:
    """Return name -> domain -> what the teacher reads there, for those teachers of `base_scoring` that have prompts of their own."""
    on_base = base_teacher_weights(config, scoring)
    prompts: dict[str, dict[str, TeacherPrompts]] = {}
    for domain, assigned in scoring.items():
        for weighted in assigned:
            if weighted.prompts is not None and weighted.teacher.name in on_base:
                prompts.setdefault(weighted.teacher.name, {})[domain] = weighted.prompts
    return prompts


def learning_rate(trainer: TrainerConfig) -> LearningRate:
    """Return the rate of each of the pipeline's steps."""
    return LearningRate(
        peak=trainer.lr,
        steps=trainer.steps,
        warmup_steps=trainer.warmup_steps,
        decay=trainer.lr_scheduler_type,
        floor=trainer.min_lr_ratio,
        shorter=tuple((entry.at, entry.steps) for entry in trainer.extended),
    )


def imitation_spec(config: PipelineConfig, micro_batch: int, accumulate: int) -> ImitationSpec:
    """Return the spec of training on given text with the merge's optimiser and schedule, `micro_batch * accumulate` examples a
    step."""
    from experts.sft import ImitationSpec

    return ImitationSpec(
        adamw=adamw_options(config.trainer),
        rate=learning_rate(config.trainer),
        max_grad_norm=config.trainer.max_grad_norm,
        dtype=config.trainer.dtype,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        micro_batch=micro_batch,
        accumulate=accumulate,
        seed=config.seed % NUMPY_SEEDS,
    )


def adamw_options(trainer: TrainerConfig) -> AdamWOptions:
    """Return the pipeline's optimiser."""
    return AdamWOptions(
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        epsilon=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
    )


def pool_spec(config: PipelineConfig, vocab_size: int, *, first_worker: int = 0, other_processes: int = 0) -> PoolSpec:
    """Return the spec of a pool with scoring workers of its own; `vocab_size` is the tokenizer's, the rest as in `TeacherGroup`."""
    teachers = config.teachers
    return PoolSpec(
        engine=teachers.engine,
        scorer=scorer_options(config, vocab_size),
        workers=teachers.scoring_workers,
        first_worker=first_worker,
        other_processes=other_processes,
        gpus=config.cluster.teacher_gpus,
        roles=roles_at_once(config),
        kv_cache_gib=teachers.kv_cache_gib if isinstance(teachers, VLLMTeachers) else 1,
        max_quarantined=teachers.max_quarantined,
        start_timeout_s=config.cluster.start_timeout_s,
        timeout_s=config.cluster.phase_timeout_s,
    )


def scorer_options(config: PipelineConfig, vocab_size: int) -> ScorerOptions:
    """Return the options of a scoring worker. A key that this engine does not have keeps its default."""
    teachers = config.teachers
    engine_options: dict[str, Any] = {}
    if isinstance(teachers, TransformersTeachers):
        engine_options = {
            "memory_bytes": teachers.memory,
            "gpu_memory_bytes": teachers.gpu_memory,
            "device_map": teachers.device_map,
            "max_memory": dict(teachers.max_memory),
        }
    elif isinstance(teachers, VLLMTeachers):
        engine_options = {
            "gpu_memory_utilization": teachers.gpu_memory_utilization,
            "tensor_parallel_size": teachers.tensor_parallel_size,
        }
    elif isinstance(teachers, OpenAITeachers):
        servers = {
            name: Server(base_url=server.base_url, model=server.model) for name, server in teachers.servers.items()
        }
        engine_options = {
            "servers": servers,
            "api_key_env": teachers.api_key_env,
            "server_timeout_s": teachers.server_timeout_s,
        }
    return ScorerOptions(
        dtype=teachers.dtype,
        payload=teachers.payload,
        top_k=config.objective.top_k,
        vocab_size=vocab_size,
        share_prompts=config.rollout.shares_prefixes,
        lends_memory=config.rollout.sleep and config.cluster.teacher_gpus > 0,
        max_model_len=scored_model_len(config),
        **engine_options,
    )


def flight_spec(config: PipelineConfig, vocab_size: int) -> FlightSpec:
    """Return the spec of teachers that are served elsewhere; `vocab_size` is the tokenizer's."""
    teachers = config.teachers
    assert isinstance(teachers, FlightTeachers)
    return FlightSpec(
        address=teachers.address,
        tls_root_certs=teachers.tls_root_certs,
        token_file=teachers.token_file,
        payload=teachers.payload,
        dtype=teachers.dtype,
        top_k=config.objective.top_k,
        vocab_size=vocab_size,
        max_quarantined=teachers.max_quarantined,
        start_timeout_s=config.cluster.start_timeout_s,
        timeout_s=config.cluster.phase_timeout_s,
    )


def teacherless_spec(config: PipelineConfig) -> TeacherlessSpec:
    """Return the spec of the pool that asks no teacher."""
    payload = TEXT if config.teachers.payload == TEXT else "none"
    return TeacherlessSpec(
        dtype=config.teachers.dtype, max_quarantined=config.teachers.max_quarantined, payload=payload
    )


def text_spec(
    config: PipelineConfig, routes: Mapping[str, tuple[WeightedTeacher, ...]], stop_token_ids: Sequence[int]
) -> TextTeachingSpec | None:
    """Return the spec of the experts that only write text; None if there are none. `routes`: `Teaching.routes`."""
    texts = text_routes(config, routes)
    if not texts:
        return None
    compared = preferred_domains(config, routes)
    domains = {}
    for domain, (expert, section) in texts.items():
        domains[domain] = TextDomain(
            expert=expert,
            server=TextServerSpec.from_config(section, section.api, config.rollout.max_new_tokens),
            steps=section.steps,
            compares=domain in compared,
            budget=CallBudget.from_config(section),
        )
    return TextTeachingSpec(
        domains=domains,
        stop_token_ids=tuple(stop_token_ids),
        max_new_tokens=config.rollout.max_new_tokens,
        max_model_len=config.rollout.max_model_len,
        max_quarantined=config.teachers.max_quarantined,
    )
