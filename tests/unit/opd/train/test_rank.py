"""What a rank does around DeepSpeed: picking its rows, adding up its numbers, grouping its parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opd.config import PipelineConfig
from opd.errors import RunError
from opd.interfaces import TargetSet
from opd.losses.reverse_kl import reverse_kl
from opd.stream.schema import TargetRow, write_stream
from opd.train import deepspeed, rank
from opd.train.batch import micro_batch
from opd.train.rank import RankResult, RankWork
from opd.types import Rollout, Segment

WORK = RankWork(step=3, lr=0.1, micro_batches=(("a",), ("c",)), total_tokens=4, total_rows=3)


def row(sample_id: str, domain: str = "d", mask: tuple[bool, ...] = (True, True)) -> TargetRow:
    return TargetRow(
        sample_id=sample_id, step=3, domain=domain, teacher="t", policy_version=2, prompt_ids=[1, 2],
        response_ids=list(range(len(mask))), loss_mask=list(mask), behaviour_logprobs=[-1.0] * len(mask), head="h",
        hidden_size=2, hidden=np.ones((len(mask), 2), np.float32).tobytes(),
    )  # fmt: skip


def stream(*ids: str, dtype: str = "float32") -> np.ndarray:
    return np.frombuffer(write_stream([[row(i) for i in ids]], dtype), dtype=np.uint8)


def test_a_rank_takes_its_own_rows_from_all_streams() -> None:
    rows, dtype = rank._select(WORK, [stream("a", "b"), stream("c")])
    assert set(rows) == {"a", "c"}
    assert dtype == torch.float32


def test_a_missing_row_stops_the_step() -> None:
    with pytest.raises(RunError, match="step 3: 2 scored rows arrived, wanted 3"):
        rank._select(WORK, [stream("a", "b")])
    with pytest.raises(RunError, match=r"no teacher scored .*'c'"):
        rank._select(WORK, [stream("a", "b"), stream("x")])


def test_a_row_that_came_twice_for_another_stops_the_step() -> None:
    with pytest.raises(RunError, match="no teacher scored"):
        rank._select(WORK, [stream("a", "a"), stream("b")])


def test_sums_go_by_domain_and_count_trained_tokens_only() -> None:
    batch = micro_batch([row("a", "x", (True, False)), row("b", "y"), row("c", "x")], torch.float32)
    totals = rank._Totals()
    kl = torch.tensor([1.0, torch.nan, 2.0, 3.0, 4.0, 5.0])
    totals.add(batch, kl, torch.tensor([-1.5, torch.nan, -1.0, -1.0, -0.5, -1.0]))
    assert totals.domains == {"x": (3, 10.0, 2), "y": (2, 5.0, 1)}
    assert totals.kl == 15.0
    assert totals.gap == pytest.approx(1.0)


def test_weight_decay_is_for_matrices_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    groups = rank._parameter_groups(model, 0.1)  # type: ignore[arg-type]
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.1, [2]), (0.0, [1, 1, 1])]


def test_a_head_shared_by_body_and_loss_is_trained_once(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    from opd.train.student import Student

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    student = Student(lm, reverse_kl)
    params = [p for g in rank._parameter_groups(student, 0.0) for p in g["params"]]
    assert len(params) == len({id(p) for p in params}) == len(list(lm.parameters()))
    assert student.loss_head.weight is lm.get_input_embeddings().weight


# The driver's side


class FakeRank:
    """Stands for one rank; answers with numbers of its own."""

    def __init__(self, options: Any, index: int) -> None:
        self.options, self.index, self.works = options, index, []

    def meeting_point(self, loopback: bool) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def start(self, address: str, port: int) -> None: ...

    def train_step(self, work: RankWork, keys: tuple[str, ...], *arrays: Any) -> RankResult:
        self.works.append((work, keys, arrays))
        return RankResult(
            loss_sum=0.5, grad_norm=2.0, gap_sum=3.0, domains={f"d{self.index}": (2, 1.5, 1), "d": (1, 1.0, 1)}
        )


def config(**trainer: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 4, "samples_per_step": 2, "lr": 1.0, "warmup_steps": 2} | trainer,
        }
    )


def rollout(sample_id: str, trained: bool = True) -> Rollout:
    return Rollout(
        sample_id=sample_id, step=1, domain="d", policy_version=0, prompt_ids=(1,), response_ids=(2, 3),
        behaviour_logprobs=(0.0, 0.0), segments=(Segment(length=2, trained=trained),), truncated=False,
    )  # fmt: skip


TARGETS = TargetSet(streams=("s0", "s1"), heads={"h0": "H0", "h1": "H1"}, rows=2)


def test_a_step_is_the_sum_of_all_ranks(in_process: Any) -> None:
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(config(), vocab_size=9)
    report = trainer.train_step(1, [rollout("a"), rollout("b")], TARGETS)
    assert (report.loss, report.grad_norm, report.lr, report.skipped) == (1.0, 2.0, 0.5, False)
    assert report.logprob_gap == pytest.approx(6.0 / 4)
    assert {name: dataclasses.astuple(d) for name, d in report.domains.items()} == {
        "d": (2, 2.0, 2),
        "d0": (2, 1.5, 1),
        "d1": (2, 1.5, 1),
    }
    works = [w.works[0] for w in in_process.workers]
    assert sorted(i for work, _, _ in works for part in work.micro_batches for i in part) == ["a", "b"]
    for work, keys, arrays in works:
        assert (work.total_tokens, work.total_rows, work.lr) == (4, 2, 0.5)
        assert (keys, arrays) == (("h0", "h1"), ("H0", "H1", "s0", "s1"))


@pytest.mark.parametrize("rollouts", [[], [rollout("a", trained=False)]])
def test_a_step_without_trained_tokens_is_skipped_and_says_so(rollouts: list[Rollout], in_process: Any) -> None:
    in_process.replace = FakeRank
    report = deepspeed.DeepSpeedTrainer(config(), vocab_size=9).train_step(3, rollouts, TARGETS)
    assert report.skipped
    assert report.step == 3
    assert all(not w.works for w in in_process.workers)
