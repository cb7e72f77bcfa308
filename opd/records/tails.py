"""A measure of how much the end of a response repeats itself.

It is the share of repeated 6-grams, which means the same for 20 tokens as for 128. The ratio of a compressor does not: on so few
tokens zlib's header and the width of an id decide. Shorter n-grams repeat in tables too, and longer ones miss a loop in which sampling
changed a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from opd.records.types import Rollout

TAIL = 128
"""Number of last tokens that are looked at; they show a loop whose period is up to half of them."""
SHORTEST = 16
"""A response with fewer tokens may repeat itself for good reasons, so its repetition counts as 0."""
NGRAM = 6
LOOP = 0.5
"""Share of repeated n-grams above which a tail is a loop. With a token for each letter, prose, code and sums stay below 0.43; a table
of equal numbers is a loop by any measure. Of loops in which one token of twenty is changed, nine of ten are found in 64 tokens."""


def measure_repetition(token_ids: Sequence[int]) -> float:
    """Return the share, 0..1, of the n-grams of the tail that have come earlier in the tail."""
    tail = tuple(token_ids[-TAIL:])
    if len(tail) < SHORTEST:
        return 0.0
    grams = [tail[start : start + NGRAM] for start in range(len(tail) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def is_looping(rollout: Rollout) -> bool:
    """Return True if the response reached its token limit in a loop. One that ended by itself is an answer, even if it repeats itself."""
    return rollout.truncated and measure_repetition(rollout.response_ids) > LOOP
