"""A critic on the real DeepSpeed: two ranks equal one, and a checkpoint goes on bit for bit, also with frozen attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from opd import cluster
from opd.config.sections import ClusterConfig
from opd.credit.critic import CriticCredit, CriticSpec
from opd.credit.gae import GaeSpec
from opd.credit.interfaces import StepCredit
from opd.records.types import Rollout
from opd.train.critic import CriticEngineSpec
from opd.train.schedule import LearningRate
from opd.train.shards import Shards
from tests.credit import chain, critic_options
from tests.integration.parts import stop

STEPS = 4


@pytest.fixture
def ray() -> Iterator[None]:
    with cluster.ray_session(ClusterConfig(), 8):
        yield


def start(model_dir: Path, ranks: int = 1) -> CriticCredit:
    engine = CriticEngineSpec(
        rank=critic_options(model_dir, world_size=ranks, freeze_attention=True, timeout_s=120.0),
        rate=LearningRate(peak=3e-3, steps=STEPS), micro_batch_tokens=48, start_timeout_s=120.0,
    )  # fmt: skip
    made = CriticCredit(CriticSpec(engine=engine, gae=GaeSpec(policy_lambda=0.8)))
    made.wait_ready()
    return made


def step_of(step: int) -> list[Rollout]:
    """Episodes of one to three segments, some of them cut; the last tokens of each tell what it earned."""
    found: list[Rollout] = []
    for number, kinds in enumerate((["aaoa"], ["aao", "aa"], ["aaaa", "oa", "a"], ["aaaoooa"], ["a"])):
        reward = float((number + step) % 2)
        made = chain(*kinds, episode=f"{step}/{number}", reward=reward, stop_reason="tokens" if number == 3 else "done")
        found += made.segments
    return found


def run(made: CriticCredit, first: int, last: int) -> list[StepCredit]:
    return [made.assign(step, step_of(step)) for step in range(first, last + 1)]


def bits(assigned: list[StepCredit]) -> list[dict[str, bytes]]:
    return [{i: a.tobytes() for i, a in one.advantages.items()} for one in assigned]


def test_two_ranks_equal_one_and_a_resume_goes_on_bit_for_bit(
    ray: None, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    model_dir = make_model_dir(tmp_path / "base", layers=1)
    whole = start(model_dir)
    expected = run(whole, 1, 2)
    (tmp_path / "saved").mkdir()
    whole.begin_save(tmp_path / "saved")
    files = whole.saved(60)
    assert files and {f.name for f in files} == {"rank-0.safetensors", "trainer.json", "credit.json"}
    expected += run(whole, 3, STEPS)
    whole.load(tmp_path / "saved")
    found = run(whole, 3, STEPS)
    assert bits(found) == bits(expected[2:])
    assert [one.readings for one in found] == [one.readings for one in expected[2:]]
    stop(whole._engine)

    two = start(model_dir, ranks=2)
    both = run(two, 1, STEPS)
    (tmp_path / "by two").mkdir()
    two.begin_save(tmp_path / "by two")
    assert two.saved(60)
    with Shards(
        tmp_path / "by two"
    ) as shards:  # any number of ranks can read them: also the bias, which one rank holds
        assert shards.read_slice("param/lm_head.bias", 1, 0, 1).item() != 0
        assert shards.read_slice("param/lm_head.weight", 64, 0, 64).abs().min() > 0
    for one, other in zip(both, expected, strict=True):
        assert one.readings == pytest.approx(other.readings, rel=1e-3, abs=1e-5)
        for name, advantage_N in other.advantages.items():
            assert one.advantages[name] == pytest.approx(advantage_N, abs=1e-4)
    assert max(np.abs(a).max() for a in expected[-1].advantages.values()) > 0.1
    assert expected[-1].readings["value_loss"] != expected[0].readings["value_loss"]
