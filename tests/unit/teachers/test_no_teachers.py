"""The pool without teachers: its stream is one that log, feed and trainer read like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.payloads.text import WrittenBlock
from opd.records.types import Prompt, QuarantinedPrompt, Rollout, RolloutBatch, Span
from opd.stream.log import ArrowTargetLog
from opd.stream.schema import PART_ROWS, read_stream
from opd.stream.targets import TargetStream
from opd.train.batch import build_micro_batch, gather_samples
from teachers.no_teachers import NOBODY, TeacherlessPool, TeacherlessSpec
from tests.rows import make_rollout

POOL = TeacherlessPool(TeacherlessSpec(dtype="float32", max_quarantined=0.001))
VOCABULARY = 76


def rollout(number: int, domain: str = "a", tokens: int = 3, reward: float | None = 1.0) -> Rollout:
    return make_rollout(
        sample_id=f"000001/{domain}/{number}", step=1, domain=domain, policy_version=0, prompt_ids=(1, 2),
        response_ids=tuple(range(3, 3 + tokens)), behaviour_logprobs=(-0.5,) * tokens, reward=reward,
    )  # fmt: skip


def taken(stream: TargetStream) -> list[Any]:
    parts = []
    while (part := stream.take_part()) is not None:
        parts.append(part)
    return parts


def test_every_rollout_comes_back_as_it_was_in_the_order_of_domains(in_process: Any) -> None:
    rollouts = [rollout(0, "b"), rollout(0, "a", tokens=0), rollout(1, "b", reward=None), rollout(1, "a", reward=0.25)]
    stream = POOL.score(rollouts)
    (part,) = taken(stream)
    rows = read_stream(part.handle.tobytes(), VOCABULARY).rows
    assert [row.rollout for row in rows] == [rollouts[i] for i in (1, 3, 0, 2)]
    assert {(row.teacher, row.weight) for row in rows} == {(NOBODY, 1.0)}
    assert stream.arrived and (stream.rows, stream.quarantined, stream.heads) == (4, {}, {})


def test_a_step_of_many_rows_comes_in_parts_that_ranks_can_share(in_process: Any) -> None:
    rollouts = [rollout(i) for i in range(PART_ROWS + 7)]
    first, last = taken(POOL.score(rollouts))
    assert [len(part.samples) for part in (first, last)] == [PART_ROWS, 7]
    shares = [
        read_stream(first.handle.tobytes(), wanted=lambda i, rank=rank: int(i.rsplit("/")[-1]) % 2 == rank).rows
        for rank in (0, 1)
    ]
    assert [len(rows) for rows in shares] == [PART_ROWS // 2] * 2


def test_a_micro_batch_of_such_rows_has_a_block_for_its_trained_tokens(in_process: Any) -> None:
    rollouts = [rollout(0), rollout(1, tokens=0), rollout(2, tokens=2)]
    (part,) = taken(POOL.score(rollouts))
    samples = gather_samples(read_stream(part.handle.tobytes()).rows)
    batch = build_micro_batch([samples[r.sample_id] for r in rollouts], torch.float32)
    assert [len(block) for block in batch.blocks] == [5] == [len(batch.token_N)]
    assert batch.blocks[0].head_keys() == () and batch.trained_lengths == (3, 0, 2)


def test_the_log_gives_back_what_was_trained_with_its_rewards(in_process: Any, tmp_path: Path) -> None:
    prompts = [Prompt(id=f"a/{i}", domain="a", token_ids=(1, 2)) for i in range(2)]
    batch = RolloutBatch(rollouts=(rollout(0), rollout(1, reward=0.0)), quarantined=())
    log = ArrowTargetLog(tmp_path, POOL, VOCABULARY, pytest.fail)
    stream = POOL.score(batch.rollouts)
    log.record(1, 0, prompts, batch, stream)
    stream.wait_for_parts()
    stream.wait_for_sinks()
    again = log.replay(1, 0, prompts)
    assert again is not None and again[0].rollouts == batch.rollouts
    assert [p.samples for p in taken(again[1])] == [("000001/a/0", "000001/a/1")]


def test_rows_of_experts_that_only_write_text_say_which_tokens_these_wrote(in_process: Any, tmp_path: Path) -> None:
    pool = TeacherlessPool(TeacherlessSpec(dtype="float32", max_quarantined=0.001, payload="text"))
    own, taught = (
        rollout(0),
        replace(rollout(1, reward=None), spans=(Span(length=3, origin="taught", policy_version=0),)),
    )
    prompts = [Prompt(id=f"a/{i}", domain="a", token_ids=(1, 2)) for i in range(3)]
    left_out = QuarantinedPrompt(prompt_id="a/2", domain="a", reason="an empty answer")
    batch = RolloutBatch(rollouts=(own, taught), quarantined=(left_out,))
    log = ArrowTargetLog(tmp_path, pool, VOCABULARY, pytest.fail)
    stream = pool.score(batch.rollouts)
    log.record(1, 0, prompts, batch, stream)
    stream.wait_for_parts()
    stream.wait_for_sinks()
    again = log.replay(1, 0, prompts)
    assert again is not None and again[0] == batch
    (part,) = taken(pool.score(batch.rollouts))
    samples = gather_samples(read_stream(part.handle.tobytes()).rows)
    (block,) = build_micro_batch([samples[r.sample_id] for r in batch.rollouts], torch.float32).blocks
    assert isinstance(block, WrittenBlock) and block.taught_N.tolist() == [False] * 3 + [True] * 3
    assert block.says_something and block.pad_rows(1).taught_N.tolist()[:6] == block.taught_N.tolist()
