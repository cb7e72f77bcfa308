"""Sequence parallelism (DeepSpeed's Ulysses): ranks of a group share every row of a micro-batch, and each has some of its columns.

    columns of a row     | rank 0 | rank 1 | ...     embedding, norms, products with weights, loss: a token needs no other token
    attention            all columns of some heads   an exchange before it gives a rank all columns of its heads, another after it
                                                     gives every rank all heads of its columns again

So a rank holds a part of the activations of a row, and rows may be longer than one rank has memory for. Every row is a line of its
own, padded on its right: in a causal model padding changes nothing before it, so attention needs no mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from opd.models.layouts import Packed
from opd.records.types import Origin, Rollout, Span
from opd.stream.schema import TargetRow

_UNTRAINED: dict[Origin, Origin] = {"policy": "masked", "blocked": "masked", "taught": "teacher"}
"""Origin of trained tokens -> origin of tokens that the same one wrote, without loss."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The columns of a rank: part `index` of `count` parts of equal width."""

    index: int
    count: int

    def columns(self, width: int) -> range:
        """Return this rank's columns of a line with `width` tokens, which is padded until all parts are equal."""
        part = -(-width // self.count)
        return range(self.index * part, (self.index + 1) * part)

    def select_columns(self, packed: Packed) -> Packed:
        """Return this rank's columns of rows that are padded on their right. `offsets` of the result are of no use."""
        height, width = packed.input_ids_B_T.shape
        columns = self.columns(width)
        ids_B_T = nn.functional.pad(packed.input_ids_B_T, (0, len(columns) * self.count - width))
        position_T = torch.arange(columns.start, columns.stop, device=ids_B_T.device)
        return Packed(
            input_ids_B_T=ids_B_T[:, columns.start : columns.stop].contiguous(),
            position_ids_B_T=position_T.expand(height, -1).contiguous(),
            offsets=(),
        )

    def find_own_columns(self, flat_N: Tensor, width: int) -> Tensor:
        """Return flat indices into this rank's columns, for flat indices (row * width + column) into whole lines."""
        columns = self.columns(width)
        return flat_N // width * len(columns) + flat_N % width - columns.start

    def select_tokens(self, row: TargetRow, width: int) -> TargetRow:
        """Return the row with only those trained tokens that this rank's columns predict; `width`: tokens of the padded line."""
        columns, rollout = self.columns(width), row.rollout
        # The column before a token predicts it. The first token of the response has position 0.
        first = columns.start - len(rollout.prompt_ids) + 1
        positions = rollout.trained_positions
        part = slice(bisect_left(positions, first), bisect_left(positions, first + len(columns)))
        own = _train_only(rollout, range(first, first + len(columns)))
        return replace(row, rollout=own, answer=row.answer.select_tokens(part, len(positions)))


def _train_only(rollout: Rollout, positions: range) -> Rollout:
    """Return the rollout with only the tokens at these positions of the response trained. Numbers of turns stay."""
    spans: list[Span] = []
    start = 0
    for span in rollout.spans:
        stop = start + span.length
        if span.trained:
            cuts = [start, *(min(max(cut, start), stop) for cut in (positions.start, positions.stop)), stop]
            origins = (_UNTRAINED[span.origin], span.origin, _UNTRAINED[span.origin])
            spans += [
                replace(span, length=end - begin, origin=origin)
                for begin, end, origin in zip(cuts, cuts[1:], origins, strict=False)
            ]
        else:
            spans.append(span)
        start = stop
    return replace(rollout, spans=tuple(spans))


class SequenceGroup:
    """The group of ranks that share rows with this one: attention exchanges heads for columns in all passes, but in `attend_alone`."""

    def __init__(self, rank: int, world_size: int, size: int, timeout_s: float) -> None:
        """Make the groups of `size` consecutive ranks, and put the exchange around torch's attention. All ranks do this together."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        groups = [
            torch.distributed.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout_s))
            for first in range(0, world_size, size)
        ]
        self.shard = Shard(rank % size, size)
        self._group = groups[rank // size]
        self._attend_alone = ALL_ATTENTION_FUNCTIONS["sdpa"]
        self._attend_together = cache(self._build_attention)
        self._alone = False
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend

    @contextmanager
    def attend_alone(self) -> Iterator[None]:
        """Within, every rank computes whole rows by itself."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def gather_states(self, module: Any, packed: Packed) -> Tensor:
        """Return [B*T, D] the last hidden states of padded rows, computed by all ranks of the group together. Without gradients."""
        height, width = packed.input_ids_B_T.shape
        own_B_T_D = module.compute_hidden_states(self.shard.select_columns(packed)).unflatten(0, (height, -1))
        parts = [torch.empty_like(own_B_T_D) for _ in range(self.shard.count)]
        torch.distributed.all_gather(parts, own_B_T_D.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)[:, :width].flatten(0, 1)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Attend as transformers' `sdpa` does; query, key and value are [B, heads, T, width of a head]."""
        if self._alone:
            return self._attend_alone(module, query, key, value, mask, *args, **kwargs)
        attention = self._attend_together(len(query), query.shape[1], key.shape[1], query.shape[3])
        return attention(module, query, key, value, None, *args, **kwargs)

    def _build_attention(self, batch_size: int, heads: int, key_heads: int, head_size: int) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF(
            self._attend_alone,
            batch_size=batch_size,
            attn_head_count=heads,
            attn_head_size=head_size,
            kv_head_count=key_heads,
            num_hidden_layers=1,  # read by a mode for debugging alone
            process_group=self._group,
            seq_length_is_variable=True,
        )


def select_shard(samples: Sequence[tuple[TargetRow, ...]], shard: Shard) -> list[tuple[TargetRow, ...]]:
    """Return the samples of a micro-batch with the tokens that this rank trains, of all rows in the padded layout."""
    width = max((len(rows[0].rollout.prompt_ids) + len(rows[0].rollout.response_ids) for rows in samples), default=1)
    return [tuple(shard.select_tokens(row, width) for row in rows) for rows in samples]
