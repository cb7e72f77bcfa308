"""The pipeline of an engine that may sleep, beside others on its GPU."""

from __future__ import annotations

from typing import Any

from opd.config import PipelineConfig


def sleeping_pipeline(*, sleep: bool, **gpus: float) -> PipelineConfig:
    data: dict[str, Any] = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {}},
        "rollout": {"sleep": sleep},
        "trainer": {"steps": 4, "samples_per_step": 2, "ranks": 1},
        "cluster": {"rollout_gpus": 0.4, **gpus},
    }
    return PipelineConfig.model_validate(data)
