"""The key-value cache of a rollout engine: its bytes, and the tokens that it has room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.config.devices import rollout_devices
from opd.settings.strict import DTYPE_BYTES
from pipelines.sizing.memory import engine_activations, engine_weights
from pipelines.sizing.models import MergeModels, read_kv_values
from pipelines.sizing.shape import Attention

AT_ONCE = 16
"""Sequences of full length for which a CPU engine's cache has room; shorter ones, which most are, take less."""


def cache_gib(student: Path, rollout: dict[str, Any]) -> int:
    """Return the GiB of a CPU engine's cache in which `AT_ONCE` of the longest sequences have room. Raises: as `read_kv_values`."""
    a_token = read_kv_values(student) * DTYPE_BYTES[rollout["dtype"]]
    return max(1, -(-AT_ONCE * rollout["max_model_len"] * a_token >> 30))


def cache_bytes(config: PipelineConfig, models: MergeModels, gpu_memory: int) -> float:
    """Return the bytes of the cache on each device of an engine: what its share of a GPU of this size leaves, or on a CPU
    `rollout.kv_cache_gib`."""
    if not gpu_memory:
        return config.rollout.kv_cache_gib << 30
    devices = engine_devices(config)
    held = engine_weights(config, models) / devices + engine_activations(config, models) / devices
    return max(0.0, config.rollout.gpu_memory_utilization * gpu_memory - held)


def cache_copies(config: PipelineConfig, attention: Attention, gpus: int) -> float:
    """Return how often an engine holds the keys and values of a token: machines of so many GPUs divide sequences, the devices of a
    machine heads."""
    return max(1.0, min(engine_devices(config), max(1, gpus)) / attention.kv_split)


def cache_tokens(config: PipelineConfig, attention: Attention, gpus: int, cache: float) -> float:
    """Return how many tokens' keys and values fit into `cache` bytes on each device of an engine."""
    a_token = attention.kv_values * DTYPE_BYTES[config.rollout.dtype]
    return cache * engine_devices(config) / (a_token * cache_copies(config, attention, gpus))


def engine_devices(config: PipelineConfig) -> float:
    """Return the devices that divide one rollout engine."""
    return max(1.0, rollout_devices(config.cluster, config.rollout))
