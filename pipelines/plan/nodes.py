"""The machines of a cluster spec as nodes of a Ray cluster, on which a pipeline's workers are to be placed."""

from __future__ import annotations

from math import inf

from opd.cluster import Node
from opd.cluster.placement import NODE
from opd.config import PipelineConfig
from opd.config.placement import PlacementConfig
from pipelines.placement import refuse_on_nodes
from pipelines.plan.spec import ClusterSpec


def refuse_on_cluster(config: PipelineConfig, spec: ClusterSpec) -> None:
    """Refuse a pipeline whose workers the machines of the spec can never hold. These are taken to have whatever labels and resources
    `cluster.placement` asks for. Raises: ConfigError."""
    machine, placement = spec.machine, config.cluster.placement
    # On one machine a local Ray counts a CPU for each worker, whatever cores there are.
    has = {"CPU": machine.cores if spec.machines > 1 else inf, "GPU": machine.gpus}
    nodes = [
        Node(id=str(number), address=f"machine {number}", is_local=number == 0, has=has, labels={NODE: str(number)})
        for number in range(spec.machines)
    ]
    anywhere = {role: section.model_copy(update={"label_selector": {}, "resources": {}}) for role, section in placement}
    cluster = config.cluster.model_copy(update={"placement": PlacementConfig(**anywhere)})
    refuse_on_nodes(config.model_copy(update={"cluster": cluster}), nodes)
