"""Add new LoRA adapters to a base, to train them; also to a base without weights, to check the settings beforehand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from experts.spec import LoraSettings
from opd.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, lora: LoraSettings) -> PeftModel:
    """Return the model with new adapters. Raises: ConfigError if `target_modules` names modules that it does not have."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
    try:
        adapted: PeftModel = get_peft_model(model, config)
    except (ValueError, re.error) as error:  # re.error, because PEFT takes a text for a regular expression
        raise _no_modules_error(model, lora.target_modules, str(error)) from None
    return adapted


def _no_modules_error(model: PreTrainedModel, targets: str | list[str], reason: str) -> ConfigError:
    import torch

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return ConfigError.at(
        "lora.target_modules",
        found=f"{targets!r}: {reason}",
        wanted=f"modules of the base, such as {', '.join(sorted(linear))}, or all-linear",
        fix="correct the names",
    )
