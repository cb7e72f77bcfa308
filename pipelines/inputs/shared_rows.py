"""Check that the trainer's ranks can share the rows of this student (`trainer.sequence_parallel_size`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opd.config import PipelineConfig
from opd.config.teachers import TrainerTeachers
from opd.errors import ConfigError
from opd.rollouts.served_families import find_indivisible_part
from pipelines.routes import start_student_weights

KEY = "trainer.sequence_parallel_size"


def refuse_shared_rows(config: PipelineConfig, lm: Any) -> None:
    """Refuse a size above 1 with a setting or an architecture for which ranks cannot share rows. `lm`: the student, without weights.

    Raises: ConfigError for the first reason.
    """
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return
    for reason in _find_reasons(config, lm):
        raise ConfigError.at(
            KEY,
            found=f"{size} with {reason}",
            wanted="1: ranks share rows only where each layer but attention computes every token by itself, in plain passes",
            fix=f"set {KEY} to 1; trainer.gradient_checkpointing and a lower trainer.micro_batch_tokens save memory too",
        )


def _find_reasons(config: PipelineConfig, lm: Any) -> Iterator[str]:
    # Not at the top: it imports torch, and refusals of other things come without the seconds that this takes.
    from opd.models.weights import choose_attention, obeys_masks

    if config.trainer.compile:
        yield "trainer.compile"
    for name in config.objective.judging_models:
        yield f"a {name} (objective.reward)"
    environments = [domain.environment for domain in config.domains.values() if domain.environment]
    if any(e.turn_weights.divergence for e in environments if e.turn_weights):
        yield "weights of turns that depend on the divergence of earlier ones"
    if any(isinstance(section, TrainerTeachers) for section in config.engines):
        yield "teachers.engine trainer"
    elif start_student_weights(config):
        yield "the start student as a teacher (objective.extrapolate), which the ranks score with"
    size, text = config.trainer.sequence_parallel_size, lm.config.get_text_config(decoder=True)
    if choose_attention(lm.config) != "sdpa" or not obeys_masks(lm):
        yield f"a student of the family {lm.config.model_type}, which has layers other than plain attention over the whole row"
    elif part := find_indivisible_part(lm.config, size, KEY):
        yield f"{part.key} {part.found} of the student"
    elif size > text.num_key_value_heads:
        yield f"num_key_value_heads {text.num_key_value_heads} of the student: each rank needs one"
