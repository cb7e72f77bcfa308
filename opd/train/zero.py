"""The DeepSpeed engine of one rank: ZeRO-3 around the student."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import nn

from opd.config.objectives import ObjectiveConfig
from opd.model_weights import attention_of
from opd.train.builds import clear_dead_locks
from opd.train.student import Student


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is started with; plain values, so they cross process boundaries."""

    model_dir: Path
    dtype: str
    world_size: int
    objective: ObjectiveConfig
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding."""
    temperature: float
    """At which responses are sampled."""
    adam_betas: tuple[float, float]
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    grad_accum_dtype: str
    """Type in which gradients are summed over micro-batches and ranks."""
    gradient_checkpointing: bool
    head_memory_bytes: int
    """Budget of the teachers' heads that stay on this rank."""
    timeout_s: float
    lends_memory: bool = False
    """Give what torch keeps of a GPU's memory back after each step: an engine on that GPU wakes up next."""


def start_engine(options: RankOptions) -> Any:
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules
    from transformers import AutoModelForCausalLM

    clear_dead_locks()
    if not torch.cuda.is_available():
        _same_sums_every_time()
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=options.timeout_s),
        verbose=False,
    )
    lm = AutoModelForCausalLM.from_pretrained(
        options.model_dir,
        dtype=getattr(torch, options.dtype),
        attn_implementation=attention_of(options.model_dir),
        trust_remote_code=False,
    )
    loss = options.objective
    known: dict[str, Any] = {"vocab_size": options.vocab_size, "temperature": options.temperature}
    student = Student(lm, loss.build(), chunk=loss.chunk, compiled=loss.compile, **known)
    _without_chance(student, options.gradient_checkpointing)
    optimizer = torch.optim.AdamW(
        parameter_groups(student, options.weight_decay), lr=0.0, betas=options.adam_betas, eps=options.adam_epsilon
    )
    together = gathered_together(lm)
    if together:
        set_z3_leaf_modules(lm, together)
    engine, *_ = deepspeed.initialize(model=student, optimizer=optimizer, config=_deepspeed_config(options))
    return engine


def _same_sums_every_time() -> None:
    """torch's CPU threads add the gradients of an index in the order in which they come; gpt-oss's experts are such sums, so
    a resume would not be bit for bit. For models without them this changes no bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would cost time


def gathered_together(lm: nn.Module) -> list[type[nn.Module]]:
    """Classes of layers of which all weights have to be whole while any part of them runs.

    Under ZeRO-3 a weight is whole only while its owner runs. Mamba, gated delta and LFM2 mixers read the weight of their
    short convolution without running it, and a list of experts runs those alone that a rank's tokens are routed to, while
    all ranks have to gather the same weights in the same order. The whole decoder layer then, not the mixer: DeepSpeed lets
    go of weights when the gradient of a module's input is there, and a mixer still needs some.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    def odd(module: nn.Module) -> bool:
        children = module.named_children()
        return any(isinstance(c, nn.Conv1d) or (n == "experts" and isinstance(c, nn.ModuleList)) for n, c in children)

    layers = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    return list({type(layer): None for layer in layers if any(odd(module) for module in layer.modules())})


def _without_chance(student: Student, gradient_checkpointing: bool) -> None:
    """No dropout, no router noise: the loss is that of the policy that wrote the tokens, and the engine has neither.

    Layers recompute their activations only in training mode; what they hold stays in evaluation mode.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    student.eval()
    if gradient_checkpointing:
        student.lm.gradient_checkpointing_enable()
        for module in student.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True


def parameter_groups(student: Student, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as usual: not on norms and biases."""
    params = list(student.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


_DEEPSPEED_NAME = {"float32": "fp32", "bfloat16": "bf16"}


def _deepspeed_config(options: RankOptions) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": _DEEPSPEED_NAME[options.grad_accum_dtype]},
        "communication_data_type": _DEEPSPEED_NAME[options.grad_accum_dtype],
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
