"""Scored rows to the tensors of one micro-batch.

Shapes: B packed rows, T columns, N response tokens of the micro-batch in row order, D a teacher's hidden width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.errors import RunError
from opd.layouts import LAYOUTS, Packed, predict_positions
from opd.losses.blocks import Block, MixtureBlock, SampledBlock, TeacherBlock, TopKBlock
from opd.stream.heads import Head
from opd.stream.schema import TargetRow


@dataclass(frozen=True, slots=True)
class HiddenRun:
    """Consecutive response tokens scored by teachers of the same heads and weights."""

    heads: tuple[str, ...]
    """One for each teacher of the tokens; several make a mixture."""
    weights: tuple[float, ...]
    hidden: tuple[Tensor, ...]
    """[N, D] for each teacher, D its own width."""

    def block(self, heads: Mapping[str, Head]) -> Block:
        teachers = [
            TeacherBlock(hidden_N_D, heads[key].weight_V_D, heads[key].rule)
            for key, hidden_N_D in zip(self.heads, self.hidden, strict=True)
        ]
        return teachers[0] if len(teachers) == 1 else MixtureBlock(tuple(teachers), self.weights)


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Consecutive response tokens with the teachers' (weighted) log-prob of each."""

    logprob_N: Tensor
    baseline_N: Tensor | None

    def block(self, heads: Mapping[str, Head]) -> Block:
        return SampledBlock(self.logprob_N, self.baseline_N)


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


Scored = tuple[TargetRow, ...]
"""One sample as its teachers scored it: a row for each, in the order of their names."""


def gather_samples(rows: Iterable[TargetRow]) -> dict[str, Scored]:
    """Sample id -> its rows. Raises: RunError if a sample's teachers are not all there, once each."""
    by_sample: dict[str, list[TargetRow]] = defaultdict(list)
    for row in rows:
        by_sample[row.sample_id].append(row)
    for sample_id, mine in by_sample.items():
        names = [row.teacher for row in mine]
        if len(set(names)) != len(names) or abs(sum(row.weight for row in mine) - 1) > 1e-4:
            parts = ", ".join(f"{row.teacher} {row.weight:.3g}" for row in mine)
            raise RunError(f"sample {sample_id}: scored by {parts}; the weights of its teachers do not add up to 1")
    return {i: tuple(sorted(mine, key=lambda row: row.teacher)) for i, mine in by_sample.items()}


def leave_one_out(samples: Mapping[str, Scored]) -> dict[str, float]:
    """Sample id -> mean of log q(y) - log mu(y) over the trained tokens of the step's other samples of its domain.

    It does not depend on the sample's own response, so it takes nothing from the gradient's mean; 0 where there is no
    other. mu is what the rollout engine said, so it is known before the student's forward pass.
    """
    sums: dict[str, tuple[float, int]] = {}
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for sample_id, scored in samples.items():
        first = scored[0]
        ratios = [
            q - mu
            for q, mu, trained in zip(_sampled(scored), first.behaviour_logprobs, first.loss_mask, strict=True)
            if trained
        ]
        sums[sample_id] = (sum(ratios), len(ratios))
        total, count = totals[first.domain]
        totals[first.domain] = (total + sum(ratios), count + len(ratios))
    baselines = {}
    for sample_id, (mine, count) in sums.items():
        total, number = totals[samples[sample_id][0].domain]
        baselines[sample_id] = (total - mine) / (number - count) if number > count else 0.0
    return baselines


def micro_batch(
    samples: Sequence[Scored],
    payload: str,
    dtype: torch.dtype,
    baselines: Mapping[str, float] | None = None,
    layout: str = "packed",
) -> MicroBatch:
    """Tensors for these samples, which the caller ordered by teacher; `dtype` is that of the stream's hidden states.

    Without samples it is one padding token and no response token: a rank with nothing to do still has to run in step.
    """
    rows = [scored[0] for scored in samples]
    sequences = [[*r.prompt_ids, *r.response_ids] for r in rows] or [[0]]
    packed = LAYOUTS[layout](sequences)
    spans = [(len(r.prompt_ids), len(r.prompt_ids) + len(r.response_ids)) for r in rows]
    predict_N = predict_positions(packed, spans) if rows else torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        packed=packed,
        predict_N=predict_N,
        token_N=torch.tensor([t for r in rows for t in r.response_ids], dtype=torch.long),
        mask_N=torch.tensor([m for r in rows for m in r.loss_mask], dtype=torch.bool),
        behaviour_N=torch.tensor([x for r in rows for x in r.behaviour_logprobs], dtype=torch.float32),
        runs=_runs(samples, payload, dtype, baselines),
        row_lengths=tuple(len(r.response_ids) for r in rows),
        domains=tuple(r.domain for r in rows),
    )


def _runs(
    samples: Sequence[Scored], payload: str, dtype: torch.dtype, baselines: Mapping[str, float] | None
) -> tuple[Run, ...]:
    if not samples:
        return ()
    if payload == "sampled_logprobs":
        logprob_N = torch.tensor([x for scored in samples for x in _sampled(scored)], dtype=torch.float32)
        if baselines is None:
            return (SampledRun(logprob_N, None),)
        values = [baselines[s[0].sample_id] for s in samples for _ in s[0].response_ids]
        return (SampledRun(logprob_N, torch.tensor(values, dtype=torch.float32)),)
    if payload == "top_k":
        rows = [scored[0] for scored in samples]
        assert all(len(scored) == 1 for scored in samples), "top_k does not mix teachers"
        width = max(len(r.topk_ids) // max(1, len(r.response_ids)) for r in rows)
        ids_N_K = torch.tensor([x for r in rows for x in r.topk_ids], dtype=torch.long).view(-1, width)
        logprobs = torch.tensor([x for r in rows for x in r.topk_logprobs], dtype=torch.float32)
        return (TopKRun(ids_N_K, logprobs.view(-1, width)),)
    return _hidden_runs(samples, dtype)


def _sampled(scored: Scored) -> list[float]:
    """[R] sum_k w_k log q_k(y): of a single teacher its log-prob."""
    columns = [[row.weight * x for x in row.teacher_logprobs] for row in scored]
    return [sum(values) for values in zip(*columns, strict=True)]


def _hidden_runs(samples: Sequence[Scored], dtype: torch.dtype) -> tuple[HiddenRun, ...]:
    runs: list[tuple[tuple[tuple[str, float], ...], list[list[Tensor]]]] = []
    for scored in samples:
        kind = tuple((row.head, row.weight) for row in scored)
        if not runs or runs[-1][0] != kind:
            runs.append((kind, [[] for _ in scored]))
        for parts, row in zip(runs[-1][1], scored, strict=True):
            # bytearray copies: the stream's buffer is read-only shared memory, which torch does not accept silently.
            parts.append(torch.frombuffer(bytearray(row.hidden), dtype=dtype).view(-1, row.hidden_size))
    return tuple(
        HiddenRun(
            heads=tuple(head for head, _ in kind),
            weights=_normalised([weight for _, weight in kind]),
            hidden=tuple(torch.cat(parts) for parts in columns),
        )
        for kind, columns in runs
    )


def _normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights travel as float32, whose sum is 1 only to 1e-7."""
    return tuple(weight / sum(weights) for weight in weights)
