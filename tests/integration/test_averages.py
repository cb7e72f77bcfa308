"""A moving average of the student as its teacher, through DeepSpeed and Ray: the same numbers as by hand, and bit for bit after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.train.deepspeed import DeepSpeedTrainer
from opd.train.shards import Shards
from pipelines.routes import base_teacher_weights
from pipelines.specs import pool_spec, teacherless_spec, trainer_spec
from teachers.no_teachers import TeacherlessPool
from teachers.pool import Pool
from tests.integration.parts import VOCABULARY, config, rollouts, save, stop, weights

DECAY = 0.5
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def build_config(student: Path, payload: str, lora: Any, ema: float | None = DECAY, **trainer: Any) -> PipelineConfig:
    """Both domains have the average as their teacher."""
    kinds = {"hidden_states": "reverse_kl", "sampled_logprobs": "sampled"}
    data = config(student, lr=1e-2, adam_epsilon=1e-3, **trainer).model_dump(exclude_defaults=True)
    data["student"] = {"model": student, "lora": lora}
    data["experts"] = {"slow": {"model": "student", "domain": "left", "ema": ema}}
    data["domains"] = {"left": {}, "right": {"teachers": "slow"}}
    data["teachers"], data["objective"] = {"payload": payload}, {"kind": kinds[payload]}
    return PipelineConfig.model_validate(data)


def read_hint(rollout: Rollout) -> tuple[int, ...]:
    """Return the teacher's prompt: without it, it would say what the student says at first, and nothing would ever move."""
    return (9, 11, *rollout.prompt_ids)


def start(cfg: PipelineConfig, average: Path | None = None) -> tuple[DeepSpeedTrainer, Any]:
    """Trainer and pool; `average` is a model that a scoring worker loads in the place of the ranks' own average."""
    teacher = Teacher(name="slow", model_dir=average or cfg.student.model)
    itself = (WeightedTeacher(teacher=teacher, weight=1.0, prompts=read_hint),)
    scoring = {"left": itself, "right": itself}
    assert bool(base_teacher_weights(cfg, scoring)) == (average is None)
    pool = Pool(pool_spec(cfg, VOCABULARY), scoring) if average else TeacherlessPool(teacherless_spec(cfg))
    trainer = DeepSpeedTrainer(trainer_spec(cfg, VOCABULARY, scoring))
    trainer.wait_ready()
    pool.wait_ready()
    return trainer, pool


def read_kind(path: Path, kind: str, like: Weights) -> Weights:
    """The tensors of one kind in a checkpoint, whole."""
    with Shards(path) as shards:
        flat = {name: shards.read_slice(f"{kind}/{name}", t.numel(), 0, t.numel()) for name, t in like.items()}
    return {name: values.view(like[name].shape) for name, values in flat.items()}


def write_model(student: Path, tensors: Weights, path: Path) -> Path:
    path.mkdir()
    for file in student.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("payload", "settings"),
    [
        ("hidden_states", {"ranks": 2, "micro_batch_tokens": 64}),
        pytest.param("sampled_logprobs", {"ranks": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_average_is_that_by_hand_and_teaches_as_a_model_with_its_weights(
    ray: None, tmp_path: Path, make_model_dir: Callable[..., Path], payload: str, settings: dict[str, Any]
) -> None:
    student = make_model_dir(tmp_path / "s")
    rows = rollouts(24)
    trainer, pool = start(build_config(student, payload, None, **settings))
    average = weights(trainer, tmp_path / "0")
    before = dict(average)
    for step in (1, 2, 3):
        trainer.train_step(step, rows, pool.score(rows))
        now = weights(trainer, tmp_path / f"{step}")
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in now.items()}
        found = read_kind(save(trainer, tmp_path / f"saved-{step}"), f"average-{DECAY!r}", average)
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
    assert max(float((now[name] - before[name]).abs().max()) for name in now) > 1e-3, "the student moved"
    report = trainer.train_step(4, rows, pool.score(rows))
    last = weights(trainer, tmp_path / "4")
    stop(trainer)

    trainer, pool = start(build_config(student, payload, None, **settings))
    trainer.load(tmp_path / "saved-3")
    assert trainer.train_step(4, rows, pool.score(rows)).loss == report.loss
    resumed = weights(trainer, tmp_path / "resumed")
    assert all(torch.equal(resumed[name], value) for name, value in last.items())
    stop(trainer)

    models = [write_model(student, tensors, tmp_path / name) for name, tensors in (("now", now), ("slow", average))]
    cfg = build_config(models[0], payload, None, ema=None, **settings)
    trainer, pool = start(cfg, models[1])
    wanted = trainer.train_step(4, rows, pool.score(rows))
    stop(trainer, pool)
    assert report.loss == pytest.approx(wanted.loss, rel=1e-5) and report.grad_norm == pytest.approx(
        wanted.grad_norm, rel=1e-4
    )


def test_of_adapters_the_average_is_that_of_their_matrices(
    ray: None, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    student = make_model_dir(tmp_path / "s")
    rows = rollouts(16)
    trainer, pool = start(build_config(student, "hidden_states", {"r": 4, "alpha": 8}))
    saved = save(trainer, tmp_path / "saved-0")
    names = [
        name.removeprefix("param/") for name in load_file(saved / "rank-0.safetensors") if name.startswith("param/")
    ]
    assert names and all("lora" in name for name in names)
    like = {name: torch.empty(load_file(saved / "rank-0.safetensors")[f"param/{name}"].shape) for name in names}
    average = read_kind(saved, "param", like)
    for step in (1, 2):
        trainer.train_step(step, rows, pool.score(rows))
        saved = save(trainer, tmp_path / f"saved-{step}")
        now = read_kind(saved, "param", like)
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in now.items()}
        found = read_kind(saved, f"average-{DECAY!r}", like)
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
    assert any(float((average[name] - now[name]).abs().max()) > 1e-4 for name in names)
    stop(trainer)
