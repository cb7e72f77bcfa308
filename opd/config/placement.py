"""The section `cluster.placement`: on which nodes of a Ray cluster the workers of each role run, in Ray's terms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict
from opd.settings.wording import LABEL, SELECTED

KEY_BY_RESOURCE = {"CPU": "cpus", "GPU": "cluster.*_gpus"}
"""Resource that Ray has by itself -> the key of the pipeline that sets it. Ray refuses both in `resources`."""


class RolePlacement(Strict):
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """`pack` on few nodes, `spread` over many, as far as there is room; `strict_pack` on one node, `strict_spread` on
    one each, or not at all."""
    cpus: int | None = Field(None, ge=1)
    """CPUs that Ray reserves for each worker, and its threads. Default: 1 reserved, and its share of this machine's
    cores as threads."""
    label_selector: dict[Annotated[str, Field(pattern=LABEL)], Annotated[str, Field(pattern=SELECTED)]] = {}
    """Label of a node (`ray start --labels`) -> its value, `!value`, `in(a, b)` or `!in(a, b)`."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resource of a node (`ray start --resources`) -> how much each worker takes."""

    @field_validator("resources")
    @classmethod
    def _refuse_cpus_and_gpus(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, key in KEY_BY_RESOURCE.items():
            if name in resources:
                raise PydanticCustomError(
                    "resources", "custom resources: {key} is for {name}", {"key": key, "name": name}
                )
        return resources


class PlacementConfig(Strict):
    rollout: RolePlacement = RolePlacement()
    """Rollout workers."""
    teachers: RolePlacement = RolePlacement()
    """Scoring workers."""
    trainer: RolePlacement = RolePlacement()
    """Trainer ranks, and the critic's."""
