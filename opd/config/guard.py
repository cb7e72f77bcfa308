"""The section `guard`: what is checked before a tool call runs, who judges, and what happens to a cheat's tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from opd.config.kinds import kind_tag
from opd.settings.strict import PathOrName, Strict, UserPath
from opd.settings.user_objects import is_import_name
from opd.settings.yaml_files import move_error

if TYPE_CHECKING:
    from opd.config.domains import DomainConfig


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise PydanticCustomError("address", "http://HOST:PORT/v1 or https://HOST/v1, without user, password and query")
    return url.rstrip("/")


def _check_import_name(name: str) -> str:
    if not is_import_name(name):
        raise PydanticCustomError("place", "module:name of a function or class")
    return name


def _check_absolute(path: str) -> str:
    if not path.startswith("/"):
        raise PydanticCustomError("path", "an absolute path, as the policy's shell sees it")
    return path


def _check_anchored_glob(glob: str) -> str:
    if not glob.startswith(("/", "**/")) or glob.count("{") != glob.count("}"):
        raise PydanticCustomError("glob", "a glob that begins with `/` or `**/`, its braces in pairs")
    return glob


class EndpointJudge(Strict):
    """A server that speaks OpenAI's chat completions."""

    kind: Literal["endpoint"]
    """A server with OpenAI's chat completions."""
    base_url: Annotated[str, AfterValidator(_check_url)]
    """Address of the API, such as `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model at the server."""
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the key; none is sent without it."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Block from this probability of `block` on, if the server returns log-probs; default: its word counts."""


class LocalJudge(Strict):
    """A model in the rollout worker, asked for the log-probs of the two verdicts."""

    kind: Literal["local"]
    """A model or a function in the rollout worker."""
    model: UserPath | None = None
    """Hugging Face directory of a model, run on the worker's CPU."""
    scorer: Annotated[str, AfterValidator(_check_import_name)] | None = None
    """Instead of `model`: `module:name`, called as `scorer(prompt, verdicts)`; returns a log-prob for each verdict."""
    threshold: float = Field(0.5, gt=0, lt=1)
    """Block from this probability of `block` on."""

    @model_validator(mode="after")
    def _check_one_model(self) -> LocalJudge:
        if (self.model is None) == (self.scorer is None):
            actual = "neither" if self.model is None else "both"
            raise PydanticCustomError("local_judge", "either `model` or `scorer`", {"found": actual})
        return self


JudgeConfig = Annotated[
    Annotated[EndpointJudge, Tag("~endpoint")] | Annotated[LocalJudge, Tag("~local")],
    Discriminator(
        kind_tag, custom_error_type="judge", custom_error_message="a mapping with `kind: endpoint` or `kind: local`"
    ),
]


class GuardConfig(Strict):
    rules: list[PathOrName] = Field(["shipped"], min_length=1)
    """Files of rules; `shipped` is our own."""
    protected: list[Annotated[str, AfterValidator(_check_anchored_glob)]] = []
    """Globs of what the environment hides, from `/` or with `**/` in front: `/box/.cases/**`."""
    workdir: Annotated[str, AfterValidator(_check_absolute)] = "/workspace"
    """An episode's first directory, as its shell sees it."""
    home: Annotated[str, AfterValidator(_check_absolute)] = "/root"
    """Directory behind `~`."""
    keeps_shell: bool = True
    """Calls share one shell, with its `cd` and variables; false: each begins anew in `workdir`."""
    tools: dict[str, dict[str, Literal["shell", "python", "read", "write", "text"]]] = {}
    """Tool -> its argument -> what that is. Default, by the argument's name: `command` is shell, `code` Python, `path`
    a file."""
    only_tools: Annotated[list[str], Field(min_length=1)] | None = None
    """Tools whose calls are checked; default: all."""
    answers: bool = False
    """Check turns without a call, too: rules read their fenced code, the judge all of them."""
    judge: JudgeConfig | None = None
    """Judges what the rules find suspicious; default: `on_failure` decides."""
    deadline_s: float = Field(10.0, gt=0)
    """Deadline of an answer of the judge."""
    cache: int = Field(4096, ge=0)
    """Answers of the judge held in memory; a run's file has all."""
    on_failure: Literal["allow", "block"] = "block"
    """Verdict on a suspicious call without a judge's answer. What a rule is certain of is blocked anyway."""
    on_hit: Literal["mask", "keep", "negative"] = "keep"
    """Tokens of a turn with a blocked call: trained as usual, masked, or trained against, which needs a reward."""


def merge_guard(section: GuardConfig | None, overrides: bool | Mapping[str, Any] | None) -> GuardConfig | None:
    """Return the guard of a domain: the pipeline's section with the domain's own keys in place of the same keys there.

    `overrides`: the domain's key `guard`. Returns None if the domain has no guard.

    Raises: ValidationError for keys that no guard has.
    """
    if section is None or overrides is False:
        return None
    return (
        GuardConfig.model_validate({**section.model_dump(), **overrides}) if isinstance(overrides, Mapping) else section
    )


def refuse_useless_guard(
    section: GuardConfig | None, domains: Mapping[str, DomainConfig], rewarded: Collection[str]
) -> None:
    """Refuse a guard that has nothing to check, a domain's keys without a section, and `negative` without a reward.

    `rewarded` are the domains that train on rewards. Raises: PydanticCustomError.
    """
    guards = {name: _find_domain_guard(section, name, domain) for name, domain in domains.items()}
    if section is not None and not any(guards.values()):
        raise _guard_error(
            "guard", "a guard for no domain", "a domain with `environment` or `agent` that the guard holds for"
        )
    for name, guard in guards.items():
        if guard is not None and guard.on_hit == "negative" and name not in rewarded:
            raise _guard_error(
                "guard.on_hit" if section == guard else f"domains.{name}.guard.on_hit",
                f"negative, and domain {name} trains on no reward",
                "keep or mask, or objective.reward in this domain: the stream of rewards is what trains against tokens",
            )


def _find_domain_guard(section: GuardConfig | None, name: str, domain: DomainConfig) -> GuardConfig | None:
    overrides = domain.guard
    if overrides and section is None:
        raise _guard_error(
            f"domains.{name}.guard", "no section `guard`", "the section at the top level, `guard: {}` will do"
        )
    if isinstance(overrides, Mapping) and not domain.has_episodes:
        raise _guard_error(
            f"domains.{name}.guard", "a guard without episodes", "an `environment` or an `agent` in the domain"
        )
    try:
        return merge_guard(section, overrides) if domain.has_episodes else None
    except ValidationError as errors:
        raise move_error(errors, ["domains", name, "guard"], overrides) from None


def _guard_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("guard", "{wanted}", {"where": key, "found": actual, "wanted": expected})
