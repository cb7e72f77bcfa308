"""Scored rows to the tensors of one micro-batch.

Shapes: B packed rows, T columns, N response tokens of the micro-batch in row order, D a teacher's hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.losses.chunked import Block, SampledBlock, TeacherBlock, TopKBlock
from opd.packing import pack
from opd.stream.heads import Head
from opd.stream.schema import TargetRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Token sequences laid out for one forward pass."""

    input_ids_B_T: Tensor
    position_ids_B_T: Tensor
    """Restarts at 0 with each sequence; that is what keeps neighbours apart."""
    offsets: tuple[int, ...]
    """Flat index (row * T + column) of each sequence's first token."""


@dataclass(frozen=True, slots=True)
class HiddenRun:
    """Consecutive response tokens scored by teachers that share one output head."""

    head: str
    hidden_N_D: Tensor

    def block(self, heads: Mapping[str, Head]) -> Block:
        head = heads[self.head]
        return TeacherBlock(self.hidden_N_D, head.weight_V_D, head.rule)


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Consecutive response tokens with the teacher's log-prob of each."""

    logprob_N: Tensor

    def block(self, heads: Mapping[str, Head]) -> Block:
        return SampledBlock(self.logprob_N)


@dataclass(frozen=True, slots=True)
class TopKRun:
    """Consecutive response tokens with the teacher's K likeliest tokens at each."""

    ids_N_K: Tensor
    logprob_N_K: Tensor

    def block(self, heads: Mapping[str, Head]) -> Block:
        return TopKBlock(self.ids_N_K, self.logprob_N_K)


Run = HiddenRun | SampledRun | TopKRun


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What the student's forward pass and the loss need."""

    packed: Packed
    predict_N: Tensor
    """Flat index of the position whose logits predict response token n: the position before it."""
    token_N: Tensor
    """Sampled ids."""
    mask_N: Tensor
    """True where the token is trained."""
    behaviour_N: Tensor
    """Log-prob under the rollout engine."""
    runs: tuple[Run, ...]
    row_lengths: tuple[int, ...]
    """Response tokens of each row, in the order of `domains`."""
    domains: tuple[str, ...]


def pack_sequences(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay sequences side by side; columns after the last sequence of a row are sequences of their own."""
    packing = pack([len(s) for s in sequences])
    ids = torch.zeros(packing.num_rows, packing.width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    offsets = [0] * len(sequences)
    for slot in packing.slots:
        length = len(sequences[slot.index])
        ids[slot.row, slot.start : slot.start + length] = torch.tensor(sequences[slot.index])
        positions[slot.row, slot.start : slot.start + length] = torch.arange(length)
        offsets[slot.index] = slot.row * packing.width + slot.start
    return Packed(input_ids_B_T=ids, position_ids_B_T=positions, offsets=tuple(offsets))


def predict_positions(packed: Packed, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Flat positions that predict tokens [start, stop) of each sequence: one to the left of each token."""
    parts = [torch.arange(o + start - 1, o + stop - 1) for o, (start, stop) in zip(packed.offsets, spans, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def micro_batch(rows: Sequence[TargetRow], payload: str, dtype: torch.dtype) -> MicroBatch:
    """Tensors for these rows, which the caller ordered by teacher; `dtype` is that of the stream's hidden states.

    Without rows it is one padding token and no response token: a rank with nothing to do still has to run in step.
    """
    sequences = [[*r.prompt_ids, *r.response_ids] for r in rows] or [[0]]
    packed = pack_sequences(sequences)
    spans = [(len(r.prompt_ids), len(r.prompt_ids) + len(r.response_ids)) for r in rows]
    predict_N = predict_positions(packed, spans) if rows else torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        packed=packed,
        predict_N=predict_N,
        token_N=torch.tensor([t for r in rows for t in r.response_ids], dtype=torch.long),
        mask_N=torch.tensor([m for r in rows for m in r.loss_mask], dtype=torch.bool),
        behaviour_N=torch.tensor([x for r in rows for x in r.behaviour_logprobs], dtype=torch.float32),
        runs=_runs(rows, payload, dtype),
        row_lengths=tuple(len(r.response_ids) for r in rows),
        domains=tuple(r.domain for r in rows),
    )


def _runs(rows: Sequence[TargetRow], payload: str, dtype: torch.dtype) -> tuple[Run, ...]:
    if not rows:
        return ()
    if payload == "sampled_logprobs":
        return (SampledRun(torch.tensor([x for r in rows for x in r.teacher_logprobs], dtype=torch.float32)),)
    if payload == "top_k":
        width = max(len(r.topk_ids) // max(1, len(r.response_ids)) for r in rows)
        ids_N_K = torch.tensor([x for r in rows for x in r.topk_ids], dtype=torch.long).view(-1, width)
        logprobs = torch.tensor([x for r in rows for x in r.topk_logprobs], dtype=torch.float32)
        return (TopKRun(ids_N_K, logprobs.view(-1, width)),)
    return _hidden_runs(rows, dtype)


def _hidden_runs(rows: Sequence[TargetRow], dtype: torch.dtype) -> tuple[HiddenRun, ...]:
    runs: list[tuple[str, list[Tensor]]] = []
    for row in rows:
        if not runs or runs[-1][0] != row.head:
            runs.append((row.head, []))
        # bytearray copies: the stream's buffer is read-only shared memory, which torch does not accept silently.
        runs[-1][1].append(torch.frombuffer(bytearray(row.hidden), dtype=dtype).view(-1, row.hidden_size))
    return tuple(HiddenRun(head, torch.cat(parts)) for head, parts in runs)
