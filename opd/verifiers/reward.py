"""Scores of a domain with an environment, where an episode's reward takes the place of a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opd.records.episodes import BROKEN, EpisodeResult


class Reward:
    """Implements `opd.interfaces.Verifier` for answers that are no episode because their prompt did not fit: all of them are wrong."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return 0.0

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def score_of(episode: EpisodeResult) -> float:
    """Return the episode's reward, cut to 0..1; 0 if the environment gave none or the episode broke."""
    return 0.0 if episode.stop_reason in BROKEN else min(1.0, max(0.0, episode.reward or 0.0))
