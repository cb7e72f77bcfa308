"""The section `draft`: a draft for speculative decoding that learns beside the student."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict

if TYPE_CHECKING:
    from opd.config.pipeline import PipelineConfig


DraftKind = Literal["eagle3", "shared_kv"]
DraftLoss = Literal["cross_entropy", "forward_kl", "tv", "log_overlap", "end_to_end_tv"]


class DraftConfig(Strict):
    kind: DraftKind = "eagle3"
    """`eagle3`: EAGLE-3, which vLLM serves. `shared_kv`: later guesses attend to what the student wrote alone; vLLM cannot serve it."""
    num_speculative_tokens: int = Field(3, ge=1, le=16)
    """Guesses after each token that the draft learns from."""
    loss: DraftLoss = "log_overlap"
    """`cross_entropy` to the token that was written, `forward_kl` to the student, `tv`: one less the probability that a guess is kept,
    `log_overlap`: its negative logarithm, `end_to_end_tv`: one less the mean share of guesses that are kept."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a guess beside that of the guess before it, for all losses but `end_to_end_tv`."""
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """Learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps by `log_overlap` first: `tv` and `end_to_end_tv` teach little while few guesses are kept."""
    tokens: int = Field(128, ge=1)
    """Positions of a micro-batch, at most, from which the draft learns: its time and memory."""
    vocab_size: int | None = Field(None, ge=2)
    """Tokens that the draft can guess: those with the lowest ids, which tokenizers learned first, and the ends. Default: all."""
    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Layers of the student, from 0, whose outputs the draft reads; default: the first, the middle and the last."""


def find_draft_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return the error of settings that contradict `draft`; None if there is none."""
    draft, guesses = config.draft, config.rollout.num_speculative_tokens
    if guesses and draft is None:
        return PydanticCustomError(
            "no_draft",
            "0, or a section `draft`, such as draft: {{}}: a draft has to learn before engines guess with it",
            {"where": "rollout.num_speculative_tokens", "found": str(guesses)},
        )
    if guesses and draft is not None and draft.kind != "eagle3":
        return PydanticCustomError(
            "unserved_draft",
            "eagle3, or rollout.num_speculative_tokens 0: vLLM does not serve the other kind",
            {"where": "draft.kind", "found": draft.kind},
        )
    if draft is not None and config.trainer.sequence_parallel_size > 1:
        return PydanticCustomError(
            "draft_of_shared_rows",
            "1 with a `draft`, which reads whole rows",
            {"where": "trainer.sequence_parallel_size", "found": str(config.trainer.sequence_parallel_size)},
        )
    return None
