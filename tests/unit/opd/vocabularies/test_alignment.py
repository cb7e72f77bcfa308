"""Chunks of two encodings of the same bytes."""

from __future__ import annotations

import random
from itertools import accumulate, product

from opd.vocabularies.alignment import align_tokens


def cut_all(total: int) -> list[tuple[int, ...]]:
    """All ways to cut so many bytes into tokens."""
    ways = []
    for ends in product((False, True), repeat=total - 1):
        lengths, length = [], 0
        for end in (*ends, True):
            length += 1
            if end:
                lengths.append(length)
                length = 0
        ways.append(tuple(lengths))
    return ways


def test_chunks_are_the_shortest_parts_with_equal_bytes() -> None:
    for student, teacher in product(cut_all(6), repeat=2):
        alignment = align_tokens(student, teacher)
        place = [0, 0]
        for counts in zip(alignment.student_counts, alignment.teacher_counts, strict=True):
            parts = [
                lengths[start : start + count]
                for lengths, start, count in zip((student, teacher), place, counts, strict=True)
            ]
            assert sum(parts[0]) == sum(parts[1]) > 0
            inner = [set(accumulate(part[:-1])) for part in parts]
            assert not inner[0] & inner[1]
            place = [start + count for start, count in zip(place, counts, strict=True)]
        assert place == [len(student), len(teacher)]


def test_long_responses_are_covered() -> None:
    rng = random.Random(1)
    student = [rng.randint(1, 5) for _ in range(3000)]
    alignment = align_tokens(student, [1] * sum(student))
    assert alignment.student_counts == (1,) * 3000
    assert list(alignment.teacher_counts) == student


def test_an_empty_response_has_no_chunk() -> None:
    assert align_tokens([], []).student_counts == ()
