"""A LoRA student through the real engines: DeepSpeed with frozen weights, PEFT's layers, and vLLM that is told a part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experts.adapter import inspect_adapter, merge_adapter
from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.records.types import Teacher, WeightedTeacher
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.specs import pool_spec, trainer_spec
from teachers.pool import Pool
from tests.integration.parts import (
    PROBE,
    VOCABULARY,
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
LORA = {"r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def lora_config(student: Path, targets: Any = "all-linear", **trainer: Any) -> PipelineConfig:
    cfg = config(student, lr=1e-2, adam_epsilon=1e-3, **trainer)
    data = cfg.model_dump() | {"student": {"model": student, "lora": LORA | {"targets": targets}}}
    return PipelineConfig.model_validate(data)


def checkpoint(trainer: DeepSpeedTrainer, path: Path) -> Path:
    path.mkdir()
    trainer.begin_save(path)
    assert trainer.saved(60)
    return path


def test_two_ranks_equal_one_and_a_checkpoint_goes_on_bit_for_bit(
    ray: None, tmp_path: Path, make_model_dir: Make
) -> None:
    student, expert = make_model_dir(tmp_path / "s"), make_model_dir(tmp_path / "e", seed=1)
    rows = rollouts(48)
    pool = start_pool(config(student), {"left": expert, "right": expert})
    reports, after = {}, {}
    for ranks, tokens in ((1, 100_000), (2, 128)):
        trainer = start_trainer(lora_config(student, ranks=ranks, micro_batch_tokens=tokens))
        reports[ranks] = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2)]
        after[ranks] = weights(trainer, tmp_path / f"ranks-{ranks}")
        if ranks == 1:
            stop(trainer)
    for a, b in zip(reports[1], reports[2], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    start = load_file(student / "model.safetensors")
    assert set(after[1]) == set(after[2]) == set(start), "names without adapters"
    for name, weight in after[1].items():
        assert torch.allclose(weight, after[2][name], rtol=0, atol=1e-5), name
        moved = not torch.equal(weight, start[name])
        assert moved == name.endswith("proj.weight"), name

    saved = checkpoint(trainer, tmp_path / "saved")
    held = [name for file in saved.glob("*.safetensors") for name in load_file(file)]
    assert held and all(".lora_" in name for name in held), "what is frozen is not written"
    last = [trainer.train_step(step, rows, pool.score(rows)).loss for step in (3, 4)]
    ours = weights(trainer, tmp_path / "ours")
    stop(trainer)
    trainer = start_trainer(lora_config(student, ranks=2, micro_batch_tokens=128))
    trainer.load(saved)
    assert [trainer.train_step(step, rows, pool.score(rows)).loss for step in (3, 4)] == last
    theirs = weights(trainer, tmp_path / "theirs")
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    stop(trainer, pool)


def beyond_config(student: Path, payload: str, **trainer: Any) -> PipelineConfig:
    """Two responses to a prompt; one of the two domains has a target beyond its expert."""
    data = lora_config(student, **trainer).model_dump(exclude_defaults=True)
    data["domains"] = {"left": {"extrapolate": 1.5}, "right": {}}
    data["rollout"] |= {"n": 2}
    data["teachers"] = {"payload": payload}
    data["objective"] = {"kind": "sampled" if payload == "sampled_logprobs" else "reverse_kl"}
    return PipelineConfig.model_validate(data)


@pytest.mark.parametrize("payload", ["hidden_states", pytest.param("sampled_logprobs", marks=pytest.mark.slow)])
def test_ranks_that_ask_the_start_student_are_told_what_a_teacher_says(
    ray: None, tmp_path: Path, make_model_dir: Make, payload: str
) -> None:
    """Steps with its rows from a scoring worker, and steps whose ranks run the student without its adapters, give the same weights."""
    student, expert = make_model_dir(tmp_path / "s"), make_model_dir(tmp_path / "e", seed=1)
    made = rollouts(48)
    # The next but one is of the same domain.
    rows = [replace(r, prompt_ids=made[i - i % 4 + i % 2].prompt_ids) for i, r in enumerate(made)]
    mine = WeightedTeacher(teacher=Teacher(name="expert", model_dir=expert), weight=1.5)
    itself = WeightedTeacher(teacher=Teacher(name="start student", model_dir=student), weight=-0.5)
    reports, after = {}, {}
    of_rows = pool_spec(beyond_config(student, payload), VOCABULARY)
    pools = {
        len(left): Pool(of_rows, {"left": left, "right": (replace(mine, weight=1.0),)})
        for left in ((mine, itself), (mine,))
    }
    for asked, ranks, tokens in ((2, 1, 100_000), (1, 1, 100_000), (1, 2, 64)):
        cfg, pool = beyond_config(student, payload, ranks=ranks, micro_batch_tokens=tokens), pools[asked]
        pool.wait_ready()
        spec = trainer_spec(cfg, VOCABULARY)
        assert spec.rank.base_scoring is not None
        trainer = DeepSpeedTrainer(spec if asked == 1 else replace(spec, rank=replace(spec.rank, base_scoring=None)))
        trainer.wait_ready()
        assert trainer.layout.layout == "shared"
        key = (asked, ranks)
        reports[key] = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2, 3)]
        after[key] = weights(trainer, tmp_path / f"{asked}-{ranks}")
        stop(trainer)
    stop(*pools.values())
    wanted, start = after.pop((2, 1)), load_file(student / "model.safetensors")
    assert any((wanted[name] - start[name]).abs().max() > 1e-3 for name in wanted)
    by_teacher = reports.pop((2, 1))
    for key, found in after.items():
        for a, b in zip(by_teacher, reports[key], strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5), key
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4), key
        assert all(torch.allclose(found[name], weight, rtol=0, atol=1e-5) for name, weight in wanted.items()), key


def pushes_and_exports(
    student: Path, expert: Path, tokenizer: Any, cfg: PipelineConfig, out: Path, kind: str = "shared_memory"
) -> dict[str, torch.Tensor]:
    """Trains, pushes twice and lets an engine die in between; returns what the last push had."""
    engine, trainer = start_engine(cfg, student, tokenizer), start_trainer(cfg)
    pool = start_pool(cfg, {"left": expert, "right": expert})
    sync = start_sync(kind, trainer, engine)
    rows = rollouts()
    for step in (1, 2):
        trainer.train_step(step, rows, pool.score(rows))
        assert sync.measure_gap() > 0.01, "the step was too small to show anything"
        assert sync.push(step).gap < 1e-5
    engine.load(expert)
    assert sync.measure_gap() > 0.01
    assert sync.push(3).gap < 1e-5, "over another model's weights"
    engine._workers[0].kill()
    deadline = time.monotonic() + 120
    while not engine._restarted:  # a worker that is killed may answer once more
        assert sync.measure_gap() < 1e-5 and time.monotonic() < deadline
    out.mkdir()
    (out / "pushed").mkdir()
    assert trainer.export_changed((out / "pushed").absolute()) == student
    pushed = load_file(out / "pushed" / "model.safetensors")
    exported = weights(trainer, out / "exported")
    assert all(torch.equal(exported[name], weight) for name, weight in pushed.items()), "the very tensors"
    assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(out / "exported", PROBE)) < 1e-5
    (out / "adapter").mkdir()
    trainer.export_adapter((out / "adapter").absolute())
    assert inspect_adapter(out / "adapter").rank == 4
    merge_adapter(student, out / "adapter", out / "merged")
    merged = load_file(out / "merged" / "model.safetensors")
    assert set(merged) == set(exported) and all(torch.equal(merged[name], exported[name]) for name in merged)
    stop(engine, trainer, pool)
    return pushed


@pytest.mark.parametrize(
    ("kind", "tie", "targets"),
    [
        ("shared_memory", True, "all-linear"),
        pytest.param("network", True, "all-linear", marks=pytest.mark.slow),
        pytest.param("shared_memory", False, ["q_proj", "down_proj"], marks=pytest.mark.slow),
    ],
    ids=["tied, all", "over the network", "untied, two"],
)
def test_a_push_of_what_changed_reaches_the_engine(
    ray: None, tmp_path: Path, make_model_dir: Make, tiny_tokenizer: Any, kind: str, tie: bool, targets: Any
) -> None:
    student, expert = (make_model_dir(tmp_path / str(seed), seed=seed, tie=tie) for seed in (0, 1))
    cfg = lora_config(student, targets)
    pushed = pushes_and_exports(student, expert, tiny_tokenizer, cfg, tmp_path / "out", kind)
    assert len(pushed) == 2 * 7 and not any("embed" in name or "norm" in name or "lm_head" in name for name in pushed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared_memory", "network", "direct"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "lfm2"])
def test_the_rest_of_a_mixture_or_hybrid_stays_while_its_attention_is_pushed(
    ray: None, tmp_path: Path, make_mixture_dir: Make, tiny_tokenizer: Any, family: str, kind: str
) -> None:
    student, expert = (make_mixture_dir(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    cfg = lora_config(student, ["q_proj", "v_proj"])
    pushed = pushes_and_exports(student, expert, tiny_tokenizer, cfg, tmp_path / "out", kind)
    assert pushed and not any("experts" in name for name in pushed)


@pytest.mark.slow
def test_with_recomputed_activations_and_in_bfloat16(ray: None, tmp_path: Path, make_model_dir: Make) -> None:
    """Recomputing changes no bit of a loss; in bfloat16 the adapters learn, and the merged export is what is rounded once."""
    student, expert = make_model_dir(tmp_path / "s"), make_model_dir(tmp_path / "e", seed=1)
    rows = rollouts(48)
    pool = start_pool(config(student), {"left": expert, "right": expert})
    losses = {}
    for name, more in {
        "plain": {},
        "again": {"gradient_checkpointing": True},
        "bfloat16": {"dtype": "bfloat16"},
    }.items():
        trainer = start_trainer(lora_config(student, ranks=2, micro_batch_tokens=128, **more))
        losses[name] = [trainer.train_step(step, rows, pool.score(rows)).loss for step in range(1, 7)]
        if name == "bfloat16":
            exported = weights(trainer, tmp_path / "exported")
            assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
            assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(tmp_path / "exported", PROBE)) < 0.15
        stop(trainer)
    assert losses["again"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["plain"][-1] < 0.9 * losses["plain"][0] and losses["bfloat16"][-1] < 0.9 * losses["bfloat16"][0]
    stop(pool)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_merge_of_a_lora_student_killed_and_resumed(tmp_path: Path, pipeline: dict[str, Any], factor: float) -> None:
    """The whole command: the weights of the run that was not killed, bit for bit, and the adapter beside them. With a target
    beyond the experts the log has only what these said."""
    pipeline["student"]["lora"] = LORA | {"export": "adapter"}
    pipeline["domains"]["left-domain"]["extrapolate"] = factor
    pipeline["trainer"]["lr"] = 2e-2
    file, whole, broken = write(tmp_path, pipeline), tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = records(whole)
    assert all(record["probe_gap"] < 1e-3 for record in steps)
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < 0.9 * steps[0]["domains"][domain]["loss"]
    kill_when_logged(file, broken, 4)
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step 2" in resumed.stderr
    for place in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(whole / place), load_file(broken / place)
        assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours), place
    merge_adapter(Path(pipeline["student"]["model"]), whole / "adapter", tmp_path / "merged")
    merged, model = load_file(tmp_path / "merged" / "model.safetensors"), load_file(whole / "model/model.safetensors")
    assert all(torch.equal(model[name], weight) for name, weight in merged.items())
