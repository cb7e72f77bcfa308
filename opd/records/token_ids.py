"""A search for token ids that a vocabulary does not have."""

from __future__ import annotations

from collections.abc import Sequence


def find_unknown_id(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first id that is not in 0..`vocab_size` - 1; None if there is none."""
    return next((token for token in token_ids if not 0 <= token < vocab_size), None)
