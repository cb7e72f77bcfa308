"""One rank of a critic: values of a step's states, and updates toward its returns. Runs in a Ray actor; every method is called
on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from opd.machine.devices import to_device
from opd.records.types import Rollout
from opd.train.batch import build_unscored_batch
from opd.train.components import UpdateWork
from opd.train.load import load_model_share
from opd.train.value import Critic, find_state_indices
from opd.train.zero import ModelOptions, ZeroEngine

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions(ModelOptions):
    """Settings that a rank of a critic is started with. The critic's body is that of the model in `model_dir`."""

    value_clip: float | None = None
    """Most that a value may move within a step: one that moved further, and so came closer to its return, gets no gradient. None:
    no bound. See `opd.losses.value.value_loss`."""
    freeze_attention: bool = False
    """True: the attention layers are not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of one update on one rank."""

    loss: float
    """This rank's addend of the mean squared error before the update; the sum over all ranks is the mean."""
    grad_norm: float
    """Norm of the gradient over all ranks, before clipping."""


class CriticRank(ZeroEngine):
    """Values and their updates on a ZeRO engine that holds a critic."""

    _options: CriticOptions

    def __init__(self, options: CriticOptions, rank: int) -> None:
        super().__init__(options, rank, partial(_load_critic, options))
        self._micro_batches: Sequence[Sequence[Rollout]] = ()

    def values(self, micro_batches: Sequence[Sequence[Rollout]]) -> dict[str, Floats]:
        """Return sample id -> [N + 1] the value of the state before each trained token, and of the state behind the last token.

        The rank keeps the micro-batches for the updates that follow. All ranks have the same number of micro-batches.
        """
        self._micro_batches = micro_batches
        values_by_sample: dict[str, Floats] = {}
        for rollouts in micro_batches:
            packed = build_unscored_batch(rollouts, self._layout).packed
            state_N = find_state_indices(packed, rollouts)
            with torch.no_grad():
                moved = to_device(packed, self._device), state_N.to(self._device)
                value_N = self._engine.module.values(*moved).float().cpu()
            sizes = [r.num_trained for r in rollouts]
            # `find_state_indices` puts the states behind the last tokens at its end, one for each rollout.
            *token_values, ends_B = value_N.split([*sizes, len(rollouts)])
            for index, rollout in enumerate(rollouts):
                values_by_sample[rollout.sample_id] = torch.cat(
                    [token_values[index], ends_B[index : index + 1]]
                ).numpy()
        return values_by_sample

    def update(self, work: UpdateWork) -> UpdateResult:
        """Take an optimiser step on all micro-batches. Raises: RunError on a non-finite gradient."""
        total = 0.0
        for index, rollouts in enumerate(self._micro_batches):
            batch, ids = build_unscored_batch(rollouts, self._layout), [rollout.sample_id for rollout in rollouts]
            weight_N, columns = work.component.token_weights(batch, ids), work.component.token_columns(batch, ids)
            loss = self.model(*to_device((batch, weight_N, columns), self._device))
            # The weights contain the number of ranks, because DeepSpeed averages gradients; the reported loss must not.
            total += float(loss.detach()) / self._options.world_size
            self.add_gradients(loss, last=index == len(self._micro_batches) - 1)
        return UpdateResult(loss=total, grad_norm=self.take_step(work.step, work.lr))


def _load_critic(options: CriticOptions) -> Critic:
    lm = load_model_share(options)
    return Critic(lm, clip=options.value_clip, freeze_attention=options.freeze_attention)
