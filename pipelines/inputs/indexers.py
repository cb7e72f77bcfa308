"""Check `student.indexers`: the pattern of shared indexers with which a student begins, and whether its indexers can learn."""

from __future__ import annotations

from pathlib import Path

from experts.model_dir import ModelInfo
from opd.config import PipelineConfig
from opd.config.domains import StudentIndexers
from opd.errors import ConfigError
from opd.indexers.patterns import FAMILIES, find_pattern, read_pattern

KEY = "student.indexers"


def refuse_unfit_indexers(config: PipelineConfig, student: ModelInfo) -> None:
    """Refuse a student whose layers share no indexer, a pattern that does not fit it, and what its indexers cannot learn with.

    Raises: ConfigError for the first reason; ModelError.
    """
    indexers = config.student.indexers
    if indexers is None:
        return
    if student.model_type not in FAMILIES:
        raise ConfigError.at(
            KEY,
            found=f"a student of the family {student.model_type}",
            wanted=f"{' or '.join(FAMILIES)}: in transformers and in vLLM layers of other families share no indexer",
            fix=f"remove {KEY}",
        )
    if config.student.lora is not None:
        raise ConfigError.at(
            KEY,
            found="with student.lora",
            wanted="one of the two: an adapter would be of a base with another pattern, and indexers are no part of it",
            fix=f"remove student.lora, or give the pattern to the base with `opd indexers train` and remove {KEY}",
        )
    if config.trainer.compile and indexers.loss_weight:
        raise ConfigError.at(
            "trainer.compile",
            found=f"true with {KEY}.loss_weight {indexers.loss_weight:g}",
            wanted="false: what indexers learn from is read inside of the layers",
            fix=f"remove trainer.compile, or set {KEY}.loss_weight to 0",
        )
    find_student_pattern(config, indexers)


def find_student_pattern(config: PipelineConfig, indexers: StudentIndexers) -> tuple[str, str]:
    """Return the pattern with which the student begins, and that of its files. Raises: ConfigError if the first does not fit; ModelError."""
    from opd.models.weights import load_config

    stored = read_pattern(load_config(config.student.model))
    return find_pattern(indexers.pattern, stored, f"{KEY}.pattern"), stored


def spell_pattern(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with the letters of a pattern in place of the directory that had them: it may have others when a run goes on."""
    indexers = config.student.indexers
    if indexers is None or indexers.pattern is None:
        return config
    spelled = indexers.model_copy(update={"pattern": find_student_pattern(config, indexers)[0]})
    return config.model_copy(update={"student": config.student.model_copy(update={"indexers": spelled})})


def warn_of_short_context(config: PipelineConfig) -> list[str]:
    """Return a warning if no indexer ever has to choose. `refuse_unfit_indexers` has accepted the student before."""
    if config.student.indexers is None:
        return []
    from opd.models.weights import load_config

    topk, longest = load_config(config.student.model).index_topk, config.rollout.max_model_len
    return (
        [
            f"{KEY}: rollout.max_model_len is {longest}, and an indexer chooses {topk} tokens (index_topk of "
            f"{Path(config.student.model) / 'config.json'}): all tokens are chosen, whatever the pattern"
        ]
        if longest <= topk
        else []
    )


def refuse_shared_indexers(config: PipelineConfig, command: str) -> None:
    """Refuse `student.indexers` for a command that takes the student as its files are. Raises: ConfigError."""
    if config.student.indexers is not None:
        raise ConfigError.at(
            KEY,
            found=f"a pattern of shared indexers, which {command} does not give the student",
            wanted=f"no {KEY}",
            fix="write the student with `opd indexers train`, name it as student.model, and remove the section",
        )
