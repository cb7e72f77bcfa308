"""The teachers of a merge by engine. To everything that starts, places or measures an engine, a merge with several engines is several
merges, each with one of the engines as its section `teachers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opd.config import PipelineConfig
from opd.config.domains import RegisteredExperts
from opd.config.sections import ClusterConfig
from opd.config.teachers import Teachers
from opd.records.types import WeightedTeacher
from pipelines.routes import engines_by_teacher, find_expert_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherGroup:
    """The teachers of one engine."""

    config: PipelineConfig
    """The pipeline as if all teachers had this engine, and all domains the objective of the group's."""
    scoring: Mapping[str, tuple[WeightedTeacher, ...]]
    """Domain -> those of its teachers that are in the group."""
    first_worker: int = 0
    """Number of scoring workers of the engines before."""
    other_processes: int = 0
    """Processes of the other groups' workers that compute on this machine's cores."""


def divide_by_engine(config: PipelineConfig, scoring: Mapping[str, tuple[WeightedTeacher, ...]]) -> list[TeacherGroup]:
    """Return the groups in the order of `PipelineConfig.engines`, without engines that score no domain.

    A merge whose teachers all have the engine of the section `teachers` is one group, with the very pipeline. `scoring` is the result of `pipelines.routes.scoring_routes`.
    """
    sections = config.engines
    if not scoring or (sections == [config.teachers] and not config.own_objectives):
        return [TeacherGroup(config=config, scoring=scoring)]
    by_domain = {domain: engines_by_teacher(config, assigned) for domain, assigned in scoring.items()}
    groups: list[TeacherGroup] = []
    processes = [_count_processes(config, section) for section in sections]
    first_worker = 0
    for section, own_processes in zip(sections, processes, strict=True):
        number, first_worker = first_worker, first_worker + section.scoring_workers
        part = {
            domain: own
            for domain, assigned in scoring.items()
            if (own := tuple(a for a in assigned if by_domain[domain][a.teacher.name] == section))
        }
        if part:
            view, others = _view_engine(config, section, next(iter(part))), sum(processes) - own_processes
            groups.append(TeacherGroup(config=view, scoring=part, first_worker=number, other_processes=others))
    return groups


def engine_cluster(config: PipelineConfig, section: Teachers) -> ClusterConfig:
    """Return the section `cluster` as it is for an engine: beside other engines, one without models of its own has no GPUs."""
    if len(config.engines) == 1 or (section.scoring_workers and not section.elsewhere):
        return config.cluster
    return config.cluster.model_copy(update={"teacher_gpus": 0.0})


def _view_engine(config: PipelineConfig, section: Teachers, domain: str) -> PipelineConfig:
    """Return the pipeline with this section `teachers`, the objective of `domain` and no engine of a single expert.

    Nothing in it says that an expert is the student itself, which would give it the ranks for an engine.
    """
    experts: Any = config.experts
    if isinstance(experts, RegisteredExperts):
        experts = experts.model_copy(update={"engines": {}})
    else:
        experts = {
            name: expert.model_copy(update={"engine": None, "ema": None, "model": find_expert_dir(config, expert)})
            for name, expert in experts.items()
        }
    cluster, objective = engine_cluster(config, section), config.objective_of(domain)
    return config.model_copy(
        update={"teachers": section, "objective": objective, "experts": experts, "keep": None, "cluster": cluster}
    )


def _count_processes(config: PipelineConfig, section: Teachers) -> int:
    """Return the processes with which an engine computes on this machine's cores."""
    if section.elsewhere or config.cluster.teacher_gpus:
        return 0
    size: int = getattr(section, "tensor_parallel_size", 1)
    return section.scoring_workers * size
