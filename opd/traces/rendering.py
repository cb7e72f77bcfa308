"""Make traces of the episodes of rollouts: decode token ids, and cut long texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opd.interfaces import Decoder
from opd.records.episodes import EpisodeStats
from opd.records.guard import GuardEvent
from opd.records.types import Rollout, Span
from opd.traces.record import EpisodeTrace, Piece, SegmentTrace
from opd.traces.selection import TraceReason

MAX_TEXT = 4000
"""Most characters of a prompt or an observation that are kept: half of them from its beginning, half from its end."""
MAX_TOKENS = 2000
"""Most tokens of any other span that are kept, from its beginning."""
DIGITS = 4
"""Digits of a loss after the decimal point."""
_INCOMPLETE = "�"
"""The replacement character, at the end of a text whose last character lacks bytes."""

Losses = Mapping[str, Sequence[float]]
"""Sample id -> the loss of each of its trained tokens, in nats."""


def list_guard_events(stats: Iterable[EpisodeStats]) -> list[GuardEvent]:
    """Return what the guard saw in a step, in all domains."""
    return [
        event
        for stats_of_domain in stats
        if stats_of_domain.guard is not None
        for event in stats_of_domain.guard.events
    ]


def make_trace(
    segments: Sequence[Rollout],
    reasons: tuple[TraceReason, ...],
    losses: Losses,
    tokenizer: Decoder,
    events: Iterable[GuardEvent] = (),
) -> EpisodeTrace:
    """Make the trace of the episode that these segments form. Segments without an entry in `losses` get no losses. `events`: what the
    guard saw in the step, in all episodes."""
    first_segment = segments[0]
    prefix = f"{first_segment.episode}/"  # the id of a sub-agent's episode begins with this
    return EpisodeTrace(
        episode=first_segment.episode,
        domain=first_segment.domain,
        why=reasons,
        stop_reason=first_segment.stop_reason,
        reward=first_segment.reward,
        segments=tuple(_make_segment(rollout, losses.get(rollout.sample_id, ()), tokenizer) for rollout in segments),
        guard=tuple(event.describe for event in events if f"{event.episode}/".startswith(prefix)),
    )


def _make_segment(rollout: Rollout, losses: Sequence[float], tokenizer: Decoder) -> SegmentTrace:
    # `at` counts response tokens; `trained` counts those that carry loss, since `losses` has these only.
    pieces, at, trained = [], 0, 0
    for span in rollout.spans:
        ids = rollout.response_ids[at : at + span.length]
        span_losses = losses[trained : trained + span.length] if span.trained else ()
        pieces.append(_make_piece(span, ids, span_losses, tokenizer))
        at, trained = at + span.length, trained + span.length * span.trained
    prompt, _ = _shorten_text(tokenizer.decode(rollout.prompt_ids, skip_special_tokens=False))
    return SegmentTrace(
        sample_id=rollout.sample_id,
        domain=rollout.domain,
        origin=rollout.origin,
        parent=rollout.parent,
        next=rollout.next,
        prompt=prompt,
        prompt_length=len(rollout.prompt_ids),
        pieces=tuple(pieces),
    )


def _make_piece(span: Span, ids: Sequence[int], losses: Sequence[float], tokenizer: Decoder) -> Piece:
    if span.origin == "environment":
        text, left_out = _shorten_text(tokenizer.decode(ids, skip_special_tokens=False))
        texts: Sequence[str] = (text,)
    else:
        texts, left_out = split_into_token_texts(ids[:MAX_TOKENS], tokenizer), max(0, len(ids) - MAX_TOKENS)
    return Piece(
        origin=span.origin,
        policy_version=span.policy_version,
        length=span.length,
        texts=tuple(texts),
        losses=tuple(round(loss, DIGITS) for loss in losses[:MAX_TOKENS]),
        left_out=left_out,
    )


def _shorten_text(text: str) -> tuple[str, int]:
    """Return the text, or its beginning and end if it is long, and the number of characters that are left out."""
    missing = len(text) - MAX_TEXT
    if missing <= 0:
        return text, 0
    half = MAX_TEXT // 2
    return f"{text[:half]} … ({missing:,} characters) … {text[-half:]}", missing


def split_into_token_texts(ids: Sequence[int], tokenizer: Decoder) -> list[str]:
    """Return the text that each token adds to those before it, special tokens too; joined they are the text of all.

    A character that takes several tokens is the text of the last of them; the others have an empty text. A token is decoded together
    with those just before it, on which its text may depend. To decode all before it would take time that grows with the square of
    their number.
    """
    texts: list[str] = []
    start, at = 0, 0
    for end in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[start:at], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith(_INCOMPLETE) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        start, at = at, end  # the next one is decoded together with the tokens of this text
    return texts
