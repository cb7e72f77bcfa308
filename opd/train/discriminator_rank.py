"""One rank of a discriminator: how likely it finds answers, and updates. Runs in a Ray actor; every method is called on all ranks at once.

A discriminator is a language model whose score of an answer is the mean log-prob of its tokens, and which is not trained to be likely
but to prefer. So it knows of each token whether it fits, and needs far fewer pairs than a value head, which would have to learn that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from opd.losses.sft import CrossEntropy
from opd.machine.devices import to_device
from opd.payloads.text import WrittenAnswer
from opd.records.types import Rollout
from opd.stream.schema import TargetRow
from opd.train.batch import DIVERGENCE, MicroBatch, build_micro_batch
from opd.train.components import UpdateWork
from opd.train.load import load_model_share
from opd.train.student import Student
from opd.train.zero import ModelOptions, ZeroEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorOptions(ModelOptions):
    """Settings that a rank of a discriminator is started with. It begins as the model in `model_dir`."""

    chunk: int
    """Tokens whose logits exist at one time."""


class DiscriminatorRank(ZeroEngine):
    """Scores and their updates on a ZeRO engine that holds a discriminator."""

    _options: DiscriminatorOptions

    def __init__(self, options: DiscriminatorOptions, rank: int) -> None:
        super().__init__(options, rank, partial(_load_discriminator, options))
        self._micro_batches: Sequence[Sequence[Rollout]] = ()

    def scores(self, micro_batches: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """Return sample id -> mean log-prob of the response's tokens, nats.

        The rank keeps the micro-batches for the update that follows. All ranks have the same number of micro-batches.
        """
        self._micro_batches = micro_batches
        scores: dict[str, float] = {}
        for rollouts in micro_batches:
            batch = self._build_batch(rollouts)
            moved = to_device((batch.packed, batch.predict_N, batch.token_N), self._device)
            with torch.no_grad():
                logprob_N = self._engine.module.compute_logprobs(*moved).double().cpu()
            for rollout, own in zip(rollouts, logprob_N.split(list(batch.trained_lengths)), strict=True):
                scores[rollout.sample_id] = float(own.mean())
        return scores

    def update(self, work: UpdateWork) -> float:
        """Take an optimiser step on all micro-batches. Returns the norm of the gradient. Raises: RunError if it is not finite."""
        for index, rollouts in enumerate(self._micro_batches):
            batch = self._build_batch(rollouts)
            weight_N = work.component.token_weights(batch, [rollout.sample_id for rollout in rollouts])
            loss, _ = self.model(*to_device((batch, {}, {DIVERGENCE: weight_N}), self._device))
            self.add_gradients(loss, last=index == len(self._micro_batches) - 1)
        return self.take_step(work.step, work.lr)

    def _build_batch(self, rollouts: Sequence[Rollout]) -> MicroBatch:
        rows = [TargetRow(rollout=rollout, teacher="", answer=WrittenAnswer()) for rollout in rollouts]
        return build_micro_batch([(row,) for row in rows], torch.float32, layout=self._layout)


def _load_discriminator(options: DiscriminatorOptions) -> Student:
    lm = load_model_share(options)
    return Student(lm, CrossEntropy(), chunk=options.chunk, vocab_size=options.vocab_size)
