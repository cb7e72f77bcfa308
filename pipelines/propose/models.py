"""Inspect the directories of student and experts: headers and JSON, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experts.adapter import AdapterInfo, inspect_adapter, inspect_expert, is_adapter, named_base
from experts.model_dir import ModelInfo, inspect_model
from experts.teacher_check import check_fits
from opd.text import Tell
from pipelines.propose.flags import ExpertAnswer, InitAnswers


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """An expert as its files describe it."""

    model: Path
    """Directory as the user gave it."""
    base: Path | None
    """The base to name in the pipeline; None for a full model, and for an adapter that names its base itself."""
    info: ModelInfo
    """Facts from the files of the model; for an adapter, from those of its base."""
    adapter: AdapterInfo | None
    """None for a full model."""


def inspect_student(path: Path) -> ModelInfo:
    """Inspect the student, without hashing its weights. Raises: ModelError."""
    return inspect_model(path, hash_weights=False)


def inspect_experts(answers: InitAnswers, student: ModelInfo, tell: Tell) -> dict[str, ExpertFacts]:
    """Inspect every expert, and tell the user of what may be wrong with it. Raises: ModelError, also for an expert that cannot score the
    student's tokens."""
    facts = {name: _inspect_one(expert, answers.student) for name, expert in answers.experts.items()}
    for name, expert in facts.items():
        for warning in check_fits(student, expert.info, name):
            tell(f"warning: {warning}")
    return facts


def _inspect_one(expert: ExpertAnswer, student: Path) -> ExpertFacts:
    if not is_adapter(expert.model):
        if expert.base is not None:
            inspect_expert(expert.model, expert.base)  # raises, because a full model has no base
        return ExpertFacts(
            model=expert.model, base=None, info=inspect_model(expert.model, hash_weights=False), adapter=None
        )
    # `named_base` is None if the adapter names no directory of this machine: most name their base as a hub does. The student is mostly
    # that base.
    base = expert.base or (None if named_base(expert.model) else student)
    adapter = inspect_adapter(expert.model, base, hash_files=False)
    info = inspect_model(Path(adapter.base), hash_weights=False)
    return ExpertFacts(model=expert.model, base=base, info=info, adapter=adapter)
