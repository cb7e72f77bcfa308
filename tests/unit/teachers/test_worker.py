"""A worker goes from teacher to teacher: each row is its own teacher's, and the one before leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.stream.schema import read_stream
from opd.types import Rollout, Segment, Teacher
from teachers.scorers import ScorerOptions
from teachers.worker import Group, TeacherWorker


@pytest.fixture(scope="module")
def teachers(
    expert_dirs: dict[str, Path], make_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Teacher]:
    """Two of one architecture and one of another."""
    wide = make_model_dir(tmp_path_factory.mktemp("wide") / "wide", seed=7, hidden=96, heads=3)
    return {name: Teacher(name=name, model_dir=path) for name, path in {**expert_dirs, "wide": wide}.items()}


def worker(memory_bytes: int = 1 << 30) -> TeacherWorker:
    options = ScorerOptions(
        dtype="float32", payload="hidden_states", top_k=0, vocab_size=76, memory_bytes=memory_bytes
    )  # fmt: skip
    return TeacherWorker("transformers", options)


def group(teacher: Teacher, weight: float = 1.0, *, num: int = 3) -> Group:
    rollouts = [
        Rollout(
            sample_id=f"{i}", step=1, domain="d", policy_version=0, prompt_ids=(4 + i, 5), response_ids=(6, 7, 8 + i),
            behaviour_logprobs=(-1.0,) * 3, segments=(Segment(length=3, trained=True),), truncated=False,
        )
        for i in range(num)
    ]  # fmt: skip
    return teacher, weight, tuple(rollouts)


@torch.no_grad()
def plain_states(teacher: Teacher, row: Any) -> torch.Tensor:
    """[R, D] from transformers, for the sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher.model_dir, dtype=torch.float32)
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]


def test_a_teacher_read_ahead_does_not_push_out_the_one_in_use(teachers: dict[str, Teacher]) -> None:
    made = worker(memory_bytes=1)
    for _ in range(2):
        made.score([group(teachers["rev"]), group(teachers["up"])])
    assert made._scorer._weights.loads == 4  # type: ignore[attr-defined]


def test_rows_carry_their_teachers_share(teachers: dict[str, Teacher]) -> None:
    stream = worker().score([group(teachers["rev"], 0.25), group(teachers["wide"], 0.75), group(teachers["up"])])
    rows = read_stream(memoryview(stream)).rows
    assert {(r.teacher, r.weight) for r in rows} == {("rev", 0.25), ("wide", 0.75), ("up", 1.0)}
    assert sorted(r.sample_id for r in rows) == sorted(["0", "1", "2"] * 3)
    for row in rows:
        states = torch.frombuffer(bytearray(row.hidden), dtype=torch.float32).view(-1, row.hidden_size)
        torch.testing.assert_close(states, plain_states(teachers[row.teacher], row), rtol=0, atol=1e-5)


def test_no_groups_are_an_empty_stream() -> None:
    assert read_stream(memoryview(worker().score([]))).rows == ()


def live_bytes() -> int:
    """Of all tensors that anything still holds, memory that several share counted once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_teacher_of_another_architecture_leaves_nothing_behind(teachers: dict[str, Teacher]) -> None:
    made = worker(memory_bytes=1)
    before = live_bytes()
    for name in ("rev", "wide", "up", "wide", "rev", "wide"):
        made.score([group(teachers[name])])
        file = (teachers[name].model_dir / "model.safetensors").stat().st_size
        # Its weights once, and of both skeletons the rotary frequencies.
        assert 0.9 * file < live_bytes() - before < file + 4096, name
