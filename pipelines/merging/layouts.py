"""Record how sequences share a forward pass in a run; see `opd.models.layouts`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from opd.files import atomic_write_text
from opd.loop import Components
from opd.models.packing import SHARED
from opd.records.types import LayoutProof
from opd.run.paths import RunPaths


def record_layouts(parts: Components, paths: RunPaths, say: Callable[[str], None]) -> None:
    """Write `layouts.json`, and say which models cannot share a prompt between responses, or cannot be packed by position ids alone."""
    student, teachers = parts.trainer.layout, parts.teachers.layouts
    layouts = {
        "student": _layout_record(student),
        "teachers": {name: _layout_record(proof) for name, proof in teachers.items()},
    }
    atomic_write_text(paths.layouts, json.dumps(layouts, indent=2))
    for line in (*_layout_lines("the student", student), *(_teacher_lines(teachers))):
        say(line)


def _teacher_lines(teachers: dict[str, LayoutProof]) -> Iterator[str]:
    """Yield the sentences about teachers; those with one layout come together, and the first one's figures stand for all."""
    by_layout: dict[str, list[str]] = {}
    for name, proof in teachers.items():
        by_layout.setdefault(proof.layout, []).append(name)
    for names in by_layout.values():
        yield from _layout_lines(
            f"{'teacher' if len(names) == 1 else 'teachers'} {', '.join(names)}", teachers[names[0]]
        )


def _layout_record(proof: LayoutProof) -> dict[str, Any]:
    # JSON has no infinity and no NaN.
    tried = {layout: error if math.isfinite(error) else None for layout, error in proof.tried.items()}
    return {"layout": proof.layout, "tried": tried}


def _layout_lines(owner: str, proof: LayoutProof) -> Iterator[str]:
    """Yield sentences about layouts that a model, or several, cannot use, and why."""
    refused = [
        layout for layout, error in proof.tried.items() if layout not in (proof.layout, SHARED) and math.isfinite(error)
    ]
    if SHARED in proof.tried and proof.layout != SHARED and proof.proven:
        error = proof.tried[SHARED]
        reason = (
            f"with a shared prompt states differ by {error:.0f} times what rounding explains"
            if math.isfinite(error)
            else "its layers do not go by a mask alone (a window, a chunk, a recurrent state, or an attention without masks)"
        )
        yield f"{owner}: what responses share is computed again for each: {reason}"
    if not proof.proven:
        yield f"{owner}: hidden states are not finite, so nothing is known of packing: the layout is {proof.layout}"
    elif refused:
        yield (
            f"{owner}: sequences of one row would see each other ({refused[0]}: {proof.tried[refused[0]]:.0f} times what "
            f"rounding explains), so the layout is {proof.layout}, which is slower"
        )
