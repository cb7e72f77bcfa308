"""The shape of a model: its matrices, which of them a token passes, and what attention keeps and compares.

D stands for the hidden width, L for layers, V for ids, H for heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
    kv_values: int
    """Values that a key-value cache has for one token, in all layers."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read the sizes from the header of the weights, as if a token passed every matrix: a mixture without formulas gets too much."""
        matrices = [
            (name, tensor.shape)
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and not name.endswith((*EMBEDDINGS, *HEADS))
        ]
        sizes: Counter[str] = Counter()
        for name, tensor in tensors.items():
            sizes[re.sub(r"\.experts\.\d.*", "", name)] += tensor.numel
        return cls(
            inside=sum(outputs + inputs for _, (outputs, inputs) in matrices),
            blocks=max(1, len({part for name in sizes for part in name.split(".") if part.isdigit()})),
            widest=max((side for _, shape in matrices for side in shape), default=0),
            largest=max(sizes.values(), default=0),
            kv_values=2 * sum(shape[0] for name, shape in matrices if name.endswith("k_proj.weight")),
        )

    def activation_width(self, hidden_size: int, *, checkpointing: bool) -> int:
        """Return the values that the backward pass needs for one token: inputs and outputs of every linear layer.

        With checkpointing, the hidden state between blocks and the inside of one block.
        """
        return self.blocks * hidden_size + self.inside // self.blocks if checkpointing else self.inside


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePart:
    """Matrices of one kind: one in each of some layers, or as many as a mixture has experts."""

    name: str
    """Name of the module, e.g. `q_proj`."""
    inputs: int
    outputs: int
    layers: int
    """Number of layers with it."""
    stored: int = 1
    """Matrices in a layer."""
    used: int = 1
    """Number of these that a token passes."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.stored * self.layers

    @property
    def active(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.inputs * self.outputs * self.used * self.layers

    def numbers_read(self, tokens: float) -> float:
        """Return the numbers that a pass over so many tokens reads, if a mixture's router spreads them evenly."""
        return self.parameters * (1 - (1 - self.used / self.stored) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes of one layer's attention beside its matrices."""

    parts: tuple[ShapePart, ...]
    vectors: int
    """Biases and norms, numbers in all layers."""
    pair: int
    """Multiplications for one token that looks at one other, in all layers: queries with keys, weights with values."""
    kv_values: int
    """Values that the cache keeps for one token, in all layers."""
    kv_split: int
    """Into how many parts the devices of a machine can cut the cache; beyond that they hold it several times."""
    window: int | None = None
    """Most tokens that a token looks at; None: all before it."""
    index_pair: int = 0
    """Multiplications for one token that an indexer compares with one other, in all layers, however far back."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder model."""

    kind: str
    """`model_type` of its config."""
    layers: int
    hidden: int
    vocab: int
    tied: bool
    context: int | None
    attention: Attention
    feed_forward: tuple[ShapePart, ...]

    @cached_property
    def parts(self) -> tuple[ShapePart, ...]:
        """Every kind of matrix but embedding and output head."""
        return (*self.attention.parts, *self.feed_forward)

    @property
    def head(self) -> int:
        """Numbers of the output head."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Every number of the model; a tied head counts once."""
        norms = (2 * self.layers + 1) * self.hidden
        return sum(p.parameters for p in self.parts) + self.attention.vectors + norms + self._heads

    @property
    def _heads(self) -> int:
        return self.head * (1 if self.tied else 2)

    @cached_property
    def active(self) -> int:
        """Numbers of the body that a token is multiplied with: no embedding, no output head."""
        return sum(p.active for p in self.parts)

    @property
    def tensors(self) -> int:
        """Tensors that a push sends; a mixture's experts lie in one."""
        return sum(p.layers for p in self.parts) + 2 * self.layers + (2 if self.tied else 3)

    def forward(self, tokens: float, context: float) -> float:
        """Return the FLOPs of the body for so many tokens, each of which looks at `context` others on average."""
        looked_at = min(context, self.attention.window or context)
        pairs = self.attention.pair * looked_at + self.attention.index_pair * context
        return 2 * tokens * (self.active + pairs)

    def numbers_read(self, tokens: float) -> float:
        """Return the numbers that the matrices of one pass over so many tokens read, the output head included."""
        return sum(p.numbers_read(tokens) for p in self.parts) + self.head

    @property
    def _experts(self) -> int:
        """Numbers of a layer's routed experts, which lie in one module."""
        return sum(p.parameters // p.layers for p in self.parts if p.stored > 1)

    @property
    def body(self) -> Body:
        """Return the facts that the memory of activations depends on: a token passes `used` matrices of each kind."""
        return Body(
            inside=sum((p.inputs + p.outputs) * p.used * p.layers for p in self.parts),
            blocks=self.layers,
            widest=max(side for p in self.parts for side in (p.inputs, p.outputs)),
            largest=max(self.head, *(p.parameters // p.layers for p in self.parts), self._experts),
            kv_values=self.attention.kv_values,
        )

    def lora_numbers(self, rank: int, targets: Iterable[str] | None) -> tuple[int, int]:
        """Return (numbers of the adapters, numbers of the matrices that they change); `targets` None: all linear modules but the
        output head and routers."""
        adapted = [(p, self._adapted_layers(p, targets)) for p in self.parts]
        adapters = sum(rank * (p.inputs + p.outputs) * p.stored * layers for p, layers in adapted)
        return adapters, sum(p.parameters // p.layers * layers for p, layers in adapted)

    def _adapted_layers(self, part: ShapePart, targets: Iterable[str] | None) -> int:
        """Return the layers whose matrix of this kind gets an adapter; a target is the end of a module's full name."""
        if targets is None:
            return 0 if part.name == "router" else part.layers
        block = "self_attn" if part in self.attention.parts else "mlp"
        ends = [f".{target}" for target in targets if part.name in (target, target.rpartition(".")[2])]
        names = (f".model.layers.{layer}.{block}.{part.name}" for layer in range(part.layers))
        return sum(name.endswith(tuple(ends)) for name in names)
