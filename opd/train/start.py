"""The start student (the student as the merge begins) as one more teacher: each rank scores with the student's adapters switched off.

LoRA leaves the student's own weights as they are, and the ranks hold them anyway. So no scoring worker has to load them, these
rows are neither sent nor logged, and their output head is the student's own. The scores become rows like those of any teacher
before the tensors of a micro-batch are made, so that later code treats all teachers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from opd.machine.devices import to_device
from opd.models.heads import OWN_HEAD
from opd.models.layouts import LAYOUTS, Packed, find_positions_before_trained
from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.records.types import Rollout
from opd.stream.schema import TargetRow
from opd.train.lora import without_adapters
from opd.train.student import Student


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTeacher:
    """Settings with which the ranks of a LoRA student score. They are plain values, because they cross process boundaries."""

    name: str
    """The teacher's name in rows."""
    weights: Mapping[str, float]
    """Domain -> weight of the start student in the domain's target, below 0; only domains whose target lies beyond their experts."""
    payload: str
    """Payload of the other teachers, which this one answers with too."""

    def scored_micro_batches(
        self, plan: Sequence[Sequence[Sequence[str]]], rollouts: Sequence[Rollout]
    ) -> frozenset[int]:
        """Return the indices of the micro-batches that have a sample of these domains on at least one rank.

        For each of them all ranks call `score_rollouts`, for the others none does.
        """
        own_ids = {r.sample_id for r in rollouts if r.domain in self.weights}
        return frozenset(index for part in plan for index, ids in enumerate(part) if own_ids.intersection(ids))

    def score_rollouts(
        self, student: Student, rollouts: Sequence[Rollout], layout: str, dtype: torch.dtype, device: torch.device
    ) -> list[TargetRow]:
        """Score those of the rollouts that are of these domains. `dtype` is the type of the other teachers' hidden states.

        All ranks have to call this at the same time, because they gather weights together. A rank without such a rollout runs
        the forward pass for a single padding token.
        """
        own_rollouts = [r for r in rollouts if r.domain in self.weights]
        packed = to_device(LAYOUTS[layout]([[*r.prompt_ids, *r.response_ids] for r in own_rollouts] or [[0]]), device)
        with torch.no_grad(), without_adapters(student.lm):
            answers = _ANSWERS[self.payload](student, packed, own_rollouts, dtype)
        return [
            TargetRow(rollout=rollout, teacher=self.name, weight=self.weights[rollout.domain], answer=answer)
            for rollout, answer in zip(own_rollouts, answers, strict=True)
        ]


def _state_answers(student: Student, packed: Packed, rollouts: Sequence[Rollout], dtype: torch.dtype) -> list[Answer]:
    hidden_N_D = student.hidden_states(packed)[find_positions_before_trained(packed, rollouts)].to("cpu", dtype)
    return [
        HiddenStates.from_states(part_n_D, OWN_HEAD) for part_n_D in hidden_N_D.split([r.num_trained for r in rollouts])
    ]


def _logprob_answers(student: Student, packed: Packed, rollouts: Sequence[Rollout], dtype: torch.dtype) -> list[Answer]:
    token_N = torch.tensor([token for r in rollouts for token in r.trained_ids], dtype=torch.long)
    predict_N = find_positions_before_trained(packed, rollouts)
    logprob_N = student.logprobs(packed, predict_N, token_N.to(packed.input_ids_B_T.device)).cpu()
    return [SampledLogprobs(part_n.tolist()) for part_n in logprob_N.split([r.num_trained for r in rollouts])]


_ANSWERS: Mapping[str, Callable[[Student, Packed, Sequence[Rollout], torch.dtype], list[Answer]]] = {
    "hidden_states": _state_answers,
    "sampled_logprobs": _logprob_answers,
}
"""Payload -> function that makes the answers. `top_k` is missing, because with it no target lies beyond the experts."""
