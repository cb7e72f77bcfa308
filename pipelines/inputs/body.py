"""The sizes of a model's layers that the memory of its activations depends on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from experts.model_dir import EMBEDDINGS, HEADS
from experts.safetensors_header import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A model without its embedding and its output head, but for `largest`."""

    inside: int
    """Inputs and outputs of every linear layer that a token passes, added up."""
    blocks: int
    """Layers."""
    widest: int
    """The largest side of a matrix; 0 without matrices."""
    largest: int
    """Numbers of the largest weight of the whole model: no rank gathers less at a time. The experts of a layer are one, because
    transformers keeps them in one tensor or module."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read the sizes from the header of the weights: a token passes every matrix."""
        matrices = [
            tensor.shape
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and not name.endswith((*EMBEDDINGS, *HEADS))
        ]
        sizes: Counter[str] = Counter()
        for name, tensor in tensors.items():
            sizes[re.sub(r"\.experts\.\d.*", "", name)] += tensor.numel
        return cls(
            inside=sum(outputs + inputs for outputs, inputs in matrices),
            blocks=max(1, len({part for name in tensors for part in name.split(".") if part.isdigit()})),
            widest=max((side for shape in matrices for side in shape), default=0),
            largest=max(sizes.values(), default=0),
        )

    def activation_width(self, hidden_size: int, *, checkpointing: bool) -> int:
        """Values that the backward pass needs for one token: inputs and outputs of every linear layer.

        With checkpointing, the hidden state between blocks and the inside of one block.
        """
        return self.blocks * hidden_size + self.inside // self.blocks if checkpointing else self.inside
