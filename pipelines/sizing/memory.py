"""Estimate how much of a machine's memory a merge will take, from shapes and budgets alone, before anything starts.

    trainer ranks     weights, gradients, AdamW over the ranks; on each: gathered weights, gradients on their way to the
                      sum over ranks, activations, logits, heads
    rollout engines   weights, key-value cache, logits
    teachers          experts within their budget, activations of one pass
    what travels      new weights in shared memory or in buckets, a step's streams in the object store
    processes         libraries and code, Ray, the driver with its prompts

This is an upper estimate: phases take turns, so not all of it is in use at one time. `pipelines/sizing/gpu_memory.py` counts
the memory on GPUs.
P stands for a model's parameters, T for tokens of a pass, V for ids, D for the hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experts.model_dir import EMBEDDINGS, HEADS
from opd.cluster import LOCAL
from opd.config import PipelineConfig, scored_model_len
from opd.config.domains import DomainConfig
from opd.config.drift import count_worker_engines
from opd.config.sections import GATHERED_AT_ONCE, SUMMED_AT_ONCE
from opd.config.teachers import Teachers, TrainerTeachers, TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.models.buckets import BUCKET_BYTES
from opd.payloads import answer_class
from opd.schedules import SCHEDULES
from opd.settings.strict import DTYPE_BYTES
from pipelines.routes import RoutedExpert
from pipelines.sizing.draft import draft_engine_bytes, draft_rank_bytes
from pipelines.sizing.machine import MachineFacts, machine_bytes
from pipelines.sizing.micro_batch import (
    checkpoint_bytes,
    micro_batch_bytes,
    moves_checkpoints,
    tree_mask_bytes,
    widest_unit,
)
from pipelines.sizing.models import MergeModels, divide_models
from teachers.scorers import SCORE_TOKENS

MIB, GIB = 1 << 20, 1 << 30
# Memory of each process with a model of 3 MB, as measured. What processes share, such as libraries, counts once, with the driver.
TRAINER_PROCESS = 420 * MIB
ROLLOUT_PROCESS = 560 * MIB
TEACHER_PROCESS = 340 * MIB
DRIVER_AND_RAY = 1100 * MIB
PREFILLED_AT_ONCE = 2048
"""Most tokens of one forward pass of the engine, unless a single sequence is longer."""
PROMPT = 64
"""Bytes that the driver keeps for each prompt: its place in the order of two epochs, its length, its row. The rest is mapped
from a file, or a few MB in all."""
STATE_COPY = 12
"""Bytes for each trained weight in the copy that a checkpoint is written from: the weight and both moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNeed:
    """One part of the memory of a merge: a line of the sum."""

    part: str
    nbytes: int
    """Bytes of all processes together, on this machine and outside of GPUs."""
    knobs: str
    """Keys of the pipeline that decide this memory."""
    ranks: int = 0
    """Number of trainer ranks that hold equal parts of it; 0: other processes hold it."""


def estimate_memory(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return all parts of the memory of a merge. Reads headers only. Raises: ModelError."""
    trainer = [] if config.cluster.trainer_gpus else _trainer_needs(config, models)
    rollout = [] if config.cluster.rollout_gpus else _rollout_needs(config, models)
    by_engine = divide_models(config, models)
    on_base = [need for engine in by_engine for need in _base_teacher_needs(*engine)]
    teachers = [need for engine in by_engine for need in _scoring_needs(*engine)]
    gpu_copies = _gpu_copy_needs(config, models)
    return [
        *trainer,
        *on_base,
        *rollout,
        *teachers,
        *gpu_copies,
        *_transfer_needs(config, models),
        _process_needs(config, models),
    ]


def describe_shortage(config: PipelineConfig, needs: Sequence[HostMemoryNeed], limit: int) -> str | None:
    """Return the sum in words if it is more than `limit`; None if it fits, or if other machines share the load."""
    return _describe_excess(needs, limit) if config.cluster.address == LOCAL else None


def _describe_excess(needs: Sequence[HostMemoryNeed], limit: int) -> str | None:
    """Return the sum in words if it is more than `limit`; None if it fits."""
    total = sum(need.nbytes for need in needs)
    if total <= limit:
        return None
    lines = " + ".join(f"{format_gib(need.nbytes)} {need.part}" for need in sorted(needs, key=lambda n: -n.nbytes))
    return f"about {format_gib(total)} GiB of memory for a machine with {format_gib(limit)}: {lines}"


def suggest_fix(needs: Sequence[HostMemoryNeed]) -> str:
    """Return the keys to change, in words; those of the largest parts come first."""
    largest = sorted(needs, key=lambda need: -need.nbytes)
    keys = dict.fromkeys(key for need in largest[:3] for key in need.knobs.split(", "))
    return f"lower {', '.join(keys)}"


def refuse_too_large(config: PipelineConfig, models: MergeModels, machine: MachineFacts | None = None) -> None:
    """Raises: ConfigError with the sum if the merge does not fit into `machine`, by default this one."""
    needs = estimate_memory(config, models)
    if machine is None:
        shortage = describe_shortage(config, needs, machine_bytes())
    else:
        shortage = _describe_excess(needs, machine.memory)
    if shortage is not None:
        raise ConfigError.at(
            "memory",
            found=shortage,
            wanted=f"a merge that fits into {'this machine' if machine is None else 'the machines of the cluster spec'}",
            fix=f"{suggest_fix(needs)}; or use a larger machine",
        )


def refuse_no_room(config: PipelineConfig, scorers: Mapping[str, RoutedExpert]) -> None:
    """Refuse a teacher that is larger than all the memory that it may have. A worker finds out later if its layers fit device by device.

    Raises: ConfigError.
    """
    teachers = config.teachers
    if not isinstance(teachers, TransformersTeachers) or not teachers.max_memory:
        return
    room, width = sum(teachers.max_memory.values()), DTYPE_BYTES[teachers.dtype]
    for name, expert in scorers.items():
        if expert.info.parameters * width > room:
            sizes = ", ".join(f"{device} {size / GIB:.3g} GiB" for device, size in teachers.max_memory.items())
            raise ConfigError.at(
                "teachers.max_memory",
                found=sizes,
                wanted=f"room for the {expert.info.parameters * width / GIB:.3g} GiB of weights of expert `{name}` in "
                f"{teachers.dtype}",
                fix="raise a size, or name more devices: cpu, or disk, which leaves layers in their files",
            )


def need_rows(needs: Sequence[HostMemoryNeed], machine: MachineFacts | None = None) -> list[tuple[str, str, str]]:
    """Return part, GiB, keys; the last rows are the sum and the memory of `machine`, by default this one."""
    rows = [(need.part, format_gib(need.nbytes), need.knobs) for need in needs]
    if any(need.ranks for need in needs):
        rows.append(
            ("in it: each trainer rank, at most", format_gib(rank_bytes(needs)), "trainer.ranks, trainer.bucket")
        )
    return [
        *rows,
        ("together", format_gib(sum(n.nbytes for n in needs)), ""),
        ("this machine", format_gib(machine_bytes()), "")
        if machine is None
        else ("the cluster spec", format_gib(machine.memory), ""),
    ]


def rank_bytes(needs: Sequence[HostMemoryNeed]) -> int:
    """Return the most memory of a trainer rank, its process included; shared memory, such as libraries, is not."""
    return TRAINER_PROCESS + sum(need.nbytes // need.ranks for need in needs if need.ranks)


def fullest_workers(config: PipelineConfig, models: MergeModels) -> dict[str, int]:
    """Return for each role the most bytes of one worker on a machine without GPUs, its process included.

    Not all parts are there at the same time, so this can be less than the sum of `worker_parts`.
    """
    needs = estimate_memory(config, models)

    def role_bytes(role: str) -> int:
        return sum(need.nbytes for need in needs if need.part.startswith(role))

    fullest = {
        "trainer rank": rank_bytes(needs),
        "rollout engine": ROLLOUT_PROCESS + role_bytes("rollout:") // config.rollout.workers,
    }
    scorers = [
        TEACHER_PROCESS + sum(need.nbytes for need in _scoring_needs(*engine)) // engine[0].teachers.scoring_workers
        for engine in divide_models(config, models)
        if engine[0].teachers.scoring_workers and engine[1].scorers
    ]
    return fullest | ({"scoring worker": max(scorers)} if scorers else {})


def _trainer_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of all trainer ranks, and that of a critic's."""
    ranks, largest = config.trainer.ranks, models.read_body(models.student).largest
    # While a checkpoint is written the ranks hold a copy of weights and moments; activations are freed before. So they are before
    # gradients are added up, from a copy in the order of the ranks.
    checkpoint = STATE_COPY * models.trained + averages_bytes(config, models)
    summed = summed_bytes(config, models.trained)
    # A copy of the largest weight in the files' form, or what an adapter adds to it and the weight itself, both in float32.
    export = largest * (8 if models.lora else DTYPE_BYTES[config.trainer.dtype])
    needs = [
        HostMemoryNeed(
            part="trainer: weights, gradients, AdamW",
            nbytes=trainer_state_bytes(config, models) + ranks * gathered_bytes(config, models),
            knobs="student.model, trainer.ranks, trainer.grad_accum_dtype, trainer.bucket",
            ranks=ranks,
        ),
        HostMemoryNeed(
            part="trainer: gradients on their way to the sum over ranks",
            nbytes=ranks * summed,
            knobs="trainer.bucket, trainer.grad_accum_dtype, trainer.ranks",
            ranks=ranks,
        ),
        HostMemoryNeed(
            part="trainer: activations and logits of a micro-batch, or the writing of a checkpoint",
            nbytes=max(ranks * max(micro_batch_bytes(config, models), summed, export), checkpoint),
            knobs="trainer.micro_batch_tokens, objective.chunk, trainer.gradient_checkpointing, trainer.ranks",
            ranks=ranks,
        ),
    ]
    if sends_heads(config):
        needs.append(
            HostMemoryNeed(
                part="trainer: teachers' output heads",
                nbytes=ranks * heads_bytes(config, models),
                knobs="trainer.head_memory, trainer.ranks",
                ranks=ranks,
            )
        )
    if config.draft is not None:
        needs.append(
            HostMemoryNeed(
                part="trainer: the draft",
                nbytes=ranks * sum(draft_rank_bytes(config, models.student.vocab_size)),
                knobs="draft.tokens, draft.vocab_size, trainer.ranks",
                ranks=ranks,
            )
        )
    return [*needs, *_critic_needs(config, models)]


def _base_teacher_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of what trainer ranks score with by themselves: every rank keeps every expert's adapter, also beside GPUs."""
    if not isinstance(config.teachers, TrainerTeachers):
        return []
    adapters = sum(expert.adapter.parameters for expert in models.experts.values() if expert.adapter)
    scores = 0 if config.cluster.trainer_gpus else scores_bytes(config, models)
    return [
        HostMemoryNeed(
            part="trainer: experts' adapters, and their scores of a micro-batch",
            nbytes=config.trainer.ranks * (adapters * DTYPE_BYTES[config.trainer.dtype] + scores),
            knobs="trainer.ranks, trainer.dtype, trainer.micro_batch_tokens",
            ranks=config.trainer.ranks,
        )
    ]


def scores_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that one rank adds to a micro-batch where it scores by itself: an adapter, and what the teachers say of the
    tokens. A pass without gradients needs less than the one that trains, and is over before it."""
    return sum(_engine_scores_bytes(*engine) for engine in divide_models(config, models))


def _engine_scores_bytes(config: PipelineConfig, models: MergeModels) -> int:
    if not isinstance(config.teachers, TrainerTeachers):
        return 0
    adapter = max((expert.adapter.parameters for expert in models.experts.values() if expert.adapter), default=0)
    token_bytes = answer_class(config.teachers.payload).token_bytes(
        hidden_size=models.student.hidden_size,
        itemsize=DTYPE_BYTES[config.teachers.dtype],
        top_k=config.objective.top_k,
    )
    most_teachers = max((len(teachers) for teachers in models.scoring.values()), default=1) + 1  # and the start student
    tokens = config.trainer.micro_batch_tokens + widest_unit(config)
    return adapter * DTYPE_BYTES[config.trainer.dtype] + most_teachers * tokens * token_bytes


def _critic_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of a critic and of a discriminator, if there are any.

    Each computes while the student's trainer does not, so activations count once. It adds what it keeps all the time, and the copy
    from which a checkpoint is written, which exists at the same time as the trainer's.
    """
    parameters = models.student.parameters
    return [
        HostMemoryNeed(
            part=f"{name}: weights, gradients, AdamW, and a copy for a checkpoint",
            nbytes=critic_state_bytes(config, models)
            + config.trainer.ranks * summed_bytes(config, parameters)
            + STATE_COPY * parameters,
            knobs="student.model, trainer.grad_accum_dtype, trainer.bucket, "
            + ("objective.reward.baseline" if name == "critic" else "objective.reward.preference"),
        )
        for name in config.objective.judging_models
    ]


def critic_state_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that all ranks of the critic hold together: as much as for a student of which every weight is trained."""
    trainer = config.trainer
    copy, gradients = DTYPE_BYTES[trainer.dtype], DTYPE_BYTES[trainer.grad_accum_dtype]
    # 4 bytes for the float32 master, 8 for both moments.
    return models.student.parameters * (copy + 4 + 8 + gradients)


def trainer_state_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of weights, gradients and optimiser that all ranks hold together."""
    return sum(trainer_state(config, models).values())


def trainer_state(config: PipelineConfig, models: MergeModels) -> dict[str, int]:
    """Return the bytes that all ranks hold together: compute copy, float32 master, both moments, gradients in the type of their
    sum, and three float32 copies of these in a run that compares gradients; and moving averages of the student. Weights that LoRA leaves alone have a compute copy only.

    Of gradients that are summed in another type the optimiser also makes a float32 copy. It is smaller than the memory for writing
    a checkpoint, which is counted, and exists at another time.
    """
    trainer = config.trainer
    frozen = models.student.parameters if models.lora else 0
    copy, gradients = DTYPE_BYTES[trainer.dtype], DTYPE_BYTES[trainer.grad_accum_dtype]
    reward = config.objective.reward
    compared = 12 if reward is not None and reward.compare_every else 0
    state = {
        "weights": (frozen + models.trained) * copy + weights_copy_bytes(config, frozen + models.trained),
        "gradients": models.trained * (gradients + compared),
        "optimiser": models.trained * (4 + 8),
    }
    averages = averages_bytes(config, models)
    return state | ({"averages": averages} if averages else {})


def averages_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that all ranks hold together for moving averages of the student: the averages in float32, the student's weights
    while one is in their place, and on each rank the output head of each."""
    decays = {expert.ema for expert in config.inline_experts.values() if expert.ema is not None}
    if not decays:
        return 0
    copy, student = DTYPE_BYTES[config.trainer.dtype], models.student
    head = 0 if models.lora else student.vocab_size * student.hidden_size * copy
    return models.trained * (4 * len(decays) + copy) + config.trainer.ranks * len(decays) * head


def weights_copy_bytes(config: PipelineConfig, parameters: int) -> int:
    """Return the bytes of the weights' second copy, of all ranks together: each group of ranks that gathers by itself has one."""
    trainer = config.trainer
    size = trainer.deepspeed.zero_optimization.zero_hpz_partition_size
    return parameters * DTYPE_BYTES[trainer.dtype] * (trainer.ranks // size) if size > 1 else 0


def offloaded_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of the trainer's state that DeepSpeed keeps in the machine's memory, in place of GPUs; of all ranks together."""
    state, zero = trainer_state(config, models), config.trainer.deepspeed.zero_optimization
    weights = state["weights"] if zero.offload_param.device == "cpu" else 0
    return weights + (state["gradients"] + state["optimiser"] if zero.offload_optimizer.device == "cpu" else 0)


def gathered_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of weights that one rank has gathered from the others: as many as the bucket takes, and one more weight, or
    a tiled MLP, which is gathered as one."""
    bucket, body = config.trainer.bucket, models.read_body(models.student)
    largest = body.largest if config.trainer.mlp_tile_tokens is None else max(body.largest, body.mlp)
    most = max(GATHERED_AT_ONCE, largest) if bucket is None else bucket + largest
    return min(models.student.parameters, most) * DTYPE_BYTES[config.trainer.dtype]


def summed_bytes(config: PipelineConfig, trained: int) -> int:
    """Return the bytes of gradients that one rank keeps until the ranks add them up. That memory is not freed in between."""
    return min(trained, config.trainer.bucket or SUMMED_AT_ONCE) * DTYPE_BYTES[config.trainer.grad_accum_dtype]


def bucket_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of a bucket of a push: it has room for the largest matrix."""
    width = DTYPE_BYTES[config.trainer.dtype]
    return max(min(models.pushed * width, BUCKET_BYTES), largest_matrix(models) * width)


def largest_matrix(models: MergeModels) -> int:
    """Return the parameters of the largest matrix that a push sends. Embedding and head of a LoRA student are not sent."""
    rows = 0 if models.lora else models.student.vocab_rows
    return max(models.read_body(models.student).widest, rows) * models.student.hidden_size


def sends_heads(config: PipelineConfig) -> bool:
    """Return True if any teacher's output head comes to the trainer."""
    return any(answer_class(section.sent_payload).SENDS_HEADS for section in config.engines)


def heads_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of teachers' output heads that one rank keeps: within `trainer.head_memory`, but at least the largest."""
    sizes = head_sizes(config, models)
    return max(max(sizes, default=0), min(sum(sizes), int(config.trainer.head_memory)))


def head_sizes(config: PipelineConfig, models: MergeModels) -> list[int]:
    """Return the bytes of each of the teachers' output heads; adapters that leave the head alone have their base's."""
    width = DTYPE_BYTES[config.teachers.dtype]
    infos = {}
    engines = divide_models(config, models)
    sending = [engine for engine in engines if len(engines) == 1 or sends_heads(engine[0])]
    for expert in (expert for _, part in sending for expert in part.scorers.values()):
        changed = expert.adapter and any(
            f".{name}.weight".endswith((*EMBEDDINGS, *HEADS)) for name in expert.adapter.target_modules
        )
        infos[expert.teacher.digest if changed else expert.teacher.base_digest or expert.teacher.digest] = expert.info
    return [info.vocab_rows * info.hidden_size * width for info in infos.values()]


def engine_weights(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of the student's weights in one rollout engine on GPUs, which takes new ones in place."""
    draft = draft_engine_bytes(config, models.student.vocab_size)
    return models.student.parameters * DTYPE_BYTES[config.rollout.dtype] + draft


def engine_activations(config: PipelineConfig, models: MergeModels) -> int:
    """Return an upper estimate of the bytes of logits and activations in one process of a rollout engine."""
    rollout, student = config.rollout, models.student
    logits = rollout.max_num_seqs * (1 + rollout.num_speculative_tokens) * student.vocab_rows * 4 * 3
    tokens = max(PREFILLED_AT_ONCE, rollout.max_model_len)
    widest = models.read_body(student).widest or student.hidden_size
    return logits + tokens * widest * 4 * DTYPE_BYTES[rollout.dtype]


def cpu_engine_weights(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of the student's weights in one rollout engine on a CPU: twice the weights, because a copy of the new ones is in
    memory while the engine takes them, and a head more, because a tied head has a packed copy of its own."""
    student = models.student
    head = student.vocab_rows * student.hidden_size * DTYPE_BYTES[config.rollout.dtype]
    return 2 * engine_weights(config, models) + head


def _rollout_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    rollout, engines = config.rollout, count_worker_engines(config.domains)
    # Processes divide the weights; each has activations of its own.
    weights, working = cpu_engine_weights(config, models), engine_activations(config, models)
    divided = ", rollout.tensor_parallel_size" if rollout.tensor_parallel_size > 1 else ""
    return [
        HostMemoryNeed(
            part="rollout: weights and logits",
            nbytes=rollout.workers * engines * (weights + rollout.tensor_parallel_size * working),
            knobs="rollout.max_num_seqs, rollout.dtype, rollout.workers",
        ),
        HostMemoryNeed(
            part="rollout: key-value cache",
            nbytes=rollout.workers * engines * rollout.tensor_parallel_size * (rollout.kv_cache_gib << 30),
            knobs=f"rollout.kv_cache_gib, rollout.workers{divided}",
        ),
    ]


def _scoring_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of the scoring workers of one engine."""
    return (_off_gpu_needs if config.cluster.teacher_gpus else _teacher_needs)(config, models)


def _teacher_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    teachers = config.teachers
    if teachers.elsewhere or not teachers.scoring_workers or not models.experts:
        return []
    sizes, adapters = teacher_sizes(config, models)
    _, activations = scoring_bytes(config, models)
    if isinstance(teachers, VLLMTeachers):
        size = teachers.tensor_parallel_size
        weights, budget = 2 * max(sizes) + size * (teachers.kv_cache_gib << 30), "teachers.kv_cache_gib"
        activations *= size
    else:
        assert isinstance(teachers, TransformersTeachers)
        if teachers.max_memory:
            sizes = [in_memory(teachers, size) for size in sizes]
        weights, budget = max(max(sizes), min(sum(sizes) + adapters, int(teachers.memory))), "teachers.memory"
    return [
        HostMemoryNeed(
            part="teachers: weights",
            nbytes=teachers.workers * weights,
            knobs=f"{budget}, teachers.dtype, teachers.workers",
        ),
        HostMemoryNeed(
            part="teachers: activations",
            nbytes=teachers.workers * activations,
            knobs="teachers.dtype, teachers.workers",
        ),
    ]


def _off_gpu_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of teachers' layers that have no room on GPUs and wait in this machine's memory. The files of
    layers on GPUs are mapped, which is not counted."""
    waiting = in_memory(config.teachers, scoring_bytes(config, models)[0]) if models.scorers else 0
    nbytes = config.teachers.scoring_workers * waiting
    knobs = "teachers.max_memory, teachers.dtype"
    return [HostMemoryNeed(part="teachers: layers that no GPU has", nbytes=nbytes, knobs=knobs)] if nbytes else []


def _gpu_copy_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the copy that trainer ranks make of their GPUs for a checkpoint, and the weights of engines that sleep."""
    needs = []
    if config.cluster.trainer_gpus:
        trained = models.trained + models.student.parameters * len(config.objective.judging_models)
        what, knobs = "copy from GPUs that a checkpoint is written from", "student.model"
        needs.append(HostMemoryNeed(part=what, nbytes=STATE_COPY * trained, knobs=knobs))
        if offloaded := offloaded_bytes(config, models):
            offloaded += critic_state_bytes(config, models) * len(config.objective.judging_models)
            what, knobs = "trainer: state in place of GPUs", "trainer.deepspeed.zero_optimization"
            needs.append(HostMemoryNeed(part=what, nbytes=offloaded, knobs=knobs))
        if moves_checkpoints(config):
            nbytes = config.trainer.ranks * checkpoint_bytes(config, models)
            what, knobs = "trainer: activations in place of GPUs", "trainer.micro_batch_tokens, trainer.ranks"
            needs.append(HostMemoryNeed(part=what, nbytes=nbytes, knobs=knobs))
    if config.rollout.sleep:
        nbytes = config.rollout.workers * engine_weights(config, models)
        what, knobs = "weights of engines that sleep", "rollout.sleep, rollout.dtype, rollout.workers"
        needs.append(HostMemoryNeed(part=what, nbytes=nbytes, knobs=knobs))
    return needs


def off_gpus(teachers: TransformersTeachers, weights: int) -> int:
    """Return the bytes of a teacher's weights for which `teachers.max_memory` has no room on GPUs; all of them if it names no GPU."""
    return max(0, weights - sum(size for device, size in teachers.max_memory.items() if isinstance(device, int)))


def in_memory(teachers: Teachers, weights: int) -> int:
    """Return the bytes of a teacher's weights that `teachers.max_memory` puts into the machine's memory, out of those that are on no GPU.
    The rest stays in the files."""
    if not isinstance(teachers, TransformersTeachers):
        return 0
    return min(off_gpus(teachers, weights), teachers.max_memory.get("cpu", 0))


def scoring_bytes(config: PipelineConfig, models: MergeModels) -> tuple[int, int]:
    """Return (bytes of the largest teacher's weights, bytes of activations of one pass) in one scoring worker."""
    width = DTYPE_BYTES[config.teachers.dtype]
    largest = max((expert.info for expert in models.scorers.values()), key=lambda info: info.parameters)
    adapter = max((expert.adapter.parameters for expert in models.scorers.values() if expert.adapter), default=0)
    longest = scored_model_len(config)
    # A teacher's own prompt may be longer than a whole batch of the student's rows.
    most = max(SCORE_TOKENS, longest) if longest > config.rollout.max_model_len else SCORE_TOKENS
    tokens = min(most, config.trainer.samples_per_step * longest)
    widest = models.read_body(largest).widest or largest.hidden_size
    activations = tokens * widest * 6 * width + tree_mask_bytes(config, tokens)
    return (largest.parameters + adapter) * width, activations


def teacher_sizes(config: PipelineConfig, models: MergeModels) -> tuple[list[int], int]:
    """Return (bytes of each full model among the teachers, where a base that several share comes once; bytes of all adapters)."""
    width = DTYPE_BYTES[config.teachers.dtype]
    infos = {expert.teacher.base_digest or expert.teacher.digest: expert.info for expert in models.scorers.values()}
    adapters = sum(expert.adapter.parameters for expert in models.scorers.values() if expert.adapter)
    return [info.parameters * width for info in infos.values()], adapters * width


def _transfer_needs(config: PipelineConfig, models: MergeModels) -> list[HostMemoryNeed]:
    """Return the memory of what travels between processes: new weights, and the scored rows of a step."""
    return [
        HostMemoryNeed(part="new weights on their way", nbytes=pushed_bytes(config, models), knobs="trainer.dtype"),
        # One copy in the worker that builds them, one in the object store.
        HostMemoryNeed(
            part="a step's scored rows",
            nbytes=2 * step_rows_bytes(config, models),
            knobs="trainer.samples_per_step, rollout.max_new_tokens, teachers.payload, teachers.dtype",
        ),
    ]


def step_rows_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of a step's scored rows, if every response is as long as it may be."""
    return count_response_tokens(config) * row_bytes(config, models)


def row_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that a response token takes in the scored rows of all its teachers."""
    most_teachers = max((len(teachers) for teachers in models.scoring.values()), default=1)
    return most_teachers * (target_bytes(config, models) + 16)


def target_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes that a teacher sends for one token of a target row."""
    return max(
        answer_class(engine.teachers.sent_payload).token_bytes(
            hidden_size=max((expert.info.hidden_size for expert in part.scorers.values()), default=0),
            itemsize=DTYPE_BYTES[engine.teachers.dtype],
            top_k=engine.objective.top_k,
        )
        for engine, part in divide_models(config, models)
    )


def count_response_tokens(config: PipelineConfig) -> int:
    """Return the most tokens that the student writes in a step."""
    return config.trainer.samples_per_step * max(_longest_sample(config, domain) for domain in config.domains.values())


def _longest_sample(config: PipelineConfig, domain: DomainConfig) -> int:
    """Return the most tokens that the student writes for one sample."""
    environment, turn = domain.environment, config.rollout.max_new_tokens
    if environment is None or environment.replay:
        return turn
    limit = config.rollout.max_model_len
    return min(limit, environment.max_turns * turn, environment.max_tokens or limit)


def pushed_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of a push on its way, in addition to the weights that trainer and engines hold themselves."""
    width = DTYPE_BYTES[config.trainer.dtype]
    pushed = models.pushed * width
    previous = pushed if SCHEDULES[config.schedule.mode].STEPS_AHEAD else 0
    if config.push_kind == "shared_memory":
        return 2 * pushed
    # Rank 0 fills one bucket while another is in the object store, and each engine copies from that, in the end all of it.
    bucket = bucket_bytes(config, models)
    if config.push_kind == "direct":
        # Rank 0 has two buffers, and an engine the buckets whose layers are not complete; on GPUs these are not the host's.
        return previous + (0 if config.cluster.trainer_gpus else (2 + 2 * config.rollout.workers) * bucket)
    return previous + (2 + config.rollout.workers) * bucket


def _process_needs(config: PipelineConfig, models: MergeModels) -> HostMemoryNeed:
    """Return the memory of all processes without their models, and of the prompts."""
    prompts = PROMPT * sum(len(part) for part in models.prompts.values())
    return HostMemoryNeed(
        part="processes, Ray and prompts",
        nbytes=DRIVER_AND_RAY
        + prompts
        + config.trainer.ranks * TRAINER_PROCESS * (1 + len(config.objective.judging_models))
        + config.rollout.workers * _engine_processes(config.rollout.tensor_parallel_size) * ROLLOUT_PROCESS
        + sum(map(_scoring_processes, config.engines)),
        knobs="trainer.ranks, rollout.workers, teachers.workers",
    )


def _scoring_processes(section: Teachers) -> int:
    """Return the bytes of an engine's scoring workers and of their engines' processes, without models."""
    divided = section.tensor_parallel_size if isinstance(section, VLLMTeachers) else 1
    return section.scoring_workers * (TEACHER_PROCESS + (_engine_processes(divided) - 1) * ROLLOUT_PROCESS)


def _engine_processes(size: int) -> int:
    """Return the number of processes of a worker whose engine is divided among `size` devices: its own, and one for each device if there
    are several."""
    return 1 if size == 1 else 1 + size


def format_gib(nbytes: float) -> str:
    """Return the bytes in GiB, with two digits."""
    return f"{nbytes / GIB:.2f}"
