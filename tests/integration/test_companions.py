"""A companion on the real DeepSpeed: two ranks end with the student that they end with alone, and a checkpoint has both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from opd import cluster
from opd.config import PipelineConfig
from opd.config.draft import DraftConfig
from opd.config.sections import ClusterConfig
from opd.draft.companion import DraftSpec
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.draft import draft_spec
from pipelines.specs import trainer_spec
from tests.companions import GuesserSpec
from tests.integration.parts import VOCABULARY, config, rollouts, save, start_pool, stop, weights


@pytest.fixture
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def make_draft(cfg: PipelineConfig) -> DraftSpec:
    return draft_spec(cfg, DraftConfig(lr=3e-3), VOCABULARY)


def test_no_bit_of_the_student_changes_and_a_resume_goes_on_bit_for_bit(
    ray: None, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    cfg = config(make_model_dir(tmp_path / "base"), ranks=2, micro_batch_tokens=64, gradient_checkpointing=True)
    pool = start_pool(
        cfg, {name: make_model_dir(tmp_path / name, seed=seed) for seed, name in ((1, "left"), (2, "right"))}
    )
    spec = trainer_spec(cfg, VOCABULARY)
    found = {}
    for name, companions in (("alone", ()), ("guesser", (GuesserSpec(),)), ("draft", (make_draft(cfg),))):
        trainer = DeepSpeedTrainer(
            dataclasses.replace(spec, rank=dataclasses.replace(spec.rank, companions=companions))
        )
        trainer.wait_ready()

        def step(number: int, trainer: DeepSpeedTrainer = trainer) -> dict[str, dict[str, float]]:
            return trainer.train_step(number, rows := rollouts(), pool.score(rows)).companions

        losses = [step(1)]
        saved = save(trainer, tmp_path / f"{name}-saved")
        losses.append(step(2))
        found[name] = weights(trainer, tmp_path / f"{name}-model")
        if companions:
            assert (saved / f"{name}.safetensors").exists()
            assert losses[1][name]["loss"] < losses[0][name]["loss"]
            trainer.load(saved)
            assert step(2) == losses[1]
            again = weights(trainer, tmp_path / f"{name}-again")
            assert all(torch.equal(again[key], found[name][key]) for key in again)
        stop(trainer)
    stop(pool)
    for beside in ("guesser", "draft"):
        assert all(torch.equal(found["alone"][key], found[beside][key]) for key in found["alone"])
