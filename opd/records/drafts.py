"""Numbers of a draft that people look at, from the counts of an engine that guesses with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpeeds:
    """Tokens a second of the engines on the same requests."""

    with_draft: float
    without_draft: float


def add_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sum of histograms of one length; empty ones are left out."""
    return tuple(map(sum, zip(*filter(None, histograms), strict=True)))


def compute_accepted_length(histogram: Sequence[int]) -> float:
    """Return the mean number of tokens of a pass. `histogram`: number of passes in which 0, 1, ... guesses were kept; a pass writes one
    token more than these."""
    passes = sum(histogram)
    return 1 + sum(kept * count for kept, count in enumerate(histogram)) / passes if passes else 1.0


def summarise_engine(histograms: Mapping[str, Sequence[int]], speeds: DraftSpeeds | None = None) -> dict[str, float]:
    """Return the tokens of a pass over all domains and by domain, of each guess the share of passes in which it was kept, and the speeds
    if they were measured; empty if nothing was guessed. `histograms`: by domain."""
    whole = add_histograms(list(histograms.values()))
    passes = sum(whole)
    if not passes:
        return {}
    numbers = {"engine_accepted_length": compute_accepted_length(whole)}
    numbers |= {f"engine_kept_{guess}": sum(whole[guess:]) / passes for guess in range(1, len(whole))}
    if speeds is not None:
        numbers |= {"engine_tokens_s": speeds.with_draft, "engine_plain_tokens_s": speeds.without_draft}
    return numbers | {
        f"engine_accepted_length/{domain}": compute_accepted_length(histogram)
        for domain, histogram in histograms.items()
        if sum(histogram)
    }
