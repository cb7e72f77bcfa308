"""Tokens that two vocabularies share: those that write the same bytes, special tokens of the same name, and the end of a turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from opd.vocabularies.byte_table import ByteTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    """Map from the student's ids to a teacher's. No two ids have the same counterpart."""

    teacher_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    """[V] the teacher's id of each of the student's tokens; -1 if the teacher has no such token."""


def find_shared_tokens(student: ByteTable, teacher: ByteTable, special: Mapping[int, int]) -> SharedTokens:
    """Return the tokens that both have. `special`: the student's id -> the teacher's, of special tokens; it may name an id twice."""
    teacher_ids = np.full(len(student.token_bytes), -1, np.int32)
    by_bytes = _index_bytes(teacher)
    for written, i in _index_bytes(student).items():
        teacher_ids[i] = by_bytes.get(written, -1)
    taken: set[int] = set()
    for i, counterpart in special.items():
        if counterpart not in taken:
            taken.add(counterpart)
            teacher_ids[i] = counterpart
    return SharedTokens(teacher_ids=teacher_ids)


def _index_bytes(table: ByteTable) -> dict[bytes, int]:
    """Return bytes -> the token that an encoder takes for them, if several have them: one of text before one for a single byte."""
    ids: dict[bytes, int] = {}
    for i, written in enumerate(table.token_bytes):
        if written and (written not in ids or (ids[written] in table.fallback and i not in table.fallback)):
            ids[written] = i
    return ids
