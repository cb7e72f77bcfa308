"""Every engine that a pipeline may name has a pool."""

from __future__ import annotations

from typing import get_args

from opd.config import PipelineConfig
from opd.config.teachers import TeachersConfig
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
