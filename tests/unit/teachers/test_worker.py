"""A worker goes from teacher to teacher: each row is its own teacher's, and the one before leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.records.types import Teacher
from opd.stream import schema
from opd.stream.schema import PartRecord, Stream, read_stream
from teachers.scorers import ScorerOptions
from teachers.scorers import transformers as transformers_scorer
from teachers.shares import TeacherRows
from teachers.worker import TeacherWorker
from tests.rows import make_rollout


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


def group(teacher: Teacher, weight: float = 1.0, *, num: int = 3) -> TeacherRows:
    rollouts = [
        make_rollout(
            sample_id=f"{i}", step=1, domain="d", policy_version=0, prompt_ids=(4 + i, 5), response_ids=(6, 7, 8 + i),
            behaviour_logprobs=(-1.0,) * 3,
        )
        for i in range(num)
    ]  # fmt: skip
    return teacher, weight, tuple(rollouts)


def streams(made: TeacherWorker, groups: list[TeacherRows]) -> list[Stream]:
    """All parts of a step."""
    made.begin_rows(groups, 0)
    return list(parts(made))


def parts(made: TeacherWorker) -> Iterator[Stream]:
    """Those that are left."""
    while (raw := made.next_part()[1]) is not None:
        yield read_stream(memoryview(raw))


@torch.no_grad()
def plain_states(teacher: Teacher, row: Any) -> torch.Tensor:
    """[R, D] from transformers, for the sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher.model_dir, dtype=torch.float32)
    ids = torch.tensor([[*row.rollout.prompt_ids, *row.rollout.response_ids]])
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(row.rollout.prompt_ids) - 1 : -1]


def test_a_teacher_read_ahead_does_not_push_out_the_one_in_use(teachers: dict[str, Teacher]) -> None:
    made = worker(memory_bytes=1)
    for _ in range(2):
        streams(made, [group(teachers["rev"]), group(teachers["up"])])
    assert made._scorer._weights.loads == 4  # type: ignore[attr-defined]


def test_rows_carry_their_teachers_share(teachers: dict[str, Teacher]) -> None:
    groups = [group(teachers["rev"], 0.25), group(teachers["wide"], 0.75), group(teachers["up"])]
    (stream,) = streams(worker(), groups)
    rows = stream.rows
    assert {(r.teacher, r.weight) for r in rows} == {("rev", 0.25), ("wide", 0.75), ("up", 1.0)}
    assert sorted(r.rollout.sample_id for r in rows) == sorted(["0", "1", "2"] * 3)
    for row in rows:
        states = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size)
        torch.testing.assert_close(states, plain_states(teachers[row.teacher], row), rtol=0, atol=1e-5)


def test_no_groups_are_an_empty_last_part() -> None:
    (stream,) = streams(worker(), [])
    assert (stream.rows, stream.part) == ((), PartRecord(teachers={}))


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_a_part_leaves_with_the_batch_that_fills_it(
    limit: str, teachers: dict[str, Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two rows of 3 x 64 float32; two batches fill a part."""
    monkeypatch.setattr(transformers_scorer, "SCORE_TOKENS", 10)
    monkeypatch.setattr(schema, "PART_ROWS", 3 if limit == "rows" else 1000)
    monkeypatch.setattr(schema, "PART_BYTES", 1 << 30 if limit == "rows" else 3 * 3 * 64 * 4)
    made = worker()
    made.begin_rows([group(teachers["rev"], num=6), group(teachers["up"], num=3)], 5)
    first = read_stream(memoryview(made.next_part()[1]))
    assert [row.teacher for row in first.rows] == ["rev"] * 4
    assert first.part == PartRecord(worker=5, number=0)
    rest = list(parts(made))
    assert [[row.teacher for row in s.rows] for s in rest] == [["rev"] * 2 + ["up"] * 2, ["up"]]
    assert [s.part for s in rest] == [
        PartRecord(worker=5, number=1),
        PartRecord(worker=5, number=2, teachers={"rev": 6, "up": 3}),
    ]


def test_a_row_is_scored_when_its_part_is_asked_for(
    teachers: dict[str, Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PART_ROWS", 1)
    made = worker()
    made.begin_rows([group(teachers["rev"]), group(teachers["wide"])], 0)
    assert made._scorer._weights.loads == 0  # type: ignore[attr-defined]
    made.next_part()
    made.read_head(teachers["up"])  # a trainer rank asks between two parts
    rows = [row for part in parts(made) for row in part.rows]
    assert {row.teacher for row in rows} == {"wide"}
    for row in rows:
        states = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size)
        torch.testing.assert_close(states, plain_states(teachers["wide"], row), rtol=0, atol=1e-5)


def test_a_head_that_is_asked_for_between_two_batches_changes_no_row(
    teachers: dict[str, Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PART_ROWS", 1)
    monkeypatch.setattr(transformers_scorer, "SCORE_TOKENS", 5)
    made = worker()
    made.begin_rows([group(teachers["rev"])], 0)
    rows = []
    for part in parts(made):
        made.read_head(teachers["up"])
        rows += part.rows
    assert len(rows) == 3
    for row in rows:
        states = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size)
        torch.testing.assert_close(states, plain_states(teachers["rev"], row), rtol=0, atol=1e-5)


def test_what_is_broken_is_said_once(
    teachers: dict[str, Teacher], damaged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PART_ROWS", 1)
    bad = damaged(teachers["rev"], tmp_path, "model.norm.weight", 0)
    found = streams(worker(), [group(teachers["rev"], num=1), group(bad, num=2), group(teachers["up"], num=1)])
    assert [(len(s.rows), set(s.part.broken)) for s in found] == [(1, set()), (1, {"0", "1"}), (0, set())]
    assert found[-1].part.teachers == {"rev": 1, "bad": 0, "up": 1}


def live_bytes() -> int:
    """Bytes of all tensors that anything still holds, memory that several share counted once.

    A test that compiled something in this process leaves tensors without memory behind, of a class of torch's own.
    """
    gc.collect()
    real = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in real and t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_teacher_of_another_architecture_leaves_nothing_behind(teachers: dict[str, Teacher]) -> None:
    made = worker(memory_bytes=1)
    before = live_bytes()
    for name in ("rev", "wide", "up", "wide", "rev", "wide"):
        streams(made, [group(teachers[name])])
        file = (teachers[name].model_dir / "model.safetensors").stat().st_size
        # Its weights once, and of both skeletons the rotary frequencies.
        assert 0.9 * file < live_bytes() - before < file + 4096, name
