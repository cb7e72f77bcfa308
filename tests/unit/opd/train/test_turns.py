"""Weights by turn: the formula, a mean that no split changes, and an expert's tokens that are trained without a log-prob."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from opd.losses.chunked import TokenStats
from opd.models.heads import Head, HeadSource
from opd.models.logit_rule import IDENTITY
from opd.records.types import Origin, Rollout, Span
from opd.stream.schema import TargetRow, write_stream
from opd.train import deepspeed, rank
from opd.train.batch import build_micro_batch
from opd.train.components import Component
from opd.train.rank import RankWork
from opd.train.totals import Totals, mean_gap, weigh_rows
from opd.train.turns import TurnWeights, compute_drift_before, compute_turn_factors, count_earlier_turns
from pipelines.specs import rank_options, trainer_spec
from tests.rows import make_rollout, make_row
from tests.unit.opd.rollouts.episodes.test_compaction import options, policy
from tests.unit.opd.rollouts.episodes.test_runner import play, request
from tests.unit.opd.train.test_rank import FakeRank, StillEngine, Targets, config

WIDTH = 64
BY_TURN = TurnWeights(decay=0.5, divergence=0.0, floor=0.1)
BY_DRIFT = TurnWeights(decay=0.9, divergence=2.0, floor=0.05)


def episode(sample_id: str, domain: str, turns: Sequence[int], **place: str) -> Rollout:
    """Turns of so many tokens, two tokens of the environment after each; `place` is its place in an episode."""
    rng = random.Random(sample_id)
    mask = [t for turn in turns for t in (*([True] * turn), False, False)][:-2]
    return make_rollout(
        sample_id=sample_id, step=1, domain=domain, policy_version=0, **place,
        prompt_ids=tuple(rng.choices(range(76), k=rng.randint(1, 5))),
        response_ids=tuple(rng.choices(range(76), k=len(mask))),
        behaviour_logprobs=tuple(-rng.random() for _ in mask), loss_mask=mask,
    )  # fmt: skip


STEP = [
    episode("a", "maze", [2, 1, 3, 1, 2, 1, 1]),
    episode("b", "maze", [4]),
    episode("c", "code", [1, 5]),
    episode("d", "maze", [2, 2]),
    episode("d+1", "maze", [1, 2, 3], episode="d", origin="summary", parent="d"),
    episode("d+2", "chat", [3, 1], episode="d", origin="sub_agent", parent="d"),
    episode("e", "chat", [9]),
]
DOMAIN_WEIGHTS = {"maze": 2.0, "code": 0.5}


def row(rollout: Rollout) -> TargetRow:
    seed = int.from_bytes(rollout.sample_id.encode(), "big")
    states = torch.randn(rollout.num_trained, WIDTH, generator=torch.Generator().manual_seed(seed))
    return make_row(
        sample_id=rollout.sample_id, episode=rollout.episode, step=1, domain=rollout.domain, teacher="t",
        prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids, spans=rollout.spans,
        behaviour_logprobs=rollout.behaviour_logprobs, head="h", hidden_size=WIDTH, hidden=states.numpy().tobytes(),
    )  # fmt: skip


ROWS = {r.sample_id: row(r) for r in STEP}


def test_a_turn_weighs_by_its_number_and_by_what_came_before() -> None:
    turn_T = torch.tensor([0, 0, 1, 2, 2, 9])
    assert BY_TURN.weigh_turns(turn_T, torch.zeros(6)).tolist() == [1, 1, 0.5, 0.25, 0.25, 0.1]
    drift_T = compute_drift_before(turn_T, torch.tensor([0.1, 0.3, 0.5, 0.9, 0.9, 0.1]))
    assert drift_T.tolist() == pytest.approx([0, 0, 0.2, 0.3, 0.3, 0.54]), "means over tokens of the turns before"
    assert BY_DRIFT.weigh_turns(turn_T, drift_T).tolist() == pytest.approx(
        [1, 1, 0.9 * math.exp(-0.4), 0.81 * math.exp(-0.6), 0.81 * math.exp(-0.6), 0.9**9 * math.exp(-1.08)]
    )
    value_T = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.2])
    assert torch.equal(compute_drift_before(turn_T + 7, value_T), compute_drift_before(turn_T, value_T)), (
        "bit for bit after a summary"
    )
    assert compute_drift_before(torch.tensor([], dtype=torch.long), torch.zeros(0)).tolist() == []
    assert compute_drift_before(torch.tensor([3, 3, 5]), torch.ones(3)).tolist() == [0, 0, 1], (
        "an expert wrote the others"
    )


def test_turns_go_on_in_the_next_segment_of_an_episode() -> None:
    assert count_earlier_turns(STEP) == {"d+1": 2}, "a sub-agent begins anew"
    third = episode("d+3", "maze", [1], episode="d", origin="summary", parent="d+1")
    assert count_earlier_turns([*STEP, third]) == {"d+1": 2, "d+3": 5}
    batch = build_micro_batch([(ROWS["d+1"],), (ROWS["e"],)], torch.float32, first_turns=count_earlier_turns(STEP))
    assert batch.turn_N.tolist() == [2, 3, 3, 4, 4, 4] + [0] * 9
    found = compute_turn_factors(batch, {"maze": BY_TURN}, None)
    assert found.tolist() == pytest.approx([0.25, 0.125, 0.125, 0.1, 0.1, 0.1] + [1.0] * 9)
    assert compute_turn_factors(build_micro_batch([], torch.float32), {"maze": BY_TURN}, None).tolist() == []


class Driven:
    """The driver's work with the ranks of one step, and DeepSpeed's with their gradients."""

    def __init__(self, model_dir: Any, weights: dict[str, TurnWeights]) -> None:
        self.options = dataclasses.replace(rank_options(config(), 76), turn_weights=weights)
        self.model_dir = model_dir

    def step(self, cut: Sequence[Sequence[Sequence[str]]]) -> tuple[float, torch.Tensor, float]:
        """[rank][micro-batch] -> samples. Loss, gradient divided by the share, and the share."""
        weights = weigh_rows(STEP, "token_mean", DOMAIN_WEIGHTS)
        ranks = [self.rank(index, part, weights) for index, part in enumerate(cut)]
        share = math.fsum(one.sum_weights() for one in ranks)
        loss = sum(one._step.totals.loss for one in ranks) / share
        grads = [
            torch.cat([p.grad.flatten() for p in r._engine.student.parameters() if p.grad is not None]) for r in ranks
        ]
        return loss, sum(grads, torch.zeros_like(grads[0])) / share, share

    def rank(self, index: int, part: Sequence[Sequence[str]], weights: dict[str, float]) -> rank.TrainerRank:
        one = rank.TrainerRank(self.options, index)
        one._engine, one._device = StillEngine(self.model_dir), torch.device("cpu")
        one._engine.module = one._engine.student
        one._fetch_head = lambda source: head()  # type: ignore[method-assign]
        work = RankWork(
            step=1, lr=0.1, micro_batches=tuple(map(tuple, part)), first_turns=count_earlier_turns(STEP),
            components={"divergence": Component(weights={i: weights[i] for ids in part for i in ids})},
        )  # fmt: skip
        one.begin_step(work, {"h": HeadSource(key="h", rule=IDENTITY)})
        mine = [ROWS[i] for ids in part for i in ids]
        for place in range(len(part)):
            stream = [np.frombuffer(write_stream(mine, "float32"), dtype=np.uint8)] if not place and mine else []
            one.accumulate_micro_batch(place, frozenset(), *stream)
        return one


COUNTED = {
    ("maze", 0): 8, ("maze", 1): 3, ("maze", 2): 4, ("maze", 3): 3, ("maze", 4): 5, ("maze", 5): 1, ("maze", 6): 1,
    ("code", 0): 1, ("code", 1): 5, ("chat", 0): 12, ("chat", 1): 1,
}  # fmt: skip
"""Trained tokens of `STEP` by turn: d+1 goes on at 2, the sub-agent d+2 begins at 0."""


@pytest.mark.parametrize("weights", [{}, {"maze": BY_TURN}], ids=["no weights", "weights by turn"])
def test_the_records_count_on_after_a_summary(weights: dict[str, TurnWeights], tiny_model_dir: Any) -> None:
    driven, whole = Driven(tiny_model_dir, weights), weigh_rows(STEP, "token_mean", {})
    for cut in ([[list(ROWS)]], [[["d+1", "a"], ["b"]], [["e", "d+2"], ["c", "d"]]]):
        ranks = [driven.rank(index, part, whole) for index, part in enumerate(cut)]
        found: Counter[tuple[str, int]] = Counter()
        for one in ranks:
            found.update({key: stats.tokens for key, stats in one._step.totals.turns.items()})
        assert found == COUNTED


def test_the_driver_tells_each_rank_of_the_turns_before_its_rows(in_process: Any) -> None:
    in_process.replace = FakeRank
    spec = trainer_spec(config(ranks=2), 9)
    assert not spec.weighs_turns
    third = episode("d+3", "maze", [1], episode="d", origin="summary", parent="d+1")
    step = [*STEP, third]
    deepspeed.DeepSpeedTrainer(spec).train_step(1, step, Targets(*(r.sample_id for r in step)))  # type: ignore[arg-type]
    works = [work for fake in in_process.workers for work, _ in fake.works]
    assert len(works) == 2
    for work in works:
        mine = {i for ids in work.micro_batches for i in ids}
        assert work.first_turns == {i: first for i, first in {"d+1": 2, "d+3": 5}.items() if i in mine}


def test_an_episode_that_was_compacted_counts_its_turns_through() -> None:
    asked = request(options={"goal": 11}, max_turns=20, compaction=options())
    (found,), _ = play(asked, policy=policy)
    firsts = count_earlier_turns(found.rollouts)
    assert firsts == {"s0+1": 7, "s0+2": 11}, "a summary is a turn too"
    assert [sorted({turn + firsts.get(r.sample_id, 0) for turn in r.turns}) for r in found.rollouts] == [
        [0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11, 12],
    ]  # fmt: skip


def head() -> Head:
    return Head(0.1 * torch.randn(76, WIDTH, generator=torch.Generator().manual_seed(0)), IDENTITY)


def by_hand(model_dir: Any, weights: dict[str, TurnWeights]) -> float:
    """The formula of the module, token by token in Python's floats."""
    student = StillEngine(model_dir).student
    top = bottom = 0.0
    for rollout in STEP:
        batch = build_micro_batch([(ROWS[rollout.sample_id],)], torch.float32)
        with torch.no_grad():
            _, stats = student(batch, {"h": head()}, {"divergence": torch.ones(len(batch.token_N))})
        seen: list[tuple[int, float]] = []
        for turn, value in zip(rollout.turns, stats.kl_N.tolist(), strict=True):
            before = [v for t, v in seen if t < turn]
            drift = sum(before) / len(before) if before else 0.0
            seen.append((turn, value))
            known, first = weights.get(rollout.domain), 2 if rollout.sample_id == "d+1" else 0
            factor = 1.0 if known is None else max(
                known.floor, known.decay ** (turn + first) * math.exp(-known.divergence * drift)
            )  # fmt: skip
            factor *= DOMAIN_WEIGHTS.get(rollout.domain, 1.0)
            top, bottom = top + factor * value, bottom + factor
    return top / bottom


@pytest.mark.parametrize("weights", [BY_TURN, BY_DRIFT], ids=["by turn", "by drift"])
def test_no_split_over_ranks_and_micro_batches_changes_loss_or_gradient(
    weights: TurnWeights, tiny_model_dir: Any
) -> None:
    driven = Driven(tiny_model_dir, {"maze": weights, "code": weights})
    loss, grad, share = driven.step([[["a", "b", "c", "d", "d+1", "d+2", "e"]]])
    assert loss == pytest.approx(by_hand(tiny_model_dir, {"maze": weights, "code": weights}), rel=1e-5)
    assert 0.1 < share < 0.95, "the weights of the rows alone add up to 1"
    for cut in (
        [[["a"], ["b", "c"], ["d"], ["d+1", "d+2"], ["e"]]],
        [[["d+1", "a"], []], [["e", "d+2", "b"], ["c", "d"]]],
        [[["a"]], [["b"]], [["c", "d+2", "e"]], [["d", "d+1"]]],
    ):
        # A rank scales its weights by the number of ranks, because DeepSpeed takes the mean of their gradients.
        other, other_grad, other_share = driven.step(cut)
        assert other == pytest.approx(loss, rel=1e-6) and other_share == pytest.approx(share, rel=1e-6)
        assert float((other_grad - grad).norm()) < 1e-5 * float(grad.norm())


def test_without_weights_nothing_is_multiplied(tiny_model_dir: Any) -> None:
    _, _, share = Driven(tiny_model_dir, {}).step([[["a", "b", "c", "d", "d+1", "d+2", "e"]]])
    assert share == pytest.approx(1.0, rel=1e-6)


def test_the_tokens_of_an_expert_are_trained_and_have_no_gap() -> None:
    def span(length: int, origin: Origin) -> Span:
        return Span(length=length, origin=origin, policy_version=0)

    rollout = dataclasses.replace(
        episode("t", "maze", [6]),
        spans=(span(2, "policy"), span(1, "environment"), span(2, "taught"), span(1, "teacher")),
    )
    assert rollout.sampled_mask == (True, True, False, False) and rollout.turns == (0, 0, 1, 1)
    batch = build_micro_batch([(row(rollout),)], torch.float32)
    assert batch.sampled_N.tolist() == [True, True, False, False]
    ones = TokenStats(*(torch.ones(4) for _ in dataclasses.fields(TokenStats)))
    stats = dataclasses.replace(ones, logprob_N=batch.behaviour_N + 0.25)
    for stale, gap in ((frozenset[int](), 0.25), (frozenset({0}), 0.0)):
        totals = Totals()
        totals.add(batch, {"divergence": torch.ones(4)}, stats, stale)
        found = totals.domains["maze"]
        assert (found.tokens, found.taught_tokens, found.stale_tokens) == (4, 2, 2 if stale else 0)
        assert mean_gap(totals.domains) == pytest.approx(gap) and found.kl_sum == 4
