"""The plain sections of a pipeline: engines, steps, files and machines. Few rules hold between their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ByteSize, Field, model_validator
from pydantic_core import PydanticCustomError

from opd.config.deepspeed import DeepSpeedConfig
from opd.config.placement import PlacementConfig
from opd.settings.auto import AUTO, OrAuto
from opd.settings.strict import DType, Strict


class RolloutConfig(Strict):
    engine: str = Field("vllm", pattern=r"^(vllm|transformers|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """`vllm`; `transformers`, far slower, for families that vLLM does not serve here; or a class of yours as `module:Class`, see
    docs/python.md."""
    workers: int = Field(1, ge=1)
    """Rollout engines; prompts are dealt out among them."""
    dtype: DType = "float32"
    """Compute type of the engine."""
    n: int = Field(1, ge=1)
    """Responses to each prompt, see docs/pipelines.md#several-responses-a-prompt."""
    share_prefixes: bool | None = None
    """Compute once what prompts of a domain begin with alike. Default: only whole prompts, with `n` ≥ 2."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest response; shortened and counted where the context would overflow."""
    temperature: float = Field(1.0, ge=0.01)
    """1.0 samples from the student itself; vLLM takes 0.01 at least."""
    max_model_len: int = Field(512, ge=8)
    """Context in tokens, prompt and response; a prompt without room is quarantined."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gib: Annotated[int, Field(ge=1), OrAuto(1)] = Field(AUTO, validate_default=True)
    """Key-value cache of a CPU engine (each process), whole GiB. `auto`: for the longest sequences of a step, all at once,
    if memory allows."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU that an engine may take. Leave room for roles on the same GPU."""
    sleep: bool = False
    """Give GPU memory back while teachers score and the trainer trains, for roles on the same GPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Processes that share an engine's weights, on one machine; each has `cluster.rollout_gpus`. It has to divide the
    attention heads."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of a GPU engine's cache. Fewer bits hold more tokens and bend sampling, see docs/gpu.md."""
    num_speculative_tokens: int = Field(0, ge=0, le=16)
    """Guesses of the pipeline's `draft` that a pass of the engine checks; 0: the draft learns and writes nothing. What is
    sampled stays the student's, see docs/drafts.md."""
    engine_args: dict[str, Any] = {}
    """Other arguments of vLLM's `LLM`; those that bend sampling or have a key here are refused."""

    @property
    def shares_prefixes(self) -> bool:
        """True if rows of a step that begin with the same tokens are laid out as trees; see `opd.models.packing`."""
        return self.n > 1 if self.share_prefixes is None else self.share_prefixes


MAX_UNSHARDED = 100_000
"""A tensor of at most so many numbers is not sharded: every rank holds all of it (DeepSpeed's
stage3_param_persistence_threshold)."""
GATHERED_AT_ONCE, SUMMED_AT_ONCE = 1_000_000_000, 500_000_000
"""Defaults without `trainer.bucket`: the most weights that a rank has fetched from the others, and the most gradients that
wait to be added up."""


class ShorterConfig(Strict):
    """A merge before `opd merge --extend` made it longer."""

    at: int = Field(..., ge=1)
    """The step after which it was made longer."""
    steps: int = Field(..., ge=1)
    """Optimiser steps of the whole merge until then."""


class TrainerConfig(Strict):
    GONE: ClassVar[Mapping[str, Any]] = {"zero_stage": 3}

    ranks: int = Field(2, ge=1)
    """Trainer processes; on GPUs each needs one of its own."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share every row, for rows that one has no memory for; divides `ranks`. See docs/long_rows.md."""
    dtype: DType = "float32"
    """Compute type; bfloat16 keeps float32 master weights."""
    steps: int = Field(..., ge=1)
    """Optimiser steps of the whole merge."""
    samples_per_step: int = Field(..., ge=1)
    """Responses in one optimiser step, over all domains; a multiple of `rollout.n`."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, of `steps`, in which the rate rises from 0 to `lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to `min_lr_ratio` of `lr` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """End of linear and cosine decay, as a share of `lr`."""
    extended: tuple[ShorterConfig, ...] = ()
    """Written by `opd merge --extend`: the shorter merges that this one was, each with its own decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: Annotated[int, Field(ge=16), OrAuto(4096)] = Field(AUTO, validate_default=True)
    """Tokens of one forward pass of a rank, give or take one response. `auto`: 4096, up to 16384 on
    a GPU of this machine, as memory allows, and at least the longest row."""
    head_memory: Annotated[ByteSize, Field(gt=0), OrAuto(1 << 30)] = Field(AUTO, validate_default=True)
    """Memory for teachers' output heads on each rank; the least recently used go first. `auto`: for all heads, or for as
    many as memory allows."""
    grad_accum_dtype: DType = "float32"
    """Type in which gradients are summed; bfloat16 saves two bytes a parameter and loses about 1 % over 128
    micro-batches."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, a third more time."""
    activation_offloading: bool = False
    """On GPUs: keep the inputs of layers, from which activations are recomputed, in the machine's memory. Needs
    `gradient_checkpointing`. See docs/long_rows.md."""
    mlp_tile_tokens: int | None = Field(None, ge=1)
    """Most tokens that an MLP computes at a time: less memory, and its forward pass once more. Default: all of a micro-batch."""
    compile: bool = False
    """Compile the model's layers, see docs/pipelines.md#compiled-layers."""
    bucket: Annotated[int, Field(ge=1), OrAuto(100_000_000)] | None = None
    """Weights that a rank gathers, and gradients that it holds, at a time: fewer need less memory and more messages.
    Default: 1,000,000,000 and 500,000,000; `auto`: as many as memory allows."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """DeepSpeed's own settings, under its names, see docs/gpu.md#deepspeeds-own-settings."""

    @model_validator(mode="after")
    def _check_groups(self) -> TrainerConfig:
        sizes = {
            "trainer.deepspeed.zero_optimization.zero_hpz_partition_size": self.deepspeed.zero_optimization.zero_hpz_partition_size,
            "trainer.sequence_parallel_size": self.sequence_parallel_size,
        }
        for key, size in sizes.items():
            if self.ranks % size:
                raise PydanticCustomError(
                    "groups",
                    "a divisor of trainer.ranks: the ranks are divided into groups of so many",
                    {"where": key, "found": f"{size} with trainer.ranks {self.ranks}"},
                )
        return self

    @model_validator(mode="after")
    def _check_offloading(self) -> TrainerConfig:
        if self.activation_offloading and not self.gradient_checkpointing:
            raise PydanticCustomError(
                "offloading",
                "false, or true with trainer.gradient_checkpointing: only what activations are recomputed from is moved",
                {"where": "trainer.activation_offloading", "found": "true without trainer.gradient_checkpointing"},
            )
        return self

    @model_validator(mode="after")
    def _check_extensions(self) -> TrainerConfig:
        steps = [*(shorter.at for shorter in self.extended), self.steps]
        totals = [*(shorter.steps for shorter in self.extended), self.steps]
        if (
            steps != sorted(steps)
            or totals != sorted(set(totals))
            or any(shorter.at > shorter.steps for shorter in self.extended)
        ):
            shown = ", ".join(f"{shorter.steps} steps until step {shorter.at}" for shorter in self.extended)
            raise PydanticCustomError(
                "extended",
                "merges that became longer each time, up to trainer.steps",
                {"where": "trainer.extended", "found": f"{shown}, with trainer.steps {self.steps}"},
            )
        return self


class ScheduleConfig(Strict):
    GONE: ClassVar[Mapping[str, Any]] = {"score_early": None, "partial_rollout": None}

    mode: Literal["sync", "one_step_off"] = "sync"
    """`one_step_off`: write the next step's responses while this one is scored and trained, for an engine with cores or
    GPUs of its own. See docs/schedules.md."""
    max_staleness: int | None = Field(None, ge=0)
    """Weight pushes between the writing of a token and its training; the run stops at an older one. Default: 0 with
    `sync`, else 1."""
    overlap: bool | Literal["auto"] = "auto"
    """Train while teachers still score. `auto`: where they do not share cores, that is with GPUs or teachers
    elsewhere."""

    @model_validator(mode="after")
    def _check_staleness_bound(self) -> ScheduleConfig:
        if self.mode == "one_step_off" and self.max_staleness == 0:
            raise PydanticCustomError(
                "max_staleness",
                "at least 1: `one_step_off` trains on what the weights before wrote; set schedule.mode to sync for 0",
                {"where": "schedule.max_staleness", "found": "0 with schedule.mode one_step_off"},
            )
        return self


class SyncConfig(Strict):
    kind: Literal["auto", "shared_memory", "network", "direct"] = "auto"
    """Transport of weights to engines: `shared_memory` on one machine; `network` through Ray, to any; `direct` from GPU to
    GPU, to any. `auto`: `direct` if trainer and engines are on GPUs, else `shared_memory`."""
    tolerance: float | None = Field(None, gt=0)
    """The run stops at a larger mean gap of trainer and engine log-probs, nats. Default: 0.02 in float32, else 0.15;
    after a push at least three times the gap at the start."""
    probe_tokens: int = Field(64, ge=8)
    """Prompt tokens that both score at the start and after every push."""


class CheckpointConfig(Strict):
    every: int = Field(25, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_every: int = Field(0, ge=0)
    """Steps divisible by this keep their checkpoints for good; 0: none."""


class TargetLogConfig(Strict):
    keep: Literal["targets", "rollouts"] = "targets"
    """Data on disk for each step since the last checkpoint: responses and teachers' scores, or responses alone, which a
    resume scores again. See docs/resume.md#the-size-of-the-target-log."""
    max_size: ByteSize | None = Field(None, gt=0)
    """The next checkpoint comes early where the log would exceed this; one step is always logged. Default: the bytes of a
    checkpoint, or 64GiB if that is more."""


class LoggingConfig(Strict):
    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard/`."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project; needs the package wandb."""
    mlflow: str | None = Field(None, min_length=1)
    """MLflow tracking URI, such as `sqlite:///mlflow.db`; needs the package mlflow or mlflow-skinny."""


class ClusterConfig(Strict):
    address: str = "local"
    """`local`: start Ray on this machine; else a Ray cluster's address."""
    rollout_gpus: float = Field(0, ge=0)
    """GPUs for each rollout worker, times `rollout.tensor_parallel_size`. Below 1: a share, beside other roles,
    see docs/gpu.md#which-role-gets-which-gpu."""
    teacher_gpus: float = Field(0, ge=0)
    """GPUs for each scoring worker, times `teachers.tensor_parallel_size`; with `teachers.device_map` several. Below 1: a share."""
    trainer_gpus: float = Field(0, ge=0)
    """GPUs for each rank of the trainer, and of the critic. Below 1: a share; no two ranks of one model are on a GPU."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes for each role's workers, see docs/cluster.md; default: where Ray finds room."""
    max_restarts: int = Field(3, ge=0)
    """Times that a merge may restart all workers from its last checkpoint."""
    start_timeout_s: float = Field(300, gt=0)
    """Deadline for a worker to start and load its model."""
    phase_timeout_s: float = Field(3600, gt=0)
    """Deadline for one phase of a step, or one exam."""

    @model_validator(mode="after")
    def _check_placement(self) -> ClusterConfig:
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
