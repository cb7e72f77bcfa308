"""The plain sections: engines, steps, files and machines, without rules between their keys."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from opd.config.placement import PlacementConfig
from opd.settings.strict import DType, Strict


class RolloutConfig(Strict):
    engine: str = Field("vllm", pattern=r"^(vllm|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """What writes the rollouts: `vllm`, an engine in each rollout worker, or a class of yours as `module:Class`. It is called
    with an `opd.rollouts.vllm.RolloutSpec` and the tokenizer, and has the methods of `opd.interfaces.RolloutEngine` and
    `wait_ready()`."""
    workers: int = Field(1, ge=1)
    """Rollout engines; prompts are dealt out among them."""
    dtype: DType = "float32"
    """Compute type of the engine; bfloat16 is about 1.8 times as fast on a CPU that has it."""
    n: int = Field(1, ge=1)
    """Responses to each prompt of a step, each with a seed of its own; a step takes `trainer.samples_per_step` / `n` prompts.
    From 2 on teachers and trainer compute a prompt once for all responses to it, if that is exact for the model."""
    share_prefixes: bool | None = None
    """Teachers and trainer compute once what prompts of a domain begin with alike, such as a system prompt or an instruction, if
    that is exact for the model. Default: with `n` of 2 and more, whose prompts are then computed once, too."""
    max_new_tokens: int = Field(64, ge=1)
    """Response limit; shortened per prompt, and counted, where the context would overflow."""
    temperature: float = Field(1.0, ge=0.01)
    """1.0 samples from the student itself; anything else is not quite on-policy. vLLM takes 0.01 for anything below."""
    max_model_len: int = Field(512, ge=8)
    """Context of the rollout engine in tokens; a prompt that leaves no room is quarantined."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache of a CPU engine, whole GiB; with `tensor_parallel_size` of each of its processes."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that a GPU engine may take. Where roles share a GPU, leave room for the other roles."""
    sleep: bool = False
    """Give the engine's GPU memory back while teachers score and the trainer trains. For engines on a GPU that they share."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Processes that divide every weight of the engine among them, for a student larger than a GPU; on GPUs each has
    `cluster.rollout_gpus`. It has to divide the heads of attention, and all are on one machine."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of a GPU engine's key-value cache; `auto`: that of the engine. Fewer bits hold more tokens, and bend what is
    sampled away from the trainer's distribution: see docs/gpu.md."""
    engine_args: dict[str, Any] = {}
    """Other arguments of vLLM's `LLM`, by its own names; those that would bend what is sampled, or that have a key here, are
    refused."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether the rows of a step that begin alike are laid out as trees; see `opd.models.packing`."""
        return self.n > 1 if self.share_prefixes is None else self.share_prefixes


HELD_WHOLE = 100_000
"""Numbers up to which every rank holds a tensor whole: DeepSpeed's stage3_param_persistence_threshold."""
GATHERED_AT_ONCE, SUMMED_AT_ONCE = 1_000_000_000, 500_000_000
"""Most weights that a rank has fetched from the others, and most gradients that wait to be added up, without `trainer.bucket`."""


class ShorterConfig(Strict):
    """A merge before `opd merge --extend` made it longer."""

    at: int = Field(..., ge=1)
    """The step after which it was made longer."""
    steps: int = Field(..., ge=1)
    """Optimiser steps of the whole merge until then."""


class TrainerConfig(Strict):
    zero_stage: Literal[3] = 3
    """DeepSpeed ZeRO stage. Only 3 is supported: parameters, gradients and optimiser state are sharded over the ranks."""
    ranks: int = Field(2, ge=1)
    """Data-parallel trainer processes. On GPUs each needs one of its own: on a shared GPU set 1."""
    dtype: DType = "float32"
    """Compute type; bfloat16 keeps float32 master weights."""
    steps: int = Field(..., ge=1)
    """Optimiser steps of the whole merge."""
    samples_per_step: int = Field(..., ge=1)
    """Responses in one optimiser step, over all domains; a multiple of `rollout.n`."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0 to `lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to `min_lr_ratio` of `lr` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine decay end, as a share of `lr`; at 0 they end after the last step, which would train nothing."""
    extended: tuple[ShorterConfig, ...] = ()
    """Written by `opd merge --extend` under a linear or cosine decay: the shorter merges that this one was, the oldest first. Up
    to its step `at` each decays to its own end."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment: gradients below it give small steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = Field(4096, ge=16)
    """Prompt and response tokens of one forward pass of a rank, give or take one response. A prompt that several responses
    share counts once where it is computed once."""
    head_memory: ByteSize = Field("1GiB", validate_default=True, gt=0)
    """Memory for teachers' output heads on each rank. The least recently used are dropped first; those that a micro-batch
    needs always stay."""
    grad_accum_dtype: DType = "float32"
    """Type in which gradients are summed over micro-batches and ranks; bfloat16 saves two bytes a parameter and loses
    about 1 % of the gradient over 128 micro-batches."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Fuse what the model's layers do between matrix products with torch.compile. It takes half a minute of the first step. Without
    a C++ compiler layers run as they are, with one warning."""
    bucket: int | None = Field(None, ge=1)
    """Numbers of weights that a rank fetches from the others at a time, and of gradients that it keeps until the ranks add
    them up; a single weight may be larger. Less memory on each rank, more messages. Default: 1,000,000,000 weights and
    500,000,000 gradients."""

    @model_validator(mode="after")
    def _longer_each_time(self) -> TrainerConfig:
        steps = [*(one.at for one in self.extended), self.steps]
        totals = [*(one.steps for one in self.extended), self.steps]
        if steps != sorted(steps) or totals != sorted(set(totals)) or any(one.at > one.steps for one in self.extended):
            shown = ", ".join(f"{one.steps} steps until step {one.at}" for one in self.extended)
            raise PydanticCustomError(
                "extended",
                "merges that became longer each time, up to trainer.steps",
                {"where": "trainer.extended", "found": f"{shown}, with trainer.steps {self.steps}"},
            )
        return self

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _sharded_weights(cls, stage: Any) -> Any:
        if stage != 3:
            raise PydanticCustomError(
                "zero_stage",
                "3: checkpoints, weight push and export are made for ranks that hold a shard of every weight, and under "
                "stages 1 and 2 each holds the whole model",
            )
        return stage


class PartialRolloutConfig(Strict):
    cut_at: int = Field(..., ge=1)
    """A response that has so many tokens more and has not ended is cut: the next weights carry it on, and a later step trains
    it. Fewer than `rollout.max_new_tokens`."""
    cuts: int = Field(1, ge=1)
    """Cuts of one response at most; then it is written to its end. Its oldest tokens are trained one push later for each cut."""


class ScheduleConfig(Strict):
    mode: Literal["sync", "one_step_off"] = "sync"
    """`sync`: every sample is trained by the very weights that wrote it. `one_step_off`: the responses of the next step are
    written while a step is scored and trained, by the weights before it. That is faster where the rollout engine does not
    share cores or GPUs with the other roles."""
    max_staleness: int | None = Field(None, ge=0)
    """Pushes that may lie between the writing of a token and its training; the run stops before it trains an older one.
    Default: 0 with `sync`, 1 with `one_step_off`, and one more for each of `partial_rollout.cuts`."""
    partial_rollout: PartialRolloutConfig | None = None
    """Cut long responses, so that the others do not wait for them. Needs `one_step_off` and an objective that is an exact
    divergence; episodes are not cut. Default: every response is written to its end."""
    score_early: int | None = Field(None, ge=1)
    """Teachers score so many responses or episodes of a domain as soon as these are written, while others still are; which ones go
    together follows from the prompts. Needs `sync`. For teachers that do not share cores or GPUs with the rollout engine. Default:
    they begin when all of the step is written."""
    overlap: bool | Literal["auto"] = "auto"
    """Train while teachers still score; the result is the same. `auto` does so where trainer and teachers do not share cores,
    that is if either has GPUs or the teachers are served elsewhere. On the same cores both get slower."""

    @model_validator(mode="after")
    def _bound_that_the_mode_can_keep(self) -> ScheduleConfig:
        if self.mode == "one_step_off" and self.max_staleness == 0:
            raise PydanticCustomError(
                "max_staleness",
                "at least 1: `one_step_off` trains on what the weights before wrote; set schedule.mode to sync for 0",
                {"where": "schedule.max_staleness", "found": "0 with schedule.mode one_step_off"},
            )
        return self

    @model_validator(mode="after")
    def _scored_early_only_in_its_own_step(self) -> ScheduleConfig:
        if self.score_early is not None and self.mode != "sync":
            raise PydanticCustomError(
                "score_early",
                "schedule.mode sync as well, or nothing: what is written ahead is scored once its step begins",
                {"where": "schedule.score_early", "found": f"{self.score_early} with schedule.mode {self.mode}"},
            )
        return self

    @model_validator(mode="after")
    def _cuts_that_the_bound_allows(self) -> ScheduleConfig:
        if self.partial_rollout is None:
            return self
        oldest = 1 + self.partial_rollout.cuts
        if self.mode == "sync":
            raise PydanticCustomError(
                "partial_rollout",
                "schedule.mode one_step_off as well: with `sync` there are no other weights that could carry a response on",
                {"where": "schedule.partial_rollout", "found": "a mapping with schedule.mode sync"},
            )
        if self.max_staleness is not None and self.max_staleness < oldest:
            raise PydanticCustomError(
                "max_staleness",
                "at least {oldest}: the first tokens of a response that is cut as often as it may be are so old; or fewer cuts",
                {"oldest": oldest, "where": "schedule.max_staleness", "found": self.max_staleness},
            )
        return self


class SyncConfig(Strict):
    kind: Literal["shared_memory", "network"] = "shared_memory"
    """How new weights reach the rollout engines. `shared_memory`: as safetensors in shared memory; `opd merge`, the trainer's rank 0
    and all engines are on one machine. `network`: in buckets through Ray's object store, to engines on any machine."""
    tolerance: float | None = Field(None, gt=0)
    """The run stops if the mean |trainer - engine| log-prob gap is larger than this, in nats, over the probe tokens after a
    push or over a step's sampled tokens. Default: 0.02 where both compute in float32, 0.15 where one does not; after a push three
    times the gap before the first step, if that is more. Before the first step both hold the same files: the gap is rounding, and a larger
    one than the tolerance ends the run."""
    probe_tokens: int = Field(64, ge=8)
    """Fixed tokens of prompts that both sides score before the first step and after every push."""


class CheckpointConfig(Strict):
    every: int = Field(25, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of steps divisible by this are never deleted; 0: no checkpoint is exempt."""


class LoggingConfig(Strict):
    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard/` in the run directory."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project to log to as well; needs the package wandb."""
    mlflow: str | None = Field(None, min_length=1)
    """MLflow tracking URI to log to as well, e.g. `sqlite:///mlflow.db`; needs the package mlflow or mlflow-skinny."""


class ClusterConfig(Strict):
    address: str = "local"
    """`local` starts Ray on this machine; else a Ray cluster's address."""
    rollout_gpus: float = Field(0, ge=0)
    """GPUs for each rollout worker, times `rollout.tensor_parallel_size`."""
    teacher_gpus: float = Field(0, ge=0)
    """GPUs for each scoring worker, times `teachers.tensor_parallel_size`. With `teachers.device_map` it may be several."""
    trainer_gpus: float = Field(0, ge=0)
    """GPUs for each trainer rank."""
    placement: PlacementConfig = PlacementConfig()
    """On which nodes of the cluster the workers of each role go, see docs/cluster.md; default: where Ray finds room."""
    max_restarts: int = Field(3, ge=0)
    """How often a merge may start all its workers again, from its last checkpoint, because one died. A rollout or scoring
    worker that dies is first started again alone, once a step."""
    start_timeout_s: float = Field(300, gt=0)
    """Deadline for a worker to start and load its model."""
    phase_timeout_s: float = Field(3600, gt=0)
    """Deadline for one phase of a step (rollout, score, train, sync) or one evaluation."""

    @model_validator(mode="after")
    def _one_machine_has_one_place(self) -> ClusterConfig:
        if self.address == "local" and self.placement != PlacementConfig():
            raise PydanticCustomError(
                "placement",
                "nothing with cluster.address local, which is one machine: remove it, or set cluster.address to a Ray cluster's",
                {
                    "where": "cluster.placement",
                    "found": ", ".join(self.placement.model_dump(exclude_defaults=True)),
                },
            )
        return self
