"""Probes of experts that a pipeline names by their paths: the registry took those of its own when they were added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experts.probe import take_probe
from opd.types import Teacher, WeightedTeacher
from pipelines.inputs.read import Inputs
from pipelines.inputs.routes import START


def take_missing_probes(inputs: Inputs) -> Inputs:
    """Return the inputs with a probe for every expert that has none, so that a worker which loads other weights is found out.

    Each such expert is loaded once, in this process. Raises: as `take_probe`.
    """
    probed: dict[str, Teacher] = {}
    for name, expert in inputs.scorers.items():
        record = None if expert.teacher.probe or name == START else take_probe(expert.info, expert.adapter)
        if record is not None:
            probed[name] = replace(expert.teacher, probe=record.probe)
    if not probed:
        return inputs
    scorers = {n: replace(e, teacher=probed.get(n, e.teacher)) for n, e in inputs.scorers.items()}
    return replace(
        inputs, scorers=scorers, routes=_routed(inputs.routes, probed), scoring=_routed(inputs.scoring, probed)
    )


def _routed(
    routes: Mapping[str, tuple[WeightedTeacher, ...]], probed: Mapping[str, Teacher]
) -> dict[str, tuple[WeightedTeacher, ...]]:
    return {
        domain: tuple(replace(one, teacher=probed.get(one.teacher.name, one.teacher)) for one in assigned)
        for domain, assigned in routes.items()
    }
