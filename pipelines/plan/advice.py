"""What would make a merge fit that does not: keys of its pipeline, or a shipped cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opd.config import PipelineConfig
from opd.errors import OpdError
from opd.settings import apply_overrides, validate
from pipelines.plan.plan import fits
from pipelines.plan.spec import ClusterSpec, load_spec, shipped_specs

SMALL_CHUNK = 128
SMALL_BUCKET = 50_000_000
"""Numbers: gathering a layer of most models at a time."""


def advise(config: PipelineConfig, spec: ClusterSpec) -> str:
    """Return a sentence that says what would make a merge fit: changes with the same result first, then those that change it, then a
    larger cluster."""
    changes = list(_changes(config))
    for number in range(1, len(changes) + 1):
        tried = changes[:number]
        if _fits_with(config, spec, tried):
            needed = _without_idle(config, spec, tried)
            return "it would fit with " + " ".join(f"--set {change}" for change in needed)
    for name in sorted(shipped_specs(), key=lambda name: load_spec(name).devices):
        if _fits_with(config, load_spec(name), ()):
            return f"no key that was tried makes it fit; it would fit on {name} (--cluster {name})"
    return "no key that was tried makes it fit, nor does a shipped cluster: a smaller student, or a cluster spec of more GPUs"


def _changes(config: PipelineConfig) -> Iterator[str]:
    """Changes to try, each on top of those before it: what costs least comes first."""
    trainer, bf16 = config.trainer, "bfloat16"
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing=true"
    if "chunk" in type(config.objective).model_fields and getattr(config.objective, "chunk", 0) > SMALL_CHUNK:
        yield f"objective.chunk={SMALL_CHUNK}"
    shortest = max(16, config.rollout.max_model_len)
    if trainer.micro_batch_tokens > shortest:
        yield f"trainer.micro_batch_tokens={shortest}"
    if trainer.bucket is None or trainer.bucket > SMALL_BUCKET:
        yield f"trainer.bucket={SMALL_BUCKET}"
    if config.cluster.rollout_gpus and not config.rollout.sleep:
        yield "rollout.sleep=true"
    for section, dtype in (("rollout", config.rollout.dtype), ("teachers", config.teachers.dtype)):
        if dtype == "float32":
            yield f"{section}.dtype={bf16}"
    if trainer.dtype == "float32":
        yield f"trainer.dtype={bf16}"
    if trainer.grad_accum_dtype == "float32":
        yield f"trainer.grad_accum_dtype={bf16}"
    if config.student.lora is None:
        yield "student.lora={r: 16}"


def _fits_with(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> bool:
    try:
        data = apply_overrides(config.model_dump(mode="json", exclude_unset=True), list(changes))
        return fits(validate(PipelineConfig, data, "plan"), spec)
    except OpdError:
        return False  # a change that does not go with the other keys of this pipeline


def _without_idle(config: PipelineConfig, spec: ClusterSpec, changes: Sequence[str]) -> list[str]:
    """The changes without those that it fits without."""
    needed = list(changes)
    for change in reversed(changes):
        fewer = [one for one in needed if one != change]
        if _fits_with(config, spec, fewer):
            needed = fewer
    return needed
