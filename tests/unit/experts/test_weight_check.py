"""Weights beside those of the architecture: what is said where an expert is registered, and where a merge begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.registry import Registry
from opd.config import load_pipeline
from opd.errors import ModelError
from pipelines.inputs.read import read_inputs

Q0 = "model.layers.0.self_attn.q_proj"
LEFTOVERS = {
    "value head": ({"v_head.summary.weight": (1, 64)}, "a head that training used"),
    "reward head": ({"score.weight": (1, 64)}, "a head that training used"),
    "adapter": ({f"{Q0}.lora_A.default.weight": (4, 64), f"{Q0}.lora_B.default.weight": (64, 4)}, "merge_and_unload()"),
    "something else": ({"model.layers.7.mlp.up_proj.weight": (128, 64)}, "copy the directory again"),
}


@pytest.mark.parametrize("kind", LEFTOVERS)
def test_the_registry_refuses_what_a_merge_refuses_in_the_same_words(kind: str, world: Any) -> None:
    shapes, advice = LEFTOVERS[kind]
    file: Path = world.root / "rev" / "model.safetensors"
    state = load_file(file) | {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ModelError) as registered:
        Registry(world.root / "registry").add("rev", world.root / "rev", "reverse")
    with pytest.raises(ModelError) as merged:
        read_inputs(load_pipeline(world.write()))
    assert str(registered.value) == str(merged.value)
    assert f"unexpected ['{min(shapes)}'" in str(merged.value) and advice in str(merged.value)
