"""Results of baselines, which are other ways of merging the same experts. Each has a file `RUN_DIR/baselines/NAME.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from opd.files import atomic_write_text
from opd.records.json_fields import make_record
from opd.records.scores import DomainScore, load_result

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """Result of one method on all domains that have an exam."""

    method: str
    """The name that `opd baseline --method` takes."""
    label: str
    """Method and strength as a reader knows them, e.g. `TIES 0.5`."""
    strength: float | None = None
    """The strength of the method's grid that was best on the validation prompts; None for a method without strengths."""
    token_share: float | None = None
    """Share of the merge's training, 0..1; None for merges of weights, which train nothing."""
    tokens: int | None = None
    """Response tokens that were trained on; None for merges of weights."""
    seed: int
    scores: dict[str, DomainScore]
    """Domain -> score, on the exam that the merge is reported on."""
    validation: dict[str, float] = field(default_factory=dict)
    """Strength (as text, JSON's keys are text) -> mean accuracy over the domains' validation prompts."""
    wall_s: float
    """Seconds that the model and its evaluation took together."""
    weights: str = ""
    """Digest of the model that was measured (its config.json and weight files); empty if an older release wrote it."""
    inputs: str = ""
    """Digest of what it was made from: student, experts, prompts and the pipeline's keys that decide the result; empty if
    an older release wrote it."""
    merge_steps: int | None = None
    """Steps that the run directory's merge had taken; None without a merge, or if an older release wrote it."""
    merge_tokens: int | None = None
    """Response tokens of those steps."""

    @property
    def accuracy(self) -> float:
        """Mean of the domains' accuracies, 0..1."""
        return fmean(score.accuracy for score in self.scores.values())

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises: OSError."""
        atomic_write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: Path) -> BaselineResult:
        """Read what `save` wrote. Raises: OSError; RunDirError for a file that is damaged or of another format."""
        return load_result(path, FORMAT, cls.from_json)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BaselineResult:
        """Make the result from the parsed JSON of its file."""
        assert data["format"] == FORMAT, f"baseline of format {data['format']}"
        return make_record(cls, data)
