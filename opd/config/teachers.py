"""The section `teachers`: which engine scores, on which devices, and what it sends. Each `engine` has a class of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from opd.config.endpoint import ServerAccess, ServerConfig, TextServerConfig
from opd.config.payloads import OWN_TOKENS, TEXT, PayloadName
from opd.machine.address import LOOPBACK, parse_url, strip_secret
from opd.settings.auto import AUTO, OrAuto
from opd.settings.strict import DType, Name, Strict, UserPath
from opd.settings.suggestions import find_nearest
from opd.settings.yaml_files import move_error


def _parse_device(value: Any) -> int | str:
    """Return a GPU's number, `cpu` or `disk`. A number may come as text, because keys in JSON are text."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number in ("cpu", "disk") or (type(number) is int and number >= 0):
        return number
    raise _teachers_error("max_memory", repr(value), "numbers of a scoring worker's GPUs, from 0, and cpu and disk")


Device = Annotated[int | Literal["cpu", "disk"], BeforeValidator(_parse_device)]


class Teachers(Strict):
    """The keys that the section has with every engine."""

    elsewhere: ClassVar[bool] = False
    """True if the teachers' models run outside of this cluster."""

    engine: str
    payload: PayloadName = "hidden_states"
    """Sent per trained token: the last hidden state (for all objectives but `top_k`), the sampled token's log-prob, or
    those of the `objective.k` likeliest tokens; `aligned_states` (for `aligned_kl`): of an expert with another tokenizer, see
    docs/tokenizers.md."""
    dtype: DType = "float32"
    """Compute type of teachers and type of what they send; servers compute in their own."""
    queue: Annotated[ByteSize, Field(gt=0), OrAuto(256 << 20)] = Field(AUTO, validate_default=True)
    """Memory for scored rows that wait for the trainer under `schedule.overlap`, over all scoring workers. `auto`: for two
    rounds of micro-batches, at least 256 MiB."""
    mask_tokens: dict[Name, list[str]] = {}
    """Expert's name -> tokens that it never writes, such as `<think>`; they carry no loss in its domains."""
    max_quarantined: float = Field(0.001, ge=0, le=1)
    """The run stops if a teacher's states are not finite for a larger share of a step's responses."""

    @model_validator(mode="after")
    def _check_payload(self) -> Teachers:
        if self.payload == "none" and self.engine != "none":
            raise _teachers_error("payload", f"none, with teachers.engine {self.engine}", "what teachers are to send")
        if self.payload == TEXT and self.engine != TEXT:
            raise _teachers_error(
                "payload", f"{TEXT}, with teachers.engine {self.engine}", f"another payload, or teachers.engine {TEXT}"
            )
        if self.payload == OWN_TOKENS and self.engine != "transformers":
            raise _teachers_error(
                "payload",
                f"{OWN_TOKENS}, with teachers.engine {self.engine}",
                "another payload, or teachers.engine transformers",
            )
        return self

    @property
    def scoring_workers(self) -> int:
        """Number of this merge's own processes that score."""
        return 0

    @property
    def sent_payload(self) -> str:
        """Payload of the rows that reach the trainer."""
        return self.payload


class _WithWorkers(Teachers):
    workers: int = Field(1, ge=1)
    """Scoring workers, which share the rows of a step."""

    @property
    def scoring_workers(self) -> int:
        return self.workers


class TransformersTeachers(_WithWorkers):
    engine: Literal["transformers"] = "transformers"
    """Scoring workers run transformers, many rows in one forward pass."""
    memory: ByteSize = Field("8GiB", validate_default=True, gt=0)
    """Memory for teachers' weights in each scoring worker; the least recently used go first."""
    gpu_memory: ByteSize = Field(ByteSize(0), ge=0)
    """Memory for teachers' weights on each worker's GPU, without adapters. Default: that of the one in use."""
    device_map: Literal["auto"] | None = None
    """`auto`: divide a teacher's layers among the worker's GPUs, then what `max_memory` names; default: one device."""
    max_memory: dict[Device, Annotated[ByteSize, Field(gt=0)]] = {}
    """GPU number, `cpu` or `disk` -> most bytes of a teacher there. Default: 90 % of each GPU's free memory; without
    GPUs the CPU's."""

    @model_validator(mode="after")
    def _check_memory(self) -> TransformersTeachers:
        if self.max_memory and self.device_map is None:
            devices = ", ".join(map(str, self.max_memory))
            raise _teachers_error(
                "max_memory", f"{devices}, without teachers.device_map", "nothing, or teachers.device_map auto"
            )
        if self.gpu_memory and self.device_map is not None:
            raise _teachers_error(
                "gpu_memory", "a size, with teachers.device_map", "0: a divided teacher is brought anew"
            )
        return self


class VLLMTeachers(_WithWorkers):
    engine: Literal["vllm"]
    """A vLLM engine in each scoring worker, one teacher at a time."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache of a CPU engine (each process), whole GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that an engine may take."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Processes that share a teacher's weights; each has `cluster.teacher_gpus`."""


class _WithServers(Teachers, ServerAccess):
    elsewhere: ClassVar[bool] = True


class OpenAITeachers(_WithWorkers, _WithServers):
    engine: Literal["openai"]
    """Servers with the OpenAI completions API and vLLM's prompt log-probs."""
    payload: Literal["sampled_logprobs", "top_k"]
    """The sampled token's log-prob, or those of the `objective.k` likeliest tokens."""
    servers: dict[Name, ServerConfig] = {}
    """Expert's name -> its server; each needs one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_hidden_states(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("payload", "hidden_states") == "hidden_states":
            raise PydanticCustomError(
                "payload",
                "sampled_logprobs or top_k, with objective.kind sampled or top_k: a server sends no hidden states; "
                "engine transformers or vllm does",
                {"where": "teachers.payload", "found": "hidden_states with teachers.engine openai"},
            )
        return data


class TextTeachers(_WithServers, TextServerConfig):
    engine: Literal["text"]
    """A server with an OpenAI-compatible API that writes answers and scores nothing, see docs/text_only.md."""
    payload: Literal["text"] = "text"
    """The expert's answers."""
    api: Literal["chat", "completions"] = "chat"
    """Chat completions of a row's messages, or completions of its text as it stands."""
    steps: int | None = Field(None, ge=0)
    """Steps in which answers take the place of the student's responses (with `objective.reward.preference`, of the first to each prompt);
    afterwards only rewards teach the domain. Default: all."""

    @model_validator(mode="after")
    def _check_price(self) -> TextTeachers:
        if problem := self.find_problem():
            key, actual, expected = problem
            raise _teachers_error(key, actual, f"teachers.{expected}" if key == "max_cost" else expected)
        return self


class FlightTeachers(Teachers):
    elsewhere: ClassVar[bool] = True

    engine: Literal["flight"]
    """`opd teachers serve` elsewhere, see docs/flight.md."""
    address: str
    """`grpc+tls://HOST:PORT`, or `grpc://127.0.0.1:PORT` on this machine."""
    tls_root_certs: UserPath | None = None
    """PEM file of certificates to trust; needed with `grpc+tls`."""
    token_file: UserPath | None = None
    """The server's token, readable by its owner only; default: OPD_TEACHERS_TOKEN."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_missing_address(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("address") is None:
            raise _teachers_error("address", None, "grpc+tls://HOST:PORT, or grpc:// on this machine")
        return data

    @model_validator(mode="after")
    def _check_address(self) -> FlightTeachers:
        url = parse_url(self.address)
        if url is None:
            raise _teachers_error("address", self.address, "grpc+tls://HOST:PORT, or grpc:// on this machine")
        scheme, address = url
        if scheme == "grpc" and not address.is_loopback:
            raise _teachers_error(
                "address", self.address, f"grpc+tls:// for a host other than {', '.join(LOOPBACK)}: tokens are secret"
            )
        if (scheme == "grpc+tls") != (self.tls_root_certs is not None):
            expected = "a PEM file, for grpc+tls" if scheme == "grpc+tls" else "nothing, grpc:// has no certificates"
            raise _teachers_error("tls_root_certs", self.tls_root_certs, expected)
        return self


class TrainerTeachers(Teachers):
    engine: Literal["trainer"]
    """The trainer's ranks, for a LoRA student and LoRA experts of its base, see [gpu.md](gpu.md)."""
    payload: Literal["hidden_states", "sampled_logprobs", "top_k"] = "hidden_states"
    """A teacher's answer about each trained token, as with `transformers`."""
    dtype: DType = "float32"
    """Type in which the ranks keep hidden states; they compute in `trainer.dtype`."""

    @property
    def sent_payload(self) -> str:
        return "none"


class NoTeachers(Teachers):
    engine: Literal["none"]
    """Rewards alone, with `experts: {}`, `objective.kind: none` and `objective.reward`."""
    payload: Literal["none"] = "none"
    """No teacher's data."""


ENGINES: dict[str, type[Teachers]] = {
    "transformers": TransformersTeachers,
    "vllm": VLLMTeachers,
    "openai": OpenAITeachers,
    "flight": FlightTeachers,
    "text": TextTeachers,
    "trainer": TrainerTeachers,
    "none": NoTeachers,
}
"""The classes that `teachers.engine` names."""
SECRET = ("servers", "base_url", "api_key_env")
"""Keys that may hold a password, which must not be printed."""


def drop_other_engine_keys(data: Any) -> Any:
    """Return the section without the keys of other engines that hold their defaults.

    A pipeline that was written out with all its defaults, by an older release or for another engine, has such keys.
    Raises: PydanticCustomError for an unknown engine, or for a key of another engine with a value of its own, which this
    engine would ignore.
    """
    if not isinstance(data, Mapping):
        return data
    engine = data.get("engine", "transformers")
    if not isinstance(engine, str) or engine not in ENGINES:
        near = find_nearest(engine, ENGINES) if isinstance(engine, str) else None
        hint = f"did you mean `{near}`? " if near else ""
        raise _teachers_error("engine", repr(engine), f"{hint}one of: {', '.join(ENGINES)}")
    section = {}
    for key, value in data.items():
        engines = [name for name, cls in ENGINES.items() if key in cls.model_fields]
        if engine in engines or not engines:
            section[key] = value
        elif not _is_default(ENGINES[engines[0]], key, value):
            shown = "set" if key in SECRET else strip_secret(str(value))
            expected = f"nothing, or teachers.engine {' or '.join(engines)}"
            raise _teachers_error(key, f"{shown}, with teachers.engine {engine}", expected)
    return section


def change_teachers(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with some keys changed. If `engine` is among them, the keys that both engines have are kept."""
    engine = changes.get("engine", data["engine"])
    keys = ENGINES[engine].model_fields if isinstance(engine, str) and engine in ENGINES else data
    return {key: value for key, value in data.items() if key in keys} | dict(changes)


SHARED_KEYS = ("dtype", "queue", "mask_tokens", "max_quarantined")
"""Keys of the section `teachers` that hold for all engines of a merge."""


def build_expert_engine(shared: Teachers, own: Mapping[str, Any], key: str) -> Teachers:
    """Return the section `teachers` as it is for an expert with an engine of its own.

    `shared` is the pipeline's section, `own` the mapping at `key` with the expert's engine as `kind` and the keys of that engine. The
    payload is the pipeline's unless `own` has one. Raises: PydanticCustomError, which names the key in `own`.
    """
    for name in SHARED_KEYS:
        if name in own:
            raise PydanticCustomError(
                "expert_engine",
                "nothing: teachers.{name} holds for every engine of a merge",
                {"name": name, "where": f"{key}.{name}", "found": strip_secret(str(own[name]))},
            )
    kind = own.get("kind")
    if kind not in [engine for engine in ENGINES if engine != "none"]:  # a list, because a YAML list cannot be hashed
        raise PydanticCustomError(
            "expert_engine",
            "one of: {engines}",
            {
                "engines": ", ".join(engine for engine in ENGINES if engine != "none"),
                "where": f"{key}.kind",
                "found": "nothing" if kind is None else repr(kind),
            },
        )
    inherited = {name: getattr(shared, name) for name in (*SHARED_KEYS, *(() if kind == TEXT else ("payload",)))}
    data = {"teachers": inherited | {"engine": kind} | {name: value for name, value in own.items() if name != "kind"}}
    try:
        return _ExpertEngine.model_validate(data).teachers
    except ValidationError as errors:
        raise rename_engine_keys(move_error(errors, [], data), key) from None


def rename_engine_keys(error: PydanticCustomError, key: str) -> PydanticCustomError:
    """Return an error about the section `teachers` as one about an expert's own engine at `key`, which has the same keys."""

    def rename_keys(text: str) -> str:
        return text.replace("teachers.engine", f"{key}.kind").replace("teachers.", f"{key}.")

    context = error.context or {}
    renamed = {name: rename_keys(value) if isinstance(value, str) else value for name, value in context.items()}
    if renamed.get("where") == "teachers":  # the section as a whole
        renamed["where"] = key
    if "known" in renamed:
        known = [name for name in renamed["known"].split(", ") if name not in SHARED_KEYS]
        renamed["known"] = ", ".join("kind" if name == "engine" else name for name in known)
    return PydanticCustomError(error.type, "{wanted}", {**renamed, "wanted": rename_keys(error.message())})


def _is_default(owner: type[Teachers], key: str, value: Any) -> bool:
    """Return True for None and for the key's default, whether spelt as in a file (`8GiB`) or parsed (bytes)."""
    default = owner.model_fields[key].default
    parsed: Any = TypeAdapter(ByteSize).validate_python(default) if key == "memory" else default
    return value in (None, default, parsed)


def _choose_engine_section(value: Any) -> str:
    engine = value.get("engine", "transformers") if isinstance(value, Mapping) else getattr(value, "engine", "")
    return f"~{engine}"


TeachersConfig = Annotated[
    Annotated[TransformersTeachers, Tag("~transformers")]
    | Annotated[VLLMTeachers, Tag("~vllm")]
    | Annotated[OpenAITeachers, Tag("~openai")]
    | Annotated[FlightTeachers, Tag("~flight")]
    | Annotated[TextTeachers, Tag("~text")]
    | Annotated[TrainerTeachers, Tag("~trainer")]
    | Annotated[NoTeachers, Tag("~none")],
    Discriminator(
        _choose_engine_section,
        custom_error_type="teachers",
        custom_error_message="a mapping with the keys of one engine",
    ),
    BeforeValidator(drop_other_engine_keys),
]


class _ExpertEngine(Strict):
    """The section `teachers` alone, so that errors about it have the keys of a pipeline."""

    teachers: TeachersConfig


def _teachers_error(key: str, actual: object, expected: str) -> PydanticCustomError:
    shown = "nothing" if actual is None else strip_secret(str(actual))
    return PydanticCustomError("teachers", "{wanted}", {"wanted": expected, "where": f"teachers.{key}", "found": shown})
