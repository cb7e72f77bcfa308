"""A critic on plain torch: states and values in any layout, updates under any split, and what each rank is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import ModelError
from opd.models.layouts import LAYOUTS
from opd.models.weights import load_causal_lm
from opd.records.types import Rollout
from opd.train.components import Component, UpdateWork
from opd.train.critic import CriticEngineSpec, DeepSpeedCritic
from opd.train.critic_rank import UpdateResult
from opd.train.schedule import LearningRate
from opd.train.value import Critic, find_state_indices, freeze_attention_layers
from tests.credit import PlainRank, critic_options, segment


def rollouts() -> list[Rollout]:
    """Rows of several lengths, one with gaps, one without a trained token, two that begin alike."""
    kinds = ["aaoa", "a", "oo", "aaaaaaaa", "aoma", "aaaaaaoo"]
    return [segment(k, episode=f"e{i}", prompt_ids=(1 + i % 3, 2, 9)) for i, k in enumerate(kinds)]


def targets(found: list[Rollout]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {r.sample_id: rng.normal(size=r.num_trained).astype(np.float32) for r in found}


def critic(model_dir: Path, tokens: int = 4096, *, share: bool = False, **options: Any) -> DeepSpeedCritic:
    spec = CriticEngineSpec(
        rank=critic_options(model_dir, **options), rate=LearningRate(peak=1e-2, steps=9), micro_batch_tokens=tokens,
        share_prompts=share, start_timeout_s=60.0,
    )  # fmt: skip
    made = DeepSpeedCritic(spec)
    made.wait_ready()
    return made


def teach(made: DeepSpeedCritic, steps: int = 3) -> list[float]:
    """A few updates; the losses before them."""
    every = rollouts()
    goals, losses = targets(every), []
    for step in range(1, steps + 1):
        old = {i: value_N[:-1] for i, value_N in made.values(every).items()}
        losses.append(made.update(step, goals, old)[0])
    return losses


def test_a_critic_begins_at_zero_and_its_loss_is_the_mean_square_of_the_returns(
    tiny_model_dir: Path, in_process: Any
) -> None:
    in_process.replace = PlainRank
    made = critic(tiny_model_dir)
    values = made.values(rollouts())
    assert {i: (v.shape, v.dtype, v.any()) for i, v in values.items()} == {
        r.sample_id: ((r.num_trained + 1,), np.float32, False) for r in rollouts()
    }
    returns = np.concatenate(list(targets(rollouts()).values()))
    losses = teach(made)
    assert losses[0] == pytest.approx(float((returns**2).mean()), rel=1e-6)
    assert losses[2] < losses[0]


@pytest.mark.parametrize(("tokens", "share"), [(8, False), (24, False), (4096, True)])
def test_values_and_updates_are_the_same_under_any_split(
    tokens: int, share: bool, tiny_model_dir: Path, in_process: Any
) -> None:
    """One denominator for the step: also where a micro-batch has a single token."""
    in_process.replace = PlainRank
    whole, split = critic(tiny_model_dir), critic(tiny_model_dir, tokens, share=share)
    assert teach(split) == pytest.approx(teach(whole), rel=1e-4)
    assert (len(split._plan[0]) > 1) is not share and len(whole._plan[0]) == 1
    assert split.layout.layout == ("shared" if share else "packed")
    one, other = whole.values(rollouts()), split.values(rollouts())
    for name, value_N in one.items():
        assert other[name] == pytest.approx(value_N, abs=2e-4)
    assert max(np.abs(v).max() for v in one.values()) > 0.05


def test_padding_changes_nothing(tiny_model_dir: Path, in_process: Any) -> None:
    in_process.replace = PlainRank
    one, other = critic(tiny_model_dir), critic(tiny_model_dir)
    in_process.workers[-1].use_layout("padded")
    assert teach(other) == pytest.approx(teach(one), rel=1e-4)


def test_values_are_those_of_the_states_before_trained_tokens_and_behind_the_last(tiny_model_dir: Path) -> None:
    model = Critic(load_causal_lm(tiny_model_dir, torch.float32)).eval()
    torch.nn.init.normal_(model.lm.get_output_embeddings().weight, generator=torch.Generator().manual_seed(0))
    every = rollouts()
    packed = LAYOUTS["packed"]([[*r.prompt_ids, *r.response_ids] for r in every])
    with torch.no_grad():
        found = model.values(packed, find_state_indices(packed, every)).tolist()
        wanted, behind = [], []
        for rollout in every:
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
            said = model.lm.get_output_embeddings()(model.lm.base_model(input_ids=ids).last_hidden_state[0]).tolist()
            wanted += [said[len(rollout.prompt_ids) + place - 1] for place in rollout.trained_positions]
            behind.append(said[-1])
    assert found == pytest.approx([*wanted, *behind], abs=1e-5)


def test_the_head_takes_the_place_of_a_tied_output_head(tiny_model_dir: Path) -> None:
    model = Critic(load_causal_lm(tiny_model_dir, torch.float32))
    names = [name for name, _ in model.lm.named_parameters()]
    assert names.count("lm_head.weight") == names.count("lm_head.bias") == 1
    assert model.lm.lm_head.weight.shape == (1, 64)
    assert "model.embed_tokens.weight" in names


def test_frozen_attention_is_all_that_is_frozen(tiny_model_dir: Path) -> None:
    model = Critic(load_causal_lm(tiny_model_dir, torch.float32), freeze_attention=True)
    frozen = {name for name, param in model.lm.named_parameters() if not param.requires_grad}
    assert frozen == {f"model.layers.{i}.self_attn.{k}_proj.weight" for i in (0, 1) for k in "qkvo"}


def test_a_model_without_attention_cannot_have_it_frozen() -> None:
    with pytest.raises(ModelError, match="no layer of Sequential is one"):
        freeze_attention_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_frozen_attention_stays_and_the_rest_learns(tiny_model_dir: Path, in_process: Any) -> None:
    in_process.replace = PlainRank
    made = critic(tiny_model_dir, freeze_attention=True)
    before = {n: p.detach().clone() for n, p in in_process.workers[0]._engine.module.lm.named_parameters()}
    teach(made, 2)
    after = dict(in_process.workers[0]._engine.module.lm.named_parameters())
    moved = {name for name, param in after.items() if not torch.equal(param, before[name])}
    assert moved == {name for name in after if "self_attn" not in name}


# The driver's side


class FakeRank:
    """Stands for one rank; its values are its number."""

    def __init__(self, options: Any, index: int) -> None:
        self.index, self.works, self.asked = index, [], []

    def open_meeting_point(self, address: str) -> tuple[str, int]:
        return address, 1

    def start(self, address: str, port: int) -> None: ...

    def layout_error(self, layout: str) -> float:
        return 0.5

    def use_layout(self, layout: str) -> None: ...

    def values(self, micro_batches: Any) -> dict[str, np.ndarray]:
        self.asked = [[r.sample_id for r in part] for part in micro_batches]
        return {r.sample_id: np.full(r.num_trained + 1, self.index, np.float32) for m in micro_batches for r in m}

    def update(self, work: UpdateWork) -> UpdateResult:
        self.works.append(work)
        return UpdateResult(loss=0.25, grad_norm=2.0)


def test_each_rank_has_its_own_rows_and_the_denominator_of_all(tmp_path: Path, in_process: Any) -> None:
    in_process.replace = FakeRank
    made = critic(tmp_path, 8, world_size=2)
    every = rollouts()
    values = made.values(every)
    one, two = in_process.workers
    assert len(one.asked) == len(two.asked), "ranks run in step"
    assert sorted(i for rank in (one, two) for part in rank.asked for i in part) == [r.sample_id for r in every]
    goals = targets(every)
    loss, grad_norm = made.update(4, goals, {i: v[:-1] for i, v in values.items()})
    assert (loss, grad_norm) == (0.5, 2.0)
    for rank in (one, two):
        (work,) = rank.works
        assert (work.step, work.lr) == (4, 1e-2)
        weights, mine = work.component.weights, {i for part in rank.asked for i in part}
        assert [*weights.values()] == pytest.approx([2 / sum(r.num_trained for r in every)] * len(mine)), (
            "a mean of ranks"
        )
        returns, old = work.component.columns["return"], work.component.columns["old_value"]
        assert set(weights) == set(returns) == set(old) == mine
        assert all(np.all(old[i] == rank.index) for i in mine)


def test_a_rank_without_rows_of_its_own_runs_in_step(tiny_model_dir: Path, in_process: Any) -> None:
    in_process.replace = PlainRank
    made = critic(tiny_model_dir)
    (rank,) = in_process.workers
    assert rank.values([[]]) == {}
    result = rank.update(
        UpdateWork(step=1, lr=0.1, component=Component(weights={}, columns={"return": {}, "old_value": {}}))
    )
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert made.values(rollouts()[:1])["e0"].tolist() == [0.0] * 4
