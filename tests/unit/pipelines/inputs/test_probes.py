"""Probes of experts that a pipeline names by their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experts.registry import Registry
from opd.config import load_pipeline
from pipelines.inputs.probes import take_missing_probes
from pipelines.inputs.read import read_inputs


def test_an_expert_named_by_its_path_has_the_probe_that_the_registry_would_have(
    world: Any, make_adapter: Callable[..., Path]
) -> None:
    adapter = make_adapter(world.root / "adapter", world.root / "base")
    world.data["experts"]["rev"]["model"] = str(adapter)
    inputs = take_missing_probes(read_inputs(load_pipeline(world.write())))
    registry = Registry(world.root / "registry")
    for name, model in (("rev", adapter), ("up", world.root / "up")):
        record = registry.add(name, model, name).probe
        assert record is not None and inputs.scorers[name].teacher.probe == record.probe
    routed = [a.teacher for routes in (inputs.routes, inputs.scoring) for assigned in routes.values() for a in assigned]
    assert all(teacher == inputs.scorers[teacher.name].teacher for teacher in routed)
