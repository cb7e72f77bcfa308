"""An engine that can be asked which of vLLM's model runners it has."""

from __future__ import annotations

from opd.rollouts.worker import VLLMWorker


class RunnerWorker(VLLMWorker):
    """An engine that says which of vLLM's model runners it has."""

    def model_runner(self) -> str:
        """Return V1 or V2; vLLM before 0.27 has no property to ask."""
        return "V2" if getattr(self._llm.llm_engine.vllm_config, "use_v2_model_runner", False) else "V1"
