"""Find how much LoRA trains of a student, before any worker starts. Its targets are tried on a model without weights."""

from __future__ import annotations

from experts.model_dir import ModelInfo
from opd.config import PipelineConfig
from opd.models.lora import LoraSize


def size_of_lora(config: PipelineConfig, student: ModelInfo) -> LoraSize | None:
    """Return how much of the student is trained and pushed; None without `student.lora`.

    `refuse_untrainable` has accepted the student before. Raises: ConfigError for targets that it does not have.
    """
    import torch
    from transformers import AutoConfig

    from opd.models.weights import Naming
    from opd.train.lora import add_adapters, count_lora_weights
    from pipelines.specs import lora_options

    options = lora_options(config)
    if options is None:
        return None
    model_config = AutoConfig.from_pretrained(student.path, trust_remote_code=False)
    lm = Naming(model_config, torch.float32).model
    add_adapters(lm, options)
    return count_lora_weights(lm)
