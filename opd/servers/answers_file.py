"""The answers of a run's text-only experts, in one file, so that a resume asks nothing twice and trains on the same text."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from opd.files import raise_storage_errors
from opd.records.json_fields import make_record
from opd.records.texts import TextAnswer


class AnswersFile:
    """Appends answers, a line each, and finds them again. One process at a time uses it."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it is there. Raises: StorageError."""
        self._path = path
        self._answers: dict[tuple[str, str], TextAnswer] = {}
        """Expert and prompt's id -> answer."""
        self._lines: list[TextAnswer] = []
        if path.exists():
            with raise_storage_errors(path):
                lines = path.read_bytes().splitlines()
            for line in lines:
                try:
                    self._add(make_record(TextAnswer, json.loads(line)))
                except (ValueError, TypeError):
                    continue  # an empty line, or one that was cut off when its writer was killed

    def find(self, expert: str, prompt_id: str) -> TextAnswer | None:
        """Return the expert's answer; None if it was not asked, or if the requests for it failed."""
        return self._answers.get((expert, prompt_id))

    def append(self, answer: TextAnswer) -> None:
        """Add an answer and sync it. Raises: StorageError."""
        with raise_storage_errors(self._path), self._path.open("ab") as file:
            # The line feed before it ends a line that a killed process left unfinished.
            file.write(b"\n" + json.dumps(asdict(answer)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._add(answer)

    def list_answers(self, expert: str) -> list[TextAnswer]:
        """Return the expert's lines, those of failed requests among them, in order."""
        return [answer for answer in self._lines if answer.expert == expert]

    def _add(self, answer: TextAnswer) -> None:
        self._lines.append(answer)
        if answer.answered:
            self._answers[answer.expert, answer.prompt_id] = answer
