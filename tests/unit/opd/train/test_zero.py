"""What a rank tells DeepSpeed about a student."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from opd.train.zero import gathered_together

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more", "wanted"),
    [
        ("llama", {}, []),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, ["Lfm2DecoderLayer"]),
        (
            "bamba",
            {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2},
            ["BambaDecoderLayer"],
        ),
    ],
)
def test_a_layer_whose_mixer_reads_its_convolutions_weight_is_gathered_as_one(
    family: str, more: dict[str, Any], wanted: list[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | more))
    assert [found.__name__ for found in gathered_together(model)] == wanted


def test_a_layer_with_a_list_of_experts_is_gathered_as_one() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mixture()

    assert gathered_together(nn.Sequential(Layer(), nn.Linear(4, 4), Layer())) == [Layer]
