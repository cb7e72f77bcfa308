"""The recipe of docs/gpu.md: a pipeline that loads, and that fits on the GPU it is meant for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig
from opd.settings.yaml_files import validate_section
from pipelines.inputs.read import read_inputs
from pipelines.sizing import gpu_memory
from pipelines.sizing.gpu_memory import gpu_roles, place_roles, refuse_crowded_gpus

PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"


def recipes() -> list[dict[str, Any]]:
    """Whole pipelines on the page; other blocks show a section."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return [block for block in map(yaml.safe_load, blocks) if "name" in block]


def test_there_is_one_and_it_loads() -> None:
    (recipe,) = recipes()
    config = validate_section(PipelineConfig, recipe, PAGE)
    assert config.rollout.sleep and config.trainer.ranks == 1


def test_it_is_one_gpu_and_fits_there(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiny models in the place of its own, and their short context."""
    (recipe,) = recipes()
    kept = {key: world.data[key] for key in ("student", "experts", "domains")}
    recipe["rollout"] |= {"max_model_len": 64, "max_new_tokens": 8}
    config = validate_section(PipelineConfig, recipe | kept, PAGE)
    inputs = read_inputs(config)
    assert len(place_roles(gpu_roles(config, inputs))) == 1
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [24 << 30])
    assert refuse_crowded_gpus(config, inputs) == []
