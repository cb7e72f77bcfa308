"""A discriminator on plain torch: scores are mean log-probs, and an update goes down the slopes, under any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from opd.models.weights import load_causal_lm
from opd.records.types import Rollout
from opd.reward.preference import _make_row
from opd.train import discriminator_rank
from opd.train.discriminator import DeepSpeedDiscriminator, DiscriminatorSpec
from opd.train.discriminator_rank import DiscriminatorOptions, DiscriminatorRank
from opd.train.schedule import LearningRate
from tests.credit import PlainEngine, critic_options

ROWS = [_make_row(f"r{i}", (5, 6, 7 + i), tuple(range(9, 10 + 2 * i))) for i in range(4)]
SLOPES = {"r0": 0.5, "r1": -0.25, "r2": 1.0, "r3": -1.5}


class PlainDiscriminator(DiscriminatorRank):
    def open_meeting_point(self, address: str) -> tuple[str, int]:
        return address, 1

    def start(self, address: str, port: int) -> None:
        load = lambda options: load_causal_lm(options.model_dir, getattr(torch, options.dtype))  # noqa: E731
        with mock.patch.object(discriminator_rank, "load_model_share", load):
            self._engine = PlainEngine(self._build().eval(), self._options.max_grad_norm)
        self._device = torch.device("cpu")


@pytest.fixture
def start(tiny_model_dir: Path, in_process: Any) -> Any:
    def make(tokens: int = 4096) -> DeepSpeedDiscriminator:
        in_process.replace = PlainDiscriminator
        options = critic_options(tiny_model_dir, name="discriminator", max_grad_norm=1e9)
        shared = {name: getattr(options, name) for name in options.__dataclass_fields__}
        del shared["value_clip"], shared["freeze_attention"]
        spec = DiscriminatorSpec(
            rank=DiscriminatorOptions(**shared, chunk=3), rate=LearningRate(peak=1e-3, steps=9),
            micro_batch_tokens=tokens, start_timeout_s=60.0,
        )  # fmt: skip
        made = DeepSpeedDiscriminator(spec)
        made.wait_ready()
        return made

    return make


def score(lm: Any, row: Rollout) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logp = lm(input_ids=ids).logits[0, :, :76].log_softmax(-1)
    first = len(row.prompt_ids)
    return torch.stack([logp[at - 1, ids[0, at]] for at in range(first, ids.shape[1])]).mean()


def test_scores_and_gradient_are_those_of_the_model(tiny_model_dir: Path, start: Any) -> None:
    lm = load_causal_lm(tiny_model_dir, torch.float32)
    scores = [score(lm, row) for row in ROWS]
    made = start()
    assert made.scores(ROWS) == pytest.approx(
        {r.sample_id: s.item() for r, s in zip(ROWS, scores, strict=True)}, abs=1e-5
    )
    sum(SLOPES[row.sample_id] * s for row, s in zip(ROWS, scores, strict=True)).backward()  # type: ignore[union-attr]
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm().item()
    assert made.update(1, SLOPES) == pytest.approx(norm, rel=1e-4)
    after = made.scores(ROWS)
    assert sum(SLOPES[i] * after[i] for i in SLOPES) < sum(
        SLOPES[r.sample_id] * s.item() for r, s in zip(ROWS, scores, strict=True)
    )


def test_the_split_into_micro_batches_changes_nothing_but_rounding(start: Any) -> None:
    results = []
    for tokens in (4096, 12):
        made = start(tokens)
        for step in (1, 2):
            made.scores(ROWS)
            made.update(step, SLOPES)
        results.append(made.scores(ROWS))
    assert results[0] == pytest.approx(results[1], abs=1e-4)
