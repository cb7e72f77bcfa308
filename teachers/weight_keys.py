"""Keys by which teachers with equal weights are known as one. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import replace

from opd.records.types import Teacher


def weight_key(teacher: Teacher) -> str:
    """Return the key of a teacher's weights: experts with equal keys are one teacher."""
    return teacher.digest or f"{teacher.model_dir}:{teacher.adapter_dir}"


def base_key(teacher: Teacher) -> str:
    """Return the key of a teacher's model without its adapter: experts with equal keys share it."""
    return weight_key(
        replace(teacher, adapter_dir=None, digest=teacher.base_digest) if teacher.adapter_dir else teacher
    )
