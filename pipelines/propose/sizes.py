"""Choose lengths, steps and sizes that the prompts ask for and the machine can hold.

Memory is what `opd check` and `opd merge` reckon, from headers alone: rung by rung a merge gets smaller until it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experts.model_dir import ModelInfo
from experts.weight_files import weight_tensors
from opd.config import PipelineConfig
from opd.config.objectives import DEFAULT_KIND
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.gpu_memory import gpu_roles, memory_phases, place_roles
from pipelines.inputs.lora import size_of_lora
from pipelines.inputs.memory import describe_shortage, estimate_memory
from pipelines.inputs.read import Inputs
from pipelines.inputs.routes import RoutedExpert
from pipelines.propose.domains import DomainFacts
from pipelines.propose.machine import MachineFacts
from pipelines.propose.models import ExpertFacts

Data = dict[str, Any]

TINY = 20_000_000
"""Parameters up to which float32 costs nothing, and a merge may have many steps and samples."""
RATES = ((5e6, 2e-3), (5e7, 1e-3), (5e8, 2e-4), (3e9, 2e-5))
"""Parameters up to which a peak learning rate is a fair start; what is larger gets the last resort."""
LAST_RATE, LORA_RATE = 5e-6, 2e-4
ROOM = {False: 4096, True: 16384}
"""Tokens of context that a proposal has at most, without and with a GPU: longer prompts are left out."""
AT_ONCE = 16
"""Sequences of full length for which a CPU engine's cache has room; shorter ones, which most are, take less."""
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


def cache_gib(student: Path, rollout: Data) -> int:
    """GiB of a CPU engine's key-value cache in which `AT_ONCE` of the longest sequences have room."""
    keys = sum(t.shape[0] for name, t in weight_tensors(student).items() if name.endswith("k_proj.weight"))
    keys = keys or _keys_by_config(student)
    width = DTYPE_BYTES[rollout["dtype"]]
    return max(1, -(-AT_ONCE * rollout["max_model_len"] * 2 * keys * width >> 30))


def _keys_by_config(student: Path) -> int:
    """Numbers of a token's keys in all layers, for a model that has them in one matrix with queries and values."""
    from opd.models.weights import load_config

    config = load_config(student).get_text_config(decoder=True)
    layers, heads, width = (
        getattr(config, key, None) or 0 for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head = getattr(config, "head_dim", None) or width // max(1, heads)
    return int(layers * (getattr(config, "num_key_value_heads", None) or heads) * head)


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


ADAPTERS: Data = {"student": {"lora": {"r": 16, "alpha": 32}}, "trainer": {"lr": LORA_RATE}}
"""The change of a pipeline by which a LoRA student learns."""


def shrinking_steps(*, gpus: bool) -> list[tuple[str, Data]]:
    """Return the measures that make a merge smaller, in order: in words, and as changes of the pipeline."""
    half = {section: {"dtype": "bfloat16"} for section in ("rollout", "teachers", "trainer")}
    small = {"trainer": {"micro_batch_tokens": 2048}, "rollout": {"max_num_seqs": 64}}
    fewer = {"teachers": {"workers": 1, "memory": "1GiB"}}
    least = {"trainer": {"micro_batch_tokens": 1024, "gradient_checkpointing": True}}
    fewer_ranks = [] if gpus else [("one trainer rank", {"trainer": {"ranks": 1}})]
    return [
        *fewer_ranks,
        ("smaller batches", small),
        ("fewer experts in memory at a time", fewer),
        ("recomputed activations", least),
        ("bfloat16", half),
        ("adapters in place of all weights", ADAPTERS),
    ]


def shrink_to_fit(data: Data, fits: Callable[[Data], bool], machine: MachineFacts) -> tuple[Data, list[str], bool]:
    """The pipeline, made smaller until it fits; what was done for that; and whether it fits at last."""
    measures: list[str] = []
    for measure, change in [("", {}), *shrinking_steps(gpus=bool(machine.gpus))]:
        data = apply_change(data, change)
        measures += [measure] if measure else []
        if fits(data):
            return data, measures, True
    return data, measures, False


def apply_change(data: Data, change: Data) -> Data:
    """The data with a change in it, section by section."""
    merged = dict(data)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = apply_change(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def fits_machine(
    student: ModelInfo, experts: Mapping[str, ExpertFacts], domains: Mapping[str, DomainFacts], machine: MachineFacts
) -> Callable[[Data], bool]:
    """Check if a pipeline's merge has room in this machine's memory and on its GPUs, by the sums of `opd merge`."""

    def fits(data: Data) -> bool:
        config = PipelineConfig.model_validate(data)
        inputs = _memory_inputs(config, student, experts, domains)
        short = describe_shortage(config, estimate_memory(config, inputs), machine.memory) is not None
        return not short and not _find_crowded_device(config, inputs, machine.gpus)

    return fits


def _find_crowded_device(config: PipelineConfig, inputs: Inputs, gpus: Sequence[int]) -> bool:
    roles = gpu_roles(config, inputs)
    if not roles:
        return False
    size, placed = min(gpus), place_roles(roles)
    hungry = any(role.share and role.least > role.share * size for role in roles)
    return (
        hungry or len(placed) > len(gpus) or any(p.total(size) > size for crowd in placed for p in memory_phases(crowd))
    )


def _memory_inputs(
    config: PipelineConfig,
    student: ModelInfo,
    experts: Mapping[str, ExpertFacts],
    domains: Mapping[str, DomainFacts],
) -> Inputs:
    """Return the part of a merge's inputs that the sums need. No weight is read, so models are told apart by their directories."""
    scorers = {name: _scorer_facts(name, facts) for name, facts in experts.items()}
    routes: dict[str, tuple[WeightedTeacher, ...]] = {
        name: (WeightedTeacher(teacher=scorer.teacher, weight=1.0),) for name, scorer in scorers.items()
    }
    return Inputs(
        student=student,
        scorers=scorers,
        routes=routes,
        scoring=routes,
        prompts={name: facts.table for name, facts in domains.items()},
        exams={},
        untrained={},
        tokenizer=None,
        warnings=(),
        lora=size_of_lora(config, student) if config.student.lora else None,  # imports torch
    )


def _scorer_facts(name: str, facts: ExpertFacts) -> RoutedExpert:
    directory = Path(facts.info.path)
    adapter = Path(facts.adapter.path) if facts.adapter else None
    digest, base = str(adapter or directory), str(directory) if adapter else ""
    teacher = Teacher(name=name, model_dir=directory, adapter_dir=adapter, digest=digest, base_digest=base)
    return RoutedExpert(teacher=teacher, domain=name, info=facts.info, adapter=facts.adapter, prompts=None)
