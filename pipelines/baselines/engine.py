"""One rollout engine, for as long as a baseline needs one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opd.cluster import ray_session
from opd.config import PipelineConfig
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines.inputs.read import Inputs


@contextmanager
def rollout_engine(config: PipelineConfig, inputs: Inputs) -> Iterator[VLLMRolloutEngine]:
    """An engine that holds the student; stopped on exit. Raises: RunError if it does not come up."""
    with ray_session(config.cluster, config.rollout.workers):
        student = inputs.student
        engine = VLLMRolloutEngine(
            config, config.student.model, student.vocab_size, student.eos_token_ids, inputs.tokenizer
        )
        engine.wait_ready()
        yield engine
