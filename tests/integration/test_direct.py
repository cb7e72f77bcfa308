"""Weights straight from two trainer ranks into two engines by gloo: bit for bit those of files, also when an engine dies in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from opd import cluster
from opd.config.sections import ClusterConfig
from opd.rollouts.engines import Engines
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import VLLMWorker
from opd.train.deepspeed import DeepSpeedTrainer
from opd.transfer.routes import DirectPush, MeetingPoint, Route
from tests.integration.parts import (
    PROBE,
    altered,
    config,
    start_engine,
    start_sync,
    start_trainer,
    stop,
    weights,
    with_rollout,
)

Make = Callable[..., Path]


class MortalWorker(VLLMWorker):
    """Dies in its first direct push, when it has taken two buckets."""

    def receive_directly(self, model_dir: Path, push: DirectPush) -> str:
        from opd.rollouts.engine_channel import EngineChannel

        take_buckets = EngineChannel.take_buckets

        def take_two(channel: EngineChannel, push: DirectPush) -> Iterator[Any]:
            for index, tensors in enumerate(take_buckets(channel, push)):
                if index == 2:
                    os._exit(1)
                yield tensors

        EngineChannel.take_buckets = take_two  # type: ignore[method-assign]
        return super().receive_directly(model_dir, push)


class TakingWorker:
    """An engine that keeps what it is sent as it comes."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def memory_ids(self) -> list[str]:
        return [""]

    def join_channel(self, meeting: MeetingPoint, routes: Sequence[Route]) -> str:
        from opd.rollouts.engine_channel import EngineChannel

        self._channel = EngineChannel(meeting, routes[0], torch.device("cpu"))
        return ""

    def receive_directly(self, model_dir: Path, push: DirectPush) -> str:
        self._held = {}
        for slots, tensors in zip(push.plan.buckets, self._channel.take_buckets(push), strict=True):
            for slot, (name, tensor) in zip(slots, tensors, strict=True):
                assert (name, tuple(tensor.shape), str(tensor.dtype)) == (slot.name, slot.shape, f"torch.{slot.dtype}")
                assert name not in self._held
                self._held[name] = tensor
        return ""

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        pass

    def finish_stream(self) -> None:
        pass

    def held(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self._held.items()}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_engine_is_sent_the_tensors_of_the_files_bit_for_bit(
    tmp_path: Path, make_mixture_dir: Make, ranks: int
) -> None:
    """From real shards of any number of ranks, two pushes through one channel; the fused experts of a layer need several buckets."""
    student = make_mixture_dir(tmp_path / "student", "qwen3_moe")
    with cluster.ray_session(ClusterConfig(), 8):
        trainer = start_trainer(config(student, ranks=ranks))

        def spawn(index: int) -> Any:
            return cluster.spawn_worker(TakingWorker, name=f"taker {index}", env=cluster.worker_env(2, 1))

        engines = Engines(spawn, 2, student, (120, 120))
        for factor in (1.1, 0.9):
            trainer.load(altered(trainer, tmp_path / f"saved {factor}", factor))
            files = weights(trainer, tmp_path / f"files {factor}")
            assert engines.receive_directly(trainer.direct_source(20_000, keeps=False)) == ""
            for worker in engines._workers:
                found = worker.submit(TakingWorker.held).wait_for_result(timeout_s=60)
                assert set(found) == set(files)
                assert all(torch.equal(torch.tensor(found[name]), tensor) for name, tensor in files.items())
        stop(engines, trainer)


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
        patch.setattr("opd.rollouts.vllm.VLLMRolloutEngine.WORKER", MortalWorker)
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
