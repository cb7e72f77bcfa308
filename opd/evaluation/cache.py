"""A cache of exam results across runs. A result is found by the content of everything that decides it.

    facts (model, questions, settings, code ...) ── BLAKE3 ──→ CACHE/exams/HASH.json: the result, and which run measured it

Each file holds the hash of its own content. If that does not match, the exam is taken again, and the user reads a sentence about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opd.files import atomic_write_text, blake3_json, cache_dir
from opd.records.scores import FORMAT, Evaluation

VARIABLE, OFF = "OPD_EXAM_CACHE", "off"
"""The environment variable that sets the directory, and the value with which no result is kept or used."""


def exam_cache_dir() -> Path | None:
    """Return the directory of the cache; None if the user has turned it off."""
    setting = os.environ.get(VARIABLE)
    if setting == OFF:
        return None
    return Path(setting) if setting else cache_dir() / "exams"


class ExamCache:
    """The cached results in one directory."""

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        """`root` is made as the first result is kept. `tell` gets a sentence about a file that cannot be read or written."""
        self._root = root
        self._tell = tell

    def find(self, facts: Mapping[str, Any]) -> Evaluation | None:
        """Return the result that was measured under the same facts, with its run and day in `cached`; None if there is none."""
        file = self._file_of_facts(facts)
        try:
            entry = json.loads(file.read_bytes())
            if entry.pop("blake3") != blake3_json(entry):
                raise ValueError("its content is not what was written")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"warning: {file}: {error.strerror}; the exam is taken again")
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut short, or JSON of another shape
            self._tell(f"warning: {file} is damaged ({type(error).__name__}: {error}); the exam is taken again")
            return None
        evaluation = Evaluation.from_json(entry["evaluation"])
        return replace(evaluation, cached=dict.fromkeys(evaluation.scores, f"{entry['run']}, {entry['day']}"))

    def keep(self, facts: Mapping[str, Any], evaluation: Evaluation, run: Path) -> None:
        """Keep the result that `run` measured. Not if a verifier raised in it, since that might not happen another time."""
        if any(score.failed for score in evaluation.scores.values()):
            return
        file = self._file_of_facts(facts)
        entry = {
            "facts": facts,
            "run": str(run.absolute()),
            "day": datetime.now(UTC).date().isoformat(),
            "evaluation": {"format": FORMAT, **asdict(evaluation)},
        }
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            atomic_write_text(file, json.dumps(entry | {"blake3": blake3_json(entry)}, indent=1))
        except OSError as error:
            self._tell(f"warning: {file}: {error.strerror}; the result is not kept for other runs")

    def _file_of_facts(self, facts: Mapping[str, Any]) -> Path:
        return self._root / f"{blake3_json({'format': FORMAT, 'facts': facts})}.json"
