"""Find what would make a merge fit that does not fit yet: keys of its pipeline, or a shipped cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ByteSize, TypeAdapter

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
            needed = _choose_needed(config, spec, tried)
            return "it would fit with " + " ".join(f"--set {change}" for change in needed)
    for name in sorted(shipped_specs(), key=lambda name: load_spec(name).devices):
        if _fits_with_changes(config, load_spec(name), ()):
            return f"no key that was tried makes it fit; it would fit on {name} (--cluster {name})"
    return "no key that was tried makes it fit, nor does a shipped cluster: a smaller student, or a cluster spec of more GPUs"


def _list_changes(config: PipelineConfig, *, gpus: bool) -> Iterator[str]:
    """Yield the changes by which `opd init` would make the merge smaller, as `SECTION.KEY=VALUE` and in its order, without those
    that the pipeline has already."""
    for _, change in shrinking_steps(gpus=gpus):
        for section, keys in change.items():
            for key, value in keys.items():
                # The rate that goes with adapters frees no memory, so it would make nothing fit.
                if key != "lr" and needs_less_memory(value, getattr(getattr(config, section), key, None)):
                    yield f"{section}.{key}={render_on_one_line(value)}"


def needs_less_memory(value: Any, current: Any) -> bool:
    """Return True if a key needs less memory with one of the values of `shrinking_steps` than with its current one.

    `current` is None if the key is not set, or if this kind of engine has no such key: the change is then refused or ignored
    as the whole pipeline is validated."""
    if value == "bfloat16":
        return bool(current == "float32")
    if isinstance(value, str):  # a size, such as `teachers.memory`
        return isinstance(current, int) and current > TypeAdapter(ByteSize).validate_python(value)
    if current is None or isinstance(value, dict):  # adapters, which a pipeline has or has not
        return current is None
    # Gradient checkpointing needs less if it is on, a number if it is lower.
    return bool(value > current if isinstance(value, bool) else value < current)


def _fits_with_changes(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> bool:
    """Return True if the pipeline with these changes is valid and fits the cluster."""
    try:
        data = apply_overrides(config.model_dump(mode="json", exclude_unset=True), list(changes))
        return fits_cluster(validate_section(PipelineConfig, data, "plan"), spec)
    except OpdError:
        return False  # a change that does not go with the other keys of this pipeline


def _choose_needed(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> list[str]:
    """Return the changes that are needed: without any one of them the merge no longer fits."""
    needed = list(changes)
    for change in reversed(changes):
        fewer = [other for other in needed if other != change]
        if _fits_with_changes(config, spec, fewer):
            needed = fewer
    return needed
