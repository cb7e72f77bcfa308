"""Compilation of layers, so that torch.compile fuses the operations between their matrix products.

In eager mode norms, rotations, gates and the softmax of attention each read and write all activations. Measured with SmolLM2
in bfloat16 on one core: matrix products were 31 % of a forward and backward pass, torch's attention kernel 24 %.

Each layer is compiled by itself, not the model as a whole, so a model compiles as fast as one layer.
The hooks by which DeepSpeed gathers a layer's weights (`opd.train.gathered_layers`) stay outside of the compiled code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opd.machine.compiler import can_compile
from opd.train.gathered_layers import list_decoder_layers

EAGER_ATTENTION_TOKENS = 512
"""Longest row, in tokens, with which a CPU computes attention step by step, fused by torch.compile, in place of torch's own kernel.
Step by step was faster: 298 against 256 tokens/s with rows of 208 tokens, and 270 against 247 with rows of 336. Longer rows were
not timed; the memory for their scores grows with the square of the length."""


def compile_layers(lm: nn.Module) -> None:
    """Compile every layer, once for rows of all lengths. Without a C++ compiler, warn once and leave the layers as they are."""
    if not can_compile("trainer.compile", "layers run"):
        return
    for layer in list_decoder_layers(lm):
        compiled: Any = torch.compile(layer.forward, dynamic=True)
        layer.forward = compiled
