"""Choose the numbers that a pipeline leaves open (`auto`), from shapes, types and memory. A run does so once, when it begins.

    key                          at most                                                at least
    objective.chunk              on a GPU what its kernels need to be busy              128, which suits a CPU
    trainer.head_memory          the heads of all teachers                              the largest of them
    trainer.micro_batch_tokens   4,096, on a GPU of known memory 16,384,                the longest row
                                 or the longest row
    rollout.kv_cache_gib         the longest sequences of a step, all at a time,        one of them
                                 or a quarter of the machine
    trainer.bucket               1,000,000,000                                          10,000,000
    teachers.queue               two rounds of micro-batches, or 256 MiB

In this order each number is the largest, halved as often as need be, with which the merge fits into memory, while those that are chosen
after it are the smallest. The queue adds no memory: a step's scored rows are counted whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.settings.auto import OpenNumber
from pipelines.sizing.cache import has_cpu_cache, value_bytes
from pipelines.sizing.gpu_memory import fits_machine
from pipelines.sizing.machine import MachineFacts, read_machine
from pipelines.sizing.memory import GIB, MIB, head_sizes, row_bytes, step_rows_bytes
from pipelines.sizing.micro_batch import token_logits_bytes, widest_unit
from pipelines.sizing.models import MergeModels, read_body

CPU_CHUNK, LARGEST_CHUNK = 128, 4096
BUSY_CHUNK = {"float32": 512, "bfloat16": 1024}
"""Tokens of a chunk with which the loss keeps a GPU busy: docs/gpu_check.md#the-loss-on-one-h200."""
LOGITS_SHARE = 16
"""A chunk grows further while its logits take no more than this part of a GPU."""
CPU_TOKENS, GPU_TOKENS = 4096, 16384
CACHE_SHARE = 4
"""The cache of a CPU engine takes no more than this part of the machine, because most sequences do not grow to their full length."""
LEAST_TOKENS, LEAST_QUEUE = 16, 256 * MIB
LARGEST_BUCKET, SMALLEST_BUCKET = 1_000_000_000, 10_000_000
CHUNK, HEADS, TOKENS, CACHE, BUCKET, QUEUE = ORDER = (
    "objective.chunk",
    "trainer.head_memory",
    "trainer.micro_batch_tokens",
    "rollout.kv_cache_gib",
    "trainer.bucket",
    "teachers.queue",
)
"""The keys, in the order in which they are chosen."""


def choose_numbers(config: PipelineConfig, models: MergeModels, machine: MachineFacts | None) -> PipelineConfig:
    """Return the pipeline with every open number chosen. If nothing fits, they are the smallest.

    `machine`: None if the merge runs on other machines, whose memory is not known: no number is then made smaller or larger for it.
    Raises: ModelError for weights that cannot be read.
    """
    open_keys = [key for key in ORDER if isinstance(_get_number(config, key), OpenNumber)]
    if not open_keys:
        return config
    # Headers are read once, not for each trial.
    infos = {info.path: info for info in (models.student, *(expert.info for expert in models.scorers.values()))}
    models = replace(models, bodies={path: models.read_body(info) for path, info in infos.items()})
    ranges = {key: _find_range(key, config, models, machine) for key in open_keys}
    for key, (_, least) in ranges.items():
        config = _set_number(config, key, least)
    for key, (most, least) in ranges.items():
        trials = (_set_number(config, key, number) for number in _halve(most, least))
        config = next((t for t in trials if machine is None or fits_machine(t, models, machine)), config)
    if QUEUE in open_keys:
        config = _set_number(config, QUEUE, _queue_bytes(config, models))
    return config


def local_machine(config: PipelineConfig) -> MachineFacts | None:
    """Return this machine if the merge runs on it; None if it runs on machines or GPUs whose memory this process does not see."""
    machine = read_machine() if config.cluster.address == LOCAL else None
    return None if machine and config.cluster.trainer_gpus and not machine.gpus else machine


def choose_cache(config: PipelineConfig, model_dir: Path) -> PipelineConfig:
    """Return the pipeline with `rollout.kv_cache_gib` chosen for engines that write with this model, and nothing else."""
    if not isinstance(config.rollout.kv_cache_gib, OpenNumber):
        return config
    most, _ = _cache_range(config, read_body(model_dir).kv_values, local_machine(config))
    return _set_number(config, CACHE, most)


def keep_numbers(config: PipelineConfig, begun: PipelineConfig) -> PipelineConfig:
    """Return the pipeline of a resume: what it leaves open is as the run's own pipeline `begun` has it."""
    for key in ORDER:
        if isinstance(_get_number(config, key), OpenNumber):
            config = _set_number(config, key, _get_number(begun, key))
    return config


def describe_numbers(config: PipelineConfig, chosen: PipelineConfig) -> str:
    """Return the numbers that `config` leaves open, as they were `chosen`, in words; empty if there are none."""
    keys = [key for key in ORDER if isinstance(_get_number(config, key), OpenNumber)]
    numbers = {key: _get_number(chosen, key) for key in keys if key != CACHE or has_cpu_cache(config)}
    return ", ".join(
        f"{key} {ceil(number / MIB):,} MiB" if key in (HEADS, QUEUE) else f"{key} {number:,}"
        for key, number in numbers.items()
    )


def _get_number(config: PipelineConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _set_number(config: PipelineConfig, key: str, number: int) -> PipelineConfig:
    section, name = key.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: number})})


def _halve(most: int, least: int) -> Iterator[int]:
    """Yield `most`, half of it, a quarter ..., and in the end `least`."""
    while most > least:
        yield most
        most //= 2
    yield least


def _find_range(key: str, config: PipelineConfig, models: MergeModels, machine: MachineFacts | None) -> tuple[int, int]:
    """Return the largest and the smallest number that a key may get."""
    on_gpu = config.cluster.trainer_gpus > 0
    if key == CACHE:
        return _cache_range(config, models.read_body(models.student).kv_values, machine)
    if key == CHUNK:
        gpu_memory = min(machine.gpus, default=0) if machine else 0
        return (_gpu_chunk(config, models, gpu_memory) if on_gpu else CPU_CHUNK), CPU_CHUNK
    if key == HEADS:
        sizes = head_sizes(config, models) or [GIB]
        return sum(sizes), max(sizes)
    if key == TOKENS:
        longest = max(LEAST_TOKENS, widest_unit(config))
        return max(longest, GPU_TOKENS if on_gpu and machine else CPU_TOKENS), longest
    if key == BUCKET:
        return LARGEST_BUCKET, SMALLEST_BUCKET
    return LEAST_QUEUE, LEAST_QUEUE  # chosen in the end, when the size of a micro-batch is known


def _cache_range(config: PipelineConfig, kv_values: int, machine: MachineFacts | None) -> tuple[int, int]:
    """Return the GiB of a CPU engine's cache for the longest sequences of a step, and for one of them; 1 on GPUs, which do not read it."""
    if not has_cpu_cache(config):
        return 1, 1
    rollout = config.rollout
    at_once = min(rollout.max_num_seqs, ceil(config.trainer.samples_per_step / rollout.workers))
    sequence = rollout.max_model_len * kv_values * value_bytes(config) / rollout.tensor_parallel_size
    wanted, least = (max(1, ceil(count * sequence / GIB)) for count in (at_once, 1))
    return (wanted if machine is None else max(least, min(wanted, machine.memory // CACHE_SHARE >> 30))), least


def _gpu_chunk(config: PipelineConfig, models: MergeModels, gpu_memory: int) -> int:
    chunk = BUSY_CHUNK[config.trainer.dtype]
    logits = token_logits_bytes(config, models)
    while 2 * chunk <= LARGEST_CHUNK and 2 * chunk * logits * LOGITS_SHARE <= gpu_memory:
        chunk *= 2
    return chunk


def _queue_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of the scored rows of two rounds of micro-batches, in which every token is taken to be a response's."""
    tokens = 2 * config.trainer.ranks * (config.trainer.micro_batch_tokens + widest_unit(config))
    return max(LEAST_QUEUE, min(tokens * row_bytes(config, models), step_rows_bytes(config, models)))
