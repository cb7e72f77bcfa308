"""Look at the directories of student and experts: headers and JSON, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experts.adapter import AdapterInfo, inspect_adapter, inspect_expert, is_adapter, named_base
from experts.checks import check_fits
from experts.model_dir import ModelInfo, inspect_model
from pipelines.propose.given import ExpertAnswer, InitAnswers, Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """An expert as its files describe it."""

    model: Path
    """Directory as it was given."""
    base: Path | None
    """The base to name in the pipeline; None for a full model, and for an adapter that names its base itself."""
    info: ModelInfo
    """The model; for an adapter, its base."""
    adapter: AdapterInfo | None


def look_at_student(path: Path) -> ModelInfo:
    """The student's facts. Raises: ModelError."""
    return inspect_model(path, hash_weights=False)


def look_at_experts(answers: InitAnswers, student: ModelInfo, tell: Tell) -> dict[str, ExpertFacts]:
    """Every expert's facts. Raises: ModelError, also for one that cannot score the student's tokens."""
    facts = {name: _look_at_expert(expert, answers.student) for name, expert in answers.experts.items()}
    for name, expert in facts.items():
        for warning in check_fits(student, expert.info, name):
            tell(f"warning: {warning}")
    return facts


def _look_at_expert(expert: ExpertAnswer, student: Path) -> ExpertFacts:
    if not is_adapter(expert.model):
        if expert.base is not None:
            inspect_expert(expert.model, expert.base)  # refuses a full model that is given a base
        return ExpertFacts(
            model=expert.model, base=None, info=inspect_model(expert.model, hash_weights=False), adapter=None
        )
    # Most adapters name their base as a hub does, and it is mostly what the student is.
    base = expert.base or (None if named_base(expert.model) else student)
    adapter = inspect_adapter(expert.model, base, hash_files=False)
    info = inspect_model(Path(adapter.base), hash_weights=False)
    return ExpertFacts(model=expert.model, base=base, info=info, adapter=adapter)
