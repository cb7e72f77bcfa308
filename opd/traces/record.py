"""Episodes as they are kept for people: `RUN_DIR/traces/step-NNNNNN.json` has a few episodes of a training step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.errors import RunDirError
from opd.files import atomic_write_text
from opd.records.json_fields import make_record
from opd.records.types import Origin, SegmentOrigin, StopReason
from opd.traces.selection import TraceReason

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of text with one origin and one policy version: a span of the rollout, as text."""

    origin: Origin
    policy_version: int
    length: int
    """Number of tokens, with those that are not among `texts`."""
    texts: tuple[str, ...]
    """The text: in one piece if the environment wrote it, else token by token."""
    losses: tuple[float, ...] = ()
    """The loss of each of these tokens, in nats; empty if they carry no loss, or if it is not known."""
    left_out: int = 0
    """Amount of the text that was not kept: characters if the environment wrote it, else tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTrace:
    """One token sequence of the episode. `opd.records.types.Rollout` explains the fields that have the same names."""

    sample_id: str
    domain: str
    origin: SegmentOrigin
    parent: str | None
    next: str | None
    prompt: str
    """Text with which the segment begins; a long one is cut in the middle."""
    prompt_length: int
    """Tokens of the whole prompt."""
    pieces: tuple[Piece, ...]

    @property
    def turns(self) -> Iterator[tuple[int, Piece]]:
        """Each piece with the number of its turn, from 1. A piece of the environment has the number of the turn that it answers, and 0
        before the first turn."""
        turn, began = 0, False
        for piece in self.pieces:
            if piece.origin == "environment":
                began = False
            elif not began:
                turn, began = turn + 1, True
            yield turn, piece


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTrace:
    """One episode."""

    episode: str
    domain: str
    why: tuple[TraceReason, ...]
    """The reasons for which the episode was kept; empty if all episodes of a step are shown."""
    stop_reason: StopReason
    reward: float | None
    segments: tuple[SegmentTrace, ...]
    """In the order in which they began."""
    guard: tuple[str, ...] = ()
    """Sentences of the guard on calls of the episode, in the order of the calls."""

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy in all segments."""
        return sum(max((turn for turn, _ in segment.turns), default=0) for segment in self.segments)

    def segment_kind(self, segment: SegmentTrace) -> str:
        """Return in words what one of its segments is."""
        # A segment that goes on from another (`Rollout.next`) begins with the same dialogue, without the thoughts.
        if segment.origin == "main" and segment.sample_id in {sibling.next for sibling in self.segments}:
            return "continuation without thoughts"
        forked = segment.parent is not None and segment.origin == "main"
        return "fork" if forked else segment.origin.replace("_", "-")

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(p.length for s in self.segments for p in s.pieces if p.origin in ("policy", "masked", "blocked"))

    @property
    def trained(self) -> int:
        """Number of tokens that the policy sampled and that carry loss. Tokens of an expert (`taught`) are not among them, although
        they carry loss too."""
        return sum(p.length for s in self.segments for p in s.pieces if p.origin in ("policy", "blocked"))

    @property
    def tree(self) -> Iterator[tuple[int, SegmentTrace]]:
        """Every segment once, after its parent, with its depth: 0 if it has no parent in this episode."""
        ids = {segment.sample_id for segment in self.segments}
        children: dict[str | None, list[SegmentTrace]] = {}
        for segment in self.segments:
            children.setdefault(segment.parent if segment.parent in ids else None, []).append(segment)
        waiting = [(0, segment) for segment in reversed(children.get(None, []))]
        while waiting:
            depth, segment = waiting.pop()
            yield depth, segment
            waiting += [(depth + 1, child) for child in reversed(children.get(segment.sample_id, []))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraces:
    """Episodes of one training step."""

    step: int
    episodes: tuple[EpisodeTrace, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises: OSError."""
        atomic_write_text(path, json.dumps({"format": FORMAT, **asdict(self)}))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepTraces:
        """Make the traces from the parsed JSON that `save` writes. Raises: TypeError for anything else."""
        return make_record(cls, data)


def read_traces(path: Path) -> StepTraces:
    """Read the episodes of a file. Raises: RunDirError if it is damaged or another release wrote it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return StepTraces.from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirError.at(
            path,
            found=f"{type(error).__name__}: {error}",
            wanted=f"episodes of format {FORMAT}, as this release of opd writes them",
            fix="move the file away: the others are then shown without it",
        ) from None
