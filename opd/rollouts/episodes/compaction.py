"""Compaction: near its limit the policy writes a summary, and the episode goes on from that and its last turns.

    segment 0   prompt  turn obs  turn obs  turn obs + request  SUMMARY          the summary is trained here, where it was sampled
    segment 1   prompt + summary  turn obs  turn obs            turn obs ...     copied turns carry no loss

Kept turns are copied as tokens, so what the policy wrote is not encoded again. All segments of a step share one denominator:
the loss is a mean over all trained tokens, however an episode was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from opd.rollouts.episodes.turns import History


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """Options that decide when and how an episode is compacted; `opd.config.context.ContextConfig` explains the fields."""

    compact_at: int
    keep_last: int
    prompt: str
    resume: str
    max_tokens: int
    max_compactions: int


@dataclass(slots=True)
class Compactor:
    """Decides when a segment is to be summarised, and counts the summaries."""

    options: CompactionOptions | None
    """None: nothing is ever summarised."""
    num_summaries: int = 0
    """Number of summaries so far."""

    def options_if_due(self, tokens: int) -> CompactionOptions | None:
        """Return the options if a segment of so many tokens is to be summarised now; else None."""
        options = self.options
        if options is None or tokens <= options.compact_at or self.num_summaries >= options.max_compactions:
            return None
        return options

    def cut_history(self, history: History, keep_last: int, head: list[int]) -> History:
        """Count a summary, and return the history after it: `head`, which has the summary, and the last `keep_last` turns."""
        self.num_summaries += 1
        return History(head, history.turns[-keep_last:] if keep_last else [])
