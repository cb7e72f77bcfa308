"""Compilation of layers, so that torch.compile fuses the operations between their matrix products.

In eager mode norms, rotations, gates and the softmax of attention each read and write all activations. Measured with SmolLM2
in bfloat16 on one core: matrix products were 31 % of a forward and backward pass, torch's attention kernel 24 %.

One layer is compiled at a time, so a model compiles as fast as one layer. What is compiled is what is inside of the hooks
by which DeepSpeed gathers the layer's weights (`opd.train.gathered`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opd.machine.compiler import can_compile
from opd.train.gathered import list_decoder_layers

EAGER_ATTENTION_TOKENS = 512
"""Tokens of a row up to which a CPU computes attention step by step, fused by torch.compile, in place of torch's own kernel: 298
against 256 tokens/s with rows of 208 tokens, 270 against 247 with 336; longer ones were not timed. The memory for its scores
grows with the square of the length."""


def compile_layers(lm: nn.Module) -> None:
    """Compile every layer, for all shapes at once. Without a C++ compiler layers stay as they are, with one warning."""
    if not can_compile("trainer.compile", "layers run"):
        return
    for layer in list_decoder_layers(lm):
        compiled: Any = torch.compile(layer.forward, dynamic=True)
        layer.forward = compiled
