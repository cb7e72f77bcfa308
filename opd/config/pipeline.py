"""The whole pipeline: its sections, the rules that hold between sections, and its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from opd.config.balance import BalanceConfig, SamplesBalance
from opd.config.devices import PushKind, choose_push_kind, find_push_problem
from opd.config.domains import (
    KEPT,
    STUDENT,
    DomainConfig,
    ExpertConfig,
    ExpertsConfig,
    KeepConfig,
    RegisteredExperts,
    StudentConfig,
)
from opd.config.draft import DraftConfig, find_draft_problem
from opd.config.drift import refuse_contradictions
from opd.config.efforts import EffortConfig, expand_efforts, find_efforts_problem, name_effort_domain
from opd.config.evaluate import EvaluateConfig
from opd.config.expert_engines import (
    find_engines_problem,
    find_own_objective_problem,
    list_engines,
    list_frozen_names,
    name_student_key,
    trainer_has_start,
)
from opd.config.guard import GuardConfig, refuse_useless_guard
from opd.config.monitors import MonitorsConfig
from opd.config.objectives import AnyObjective, ObjectiveConfig, build_default_objective
from opd.config.prompts import CHAT_COLUMNS
from opd.config.sections import (
    CheckpointConfig,
    ClusterConfig,
    LoggingConfig,
    RolloutConfig,
    ScheduleConfig,
    SyncConfig,
    TargetLogConfig,
    TrainerConfig,
)
from opd.config.teacher_prompts import TeacherPromptConfig
from opd.config.teachers import (
    FlightTeachers,
    NoTeachers,
    OpenAITeachers,
    Teachers,
    TeachersConfig,
    TextTeachers,
    TrainerTeachers,
    TransformersTeachers,
    change_teachers,
)
from opd.settings.strict import Name, Strict, UserPath
from opd.settings.yaml_files import apply_overrides, load_yaml, move_error, validate_section


def _number_or_list(value: Any) -> str:
    return "~list" if isinstance(value, list) else "~number"


class RoundConfig(Strict):
    """The settings in which one round differs from the pipeline. Every other setting is the pipeline's."""

    seed: int | None = Field(None, ge=0)
    """Default: the pipeline's in the first round, one more in each further one."""
    registry: UserPath | None = None
    experts: ExpertsConfig | None = None
    """All experts of the round."""
    domains: dict[Name, DomainConfig] | None = Field(None, min_length=1)
    """All domains of the round."""
    rollout: dict[str, Any] = {}
    """Keys that differ in this round; so for the three sections below."""
    teachers: dict[str, Any] = {}
    objective: dict[str, Any] = {}
    """With `kind` the whole section, without it the keys that differ."""
    trainer: dict[str, Any] = {}


class PipelineConfig(Strict):
    """One merge: who learns, from whom, on which prompts, and how."""

    name: Name
    """Names the run directory and the report."""
    seed: int = Field(0, ge=0)
    """Decides the order of prompts and every sampled token."""
    student: StudentConfig
    """The learner."""
    registry: UserPath | None = None
    """Expert registry for `experts: {use: ...}`; default: OPD_REGISTRY, else ./registry."""
    experts: ExpertsConfig
    """`{use: [names]}` from the registry, or `{name: {model, domain}}`; `{}` with `teachers.engine: none`."""
    domains: dict[Name, DomainConfig] = Field(..., min_length=1)
    """On which prompts, scored by which experts."""
    keep: KeepConfig | None = None
    """Keep what the start student can on these prompts, see docs/teacher_prompts.md: a domain `kept`, whose teacher it is."""
    efforts: dict[Name, EffortConfig] = {}
    """Effort, from the least to the most -> its tag in the student's prompt, see docs/efforts.md: domain `math` becomes the
    domains `math-low`, `math-high` and so on."""
    balance: BalanceConfig = SamplesBalance(kind="samples")
    """Samples that each domain gets in a step, see docs/balance.md."""
    rollout: RolloutConfig = RolloutConfig()
    teachers: TeachersConfig = TransformersTeachers()
    objective: AnyObjective = Field(default_factory=build_default_objective)
    trainer: TrainerConfig
    draft: DraftConfig | None = None
    """Train a draft for speculative decoding beside the student, see docs/drafts.md."""
    schedule: ScheduleConfig = ScheduleConfig()
    sync: SyncConfig = SyncConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    """Limits that warn, pause or stop a merge, see docs/monitors.md."""
    guard: GuardConfig | None = None
    """Check tool calls of episodes before they run, see docs/guard.md."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    target_log: TargetLogConfig = TargetLogConfig()
    """Log on disk of the steps since the last checkpoint, for a resume."""
    evaluate: EvaluateConfig = EvaluateConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()
    rounds: Annotated[
        Annotated[int, Field(ge=1), Tag("~number")] | Annotated[list[RoundConfig], Field(min_length=2), Tag("~list")],
        Discriminator(_number_or_list),
    ] = 1
    """Merges one after the other, see docs/rounds.md: a number, or for each the settings that differ, of which the
    first is `{}`."""

    @property
    def domain_weights(self) -> dict[str, float]:
        """Each domain's `weight`, 1 for `auto`."""
        return {name: 1.0 if domain.weight == "auto" else domain.weight for name, domain in self.domains.items()}

    @property
    def inline_experts(self) -> dict[str, ExpertConfig]:
        """The experts that the pipeline itself describes: also that of `keep`, and the student as a teacher of domains."""
        section = self.experts
        experts = {} if isinstance(section, RegisteredExperts) else dict(section)
        if self.keep is not None:
            experts[KEPT] = ExpertConfig(model=STUDENT, domain=KEPT)
        names = section.use if isinstance(section, RegisteredExperts) else section
        student_domains = [name for name, domain in self.domains.items() if STUDENT in domain.teacher_names]
        if student_domains and STUDENT not in names:
            experts[STUDENT] = ExpertConfig(model=STUDENT, domain=student_domains[0])
        return experts

    @property
    def teacher_prompts(self) -> dict[str, TeacherPromptConfig]:
        """Expert -> what it reads before a response, for experts with a prompt of their own."""
        if isinstance(self.experts, RegisteredExperts):
            return dict(self.experts.prompts)
        return {name: expert.prompt for name, expert in self.experts.items() if expert.prompt is not None}

    @property
    def engines(self) -> list[Teachers]:
        """The section `teachers` as each engine of the merge has it; a single one if no expert has an engine of its own."""
        return [section for section, _, _ in list_engines(self)]

    def engine_of(self, expert: str) -> Teachers:
        """Return the section `teachers` as it is for this expert."""
        own = (section for section, names, key in list_engines(self) if expert in names and key != "teachers")
        return next(own, self.teachers)

    def objective_of(self, domain: str) -> ObjectiveConfig:
        """Return the objective of a domain: its own, else the pipeline's."""
        own = self.domains[domain].objective
        return self.objective if own is None else own

    @property
    def own_objectives(self) -> dict[str, ObjectiveConfig]:
        """Domain -> its objective, for the domains that have one of their own."""
        return {name: domain.objective for name, domain in self.domains.items() if domain.objective is not None}

    @property
    def push_kind(self) -> PushKind:
        """The way of new weights that `sync.kind` asks for, with `auto` decided."""
        return choose_push_kind(self.sync, self.cluster, self.rollout)

    def split_effort(self, domain: str) -> tuple[str, str | None]:
        """Return the domain as it was before `efforts`, and the effort; None for a domain without one."""
        effort = self.domains[domain].effort
        return (domain, None) if effort is None else (domain.removesuffix(name_effort_domain("", effort)), effort)

    def chat_template_kwargs_of(self, domain: str, *, effort: bool = True) -> dict[str, Any]:
        """Return the variables of the student's chat template in a domain; without `effort` those of its effort are left out."""
        return self.chat_template_kwargs_at(self.domains[domain].effort if effort else None)

    def chat_template_kwargs_at(self, effort: str | None) -> dict[str, Any]:
        """Return the variables of the student's chat template at an effort; None: those without one."""
        tag = {} if effort is None else self.efforts[effort].list_variables(effort)
        return {**self.student.chat_template_kwargs, **tag}

    def effort_text_of(self, domain: str) -> str:
        """Return the text of the domain's effort, with which its prompts begin; empty if there is none."""
        name = self.domains[domain].effort
        return "" if name is None else self.efforts[name].text

    @property
    def prompt_orders(self) -> dict[str, str]:
        """Domain -> name that seeds the order of its prompts: the same for all efforts of a domain, so that they come together."""
        return {domain: self.split_effort(domain)[0] for domain in self.domains}

    @model_validator(mode="before")
    @classmethod
    def _expand_efforts(cls, data: Any) -> Any:
        """Put the domains of `efforts` in, before the rules that hold between domains are checked."""
        return expand_efforts(data, KEPT if data.get("keep") else "") if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _check_efforts(self) -> PipelineConfig:
        problem = find_efforts_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="before")
    @classmethod
    def _add_kept_domain(cls, data: Any) -> Any:
        """Add the domain of `keep`, before the rules that hold between domains are checked."""
        if not isinstance(data, Mapping) or not isinstance(data.get("domains"), Mapping) or KEPT in data["domains"]:
            return data
        keep = data.get("keep")
        settings = keep.model_dump() if isinstance(keep, KeepConfig) else keep
        if not isinstance(settings, Mapping) or "prompts" not in settings:  # refused where `keep` is validated
            return data
        domain = {"prompts": settings["prompts"], "weight": settings.get("weight", "auto"), "reward": False}
        return {**data, "domains": {**data["domains"], KEPT: domain}}

    @model_validator(mode="after")
    def _check_kept(self) -> PipelineConfig:
        problem = (None if self.keep is None else _find_keep_problem(self, self.keep)) or _find_student_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_experts_and_teachers(self) -> PipelineConfig:
        problem = _find_teacherless_problem(self) if isinstance(self.teachers, NoTeachers) else None
        if not isinstance(self.teachers, NoTeachers) and self.experts == {}:
            expected = "at least one expert; or teachers.engine none, to learn from rewards alone"
            problem = PydanticCustomError(
                "no_expert", "{wanted}", {"wanted": expected, "where": "experts", "found": "{}"}
            )
        if any(isinstance(section, TrainerTeachers) for section in self.engines):
            problem = problem or _find_base_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_holdout_prompts(self) -> PipelineConfig:
        for name, domain in self.domains.items():
            holds_out = domain.eval is not None and domain.eval.holdout is not None
            # A registered expert may have prompts of its own, which are read later.
            if holds_out and domain.prompts is None and not isinstance(self.experts, RegisteredExperts):
                expected = "the domain's `prompts`, of which eval.holdout is a share"
                raise PydanticCustomError("holdout", expected, {"found": "no `prompts`", "where": f"domains.{name}"})
        return self

    @model_validator(mode="after")
    def _check_payload(self) -> PipelineConfig:
        problem = self.objective.problem_with(self.teachers.payload)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_drift_cures(self) -> PipelineConfig:
        refuse_contradictions(self.domains, self.objective)
        if self.rollout.sleep and any(d.environment and d.environment.teacher_turns for d in self.domains.values()):
            raise PydanticCustomError(
                "sleep",
                "false: vLLM lets one engine of a process sleep, and the expert that writes teacher_turns is a second one",
                {"where": "rollout.sleep", "found": "true with teacher_turns"},
            )
        return self

    @model_validator(mode="after")
    def _check_reward_sources(self) -> PipelineConfig:
        problem = _find_reward_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_extrapolation(self) -> PipelineConfig:
        extrapolated = [name for name in self.domains if domain_extrapolation(self, name) != 1]
        if not extrapolated or len(self.engines) > 1 or self.own_objectives:
            return self  # with several engines `pipelines.routes` checks each domain, once its experts are known
        problem = self.objective.problem_with_extrapolation(self.teachers.payload)
        if problem is None and isinstance(self.teachers, OpenAITeachers) and not trainer_has_start(self):
            problem = PydanticCustomError(
                "extrapolate",
                "1, another teachers.engine, or student.lora: the student as the merge begins scores every response, and has "
                "no server",
                {"with": "teachers.engine openai"},
            )
        if problem is not None:
            raise _extrapolation_error(self, extrapolated[0], str((problem.context or {})["with"]), problem.message())
        return self

    @model_validator(mode="after")
    def _check_draft(self) -> PipelineConfig:
        problem = find_draft_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> PipelineConfig:
        problem = find_engines_problem(self) or find_own_objective_problem(self)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_sub_agent_domains(self) -> PipelineConfig:
        for name, domain in self.domains.items():
            for tool, agent in (domain.environment.sub_agents if domain.environment else {}).items():
                agent_domain = agent.domain or name
                eligible = [
                    d for d, candidate in self.domains.items() if candidate.environment or agent.environment != "domain"
                ]
                if agent_domain not in eligible:
                    requirement = "a domain with an environment" if agent.environment == "domain" else "a domain"
                    raise PydanticCustomError(
                        "sub_agent",
                        "{has} of this pipeline: {wanted}",
                        {
                            "has": requirement,
                            "wanted": ", ".join(eligible),
                            "found": agent_domain,
                            "where": f"domains.{name}.environment.sub_agents.{tool}.domain",
                        },
                    )
        return self

    @model_validator(mode="after")
    def _check_whole_groups(self) -> PipelineConfig:
        total, n = self.trainer.samples_per_step, self.rollout.n
        if total % n:
            raise PydanticCustomError(
                "divided_groups",
                "a multiple of rollout.n, {n}, because each prompt gets so many responses: for instance {near}",
                {"n": n, "near": n * max(1, round(total / n)), "found": total, "where": "trainer.samples_per_step"},
            )
        return self

    @model_validator(mode="after")
    def _check_samples_per_domain(self) -> PipelineConfig:
        if self.trainer.samples_per_step < self.rollout.n * len(self.domains):
            raise PydanticCustomError(
                "too_few_samples",
                "{each} for each of the {domains} domains; raise trainer.samples_per_step",
                {
                    "each": "at least one sample" if self.rollout.n == 1 else f"rollout.n ({self.rollout.n}) samples",
                    "domains": len(self.domains),
                    "found": self.trainer.samples_per_step,
                    "where": "trainer.samples_per_step",
                },
            )
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> PipelineConfig:
        problem = find_push_problem(self.sync, self.cluster)
        if problem is not None:
            raise problem
        return self

    @model_validator(mode="after")
    def _check_guard(self) -> PipelineConfig:
        rewarded = [name for name, domain in self.domains.items() if self.objective.reward and domain.is_rewarded]
        refuse_useless_guard(self.guard, self.domains, rewarded)
        return self

    @model_validator(mode="after")
    def _check_rounds(self) -> PipelineConfig:
        if isinstance(self.rounds, int):
            return self
        first_round = self.rounds[0].model_dump(exclude_defaults=True)
        if first_round:
            raise PydanticCustomError(
                "rounds",
                "an empty mapping: the first round is the pipeline as it stands",
                {"where": "rounds.0", "found": ", ".join(first_round)},
            )
        for index in range(1, len(self.rounds)):
            data = _build_round_data(self, index)
            try:
                PipelineConfig.model_validate(data)
            except ValidationError as errors:  # the pipeline alone is valid, so it comes from a setting of the round
                raise move_error(errors, ["rounds", str(index)], data) from None
        return self

    @model_validator(mode="after")
    def _check_extrapolated_rounds(self) -> PipelineConfig:
        later_rounds = [None] * (self.rounds - 1) if isinstance(self.rounds, int) else self.rounds[1:]
        for index, round_config in enumerate(later_rounds, start=1):
            if round_config is not None and (round_config.experts, round_config.registry) != (None, None):
                continue
            config = PipelineConfig.model_validate(_build_round_data(self, index))
            for name in config.domains:
                if domain_extrapolation(config, name) > 1:
                    expected = (
                        "1, or experts of each round's own: with the same experts a round takes back what the one before "
                        "it gained beyond them, because it starts from the model of that round"
                    )
                    raise _extrapolation_error(
                        config, name, f"round {index + 1}, which has no `experts` of its own", expected
                    )
        return self


def domain_extrapolation(config: PipelineConfig, domain: str) -> float:
    """Return how far beyond its experts the student is trained in a domain: the domain's `extrapolate`, else the objective's."""
    factor = config.domains[domain].extrapolate
    return config.objective.extrapolate if factor is None else factor


def scored_model_len(config: PipelineConfig) -> int:
    """Return the most tokens, prompt and response, that a teacher reads: `rollout.max_model_len`, or more for a prompt of its own."""
    own = (prompt.max_model_len or 0 for prompt in config.teacher_prompts.values())
    return max(config.rollout.max_model_len, *own, 0)


def _extrapolation_error(config: PipelineConfig, domain: str, other_setting: str, expected: str) -> PydanticCustomError:
    """Return the error that a domain's `extrapolate` does not go with `other_setting`."""
    section = "objective" if config.domains[domain].extrapolate is None else f"domains.{domain}"
    actual = f"{domain_extrapolation(config, domain):g} with {other_setting}"
    return PydanticCustomError(
        "extrapolate", "{wanted}", {"where": f"{section}.extrapolate", "found": actual, "wanted": expected}
    )


def _find_reward_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return what is wrong with the keys about rewards, or missing for them; None if nothing is."""
    reward = config.objective.reward
    reward_source = "an environment, an agent, or an eval whose verifier judges the responses"
    for name, domain in config.domains.items():
        if domain.reward is True and not domain.can_be_rewarded:
            return _reward_error(f"domains.{name}.reward", "true, and nothing gives a reward", reward_source)
        if domain.reward is True and reward is None:
            return _reward_error(f"domains.{name}.reward", "true without objective.reward", "objective.reward as well")
    if reward is None and not config.objective.HAS_DIVERGENCE:
        return _reward_error(
            "objective.kind", "none without objective.reward", "objective.reward: else nothing is trained"
        )
    if reward is None:
        return None
    if reward.preference is None and not any(domain.is_rewarded for domain in config.domains.values()):
        return _reward_error(
            "objective.reward", "no domain that gives a reward", f"at least one domain with {reward_source}"
        )
    if reward.baseline.kind == "group" and config.rollout.n < 2:
        actual = "group with rollout.n 1: every advantage would be 0"
        return _reward_error("objective.reward.baseline", actual, "leave_one_out or ema, or rollout.n of 2 or more")
    return None


def _reward_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("reward", "{wanted}", {"wanted": expected, "where": key, "found": actual})


def _find_teacherless_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return what a pipeline with `teachers.engine: none` must not have, or what it lacks; None if all is well."""
    taught = next((name for name, domain in config.domains.items() if domain.teachers is not None), None)
    idle = next((name for name, domain in config.domains.items() if not domain.is_rewarded), None)
    if config.experts != {}:
        key, actual, expected = "experts", "experts", "{}: nobody asks an expert with teachers.engine none"
    elif taught is not None:
        key, actual, expected = f"domains.{taught}.teachers", "a teacher", "nothing, with teachers.engine none"
    elif config.rounds != 1:
        key, actual, expected = "rounds", "several", "1: without experts one round is as good; raise trainer.steps"
    elif config.objective.reward is not None and idle is not None:
        key, actual, expected = f"domains.{idle}", "no reward", "an environment, an agent or an eval: nobody teaches it"
    else:
        return None
    return PydanticCustomError("without_teachers", "{wanted}", {"wanted": expected, "where": key, "found": actual})


def _find_keep_problem(config: PipelineConfig, keep: KeepConfig) -> PydanticCustomError | None:
    """Return what `keep` does not go with; None if all is well."""
    names = {} if isinstance(config.experts, RegisteredExperts) else config.experts
    if config.domains.get(KEPT) != keep.build_domain():
        key, actual, expected = f"domains.{KEPT}", "another domain than that of `keep`", "nothing: `keep` makes it"
    elif KEPT in names:
        key, actual, expected = f"experts.{KEPT}", f"an expert called `{KEPT}`", "another name: `keep` has this one"
    else:
        return None
    return PydanticCustomError("keep", "{wanted}", {"wanted": expected, "where": key, "found": actual})


def _find_student_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return the key that makes the student a teacher, if its engine cannot load the student; None if all is well."""
    experts = {} if isinstance(config.experts, RegisteredExperts) else config.experts
    for name in (name for name in config.inline_experts if name not in experts):
        if isinstance(config.teachers, NoTeachers) or isinstance(
            config.engine_of(name), OpenAITeachers | FlightTeachers | TextTeachers
        ):
            return PydanticCustomError(
                "keep",
                "an engine that loads the student here: transformers or vllm; or student.lora, with which the trainer has it",
                {
                    "where": name_student_key(config, name),
                    "found": f"set with teachers.engine {config.teachers.engine}",
                },
            )
    return None


def _find_base_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return why the trainer's ranks cannot score with this pipeline's experts; None if nothing in the pipeline forbids it."""
    scored = [names for section, names, _ in list_engines(config) if isinstance(section, TrainerTeachers)]
    averages_only = all(names and not list_frozen_names(config, names) for names in scored)
    if config.student.lora is None and not averages_only:
        key, actual = "teachers.engine", "trainer without student.lora"
        expected = "student.lora, which leaves the base as the experts need it; or engine transformers"
    elif any(objective.wants_baseline for objective in (config.objective, *config.own_objectives.values())):
        key, actual = "objective.baseline", "a baseline with teachers.engine trainer"
        expected = "none: a baseline is needed before the trainer computes; or teachers.engine transformers"
    elif config.cluster.teacher_gpus and isinstance(config.teachers, TrainerTeachers):
        key, actual = "cluster.teacher_gpus", f"{config.cluster.teacher_gpus:g} with teachers.engine trainer"
        expected = "0: the trainer's ranks score, on their own GPUs"
    else:
        return None
    return PydanticCustomError("trainer_scores", "{wanted}", {"wanted": expected, "where": key, "found": actual})


def split_rounds(config: PipelineConfig) -> list[PipelineConfig]:
    """Return for each round a pipeline of that round alone. All of them name the student with which the first round starts."""
    num = config.rounds if isinstance(config.rounds, int) else len(config.rounds)
    return [PipelineConfig.model_validate(_build_round_data(config, index)) for index in range(num)]


def list_distinct_rounds(config: PipelineConfig) -> list[PipelineConfig]:
    """Return a pipeline for each round that may have keys of its own: one for all rounds if only their number is set."""
    return [config] if isinstance(config.rounds, int) else split_rounds(config)


def _build_round_data(config: PipelineConfig, index: int) -> dict[str, Any]:
    """Return the pipeline of round `index`, counted from 0, not validated yet."""
    data = config.model_dump(exclude={"rounds"}) | {"seed": config.seed + index}
    if isinstance(config.rounds, list):
        for key, value in config.rounds[index].model_dump(exclude_defaults=True).items():
            if key == "teachers":
                value = change_teachers(data[key], value)
            elif key in ("rollout", "objective", "trainer") and "kind" not in value:
                value = {**data[key], **value}  # only these keys differ
            data[key] = value
    return data


def is_overlapped(config: PipelineConfig) -> bool:
    """Return True if the trainer starts a step while teachers still score it: `schedule.overlap`, or what `auto` means."""
    if config.schedule.overlap != "auto":
        return config.schedule.overlap
    gpus = config.cluster.trainer_gpus or config.cluster.teacher_gpus
    return bool(gpus) or any(section.elsewhere for section in config.engines)


def has_short_first_round(config: PipelineConfig) -> bool:
    """Return True if the first round of micro-batches is short, so that training soon begins: if ranks have whole GPUs, and rows are
    scored elsewhere.

    `schedule.overlap` does not count, because a run may go on with another value, and must end with the same weights.
    """
    return config.cluster.trainer_gpus >= 1 and not isinstance(config.teachers, TrainerTeachers | NoTeachers)


def max_staleness(config: PipelineConfig) -> int:
    """Return `schedule.max_staleness`, or its default for the mode."""
    configured = config.schedule.max_staleness
    return (0 if config.schedule.mode == "sync" else 1) if configured is None else configured


TOLERANCE = {"float32": 0.02, "bfloat16": 0.15}
"""Compute type -> default of `sync.tolerance`, in nats per token.

Measured with SmolLM2: two correct engines differ by 1e-6 to 1e-4 in float32, and by 0.04 to 0.09 in bfloat16 with different
kernels. An output head that was not updated showed 0.31.
"""


def sync_tolerance(config: PipelineConfig) -> float:
    """Return `sync.tolerance` in nats, or its default for the types that trainer and engine compute in."""
    if config.sync.tolerance is not None:
        return config.sync.tolerance
    exact = config.trainer.dtype == config.rollout.dtype == "float32"
    return TOLERANCE["float32" if exact else "bfloat16"]


def as_begun(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pipeline that a run recorded, as this release would have to write it to do the same.

    An earlier release had no key for some things. Where such a key is missing, it gets the value for what that release did.
    """
    student = recorded.get("student")
    if not isinstance(student, Mapping):  # a damaged file, which is refused where it is checked
        return dict(recorded)
    begun = {**recorded, "student": {"add_special_tokens": False, **student}}
    return begun if "chat_template_kwargs" in student else _drop_chat_columns(begun)


def _drop_chat_columns(pipeline: dict[str, Any]) -> dict[str, Any]:
    """Return the pipeline with `CHAT_COLUMNS` switched off everywhere: the release that recorded it did not read them."""
    changed = dict(pipeline)
    if isinstance(domains := pipeline.get("domains"), Mapping):
        changed["domains"] = {name: _drop_domain_chat_columns(domain) for name, domain in domains.items()}
    if isinstance(rounds := pipeline.get("rounds"), list):
        changed["rounds"] = [
            _drop_chat_columns(round_data) if isinstance(round_data, dict) else round_data for round_data in rounds
        ]
    return changed


def _drop_domain_chat_columns(domain: Any) -> Any:
    if not isinstance(domain, Mapping):
        return domain
    changed = {**domain, "prompts": _drop_prompts_chat_columns(domain.get("prompts"))}
    exam = domain.get("eval")
    return changed | (
        {"eval": {**exam, "prompts": _drop_prompts_chat_columns(exam.get("prompts"))}}
        if isinstance(exam, Mapping)
        else {}
    )


def _drop_prompts_chat_columns(prompts: Any) -> Any:
    if not isinstance(prompts, str | Mapping):
        return prompts
    section: Mapping[str, Any] = {"path": prompts} if isinstance(prompts, str) else prompts
    return {**section, "columns": {**dict.fromkeys(CHAT_COLUMNS), **(section.get("columns") or {})}}


def load_run_pipeline(path: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read, override and check the pipeline that a run recorded. Raises: ConfigError."""
    return validate_section(PipelineConfig, apply_overrides(as_begun(load_yaml(path)), overrides or []), path)


def load_pipeline(path: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read, override and check one pipeline file. Raises: ConfigError."""
    return validate_section(PipelineConfig, apply_overrides(load_yaml(path), overrides or []), path)
