"""The greedy search, against a search that computes everything from the beginning."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from opd.indexers.layers import LayerRunner
from opd.indexers.search import SearchState, count_choosing, measure_loss, measure_overlaps, search_pattern, share_layer
from tests.sparse_models import TOPK, make_sparse_model
from tests.unit.opd.indexers.test_layers import make_batch

BATCHES = [make_batch((30, 44), seed=1), make_batch((50,), seed=2)]


def test_each_step_shares_the_layer_that_costs_least() -> None:
    runner = LayerRunner(make_sparse_model(5))
    state = search_pattern(runner, BATCHES, 2, SearchState(pattern="FFFFF"), lambda _: None)
    pattern = "FFFFF"
    for step in state.steps:
        losses = {i: measure_loss(runner, BATCHES, share_layer(pattern, i)) for i in range(1, 5) if pattern[i] == "F"}
        assert step.candidates == pytest.approx(losses, abs=1e-9)
        assert step.layer == min(losses, key=lambda i: losses[i]) and step.loss == step.candidates[step.layer]
        pattern = share_layer(pattern, step.layer)
        assert step.pattern == pattern
    assert (len(state.steps), state.pattern, pattern.count("F"), pattern[0]) == (3, pattern, 2, "F")
    assert len(set(state.steps[0].candidates.values())) == 4, "all candidates cost the same: nothing was tried"


def test_a_search_that_was_cut_off_goes_on_to_the_same_result() -> None:
    saved: list[Any] = []
    runner = LayerRunner(make_sparse_model(5))
    whole = search_pattern(
        runner, BATCHES, 2, SearchState(pattern="FFFFF"), lambda state: saved.append(copy.deepcopy(state))
    )
    assert len(saved) == 3 * (len(BATCHES) + 1)
    for state in saved:
        assert search_pattern(runner, BATCHES, 2, state, lambda _: None) == whole
    json.dumps(asdict(whole))


def test_overlaps_are_those_of_the_chosen_sets() -> None:
    runner, batch = LayerRunner(make_sparse_model(3)), make_batch((20,))
    chosen = []
    with torch.no_grad():
        state = runner.embed(batch.ids_B_T)
        for index in range(3):
            state = runner.run_layer(index, state, "F")
            assert state.chosen_B_T_K is not None
            chosen.append([set(state.chosen_B_T_K[0, t].tolist()) for t in range(TOPK, 20)])
    expected = [
        sum(len(a & b) for a, b in zip(chosen[i], chosen[i + 1], strict=True)) / (TOPK * (20 - TOPK)) for i in range(2)
    ]
    assert measure_overlaps(runner, [batch]) == pytest.approx(expected)
    assert all(0 < overlap < 1 for overlap in expected)


def test_tokens_that_see_no_more_than_is_chosen_do_not_count_as_choosing() -> None:
    assert count_choosing([make_batch((TOPK + 1, TOPK))], TOPK) == 0
    assert count_choosing([make_batch((TOPK + 3, TOPK))], TOPK) == 2
