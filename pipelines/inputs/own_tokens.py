"""Experts with another tokenizer than the student's: what does not go with them is refused, and each gets an encoder of responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from experts.model_dir import ModelInfo
from opd.config import PipelineConfig
from opd.config.payloads import OWN_TOKENS
from opd.errors import ConfigError, ModelError
from opd.prompts.turn_ends import find_turn_end
from opd.records.types import WeightedTeacher
from opd.vocabularies.response_encoder import ResponseEncoder
from pipelines.routes import RoutedExpert

LEAST_SHARED = 16
"""Tokens that two vocabularies have in common at least: with fewer, nothing but luck puts text of one into tokens of the other."""


def reads_own_tokens(config: PipelineConfig, expert: str) -> bool:
    """Return True if an expert reads prompts and responses in tokens of its own."""
    return config.engine_of(expert).payload == OWN_TOKENS


def refuse_unfit_tokens(config: PipelineConfig, scoring: Mapping[str, tuple[WeightedTeacher, ...]]) -> None:
    """Refuse what does not go with experts that read tokens of their own. Raises: ConfigError."""
    for domain, assigned in scoring.items():
        names = [a.teacher.name for a in assigned if reads_own_tokens(config, a.teacher.name)]
        if not names:
            continue
        reason = f"expert `{names[0]}` of domain {domain} reads tokens of its own"
        if config.domains[domain].has_episodes:
            raise ConfigError.at(
                f"domains.{domain}",
                found=f"episodes of several turns, where {reason}",
                wanted="domains in which the student answers once",
                fix="give the domain an expert with the student's tokenizer",
            )
        if config.rollout.temperature != 1:
            raise ConfigError.at(
                "rollout.temperature",
                found=f"{config.rollout.temperature:g}, where {reason}",
                wanted="1: of a piece of text with several tokens the loss needs the student's own log-prob",
                fix="set rollout.temperature to 1",
            )
        if config.trainer.sequence_parallel_size > 1:
            raise ConfigError.at(
                "trainer.sequence_parallel_size",
                found=f"{config.trainer.sequence_parallel_size}, where {reason}",
                wanted="1: a piece of text with several tokens is not divided among ranks",
                fix="leave trainer.sequence_parallel_size out",
            )
        for name in names:
            if name in config.teachers.mask_tokens:
                raise ConfigError.at(
                    f"teachers.mask_tokens.{name}",
                    found=f"tokens without loss, where {reason}",
                    wanted="experts with the student's tokenizer: the pieces of text that are compared have whole tokens",
                    fix="remove it",
                )


def find_own_tokens(scoring: Mapping[str, tuple[WeightedTeacher, ...]]) -> set[str]:
    """Return the names of the teachers that read tokens of their own. `scoring`: `Inputs.scoring`."""
    return {a.teacher.name for assigned in scoring.values() for a in assigned if a.encoder is not None}


def find_text_experts(scoring: Mapping[str, tuple[WeightedTeacher, ...]]) -> set[str]:
    """Return the names of the teachers that only write text behind a server: there is no model of theirs here. `scoring`:
    `Inputs.scoring`."""
    return {a.teacher.name for assigned in scoring.values() for a in assigned if not a.teacher.has_model}


def build_encoders(
    student: ModelInfo, student_tokenizer: Any, tokenizers: Mapping[str, Any], scorers: Mapping[str, RoutedExpert]
) -> dict[str, ResponseEncoder]:
    """Return expert -> what puts the student's responses into its tokens. `tokenizers`: those of the experts that need it.

    Raises: ModelError for a tokenizer whose tokens cannot be told as bytes, a model without an end token, or strangers.
    """
    encoders = {}
    for name, tokenizer in tokenizers.items():
        info = scorers[name].info
        ends = _pair_ends(student_tokenizer, student.eos_token_ids, tokenizer, info)
        try:
            encoders[name] = ResponseEncoder(student_tokenizer, tokenizer, ends, info.context)
        except ValueError as error:
            raise ModelError.at(
                f"expert `{name}`: {info.path}",
                found=str(error),
                wanted="tokenizers of student and expert whose tokens are bytes or text",
                fix="take models with a tokenizer of the kinds BPE or Unigram; docs/tokenizers.md has the list",
            ) from None
        shared = int((encoders[name].shared.teacher_ids >= 0).sum())
        if shared < LEAST_SHARED:
            raise ModelError.at(
                f"expert `{name}`: {info.path}",
                found=f"{shared} tokens that the student has, too, of {info.vocab_size}",
                wanted=f"at least {LEAST_SHARED}",
                fix="take an expert for the same script as the student",
            )
    return encoders


def _pair_ends(
    student_tokenizer: Any, student_ends: Iterable[int], tokenizer: Any, expert: ModelInfo
) -> dict[int, int]:
    """Return id of each end token of the student -> the expert's end of a turn; the student's own end of a turn comes first.

    Raises: ModelError for an expert without an end token.
    """
    ends = sorted(student_ends)
    if not ends:
        return {}
    if not expert.eos_token_ids:
        raise ModelError.at(
            expert.path,
            found="no end token",
            wanted="an `eos_token_id`, which stands for the student's end of a turn",
            fix="add it to generation_config.json",
        )
    first, end = find_turn_end(student_tokenizer, ends), find_turn_end(tokenizer, expert.eos_token_ids)
    return {first: end} | dict.fromkeys(ends, end)
