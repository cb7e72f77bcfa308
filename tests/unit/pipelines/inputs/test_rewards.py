"""Training prompts that a verifier cannot judge are refused where they would be rewarded, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.credit.ema import EmaCredit
from opd.credit.group import GroupCredit
from opd.credit.leave_one_out import LeaveOneOut
from opd.credit.none import NoBaselineCredit
from opd.errors import PromptError
from pipelines.build import build_credit
from pipelines.inputs.read import read_inputs


def without_answers(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))


def test_a_row_without_an_answer_is_refused(world: Any) -> None:
    world.data["objective"] = {"reward": {}}
    read_inputs(load_pipeline(world.write()))
    without_answers(world.root / "upper.jsonl")
    with pytest.raises(PromptError) as caught:
        read_inputs(load_pipeline(world.write()))
    told = str(caught.value)
    assert all(
        word in told for word in ("upper/0", "no `answer`", "domains.upper.eval", "domains.upper.reward to false")
    )


def test_where_the_domain_takes_no_part_its_rows_need_no_answer(world: Any) -> None:
    without_answers(world.root / "upper.jsonl")
    read_inputs(load_pipeline(world.write()))
    world.data["objective"] = {"reward": {}}
    world.data["domains"]["upper"]["reward"] = False
    read_inputs(load_pipeline(world.write()))


@pytest.mark.parametrize(
    ("baseline", "made"),
    [("leave_one_out", LeaveOneOut), ("group", GroupCredit), ("ema", EmaCredit), ("none", NoBaselineCredit)],
)
def test_every_baseline_has_its_credit(baseline: str, made: type, world: Any) -> None:
    world.data["objective"] = {"reward": {"baseline": baseline}}
    world.data["rollout"] = world.data.get("rollout", {}) | {"n": 2}
    reward = load_pipeline(world.write()).objective.reward
    assert reward is not None and type(build_credit(reward.baseline)) is made
