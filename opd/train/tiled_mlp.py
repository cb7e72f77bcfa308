"""MLPs computed in tiles of tokens: what is inside of an MLP, several times as wide as a hidden state, is in memory for one tile at a time.

An MLP computes every token by itself, so its result is the same in any tiles. In the backward pass each tile is computed once more,
just before its gradients (torch's checkpoints). DeepSpeed gathers a tiled MLP as one: otherwise it would gather the weights again for
every tile, and ranks with different numbers of tiles would wait for each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opd.train.gathered_layers import list_decoder_layers


def tile_mlps(lm: nn.Module, tile_tokens: int) -> list[type[nn.Module]]:
    """Have every MLP of a transformers model compute at most `tile_tokens` tokens at a time, in place. Returns the classes of the MLPs.

    The model is one of which `describe_untiled_layer` returns None.
    """
    mlps: list[Any] = [layer.mlp for layer in list_decoder_layers(lm)]
    for mlp in mlps:
        mlp.forward = partial(_compute_tiles, mlp.forward, tile_tokens)
    return list({type(mlp): None for mlp in mlps})


def describe_untiled_layer(lm: nn.Module) -> str | None:
    """Return in words the first layer whose MLP cannot be divided into tiles; None if all can.

    An MLP can be if it takes hidden states alone and all its weights are those of linear modules. The experts of a mixture are not:
    they compute as many tokens as a router sends them.
    """
    from transformers.pytorch_utils import Conv1D

    layers = list_decoder_layers(lm)
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            return f"{type(layer).__name__}, which has no module `mlp`"
        owners = (module for module in mlp.modules() if next(module.parameters(recurse=False), None) is not None)
        plain = all(isinstance(module, nn.Linear | Conv1D) for module in owners)
        if not plain or len(inspect.signature(mlp.forward).parameters) != 1:
            return f"{type(mlp).__name__}, which is more than linear modules over one hidden state"
    return None if layers else f"{type(lm).__name__}, whose layers transformers does not mark as such"


def _compute_tiles(forward: Callable[[Tensor], Tensor], tile_tokens: int, hidden_B_T_D: Tensor) -> Tensor:
    tiles = hidden_B_T_D.flatten(0, 1)[None].split(tile_tokens, dim=1)
    if len(tiles) == 1:
        return forward(hidden_B_T_D)
    if torch.is_grad_enabled():
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([forward(tile) for tile in tiles], dim=1).view_as(hidden_B_T_D)
