"""How much the end of a response repeats itself.

The measure is the share of repeated 6-grams, not the ratio of a compressor: it means the same for 20 tokens as for 128, where
zlib's header and the width of an id would decide. Shorter n-grams also repeat in tables, longer ones miss a loop that
sampling breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

from opd.records.types import Rollout

TAIL = 128
"""Last tokens of a response that are looked at: a loop of up to half as many tokens shows."""
SHORTEST = 16
"""A tail of fewer tokens may repeat itself for good reasons, so it counts as none."""
NGRAM = 6
LOOP = 0.5
"""Share of repeated n-grams above which a tail is a loop. Letter by letter prose, code and sums stay below 0.43; a table of
equal numbers is a loop by any measure. Of loops with a broken token in twenty, nine of ten are seen in 64 tokens."""


def measure_repetition(token_ids: Sequence[int]) -> float:
    """Return the share of the n-grams in the tail that stand in it earlier, 0 to 1."""
    tail = tuple(token_ids[-TAIL:])
    if len(tail) < SHORTEST:
        return 0.0
    grams = [tail[start : start + NGRAM] for start in range(len(tail) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def is_looping(rollout: Rollout) -> bool:
    """Return True if the response ran to its limit in a loop. One that ends by itself is an answer, however often it says `ha`."""
    return rollout.truncated and measure_repetition(rollout.response_ids) > LOOP
