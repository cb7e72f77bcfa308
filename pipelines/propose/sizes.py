"""Choose lengths, steps and sizes that the prompts ask for and the machine can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experts.model_dir import ModelInfo
from opd.config import PipelineConfig
from opd.config.objectives import DEFAULT_KIND
from opd.records.types import WeightedTeacher
from pipelines.inputs.lora import size_of_lora
from pipelines.propose.domains import DomainFacts
from pipelines.propose.models import ExpertFacts
from pipelines.sizing.gpu_memory import fits_machine
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.models import MergeModels, unhashed_expert
from pipelines.sizing.shrink import Data, apply_change

TINY = 20_000_000
"""Parameters up to which float32 costs nothing, and a merge may have many steps and samples."""
RATES = ((5e6, 2e-3), (5e7, 1e-3), (5e8, 2e-4), (3e9, 2e-5))
"""Parameters up to which a peak learning rate is a fair start; what is larger gets the last resort."""
LAST_RATE = 5e-6
ROOM = {False: 4096, True: 16384}
"""Tokens of context that a proposal has at most, without and with a GPU: longer prompts are left out."""
TALK = 256
"""Tokens of a response of which nothing is known but that it is a chat's."""


def choose_lengths(domains: Mapping[str, DomainFacts], context: int | None, *, gpu: bool) -> Data:
    """`max_new_tokens` and `max_model_len`, from the prompts' and answers' tokens."""
    room = min(ROOM[gpu], context or ROOM[gpu])
    new = min(_round_up(max(_response_tokens(facts) for facts in domains.values()), 8), max(1, room // 2))
    longest = max(int(facts.table.lengths.max()) for facts in domains.values())
    return {"max_new_tokens": new, "max_model_len": max(8, min(room, _round_up(longest + new, 16)))}


def longest_prompt(rollout: Data) -> int:
    """Tokens of a prompt that leave room for a whole response."""
    return int(rollout["max_model_len"] - rollout["max_new_tokens"])


def _response_tokens(facts: DomainFacts) -> int:
    """Tokens that a response may need."""
    if facts.completion_tokens:
        return -(-5 * facts.completion_tokens // 4)
    if facts.sources.training.chat:
        return max(TALK, 2 * facts.answer_tokens)
    return max(32, 4 * facts.answer_tokens) if facts.answer_tokens else 128


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def choose_sizes(parameters: int, domains: int, machine: MachineFacts) -> Data:
    """The sections about sizes as they are where memory is no concern."""
    gpu, tiny = bool(machine.gpus), parameters <= TINY
    samples_per_domain = 32 if gpu or tiny else 8
    samples = max(domains, min(256, samples_per_domain * domains))
    steps = 300 if gpu or tiny else 200
    dtype = "bfloat16" if gpu or (machine.bf16 and not tiny) else "float32"
    workers = 1 if machine.cores < 16 else 2
    data: Data = {
        "rollout": {"dtype": dtype, "max_num_seqs": 256 if gpu else max(16, min(256, _round_up(samples, 16)))},
        "teachers": {"dtype": dtype, "workers": min(workers, domains)},
        "objective": {"kind": DEFAULT_KIND, "chunk": 1024 if gpu else 128},
        "trainer": {
            "dtype": dtype,
            "ranks": min(2, machine.cores),
            "steps": steps,
            "samples_per_step": samples,
            "micro_batch_tokens": 8192 if gpu else 4096,
            "lr": next((rate for limit, rate in RATES if parameters <= limit), LAST_RATE),
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "min_lr_ratio": 0.05,
        },
        "checkpoint": {"every": 25, "keep": 2},
        "evaluate": {"every": steps // 4, "samples": 100},
    }
    return apply_change(data, _divide_gpus(len(machine.gpus), domains)) if gpu else data


def _divide_gpus(num: int, domains: int) -> Data:
    """Which role gets which GPU. Every rollout engine and scoring worker gets one, and the trainer those that are left. To divide a
    model that is larger than a GPU is for a person to decide: `rollout.tensor_parallel_size`, `teachers.device_map`."""
    if num == 1:
        return {
            "rollout": {"gpu_memory_utilization": 0.4, "sleep": True},
            "teachers": {"workers": 1},
            "trainer": {"ranks": 1, "gradient_checkpointing": True},
            "cluster": {"rollout_gpus": 0.4, "teacher_gpus": 0.2, "trainer_gpus": 0.4},
        }
    if num < 4:
        return {
            "rollout": {"gpu_memory_utilization": 0.45},
            "teachers": {"workers": 1},
            "trainer": {"ranks": num - 1, "gradient_checkpointing": True},
            "cluster": {"rollout_gpus": 0.5, "teacher_gpus": 0.5, "trainer_gpus": 1},
        }
    engines, teachers = num // 4, min(num // 4, domains)
    return {
        "rollout": {"workers": engines},
        "teachers": {"workers": teachers},
        "trainer": {"ranks": num - engines - teachers, "gradient_checkpointing": True},
        "cluster": {"rollout_gpus": 1, "teacher_gpus": 1, "trainer_gpus": 1},
    }


def merge_models(
    student: ModelInfo, experts: Mapping[str, ExpertFacts], domains: Mapping[str, DomainFacts]
) -> MergeModels:
    """Return the models of a merge in which every domain has the expert of its name."""
    scorers = {name: unhashed_expert(name, name, seen.info, seen.adapter) for name, seen in experts.items()}
    return MergeModels(
        student=student,
        scorers=scorers,
        scoring={name: (WeightedTeacher(teacher=one.teacher, weight=1.0),) for name, one in scorers.items()},
        prompts={name: seen.table for name, seen in domains.items()},
    )


def has_room(data: Data, models: MergeModels, machine: MachineFacts) -> bool:
    """Return True if a machine has room for a pipeline's merge."""
    config = PipelineConfig.model_validate(data)
    lora = size_of_lora(config, models.student) if config.student.lora else None  # imports torch
    return fits_machine(config, replace(models, lora=lora), machine)
