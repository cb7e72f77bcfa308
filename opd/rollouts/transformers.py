"""Rollouts by transformers: `rollout.engine: transformers`, for families that vLLM does not serve here."""

from __future__ import annotations

from typing import Any, ClassVar

from opd.rollouts.transformers_worker import TransformersWorker
from opd.rollouts.vllm import VLLMRolloutEngine


class TransformersRolloutEngine(VLLMRolloutEngine):
    """Implements `opd.interfaces.RolloutEngine` with other workers."""

    WORKER: ClassVar[Any] = TransformersWorker
