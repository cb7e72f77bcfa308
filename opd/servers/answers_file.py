"""The answers of models on servers in one file of a run, so that a resume asks nothing twice and goes on with the same text."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from opd.files import raise_storage_errors
from opd.records.json_fields import make_record
from opd.records.texts import TextAnswer


class AnswersFile:
    """Appends answers, a line each, and finds them again. One process at a time uses it."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, if it is there; None: keep the answers in memory alone. Raises: StorageError."""
        self._path = path
        self._answers: dict[tuple[str, str], TextAnswer] = {}
        """Model's name and prompt's id -> answer."""
        self._lines: list[TextAnswer] = []
        self.calls: Counter[str] = Counter()
        """Model's name -> requests since the run began."""
        if path is not None and path.exists():
            with raise_storage_errors(path):
                lines = path.read_bytes().splitlines()
            for line in lines:
                try:
                    self._index_answer(make_record(TextAnswer, json.loads(line)))
                except (ValueError, TypeError):
                    continue  # an empty line, or one that was cut off when its writer was killed
        for answer in self._lines:
            self.calls[answer.expert] += answer.attempts

    def find_answer(self, name: str, prompt_id: str) -> TextAnswer | None:
        """Return the model's answer; None if it was not asked, or if the requests for it failed."""
        return self._answers.get((name, prompt_id))

    def append_answer(self, answer: TextAnswer) -> None:
        """Add an answer and sync it. Raises: StorageError."""
        if self._path is not None:
            with raise_storage_errors(self._path), self._path.open("ab") as file:
                # The line feed before it ends a line that a killed process left unfinished.
                file.write(b"\n" + json.dumps(asdict(answer)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        self._index_answer(answer)

    def list_answers(self, name: str) -> list[TextAnswer]:
        """Return the model's lines, those of failed requests among them, in order."""
        return [answer for answer in self._lines if answer.expert == name]

    def find_failure(self, name: str, prompt_id: str) -> str:
        """Return why the last requests for an answer failed. There must have been some."""
        failed = [line for line in self.list_answers(name) if line.prompt_id == prompt_id]
        return failed[-1].problem

    def _index_answer(self, answer: TextAnswer) -> None:
        self._lines.append(answer)
        if answer.answered:
            self._answers[answer.expert, answer.prompt_id] = answer
