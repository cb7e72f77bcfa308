"""Mixtures of experts and hybrids through the real engines: taught, trained, pushed, exported, resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd import cluster
from opd.records.types import Prompt
from opd.train.deepspeed import DeepSpeedTrainer
from tests.integration.parts import (
    PROBE,
    config,
    mean_gap,
    plain_logprobs,
    rollouts,
    start_engine,
    start_pool,
    start_sync,
    start_trainer,
    stop,
    weights,
)
from tests.integration.test_merge import kill_when_logged, opd, records, write

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


def checkpoint(trainer: DeepSpeedTrainer, path: Path) -> Path:
    path.mkdir()
    trainer.begin_save(path)
    assert trainer.saved(60)
    return path


def test_a_mixture_learns_from_mixtures(ray: None, tmp_path: Path, make_mixture_dir: Make) -> None:
    """Loss falls, two ranks equal one, also where one of them has nothing to do; a checkpoint goes on bit for bit."""
    student = make_mixture_dir(tmp_path / "s", "qwen3_moe", seed=0)
    expert = make_mixture_dir(tmp_path / "e", "qwen3_moe", seed=1)
    rows, after, reports = rollouts(9), {}, {}  # 9 rows in micro-batches of two or three: one rank has an empty one
    pool = start_pool(config(student), {"left": expert, "right": expert})
    for ranks, tokens in ((1, 100_000), (2, 32)):
        settings = {"lr": 1e-2, "adam_epsilon": 1e-3, "ranks": ranks, "micro_batch_tokens": tokens}
        trainer = start_trainer(config(student, **settings))
        reports[ranks] = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2)]
        after[ranks] = weights(trainer, tmp_path / f"ranks-{ranks}")
        if ranks == 1:
            stop(trainer)
    for a, b in zip(reports[1], reports[2], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    start = load_file(student / "model.safetensors")
    assert set(after[1]) == set(after[2]) == set(start), "the names of the hub"
    moved = [name for name, weight in after[1].items() if (weight - start[name]).abs().max() > 1e-4]
    assert {"experts", "gate", "embed_tokens"} <= {part for name in moved for part in name.split(".")}
    for name, weight in after[1].items():
        assert torch.allclose(weight, after[2][name], rtol=0, atol=1e-5), name

    saved = checkpoint(trainer, tmp_path / "saved")
    last = [trainer.train_step(step, rows, pool.score(rows)) for step in (3, 4, 5)]
    assert last[-1].loss < 0.8 * reports[2][0].loss
    ours = weights(trainer, tmp_path / "ours")
    trainer.load(saved)
    again = [trainer.train_step(step, rows, pool.score(rows)) for step in (3, 4, 5)]
    assert [r.loss for r in again] == [r.loss for r in last]
    theirs = weights(trainer, tmp_path / "theirs")
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    stop(trainer, pool)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared_memory", "network", "direct"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_mixtures_push_reaches_the_engine(
    ray: None, tmp_path: Path, make_mixture_dir: Make, tiny_tokenizer: Any, family: str, kind: str
) -> None:
    """vLLM packs experts on a CPU, and a router's bias is no parameter: both are what the trainer has after a push."""
    student, expert = (make_mixture_dir(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    cfg = config(student, lr=3e-2)
    engine, trainer = start_engine(cfg, student, tiny_tokenizer), start_trainer(cfg)
    pool = start_pool(cfg, {"left": expert, "right": expert})
    sync = start_sync(kind, trainer, engine)
    assert sync.measure_gap() < 1e-5
    rows = rollouts()
    trainer.train_step(1, rows, pool.score(rows))
    assert sync.measure_gap() > 0.05, "the step was too small to show anything"
    for version in (1, 2):  # a second reload finds what the first one left
        assert sync.push(version).gap < 1e-5
    exported = weights(trainer, tmp_path / "exported")
    assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(tmp_path / "exported", PROBE)) < 1e-5
    biases = [name for name in exported if name.endswith("e_score_correction_bias")]
    assert len(biases) == (family == "glm4_moe")
    start = load_file(student / "model.safetensors")
    assert all(torch.equal(exported[name], start[name]) for name in biases), "as it was loaded"
    stop(engine, trainer, pool)


@pytest.mark.parametrize("family", ["lfm2", pytest.param("granitemoehybrid", marks=pytest.mark.slow)])
def test_an_engine_runs_a_hybrid(
    ray: None, tmp_path: Path, make_mixture_dir: Make, tiny_tokenizer: Any, family: str
) -> None:
    """Both did not start, LFM2 would have been wrong by up to 0.8 nats; alone and together they are what they should be."""
    first, second = (make_mixture_dir(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    engine = start_engine(config(first), first, tiny_tokenizer)
    prompts = [Prompt(id=f"left/{i}", domain="left", token_ids=tuple(range(5 + i, 11 + 3 * i))) for i in range(6)]
    for model_dir in (first, second, first):
        engine.load(model_dir)
        assert mean_gap(engine.logprobs(PROBE)[0], plain_logprobs(model_dir, PROBE)) < 1e-5
        written = engine.generate(prompts, step=1, policy_version=0).rollouts
        whole = plain_logprobs(model_dir, [(*r.prompt_ids, *r.response_ids) for r in written])
        for rollout, logprobs in zip(written, whole, strict=True):
            assert rollout.behaviour_logprobs == pytest.approx(logprobs[len(rollout.prompt_ids) - 1 :], abs=1e-4)
    stop(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_merge_of_mixtures_killed_and_resumed(
    tmp_path: Path, pipeline: dict[str, Any], make_mixture_dir: Make, family: str
) -> None:
    """The whole command; killed after a checkpoint it ends with the same weights. gpt-oss gets a new engine a push."""
    for seed, name in enumerate(("student", "left", "right")):
        model_dir = make_mixture_dir(tmp_path / family / name, family, seed=seed)
        (pipeline["student"] if name == "student" else pipeline["experts"][name])["model"] = str(model_dir)
    file, whole, broken = write(tmp_path, pipeline), tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = records(whole)
    assert all(record["probe_gap"] < 1e-4 for record in steps)
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < 0.9 * steps[0]["domains"][domain]["loss"]
    kill_when_logged(file, broken, 4)
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert set(ours) == set(theirs) == set(load_file(Path(pipeline["student"]["model"]) / "model.safetensors"))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert [r["loss"] for r in steps] == [r["loss"] for r in records(broken)]
