"""Compaction: near its limit the policy writes a summary, and the episode goes on from that and its last turns.

    segment 0   prompt  turn obs  turn obs  turn obs + request  SUMMARY          the summary is trained here, where it was sampled
    segment 1   prompt + summary  turn obs  turn obs            turn obs ...     what was copied carries no loss

Kept turns are copied as tokens, so what the policy wrote is not encoded again. All segments of a step share one denominator:
the loss is a mean over all trained tokens, however an episode was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """When and how an episode is compacted; `opd.config.context.ContextConfig` explains the fields."""

    compact_at: int
    keep_last: int
    prompt: str
    resume: str
    max_tokens: int
    max_compactions: int


@dataclass(slots=True)
class Compactor:
    """Knows the turns of the segment that grows, and decides when it is cut."""

    options: CompactionOptions | None
    """None: never."""
    done: int = 0
    """Summaries so far."""
    _turns: list[list[int]] = field(default_factory=list)

    def add(self, turn: Sequence[int], following: Sequence[int]) -> None:
        """Take note of a turn of the policy, and of the tokens that follow it."""
        self._turns.append([*turn, *following])

    def due(self, tokens: int) -> CompactionOptions | None:
        """The options if a segment of so many tokens is to be summarised; else None."""
        options = self.options
        if options is None or tokens <= options.compact_at or self.done >= options.max_compactions:
            return None
        return options

    def cut(self, keep_last: int) -> list[int]:
        """Forget all turns but the last ones; returns the tokens of these."""
        self.done += 1
        self._turns = self._turns[-keep_last:] if keep_last else []
        return [token for turn in self._turns for token in turn]
