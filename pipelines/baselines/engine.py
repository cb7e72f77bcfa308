"""A rollout engine for a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opd.cluster import ray_session
from opd.config import PipelineConfig
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines.build import start_rollouts
from pipelines.inputs.read import Inputs
from pipelines.placement import place_rollouts


@contextmanager
def rollout_engine(config: PipelineConfig, inputs: Inputs) -> Iterator[VLLMRolloutEngine]:
    """An engine that holds the student; stopped on exit. Raises: RunError if it does not come up."""
    with ray_session(config.cluster, config.rollout.workers):
        place_rollouts(config)
        engine = start_rollouts(config, inputs)
        engine.wait_ready()
        yield engine
