"""A companion sees what the student computes, learns from it, and no bit of the student's step changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd import cluster
from opd.models.heads import HeadSource
from opd.models.logit_rule import IDENTITY
from opd.train import deepspeed, rank, zero
from opd.train.rank import RankResult, RankWork
from pipelines.specs import trainer_spec
from tests.companions import Guesser, GuesserSpec
from tests.unit.opd.train.test_rank import (
    NONE,
    WORK,
    FakeRank,
    Targets,
    config,
    gradient,
    one_rank,
    rollout,
    row,
    stream,
)

SPEC = GuesserSpec()
GUESSES = dataclasses.replace(WORK, companions={SPEC.name: WORK.components["divergence"]})
HEAD = HeadSource(key="h", rule=IDENTITY, handle=cluster.StoredValue(np.eye(76, 2, dtype=np.float32)))


def with_companion(model_dir: Path, monkeypatch: pytest.MonkeyPatch, *, recompute: bool = False) -> rank.TrainerRank:
    """A rank on plain torch that starts as on DeepSpeed, with a companion."""
    made = one_rank(model_dir, {"kind": "reverse_kl"})
    made._options = dataclasses.replace(made._options, companions=(SPEC,))
    zero._disable_randomness(made._engine.module, recompute)
    monkeypatch.setattr(zero.ZeroEngine, "start", lambda *_: None)
    made.start("127.0.0.1", 1)
    return made


def step(made: rank.TrainerRank, work: RankWork) -> tuple[RankResult, Tensor, float]:
    """Result, gradient and the companion's loss of a step in two micro-batches."""
    made.begin_step(work, {"h": HEAD})
    made.accumulate_micro_batch(0, NONE, stream("a", "c"))
    made.accumulate_micro_batch(1, NONE)
    found = made.step_companions({SPEC.name: 0.5}) if made._companions else {SPEC.name: {"loss": 0.0}}
    return made.finish_step(1.0), gradient(made), found[SPEC.name]["loss"]


@pytest.mark.parametrize("recompute", [False, True])
def test_no_bit_of_the_student_changes(
    recompute: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any
) -> None:
    alone = one_rank(tiny_model_dir, {"kind": "reverse_kl"})
    zero._disable_randomness(alone._engine.module, recompute)
    expected, without, _ = step(alone, WORK)
    made = with_companion(tiny_model_dir, monkeypatch, recompute=recompute)
    found, beside, loss = step(made, GUESSES)
    assert torch.equal(without, beside) and without.norm() > 0
    assert repr(found) == repr(expected)
    assert loss == pytest.approx(np.log(76) / 0.5), "it knows nothing yet; half of the weight was scored"
    losses = [step(made, GUESSES)[2] for _ in range(5)]
    assert max(losses) < 0.98 * loss, "it learns"


def test_it_sees_outputs_of_layers_and_exact_logits(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any
) -> None:
    made = with_companion(tiny_model_dir, monkeypatch)
    companion = made._companions[SPEC.name]
    assert isinstance(companion, Guesser)
    seen: list[Any] = []
    monkeypatch.setattr(companion, "add_gradients", lambda *args: seen.append(args))
    made.begin_step(dataclasses.replace(GUESSES, micro_batches=(("a", "c"),)), {"h": HEAD})
    made.accumulate_micro_batch(0, NONE, stream("a", "c"))
    ((_, hidden, weight_N),) = seen
    lm = made._engine.module.lm
    with torch.no_grad():
        whole = lm(
            torch.tensor([[*row("a").rollout.prompt_ids, *row("a").rollout.response_ids]]), output_hidden_states=True
        )
    assert weight_N.tolist() == [0.25] * 4 and set(hidden) == {0, 1}
    torch.testing.assert_close(hidden[0][:4], whole.hidden_states[1][0])
    torch.testing.assert_close(lm.base_model.norm(hidden[1])[:4], whole.hidden_states[2][0])
    (p_N_V,) = companion._p
    torch.testing.assert_close(p_N_V[:2], whole.logits[0, 1:3].softmax(-1))


def test_a_rank_without_rows_takes_part(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any) -> None:
    made = with_companion(tiny_model_dir, monkeypatch)
    made.begin_step(dataclasses.replace(GUESSES, micro_batches=((),)), {})
    made.accumulate_micro_batch(0, NONE)
    assert made.step_companions({SPEC.name: 1.0}) == {SPEC.name: {"loss": 0.0}}


def test_its_state_is_in_checkpoints_and_its_model_is_exported(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any
) -> None:
    made = with_companion(tiny_model_dir, monkeypatch)
    for name, value in {"begin_save": None, "load": None, "saved": ()}.items():
        monkeypatch.setattr(zero.ZeroEngine, name, lambda *_, value=value: value)
    step(made, GUESSES)
    made.begin_save(tmp_path)
    (file,) = made.saved(1.0) or ()
    assert file.name == "guesser.safetensors" and file.size == (tmp_path / file.name).stat().st_size
    expected = [step(made, GUESSES)[2] for _ in range(2)]
    made.load(tmp_path)
    assert [step(made, GUESSES)[2] for _ in range(2)] == expected
    monkeypatch.setattr(zero.ZeroEngine, "saved", lambda *_: None)
    assert made.saved(1.0) is None, "the student's files are not all written"
    made.export_companions(tmp_path)
    assert (tmp_path / "guesser" / "model.safetensors").exists()


class CompanionRank(FakeRank):
    """Says of its companions by what share they were divided."""

    def step_companions(self, shares: dict[str, float]) -> dict[str, dict[str, float]]:
        return {name: {"share": share} for name, share in shares.items()}


def test_the_driver_weighs_all_its_tokens_alike_and_divides_by_what_was_scored(in_process: Any) -> None:
    in_process.replace = CompanionRank
    spec = trainer_spec(config(ranks=2), 9)
    spec = dataclasses.replace(spec, rank=dataclasses.replace(spec.rank, companions=(SPEC,)))
    trainer = deepspeed.DeepSpeedTrainer(spec)
    targets: Any = Targets(*"abc", broken=("c",))
    report = trainer.train_step(1, [rollout(i) for i in "abc"], targets)
    works = [work for fake in in_process.workers for work, _ in fake.works]
    assert {i: w for work in works for i, w in work.companions["guesser"].weights.items()} == pytest.approx(
        dict.fromkeys("abc", 1 / 6)
    )
    assert report.companions == {"guesser": {"share": pytest.approx(2 / 3)}}
