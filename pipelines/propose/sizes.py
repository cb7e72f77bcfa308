"""Choose lengths, steps and sizes that suit the prompts and that the machine can hold.

The numbers below are first guesses; the notes in the written file tell users when to change them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from experts.model_dir import ModelInfo
from opd.config import PipelineConfig
from opd.config.objectives import DEFAULT_KIND
from opd.records.types import WeightedTeacher
from pipelines.inputs.lora import size_of_lora
from pipelines.propose.domains import DomainFacts
from pipelines.propose.models import ExpertFacts
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.gpu_memory import fits_machine
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.models import MergeModels, unhashed_expert
from pipelines.sizing.shrink import Data, apply_change

TINY_PARAMETERS = 20_000_000
"""Largest model for which float32 costs next to nothing, so that a merge may have many steps and samples even on a CPU."""
LEARNING_RATES = ((5e6, 2e-3), (5e7, 1e-3), (5e8, 2e-4), (3e9, 2e-5))
"""Pairs of a number of parameters, and the peak learning rate for models up to it."""
LARGEST_MODELS_RATE = 5e-6
"""Peak learning rate for larger models than these."""
CPU_CONTEXT, GPU_CONTEXT = 4096, 16384
"""Longest context of a proposal in tokens, without and with a GPU: prompts that leave no room in it are left out."""
CHAT_TOKENS = 256
"""Tokens of a response of which nothing is known but that it is one of a chat."""


def choose_lengths(domains: Mapping[str, DomainFacts], context: int | None, *, gpu: bool) -> Data:
    """Choose `max_new_tokens` and `max_model_len` by the tokens of prompts and answers. `context` is the student's own limit, None if
    it has none."""
    limit = GPU_CONTEXT if gpu else CPU_CONTEXT
    max_len = min(limit, context or limit)
    longest_response = max(_estimate_response_tokens(facts) for facts in domains.values())
    # A response gets at most half of the context.
    max_new = min(_round_up(longest_response, 8), max(1, max_len // 2))
    longest = max(int(facts.table.lengths.max()) for facts in domains.values())
    return {"max_new_tokens": max_new, "max_model_len": max(8, min(max_len, _round_up(longest + max_new, 16)))}


def max_prompt_tokens(rollout: Data) -> int:
    """Return the length in tokens of the longest prompt that leaves room for a whole response."""
    return int(rollout["max_model_len"] - rollout["max_new_tokens"])


def _estimate_response_tokens(facts: DomainFacts) -> int:
    """Return how many tokens a response may need: a quarter more than the longest completion; without completions, several times the
    longest answer, because an answer comes with some text around it."""
    if facts.completion_tokens:
        return math.ceil(1.25 * facts.completion_tokens)
    if facts.sources.training.chat:
        return max(CHAT_TOKENS, 2 * facts.answer_tokens)
    return max(32, 4 * facts.answer_tokens) if facts.answer_tokens else 128


def _round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `value`."""
    return math.ceil(value / step) * step


def choose_sizes(parameters: int, domains: int, machine: MachineFacts) -> Data:
    """Choose the settings about sizes as if memory were no concern. `parameters` is the student's number of them, `domains` the number
    of domains."""
    gpu, tiny = bool(machine.gpus), parameters <= TINY_PARAMETERS
    samples_per_domain = 32 if gpu or tiny else 8
    samples = max(domains, min(256, samples_per_domain * domains))
    steps = 300 if gpu or tiny else 200
    dtype = "bfloat16" if gpu or (machine.bf16 and not tiny) else "float32"
    workers = 1 if machine.cores < 16 else 2
    data: Data = {
        "rollout": {"dtype": dtype, "max_num_seqs": 256 if gpu else max(16, min(256, _round_up(samples, 16)))},
        "teachers": {"dtype": dtype, "workers": min(workers, domains)},
        "objective": {"kind": DEFAULT_KIND},
        "trainer": {
            "dtype": dtype,
            "ranks": min(2, machine.cores),
            "steps": steps,
            "samples_per_step": samples,
            "lr": next((rate for limit, rate in LEARNING_RATES if parameters <= limit), LARGEST_MODELS_RATE),
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "min_lr_ratio": 0.05,
        },
        "checkpoint": {"every": 25, "keep": 2},
        "evaluate": {"every": steps // 4, "samples": 100},
    }
    return apply_change(data, _divide_gpus(len(machine.gpus), domains)) if gpu else data


def _divide_gpus(num: int, domains: int) -> Data:
    """Divide `num` GPUs among the roles. From four on, every rollout engine and scoring worker gets a GPU of its own, and the trainer
    those that are left. Fewer are shared: with shares of `cluster` several roles are on one. A model that is larger than a GPU
    is not divided here; that is for a person to decide (`rollout.tensor_parallel_size`, `teachers.device_map`)."""
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


def build_merge_models(
    student: ModelInfo, experts: Mapping[str, ExpertFacts], domains: Mapping[str, DomainFacts]
) -> MergeModels:
    """Build the models of a merge in which every domain has the expert of its name."""
    scorers = {name: unhashed_expert(name, name, facts.info, facts.adapter) for name, facts in experts.items()}
    return MergeModels(
        student=student,
        scorers=scorers,
        scoring={name: (WeightedTeacher(teacher=scorer.teacher, weight=1.0),) for name, scorer in scorers.items()},
        prompts={name: facts.table for name, facts in domains.items()},
    )


def fits_memory(data: Data, models: MergeModels, machine: MachineFacts) -> bool:
    """Return True if the merge of a pipeline fits into the memory of a machine."""
    config = PipelineConfig.model_validate(data)
    lora = size_of_lora(config, models.student) if config.student.lora else None  # imports torch
    models = replace(models, lora=lora)
    return fits_machine(choose_numbers(config, models, machine), models, machine)
