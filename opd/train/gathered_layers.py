"""Choice of the layers that DeepSpeed gathers as one, with hooks around the layer instead of around every module inside."""

from __future__ import annotations

from torch import nn

from opd.config.sections import MAX_UNSHARDED
from opd.models.weights import whole_shape


def find_leaf_classes(lm: nn.Module, world_size: int, *, compiled: bool = False) -> list[type[nn.Module]]:
    """Return the classes of layers that DeepSpeed gathers as one: all weights of the layer are whole while any part of it runs.

    Compiled layers are all gathered as one, because a hook inside would split the compiled graph. Otherwise it depends:

    * If the weights are whole anyway, all layers are gathered as one, because hooks around every module inside cost a small
      model as much time as the model itself. Weights are whole with one rank, or if all of them are small.
    * Else only layers that must be, because all weights of such a layer are in memory at one time.
    """
    layers = list_decoder_layers(lm)
    stay_whole = world_size == 1 or all(_is_small(layer) for layer in layers)
    # A frozen layer below the first adapter needs no backward pass. If it were gathered as one, `opd.train.zero` would have to
    # give it one, so frozen layers are gathered module by module.
    every = compiled or (stay_whole and all(_is_trained(layer) for layer in layers))
    return list({type(layer): None for layer in layers if every or _must_be_whole(layer)})


def list_decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def _is_trained(layer: nn.Module) -> bool:
    return any(param.requires_grad for param in layer.parameters())


def _is_small(layer: nn.Module) -> bool:
    return all(whole_shape(param).numel() <= MAX_UNSHARDED for param in layer.parameters())


def _must_be_whole(layer: nn.Module) -> bool:
    """Return True if hooks around the modules inside would not be enough.

    Under ZeRO-3 a weight is whole only while the module that owns it runs, and all ranks must gather the same weights in the
    same order. Two kinds of modules break this. Mamba, gated delta and LFM2 mixers read the weight of their short
    convolution without running it. A list of experts runs only the experts that a rank's tokens are routed to.
    It is the whole decoder layer, not the mixer inside: DeepSpeed releases a module's weights as soon as the gradient of its
    input is there, when a mixer still needs some of them.
    """
    return any(
        isinstance(child, nn.Conv1d) or (name == "experts" and isinstance(child, nn.ModuleList))
        for module in layer.modules()
        for name, child in module.named_children()
    )
