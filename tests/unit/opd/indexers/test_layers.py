"""Layers that are run one by one compute what transformers computes with the same pattern."""

from __future__ import annotations

import copy

import pytest
import torch

from opd.indexers.layers import LayerRunner, TextBatch, TextRow
from opd.indexers.patterns import set_pattern
from tests.sparse_models import TOPK, make_sparse_model

LENGTHS = (40, 8 * TOPK, 17)


def make_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, num_prompt: int = 1) -> TextBatch:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        TextRow(token_ids=tuple(torch.randint(4, 70, (n,), generator=generator).tolist()), num_prompt=num_prompt)
        for n in lengths
    ]
    return TextBatch.of_rows(rows, torch.device("cpu"))


@pytest.mark.parametrize("pattern", ["FFFFFF", "FSSFSS", "FSSSSS"])
@torch.no_grad()
def test_logits_are_those_of_transformers(pattern: str) -> None:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    lm = make_sparse_model()
    config = GlmMoeDsaConfig.from_dict(set_pattern(lm.config.to_dict(), pattern))
    other = GlmMoeDsaForCausalLM(config).eval()
    other.load_state_dict(lm.state_dict(), strict=False)
    assert sum(layer.self_attn.indexer is not None for layer in other.model.layers) == pattern.count("F")
    runner, batch = LayerRunner(lm), make_batch()
    ours = runner.compute_logits(runner.run_layers(0, runner.embed(batch.ids_B_T), pattern))
    for row, length in enumerate(LENGTHS):  # alone, without padding
        theirs = other(batch.ids_B_T[row : row + 1, :length]).logits
        assert (ours[row, :length] - theirs[0]).abs().max() < 1e-6


@torch.no_grad()
def test_the_pattern_changes_what_is_read() -> None:
    """With as many chosen tokens as there are, all patterns would agree, and the test above would say nothing."""
    runner, batch = LayerRunner(make_sparse_model()), make_batch()
    one, other = (runner.run_layers(0, runner.embed(batch.ids_B_T), p).hidden_B_T_D for p in ("FFFFFF", "FSSFSS"))
    assert (one - other)[:, :TOPK].abs().max() == 0
    assert (one - other)[:, TOPK:17].abs().max() > 1e-3


@torch.no_grad()
def test_attention_to_all_is_that_of_a_model_that_chooses_everything() -> None:
    lm = make_sparse_model()
    everything = copy.deepcopy(lm)
    for layer in everything.model.layers:
        layer.self_attn.indexer.index_topk = 10_000
    runner, batch = LayerRunner(lm), make_batch((30,))
    state = runner.embed(batch.ids_B_T)
    for index in range(runner.num_layers):
        state = runner.run_layer(index, state, "F", attend_to_all=True)
    assert (runner.compute_logits(state) - everything(batch.ids_B_T).logits).abs().max() < 1e-6


@torch.no_grad()
def test_the_loss_is_that_of_transformers_on_counted_tokens() -> None:
    lm, batch = make_sparse_model(), make_batch(num_prompt=5)
    labels = batch.ids_B_T.masked_fill(~batch.counted_B_T, -100)
    theirs = float(lm(batch.ids_B_T, labels=labels).loss)
    runner = LayerRunner(lm)
    ours = runner.sum_loss(runner.run_layers(0, runner.embed(batch.ids_B_T), runner.pattern), batch)
    assert ours / int(batch.counted_B_T.sum()) == pytest.approx(theirs, abs=1e-6)


def test_a_layer_has_its_indexer_again_afterwards() -> None:
    runner, batch = LayerRunner(make_sparse_model()), make_batch((9,))
    indexers = [runner.attention(i).indexer for i in range(6)]
    with torch.no_grad():
        runner.run_layers(0, runner.embed(batch.ids_B_T), "FSSSSS")
    assert [runner.attention(i).indexer for i in range(6)] == indexers and None not in indexers


@torch.no_grad()
def test_a_model_in_bfloat16_is_run_and_chooses_as_in_transformers() -> None:
    lm = make_sparse_model().to(torch.bfloat16)
    batch = make_batch((30,))
    theirs = lm(batch.ids_B_T).logits
    runner = LayerRunner(lm)
    ours = runner.compute_logits(runner.run_layers(0, runner.embed(batch.ids_B_T), runner.pattern))
    assert torch.equal(ours, theirs)
