"""Workers that share a GPU with an engine that sleeps hand back what torch keeps, after every step."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from opd.train import rank
from opd.train.rank import RankWork
from opd.train.totals import Totals
from pipelines.specs import rank_options, scorer_options
from tests.unit.sleeping import sleeping_pipeline


def options(*, sleep: bool, trainer_gpus: float) -> rank.RankOptions:
    return rank_options(sleeping_pipeline(sleep=sleep, trainer_gpus=trainer_gpus), 76)


def test_it_is_asked_of_ranks_on_gpus_beside_engines_that_sleep() -> None:
    assert options(sleep=True, trainer_gpus=0.4).lends_memory
    assert not options(sleep=False, trainer_gpus=0.4).lends_memory
    assert not options(sleep=True, trainer_gpus=0).lends_memory, "the trainer is on the CPU"


def test_it_is_asked_of_scoring_workers_there_too() -> None:
    """Their passes are over when the engine wakes, and the sum of what a GPU holds has none of them then."""
    assert scorer_options(sleeping_pipeline(sleep=True, teacher_gpus=0.4), 76).lends_memory
    assert not scorer_options(sleeping_pipeline(sleep=False, teacher_gpus=0.4), 76).lends_memory
    assert not scorer_options(sleeping_pipeline(sleep=True), 76).lends_memory


@pytest.mark.parametrize("sleep", [True, False])
def test_after_a_step(sleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    one = rank.TrainerRank(options(sleep=sleep, trainer_gpus=0.4), 0)
    one._engine = MagicMock()
    one._engine.get_global_grad_norm.return_value = 1.0
    work = RankWork(step=1, lr=0.1, micro_batches=((),), components={})
    one._step = SimpleNamespace(work=work, totals=Totals())  # type: ignore[assignment]
    one.finish_step(1.0)
    assert len(emptied) == sleep
