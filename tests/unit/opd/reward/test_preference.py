"""The discriminator's arithmetic, and how it learns and rewards step by step, with an engine that computes in the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd.reward.preference as product
from opd.config.reward import RewardConfig
from opd.credit.leave_one_out import LeaveOneOut
from opd.errors import RunError
from opd.records.types import Rollout, RolloutBatch
from opd.reward.form import measure_features
from opd.reward.preference import (
    PreferenceRewards,
    PreferenceSpec,
    compute_preferences,
    compute_slopes,
)
from opd.reward.stream import RewardStream
from opd.reward.verified import VerifiedRewards
from tests.rows import make_rollout
from tests.steps import Letters

N = 12


def bradley_terry(scores: Any, features: Any) -> float:
    left = scores - features @ np.linalg.pinv(features) @ scores
    n = len(scores) // 2
    return float(np.log1p(np.exp(left[:n] - left[n:])).sum())


@pytest.mark.parametrize("controls", ["none", "length", "form"])
def test_slopes_are_those_of_the_loss_and_have_nothing_of_what_is_controlled_for(controls: Any) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ab.\n"), size)) for size in rng.integers(1, 9, 2 * N)]
    features = measure_features(texts, list(map(len, texts)), controls)
    scores = rng.normal(size=2 * N)
    slopes = compute_slopes(scores, features)
    for at in range(2 * N):
        shift = np.zeros(2 * N)
        shift[at] = 1e-6
        around = bradley_terry(scores + shift, features) - bradley_terry(scores - shift, features)
        assert slopes[at] == pytest.approx(around / 2e-6, abs=1e-7)
    assert np.abs(features.T @ slopes).max() < 1e-9


def test_two_writers_that_differ_in_length_alone_get_equal_rewards() -> None:
    """The scores are any function of two lengths: of what is left nothing tells the writers apart, and nothing is learned."""
    lengths = [3] * N + [7] * N
    features = measure_features(["x" * length for length in lengths], lengths, "length")
    scores = np.array([{3: -2.0, 7: 5.0}[length] for length in lengths])
    assert compute_preferences(scores, features) == pytest.approx(0.5)
    assert np.abs(compute_slopes(scores, features)).max() < 1e-9
    uncontrolled = measure_features([""] * 2 * N, lengths, "none")
    assert (
        compute_preferences(scores, uncontrolled).max() < 1e-3
        and np.abs(compute_slopes(scores, uncontrolled)).max() > 0
    )


def test_a_writer_who_is_better_at_every_length_is_preferred_all_the_same() -> None:
    lengths = [2, 3, 4, 5, 6, 7] * 4
    features = measure_features(["x"] * 2 * N, lengths, "form")
    scores = np.array([float(length) for length in lengths]) + np.repeat([0.0, 2.0], N)
    assert compute_preferences(scores, features).max() < 0.3
    slopes = compute_slopes(scores, features)
    assert (slopes[:N] > 0).all() and (slopes[N:] < 0).all(), "the student's scores go down, the expert's up"


class Table:
    """In place of DeepSpeed's ranks: a log-prob for each id of a token, which a step moves."""

    RATE = 2.0

    def __init__(self, spec: Any) -> None:
        self.table = np.zeros(32)
        self.rows: dict[str, Rollout] = {}
        self.steps: list[int] = []

    def scores(self, rows: Sequence[Rollout]) -> dict[str, float]:
        self.rows = {row.sample_id: row for row in rows}
        assert all(not any(row.sampled_mask) and row.num_trained == len(row.response_ids) for row in rows)
        return {i: float(self.table[list(row.response_ids)].mean()) for i, row in self.rows.items()}

    def update(self, step: int, slopes: Mapping[str, float]) -> float:
        self.steps.append(step)
        assert slopes.keys() == self.rows.keys()
        for i, row in self.rows.items():
            np.add.at(self.table, list(row.response_ids), -self.RATE * slopes[i] / len(row.response_ids))
        return 0.0

    def wait_ready(self) -> None: ...

    def begin_save(self, path: Path) -> None:
        np.save(path / "table.npy", self.table)

    def saved(self, wait_s: float) -> Sequence[Any]:
        return ()

    def load(self, path: Path) -> None:
        self.table = np.load(path / "table.npy")


class Expert:
    """Always answers with token 9; in the first step its answers stand in the rollouts."""

    def is_taught(self, rollout: Rollout) -> bool:
        return rollout.domain == "a" and rollout.step == 1

    def find_response(self, rollout: Rollout) -> tuple[tuple[int, ...], bool]:
        return (9, 1), True


def preference(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> PreferenceRewards:
    monkeypatch.setattr(product, "DeepSpeedDiscriminator", Table)
    settings: dict[str, Any] = {
        "engine": None,
        "controls": "form",
        "length_ratio": 2.0,
        "updates": 1,
        "warm_up": 2,
    } | changes
    return PreferenceRewards(PreferenceSpec(**settings), {"a"}, Expert(), Letters())  # type: ignore[arg-type]


def rollouts(step: int) -> tuple[Rollout, ...]:
    """The student's responses: one is the expert's answer, the others are not; and another domain's."""
    responses = [(9, 1), (5, 1), (6, 1), (7, 1)]
    own = [
        make_rollout(sample_id=f"{step:06d}/a/{i}", step=step, domain="a", prompt_ids=(2, 3), response_ids=ids)
        for i, ids in enumerate(responses)
    ]
    return (*own, make_rollout(sample_id=f"{step:06d}/b/0", step=step, domain="b", prompt_ids=(2,), response_ids=(4,)))


def test_it_learns_alone_and_then_rewards_what_the_expert_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = preference(monkeypatch)
    assert judge.judge(rollouts(2)) == {} and judge.learn(1, rollouts(1)) == {}, "no response of the student's yet"
    for step in (2, 3):
        assert judge.judge(rollouts(step)) == {}
        readings = judge.learn(step, rollouts(step))
        assert (
            readings["preference_loss"] == pytest.approx(np.log(2)) if step == 2 else readings["preference_loss"] < 0.69
        )
    for step in range(4, 20):
        judge.learn(step, rollouts(step))
    rewards = judge.judge(rollouts(20))
    assert set(rewards) == {f"000020/a/{i}" for i in range(4)}
    assert rewards["000020/a/0"] == pytest.approx(0.5), "the expert's own answer is preferred to itself by half"
    assert max(rewards[f"000020/a/{i}"] for i in (1, 2, 3)) < 0.3
    assert judge.learn(20, rollouts(20))["preference_accuracy"] == pytest.approx((3 + 0.5) / 4)


def test_a_response_of_another_form_earns_nothing_and_is_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a student whose responses are all too long would be as good as the expert: length explains all that tells them apart."""
    judge = preference(monkeypatch, warm_up=0)
    long = make_rollout(sample_id="long", step=2, domain="a", prompt_ids=(2,), response_ids=(9, 9, 9, 9, 1))
    cut = make_rollout(sample_id="cut", step=2, domain="a", prompt_ids=(2,), response_ids=(9, 9, 9), truncated=True)
    assert judge.judge([long, cut]) == {"long": 0.0, "cut": 0.0}
    assert judge.learn(2, [long, cut]) == {} and not judge._engine.steps  # type: ignore[attr-defined]
    fits = make_rollout(sample_id="fits", step=2, domain="a", prompt_ids=(2,), response_ids=(9, 9, 9, 1))
    assert judge.judge([fits, cut]) == {"fits": pytest.approx(0.5), "cut": 0.0}


def test_a_resume_goes_on_with_the_same_rewards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, resumed = preference(monkeypatch), preference(monkeypatch)
    for step in (2, 3):
        whole.learn(step, rollouts(step))
    whole.begin_save(tmp_path)
    assert [file.name for file in whole.saved(1.0) or ()] == ["credit.json"]
    resumed.load(tmp_path)
    for step in (4, 5):
        assert whole.judge(rollouts(step)) == resumed.judge(rollouts(step)) != {}
        assert whole.learn(step, rollouts(step)) == resumed.learn(step, rollouts(step))


def test_a_score_that_is_not_finite_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = preference(monkeypatch)
    judge._engine.table[9] = np.nan  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"step 2: the discriminator's score of .* is not finite"):
        judge.learn(2, rollouts(2))


def test_the_stream_pays_what_the_student_wrote_and_nothing_for_the_experts_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = preference(monkeypatch, warm_up=1)
    verified = VerifiedRewards({}, Letters(), (), 5.0)
    stream = RewardStream(RewardConfig(), {"a", "b"}, verified, LeaveOneOut(), judge, Expert())  # type: ignore[arg-type]

    def paid(step: int) -> list[float | None]:
        judged = stream.judged(RolloutBatch(rollouts=rollouts(step), quarantined=()), []).rollouts
        assert stream.step(step, judged).advantages.keys() == {r.sample_id for r in judged if r.reward is not None}
        return [rollout.reward for rollout in judged]

    assert paid(1) == [None] * 4 + [0.0], "answers of the expert; `b` has an environment that gave nothing"
    assert paid(2) == [None] * 4 + [0.0], "the discriminator is cold"
    rewards = paid(3)
    assert rewards[0] == pytest.approx(0.5) and max(r or 0.0 for r in rewards[1:4]) < 0.5
    record = stream.record(rollouts(3), None)
    assert {"preference_loss", "preference_accuracy"} <= record.credit.keys()
