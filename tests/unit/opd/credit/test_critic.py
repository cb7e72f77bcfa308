"""A critic's credit around its engine: when the policy may train, what a kill leaves, what is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.config.reward import WarmUpConfig
from opd.credit import critic
from opd.credit.critic import CriticCredit, CriticSpec, explained_variance
from opd.credit.gae import GaeSpec
from opd.errors import RunError
from opd.records.types import Rollout, WrittenFile
from opd.run.checkpoints import CompanionSaver
from tests.credit import chain, segment


@dataclass
class Engine:
    """Stands for `DeepSpeedCritic`: says what it is told to, and writes one file."""

    says: Any
    calls: list[tuple[str, Any]] = field(default_factory=list)
    written: bool = False

    def values(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        self.calls.append(("values", [r.sample_id for r in rollouts]))
        return {r.sample_id: np.full(r.num_trained + 1, self.says(r), np.float32) for r in rollouts}

    def update(self, step: int, returns: Mapping[str, Any], old_values: Mapping[str, Any]) -> tuple[float, float]:
        assert {i: len(v) for i, v in returns.items()} == {i: len(v) for i, v in old_values.items()}
        self.calls.append(("update", step))
        return 0.5 / len(self.calls), float(len(self.calls))

    def wait_ready(self) -> None:
        self.calls.append(("ready", None))

    def begin_save(self, path: Path) -> None:
        (path / "rank-0.safetensors").write_text("weights")

    def saved(self, wait_s: float) -> list[WrittenFile] | None:
        return [WrittenFile(name="rank-0.safetensors", blake3="h", size=7, seconds=0.5)] if self.written else None

    def load(self, path: Path) -> None:
        self.calls.append(("load", (path / "rank-0.safetensors").read_text()))


def made(monkeypatch: pytest.MonkeyPatch, says: Any, **spec: Any) -> tuple[CriticCredit, Engine]:
    engine = Engine(says)
    monkeypatch.setattr(critic, "DeepSpeedCritic", lambda _: engine)
    return CriticCredit(CriticSpec(engine=None, **spec)), engine  # type: ignore[arg-type]


def step_of(*rewards: float | None, **columns: Any) -> list[Rollout]:
    return [segment("aaoa", episode=f"e{i}", reward=reward, **columns) for i, reward in enumerate(rewards)]


def knows(rollout: Rollout) -> float:
    return 0.9 * float(rollout.reward or 0.0)


def test_values_come_before_the_updates_and_rollouts_without_a_reward_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, engine = made(monkeypatch, knows, updates=3)
    found = credit.assign(7, step_of(1.0, None, 0.0))
    assert engine.calls == [("values", ["e0", "e2"]), *[("update", 7)] * 3]
    assert {i: a.shape for i, a in found.advantages.items()} == {"e0": (3,), "e2": (3,)}
    assert found.advantages["e0"][-1] == pytest.approx(0.1)
    assert found.readings == pytest.approx(
        {
            "mean_return": 0.5, "mean_value": 0.45, "explained_variance": 0.99, "value_loss": 0.25,
            "critic_grad_norm": 4.0, "value_bias_turn_0": -0.05, "value_bias_turn_1": -0.05,
        }
    )  # fmt: skip


def test_turns_go_on_after_a_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, _ = made(monkeypatch, knows)
    found = credit.assign(1, [*chain("aaoaa", "aa").segments, *step_of(0.0)])
    assert {key for key in found.readings if "bias" in key} == {f"value_bias_turn_{turn}" for turn in range(3)}


def test_a_step_without_a_reward_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, engine = made(monkeypatch, knows)
    found = credit.assign(1, step_of(None, None))
    assert (found.advantages, found.warm, engine.calls) == ({}, False, [])
    found = credit.assign(2, [segment("oo", reward=1.0)])
    assert [len(a) for a in found.advantages.values()] == [0] and engine.calls == []


def test_the_policy_waits_until_the_critic_explains_something_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that begins at zero spoils a short run if the policy trains on it from the first step (reef)."""
    good, bad = knows, lambda rollout: -float(rollout.reward or 0.0)
    credit, engine = made(monkeypatch, lambda _: 0.0, warm_up=WarmUpConfig(steps=2))
    seen = []
    for step, says in enumerate([lambda _: 0.0, good, bad, good, good, bad, lambda _: 0.3], start=1):
        engine.says = says
        seen.append(credit.assign(step, step_of(1.0, 0.0, 0.5)).warm)
    assert seen == [False, False, False, False, True, True, True], "two in a row; then it stays warm"


def test_rewards_that_are_all_equal_warm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, _ = made(monkeypatch, knows, warm_up=WarmUpConfig(steps=1, at_most=3))
    for step in (1, 2):
        found = credit.assign(step, step_of(1.0, 1.0))
        assert not found.warm and "explained_variance" not in found.readings
    with pytest.raises(RunError, match=r"step 3: the critic is not warm after 3 steps: all returns are equal"):
        credit.assign(3, step_of(1.0, 1.0))


def test_a_critic_that_never_explains_anything_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, _ = made(
        monkeypatch, lambda r: -0.1 * float(r.reward or 0.0), warm_up=WarmUpConfig(explained=0.05, at_most=1)
    )
    with pytest.raises(
        RunError, match=r"it explains -0\.21 of the variance of the returns, wanted more than 0\.05; the policy"
    ):
        credit.assign(1, step_of(1.0, 0.0))


def test_values_that_broke_are_refused_with_the_samples_name(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, engine = made(monkeypatch, lambda r: np.nan if r.sample_id == "e1" else 0.0)
    with pytest.raises(RunError, match="step 4: the critic's values of e1 are not finite"):
        credit.assign(4, step_of(1.0, 0.0))
    assert engine.calls == [("values", ["e0", "e1"])], "nothing was learnt from it"


def test_the_warm_up_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    credit, engine = made(monkeypatch, knows, warm_up=WarmUpConfig(steps=2))
    credit.assign(1, step_of(1.0, 0.0))
    credit.begin_save(tmp_path / "credit")
    assert credit.saved(0.0) is None, "the shards are not written yet"
    engine.written = True
    assert [f.name for f in credit.saved(0.0) or ()] == ["rank-0.safetensors", "credit.json"]
    assert json.loads((tmp_path / "credit" / "credit.json").read_text()) == {"above": 1, "cold_steps": 1}
    again, engine = made(monkeypatch, knows, warm_up=WarmUpConfig(steps=2))
    again.load(tmp_path / "credit")
    assert engine.calls == [("load", "weights")]
    assert again.assign(2, step_of(1.0, 0.0)).warm


def test_a_checkpoint_holds_the_trainer_and_the_critic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both name their files alike, so each has a directory."""
    credit, engine = made(monkeypatch, knows)
    together = CompanionSaver(Engine(None, written=True), credit, "credit")
    together.begin_save(tmp_path)
    assert together.saved(0.0) is None
    engine.written = True
    names = [f.name for f in together.saved(0.0) or ()]
    assert names == ["rank-0.safetensors", "credit/rank-0.safetensors", "credit/credit.json"]
    assert all((tmp_path / name).is_file() for name in names)


def test_explained_variance_is_about_differences_and_not_about_the_mean() -> None:
    returns = np.array([0.0, 1.0, 1.0, 0.0], np.float32)
    assert explained_variance(returns + 5, returns) == pytest.approx(1.0)
    assert explained_variance(np.full(4, 0.5, np.float32), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4, np.float32)) is None


def test_how_far_credit_reaches_is_the_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, _ = made(monkeypatch, lambda _: 0.25, gae=GaeSpec(policy_lambda=0.0))
    assert credit.assign(1, step_of(1.0)).advantages["e0"].tolist() == [0.0, 0.0, 0.75]
