"""`opd check --cluster`: all that `opd merge` refuses before it starts a worker, for machines that a spec describes. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

from opd.cluster import LOCAL
from opd.config import PipelineConfig, list_distinct_rounds
from pipelines.inputs.early_checks import refuse_wrong_names, refuse_wrong_prompts
from pipelines.inputs.read import read_inputs, refuse_what_is_not_here
from pipelines.plan.models import has_all_weights, read_models
from pipelines.plan.nodes import refuse_on_cluster
from pipelines.plan.spec import ClusterSpec
from pipelines.sizing.auto import choose_numbers, describe_numbers
from pipelines.sizing.cache import refuse_small_cache
from pipelines.sizing.gpu_memory import PhaseName, gpu_roles, memory_phases, place_roles, refuse_crowded_gpus
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.memory import HostMemoryNeed, estimate_memory, format_gib, refuse_no_room, refuse_too_large
from pipelines.sizing.models import MergeModels
from pipelines.sizing.target_log import describe_log

UNREAD = (
    "weights and tokenizers are not all here: models are checked by their configurations, prompts by their first rows"
)
PHASES: dict[PhaseName, str] = {
    "writing": "engines write",
    "computing": "teachers score, ranks train",
    "pushing": "new weights are pushed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """The sums of a merge that fits on the machines of a spec."""

    machine: MachineFacts
    """All machines that the merge may use, counted as one."""
    memory: tuple[HostMemoryNeed, ...]
    gpus: tuple[tuple[str, str, str, str], ...]
    """Phase, its parts, GiB needed and GiB there, for each phase of each GPU; GPUs with equal sums come once."""
    log: str
    """Disk that the target log takes, in words."""
    numbers: str
    """The numbers that the pipeline leaves open, as a merge on these machines chooses them, in words."""
    notes: tuple[str, ...]


def check_on_cluster(config: PipelineConfig, spec: ClusterSpec) -> list[ClusterReport]:
    """Check every round of a pipeline against the machines of a spec. The spec's own placement is for plans alone and is not read.

    Raises: OpdError for the first thing that a merge would refuse there.
    """
    return [_check_round(round_config, spec) for round_config in list_distinct_rounds(config)]


def _check_round(written: PipelineConfig, spec: ClusterSpec) -> ClusterReport:
    models, notes = _read_models(written)
    is_local = written.cluster.address == LOCAL
    if is_local and spec.machines > 1:
        notes += (f"cluster.address is local: checked on one of the {spec.machines} machines",)
        spec = spec.model_copy(update={"machines": 1})
    machine = spec.hardware
    # A merge does not know the memory of a Ray cluster's machines when it chooses, so it makes nothing smaller for them.
    config = choose_numbers(written, models, machine if is_local else None)
    refuse_too_large(config, models, machine)
    refuse_crowded_gpus(config, models, machine)
    refuse_on_cluster(config, spec)
    return ClusterReport(
        machine=machine,
        memory=tuple(estimate_memory(config, models)),
        gpus=_gpu_rows(config, models, machine),
        log=describe_log(config, models),
        numbers=describe_numbers(written, config),
        notes=notes,
    )


def _read_models(config: PipelineConfig) -> tuple[MergeModels, tuple[str, ...]]:
    """Return the models of a merge and notes on them: read as a merge reads them, or where weights are missing as a plan does.

    Raises: OpdError for inputs that a merge refuses.
    """
    if has_all_weights(config):
        inputs = read_inputs(config)
        return inputs, inputs.warnings
    refuse_what_is_not_here(config)
    refuse_wrong_names(config)
    refuse_wrong_prompts(config)
    models = read_models(config)
    refuse_no_room(config, models.merge.scorers)
    refuse_small_cache(config, models.merge)
    return models.merge, (UNREAD, *models.notes)


def _gpu_rows(
    config: PipelineConfig, models: MergeModels, machine: MachineFacts
) -> tuple[tuple[str, str, str, str], ...]:
    size = min(machine.gpus, default=0)
    phases = [phase for roles in place_roles(gpu_roles(config, models)) for phase in memory_phases(roles)]
    return tuple(
        (PHASES[phase.name], phase.describe(size), format_gib(phase.total(size)), format_gib(size))
        for phase in dict.fromkeys(phases)
    )
