"""The shape of a draft, in plain values that cross process boundaries: what its files, the trainer and an engine have to agree about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opd.config.draft import DraftKind

if TYPE_CHECKING:  # memory sums need shapes, and no torch
    from torch import Tensor

DraftWeights = dict[str, "Tensor"]
"""Name of a tensor in the draft's file -> its values."""

ARCHITECTURES: dict[DraftKind, str] = {"eagle3": "LlamaForCausalLMEagle3", "shared_kv": "SharedKvDraft"}
"""Kind of draft -> its name in `architectures`; vLLM knows the first."""

GROUP_VALUES = 1 << 24
"""Numbers of a tensor [windows, W, K, V] or [windows, H, W, L] that exist at one time: 64 MiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """Shape of the indexer of a draft's layer."""

    topk: int
    """Positions that it chooses."""
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Shape of a draft for one student."""

    model: Mapping[str, Any]
    """Values of the LlamaConfig of the draft's layer; `vocab_size` is the student's."""
    kind: DraftKind
    layers: tuple[int, ...]
    """Indices, from 0, of the student's layers whose outputs the draft reads."""
    vocab: tuple[int, ...]
    """The draft's tokens: ids of the student in rising order."""
    indexer: IndexerShape | None = None
    """None: guesses read all positions before."""

    def fits(self, student: Mapping[str, Any]) -> bool:
        """Return True if the draft can guess for a model with this config, in the form of `PreTrainedConfig.to_dict`."""
        text: Mapping[str, Any] = student.get("text_config") or student
        return (
            text["hidden_size"] == self.model["hidden_size"]
            and text["vocab_size"] == self.model["vocab_size"]
            and text["num_hidden_layers"] > max(self.layers)
        )
