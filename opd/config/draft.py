"""The section `draft`: a draft for speculative decoding that learns beside the student."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opd.settings.strict import Strict


class DraftConfig(Strict):
    kind: Literal["eagle3", "shared_kv"] = "eagle3"
    """`eagle3`: EAGLE-3, which vLLM serves. `shared_kv`: later guesses attend to what the student wrote alone; vLLM cannot serve it."""
    num_speculative_tokens: int = Field(3, ge=1, le=16)
    """Guesses for each pass of the student."""
    loss: Literal["cross_entropy", "forward_kl", "tv", "log_overlap", "end_to_end_tv"] = "log_overlap"
    """`cross_entropy` to the token that was written, `forward_kl` to the student, `tv`: one less the probability that a guess is kept,
    `log_overlap`: its negative logarithm, `end_to_end_tv`: one less the mean share of guesses that are kept."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a guess beside that of the guess before it, for all losses but `end_to_end_tv`."""
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """Learning rate."""
    tokens: int = Field(512, ge=1)
    """Positions of a micro-batch, at most, from which the draft learns: its time and memory."""
    vocab_size: int | None = Field(None, ge=2)
    """Tokens of the draft: those that the prompts have most often; default: all."""
    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Layers of the student, from 0, whose outputs the draft reads; default: the first, the middle and the last."""
