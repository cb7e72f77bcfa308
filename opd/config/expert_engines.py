"""Rules for experts with an engine of their own, and for domains with an objective of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from opd.config.devices import find_devices_problem
from opd.config.domains import KEPT, STUDENT, ExpertConfig, RegisteredExperts
from opd.config.teachers import (
    OpenAITeachers,
    Teachers,
    TextTeachers,
    TrainerTeachers,
    build_expert_engine,
    rename_engine_keys,
)
from opd.settings.auto import OpenNumber

if TYPE_CHECKING:
    from opd.config.pipeline import PipelineConfig

WHOLE_MERGE = {"chunk": "auto", "compile": "auto", "reward": None, "extrapolate": 1.0}
"""Keys of an objective that hold for all domains of a merge -> their defaults."""


def trainer_has_start(config: PipelineConfig) -> bool:
    """Return True if the trainer itself can compute the log-probs of the start, so that no teacher has to.

    It can with LoRA, which leaves the start's weights as they are. It cannot if the objective subtracts a baseline, because
    the baseline is needed before the trainer computes anything.
    """
    return config.student.lora is not None and not config.objective.wants_baseline


def list_own_engines(config: PipelineConfig) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return expert -> key and value of its own engine, for each expert that has one.

    The student itself, as a teacher, has the trainer's ranks if these can score as it does.
    """
    experts = config.experts
    registered = experts.engines if isinstance(experts, RegisteredExperts) else {}
    engines: dict[str, tuple[str, Mapping[str, Any]]] = {
        name: (f"experts.engines.{name}", own) for name, own in registered.items()
    }
    for name, expert in config.inline_experts.items():
        if expert.engine is not None:
            engines[name] = (f"experts.{name}.engine", expert.engine)
        elif expert.ema is not None:
            engines[name] = (f"experts.{name}.ema", {"kind": "trainer"})
        elif expert.model == STUDENT and trainer_has_start(config):
            engines[name] = (name_student_key(config, name), {"kind": "trainer"})
    return engines


def name_student_key(config: PipelineConfig, expert: str) -> str:
    """Return the place in the pipeline that makes the student a teacher under this name."""
    if expert == KEPT:
        return "keep"
    own = not isinstance(config.experts, RegisteredExperts) and expert in config.experts
    return f"experts.{expert}" if own else f"domains.{config.inline_experts[expert].domain}.teachers"


def list_engines(config: PipelineConfig) -> list[tuple[Teachers, list[str], str]]:
    """Return each engine in use, the names of its experts, and its key in the pipeline; the section `teachers` comes first.

    The section `teachers` has no names if the registry decides on the experts. It is left out if every expert has an engine of its own.
    Raises: PydanticCustomError for an own engine that is wrong.
    """
    own_engines, experts = list_own_engines(config), config.experts
    names = experts.use if isinstance(experts, RegisteredExperts) else []
    every = [*(() if names == "all" else names), *config.inline_experts]
    shared = [name for name in every if name not in own_engines]
    engines: list[tuple[Teachers, list[str], str]] = []
    if shared or names == "all" or not own_engines:
        engines.append((config.teachers, shared, "teachers"))
    for name, (key, own) in own_engines.items():
        section = build_expert_engine(config.teachers, own, key)
        equal = next((entry for entry in engines if entry[0] == section), None)
        if equal is None:
            engines.append((section, [name], key))
        else:
            equal[1].append(name)
    return engines


def find_engines_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return what is wrong with the engines of the merge; None if nothing is. Raises: PydanticCustomError for an own engine alone."""
    experts = config.experts
    if isinstance(experts, RegisteredExperts) and experts.use != "all":
        for name in experts.engines:
            if name not in experts.use:
                return _engine_error(f"experts.engines.{name}", name, f"an expert of `use`: {', '.join(experts.use)}")
    for name, expert in config.inline_experts.items():
        if expert.model is None and not isinstance(config.engine_of(name), TextTeachers):
            return _engine_error(
                f"experts.{name}.model", "nothing", "a directory, or an engine that only writes text: kind text"
            )
        if expert.ema is not None and (problem := _find_average_problem(config, name, expert)):
            return problem
        if expert.model is None and expert.base is not None:
            return _engine_error(f"experts.{name}.base", str(expert.base), "nothing: the expert has no `model`")
    for section, names, key in list_engines(config):
        problem = find_devices_problem(config.cluster, config.trainer, config.rollout, section, config.schedule)
        problem = problem or _find_server_problem(config, section, names)
        if problem is not None:
            return problem if key == "teachers" else rename_engine_keys(problem, key)
    return None


def _find_average_problem(config: PipelineConfig, name: str, expert: ExpertConfig) -> PydanticCustomError | None:
    """Return what does not go with an expert that is a moving average of the student, which only the trainer's ranks have."""
    key, actual = f"experts.{name}.ema", f"{expert.ema:g} "
    if expert.model != STUDENT:
        return _engine_error(key, actual + f"with model {expert.model}", "`model: student`, whose weights are averaged")
    if not isinstance(config.engine_of(name), TrainerTeachers):
        return _engine_error(key, actual + "with an engine of its own", "no engine, or kind trainer: the ranks average")
    for domain, settings in config.domains.items():
        own = name in settings.teacher_names or (not settings.teacher_names and expert.domain == domain)
        if own and settings.environment is not None and settings.environment.teacher_turns is not None:
            return _engine_error(key, actual + f"with teacher_turns in {domain}", "an expert that can write turns")
    return None


def list_frozen_names(config: PipelineConfig, names: list[str]) -> list[str]:
    """Return those of these experts that are no moving average of the student."""
    return [name for name in names if name not in config.inline_experts or config.inline_experts[name].ema is None]


def _find_server_problem(config: PipelineConfig, section: Teachers, names: list[str]) -> PydanticCustomError | None:
    """Return which expert of an engine `openai` lacks a server, or which server is of no expert."""
    if not isinstance(section, OpenAITeachers) or (section is config.teachers and not names):
        return None  # of `use: all` only the registry knows the names
    for found, problem in (
        ([name for name in names if name not in section.servers], "nothing"),
        ([name for name in section.servers if name not in names], "a server of no expert"),
    ):
        if found:
            return PydanticCustomError(
                "servers",
                "base_url and model for each of the experts {experts}, and no others",
                {"experts": ", ".join(names), "where": f"teachers.servers.{found[0]}", "found": problem},
            )
    return None


def find_own_objective_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return which key of a domain's own objective holds for the whole merge; None if no such key is set."""
    for name, domain in config.domains.items():
        if domain.objective is None:
            continue
        key = f"domains.{name}.objective"
        if not domain.objective.HAS_DIVERGENCE or not config.objective.HAS_DIVERGENCE:
            return _engine_error(key, f"{domain.objective.kind} beside {config.objective.kind}", "two divergences")
        for setting, default in WHOLE_MERGE.items():
            value = getattr(domain.objective, setting)
            if value != default and not isinstance(value, OpenNumber):
                own = f", or domains.{name}.extrapolate" if setting == "extrapolate" else ""
                return _engine_error(
                    f"{key}.{setting}", str(value), f"nothing: objective.{setting} holds for every domain{own}"
                )
    return None


def _engine_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("expert_engine", "{wanted}", {"wanted": expected, "where": key, "found": actual})
