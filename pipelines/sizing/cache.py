"""The key-value cache of a rollout engine: its bytes, and the tokens that it has room for."""

from __future__ import annotations

from math import ceil

from opd.config import PipelineConfig
from opd.config.devices import rollout_devices
from opd.errors import ConfigError
from opd.settings.auto import OpenNumber
from opd.settings.strict import DTYPE_BYTES
from pipelines.sizing.memory import GIB, engine_activations, engine_weights, format_gib
from pipelines.sizing.models import MergeModels
from pipelines.sizing.shape import Attention


def refuse_small_cache(config: PipelineConfig, models: MergeModels) -> None:
    """Refuse a CPU engine's cache without room for the longest sequence, with which vLLM would not start. On GPUs `least_bytes` counts that
    sequence; one that is `auto` will have room for it.

    Raises: ConfigError.
    """
    needed, is_open = sequence_bytes(config, models), isinstance(config.rollout.kv_cache_gib, OpenNumber)
    if is_open or not has_cpu_cache(config) or needed <= config.rollout.kv_cache_gib << 30:
        return
    raise ConfigError.at(
        "rollout.kv_cache_gib",
        found=f"{config.rollout.kv_cache_gib}, and {format_gib(needed)} GiB of keys and values for rollout.max_model_len tokens",
        wanted="room for one sequence at least",
        fix=f"set rollout.kv_cache_gib to {ceil(needed / GIB)}, or lower rollout.max_model_len",
    )


def has_cpu_cache(config: PipelineConfig) -> bool:
    """Return True if an engine has a cache of fixed size in the machine's memory."""
    return not config.cluster.rollout_gpus and config.rollout.engine == "vllm"


def least_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that an engine needs on each of its GPUs to start: weights, activations, and a cache for the longest sequence."""
    return round(_held_bytes(config, models) + sequence_bytes(config, models))


def sequence_bytes(config: PipelineConfig, models: MergeModels) -> float:
    """Return the bytes of the longest sequence's keys and values on each device of an engine."""
    values = config.rollout.max_model_len * models.read_body(models.student).kv_values
    return values * value_bytes(config) / config.rollout.tensor_parallel_size


def cache_bytes(config: PipelineConfig, models: MergeModels, gpu_memory: int) -> float:
    """Return the bytes of the cache on each device of an engine: what its share of a GPU of this size leaves, or on a CPU
    `rollout.kv_cache_gib`."""
    if not gpu_memory:
        return config.rollout.kv_cache_gib << 30
    return max(0.0, config.rollout.gpu_memory_utilization * gpu_memory - _held_bytes(config, models))


def _held_bytes(config: PipelineConfig, models: MergeModels) -> float:
    """Return the bytes that an engine holds on each of its GPUs in addition to its cache."""
    return (engine_weights(config, models) + engine_activations(config, models)) / engine_devices(config)


def value_bytes(config: PipelineConfig) -> int:
    """Return the bytes of one number in the cache."""
    kind = config.rollout.kv_cache_dtype
    return 1 if kind.startswith("fp8") else DTYPE_BYTES[config.rollout.dtype if kind == "auto" else "bfloat16"]


def cache_copies(config: PipelineConfig, attention: Attention, gpus: int) -> float:
    """Return how many copies of a token's keys and values an engine holds. Machines, of `gpus` GPUs each, divide the sequences among them;
    the devices of a machine divide the heads, and hold copies if there are more devices than parts to divide."""
    return max(1.0, min(engine_devices(config), max(1, gpus)) / attention.kv_split)


def cache_tokens(config: PipelineConfig, attention: Attention, gpus: int, cache: float) -> float:
    """Return the number of tokens whose keys and values fit into an engine with `cache` bytes on each of its devices."""
    token_bytes = attention.kv_values * value_bytes(config)
    return cache * engine_devices(config) / (token_bytes * cache_copies(config, attention, gpus))


def engine_devices(config: PipelineConfig) -> int:
    """Return the number of devices among which one rollout engine is divided."""
    return max(1, rollout_devices(config.cluster, config.rollout).count)
