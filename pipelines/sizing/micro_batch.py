"""Bytes that a rank of the trainer adds while it works on a micro-batch."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.config.payloads import OWN_TOKENS
from opd.models.packing import compute_tree_limit, count_columns
from opd.settings.strict import DTYPE_BYTES
from pipelines.routes import start_student_weights
from pipelines.sizing.models import MergeModels

EXCHANGE_COPIES = 16
"""Copies of a token's hidden state around the attention of a layer in ranks with shared rows: queries, keys, values and outputs, before and
after their exchange, and the gradients of these. Measured: at most 12 (`benchmarks/long_rows.py`, `tests/integration/test_long_rows.py`)."""
LOGIT_COPIES = 20
"""Bytes for each logit of a chunk of the loss: logits, log-softmax, probabilities and gradient of student and teacher."""
MASK_COPIES = 5
"""Bytes for each pair of columns of a row: one says whether they see each other, four are what attention adds for it."""


def micro_batch_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that one rank adds while it works on a micro-batch."""
    return sum(micro_batch_parts(config, models).values())


def micro_batch_parts(config: PipelineConfig, models: MergeModels) -> dict[str, int]:
    """Return the bytes of each part of what one rank adds while it works on a micro-batch; parts of 0 bytes are left out."""
    student, trainer, width = models.student, config.trainer, DTYPE_BYTES[config.trainer.dtype]
    tokens, body, tile = count_rank_tokens(config), models.read_body(student), trainer.mlp_tile_tokens
    recomputes, shares = trainer.gradient_checkpointing, trainer.sequence_parallel_size > 1
    inside = body.activation_width(student.hidden_size, checkpointing=recomputes, tiled=tile is not None)
    # Hidden states before the layer that is being recomputed wait in the machine's memory.
    checkpoints = checkpoint_bytes(config, models) if recomputes and not moves_checkpoints(config) else 0
    parts = {
        "activations at checkpoints": checkpoints,
        "activations inside a layer" if recomputes else "activations": tokens * inside * width,
        "a tile of an MLP": min(tokens, tile or 0) * body.inside_mlps // body.blocks * width,
        "exchange of shared rows": tokens * EXCHANGE_COPIES * student.hidden_size * width if shares else 0,
        "attention masks of trees": tree_mask_bytes(config, tokens),
        "logits of a chunk of the loss": logits_bytes(config, models),
        "gradient of the output head": 0 if models.lora else 4 * student.vocab_size * student.hidden_size,
    }
    return {part: nbytes for part, nbytes in parts.items() if nbytes}


def count_rank_tokens(config: PipelineConfig) -> int:
    """Return the most tokens of a micro-batch that one rank computes, padding included."""
    # The last unit of a micro-batch may begin just below the limit, and the padding of a row is computed too.
    unit = widest_unit(config)
    # Ranks that share rows each have a part of the columns.
    columns = count_columns(config.trainer.micro_batch_tokens + unit, unit)
    return -(-columns // config.trainer.sequence_parallel_size)


def checkpoint_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes of the hidden states between layers, from which one rank recomputes a micro-batch."""
    values = models.read_body(models.student).blocks * models.student.hidden_size
    return count_rank_tokens(config) * values * DTYPE_BYTES[config.trainer.dtype]


def moves_checkpoints(config: PipelineConfig) -> bool:
    """Return True if activations at checkpoints leave the GPUs for the machine's memory."""
    return config.trainer.activation_offloading and config.cluster.trainer_gpus > 0


def logits_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that a chunk of the loss needs; of a mixture's teachers each has logits of its own."""
    most_teachers = max((len(teachers) for teachers in models.scoring.values()), default=1)
    most_teachers += bool(start_student_weights(config))  # with which the trainer itself scores
    mixed = (most_teachers - 1) * DTYPE_BYTES[config.trainer.dtype] * models.student.vocab_size
    return config.objective.chunk * (token_logits_bytes(config, models) + mixed)


def token_logits_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes that each token of a chunk needs. What an expert that reads tokens of its own says of these comes beside what it
    says of the student's."""
    own = [
        expert.info.vocab_size + models.student.vocab_size
        for name, expert in models.scorers.items()
        if config.engine_of(name).payload == OWN_TOKENS
    ]
    return LOGIT_COPIES * (models.student.vocab_size + max(own, default=0))


def widest_unit(config: PipelineConfig) -> int:
    """Return the tokens of the longest response with its prompt, or of the largest tree where responses share a prompt.

    Trees save no memory: a micro-batch has the same limit in tokens that are computed, and has more responses. An architecture for
    which trees are wrong needs less, but only the started model tells that.
    """
    longest = config.rollout.max_model_len
    return compute_tree_limit(longest) if config.rollout.shares_prefixes else longest


def tree_mask_bytes(config: PipelineConfig, tokens: int) -> int:
    """Return the bytes of the attention mask for `tokens` tokens in trees; all layers share it."""
    return MASK_COPIES * tokens * widest_unit(config) if config.rollout.shares_prefixes else 0
