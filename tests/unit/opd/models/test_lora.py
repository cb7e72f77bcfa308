"""The meaning of an adapter's configuration; the expected factors are those that PEFT computes (peft/tuners/lora)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from opd.models.lora import LoraConfig, read_updates, split_name

Q0 = "model.layers.0.self_attn.q_proj"
Q10 = "model.layers.10.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def config(**fields: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 8, "lora_alpha": 16} | fields)


@pytest.mark.parametrize(
    ("fields", "module", "rank", "scaling"),
    [
        ({}, Q0, 8, 2.0),
        ({"lora_alpha": 4}, Q0, 8, 0.5),
        ({"lora_alpha": 0.5}, Q0, 8, 0.0625),
        ({"use_rslora": True}, Q0, 8, 16 / math.sqrt(8)),
        ({"rank_pattern": None, "alpha_pattern": None}, Q0, 8, 2.0),
        ({"rank_pattern": {"q_proj": 4}}, Q0, 4, 4.0),
        ({"rank_pattern": {"q_proj": 4}}, DOWN, 8, 2.0),
        ({"rank_pattern": {"proj": 4}}, Q0, 8, 2.0),  # a whole name, not the end of one
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 2}}, Q0, 2, 8.0),
        ({"rank_pattern": {"0.self_attn.q_proj": 2}}, Q10, 8, 2.0),
        ({"rank_pattern": {r".*\.\d0\..*": 1}}, Q10, 1, 16.0),
        ({"rank_pattern": {"q_proj": 4, "self_attn.q_proj": 2}}, Q0, 4, 4.0),  # the first that fits
        ({"alpha_pattern": {"down_proj": 1}}, DOWN, 8, 0.125),
        ({"alpha_pattern": {"down_proj": 1}}, Q0, 8, 2.0),
        ({"rank_pattern": {"down_proj": 4}, "alpha_pattern": {DOWN: 6}, "use_rslora": True}, DOWN, 4, 3.0),
    ],
)
def test_rank_and_scaling(fields: dict[str, Any], module: str, rank: int, scaling: float) -> None:
    found = config(**fields)
    assert found.rank(module) == rank
    assert found.scaling(module) == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        *({"r": 0}, {"r": -1}, {"r": 8.5}, {"r": True}, {"lora_alpha": math.inf}, {"lora_alpha": "16"}),
        *({"rank_pattern": {"q_proj": 0}}, {"alpha_pattern": {"q_proj": math.nan}}, {"use_rslora": 1}),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**fields)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"base_model.model.{Q0}.lora_A.weight", (Q0, "A")),
        (f"base_model.model.{Q0}.lora_B.weight", (Q0, "B")),
        (f"base_model.model.{Q0}.lora_B.bias", None),
        (f"base_model.model.{Q0}.lora_magnitude_vector", None),
        ("base_model.model.model.embed_tokens.lora_embedding_A", None),
        ("base_model.model.lm_head.weight", None),
        (f"{Q0}.lora_A.weight", None),
    ],
)
def test_names_of_tensors(name: str, part: tuple[str, str] | None) -> None:
    assert split_name(name) == part


def test_tensors_are_paired_by_module() -> None:
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": torch.tensor([i])
        for i, (module, letter) in enumerate([(Q0, "B"), (DOWN, "A"), (Q0, "A"), (DOWN, "B")])
    }
    found = read_updates(config(alpha_pattern={"down_proj": 1}), tensors)
    assert {m: (u.a_K_I.item(), u.b_O_K.item(), u.scaling) for m, u in found.items()} == {
        Q0: (2, 0, 2.0),
        DOWN: (1, 3, 0.125),
    }
