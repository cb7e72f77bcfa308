"""Experts of one domain that differ in their effort: found by their names, such as `math-low` and `math-high`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opd.config.efforts import EFFORT_VARIABLE
from pipelines.propose.text import Flow
from pipelines.sizing.shrink import Data

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Names of efforts, from the least to the most; those of OpenAI's API among them."""


@dataclass(frozen=True, slots=True)
class ExpertEffort:
    """Domain and effort in an expert's name."""

    domain: str
    effort: str


def find_efforts(names: Iterable[str]) -> dict[str, ExpertEffort]:
    """Return expert -> domain and effort, if all experts are called DOMAIN-EFFORT, and each domain has the same two or more efforts.

    Empty if they are not: with `efforts` an expert without one would teach all of them.
    """
    found = {}
    for name in names:
        domain, _, effort = name.rpartition("-")
        if not domain or effort not in EFFORTS:
            return {}
        found[name] = ExpertEffort(domain, effort)
    by_domain: dict[str, set[str]] = {}
    for expert in found.values():
        by_domain.setdefault(expert.domain, set()).add(expert.effort)
    sets = list(by_domain.values())
    return found if sets and len(sets[0]) > 1 and all(efforts == sets[0] for efforts in sets) else {}


def fold_efforts(data: Data, efforts: Mapping[str, ExpertEffort], *, in_template: bool) -> Data:
    """Return the pipeline with one domain in the place of those that differ in the effort, and with the section `efforts`.

    `in_template`: the student's chat template reads the effort. Else a text in front of the prompt tells it, which experts were not
    trained with.
    """
    names = [effort for effort in EFFORTS if any(expert.effort == effort for expert in efforts.values())]
    tags: dict[str, Any] = {name: Flow() if in_template else Flow(text=f"Effort: {name}. ") for name in names}
    untagged = {} if in_template else {"prompt": {"effort": False}}
    experts = {
        name: Flow({**section, "domain": efforts[name].domain, "effort": efforts[name].effort, **untagged})
        for name, section in data["experts"].items()
    }
    domains: dict[str, Any] = {}
    for name, section in data["domains"].items():
        domains.setdefault(efforts[name].domain, section)
    folded: Data = {}
    for key, value in data.items():
        folded[key] = {"experts": experts, "domains": domains}.get(key, value)
        if key == "student":
            folded["efforts"] = tags
    return folded


def reads_effort(template: object) -> bool:
    """Return True if a chat template reads the effort."""
    return EFFORT_VARIABLE in str(template or "")
