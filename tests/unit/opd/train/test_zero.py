"""Facts about a model that a rank tells DeepSpeed, and training by any loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opd.config.sections import MAX_UNSHARDED
from opd.errors import RunError
from opd.train import gathered_layers
from opd.train.gathered_layers import find_leaf_classes
from opd.train.optimizer import AdamWOptions
from opd.train.zero import ZeroEngine, ZeroOptions

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
    family: str, more: dict[str, Any], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(gathered_layers, "MAX_UNSHARDED", 0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | more))
    assert [found.__name__ for found in find_leaf_classes(model, world_size=2)] == wanted


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

    assert find_leaf_classes(nn.Sequential(Layer(), nn.Linear(4, 4), Layer()), world_size=2) == [Layer]


def test_layers_of_small_weights_are_gathered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    largest = max(param.numel() for param in model.model.layers.parameters())
    for small, wanted in ((largest, ["LlamaDecoderLayer"]), (largest - 1, [])):
        monkeypatch.setattr(gathered_layers, "MAX_UNSHARDED", small)
        assert [found.__name__ for found in find_leaf_classes(model, world_size=2)] == wanted


def test_what_is_small_is_what_deepspeed_keeps_whole() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig(stage=3).param_persistence_threshold == MAX_UNSHARDED


def test_at_one_rank_every_layer_is_gathered_as_one() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    assert [found.__name__ for found in find_leaf_classes(model, world_size=1)] == ["LlamaDecoderLayer"]
    for param in model.model.layers[0].parameters():
        param.requires_grad_(requires_grad=False)
    assert find_leaf_classes(model, world_size=1) == []
    together = find_leaf_classes(model, world_size=2, compiled=True)
    assert [found.__name__ for found in together] == ["LlamaDecoderLayer"], "hooks inside would cut it into pieces"


# A loss that knows of no teacher


class Critic(nn.Module):
    """Squares of what a linear model says, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.lm.weight)

    def forward(self, input_N_D: Tensor) -> tuple[Tensor, int]:
        return self.lm(input_N_D).square().mean(), len(input_N_D)


class OneRank:
    """Stands for DeepSpeed on one rank: steps behind the last micro-batch, on gradients divided by the loss scale."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.0)
        self.optimizer.override_loss_scale = self._scale_by  # type: ignore[attr-defined]
        self._scale, self._last, self._norm = 1.0, False, 0.0

    def _scale_by(self, share: float) -> None:
        self._scale = share

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self._last = last

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        assert self._last
        for param in self.module.parameters():
            assert param.grad is not None
            param.grad /= self._scale
        self._norm = float(torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None]).norm())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return self._norm


def critic() -> ZeroEngine:
    options = ZeroOptions(
        name="critic", world_size=1, dtype="float32", vocab_size=9,
        adamw=AdamWOptions(betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.0), max_grad_norm=1.0,
        grad_accum_dtype="float32", gradient_checkpointing=False, timeout_s=1.0,
    )  # fmt: skip
    made = ZeroEngine(options, 0, Critic)
    made._engine = OneRank(made._build())
    return made


def test_any_loss_can_be_trained() -> None:
    """d/dw mean (w x)^2 = mean 2 (w x) x, summed over micro-batches."""
    engine = critic()
    loss, rows = engine.model(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert rows == 2, "what comes beside the loss"
    engine.add_gradients(loss, last=False)
    engine.add_gradients(engine.model(torch.tensor([[0.0, 2.0]]))[0], last=True)
    assert engine.take_step(1, 0.25) == pytest.approx(math.hypot(2, 8))
    assert engine._engine.module.lm.weight.tolist() == [[0.5, -1.0]]
    engine.add_gradients(engine.model(torch.tensor([[2.0, 0.0]]))[0], last=True)
    assert engine.take_step(2, 0.0, 0.5) == pytest.approx(4 / 0.5), "divided by the share"


def test_a_gradient_that_broke_is_told_with_the_models_name() -> None:
    engine = critic()
    engine.add_gradients(engine.model(torch.tensor([[math.inf, 0.0]]))[0], last=True)
    with pytest.raises(RunError, match=r"step 7: gradient norm nan: the critic's weights or the learning rate broke"):
        engine.take_step(7, 0.1)
