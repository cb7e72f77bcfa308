"""A response of the student in a teacher's tokens.

    the student's ids ─ bytes of each ─→ text between special tokens ─ the teacher's tokenizer ─→ ids ─ bytes of each ─→ alignment

What is text stays text: a response that spells out a special token of the teacher's does not become that token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from opd.records.types import EncodedRollout, Rollout
from opd.vocabularies.alignment import Alignment, align_tokens
from opd.vocabularies.bytes_encoder import BytesEncoder, UnreadableResponseError
from opd.vocabularies.shared_tokens import SharedTokens, find_shared_tokens
from opd.vocabularies.spelling import Spelling, spell_tokens


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A response in a teacher's tokens."""

    token_ids: tuple[int, ...]
    """[M]"""
    alignment: Alignment


class ResponseEncoder:
    """Encodes a student's responses with a teacher's tokenizer."""

    def __init__(self, student: Any, teacher: Any, ends: Mapping[int, int], context: int | None = None) -> None:
        """`student`, `teacher`: their tokenizers. `ends`: id of each end token of the student -> the teacher's end of a turn; the
        first is the student's end of a turn, the others have a token of the same name if there is one. `context`: the most tokens
        that the teacher reads.

        Raises: ValueError if the bytes of a tokenizer's tokens cannot be told.
        """
        own, self._encoder = BytesEncoder(student), BytesEncoder(teacher)
        self._student, self._teacher = own.table, self._encoder.table
        names = {name: i for i, name in self._teacher.special.items()}
        same = {i: names[name] for i, name in self._student.special.items() if name in names}
        turn_end = next(iter(ends), None)
        self._special = {i: end if i == turn_end else same.get(i, end) for i, end in ends.items()}
        self._special |= {i: own for i, own in same.items() if i not in ends}
        self._context = context
        self.shared: SharedTokens = find_shared_tokens(self._student, self._teacher, self._special)
        self.spelling: Spelling = spell_tokens(self._teacher, self.shared, own.encode_bytes)

    def encode_response(self, token_ids: Sequence[int]) -> EncodedResponse:
        """Return a response, [N] ids of the student's, in the teacher's tokens. Raises: UnreadableResponseError."""
        ids: list[int] = []
        # A special token counts as one byte on both sides, so that it is a chunk of its own.
        student_lengths: list[int] = []
        teacher_lengths: list[int] = []
        for special, part in groupby(token_ids, lambda i: i if i in self._student.special else None):
            own = list(part)
            if special is None:
                student_lengths += [len(self._student.token_bytes[i]) for i in own]
                encoded = self._encoder.encode_bytes(self._student.join(own))
                teacher_lengths += [len(self._teacher.token_bytes[i]) for i in encoded]
                ids += encoded
            elif special in self._special:
                ids += [self._special[special]] * len(own)
                student_lengths += [1] * len(own)
                teacher_lengths += [1] * len(own)
            else:
                name = self._student.special[special]
                raise UnreadableResponseError(f"the special token {name!r}, which the teacher lacks")
        if 0 in student_lengths:
            raise UnreadableResponseError("an id of the student's without a token")
        return EncodedResponse(tuple(ids), align_tokens(student_lengths, teacher_lengths))

    def encode_rollout(self, rollout: Rollout, prompt_ids: tuple[int, ...]) -> EncodedRollout:
        """Return a rollout as the teacher reads it, behind its own prompt [P]. Raises: UnreadableResponseError."""
        if rollout.num_trained < len(rollout.response_ids):
            raise UnreadableResponseError("tokens without loss, which a piece of text cannot leave out")
        encoded = self.encode_response(rollout.response_ids)
        length = len(prompt_ids) + len(encoded.token_ids)
        if self._context is not None and length > self._context:
            raise UnreadableResponseError(f"{length} of the teacher's tokens, more than its context of {self._context}")
        return rollout.as_encoded(prompt_ids, encoded.token_ids, encoded.alignment)
