"""DeepSpeed's own settings that a user may add to the trainer's, under DeepSpeed's names. Those that would break a promise are refused.

The rest of DeepSpeed's configuration follows from keys of ours; `opd.train.zero` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.auto import AUTO
from opd.settings.strict import Strict

_OTHER_BITS = (
    "weights and gradients that are rounded on their way would train another model than the one that is exported"
)
_BUCKET = "trainer.bucket"
_DECIDED_BY = {
    "train_batch_size": "trainer.samples_per_step",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "bf16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "data_types": "trainer.grad_accum_dtype",
    "optimizer": "trainer.lr, trainer.weight_decay and trainer.adam_*",
    "scheduler": "trainer.lr_scheduler_type",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "stage3_prefetch_bucket_size": _BUCKET,
    "stage3_max_live_parameters": _BUCKET,
    "stage3_max_reuse_distance": _BUCKET,
    "reduce_bucket_size": _BUCKET,
}
"""DeepSpeed's key -> key of ours that decides it."""
_REFUSED = {
    "zero_quantized_weights": _OTHER_BITS,
    "zero_quantized_nontrainable_weights": _OTHER_BITS,
    "zero_quantized_gradients": _OTHER_BITS,
    "compression_training": _OTHER_BITS,
    "stage3_param_persistence_threshold": "which weights stay whole decides how layers are gathered, and that is proven for one bound",
}
"""DeepSpeed's key -> reason for which it is refused."""


class _DeepSpeedSection(Strict):
    PATH: ClassVar[str]
    """Path of the section in a pipeline."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        """Leave out what says no more than our own keys do, and refuse keys that contradict them. Pydantic calls this before
        `Strict` looks for unknown keys."""
        if not isinstance(data, Mapping):
            return data
        # A configuration written for Hugging Face's trainer has `auto` where that decides; here our own keys decide.
        settings = {key: value for key, value in data.items() if value != AUTO and (key, value) != ("stage", 3)}
        for key, value in settings.items():
            if key in _DECIDED_BY:
                raise _deepspeed_error(
                    f"{cls.PATH}.{key}", value, f"{_DECIDED_BY[key]}, which decides this; remove it here"
                )
            if key in _REFUSED:
                raise _deepspeed_error(f"{cls.PATH}.{key}", value, f"nothing: {_REFUSED[key]}; remove it")
            if key == "stage":
                raise _deepspeed_error(
                    f"{cls.PATH}.{key}", value, "3, or nothing: only with stage 3 does no rank hold the whole model"
                )
        return settings


class OffloadConfig(Strict):
    device: Literal["none", "cpu"] = "none"
    """`cpu`: the machine's memory, in place of the GPU's."""
    pin_memory: bool = True
    """Lock that memory, for faster copies."""


class ZeroOptimizationConfig(_DeepSpeedSection):
    PATH = "trainer.deepspeed.zero_optimization"

    overlap_comm: bool | None = None
    """Sum gradients over ranks while others are computed. Default: on GPUs."""
    zero_hpz_partition_size: int = Field(1, ge=1)
    """Ranks that hold a second copy of the weights together, usually those of one machine: weights are then gathered within it.
    Divides `trainer.ranks`."""
    offload_optimizer: OffloadConfig = OffloadConfig()
    """Place of the optimiser's state and the gradients, and of AdamW's computation."""
    offload_param: OffloadConfig = OffloadConfig()
    """Place of a rank's part of the weights; a layer's weights are copied to the GPU while it computes."""


class DeepSpeedConfig(_DeepSpeedSection):
    PATH = "trainer.deepspeed"

    zero_optimization: ZeroOptimizationConfig = ZeroOptimizationConfig()
    """DeepSpeed's section on ZeRO; the stage is always 3."""
    communication_data_type: Literal["fp32", "bf16"] | None = None
    """Type in which ranks add up gradients. Default: that of `trainer.grad_accum_dtype`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as DeepSpeed reads them."""
        return self.model_dump(exclude_defaults=True)


def _deepspeed_error(key: str, value: object, expected: str) -> PydanticCustomError:
    return PydanticCustomError("deepspeed", "{wanted}", {"wanted": expected, "where": key, "found": str(value)})
