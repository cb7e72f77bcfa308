"""LoRA experts with which the trainer's ranks score on the student's base, through DeepSpeed, Ray and the whole command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.records.types import Teacher, WeightedTeacher
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.routes import scoring_routes
from pipelines.specs import pool_spec, teacherless_spec, trainer_spec
from teachers.no_teachers import TeacherlessPool
from teachers.pool import Pool
from tests.integration.parts import VOCABULARY, config, rollouts, save, stop, weights
from tests.integration.test_merge import kill_when_logged, opd, records, write
from tests.unit.conftest import build_adapter

Make = Callable[..., Path]
LORA = {"r": 4, "alpha": 8}
OBJECTIVES = {"hidden_states": "reverse_kl", "sampled_logprobs": "sampled", "top_k": "top_k"}
OFFLOAD = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def experts_config(student: Path, teachers: dict[str, Any], **trainer: Any) -> PipelineConfig:
    """Two responses to a prompt; `left` has a target beyond its expert, `right` a mixture of both, unless likeliest tokens are sent, of
    which neither can be made."""
    data = config(student, lr=1e-2, adam_epsilon=1e-3, **trainer).model_dump(exclude_defaults=True)
    data["student"] = {"model": student, "lora": LORA}
    data["domains"] = {"left": {} if teachers["payload"] == "top_k" else {"extrapolate": 1.5}, "right": {}}
    data["rollout"] |= {"n": 2}
    data["teachers"] = teachers
    data["objective"] = {"kind": OBJECTIVES[teachers["payload"]]}
    return PipelineConfig.model_validate(data)


@pytest.mark.parametrize(
    "payload",
    ["hidden_states", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sampled_logprobs", "top_k"))],
)
def test_ranks_say_what_scoring_workers_say_and_go_on_bit_for_bit(
    ray: None, tmp_path: Path, make_model_dir: Make, payload: str
) -> None:
    student = make_model_dir(tmp_path / "s")
    left, right = (
        Teacher(name=name, model_dir=student, adapter_dir=build_adapter(tmp_path / name, student, seed=seed))
        for seed, name in enumerate(("left", "right"))
    )
    routes = {
        "left": (WeightedTeacher(teacher=left, weight=1.0),),
        "right": (WeightedTeacher(teacher=right, weight=0.75), WeightedTeacher(teacher=left, weight=0.25)),
    }
    if payload == "top_k":
        routes["right"] = (WeightedTeacher(teacher=right, weight=1.0),)
    made = rollouts(48)
    # The next but one is of the same domain.
    rows = [replace(r, prompt_ids=made[i - i % 4 + i % 2].prompt_ids) for i, r in enumerate(made)]

    def start(teachers: dict[str, Any], **settings: Any) -> tuple[DeepSpeedTrainer, Any]:
        cfg = experts_config(student, teachers | {"payload": payload}, **settings)
        scoring = scoring_routes(cfg, routes, Teacher(name="start student", model_dir=student))
        on_base = cfg.teachers.engine == "trainer"
        pool: Any = TeacherlessPool(teacherless_spec(cfg)) if on_base else Pool(pool_spec(cfg, VOCABULARY), scoring)
        trainer = DeepSpeedTrainer(trainer_spec(cfg, VOCABULARY, scoring))
        trainer.wait_ready()
        pool.wait_ready()
        return trainer, pool

    trainer, pool = start({})
    by_workers = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2, 3)]
    wanted, before = weights(trainer, tmp_path / "workers"), load_file(student / "model.safetensors")
    stop(trainer, pool)
    assert any((wanted[name] - before[name]).abs().max() > 1e-3 for name in wanted)

    for settings in (
        {"ranks": 1, "micro_batch_tokens": 100_000},
        {"ranks": 2, "micro_batch_tokens": 64, "gradient_checkpointing": True, "deepspeed": OFFLOAD},
    ):
        trainer, pool = start({"engine": "trainer"}, **settings)
        reports = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2)]
        saved = save(trainer, tmp_path / f"saved-{settings['ranks']}")
        reports.append(trainer.train_step(3, rows, pool.score(rows)))
        ours = weights(trainer, tmp_path / f"ranks-{settings['ranks']}")
        stop(trainer)
        for a, b in zip(by_workers, reports, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5, abs=1e-7)  # a mean of either sign may be near 0
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
        assert all(torch.allclose(ours[name], weight, rtol=0, atol=1e-5) for name, weight in wanted.items())
    trainer, pool = start({"engine": "trainer"}, **settings)
    trainer.load(saved)
    assert trainer.train_step(3, rows, pool.score(rows)).loss == reports[-1].loss
    theirs = weights(trainer, tmp_path / "theirs")
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    stop(trainer)


@pytest.mark.slow  # two merges; that ranks go on bit for bit is in the test above
def test_a_merge_of_lora_experts_killed_and_resumed(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    """The whole command: the log has the responses alone, and a resume scores them again."""
    student = Path(pipeline["student"]["model"])
    for seed, name in enumerate(pipeline["experts"]):
        pipeline["experts"][name]["model"] = str(build_adapter(tmp_path / f"{name}-lora", student, seed=seed))
    pipeline["student"]["lora"] = LORA
    pipeline["teachers"] = {"engine": "trainer"}
    pipeline["domains"]["left-domain"]["extrapolate"] = 1.5
    pipeline["trainer"]["lr"] = 2e-2
    file, whole, broken = write(tmp_path, pipeline), tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = records(whole)
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < 0.9 * steps[0]["domains"][domain]["loss"]
    kill_when_logged(file, broken, 4)
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step 2" in resumed.stderr
    ours, theirs = (load_file(run / "model/model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
