"""Who learns, from whom, and on which prompts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.config.agents import AgentConfig
from opd.config.context import ContextConfig
from opd.config.drift import CurriculumConfig, TeacherTurnsConfig, TurnWeightsConfig
from opd.config.prompts import ChatTemplateKwargs, Prompts
from opd.config.sub_agents import SubAgentConfig, ToolName
from opd.config.verifiers import VerifierConfig
from opd.records.types import ToolCallParser
from opd.settings.strict import Name, Strict, UserPath, flag_or_mapping, text_or_more


class StudentLora(Strict):
    r: int = Field(16, ge=1)
    """Rank of what is trained: beside a linear module of I inputs and O outputs, two matrices `[r, I]` and `[O, r]`."""
    alpha: float = Field(32, gt=0)
    """The product of the two is added to the module's weight `alpha / r` times."""
    targets: Annotated[
        Annotated[Literal["all-linear"], Tag("~text")]
        | Annotated[list[Annotated[str, Field(pattern=r"^\w[\w.]*$")]], Field(min_length=1), Tag("~more")],
        Discriminator(text_or_more),
    ] = "all-linear"
    """Modules that get an adapter: names such as `q_proj`, or ends of full names such as `0.self_attn.q_proj`;
    `all-linear`: all linear modules but the output head."""
    export: Literal["merged", "adapter"] = "merged"
    """`merged`: the run ends with `model/`, a whole model that has the adapters in its weights; `adapter`: with the same, and
    with `adapter/`, the adapters alone in PEFT's files."""


class StudentConfig(Strict):
    model: UserPath
    """Hugging Face directory of the model that learns: config, tokenizer, safetensors."""
    lora: StudentLora | None = None
    """Train adapters and leave the model's own weights as they are; default: train every weight."""
    template_date: date | None = None
    """The day, as 2026-11-20, that a chat template which asks for today's date is given in every prompt of training and
    exams; default: the day on which the run begins, which is recorded here. Other templates leave it unused."""
    chat_template_kwargs: ChatTemplateKwargs = {}
    """Variables for the chat template, such as `{enable_thinking: false}`, as vLLM and TRL take them: in every prompt of training and
    exams, and in episodes. A row's column of the same name goes before them."""
    add_special_tokens: bool | None = None
    """Put in front of a prompt of plain text what the student's tokenizer puts there, such as the begin token of Gemma and Llama; a
    chat template writes its own. Default: true, but a run that an earlier release began without goes on without."""
    tool_call_parser: ToolCallParser = "auto"
    """How the student writes calls of tools in episodes, by the names of vLLM's `--tool-call-parser`; see docs/agents.md. `auto`: as
    its chat template writes them; `hermes` where that knows no tools."""

    @property
    def puts_in_front(self) -> bool:
        """Whether a prompt of plain text begins as the tokenizer has it."""
        return self.add_special_tokens is not False


class ExpertConfig(Strict):
    model: UserPath
    """Hugging Face directory of the expert, or PEFT directory of a LoRA adapter; safetensors only."""
    base: UserPath | None = None
    """Base model of a LoRA adapter, as a Hugging Face directory; default: the directory that the adapter names."""
    domain: Name
    """The domain whose responses this expert scores."""


class RegisteredExperts(Strict):
    use: Annotated[
        Annotated[Literal["all"], Tag("~text")] | Annotated[list[Name], Field(min_length=1), Tag("~more")],
        Discriminator(text_or_more),
    ]
    """Names from the registry (`opd experts list`), or `all`."""


def _experts_kind(value: Any) -> str:
    return (
        "~registered"
        if isinstance(value, RegisteredExperts) or (isinstance(value, Mapping) and "use" in value)
        else "~inline"
    )


ExpertsConfig = Annotated[
    Annotated[RegisteredExperts, Tag("~registered")] | Annotated[dict[Name, ExpertConfig], Tag("~inline")],
    Discriminator(_experts_kind),
]


class DomainEvalConfig(Strict):
    prompts: Prompts | None = None
    """Held-out prompts, in the same forms as training prompts; none of them may occur in training prompts."""
    holdout: float | None = Field(None, gt=0, lt=1)
    """Instead of `prompts`: share of the domain's own prompts, or of those its expert was registered with, that is held out of
    training, chosen by each prompt's hash, so that a prompt stays on its side when the file grows or is reordered."""
    verifier: VerifierConfig = "exact_match"
    """How an answer is judged: a name, or a mapping with `kind` and options."""

    @model_validator(mode="after")
    def _one_source(self) -> DomainEvalConfig:
        if (self.prompts is None) == (self.holdout is None):
            found = "neither" if self.prompts is None else "both"
            raise PydanticCustomError(
                "eval", "either `prompts` (a file) or `holdout` (a share of the training prompts)", {"found": found}
            )
        return self


class EnvironmentConfig(Strict):
    name: str = Field(..., pattern=r"^([a-z][a-z0-9_]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """What the student acts on: a name of `opd.environments`, or a class of yours as `module:Class`, with the methods of
    `opd.interfaces.Environment`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: int = Field(16, ge=1)
    """Turns of the student in an episode; each has `rollout.max_new_tokens` at most."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that the student may write in an episode; default: as many as `rollout.max_model_len` holds."""
    context: ContextConfig | None = None
    """What is done about an episode that outgrows the model's context; default: it ends there."""
    curriculum: CurriculumConfig | None = None
    """Let training episodes begin short and grow, see docs/drift.md; default: all may have `max_turns`."""
    teacher_turns: TeacherTurnsConfig | None = None
    """Let the domain's expert write some turns of training episodes, fewer and fewer; default: none."""
    turn_weights: TurnWeightsConfig | None = None
    """Let late turns, or turns after a drift, weigh less in the loss; default: all tokens weigh the same."""
    replay: bool = False
    """The training prompts are prefixes of an expert's episodes (`opd environments prefixes` makes them): the student writes one
    turn after each, and the environment is for exams only."""
    sub_agents: dict[ToolName, SubAgentConfig] = {}
    """Name of a tool -> the sub-agent that a call of it starts: the student in an episode of its own; see docs/agents.md."""
    max_sub_agents: int = Field(8, ge=1)
    """Sub-agents of an episode, those that sub-agents start among them; further calls are refused."""
    max_depth: int = Field(1, ge=1, le=8)
    """1: sub-agents start none themselves. 2: those of the episode may, but theirs may not, and so on."""
    step_timeout_s: float = Field(30, gt=0)
    """Deadline of each call of the environment: an episode whose environment is not back in time ends."""
    max_broken: float = Field(0.1, ge=0, le=1)
    """The run stops if a larger share of a step's episodes of this domain ends because the environment failed; one always
    may."""


class DomainConfig(Strict):
    prompts: Prompts | None = None
    """JSONL, CSV, Parquet or a saved data set with `prompt` (text or chat messages) and `answer`, or a mapping that says
    more; default: the file the expert was registered with."""
    environment: EnvironmentConfig | None = None
    """Makes each prompt of the domain the task of an episode: the student and an environment take turns; see docs/agents.md.
    Default: the student answers once."""
    agent: AgentConfig | None = None
    """Instead of `environment`: a program of yours is the agent of each episode, and asks the student over HTTP; see
    docs/agents-black-box.md."""
    guard: (
        Annotated[
            Annotated[bool, Tag("~flag")] | Annotated[dict[str, Any], Tag("~mapping")], Discriminator(flag_or_mapping)
        ]
        | None
    ) = None
    """`false`: the section `guard` does not hold here. A mapping: the keys of the section that differ in this domain. Default: the
    section as it stands."""
    eval: DomainEvalConfig | None = None
    """How the domain is measured; without it the domain is trained but not scored."""
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
    """Who scores the domain: an expert's name, or names with weights (normalised to add up to 1); default: the expert
    whose `domain` it is. One expert may serve several domains."""
    weight: Annotated[
        Annotated[Literal["auto"], Tag("~text")] | Annotated[float, Field(gt=0), Tag("~more")],
        Discriminator(text_or_more),
    ] = "auto"
    """Share of each step's samples, or of what `balance` says; `auto` gives every domain the same."""
    extrapolate: float | None = Field(None, ge=1)
    """How far beyond the domain's experts the student is trained; default: `objective.extrapolate`."""
    loss_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """How much a token (or response) of this domain counts in the mean that is optimised."""
    reward: Literal["auto"] | bool = "auto"
    """Whether the domain's responses are rewarded under `objective.reward`: by its environment or agent, else by the verifier
    of its `eval`. `auto`: where it has one of these."""

    @property
    def has_episodes(self) -> bool:
        """Whether the domain has episodes, whose reward is the score of its exams."""
        return self.environment is not None or self.agent is not None

    @property
    def can_be_rewarded(self) -> bool:
        """Whether anything can judge the domain's responses in training. Where a student's answers are a replay of its expert's
        episodes, no environment runs and the verifier of the exams judges whole episodes."""
        replay = self.environment is not None and self.environment.replay
        return not replay and (self.has_episodes or self.eval is not None)

    @property
    def is_rewarded(self) -> bool:
        """Whether the domain takes part in `objective.reward`."""
        return self.can_be_rewarded if self.reward == "auto" else self.reward

    @model_validator(mode="after")
    def _one_kind_of_episode(self) -> DomainConfig:
        if self.environment is not None and self.agent is not None:
            raise PydanticCustomError("episodes", "either `environment` or `agent`", {"found": "both"})
        return self
