"""Probes of experts that a pipeline names by their paths: the registry took those of its own when they were added."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experts.probe import ProbeRecord, take_probe
from opd.files import atomic_write_text, raise_storage_errors
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.read import Inputs
from pipelines.routes import START, Expert
from pipelines.sizing.machine import free_bytes

Tell = Callable[[str], None]
RECORDS = TypeAdapter(dict[str, ProbeRecord])


def take_missing_probes(inputs: Inputs, tell: Tell, known: Path | None = None) -> Inputs:
    """Return the inputs with a probe for every expert that has none, so that a worker which loads other weights is found out.

    Each such expert is loaded once, in this process; where `known` is a file, what was taken is kept there, by the digests of the models,
    and not taken again. An expert that is larger than half of the free memory goes without, and that is said. Raises: as `take_probe`;
    StorageError.
    """
    records = _read_records(known)
    before = dict(records)
    probed: dict[str, Teacher] = {}
    for name, expert in inputs.scorers.items():
        if expert.teacher.probe or name == START:
            continue
        digest = expert.teacher.digest
        if digest not in records:
            if _bytes_loaded(expert) > free_bytes() // 2:
                tell(f"experts.{name} has no probe: loading it here would take more than half of the free memory")
                continue
            record = take_probe(expert.info, expert.adapter)
            if record is None:
                continue
            records[digest] = record
        probed[name] = replace(expert.teacher, probe=records[digest].probe)
    if known is not None and records != before:
        with raise_storage_errors(known):
            atomic_write_text(known, json.dumps({digest: one.model_dump() for digest, one in records.items()}))
    if not probed:
        return inputs
    scorers = {n: replace(e, teacher=probed.get(n, e.teacher)) for n, e in inputs.scorers.items()}
    return replace(
        inputs,
        scorers=scorers,
        routes=_replace_teachers(inputs.routes, probed),
        scoring=_replace_teachers(inputs.scoring, probed),
    )


def _read_records(known: Path | None) -> dict[str, ProbeRecord]:
    """Return the probes of a file; none where it is missing or damaged, because they can be taken again."""
    if known is None or not known.is_file():
        return {}
    try:
        return RECORDS.validate_json(known.read_bytes())
    except ValidationError:
        return {}


def _bytes_loaded(expert: Expert) -> int:
    """Return the bytes of an expert's weights in the type that its probe is taken in."""
    return expert.info.parameters * DTYPE_BYTES["bfloat16" if expert.info.dtype == "bfloat16" else "float32"]


def _replace_teachers(
    routes: Mapping[str, tuple[WeightedTeacher, ...]], probed: Mapping[str, Teacher]
) -> dict[str, tuple[WeightedTeacher, ...]]:
    return {
        domain: tuple(replace(one, teacher=probed.get(one.teacher.name, one.teacher)) for one in assigned)
        for domain, assigned in routes.items()
    }
