"""The sections about models and prompts: the student, the experts, and the domains with their exams and environments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.config.agents import AgentConfig
from opd.config.context import ContextConfig
from opd.config.drift import CurriculumConfig, TeacherTurnsConfig, TurnWeightsConfig
from opd.config.objectives import AnyObjective
from opd.config.prompts import ChatTemplateKwargs, Prompts, ToolCallParser
from opd.config.sub_agents import SubAgentConfig, ToolName
from opd.config.teacher_prompts import TeacherPromptConfig
from opd.config.verifiers import VerifierConfig
from opd.settings.strict import Name, PathOrName, Strict, UserPath, flag_or_mapping, text_or_more

DomainWeight = Annotated[
    Annotated[Literal["auto"], Tag("~text")] | Annotated[float, Field(gt=0), Tag("~more")],
    Discriminator(text_or_more),
]


class StudentLora(Strict):
    r: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32, gt=0)
    """Adapters count `alpha / r` times."""
    targets: Annotated[
        Annotated[Literal["all-linear"], Tag("~text")]
        | Annotated[list[Annotated[str, Field(pattern=r"^\w[\w.]*$")]], Field(min_length=1), Tag("~more")],
        Discriminator(text_or_more),
    ] = "all-linear"
    """Ends of module names, such as `q_proj`; `all-linear`: all linear modules but the output head."""
    export: Literal["merged", "adapter"] = "merged"
    """`adapter`: the run also writes `adapter/`, in PEFT's files, beside the whole model."""


class StudentIndexers(Strict):
    pattern: PathOrName | None = None
    """A letter for each layer: `F` keeps its indexer, `S` takes the choice of the layer before; or the directory of a search. Default: the
    student's own."""
    loss_weight: float = Field(1.0, ge=0)
    """Factor of the indexers' loss; 0: they learn nothing."""


class StudentConfig(Strict):
    model: UserPath
    """Hugging Face directory of the model that learns: config, tokenizer, safetensors."""
    lora: StudentLora | None = None
    """Train LoRA adapters; default: train all weights."""
    indexers: StudentIndexers | None = None
    """Share sparse indexers between layers, and train them, see docs/indexers.md."""
    template_date: date | None = None
    """The day, as 2026-11-20, for a chat template that asks for today's; default: the day on which the run begins."""
    chat_template_kwargs: ChatTemplateKwargs = {}
    """Variables for the chat template, such as `{enable_thinking: false}`. A row's own column goes before them."""
    add_special_tokens: bool | None = None
    """Begin a prompt of plain text as the tokenizer does, with a begin token for example; default: true."""
    tool_call_parser: ToolCallParser = "auto"
    """Form of the student's tool calls: a name of docs/agents.md#how-calls-are-written, or of vLLM's `--tool-call-parser`.
    `auto`: that of its chat template, else `hermes`."""

    @property
    def puts_in_front(self) -> bool:
        """True if a prompt of plain text begins with the special tokens that the tokenizer puts there."""
        return self.add_special_tokens is not False


STUDENT = "student"
"""Value of an expert's `model` for the student itself; among a domain's `teachers` it is the student, too, if no expert has this name."""


def _choose_model_kind(value: Any) -> str:
    return "~student" if value == STUDENT else "~nothing" if value is None else "~path"


class ExpertConfig(Strict):
    model: Annotated[
        Annotated[Literal["student"], Tag("~student")]
        | Annotated[UserPath, Tag("~path")]
        | Annotated[None, Tag("~nothing")],
        Discriminator(_choose_model_kind),
    ] = None
    """Hugging Face directory, or PEFT directory of a LoRA adapter; safetensors only. `student`: the student as the merge (or the
    round) begins, see docs/teacher_prompts.md. Nothing: an expert that only writes text, see docs/text_only.md."""
    base: UserPath | None = None
    """Base of a LoRA adapter; default: the directory that the adapter names."""
    domain: Name
    """The domain whose responses this expert scores."""
    ema: float | None = Field(None, gt=0, lt=1)
    """With `model: student`: the teacher is a moving average of the student, which keeps this share of itself in each step."""
    effort: Name | None = None
    """The effort of the domain, one of `efforts`, that this expert is for; default: all of them."""
    prompt: TeacherPromptConfig | None = None
    """Prompt that this expert reads before a response, see docs/teacher_prompts.md; default: the student's."""
    engine: dict[str, Any] | None = None
    """The engine that scores with this expert, as `kind`, and the keys that this engine has under `teachers`; see docs/engines.md.
    Default: `teachers`."""

    @property
    def own_dir(self) -> Path | None:
        """The expert's own directory; None for the student itself, and for an expert that only writes text."""
        return None if self.model in (STUDENT, None) else Path(str(self.model))


class RegisteredExperts(Strict):
    use: Annotated[
        Annotated[Literal["all"], Tag("~text")] | Annotated[list[Name], Field(min_length=1), Tag("~more")],
        Discriminator(text_or_more),
    ]
    """Names from the registry (`opd experts list`), or `all`."""
    prompts: dict[Name, TeacherPromptConfig] = {}
    """Expert's name -> its `prompt`, as of an expert that the pipeline itself describes."""
    engines: dict[Name, dict[str, Any]] = {}
    """Expert's name -> its `engine`, in the same way."""


def _choose_experts_kind(value: Any) -> str:
    is_registered = isinstance(value, RegisteredExperts) or (isinstance(value, Mapping) and "use" in value)
    return "~registered" if is_registered else "~inline"


ExpertsConfig = Annotated[
    Annotated[RegisteredExperts, Tag("~registered")] | Annotated[dict[Name, ExpertConfig], Tag("~inline")],
    Discriminator(_choose_experts_kind),
]


KEPT = "kept"
"""Name of the domain, and of the expert, of `keep`."""


class KeepConfig(Strict):
    prompts: Prompts
    """General prompts, in the forms of a domain's."""
    weight: DomainWeight = "auto"
    """Share of each step's samples, as a domain's."""

    def build_domain(self) -> DomainConfig:
        """Return the domain whose teacher is the start student."""
        return DomainConfig(prompts=self.prompts, weight=self.weight, reward=False)


class DomainEvalConfig(Strict):
    prompts: Prompts | None = None
    """Held-out prompts, in the forms of training prompts, none of which may be among them."""
    holdout: float | None = Field(None, gt=0, lt=1)
    """Instead of `prompts`: share of the training prompts to hold out, chosen by each prompt's hash."""
    verifier: VerifierConfig = "exact_match"
    """Way to judge an answer: a kind, or a mapping with `kind` and options."""

    @model_validator(mode="after")
    def _check_one_source(self) -> DomainEvalConfig:
        if (self.prompts is None) == (self.holdout is None):
            actual = "neither" if self.prompts is None else "both"
            raise PydanticCustomError(
                "eval", "either `prompts` (a file) or `holdout` (a share of the training prompts)", {"found": actual}
            )
        return self


class EnvironmentConfig(Strict):
    name: str = Field(..., pattern=r"^([a-z][a-z0-9_]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """A name of docs/environments.md, or a class of yours as `module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: int = Field(16, ge=1)
    """Turns of an episode, each of `rollout.max_new_tokens` at most."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that the student may write in an episode; default: `rollout.max_model_len` alone limits it."""
    context: ContextConfig | None = None
    """Summaries for episodes longer than the context; default: the episode ends there."""
    curriculum: CurriculumConfig | None = None
    """Let training episodes begin short and grow, see docs/drift.md."""
    teacher_turns: TeacherTurnsConfig | None = None
    """Let the expert write some turns of training episodes, fewer and fewer."""
    turn_weights: TurnWeightsConfig | None = None
    """Let late turns, or turns after a drift, weigh less in the loss."""
    replay: bool = False
    """Training prompts are prefixes of episodes, and the student writes one turn after each, see docs/drift.md."""
    sub_agents: dict[ToolName, SubAgentConfig] = {}
    """Name of a tool -> the sub-agent that it starts, see docs/agents.md#sub-agents."""
    max_sub_agents: int = Field(8, ge=1)
    """Sub-agents of an episode, nested ones included; further calls are refused."""
    max_depth: int = Field(1, ge=1, le=8)
    """1: sub-agents start none themselves; 2: theirs do not; and so on."""
    step_timeout_s: float = Field(30, gt=0)
    """Deadline of each call of the environment."""
    max_broken: float = Field(0.1, ge=0, le=1)
    """The run stops if more of a step's episodes of this domain break; one always may."""


class DomainConfig(Strict):
    prompts: Prompts | None = None
    """A path (see docs/pipelines.md#prompts), or a mapping that says more; default: the file that the expert was
    registered with."""
    environment: EnvironmentConfig | None = None
    """Play an episode for each prompt, see docs/agents.md; default: the student answers once."""
    agent: AgentConfig | None = None
    """Instead of `environment`: a program of yours is the agent, see docs/agents-black-box.md."""
    guard: (
        Annotated[
            Annotated[bool, Tag("~flag")] | Annotated[dict[str, Any], Tag("~mapping")], Discriminator(flag_or_mapping)
        ]
        | None
    ) = None
    """`false`: no guard here. A mapping: keys of the section `guard` that differ here."""
    eval: DomainEvalConfig | None = None
    """Exam of the domain; without it the domain is trained only."""
    teachers: (
        Annotated[
            Annotated[Name, Tag("~text")]
            | Annotated[
                dict[Name, Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1), Tag("~more")
            ],
            Discriminator(text_or_more),
        ]
        | None
    ) = None
    """An expert's name, or names with weights; `student`: the student as the merge (or the round) begins, so that it keeps
    what it can. Default: the expert whose `domain` this is."""
    weight: DomainWeight = "auto"
    """Share of each step's samples, or of what `balance` says; `auto`: the same for all."""
    objective: AnyObjective | None = None
    """Objective of this domain alone, a kind with its keys, for what its teachers send; default: `objective`."""
    extrapolate: float | None = Field(None, gt=0)
    """Default: `objective.extrapolate`."""
    effort: Name | None = None
    """The effort of which the prompts tell the student; `efforts` sets it in the domains that it makes."""
    loss_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of this domain's tokens (or responses) in the loss."""
    reward: Literal["auto"] | bool = "auto"
    """Reward the domain's responses under `objective.reward`, by environment, agent or the verifier of `eval`; `auto`:
    where there is one."""

    @property
    def teacher_names(self) -> list[str]:
        """The names under `teachers`; none by default."""
        return [self.teachers] if isinstance(self.teachers, str) else list(self.teachers or ())

    @property
    def has_episodes(self) -> bool:
        """True if the domain has episodes, whose reward is the score of its exams."""
        return self.environment is not None or self.agent is not None

    @property
    def can_be_rewarded(self) -> bool:
        """True if anything can judge the domain's responses in training.

        Under `replay` nothing can: no environment runs, and the verifier of the exams judges whole episodes only.
        """
        replay = self.environment is not None and self.environment.replay
        return not replay and (self.has_episodes or self.eval is not None)

    @property
    def is_rewarded(self) -> bool:
        """True if the domain takes part in `objective.reward`."""
        return self.can_be_rewarded if self.reward == "auto" else self.reward

    @model_validator(mode="after")
    def _check_one_kind_of_episode(self) -> DomainConfig:
        if self.environment is not None and self.agent is not None:
            raise PydanticCustomError("episodes", "either `environment` or `agent`", {"found": "both"})
        return self
