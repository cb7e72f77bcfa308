"""Weights straight from two trainer ranks into two engines by gloo: bit for bit those of files, also when an engine dies in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.config.sections import ClusterConfig
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import VLLMWorker
from opd.train.deepspeed import DeepSpeedTrainer
from opd.transfer.routes import DirectPush
from tests.integration.parts import (
    PROBE,
    altered,
    config,
    start_engine,
    start_sync,
    start_trainer,
    stop,
    with_rollout,
)

Make = Callable[..., Path]


class MortalWorker(VLLMWorker):
    """Dies in its first direct push, when it has taken two buckets."""

    def receive_directly(self, model_dir: Path, push: DirectPush) -> str:
        from opd.rollouts.direct import EngineChannel

        take_buckets = EngineChannel.take_buckets

        def take_two(channel: EngineChannel, push: DirectPush) -> Iterator[Any]:
            for index, tensors in enumerate(take_buckets(channel, push)):
                if index == 2:
                    os._exit(1)
                yield tensors

        EngineChannel.take_buckets = take_two  # type: ignore[method-assign]
        return super().receive_directly(model_dir, push)


@pytest.fixture(scope="module")
def ends(
    tmp_path_factory: pytest.TempPathFactory, make_model_dir: Make, tiny_tokenizer: Any
) -> Iterator[tuple[DeepSpeedTrainer, VLLMRolloutEngine, Path]]:
    """Two ranks and two engines of a student, and another model of its shape."""
    root = tmp_path_factory.mktemp("direct")
    student, other = (make_model_dir(root / str(seed), seed=seed) for seed in (0, 1))
    cfg = with_rollout(config(student, ranks=2), workers=2)
    with cluster.ray_session(ClusterConfig(), 8):
        trainer, engine = start_trainer(cfg), start_engine(cfg, student, tiny_tokenizer)
        yield trainer, engine, other
        stop(engine, trainer)


def test_engines_hold_what_files_would_give_them(
    ends: tuple[DeepSpeedTrainer, VLLMRolloutEngine, Path], tmp_path: Path
) -> None:
    trainer, engine, other = ends
    notices: list[str] = []
    files, direct = (start_sync(kind, trainer, engine, tell=notices.append) for kind in ("shared_memory", "direct"))
    for version, factor in ((1, 1.1), (2, 0.9)):
        trainer.load(altered(trainer, tmp_path / str(version), factor))
        assert files.push(version).gap < 1e-4
        wanted = engine.logprobs(PROBE)
        engine.load(other)
        assert direct.measure_gap() > 0.05
        assert direct.push(version).gap < 1e-4
        assert engine.logprobs(PROBE) == wanted
    assert notices == []


@pytest.mark.parametrize("keeps", [False, True])
def test_an_engine_that_dies_in_the_middle_is_replaced_and_the_next_push_goes_directly(
    ends: tuple[DeepSpeedTrainer, VLLMRolloutEngine, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    trainer, engine, other = ends
    notices: list[str] = []
    direct = start_sync("direct", trainer, engine, tell=notices.append, keeps_weights=keeps)
    engine._workers[1].kill()
    with monkeypatch.context() as patch:
        patch.setattr("opd.rollouts.vllm.VLLMWorker", MortalWorker)
        engine.load(other)  # restarts the second engine as one that will die
    trainer.load(altered(trainer, tmp_path / "first", 1.1))
    assert direct.push(1).gap < 1e-4
    assert len(notices) == 1 and "object store: rollout worker 1: " in notices[0]
    wanted = engine.logprobs(PROBE)
    trainer.load(altered(trainer, tmp_path / "second", 0.9))
    if keeps:  # the trainer has gone on
        engine._workers[0].kill()
        while len(engine._restarted) < 3:
            assert engine.logprobs(PROBE) == wanted
    assert direct.push(2).gap < 1e-4 and len(notices) == 1
    engine._restarted.clear()
