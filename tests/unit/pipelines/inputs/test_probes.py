"""Probes of experts that a pipeline names by their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts.registry import Registry
from opd.config import load_pipeline
from pipelines.inputs import probes
from pipelines.inputs.probes import measure_missing_probes
from pipelines.inputs.read import read_inputs


def test_an_expert_named_by_its_path_has_the_probe_that_the_registry_would_have(
    world: Any, make_adapter: Callable[..., Path]
) -> None:
    adapter = make_adapter(world.root / "adapter", world.root / "base")
    world.data["experts"]["rev"]["model"] = str(adapter)
    told: list[str] = []
    inputs = measure_missing_probes(read_inputs(load_pipeline(world.write())), told.append)
    assert told == []
    registry = Registry(world.root / "registry")
    for name, model in (("rev", adapter), ("up", world.root / "up")):
        record = registry.add(name, model, name).probe
        assert record is not None and inputs.scorers[name].teacher.probe == record.probe
    routed = [a.teacher for routes in (inputs.routes, inputs.scoring) for assigned in routes.values() for a in assigned]
    assert all(teacher == inputs.scorers[teacher.name].teacher for teacher in routed)


def test_a_probe_is_taken_once_in_a_run(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, known = read_inputs(load_pipeline(world.write())), world.root / "probes.json"
    first = measure_missing_probes(inputs, print, known)
    monkeypatch.setattr(probes, "measure_probe", lambda *_: pytest.fail("loaded again"))
    again = measure_missing_probes(inputs, print, known)
    assert again.scorers == first.scorers and all(one.teacher.probe for one in again.scorers.values())
    known.write_text("{")
    with pytest.raises(pytest.fail.Exception):
        measure_missing_probes(inputs, print, known)


def test_an_expert_without_room_goes_without_a_probe_and_that_is_said(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = read_inputs(load_pipeline(world.write()))
    size = max(one.info.parameters for one in inputs.scorers.values()) * 4
    told: list[str] = []
    monkeypatch.setattr(probes, "free_bytes", lambda: 2 * size - 2)
    found = measure_missing_probes(inputs, told.append, world.root / "probes.json")
    assert [one.teacher.probe for one in found.scorers.values()] == [None, None]
    assert [line.split(" has no probe")[0] for line in told] == ["experts.rev", "experts.up"]
    assert not (world.root / "probes.json").exists()
