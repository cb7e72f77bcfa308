"""The loss of an indexer that serves several layers, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.indexers.distillation import ServedLayers, distil_indexer, run_groups
from opd.indexers.layers import LayerRunner
from tests.sparse_models import TOPK, make_sparse_model
from tests.unit.opd.indexers.test_layers import make_batch

LENGTHS = (24, 15)
STAGES = pytest.mark.parametrize("dense", [True, False], ids=["dense", "sparse"])


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Differences of the loss are far below what float32 can tell apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_plain_model(layers: int, topk: int = TOPK) -> Any:
    """Return a model without experts, whose kernels do not know float64."""
    return make_sparse_model(layers, topk, mlp_layer_types=["dense"] * layers)


def run_served(runner: LayerRunner, pattern: str = "FSSF", *, dense: bool) -> list[ServedLayers]:
    return list(run_groups(runner, make_batch(LENGTHS), pattern, dense=dense))


def gradients(served: ServedLayers, *, dense: bool, chunk: int = 100, divisor: int = 1) -> dict[str, Tensor]:
    served.indexer.indexer.zero_grad()
    distil_indexer(served, TOPK, dense=dense, chunk=chunk, divisor=divisor)
    return {name: param.grad.clone() for name, param in served.indexer.indexer.named_parameters()}


@STAGES
def test_the_gradient_is_that_of_the_mean_over_the_layers(dense: bool) -> None:
    """Proposition 1: the loss against the mean attention differs from the layers' own losses by a constant."""
    served = run_served(LayerRunner(make_plain_model(4)), dense=dense)[0]
    assert len(served.attentions) == 3
    together = gradients(served, dense=dense)
    alone = [gradients(replace(served, attentions=[one]), dense=dense) for one in served.attentions]
    for name, gradient in together.items():
        assert (gradient - sum(one[name] for one in alone) / 3).abs().max() < 1e-9 * gradient.abs().max()
        assert (alone[0][name] - alone[1][name]).abs().max() > 1e-2 * gradient.abs().max(), (
            "the layers look at the same"
        )


@STAGES
def test_gradients_are_those_of_finite_differences(dense: bool) -> None:
    served = run_served(LayerRunner(make_plain_model(4)), dense=dense)[0]
    exact = gradients(served, dense=dense)
    for name, param in served.indexer.indexer.named_parameters():
        for index in (0, param.numel() // 2, param.numel() - 1):
            losses = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    param.view(-1)[index] += step
                    losses.append(distil_indexer(served, TOPK, dense=dense, chunk=100).loss)
                    param.view(-1)[index] -= step
            numeric = (losses[0] - losses[1]) / 2e-6
            assert float(exact[name].view(-1)[index]) == pytest.approx(numeric, rel=1e-5, abs=1e-7), name


@STAGES
def test_chunks_add_up_to_the_whole(dense: bool) -> None:
    served = run_served(LayerRunner(make_plain_model(4)), dense=dense)[0]
    whole, in_chunks = (gradients(served, dense=dense, chunk=chunk) for chunk in (100, 5))
    for name in whole:
        assert (whole[name] - in_chunks[name]).abs().max() < 1e-9 * whole[name].abs().max()
    one, other = (distil_indexer(served, TOPK, dense=dense, chunk=chunk) for chunk in (100, 5))
    assert one.loss == pytest.approx(other.loss, rel=1e-9)
    assert one.chosen_mass == pytest.approx(other.chosen_mass, rel=1e-9)
    assert (one.num_queries, one.num_choosing) == (23 + 14, 24 - TOPK + 15 - TOPK)


@torch.no_grad()
def test_the_largest_scores_are_what_transformers_chooses() -> None:
    runner = LayerRunner(make_plain_model(4))
    batch = make_batch(LENGTHS[:1])
    state = runner.embed(batch.ids_B_T)
    for index, served in enumerate(run_served(runner, "FFFF", dense=False)):
        state = runner.run_layer(index, state, "F")
        scores = served.indexer.compute_scores(served.indexer.compute_keys(), slice(0, LENGTHS[0]))[0]
        for place in range(TOPK, LENGTHS[0]):
            assert state.chosen_B_T_K is not None
            largest = scores[place, : place + 1].topk(TOPK).indices
            assert set(largest.tolist()) == set(state.chosen_B_T_K[0, place].tolist())


@STAGES
@torch.no_grad()
def test_the_target_is_the_attention_that_transformers_computes(dense: bool) -> None:
    """In the sparse stage that is, of the layer that chooses, the attention to what it chose."""
    from opd.indexers.distillation import _mean_attention

    lm = make_plain_model(2, topk=1000 if dense else TOPK)
    lm.set_attn_implementation("eager")
    weights = lm(make_batch((24,)).ids_B_T, output_attentions=True).attentions
    runner = LayerRunner(lm)
    batch = make_batch((24,))
    for index, served in enumerate(run_groups(runner, batch, "FF", dense=dense)):
        counted = weights[index].sum(1) > 0
        ours = _mean_attention(served.attentions, slice(3, 20), counted[:, 3:20])
        assert (ours - weights[index].mean(1)[:, 3:20]).abs().max() < 1e-6


def test_training_an_indexer_brings_the_chosen_tokens_closer_to_the_attention() -> None:
    torch.set_default_dtype(torch.float32)
    runner = LayerRunner(make_plain_model(4))
    served = run_served(runner, "FSSS", dense=True)[0]
    before = distil_indexer(served, TOPK, dense=True, chunk=8)
    optimizer: Any = torch.optim.Adam(served.indexer.indexer.parameters(), lr=3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        distil_indexer(served, TOPK, dense=True, chunk=8, divisor=before.num_queries)
        optimizer.step()
    after = distil_indexer(served, TOPK, dense=True, chunk=8)
    assert after.loss < 0.1 * before.loss
    assert after.chosen_mass > before.chosen_mass
    body = [p for name, p in runner._lm.named_parameters() if "layers.0.self_attn.indexer" not in name]
    assert all(param.grad is None for param in body), "the body is frozen"
