"""The memory of a draft that learns beside the student, and that of the engines which guess with it."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.draft.shape import GROUP_VALUES, DraftShape
from opd.settings.strict import DTYPE_BYTES
from pipelines.draft import draft_shape

TRAINED_WEIGHT = 16
"""Bytes of a weight on a rank: itself, its gradient and both moments, in float32."""
GROUP_TENSORS = 6
"""Tensors of `GROUP_VALUES` numbers that exist at one time while a group of windows is trained."""


def count_draft_parameters(shape: DraftShape) -> int:
    """Return the number of a draft's weights; the embedding is the student's."""
    model = shape.model
    width, head = model["hidden_size"], model["head_dim"]
    queries, keys = model["num_attention_heads"] * head, model["num_key_value_heads"] * head
    attention = 2 * width * (queries + 2 * keys) + queries * width
    mlp = 3 * width * model["intermediate_size"]
    whole = len(shape.layers) * width * width + attention + mlp + len(shape.vocab) * width + 4 * width
    if shape.indexer is None:
        return whole
    heads, head = shape.indexer.heads, shape.indexer.head_dim
    return whole + 2 * width * (heads * head + head + heads) + 2 * head


def draft_rank_bytes(config: PipelineConfig, vocab_size: int) -> tuple[int, int]:
    """Return the bytes that a trainer rank holds for the draft all the time, and those of a pass; 0 without a draft."""
    if config.draft is None:
        return 0, 0
    shape = draft_shape(config.student.model, config.draft, vocab_size)
    # The student's probabilities of the tokens that guesses are about: as many as there are starts, and a few at the windows' ends.
    copied = 4 * 2 * config.draft.tokens * len(shape.vocab)
    return TRAINED_WEIGHT * count_draft_parameters(shape), copied + 4 * GROUP_TENSORS * GROUP_VALUES


def draft_engine_bytes(config: PipelineConfig, vocab_size: int) -> int:
    """Return the bytes of the draft's weights in one engine; 0 if engines do not guess."""
    if config.draft is None or not config.rollout.num_speculative_tokens:
        return 0
    shape = draft_shape(config.student.model, config.draft, vocab_size)
    return count_draft_parameters(shape) * DTYPE_BYTES[config.rollout.dtype]
