"""The shape of a model: its matrices, those of them that a token passes, and the numbers that attention keeps and compares.

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
    """The sizes of a model on which the memory of activations depends. Embedding and output head count in `largest` only."""

    inside: int
    """Inputs and outputs of every linear layer that a token passes, added up."""
    inside_mlps: int
    """Those of them that are in MLPs."""
    blocks: int
    """Layers."""
    widest: int
    """The largest side of a matrix; 0 without matrices."""
    largest: int
    """Parameters of the largest weight of the whole model: no rank gathers less at a time. The experts of a layer count as one weight,
    because transformers keeps them in one tensor or module."""
    mlp: int
    """Parameters of the matrices in the MLP of one layer."""
    kv_values: int
    """Values that a key-value cache has for one token, in all layers."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the sizes that the header of the weights tells, as if a token passed every matrix: for a mixture that is too much."""
        matrices = [
            (name, tensor.shape)
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and not name.endswith((*EMBEDDINGS, *HEADS))
        ]
        sizes: Counter[str] = Counter()
        for name, tensor in tensors.items():
            sizes[re.sub(r"\.experts\.\d.*", "", name)] += tensor.numel
        blocks = max(1, len({part for name in sizes for part in name.split(".") if part.isdigit()}))
        mlps = [shape for name, shape in matrices if ".mlp." in name]
        return cls(
            inside=sum(outputs + inputs for _, (outputs, inputs) in matrices),
            inside_mlps=sum(outputs + inputs for outputs, inputs in mlps),
            blocks=blocks,
            widest=max((side for _, shape in matrices for side in shape), default=0),
            largest=max(sizes.values(), default=0),
            mlp=sum(outputs * inputs for outputs, inputs in mlps) // blocks,
            kv_values=2 * sum(shape[0] for name, shape in matrices if name.endswith("k_proj.weight")),
        )

    def activation_width(self, hidden_size: int, *, checkpointing: bool, tiled: bool = False) -> int:
        """Return the number of values that the backward pass needs for one token: inputs and outputs of every linear layer. With
        checkpointing those inside of one block only; the hidden states between blocks are not counted. Of a tiled MLP only the input
        counts: the rest is there for one tile at a time.
        """
        inside = self.inside - self.inside_mlps + self.blocks * hidden_size if tiled else self.inside
        return inside // self.blocks if checkpointing else inside


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePart:
    """The matrices of one name in all layers: one in each, or as many as a mixture has experts."""

    name: str
    """Name of the module, e.g. `q_proj`."""
    inputs: int
    outputs: int
    layers: int
    """Number of layers that have the matrix."""
    stored: int = 1
    """Matrices in each of these layers."""
    used: int = 1
    """Matrices of a layer that a token passes."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.stored * self.layers

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.inputs * self.outputs * self.used * self.layers

    def numbers_read(self, tokens: float) -> float:
        """Return the parameters that a pass over `tokens` tokens reads, if a mixture's router spreads them evenly."""
        # A matrix is left out by a token with the chance 1 - used / stored, and read unless all tokens leave it out.
        return self.parameters * (1 - (1 - self.used / self.stored) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The matrices of attention and its other sizes, in all layers."""

    parts: tuple[ShapePart, ...]
    vectors: int
    """Parameters of biases and norms, in all layers."""
    pair: int
    """Multiplications for one token that looks at one other token, in all layers: queries with keys, and weights with values."""
    kv_values: int
    """Values that the cache keeps for one token, in all layers."""
    kv_split: int
    """Number of parts into which the devices of a machine can cut the cache; if there are more devices, several hold the same part."""
    window: int | None = None
    """Most tokens at which a token looks: the last ones of a sliding window, or those that an indexer chooses; None: all before it."""
    index_pair: int = 0
    """Multiplications of an indexer that compares one token with one other, in all layers; `window` does not limit it."""


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
        """Parameters of the output head."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        norms = (2 * self.layers + 1) * self.hidden
        return sum(p.parameters for p in self.parts) + self.attention.vectors + norms + self._heads

    @property
    def _heads(self) -> int:
        return self.head * (1 if self.tied else 2)

    @cached_property
    def active(self) -> int:
        """Parameters that a token is multiplied with, without embedding and output head."""
        return sum(p.active for p in self.parts)

    @property
    def tensors(self) -> int:
        """Number of tensors that a push sends; the experts of a mixture's layer lie in one."""
        return sum(p.layers for p in self.parts) + 2 * self.layers + (2 if self.tied else 3)

    def forward(self, tokens: float, context: float) -> float:
        """Return the FLOPs of the layers for `tokens` tokens, each of which looks at `context` others on average."""
        visible = min(context, self.attention.window or context)
        pairs = self.attention.pair * visible + self.attention.index_pair * context
        return 2 * tokens * (self.active + pairs)

    def numbers_read(self, tokens: float) -> float:
        """Return the parameters that one pass over `tokens` tokens reads from memory, the output head included."""
        return sum(p.numbers_read(tokens) for p in self.parts) + self.head

    @property
    def _experts(self) -> int:
        """Parameters of the routed experts of one layer, which lie in one module."""
        return sum(p.parameters // p.layers for p in self.parts if p.stored > 1)

    @property
    def body(self) -> Body:
        """Return the facts that the memory of activations depends on: a token passes `used` matrices of each kind."""
        return Body(
            inside=sum((p.inputs + p.outputs) * p.used * p.layers for p in self.parts),
            inside_mlps=sum((p.inputs + p.outputs) * p.used * p.layers for p in self.feed_forward),
            blocks=self.layers,
            widest=max(side for p in self.parts for side in (p.inputs, p.outputs)),
            largest=max(self.head, *(p.parameters // p.layers for p in self.parts), self._experts),
            mlp=sum(p.parameters for p in self.feed_forward) // self.layers,
            kv_values=self.attention.kv_values,
        )

    def lora_numbers(self, rank: int, targets: Iterable[str] | None) -> tuple[int, int]:
        """Return (parameters of adapters of this rank, parameters of the matrices that they change). `targets`: names of the modules
        that get an adapter; None: all linear modules but the output head and routers."""
        adapted = [(p, self._adapted_layers(p, targets)) for p in self.parts]
        adapters = sum(rank * (p.inputs + p.outputs) * p.stored * layers for p, layers in adapted)
        return adapters, sum(p.parameters // p.layers * layers for p, layers in adapted)

    def _adapted_layers(self, part: ShapePart, targets: Iterable[str] | None) -> int:
        """Return the number of layers whose matrix of this name gets an adapter; a target is the end of a module's full name."""
        if targets is None:
            return 0 if part.name == "router" else part.layers
        block = "self_attn" if part in self.attention.parts else "mlp"
        ends = [f".{target}" for target in targets if part.name in (target, target.rpartition(".")[2])]
        names = (f".model.layers.{layer}.{block}.{part.name}" for layer in range(part.layers))
        return sum(name.endswith(tuple(ends)) for name in names)
