"""`rollout.engine: transformers`: refuse what it cannot do."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.errors import ConfigError

TRANSFORMERS_ENGINE = "transformers"
_VLLM_ONLY = ("tensor_parallel_size", "sleep", "kv_cache_dtype", "num_speculative_tokens", "engine_args")
"""Keys of `rollout` that only vLLM obeys."""


def refuse_beyond_transformers(config: PipelineConfig) -> None:
    """Refuse a pipeline that asks more of the rollout engine than transformers can do. Raises: ConfigError."""
    for key in _VLLM_ONLY:
        value = getattr(config.rollout, key)
        if value != type(config.rollout).model_fields[key].get_default():
            raise ConfigError.at(
                f"rollout.{key}",
                found=f"{value} with rollout.engine transformers",
                wanted="nothing: only vLLM obeys it",
                fix="remove it, or set rollout.engine to vllm",
            )
    if config.push_kind == "direct":
        raise ConfigError.at(
            "sync.kind",
            found="direct with rollout.engine transformers",
            wanted="shared_memory or network",
            fix="set sync.kind to shared_memory, or to network with engines on other machines",
        )
    for name, domain in config.domains.items():
        if domain.has_episodes:
            raise ConfigError.at(
                f"domains.{name}.environment",
                found="episodes with rollout.engine transformers",
                wanted="single responses: only vLLM plays episodes",
                fix="set rollout.engine to vllm, or leave the domain out",
            )
