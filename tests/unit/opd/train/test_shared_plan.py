"""The trainer's driver: what rows begin with is shared where the pipeline says so and every rank allows it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.records.types import Rollout
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.specs import trainer_spec
from tests.rows import make_rollout


class FakeRank:
    """Stands for one rank: says how wrong each layout is."""

    errors: dict[str, float]

    def __init__(self, options: Any, index: int) -> None:
        self.tried: list[str] = []

    def open_meeting_point(self, address: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def start(self, address: str, port: int) -> None: ...

    def layout_error(self, layout: str) -> float:
        self.tried.append(layout)
        return self.errors[layout]

    def use_layout(self, layout: str) -> None:
        self.layout = layout


def trainer(in_process: Any, rollout: dict[str, Any], shared: float) -> DeepSpeedTrainer:
    FakeRank.errors = {"shared": shared, "packed": 0.5}
    in_process.replace = FakeRank
    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "rollout": rollout,
            "trainer": {"steps": 1, "samples_per_step": 12, "micro_batch_tokens": 30, "ranks": 2},
        }
    )
    made = DeepSpeedTrainer(trainer_spec(config, 76))
    made.wait_ready()
    return made


ROWS: list[Rollout] = [
    make_rollout(
        sample_id=f"{prompt}{i}", step=1, domain="d", prompt_ids=(prompt,) * 20, response_ids=(10 + i, 3)[: 1 + i % 2]
    )
    for prompt in range(4)
    for i in range(3)
]


@pytest.mark.parametrize(
    ("rollout", "shared", "layout", "tried"),
    [
        ({"n": 3}, 0.5, "shared", ["shared"]),
        ({"n": 3}, 1.5, "packed", ["shared", "packed"]),
        ({"n": 3}, math.inf, "packed", ["shared", "packed"]),
        ({}, 0.5, "packed", ["packed"]),
        ({"share_prefixes": True}, 0.5, "shared", ["shared"]),
        ({"n": 3, "share_prefixes": False}, 0.5, "packed", ["packed"]),
    ],
)
def test_the_plan_shares_prompts_if_the_layout_does(
    rollout: dict[str, Any], shared: float, layout: str, tried: list[str], in_process: Any
) -> None:
    made = trainer(in_process, rollout, shared)
    assert made.layout.layout == layout
    assert [(rank.tried, rank.layout) for rank in in_process.workers] == [(tried, layout)] * 2
    plan = made.plan_micro_batches(ROWS)
    assert sorted(i for parts in plan for ids in parts for i in ids) == sorted(r.sample_id for r in ROWS)
    if layout == "shared":
        assert [[sorted(ids) for ids in parts] for parts in plan] == [
            [["00", "01", "02"], ["20", "21", "22"]],
            [["10", "11", "12"], ["30", "31", "32"]],
        ], "24 tokens a prompt with its responses"
    else:
        assert max(len(ids) for parts in plan for ids in parts) <= 2, "21 or 22 tokens a row"
