"""A response of the student in a teacher's tokens.

    the student's ids ─ bytes of each ─→ text between special tokens ─ the teacher's tokenizer ─→ ids ─ bytes of each ─→ alignment

What is text stays text: a response that spells out a special token of the teacher's does not become that token. Bytes that are no
UTF-8, of a character that was cut, become the teacher's tokens for single bytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from opd.records.types import EncodedRollout, Rollout
from opd.vocabularies.alignment import Alignment, align_tokens
from opd.vocabularies.byte_table import read_byte_table
from opd.vocabularies.shared_tokens import SharedTokens, find_shared_tokens


class UnreadableResponseError(ValueError):
    """A response that the teacher cannot read in its own tokens. The message says why."""


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
        self._student, self._teacher = read_byte_table(student), read_byte_table(teacher)
        names = {name: i for i, name in self._teacher.special.items()}
        same = {i: names[name] for i, name in self._student.special.items() if name in names}
        turn_end = next(iter(ends), None)
        self._special = {i: end if i == turn_end else same.get(i, end) for i, end in ends.items()}
        self._special |= {i: own for i, own in same.items() if i not in ends}
        self._byte_tokens = self._teacher.find_byte_tokens()
        self._backend = build_text_encoder(teacher)
        self._context = context
        self.shared: SharedTokens = find_shared_tokens(self._student, self._teacher, self._special)

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
                encoded = self._encode_bytes(self._student.join(own))
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

    def _encode_bytes(self, raw: bytes) -> list[int]:
        """Return the teacher's ids of some bytes. Raises: UnreadableResponseError."""
        ids: list[int] = []
        for part, text in _split_utf8(raw):
            ids += self._spell_bytes(part) if text is None else self._encode_text(text)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Return the teacher's ids of a text. Characters that its tokenizer changes, such as sentencepiece's mark for the blank, are
        spelt in bytes. Raises: UnreadableResponseError."""
        if (ids := self._find_ids(text)) is not None:
            return ids
        ids = []
        for survives, part in groupby(text, lambda character: self._find_ids(character) is not None):
            own = "".join(part)
            own_ids = self._find_ids(own) if survives else self._spell_bytes(own.encode())
            if own_ids is None:
                raise UnreadableResponseError("text that the teacher's tokenizer does not give back as it was")
            ids += own_ids
        return ids

    def _find_ids(self, text: str) -> list[int] | None:
        """Return the teacher's ids of a text; None if these have other bytes."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids if self._teacher.join(ids) == text.encode() else None

    def _spell_bytes(self, raw: bytes) -> list[int]:
        """Return the teacher's tokens for single bytes. Raises: UnreadableResponseError."""
        if not self._byte_tokens.keys() >= set(raw):
            raise UnreadableResponseError(f"{raw!r:.40}, which the teacher has no tokens for")
        return [self._byte_tokens[byte] for byte in raw]


def _split_utf8(raw: bytes) -> Iterator[tuple[bytes, str | None]]:
    """Yield the parts of some bytes: those that are UTF-8 with their text, others with None."""
    while raw:
        try:
            yield raw, raw.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield raw[: error.start], raw[: error.start].decode()
            yield raw[error.start : error.end], None
            raw = raw[error.end :]


def build_text_encoder(tokenizer: Any) -> Any:
    """Return the tokenizer's backend as it encodes text that goes on within a turn: it puts no blank in front of the text, adds
    nothing, and takes special tokens that are spelt out for plain text."""
    from tokenizers import Tokenizer

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings = {**settings, "post_processor": None, "truncation": None, "padding": None}
    settings["normalizer"] = _without_blank(settings["normalizer"])
    settings["pre_tokenizer"] = _without_blank(settings["pre_tokenizer"])
    backend = Tokenizer.from_str(json.dumps(settings))
    backend.encode_special_tokens = True
    return backend


def _without_blank(part: Any) -> Any:
    """Return a normaliser or pre-tokenizer that puts no blank in front of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = copy.deepcopy(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [own for own in map(_without_blank, part[key]) if own is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part
