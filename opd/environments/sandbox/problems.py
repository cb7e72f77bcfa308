"""Small functions and ways to break them: what the sandbox's tasks are made of.

A function's source, docstring included, is what a policy sees, with one line broken. The function itself is the judge: it says
what the hidden calls have to give.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def clamp(value, low, high):  # type: ignore[no-untyped-def]
    """The value, or the nearer bound if it lies outside of low and high."""
    return max(low, min(value, high))


def running_sum(numbers):  # type: ignore[no-untyped-def]
    """The sums of the first 1, 2, 3, ... numbers."""
    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums


def second_largest(numbers):  # type: ignore[no-untyped-def]
    """The second largest of the different numbers, or None if there is none."""
    different = sorted(set(numbers))
    return different[-2] if len(different) > 1 else None


def count_words(text):  # type: ignore[no-untyped-def]
    """How often each word comes, in lower case."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def is_palindrome(text):  # type: ignore[no-untyped-def]
    """Whether the letters read the same backwards; case and other signs do not count."""
    letters = [sign.lower() for sign in text if sign.isalpha()]
    return letters == letters[::-1]


def chunks(items, size):  # type: ignore[no-untyped-def]
    """The items in lists of the given size; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def greatest_divisor(a, b):  # type: ignore[no-untyped-def]
    """The greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def find_sorted(numbers, wanted):  # type: ignore[no-untyped-def]
    """The place of a number in a sorted list, or -1 if it is not there."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(numbers) and numbers[low] == wanted else -1


def run_lengths(text):  # type: ignore[no-untyped-def]
    """Each run of equal letters as [letter, length]."""
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def transpose(rows):  # type: ignore[no-untyped-def]
    """The columns of a table as its rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def _number_problems(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(0, 8))]


def _search_problems(rng: random.Random) -> list[Any]:
    numbers = sorted(set(_number_problems(rng)))
    return [numbers, rng.choice(numbers) if numbers and rng.random() < 0.7 else rng.randint(-20, 20)]


def _half_palindrome(rng: random.Random) -> list[Any]:
    half = "".join(rng.choices("abC, ", k=rng.randint(1, 4)))
    return [half + half[::-1].swapcase() if rng.random() < 0.6 else half + rng.choice("xyz")]


@dataclass(frozen=True, slots=True)
class Problem:
    """A function, single edits that break it, and arguments to call it with."""

    function: Callable[..., Any]
    bugs: tuple[tuple[str, str], ...]
    """Text of the source -> what stands there instead."""
    draw: Callable[[random.Random], list[Any]]
    """Draws the arguments of one call."""


PROBLEMS = (
    Problem(
        clamp,
        (("min(value, high)", "max(value, high)"), ("max(low,", "max(high,")),
        lambda rng: [rng.randint(-30, 30), rng.randint(-10, 0), rng.randint(1, 10)],
    ),
    Problem(
        running_sum,
        (("total += number", "total = number"), ("total, sums = 0", "total, sums = 1")),
        lambda r: [_number_problems(r)],
    ),
    Problem(
        second_largest,
        (("different[-2]", "different[1]"), ("sorted(set(numbers))", "sorted(numbers)"), ("> 1", "> 2")),
        lambda rng: [_number_problems(rng)],
    ),
    Problem(
        count_words,
        (("counts.get(word, 0) + 1", "counts.get(word, 1) + 1"), ("text.lower().split()", "text.split()")),
        lambda rng: [" ".join(rng.choices(["a", "A", "tea", "Tea", "cup"], k=rng.randint(1, 7)))],
    ),
    Problem(
        is_palindrome,
        (("sign.lower() for", "sign for"), ("if sign.isalpha()", "if sign"), ("letters[::-1]", "letters[:-1]")),
        _half_palindrome,
    ),
    Problem(
        chunks,
        (("start : start + size", "start : size"), ("len(items), size", "len(items) - 1, size")),
        lambda rng: [_number_problems(rng), rng.randint(1, 4)],
    ),
    Problem(
        greatest_divisor,
        (("b, a % b", "b, b % a"), ("return a", "return b")),
        lambda rng: [rng.randint(1, 12) * 6, rng.randint(1, 12) * 4],
    ),
    Problem(
        find_sorted, (("middle + 1", "middle + 2"), ("< wanted", "> wanted"), ("else -1", "else low")), _search_problems
    ),
    Problem(
        run_lengths,
        (("[letter, 1]", "[letter, 0]"), ("runs[-1][0] == letter", "runs[0][0] == letter")),
        lambda rng: ["".join(rng.choices("aab", k=rng.randint(1, 9)))],
    ),
    Problem(
        transpose,
        (("list(column)", "list(column)[::-1]"), ("zip(*rows, strict=True)", "zip(rows, strict=True)")),
        lambda rng: [[[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(1, 3))]],
    ),
)
