"""Ranks that share rows on the real DeepSpeed: they take the steps that one rank takes alone, and a resume goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opd import cluster
from opd.config.sections import ClusterConfig
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.specs import trainer_spec
from tests.integration.parts import VOCABULARY, config, rollouts, save, start_pool, stop, weights


@pytest.fixture
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


@pytest.mark.parametrize(
    ("groups", "settings"),
    [
        (1, {"trainer": {"gradient_checkpointing": True}}),
        pytest.param(2, {"trainer": {}}, marks=pytest.mark.slow),
        # Terms of both signs leave some gradients near 0, whose rounding Adam would make as large as any other step.
        pytest.param(
            1,
            {"payload": "sampled_logprobs", "objective": {"kind": "sampled"}, "trainer": {"adam_epsilon": 1e-5}},
            marks=pytest.mark.slow,
        ),
        pytest.param(1, {"payload": "top_k", "objective": {"kind": "top_k", "k": 4}}, marks=pytest.mark.slow),
    ],
    ids=["hidden_states", "two_groups", "sampled_logprobs", "top_k"],
)
def test_ranks_that_share_rows_take_the_steps_of_one(
    ray: None, tmp_path: Path, make_model_dir: Callable[..., Path], groups: int, settings: dict[str, Any]
) -> None:
    base = make_model_dir(tmp_path / "base")
    trainer_settings = settings.get("trainer", {}) | {"micro_batch_tokens": 64}
    others = {key: value for key, value in settings.items() if key != "trainer"}
    alone = config(base, ranks=1, **others, **trainer_settings)
    shared = config(base, ranks=2 * groups, sequence_parallel_size=2, **others, **trainer_settings)
    pool = start_pool(
        alone, {name: make_model_dir(tmp_path / name, seed=seed) for seed, name in ((1, "left"), (2, "right"))}
    )
    reports, exported = [], []
    for number, cfg in enumerate((alone, shared)):
        trainer = DeepSpeedTrainer(trainer_spec(cfg, VOCABULARY))
        trainer.wait_ready()
        assert trainer.layout.layout == ("packed" if cfg is alone else "padded")
        steps = [trainer.train_step(1, rows := rollouts(), pool.score(rows))]
        saved = save(trainer, tmp_path / f"saved-{number}")
        steps.append(trainer.train_step(2, rows := rollouts(seed=1), pool.score(rows)))
        reports.append(steps)
        exported.append(weights(trainer, tmp_path / f"model-{number}"))
        if cfg is shared:
            gap = trainer.logprobs([[5, 6, 7, 8, 9]])
            trainer.load(saved)
            resumed = trainer.train_step(2, rows := rollouts(seed=1), pool.score(rows))
            assert resumed.loss == steps[1].loss
            again = weights(trainer, tmp_path / "again")
            assert all(torch.equal(again[key], exported[1][key]) for key in again)
            assert trainer.logprobs([[5, 6, 7, 8, 9]]) == gap
        stop(trainer)
    stop(pool)
    for one, two in zip(*reports, strict=True):
        # The terms of a sampled divergence are log-probs of a few nats with both signs, which nearly cancel.
        assert two.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-6)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        counts = [{name: (d.tokens, d.samples) for name, d in report.domains.items()} for report in (one, two)]
        assert counts[0] == counts[1]
        assert {bits: p.tokens for bits, p in one.positions.items()} == {
            bits: p.tokens for bits, p in two.positions.items()
        }
    start = weights_of(base)
    for key, weight in exported[0].items():
        assert (exported[1][key] - weight).abs().max() <= 1e-5 < 1e-4 < (weight - start[key]).abs().max(), key


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
