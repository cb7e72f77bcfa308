"""The section `efforts`: a domain becomes one domain for each effort, of which a tag in the student's prompt tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field
from pydantic_core import PydanticCustomError

from opd.config.prompts import ChatTemplateKwargs
from opd.settings.strict import Strict

if TYPE_CHECKING:
    from opd.config.pipeline import PipelineConfig

EFFORT_VARIABLE = "reasoning_effort"
"""The effort as a variable of chat templates, and as a field of requests to OpenAI's API."""


class EffortConfig(Strict):
    chat_template_kwargs: ChatTemplateKwargs = {}
    """Variables by which the chat template tells the student; default without `text`: `{reasoning_effort: NAME}`."""
    text: str = Field("", max_length=10_000)
    """Text with which the system message begins, and a prompt of plain text."""

    def list_variables(self, name: str) -> dict[str, Any]:
        """Return the variables of the chat template for the effort of this name."""
        return dict(self.chat_template_kwargs) or ({} if self.text else {EFFORT_VARIABLE: name})


def name_effort_domain(domain: str, effort: str) -> str:
    """Return the name of the domain that `efforts` makes of a domain for an effort."""
    return f"{domain}-{effort}"


def expand_efforts(data: Mapping[str, Any], without: str) -> Mapping[str, Any]:
    """Return a pipeline, not checked yet, with a domain for each effort in the place of each domain.

    Keys that the pipeline has under the new domain's own name go before those of the domain. An expert with an `effort` is one of
    the new domain. The domain `without` has no efforts. A pipeline that was expanded before comes back as it is.
    Raises: PydanticCustomError for an expert of an effort that there is not.
    """
    efforts, domains, experts = data.get("efforts"), data.get("domains"), data.get("experts")
    known = tuple(efforts) if isinstance(efforts, Mapping) else ()
    if isinstance(experts, Mapping) and "use" not in experts:
        data = {**data, "experts": {name: _expand_expert(name, expert, known) for name, expert in experts.items()}}
    if not isinstance(domains, Mapping):  # refused where it is validated
        return data
    settings = {name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in domains.items()}
    whole = [
        name
        for name, value in settings.items()
        if known and name != without and isinstance(value, Mapping) and value.get("effort") is None
    ]
    made = {name_effort_domain(name, effort) for name in whole for effort in known}
    expanded: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in whole:
            expanded.setdefault(name, value)
        elif name not in made:
            for effort in known:
                domain = name_effort_domain(name, effort)
                expanded[domain] = {**value, **(settings.get(domain) or {}), "effort": effort}
    return {**data, "domains": expanded}


def _expand_expert(name: str, expert: Any, known: tuple[str, ...]) -> Any:
    """Return an expert with the domain of its effort, if it names one. Raises: PydanticCustomError."""
    settings = expert.model_dump() if isinstance(expert, BaseModel) else expert
    effort = settings.get("effort") if isinstance(settings, Mapping) else None
    if effort is None:
        return expert
    if effort not in known:
        raise _effort_error(f"experts.{name}.effort", str(effort), _list_known(known))
    return {**settings, "domain": name_effort_domain(str(settings.get("domain")), effort), "effort": None}


def find_efforts_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return what is wrong with the efforts of domains and experts; None if nothing is."""
    if len(config.efforts) == 1:
        return _effort_error("efforts", next(iter(config.efforts)), "two or more, from the least to the most")
    for name, domain in config.domains.items():
        key = f"domains.{name}.effort"
        if domain.effort is None:
            continue
        if domain.effort not in config.efforts:
            return _effort_error(key, domain.effort, _list_known(tuple(config.efforts)))
        if not name.endswith(name_effort_domain("", domain.effort)):
            return _effort_error(key, domain.effort, f"a domain whose name ends with -{domain.effort}")
        if domain.agent is not None and config.efforts[domain.effort].text:
            expected = "`chat_template_kwargs`: what the agent's program says is its own"
            return _effort_error(f"efforts.{domain.effort}.text", f"text, and domain {name} with an agent", expected)
    for name, prompt in config.teacher_prompts.items():
        if prompt.effort is not None and not config.efforts:
            return _effort_error(f"experts.{name}.prompt.effort", str(prompt.effort).lower(), _list_known(()))
    return None


def _list_known(known: tuple[str, ...]) -> str:
    return f"one of `efforts`: {', '.join(known)}" if known else "nothing, without the section `efforts`"


def _effort_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("effort", "{wanted}", {"wanted": expected, "where": key, "found": actual})
