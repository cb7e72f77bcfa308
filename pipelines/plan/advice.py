"""Advise what would make a merge fit that does not: keys of its pipeline, or a shipped cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opd.config import PipelineConfig
from opd.errors import OpdError
from opd.settings.yaml_files import apply_overrides, validate_section
from pipelines.plan.plan import fits_cluster
from pipelines.plan.spec import ClusterSpec, load_spec, shipped_specs
from pipelines.propose.text import render_on_one_line
from pipelines.sizing.shrink import shrinking_steps


def advise_changes(config: PipelineConfig, spec: ClusterSpec) -> str:
    """Return a sentence that says what would make a merge fit: keys of its pipeline, else a larger cluster."""
    changes = list(_list_changes(config, gpus=bool(spec.machine.gpus)))
    for number in range(1, len(changes) + 1):
        tried = changes[:number]
        if _fits_with_changes(config, spec, tried):
            needed = _drop_idle(config, spec, tried)
            return "it would fit with " + " ".join(f"--set {change}" for change in needed)
    for name in sorted(shipped_specs(), key=lambda name: load_spec(name).devices):
        if _fits_with_changes(config, load_spec(name), ()):
            return f"no key that was tried makes it fit; it would fit on {name} (--cluster {name})"
    return "no key that was tried makes it fit, nor does a shipped cluster: a smaller student, or a cluster spec of more GPUs"


def _list_changes(config: PipelineConfig, *, gpus: bool) -> Iterator[str]:
    """Yield the keys by which `opd init` would make the merge smaller, one after the other, as far as the pipeline has not
    done it."""
    for _, change in shrinking_steps(gpus=gpus):
        for section, keys in change.items():
            for key, value in keys.items():
                if key != "lr" and _is_smaller(value, getattr(getattr(config, section), key, None)):
                    yield f"{section}.{key}={render_on_one_line(value)}"


def _is_smaller(value: Any, now: Any) -> bool:
    """Return True if a key with this value needs less memory than with the one that it has now."""
    if isinstance(value, str):  # a type, or a size such as 1GiB
        return now == "float32" if value == "bfloat16" else isinstance(now, int) and now > 1 << 30
    return now is None or (value > now if isinstance(value, bool) else not isinstance(value, dict) and value < now)


def _fits_with_changes(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> bool:
    try:
        data = apply_overrides(config.model_dump(mode="json", exclude_unset=True), list(changes))
        return fits_cluster(validate_section(PipelineConfig, data, "plan"), spec)
    except OpdError:
        return False  # a change that does not go with the other keys of this pipeline


def _drop_idle(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> list[str]:
    """Return the changes without those that it fits without."""
    needed = list(changes)
    for change in reversed(changes):
        fewer = [needed_change for needed_change in needed if needed_change != change]
        if _fits_with_changes(config, spec, fewer):
            needed = fewer
    return needed
