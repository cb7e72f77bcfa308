"""Every engine that a pipeline may name has a pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from opd.config import PipelineConfig
from opd.config.teachers import TeachersConfig
from pipelines import build
from pipelines.build import POOLS, num_workers
from teachers.flight.client import FlightPool


def test_every_engine_has_a_pool() -> None:
    engines = get_args(TeachersConfig.model_fields["engine"].annotation)
    assert set(POOLS) == set(engines)
    assert [engine for engine in engines if POOLS[engine] is FlightPool] == ["flight"]


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
    elsewhere = {"engine": "flight", "address": "grpc://localhost:1", "workers": 5}
    assert num_workers(PipelineConfig.model_validate(data | {"teachers": elsewhere})) == 5


@pytest.mark.parametrize(
    ("gpus", "order"),
    [
        (0, "engine pool trainer engine! trainer! pool!"),
        (1, "engine pool trainer engine! trainer! pool!"),
        (0.4, "engine engine! pool trainer engine! trainer! pool!"),
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

    monkeypatch.setattr(build, "VLLMRolloutEngine", starts("engine"))
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
        routes={}, student=SimpleNamespace(vocab_size=76, eos_token_ids=(2,)), tokenizer=None, untrained={}
    )
    build._start_workers(PipelineConfig.model_validate(data), inputs)
    assert " ".join(seen) == order
