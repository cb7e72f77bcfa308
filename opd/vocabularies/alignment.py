"""Cut two encodings of the same bytes into chunks: the shortest parts that begin and end at the same byte in both.

    student   |ab|c|de|f|
    teacher   |a|bc|d|ef|      chunks: (2 student, 2 teacher tokens), (2, 2)

Shapes: N student tokens, M teacher tokens, K chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Alignment:
    """The chunks of a response. Together they have all tokens of both sides."""

    student_counts: tuple[int, ...]
    """[K] student tokens of each chunk, at least 1."""
    teacher_counts: tuple[int, ...]
    """[K] teacher tokens of each chunk, at least 1."""


def align_tokens(student_lengths: Sequence[int], teacher_lengths: Sequence[int]) -> Alignment:
    """Return the chunks of two encodings. The arguments, [N] and [M], are the bytes of each token, at least 1, with equal sums."""
    student_ends, teacher_ends = np.cumsum(student_lengths), np.cumsum(teacher_lengths)
    assert all(length > 0 for length in (*student_lengths, *teacher_lengths))
    assert student_ends[-1:].sum() == teacher_ends[-1:].sum()
    common = np.intersect1d(student_ends, teacher_ends, assume_unique=True)
    counts = (np.diff(np.searchsorted(ends, common, side="right"), prepend=0) for ends in (student_ends, teacher_ends))
    return Alignment(*(tuple(map(int, values)) for values in counts))
