"""A teacher with a prompt of its own: it scores the student's tokens after its own prompt, and no row shows the difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.stream.rollouts import digest_rollout
from pipelines.specs import pool_spec
from teachers.pool import Pool
from tests.conftest import read_rows
from tests.unit.teachers.conftest import VOCABULARY, rollout
from tests.unit.teachers.test_pool import pool

OWN = {0: (5,), 1: (9, 8, 7, 6, 5, 4, 3), 2: tuple(range(20, 60)), 3: (70, 71)}
"""Number of the prompt -> what the teacher reads."""


def read_own(rollout: Rollout) -> tuple[int, ...]:
    return OWN[int(rollout.group.rpartition("/")[2])]


def own_pool(teacher: Teacher, workers: int = 1, **changes: Any) -> Pool:
    made = pool({"reverse": teacher}, workers, **changes)
    made._routes = {"reverse": (WeightedTeacher(teacher=teacher, weight=1.0, prompts=read_own),)}
    return made


@torch.no_grad()
def plain_logprobs(model_dir: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> list[float]:
    """By hand: the log-prob of each response token from the position before it, in a sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logits_T_V = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].double()
    return [float(logits_T_V[len(prompt) + place - 1].log_softmax(-1)[token]) for place, token in enumerate(response)]


@pytest.mark.parametrize("workers", [1, 2])
def test_log_probs_of_the_response_after_the_teachers_own_prompt(
    workers: int, teachers: dict[str, Teacher], expert_dirs: dict[str, Path], in_process: Any
) -> None:
    rollouts = [rollout(i, prompt=3 + i, response=2 + 3 * i) for i in range(4)]
    scored = own_pool(teachers["reverse"], workers, payload="sampled_logprobs", objective={"kind": "sampled"})
    rows = {row.rollout.sample_id: row for row in read_rows(scored.score(rollouts))}
    for sent in rollouts:
        row = rows[sent.sample_id]
        assert row.rollout == sent
        want = plain_logprobs(expert_dirs["rev"], read_own(sent), sent.response_ids)
        students = plain_logprobs(expert_dirs["rev"], sent.prompt_ids, sent.response_ids)
        assert row.answer.teacher_logprobs == pytest.approx(want, abs=1e-5)  # type: ignore[attr-defined]
        assert max(abs(a - b) for a, b in zip(want, students, strict=True)) > 1e-3


def test_a_teacher_that_reads_what_the_student_reads_gives_the_very_same_bytes(
    teachers: dict[str, Teacher], in_process: Any
) -> None:
    rollouts = [rollout(i, prompt=3 + i, response=2 + 3 * i) for i in range(4)]
    default = pool({"reverse": teachers["reverse"]}, 1).score(rollouts)
    made = pool({"reverse": teachers["reverse"]}, 1)
    teacher = WeightedTeacher(teacher=teachers["reverse"], weight=1.0, prompts=lambda r: r.prompt_ids)
    made._routes = {"reverse": (teacher,)}
    ours, theirs = ({row.rollout.sample_id: row for row in read_rows(t)} for t in (made.score(rollouts), default))
    assert ours == theirs


def test_a_mixture_of_one_teacher_with_two_prompts_asks_both(teachers: dict[str, Teacher], in_process: Any) -> None:
    told, plain = (replace(teachers["reverse"], name=name) for name in ("told", "plain"))
    made = pool({"reverse": plain}, 1)
    made._routes = {
        "reverse": (
            WeightedTeacher(teacher=told, weight=0.5, prompts=read_own),
            WeightedTeacher(teacher=plain, weight=0.5),
        )
    }
    rows = read_rows(made.score([rollout(1)]))
    assert sorted(row.teacher for row in rows) == ["plain", "told"]
    assert rows[0].answer != rows[1].answer


def test_a_rollout_comes_back_as_it_was_sampled() -> None:
    sent = rollout(3)
    read = sent.as_read_by((1, 2, 3))
    assert (read.prompt_ids, read.response_ids, read.trained_positions) == (
        (1, 2, 3),
        sent.response_ids,
        sent.trained_positions,
    )
    assert read.as_sampled() == sent and sent.as_sampled() is sent
    assert digest_rollout(read.as_sampled()) == digest_rollout(sent)


def test_the_context_of_the_longest_own_prompt_reaches_the_engine() -> None:
    from opd.config import PipelineConfig

    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d", "prompt": {"system": "s", "max_model_len": 96}}},
            "domains": {"d": {}},
            "rollout": {"max_model_len": 32},
            "trainer": {"steps": 1, "samples_per_step": 2},
        }
    )
    assert pool_spec(config, VOCABULARY).scorer.max_model_len == 96
