"""Measure probes of experts that a pipeline names by their paths. Registered experts were measured when they were added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experts.probe import ProbeRecord, measure_probe
from opd.files import atomic_write_text, raise_storage_errors
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.strict import DTYPE_BYTES
from opd.text import Tell
from pipelines.inputs.read import Inputs
from pipelines.routes import START, RoutedExpert
from pipelines.sizing.machine import free_bytes

RECORDS = TypeAdapter(dict[str, ProbeRecord])


def measure_missing_probes(inputs: Inputs, tell: Tell, file: Path | None = None) -> Inputs:
    """Return the inputs with a probe for every expert that has none. By it a worker notices if it loads other weights.

    Each such expert is loaded once, in this process. With `file`, probes are kept there by the digests of the models, and are
    not measured again. An expert that is larger than half of the free memory gets no probe, and `tell` gets a sentence about
    it. Raises: as `measure_probe`; StorageError.
    """
    records = _read_records(file)
    old_records = dict(records)
    probed: dict[str, Teacher] = {}
    for name, expert in inputs.scorers.items():
        if expert.teacher.probe or name == START:
            continue
        digest = expert.teacher.digest
        if digest not in records:
            if _bytes_loaded(expert) > free_bytes() // 2:
                tell(f"experts.{name} has no probe: loading it here would take more than half of the free memory")
                continue
            new_record = measure_probe(expert.info, expert.adapter)
            if new_record is None:
                continue
            records[digest] = new_record
        probed[name] = replace(expert.teacher, probe=records[digest].probe)
    if file is not None and records != old_records:
        with raise_storage_errors(file):
            atomic_write_text(file, json.dumps({digest: record.model_dump() for digest, record in records.items()}))
    if not probed:
        return inputs
    scorers = {n: replace(e, teacher=probed.get(n, e.teacher)) for n, e in inputs.scorers.items()}
    return replace(
        inputs,
        scorers=scorers,
        routes=_replace_teachers(inputs.routes, probed),
        scoring=_replace_teachers(inputs.scoring, probed),
    )


def _read_records(file: Path | None) -> dict[str, ProbeRecord]:
    """Return the probes of a file; none if it is missing or damaged, because they can be measured again."""
    if file is None or not file.is_file():
        return {}
    try:
        return RECORDS.validate_json(file.read_bytes())
    except ValidationError:
        return {}


def _bytes_loaded(expert: RoutedExpert) -> int:
    """Return the bytes of an expert's weights in the type in which its probe is measured."""
    return expert.info.parameters * DTYPE_BYTES["bfloat16" if expert.info.dtype == "bfloat16" else "float32"]


def _replace_teachers(
    routes: Mapping[str, tuple[WeightedTeacher, ...]], probed: Mapping[str, Teacher]
) -> dict[str, tuple[WeightedTeacher, ...]]:
    return {
        domain: tuple(replace(a, teacher=probed.get(a.teacher.name, a.teacher)) for a in assigned)
        for domain, assigned in routes.items()
    }
