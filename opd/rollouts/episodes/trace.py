"""The record of one episode while it runs: segments of tokens, exactly as the engine saw them.

    segment   P P P P  s s s s  o o o  s s s  o o  s s        P prompt, s sampled by the policy, o observation
    loss                1 1 1 1  0 0 0  1 1 1  0 0  1 1

What the policy sampled is never decoded and encoded again: observations are appended as tokens after it.

The white box (`continue_segment`) knows which segment a history belongs to. It begins another one only where the chat template
left out earlier thoughts, and that is no fork. The black box (`continue_or_fork`) may bring any history: one that continues no
segment begins a new one, and that fork is counted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from opd.errors import RunError
from opd.records.episodes import Audit
from opd.records.types import Origin, Rollout, SampledTurn, SegmentOrigin, Span, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Ids and domain that all rollouts of an episode share."""

    sample_id: str
    """Names the episode, and its first segment."""
    group: str
    step: int
    domain: str


@dataclass(slots=True, kw_only=True)
class TraceSegment:
    """One token sequence of an episode, which grows while the episode runs."""

    number: int
    """Place in the trace."""
    ids: list[int]
    """Everything that the engine saw and wrote, the prompt first."""
    prompt_len: int
    """Tokens of `ids` that came before the first turn."""
    policy_version: int
    """Policy version of the newest span; before the first span, the version as the episode began."""
    masked_ids: frozenset[int] = frozenset()
    """Token ids that carry no loss where the policy writes them."""
    origin: SegmentOrigin = "main"
    """Origin of the segment, see `SegmentOrigin`; `aside` is another dialogue of a program, beside the main one."""
    parent: int | None = None
    """Number of the segment that this one was forked from, whose summary it begins with, or that started it; None for the
    first."""
    next: int | None = None
    """Number of the segment that goes on from the end of this one: with its summary, or without its thoughts."""
    domain: str = ""
    """Domain whose experts score the segment; empty: the episode's."""
    logprobs: list[float] = field(default_factory=list)
    """[R] log-prob of each token after the prompt; 0 where the policy did not sample it."""
    spans: list[Span] = field(default_factory=list)
    turns: int = 0
    """Turns that were taken in this segment."""
    teacher_turns: int = 0
    """Turns among these that the domain's expert took."""
    packed: array[int] = field(init=False)
    """`ids` once more, as one buffer of 8 bytes a token: histories of many thousands of tokens are compared in one go."""

    def __post_init__(self) -> None:
        self.packed = array("q", self.ids)

    def append_observation(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample. An empty observation adds an empty span, which still ends the turn before."""
        self._extend_ids(ids)
        self.logprobs += [0.0] * len(ids)
        if ids or self.spans:
            self.spans.append(Span(length=len(ids), origin="environment", policy_version=self.policy_version))

    def append_policy_turn(self, turn: SampledTurn) -> None:
        """Add a turn of the policy. Raises: RunError if a log-prob is missing or is not a finite number."""
        if len(turn.logprobs) != len(turn.token_ids):
            raise RunError(f"a turn of {len(turn.token_ids)} tokens came with {len(turn.logprobs)} log-probs")
        if not all(map(math.isfinite, turn.logprobs)):
            odd = next(value for value in turn.logprobs if not math.isfinite(value))
            raise RunError(f"a sampled token came with log-prob {odd}")
        self.logprobs += turn.logprobs
        self._append_turn(turn)
        # Nearly always so; the loop below takes much longer over a long turn.
        if self.masked_ids.isdisjoint(turn.token_ids):
            return self._append_span(len(turn.token_ids), "policy")
        for is_masked, run in groupby(turn.token_ids, self.masked_ids.__contains__):
            self._append_span(len(list(run)), "masked" if is_masked else "policy")

    def append_teacher_turn(self, turn: SampledTurn, *, train: bool) -> None:
        """Add a turn that the domain's expert wrote in the policy's place; if `train` is true, the policy is trained on it."""
        self.logprobs += [0.0] * len(turn.token_ids)
        self.teacher_turns += 1
        self._append_turn(turn)
        self._append_span(len(turn.token_ids), "taught" if train else "teacher")

    def _extend_ids(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.packed.extend(ids)

    def _append_turn(self, turn: SampledTurn) -> None:
        self._extend_ids(turn.token_ids)
        self.policy_version = turn.policy_version
        self.turns += 1

    def mark_last_turn(self, turn: SampledTurn, origin: Origin) -> None:
        """Give another origin to the tokens that the policy wrote in `turn`, the turn that was added last. `masked` takes the loss
        off an expert's turn, too. Call it before anything is appended after the turn."""
        # Walk back over the spans of that turn: it has several where some of its tokens are masked.
        remaining, index = len(turn.token_ids), len(self.spans)
        while remaining > 0:
            index -= 1
            remaining -= self.spans[index].length
        # `masked` makes an expert's turn one without loss (`teacher`); under the other marks it stays as it is.
        new_origins: dict[Origin, Origin] = {"policy": origin, "taught": "teacher" if origin == "masked" else "taught"}
        self.spans[index:] = [replace(s, origin=new_origins.get(s.origin, s.origin)) for s in self.spans[index:]]

    def _append_span(self, length: int, origin: Origin) -> None:
        if length:
            self.spans.append(Span(length=length, origin=origin, policy_version=self.policy_version))

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(span.length for span in self.spans if span.sampled)

    @property
    def num_trained(self) -> int:
        """Number of sampled tokens that carry loss."""
        return sum(span.length for span in self.spans if span.sampled and span.trained)


class Trace:
    """The segments of one episode."""

    def __init__(self, policy_version: int = 0, masked: frozenset[int] = frozenset(), domain: str = "") -> None:
        """`policy_version` is the engine's as the episode begins; token ids in `masked` carry no loss; `domain` is the one whose
        experts score the segments, empty: the episode's."""
        self.segments: list[TraceSegment] = []
        self._version = policy_version
        self._masked_ids = masked
        self._domain = domain
        self._forks = 0

    def begin_segment(
        self, prompt_ids: Sequence[int], origin: SegmentOrigin = "main", parent: TraceSegment | None = None
    ) -> TraceSegment:
        """Begin a segment with these tokens, none of which carries loss in it. A segment of origin `summary` becomes the `next` of its
        parent."""
        segment = TraceSegment(
            number=len(self.segments),
            ids=list(prompt_ids),
            prompt_len=len(prompt_ids),
            policy_version=self._version,
            masked_ids=self._masked_ids,
            origin=origin,
            parent=None if parent is None else parent.number,
            domain=self._domain,
        )
        self.segments.append(segment)
        if parent is not None and origin == "summary":
            parent.next = segment.number
        return segment

    def continue_segment(self, segment: TraceSegment, ids: Sequence[int]) -> TraceSegment:
        """White box: return the segment that has exactly these tokens. It is `segment` if they continue it. Otherwise the chat
        template left out what stood in earlier turns, and a new segment, which begins with these tokens, takes its place."""
        new_ids = list(ids)
        if new_ids[: len(segment.ids)] == segment.ids:
            segment.append_observation(new_ids[len(segment.ids) :])
            return segment
        successor = self.begin_segment(new_ids, "main", segment)
        segment.next = successor.number
        return successor

    def adopt_segments(self, sub_agent_trace: Trace, caller: TraceSegment) -> None:
        """Take over the segments of a sub-agent that a turn of `caller` started. There are no forks to add: sub-agents belong to the
        white box, and only the black box forks."""
        # A segment's number is its place in the list, and the sub-agent's segments come after those that are there.
        offset = len(self.segments)
        for segment in sub_agent_trace.segments:
            segment.number += offset
            segment.parent = caller.number if segment.parent is None else segment.parent + offset
            segment.next = None if segment.next is None else segment.next + offset
        self.segments += sub_agent_trace.segments

    def continue_or_fork(self, ids: Sequence[int], *, is_new_dialogue: bool = False) -> TraceSegment:
        """Black box: return the segment that holds this whole history, so that the turn sampled after it can be appended.

        That is the longest segment whose tokens the history begins with; the rest of the history is appended to it. If there is
        none, a new segment begins, and unless it is the first, it counts as a fork. `is_new_dialogue` says that the history holds
        nothing that the policy wrote: then the new segment is `aside`, not the continuation of another.
        """
        history_ids = list(ids)
        packed = array("q", history_ids).tobytes()
        # Both have 8 bytes a token, so a prefix of the bytes is a prefix of the tokens.
        fitting = [s for s in self.segments if packed.startswith(s.packed)]
        if fitting:
            segment = max(fitting, key=lambda s: len(s.ids))
            segment.append_observation(history_ids[len(segment.ids) :])
            self._mark_earlier_forks_aside(segment)
            return segment
        nearest = max(self.segments, key=lambda s: _count_common_prefix(s.packed, packed), default=None)
        if nearest is None:
            return self.begin_segment(history_ids)
        self._forks += 1
        return self.begin_segment(history_ids, "aside" if is_new_dialogue else "main", parent=nearest)

    def _mark_earlier_forks_aside(self, segment: TraceSegment) -> None:
        """Mark forks of a segment that goes on. A fork counts as `main` while its parent seems abandoned, because it may take the
        parent's place; once the parent goes on, the fork was another dialogue."""
        for fork in self.segments:
            if fork.parent == segment.number and fork.origin == "main":
                fork.origin = "aside"

    @property
    def audit(self) -> Audit:
        """The counts of the episode so far. Lost turns are in no segment: the black box's session adds them."""
        segments = [s for s in self.segments if s.turns]
        return Audit(
            segments=len(segments),
            turns=sum(s.turns for s in segments),
            sampled=sum(s.num_sampled for s in segments),
            trained=sum(s.num_trained for s in segments),
            forks=self._forks,
            teacher_turns=sum(s.teacher_turns for s in segments),
        )

    def to_rollouts(self, sample: EpisodeKey, stop_reason: StopReason, reward: float | None) -> list[Rollout]:
        """Return a rollout for each segment in which a turn was taken. It ends with the segment's last turn, because what follows
        that carries no loss. `reward` is the whole episode's; None: it has none."""
        segments = [segment for segment in self.segments if segment.turns]
        names = {segment.number: sample.sample_id + (f"+{i}" if i else "") for i, segment in enumerate(segments)}
        return [
            replace(
                _to_rollout(segment, sample, stop_reason, reward),
                sample_id=names[segment.number],
                origin=segment.origin,
                parent=self._nearest_sample_id(segment.parent, names),
                next=None if segment.next is None else names.get(segment.next),
            )
            for segment in segments
        ]

    def _nearest_sample_id(self, number: int | None, names: Mapping[int, str]) -> str | None:
        """Return the sample id of the segment with that number, or of its nearest ancestor that has one; None if none has."""
        while number is not None and number not in names:
            number = self.segments[number].parent
        return None if number is None else names[number]


def _count_common_prefix(packed_ids: array[int], packed_history: bytes) -> int:
    """Return how many tokens at the beginning are the same in both. Both are buffers of 8 bytes a token."""
    a_N, b_N = np.frombuffer(packed_ids, np.int64), np.frombuffer(packed_history, np.int64)
    length = min(len(a_N), len(b_N))
    differ_N = a_N[:length] != b_N[:length]
    return int(differ_N.argmax()) if differ_N.any() else length


def _to_rollout(segment: TraceSegment, sample: EpisodeKey, stop_reason: StopReason, reward: float | None) -> Rollout:
    """Return the rollout of one segment, up to its last turn; the caller gives it its own id and its relatives."""
    spans = list(segment.spans)
    while spans and spans[-1].origin == "environment":
        spans.pop()
    length = sum(span.length for span in spans)
    return Rollout(
        sample_id=sample.sample_id,
        group=sample.group,
        episode=sample.sample_id,
        step=sample.step,
        domain=segment.domain or sample.domain,
        prompt_ids=tuple(segment.ids[: segment.prompt_len]),
        response_ids=tuple(segment.ids[segment.prompt_len : segment.prompt_len + length]),
        behaviour_logprobs=tuple(segment.logprobs[:length]),
        spans=tuple(spans) or (Span(length=0, origin="policy", policy_version=segment.policy_version),),
        stop_reason=stop_reason,
        reward=reward,
    )
