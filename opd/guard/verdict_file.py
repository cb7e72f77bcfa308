"""The judge's opinions of a run, kept in one file, so that every worker, also after a resume, goes by what the judge said first.

    question ──▶ in the file? ──no──▶ judge ──▶ appended ──▶ the first opinion in the file counts

All workers append to the same file, a line at a time, and read what others appended before they ask the judge. If two of them ask the
same question at the same time, both then go by the line that came first.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from threading import Lock

from opd.files import raise_storage_errors
from opd.guard.records import Judge, Opinion, Question


class StoredJudge:
    """Asks another judge once for each different question of a run, and stores its opinions. Failures are not stored."""

    def __init__(self, judge: Judge, path: Path, identity: str) -> None:
        """`path` is the file. `identity` names the judge; an opinion of a judge with another name does not count."""
        self._judge = judge
        self._path = path
        self._identity = identity
        self._opinions: dict[str, Opinion] = {}
        self._bytes_read = 0
        """The length of the beginning of the file whose lines are in `_opinions`."""
        self._lock = Lock()
        self._question_locks: dict[str, Lock] = {}
        """Key of a question -> the lock of the thread that asks it."""

    def judge(self, question: Question) -> Opinion:
        """Return the stored opinion; if there is none, ask the judge and store its opinion. Raises: JudgeFailed; StorageError if the file
        cannot be written."""
        key = sha256(json.dumps([self._identity, *astuple(question)]).encode()).hexdigest()
        with self._lock:
            question_lock = self._question_locks.setdefault(key, Lock())
        with question_lock:  # other threads with the same question wait for this opinion
            opinion = self._find_opinion(key)
            if opinion is None:
                self._store_opinion(key, question, self._judge.judge(question))
                opinion = self._find_opinion(key)
        assert opinion is not None, f"{self._path}: what was written is not there"
        return opinion

    def _find_opinion(self, key: str) -> Opinion | None:
        """Return the opinion with this key, after a look at new lines of the file; None if there is none."""
        with self._lock:
            if key not in self._opinions and self._path.exists():
                self._read_new_lines()
            return self._opinions.get(key)

    def _read_new_lines(self) -> None:
        """Add the opinions that were appended to the file since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._bytes_read)
            # A line without its end is still being written, so it is left for the next time.
            complete_lines, end, _ = file.read().rpartition(b"\n")
        self._bytes_read += len(complete_lines) + len(end)
        for line in complete_lines.splitlines():
            try:
                data = json.loads(line)
                # The first opinion in the file counts, also for the worker that appended a later one.
                self._opinions.setdefault(data["key"], Opinion(block=data["block"], reason=data["reason"]))
            except (ValueError, KeyError, TypeError):
                continue  # an empty line, or one that was cut off when its writer was killed

    def _store_opinion(self, key: str, question: Question, opinion: Opinion) -> None:
        """Append an opinion in one write, so that the lines of several workers do not mix. It begins with a line feed, which
        ends a line that a killed worker left unfinished."""
        record = {"key": key, "block": opinion.block, "reason": opinion.reason, "command": question.command[:500]}
        with raise_storage_errors(self._path):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, b"\n" + json.dumps(record).encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
