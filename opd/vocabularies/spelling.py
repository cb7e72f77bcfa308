"""A teacher's tokens spelt in the student's, so that a teacher that writes its own tokens writes the student's, too.

A token that both have is spelt by its counterpart, any other as the student's own tokenizer spells its bytes. Where the student writes
letters and the teacher pairs, what the teacher thinks of the letter `a` is what it thinks of all tokens whose spelling begins with `a`.

Shapes: V the student's ids, U the teacher's, L, E entries of lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from opd.vocabularies.byte_table import ByteTable
from opd.vocabularies.bytes_encoder import UnreadableResponseError
from opd.vocabularies.shared_tokens import SharedTokens

Integers = np.ndarray[tuple[int], np.dtype[np.int32]]
Tokens = tuple[int, ...]
"""Ids of the student's."""


class Spelling:
    """The spelling of each of a teacher's tokens."""

    def __init__(self, tokens: Sequence[Tokens], student_size: int) -> None:
        """`tokens`: [U] how each token is spelt; empty for one that the student cannot write. `student_size`: V."""
        self.tokens = tuple(tokens)
        self.student_size = student_size
        order = sorted((own, i) for i, own in enumerate(self.tokens) if own)
        self._spelt = [own for own, _ in order]
        self._ids = np.array([i for _, i in order], np.int64)

    def find_tokens(self, start: Tokens) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the teacher's ids of the tokens whose spelling begins with `start`, which is not empty."""
        end = (*start[:-1], start[-1] + 1)
        return self._ids[bisect_left(self._spelt, start) : bisect_left(self._spelt, end)]

    def has_extensions(self, token: int) -> bool:
        """Return True if the spelling of another of the teacher's tokens begins with that of this one, and is longer."""
        own = self.tokens[token]
        place = bisect_right(self._spelt, own)
        return bool(own) and place < len(self._spelt) and self._spelt[place][: len(own)] == own


@dataclass(frozen=True, slots=True)
class SpellingTables:
    """Parts of a spelling that a trainer needs, as lists of ids.

    An extension of a token is another token whose spelling begins with that of the first one.
    """

    single_ids: Integers
    """[V] the teacher's token that is spelt by this one of the student's; -1 if there is none."""
    other_ids: Integers
    """[L] the teacher's other tokens that have a spelling."""
    other_firsts: Integers
    """[L] the first token of their spelling."""
    extension_starts: Integers
    """[U + 1] where the extensions of each of the teacher's tokens begin in the next two lists, and where the last ones end."""
    extension_ids: Integers
    """[E] the teacher's ids."""
    extension_nexts: Integers
    """[E] the student's token with which the spelling goes on."""

    def pack(self) -> Integers:
        """Return all lists as one, with their lengths in front."""
        lists = [getattr(self, own.name) for own in fields(self)]
        return np.concatenate([np.array([len(own) for own in lists], np.int32), *lists])


def spell_tokens(teacher: ByteTable, shared: SharedTokens, encode: Callable[[bytes], list[int]]) -> Spelling:
    """Spell a teacher's tokens. `encode`: the ids in which the student writes some bytes.

    Special tokens without a counterpart have no spelling, and neither have tokens for single bytes beside a token of text.
    """
    tokens: list[Tokens] = [()] * len(teacher.token_bytes)
    for own, counterpart in enumerate(shared.teacher_ids.tolist()):
        if counterpart >= 0:
            tokens[counterpart] = (own,)
    texts = {written for i, written in enumerate(teacher.token_bytes) if i not in teacher.fallback}
    for i, written in enumerate(teacher.token_bytes):
        if not tokens[i] and written and not (i in teacher.fallback and written in texts):
            try:
                tokens[i] = tuple(encode(written))
            except UnreadableResponseError:
                continue
    return Spelling(tokens, len(shared.teacher_ids))


@cache
def build_tables(spelling: Spelling) -> SpellingTables:
    """Return the lists of a spelling; they are built once."""
    single_ids = np.full(spelling.student_size, -1, np.int32)
    others: list[tuple[int, int]] = []
    by_spelling: dict[Tokens, list[int]] = defaultdict(list)
    for i, own in enumerate(spelling.tokens):
        by_spelling[own].append(i)
        if len(own) == 1 and single_ids[own[0]] < 0:
            single_ids[own[0]] = i
        elif own:
            others.append((i, own[0]))
    extensions: list[tuple[int, int, int]] = sorted(
        (begun, i, own[length])
        for i, own in enumerate(spelling.tokens)
        for length in range(1, len(own))
        for begun in by_spelling.get(own[:length], ())
    )
    counts = np.bincount([begun for begun, _, _ in extensions], minlength=len(spelling.tokens))
    columns = np.array(extensions, np.int32).reshape(-1, 3)
    pairs = np.array(others, np.int32).reshape(-1, 2)
    return SpellingTables(
        single_ids=single_ids,
        other_ids=pairs[:, 0],
        other_firsts=pairs[:, 1],
        extension_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        extension_ids=columns[:, 1],
        extension_nexts=columns[:, 2],
    )
