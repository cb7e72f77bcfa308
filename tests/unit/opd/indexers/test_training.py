"""The training of indexers: what it changes, and in which order it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opd.indexers.layers import LayerRunner, TextRow
from opd.indexers.training import IndexerTraining, IndexerTrainingSpec
from tests.sparse_models import make_sparse_model

SPEC = IndexerTrainingSpec(steps=30, sparse_steps=3, batch_size=2, lr=2e-2, sparse_lr=1e-3, chunk=8)


def draw_rows(count: int) -> list[TextRow]:
    generator = torch.Generator().manual_seed(0)
    return [
        TextRow(token_ids=tuple(torch.randint(4, 70, (24 + i,), generator=generator).tolist()), num_prompt=1)
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indexers_learn_in_float32_whatever_the_model_is_in(dtype: torch.dtype) -> None:
    lm = make_sparse_model(4).to(dtype)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    training = IndexerTraining(LayerRunner(lm), "FSFS", SPEC)
    losses = [sum(one.loss / one.num_queries for one in sums.values()) for sums in training.train(draw_rows(6))]
    assert len(losses) == 33 and sum(losses[25:30]) < 0.7 * sum(losses[:5])
    for layer, weights in training.weights().items():
        own = lm.model.layers[layer].self_attn.indexer.state_dict()
        assert all(weight.dtype == torch.float32 for weight in weights.values())
        assert all(torch.equal(own[name], weight.to(dtype)) for name, weight in weights.items())
    changed = {name for name, tensor in lm.state_dict().items() if not torch.equal(before[name], tensor)}
    assert changed and all(
        f"layers.{layer}.self_attn.indexer" in name for name in changed for layer in [name.split(".")[2]]
    )
    assert {name.split(".")[2] for name in changed} == {"0", "2"}


def test_every_row_comes_once_before_any_comes_again() -> None:
    rows = draw_rows(5)
    training = IndexerTraining(LayerRunner(make_sparse_model(1)), "F", replace(SPEC, batch_size=3))
    drawn: list[int] = []
    for step in range(5):
        training.steps_done = step
        drawn += training._draw_batch(rows).lengths_B.tolist()
    lengths = sorted(len(row.token_ids) for row in rows)
    assert [sorted(drawn[i : i + 5]) for i in (0, 5, 10)] == [lengths] * 3
    assert drawn[:5] != drawn[5:10], "each time in another order"
