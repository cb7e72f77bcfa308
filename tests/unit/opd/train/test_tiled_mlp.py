"""MLPs in tiles: the same states and gradients, with what is inside of them in memory for one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from opd.train import zero
from opd.train.tiled_mlp import describe_untiled_layer, tile_mlps

WIDTH, INSIDE, LAYERS, TOKENS, TILE = 64, 192, 2, 50, 8
SHAPE = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": INSIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model(family: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | more), attn_implementation="sdpa")
    wrapper = nn.Module()
    wrapper.lm = lm
    return wrapper


class TensorCount(TorchDispatchMode):
    """Notes the most rows that any new tensor as wide as the inside of an MLP has."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] == INSIDE:
            rows = result.numel() // INSIDE
            if rows != WIDTH:  # else it is a weight, or a gradient of one
                self.most_rows = max(self.most_rows, rows)
        return result


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that the backward pass needs, each storage once, without the weights."""

    def __init__(self, lm: nn.Module) -> None:
        weights = {param.untyped_storage().data_ptr() for param in lm.parameters()}
        self.storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def train(wrapper: Any, rows: int = 1) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Return states, gradients, saved bytes, and the most rows of a tensor inside an MLP."""
    lm = wrapper.lm
    ids = torch.arange(rows * TOKENS).view(rows, TOKENS) % 61 + 3
    saved = SavedBytes(lm)
    with TensorCount() as count:
        with saved:
            states = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        # Squares would not do: after a norm their mean is nearly constant, and gradients are rounding errors.
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    gradients = {name: param.grad for name, param in lm.named_parameters() if param.grad is not None}
    return states.detach(), gradients, sum(saved.storages.values()), count.most_rows


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen2", {}), ("gemma2", {"head_dim": 32}), ("phi3", {})])
def test_tiles_give_the_same_states_and_gradients(
    family: str, more: dict[str, Any], rows: int, recompute: bool
) -> None:
    made = [model(family, **more) for _ in range(2)]
    assert describe_untiled_layer(made[1].lm) is None
    for one in made:
        one.lm.double()  # sums of float32 in another order differ by the bound itself on some processors
        zero._disable_randomness(one, recompute)
    tile_mlps(made[1].lm, TILE)
    (states, gradients, *_), (tiled_states, tiled, *_) = (train(one, rows) for one in made)
    assert (states - tiled_states).abs().max() <= 1e-6 * states.abs().max()
    assert gradients.keys() == tiled.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        assert (gradient - tiled[name]).abs().max() <= 1e-6 * gradient.abs().max(), name


@pytest.mark.parametrize("recompute", [False, True])
def test_the_inside_of_an_mlp_is_there_for_one_tile_at_a_time(recompute: bool) -> None:
    whole, tiled = model(), model()
    for one in (whole, tiled):
        zero._disable_randomness(one, recompute)
    tile_mlps(tiled.lm, TILE)
    (_, _, whole_saved, whole_rows), (_, _, tiled_saved, tiled_rows) = train(whole), train(tiled)
    assert (whole_rows, tiled_rows) == (TOKENS, TILE)
    # Of the inside, gate, its activation, the other product and theirs are saved, each as wide.
    inside = LAYERS * 4 * TOKENS * INSIDE * 4
    assert whole_saved - tiled_saved == (0 if recompute else inside), (
        "checkpoints of layers save the layers' inputs alone"
    )


def test_a_row_of_one_tile_is_computed_once() -> None:
    whole, tiled = model(), model()
    tile_mlps(tiled.lm, TOKENS)
    (_, gradients, *_), (_, same, *_) = train(whole), train(tiled)
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())


def test_without_gradients_the_inside_is_there_for_one_tile_too() -> None:
    tiled = model()
    tile_mlps(tiled.lm, TILE)
    with torch.no_grad(), TensorCount() as count:
        tiled.lm(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=False)
    assert count.most_rows == TILE


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        (
            "mixtral",
            {"num_local_experts": 2, "sliding_window": None},
            "MixtralSparseMoeBlock, which is more than linear",
        ),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "OPTDecoderLayer, which has no module `mlp`"),
    ],
)
def test_layers_without_an_mlp_of_linear_modules_are_named(family: str, more: dict[str, Any], message: str) -> None:
    assert message in str(describe_untiled_layer(model(family, **more).lm))


# Activations at checkpoints in the machine's memory


class CountedMoves(torch.autograd.graph.save_on_cpu):
    """Moves saved tensors as on a GPU, without pinned memory, and notes what it moves."""

    moved: list[Tensor]

    def __init__(self, pin_memory: bool, device_type: str) -> None:
        super().__init__(pin_memory=False, device_type=device_type)
        pack: Callable[[Tensor], Any] = self.pack_hook

        def count(tensor: Tensor) -> Any:
            self.moved.append(tensor)
            return pack(tensor)

        self.pack_hook = count


def test_only_the_inputs_of_layers_are_moved_and_gradients_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    monkeypatch.setattr(modeling_utils, "save_on_cpu", CountedMoves)
    monkeypatch.setattr(CountedMoves, "moved", [], raising=False)
    stay, move = model(), model()
    zero._disable_randomness(stay, True)
    zero._disable_randomness(move, True, True)
    (states, gradients, *_), (same_states, same, *_) = train(stay), train(move)
    shapes = [tuple(tensor.shape) for tensor in CountedMoves.moved if tensor.numel()]
    assert shapes == [(1, TOKENS, WIDTH)] * LAYERS
    assert torch.equal(states, same_states) and len(gradients) > 10
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())
