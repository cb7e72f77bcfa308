"""Every engine and schedule that a pipeline may name is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

from opd.config import PipelineConfig
from opd.config.devices import PushKind
from opd.config.sections import RolloutConfig, ScheduleConfig, SyncConfig
from opd.config.teachers import ENGINES
from pipelines import build
from pipelines.build import POOLS, ROLLOUT_ENGINES, SCHEDULES, SYNCS, num_workers
from teachers.scorers import SCORERS
from tests.unit.sleeping import sleeping_pipeline


def test_every_engine_has_a_pool() -> None:
    assert set(POOLS) == set(ENGINES)
    assert [engine for engine in ENGINES if POOLS[engine] is POOLS["flight"]] == ["flight"]
    assert set(ENGINES) - {"flight", "text", "trainer", "none"} == set(SCORERS)


def test_every_name_that_a_key_takes_stands_for_something() -> None:
    assert set(get_args(ScheduleConfig.model_fields["mode"].annotation)) == set(SCHEDULES)
    assert set(get_args(PushKind)) == set(SYNCS)
    assert set(get_args(SyncConfig.model_fields["kind"].annotation)) == {"auto", *SYNCS}
    for name in ROLLOUT_ENGINES:
        assert RolloutConfig(engine=name).engine == name
    with pytest.raises(ValueError, match="engine"):
        RolloutConfig(engine="another")


def test_teachers_elsewhere_need_no_workers_here() -> None:
    data = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {}},
        "rollout": {"workers": 2},
        "trainer": {"steps": 1, "samples_per_step": 2, "ranks": 3},
        "teachers": {"workers": 5},
    }
    assert num_workers(PipelineConfig.model_validate(data)) == 10
    elsewhere = {"engine": "flight", "address": "grpc://localhost:1"}
    assert num_workers(PipelineConfig.model_validate(data | {"teachers": elsewhere})) == 5
    lora = {"student": {"model": "base", "lora": {}}, "teachers": {"engine": "trainer"}}
    assert num_workers(PipelineConfig.model_validate(data | lora)) == 5


@pytest.mark.parametrize(
    ("gpus", "order"),
    [
        (0, "engine pool trainer trainer! pool! engine!"),
        (1, "engine pool trainer trainer! pool! engine!"),
        (0.4, "engine engine! pool trainer trainer! pool! engine!"),
    ],
    ids=["cpu", "own GPU", "shared GPU"],
)
def test_an_engine_that_shares_its_gpu_is_up_before_others_take_of_it(
    monkeypatch: pytest.MonkeyPatch, gpus: float, order: str
) -> None:
    """vLLM measures how much memory is gone while it starts, and counts what others took as its own."""
    seen: list[str] = []

    def starts(name: str) -> Any:
        def start(*_: Any) -> SimpleNamespace:
            seen.append(name)
            return SimpleNamespace(wait_ready=lambda: seen.append(f"{name}!"))

        return start

    monkeypatch.setitem(ROLLOUT_ENGINES, "vllm", starts("engine"))
    monkeypatch.setattr(build, "DeepSpeedTrainer", starts("trainer"))
    monkeypatch.setitem(POOLS, "transformers", starts("pool"))
    data = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {}},
        "trainer": {"steps": 1, "samples_per_step": 2},
        "cluster": {"rollout_gpus": gpus},
    }
    inputs: Any = SimpleNamespace(
        scoring={}, student=SimpleNamespace(vocab_size=76, eos_token_ids=(2,)), tokenizer=None, untrained={}, routes={}
    )
    build._start_roles(PipelineConfig.model_validate(data), inputs, MagicMock())
    assert " ".join(seen) == order


@pytest.mark.parametrize("sleep", [True, False])
def test_a_schedule_knows_whether_its_engine_sleeps(sleep: bool) -> None:
    engine = MagicMock()
    schedule = build._build_schedule(sleeping_pipeline(sleep=sleep), MagicMock(), engine, MagicMock())
    schedule.sleep_engines()
    assert engine.answer.call_count == sleep


def test_the_end_of_thoughts_is_watched_else_that_of_turns_and_only_with_efforts() -> None:
    data = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {}},
        "trainer": {"steps": 1, "samples_per_step": 4},
    }

    def find(vocabulary: dict[str, int], **more: Any) -> list[int]:
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, eos_token_id=5, pad_token_id=None)
        inputs: Any = SimpleNamespace(tokenizer=tokenizer, student=SimpleNamespace(eos_token_ids=(7, 5)))
        return build._find_end_token_ids(PipelineConfig.model_validate(data | more), inputs)

    efforts = {"efforts": {"low": {}, "max": {}}}
    assert find({"a": 1}) == [] and find({"a": 1}, **efforts) == [5, 7]
    assert find({"a": 1, "<think>": 2, "</think>": 3}, **efforts) == [3]
