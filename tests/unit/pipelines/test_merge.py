"""What a merge records of its experts, and what it hands to an engine that can only hold whole models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experts.adapter import whole_model
from opd.config import PipelineConfig, load_pipeline, validate
from opd.errors import RunDirError
from opd.types import Teacher
from pipelines import merge
from pipelines.build import RunPaths
from pipelines.merge import _manifest, _refuse_changed_inputs, _resolved
from pipelines.preflight import check


@pytest.fixture
def mixed(world: Any, make_adapter: Callable[..., Path]) -> Any:
    """The world with an adapter of `base` in place of one of the two full models."""
    make_adapter(world.root / "adapters" / "up", world.root / "base", base_model_name_or_path="base")
    world.data["experts"]["up"]["model"] = "adapters/up"
    return world


def test_an_engine_gets_a_full_model_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    teacher = Teacher(name="full", model_dir=tiny_model_dir)
    with whole_model(teacher, tmp_path / "scratch") as directory:
        assert directory == tiny_model_dir
    assert tiny_model_dir.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_gets_an_adapter_merged_for_as_long_as_it_reads(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], merged_plainly: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_model_dir)
    want = load_file(merged_plainly(tiny_model_dir, adapter, tmp_path / "want") / "model.safetensors")
    scratch = tmp_path / "run" / ".tmp-expert"
    scratch.mkdir(parents=True)
    (scratch / "left.by.a.killed.run").touch()
    teacher = Teacher(name="lora", model_dir=tiny_model_dir, adapter_dir=adapter)
    with pytest.raises(InterruptedError), whole_model(teacher, scratch) as directory:
        assert sorted(p.name for p in directory.iterdir()) == sorted(p.name for p in tiny_model_dir.iterdir())
        found = load_file(directory / "model.safetensors")
        assert set(found) == set(want)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-6)
        raise InterruptedError
    assert list(scratch.parent.iterdir()) == [], "removed however the reading ended"


def test_a_resume_needs_neither_the_current_directory_nor_a_guess(
    mixed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = load_pipeline(mixed.write())
    resolved = _resolved(config, check(config))
    assert {n: e["base"] for n, e in resolved["experts"].items()} == {"rev": None, "up": str(mixed.root / "base")}
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = check(validate(PipelineConfig, resolved, "pipeline.yaml"))
    assert again.teachers["upper"].adapter_dir == mixed.root / "adapters" / "up"


def test_a_resume_with_another_adapter_is_refused(mixed: Any) -> None:
    config = load_pipeline(mixed.write())
    before = _manifest(config, check(config))
    assert "adapter" not in before["experts"]["rev"]
    _refuse_changed_inputs(before, _manifest(config, check(config)), RunPaths(mixed.root))
    file = mixed.root / "adapters" / "up" / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(RunDirError, match="experts changed since the run began: up"):
        _refuse_changed_inputs(before, _manifest(config, check(config)), RunPaths(mixed.root))


def test_a_run_records_how_it_was_called_and_what_it_is_made_of(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_run", lambda config, inputs, paths: {})
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/opd", "merge", "pipeline.yaml", "--set", "name=a b"])
    merge.start(load_pipeline(world.write()), world.root / "run")
    manifest = json.loads((world.root / "run" / "manifest.json").read_text())
    assert manifest["command"] == "opd merge pipeline.yaml --set 'name=a b'"
    weights = load_file(world.root / "base" / "model.safetensors")
    assert manifest["models"]["student"]["parameters"] == sum(t.numel() for t in weights.values())
    assert set(manifest["models"]["experts"]) == {"rev", "up"}
    assert merge.resume(world.root / "run") == {}, "neither is compared"
