"""Check that the MLPs of this student can be computed in tiles (`trainer.mlp_tile_tokens`)."""

from __future__ import annotations

from typing import Any

from opd.config import PipelineConfig
from opd.errors import ConfigError

KEY = "trainer.mlp_tile_tokens"


def refuse_tiled_mlps(config: PipelineConfig, lm: Any) -> None:
    """Refuse tiles with compiled layers, and for an architecture whose MLPs cannot be divided. `lm`: the student, without weights.

    Raises: ConfigError for the first reason.
    """
    tile_tokens = config.trainer.mlp_tile_tokens
    if tile_tokens is None:
        return
    # Not at the top: it imports torch, and refusals of other things come without the seconds that this takes.
    from opd.train.tiled_mlp import describe_untiled_layer

    reason = "trainer.compile" if config.trainer.compile else describe_untiled_layer(lm)
    if reason is not None:
        raise ConfigError.at(
            KEY,
            found=f"{tile_tokens} with {reason}",
            wanted="no value: only an MLP of linear modules is computed in tiles, in layers that are not compiled",
            fix=f"remove {KEY}; trainer.gradient_checkpointing and a lower trainer.micro_batch_tokens save memory too",
        )
