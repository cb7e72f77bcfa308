"""A pipeline file: typed, frozen, read once at the edge, unknown keys refused with the nearest known one.

Needs only pydantic and PyYAML, so `opd --help` and `opd pipelines` never import torch.
Paths in a pipeline are relative to the directory that `opd` was started in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from opd.address import LOOPBACK, parse_url, without_secret
from opd.settings import apply_overrides, found_in, keys_of, load_yaml, validate

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
DType = Literal["float32", "bfloat16"]


class Strict(BaseModel):
    """Base of every config model: frozen, no unknown keys, the string under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        # pydantic's own `extra_forbidden` cannot suggest; here the class knows its keys.
        if isinstance(data, Mapping):
            known = list(cls.model_fields)
            for key in data:
                if key not in known:
                    near = difflib.get_close_matches(str(key), known, n=1)
                    raise PydanticCustomError(
                        "unknown_key",
                        "{hint}",
                        {
                            "key": str(key),
                            "hint": f"did you mean `{near[0]}`?" if near else "remove the key",
                            "known": ", ".join(known),
                        },
                    )
        return data


class StudentConfig(Strict):
    model: Path
    """Hugging Face directory of the model that learns: config, tokenizer, safetensors."""


class ExpertConfig(Strict):
    model: Path
    """Hugging Face directory of the expert, or PEFT directory of a LoRA adapter; safetensors only."""
    base: Path | None = None
    """Base model of a LoRA adapter, as a Hugging Face directory; default: the directory that the adapter names."""
    domain: Name
    """The domain whose responses this expert scores."""


def _text_or_more(value: Any) -> str:
    """Which half of a union a value is meant for, so that an error is about that half alone."""
    return "~text" if isinstance(value, str) else "~more"


class RegisteredExperts(Strict):
    use: Annotated[
        Annotated[Literal["all"], Tag("~text")] | Annotated[list[Name], Field(min_length=1), Tag("~more")],
        Discriminator(_text_or_more),
    ]
    """Names from the registry (`opd experts list`), or `all`."""


def _experts_kind(value: Any) -> str:
    return (
        "~registered"
        if isinstance(value, RegisteredExperts) or (isinstance(value, Mapping) and "use" in value)
        else "~inline"
    )


ExpertsConfig = Annotated[
    Annotated[RegisteredExperts, Tag("~registered")]
    | Annotated[dict[Name, ExpertConfig], Field(min_length=1), Tag("~inline")],
    Discriminator(_experts_kind),
]


class ExactMatchConfig(Strict):
    kind: Literal["exact_match"]
    """The whole answer, apart from white space around it."""


class LastLineConfig(Strict):
    kind: Literal["last_line"]
    """The last line that is not empty: for answers that come after some working."""


class NumericConfig(Strict):
    kind: Literal["numeric"]
    """The last number in the text, compared as a number."""
    tolerance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Largest difference that still counts as equal."""


class RegexConfig(Strict):
    kind: Literal["regex"]
    """What a regular expression finds in the text: its last match."""
    pattern: str = Field(..., min_length=1)
    """In Python's syntax; what its first group matched, or without a group the whole match, is the answer."""

    @model_validator(mode="after")
    def _compiles(self) -> RegexConfig:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise PydanticCustomError(
                "pattern",
                "a regular expression in Python's syntax ({why})",
                {"why": str(error), "found": repr(self.pattern)},
            ) from None
        return self


class MultipleChoiceConfig(Strict):
    kind: Literal["multiple_choice"]
    """The letter that the text settles on: `B`, `(B)`, `B.`, `the answer is B`."""
    choices: str = Field("ABCD", pattern=r"^[A-Z]{2,26}$")
    """The letters that there are."""


class ReasoningGymConfig(Strict):
    kind: Literal["reasoning_gym"]
    """The task family's own scoring function; only its full score counts."""


class PythonConfig(Strict):
    kind: Literal["python"]
    """A function of yours: `function(text, answer, metadata)` gives a score in 0..1."""
    function: str = Field(..., pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`; the module is looked for where Python finds modules, last in the current directory."""


VerifierName = Literal["exact_match", "last_line", "numeric", "multiple_choice", "reasoning_gym"]
"""Those that work without options."""

VERIFIER_OPTIONS: dict[str, str] = {"regex": "pattern: ...", "python": "function: module:function"}
"""The others, and what they want."""


def _known_verifier(value: Any) -> Any:
    """Raises for a name that is none, with the nearest that is; everything else is left to the types."""
    kind = value.get("kind") if isinstance(value, Mapping) else value
    if isinstance(value, str) and value in VERIFIER_OPTIONS:
        options = f"{{kind: {value}, {VERIFIER_OPTIONS[value]}}}"
        raise PydanticCustomError("verifier", "options too: {options}", {"options": options, "found": value})
    known = [*get_args(VerifierName), *VERIFIER_OPTIONS]
    if isinstance(value, str | Mapping) and kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        raise PydanticCustomError(
            "verifier",
            "{hint}one of: {known}",
            {
                "hint": f"did you mean `{near[0]}`? " if near else "",
                "known": ", ".join(known),
                "found": "no `kind`" if kind is None else str(kind),
            },
        )
    return value


def _verifier_kind(value: Any) -> str:
    return f"~{value['kind'] if isinstance(value, Mapping) else getattr(value, 'kind', 'name')}"


VerifierConfig = Annotated[
    Annotated[VerifierName, Tag("~name")]
    | Annotated[ExactMatchConfig, Tag("~exact_match")]
    | Annotated[LastLineConfig, Tag("~last_line")]
    | Annotated[NumericConfig, Tag("~numeric")]
    | Annotated[RegexConfig, Tag("~regex")]
    | Annotated[MultipleChoiceConfig, Tag("~multiple_choice")]
    | Annotated[ReasoningGymConfig, Tag("~reasoning_gym")]
    | Annotated[PythonConfig, Tag("~python")],
    Discriminator(_verifier_kind),
    BeforeValidator(_known_verifier),
]


class DomainEvalConfig(Strict):
    prompts: Path | None = None
    """JSONL of held-out prompts, same columns as the training prompts; none of them may occur in training prompts."""
    holdout: float | None = Field(None, gt=0, lt=1)
    """Instead of `prompts`: share of the domain's own prompts that is held out of training, chosen by each prompt's
    hash, so that a prompt stays on its side when the file grows or is reordered."""
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


class DomainConfig(Strict):
    prompts: Path | None = None
    """JSONL with `prompt` (text or chat messages) and `answer`; default: the file the expert was registered with."""
    eval: DomainEvalConfig | None = None
    """How the domain is measured; without it the domain is trained but not scored."""
    teachers: (
        Annotated[
            Annotated[Name, Tag("~text")]
            | Annotated[
                dict[Name, Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1), Tag("~more")
            ],
            Discriminator(_text_or_more),
        ]
        | None
    ) = None
    """Who scores the domain: an expert's name, or names with weights (normalised to add up to 1); default: the expert
    whose `domain` it is. One expert may serve several domains."""
    weight: Annotated[
        Annotated[Literal["auto"], Tag("~text")] | Annotated[float, Field(gt=0), Tag("~more")],
        Discriminator(_text_or_more),
    ] = "auto"
    """Share of each step's samples; `auto` gives every domain the same."""
    loss_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """How much a token (or response) of this domain counts in the mean that is optimised."""

    @model_validator(mode="after")
    def _something_to_hold_out_from(self) -> DomainConfig:
        if self.eval is not None and self.eval.holdout is not None and self.prompts is None:
            raise PydanticCustomError(
                "holdout", "the domain's `prompts`, of which eval.holdout is a share", {"found": "no `prompts`"}
            )
        return self


class RolloutConfig(Strict):
    engine: Literal["vllm"] = "vllm"
    """What writes."""
    workers: int = Field(1, ge=1)
    """Rollout engines; prompts are dealt out among them."""
    dtype: DType = "float32"
    """Compute type of the engine; bfloat16 is about 1.8 times as fast on a CPU that has it."""
    max_new_tokens: int = Field(64, ge=1)
    """Response limit; shortened per prompt, and counted, where the context would overflow."""
    temperature: float = Field(1.0, gt=0)
    """1.0 samples from the student itself; anything else is not quite on-policy."""
    max_model_len: int = Field(512, ge=8)
    """Context of the rollout engine in tokens; a prompt that leaves no room is quarantined."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache of a CPU engine, whole GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that a GPU engine may take."""


class ServerConfig(Strict):
    base_url: str
    """Address of the API with its version, e.g. http://127.0.0.1:8000/v1; plain http to this machine only."""
    model: str = Field(..., min_length=1)
    """Name under which the server knows the expert."""

    @model_validator(mode="after")
    def _https_or_loopback(self) -> ServerConfig:
        problem = _url_problem(self.base_url)
        if problem is not None:
            raise PydanticCustomError(
                "base_url", "https://HOST/v1, or http://127.0.0.1:PORT/v1 on this machine", {"found": problem}
            )
        return self


def _url_problem(url: str) -> str | None:
    """What is wrong with a server's address, without any password in it; None if nothing is."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        return f"no address: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return f"{without_secret(url)!r}, no http address"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return f"an address of {host} with a user, a query or a fragment (a key goes into teachers.api_key_env)"
    if parts.scheme == "http" and host not in LOOPBACK:
        return f"plain http to another machine, {host}: prompts, responses and key would be readable on the way"
    return None


class TeachersConfig(Strict):
    engine: Literal["transformers", "vllm", "openai", "flight"] = "transformers"
    """What scores: the model's body under transformers, many rows packed into one forward pass; a vLLM engine in the
    worker; `openai`: servers elsewhere that speak the OpenAI completions API with vLLM's prompt log-probs; `flight`: an
    `opd teachers serve` elsewhere, to which `workers` and `memory` are left."""
    address: str | None = None
    """Engine `flight`: who serves the teachers, `grpc+tls://HOST:PORT`; on this machine `grpc://127.0.0.1:PORT` too."""
    tls_root_certs: Path | None = None
    """Engine `flight`: PEM file with the certificates to trust; wanted with `grpc+tls`."""
    token_file: Path | None = None
    """Engine `flight`: file with the server's token, readable by its owner only; default: OPD_TEACHERS_TOKEN."""
    workers: int = Field(1, ge=1)
    """Scoring workers; each teacher's rows of a step go to one of them."""
    payload: Literal["hidden_states", "sampled_logprobs", "top_k"] = "hidden_states"
    """What is sent per response token: the last hidden state after the final norm, from which any objective but `top_k`
    can be computed; the sampled token's log-prob; or the likeliest tokens' log-probs (`objective.k` of them)."""
    memory: ByteSize = Field("8GiB", validate_default=True, gt=0)
    """Teachers kept in memory by each scoring worker, one read ahead among them, least recently used out; the one in use
    always stays. Engine `vllm` holds one and reads the next from its files."""
    queue: ByteSize = Field("256MiB", validate_default=True, gt=0)
    """Scored rows that may wait for the trainer while it overlaps with the teachers (`schedule.overlap`), over all scoring
    workers, and two more parts of about a mebibyte for each; what the next micro-batch needs is always let in."""
    mask_tokens: dict[Name, list[str]] = {}
    """By expert's name: tokens that it never writes, such as `<think>`. Where the student writes one in a domain of that
    expert, the token carries no loss: the expert has nothing to say about it but "never"."""
    max_quarantined: float = Field(0.001, ge=0, le=1)
    """Share of a step's responses that may be left out because a teacher's states are not finite, before the run stops."""
    dtype: DType = "float32"
    """Teachers compute in it, and hidden states and heads are sent in it; a server computes in its own."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache of engine `vllm` on a CPU, whole GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that engine `vllm` may take."""
    servers: dict[Name, ServerConfig] = {}
    """By expert's name: who serves it. Engine `openai` needs one for each expert."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' key; set it where the scoring workers run."""
    server_timeout_s: float = Field(120, gt=0, allow_inf_nan=False)
    """Deadline of one request to a server; it is made up to four times."""

    @field_validator("api_key_env")
    @classmethod
    def _no_key_in_the_pipeline(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            # It may be the key itself, which must not be printed.
            raise PydanticCustomError(
                "api_key_env",
                "a variable's name, such as TEACHERS_KEY",
                {"found": "something that is no variable's name"},
            )
        return name

    @model_validator(mode="after")
    def _servers_only_with_openai(self) -> TeachersConfig:
        unused = [key for key in ("servers", "api_key_env") if getattr(self, key)] if self.engine != "openai" else []
        if unused:
            raise PydanticCustomError(
                "servers",
                "engine: openai, or no {key}",
                {
                    "key": unused[0],
                    "where": f"teachers.{unused[0]}",
                    "found": f"set, with teachers.engine {self.engine}",
                },
            )
        if self.engine == "openai" and self.payload == "hidden_states":
            raise PydanticCustomError(
                "payload",
                "sampled_logprobs or top_k, with objective.kind sampled or top_k: a server sends no hidden states; "
                "engine transformers or vllm does",
                {"where": "teachers.payload", "found": "hidden_states with teachers.engine openai"},
            )
        return self

    @model_validator(mode="after")
    def _an_address_for_flight(self) -> TeachersConfig:
        if self.engine != "flight":
            for key in ("address", "tls_root_certs", "token_file"):
                if getattr(self, key) is not None:
                    raise _teachers_error(key, getattr(self, key), "nothing, or teachers.engine flight")
            return self
        url = parse_url(self.address or "")
        if url is None:
            raise _teachers_error("address", self.address, "grpc+tls://HOST:PORT, or grpc:// on this machine")
        scheme, address = url
        if scheme == "grpc" and not address.is_loopback:
            raise _teachers_error(
                "address", self.address, f"grpc+tls:// for a host other than {', '.join(LOOPBACK)}: tokens are secret"
            )
        if (scheme == "grpc+tls") != (self.tls_root_certs is not None):
            wanted = "a PEM file, for grpc+tls" if scheme == "grpc+tls" else "nothing, grpc:// has no certificates"
            raise _teachers_error("tls_root_certs", self.tls_root_certs, wanted)
        return self


def _teachers_error(key: str, found: object, wanted: str) -> PydanticCustomError:
    shown = "nothing" if found is None else without_secret(str(found))
    return PydanticCustomError("teachers", "{wanted}", {"wanted": wanted, "where": f"teachers.{key}", "found": shown})


class _Objective(Strict):
    chunk: int = Field(128, ge=1)
    """Response tokens whose logits exist at one time."""
    compile: bool = False
    """Compile the elementwise part with torch.compile; without a C++ compiler it runs eagerly, with one warning."""
    normalize: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the trained tokens of the whole step, or over its responses, each counted once however long."""


class ReverseKLConfig(_Objective):
    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact KL(student || teacher) over the whole vocabulary."""


class ForwardKLConfig(_Objective):
    kind: Literal["forward_kl"]
    """Exact KL(teacher || student) over the whole vocabulary."""


class JSDConfig(_Objective):
    kind: Literal["jsd"]
    """Generalised Jensen-Shannon divergence over the whole vocabulary."""
    beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture; 0 means forward, 1 reverse KL."""


class SkewConfig(_Objective):
    kind: Literal["skew"]
    """Reverse KL against the teacher with a little of the student mixed in."""
    alpha: float = Field(0.1, gt=0, lt=1)
    """Share of the student in the mixture."""


class SampledConfig(_Objective):
    kind: Literal["sampled"]
    """Policy gradient from the log-prob of the sampled token alone (k1)."""
    ratio_clip: float | None = Field(None, gt=0)
    """Upper bound of the importance weight p / mu; default: none."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound of |log q - log p|, nats; default: none."""
    baseline: Literal["none", "leave_one_out"] = "none"
    """Subtracted from the advantage to lower its variance: nothing, or the mean over the step's other responses of the
    same domain (needs teachers.payload sampled_logprobs)."""


class TopKConfig(_Objective):
    kind: Literal["top_k"]
    """Reverse KL on the teacher's likeliest tokens, the rest accounted for."""
    k: int = Field(64, ge=1)
    """Tokens the teacher sends for each position."""
    tail: Literal["bucket", "unnormalised"] = "bucket"
    """One bucket for all other tokens, or the generalised KL that needs none."""


def _objective_kind(value: Any) -> str:
    kind = value.get("kind", "reverse_kl") if isinstance(value, Mapping) else getattr(value, "kind", "reverse_kl")
    return f"~{kind}"


ObjectiveConfig = Annotated[
    Annotated[ReverseKLConfig, Tag("~reverse_kl")]
    | Annotated[ForwardKLConfig, Tag("~forward_kl")]
    | Annotated[JSDConfig, Tag("~jsd")]
    | Annotated[SkewConfig, Tag("~skew")]
    | Annotated[SampledConfig, Tag("~sampled")]
    | Annotated[TopKConfig, Tag("~top_k")],
    Discriminator(
        _objective_kind,
        custom_error_type="objective_kind",
        custom_error_message="`kind` is one of: reverse_kl, forward_kl, jsd, skew, sampled, top_k",
    ),
]

PAYLOADS_FOR = {
    "reverse_kl": ("hidden_states",),
    "forward_kl": ("hidden_states",),
    "jsd": ("hidden_states",),
    "skew": ("hidden_states",),
    "sampled": ("sampled_logprobs", "hidden_states"),
    "top_k": ("top_k",),
}
"""Payloads that hold what an objective needs; the first is the cheapest."""


class TrainerConfig(Strict):
    zero_stage: Literal[3] = 3
    """DeepSpeed ZeRO stage: parameters, gradients and optimiser state are sharded over the ranks."""
    ranks: int = Field(2, ge=1)
    """Data-parallel trainer processes."""
    dtype: DType = "float32"
    """Compute type; bfloat16 keeps float32 master weights."""
    steps: int = Field(..., ge=1)
    """Optimiser steps of the whole merge."""
    samples_per_step: int = Field(..., ge=1)
    """Responses in one optimiser step, over all domains."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0 to `lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to `min_lr_ratio` of `lr` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine decay end, as a share of `lr`."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment: gradients below it give small steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = Field(4096, ge=16)
    """Prompt and response tokens that a rank pushes through the model at a time, give or take one response."""
    head_memory: ByteSize = Field("1GiB", validate_default=True, gt=0)
    """Teachers' output heads that each rank keeps, least recently used out; those of one micro-batch always stay."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class ScheduleConfig(Strict):
    mode: Literal["sync"] = "sync"
    """`sync`: every sample is trained by the very weights that wrote it."""
    overlap: bool | Literal["auto"] = "auto"
    """Train while teachers still score; the result is the same. `auto`: where they do not share cores, that is if either
    has GPUs or the teachers are served elsewhere. On the same cores both get slower."""


class SyncConfig(Strict):
    kind: Literal["shared_memory"] = "shared_memory"
    """How new weights reach the rollout engines: safetensors in shared memory on one machine."""
    tolerance: float = Field(0.02, gt=0)
    """Largest mean |trainer - engine| log-prob gap over the probe tokens, nats, before the run stops."""
    probe_tokens: int = Field(64, ge=8)
    """Fixed tokens that both sides score after every push."""


class CheckpointConfig(Strict):
    every: int = Field(25, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of steps divisible by this stay for good; 0: none does."""


class LMEvalConfig(Strict):
    tasks: list[Annotated[str, Field(min_length=1)]] = []
    """Names of the harness, such as `gsm8k`, or YAML files of your own tasks."""
    model: Literal["hf", "vllm"] = "hf"
    """Which of the harness's adapters runs the model."""
    limit: int | None = Field(None, ge=1)
    """Questions per task, for a first look; default: all."""
    timeout_s: float = Field(14400, gt=0, allow_inf_nan=False)
    """Deadline for all tasks of one model."""


def _lm_eval_tasks(value: Any) -> Any:
    return {"tasks": value} if isinstance(value, list) else value


class EvaluateConfig(Strict):
    every: int = Field(0, ge=0)
    """Steps between evaluations during the merge; 0: only before and after."""
    samples: int = Field(100, ge=1)
    """Held-out prompts per domain, the first ones of the file."""
    n: int = Field(1, ge=1)
    """Answers to each prompt."""
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    """0: greedy; above it answers are sampled, each with a seed of its own."""
    pass_at: list[Annotated[int, Field(ge=1)]] = [1]
    """For each k, the chance that at least one of k answers to a prompt is right; k is at most `n`."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Answer limit; default: the rollout's."""
    lm_eval: Annotated[LMEvalConfig, BeforeValidator(_lm_eval_tasks)] = LMEvalConfig()
    """Tasks of EleutherAI's lm-evaluation-harness for the student before and the merged model; a list of tasks will do."""

    @model_validator(mode="after")
    def _answers_differ(self) -> EvaluateConfig:
        if self.n > 1 and self.temperature == 0:
            raise PydanticCustomError(
                "temperature",
                "above 0 for n: {n} answers to each prompt; greedy ones are all the same",
                {"n": self.n, "where": "evaluate.temperature", "found": "0"},
            )
        if max(self.pass_at, default=1) > self.n:
            raise PydanticCustomError(
                "pass_at",
                "at most n, which is {n}: pass@k needs k answers to a prompt",
                {"n": self.n, "where": "evaluate.pass_at", "found": str(self.pass_at)},
            )
        return self


class LoggingConfig(Strict):
    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard/` in the run directory."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project to log to as well; needs the package wandb."""
    mlflow: str | None = Field(None, min_length=1)
    """MLflow tracking URI to log to as well, e.g. `sqlite:///mlflow.db`; needs the package mlflow or mlflow-skinny."""


class ClusterConfig(Strict):
    address: str = "local"
    """`local` starts Ray on this machine; else a Ray cluster's address."""
    rollout_gpus: float = Field(0, ge=0)
    """GPUs for each rollout worker."""
    teacher_gpus: float = Field(0, ge=0)
    """GPUs for each scoring worker."""
    trainer_gpus: float = Field(0, ge=0)
    """GPUs for each trainer rank."""
    max_restarts: int = Field(3, ge=0)
    """Times that a merge starts all its workers again, from its last checkpoint, because one died. A rollout or scoring
    worker is first started again alone, once a step."""
    start_timeout_s: float = Field(300, gt=0)
    """Deadline for a worker to be up with its model loaded."""
    phase_timeout_s: float = Field(3600, gt=0)
    """Deadline for one phase of a step (rollout, score, train, sync) or one evaluation."""


def _number_or_list(value: Any) -> str:
    return "~list" if isinstance(value, list) else "~number"


class RoundConfig(Strict):
    """What is other in one round than in the pipeline; what is not said is the pipeline's."""

    seed: int | None = Field(None, ge=0)
    """Default: the pipeline's in the first round, one more in each further round."""
    registry: Path | None = None
    experts: ExpertsConfig | None = None
    """All experts of the round; they take the place of the pipeline's."""
    domains: dict[Name, DomainConfig] | None = Field(None, min_length=1)
    """All domains of the round; they take the place of the pipeline's."""
    rollout: dict[str, Any] = {}
    """Keys of the section that are other; in the same way the three below."""
    teachers: dict[str, Any] = {}
    objective: dict[str, Any] = {}
    """With `kind` all that is said of the objective, without it the keys that are other."""
    trainer: dict[str, Any] = {}


class PipelineConfig(Strict):
    """One merge: who learns, from whom, on which prompts, and how."""

    name: Name
    """Names the run directory and the report."""
    seed: int = Field(0, ge=0)
    """Decides the order of prompts and every sampled token."""
    student: StudentConfig
    """Who learns."""
    registry: Path | None = None
    """Root of the expert registry for `experts: {use: ...}`; default: OPD_REGISTRY, else ./registry."""
    experts: ExpertsConfig
    """Either `{use: [names]}` from the registry or `{name: {model, domain}}` (and `base`, for a LoRA adapter)."""
    domains: dict[Name, DomainConfig] = Field(..., min_length=1)
    """On which prompts, scored by which experts."""
    rollout: RolloutConfig = RolloutConfig()
    teachers: TeachersConfig = TeachersConfig()
    objective: ObjectiveConfig = ReverseKLConfig()
    trainer: TrainerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()
    rounds: Annotated[
        Annotated[int, Field(ge=1), Tag("~number")] | Annotated[list[RoundConfig], Field(min_length=2), Tag("~list")],
        Discriminator(_number_or_list),
    ] = 1
    """Merges one after the other, each from the student that the one before left: how many alike, or a list with what is
    other in each, of which the first is `{}`: the pipeline as it stands."""

    @model_validator(mode="after")
    def _payload_holds_what_the_objective_needs(self) -> PipelineConfig:
        wanted = PAYLOADS_FOR[self.objective.kind]
        if self.teachers.payload not in wanted:
            raise PydanticCustomError(
                "payload",
                "objective.kind {kind} needs teachers.payload {wanted}",
                {
                    "kind": self.objective.kind,
                    "wanted": " or ".join(wanted),
                    "where": "objective.kind",
                    "found": f"{self.objective.kind} with teachers.payload {self.teachers.payload}",
                },
            )
        return self

    @model_validator(mode="after")
    def _baseline_before_the_forward_pass(self) -> PipelineConfig:
        wants = isinstance(self.objective, SampledConfig) and self.objective.baseline != "none"
        if wants and self.teachers.payload != "sampled_logprobs":
            raise PydanticCustomError(
                "baseline",
                "teachers.payload sampled_logprobs, from which a response's mean is known before the step",
                {
                    "where": "objective.baseline",
                    "found": f"leave_one_out with teachers.payload {self.teachers.payload}",
                },
            )
        return self

    @model_validator(mode="after")
    def _every_expert_has_a_server(self) -> PipelineConfig:
        named = self.experts.use if isinstance(self.experts, RegisteredExperts) else list(self.experts)
        if self.teachers.engine != "openai" or named == "all":  # the registry's names are not known here
            return self
        served = self.teachers.servers
        for wrong, found in (
            ([name for name in named if name not in served], "nothing"),
            ([name for name in served if name not in named], "a server of no expert"),
        ):
            if wrong:
                raise PydanticCustomError(
                    "servers",
                    "base_url and model for each of the experts {experts}, and no others",
                    {"experts": ", ".join(named), "where": f"teachers.servers.{wrong[0]}", "found": found},
                )
        return self

    @model_validator(mode="after")
    def _every_domain_in_every_step(self) -> PipelineConfig:
        if self.trainer.samples_per_step < len(self.domains):
            raise PydanticCustomError(
                "too_few_samples",
                "at least one sample for each of the {domains} domains; raise trainer.samples_per_step",
                {
                    "domains": len(self.domains),
                    "found": self.trainer.samples_per_step,
                    "where": "trainer.samples_per_step",
                },
            )
        return self

    @model_validator(mode="after")
    def _every_round_is_a_pipeline(self) -> PipelineConfig:
        if isinstance(self.rounds, int):
            return self
        first = self.rounds[0].model_dump(exclude_defaults=True)
        if first:
            raise PydanticCustomError(
                "rounds",
                "an empty mapping: the first round is the pipeline as it stands",
                {"where": "rounds.0", "found": ", ".join(first)},
            )
        for index in range(1, len(self.rounds)):
            try:
                PipelineConfig.model_validate(_round_data(self, index))
            except ValidationError as errors:
                # What is wrong with the whole comes from what the round says: the pipeline alone is right.
                error = errors.errors()[0]
                context = error.get("ctx", {})
                where = ".".join(["rounds", str(index), *keys_of(error)])
                found = {"wanted": error["msg"], "found": found_in(error), "where": where}
                raise PydanticCustomError(error["type"], "{wanted}", {**context, **found}) from None
        return self


def rounds_of(config: PipelineConfig) -> list[PipelineConfig]:
    """A pipeline of one round for each round; all start from the pipeline's student."""
    num = config.rounds if isinstance(config.rounds, int) else len(config.rounds)
    return [PipelineConfig.model_validate(_round_data(config, index)) for index in range(num)]


def _round_data(config: PipelineConfig, index: int) -> dict[str, Any]:
    """The pipeline of round `index`, from 0, not validated yet."""
    data = config.model_dump(exclude={"rounds"}) | {"seed": config.seed + index}
    if isinstance(config.rounds, list):
        for key, value in config.rounds[index].model_dump(exclude_defaults=True).items():
            section = key in ("rollout", "teachers", "objective", "trainer")
            data[key] = {**data[key], **value} if section and "kind" not in value else value
    return data


def overlaps(config: PipelineConfig) -> bool:
    """What `schedule.overlap` comes to."""
    if config.schedule.overlap != "auto":
        return config.schedule.overlap
    gpus = config.cluster.trainer_gpus or config.cluster.teacher_gpus
    return bool(gpus) or config.teachers.engine in ("openai", "flight")


def load_pipeline(path: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read, override and check one pipeline file. Raises: ConfigError."""
    return validate(PipelineConfig, apply_overrides(load_yaml(path), overrides or []), path)
