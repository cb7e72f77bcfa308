"""Rollouts as episodes for people: every token's text and loss, long texts cut, and the tree of segments."""

from __future__ import annotations

import random
from typing import Any

import pytest

from opd.records.types import Rollout, Span
from opd.traces.record import EpisodeTrace, StepTraces, read_traces
from opd.traces.rendering import MAX_TEXT, MAX_TOKENS, make_trace, split_into_token_texts
from tests.chatml import bpe_tokenizer, chat_tokenizer
from tests.rows import make_rollout

TOKENIZER = bpe_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def rollout(*parts: tuple[str, str], sample_id: str = "s0", **more: Any) -> Rollout:
    """A rollout of these parts: origin and text of each."""
    ids = [encode(text) for _, text in parts]
    spans = tuple(
        Span(length=len(part), origin=origin, policy_version=7)  # type: ignore[arg-type]
        for (origin, _), part in zip(parts, ids, strict=True)
    )
    known = {"episode": "s0", "stop_reason": "done", "step": 3, "domain": "maze", "prompt_ids": encode("go:")}
    return make_rollout(
        sample_id=sample_id, response_ids=[i for part in ids for i in part], spans=spans, **known | more
    )


def test_the_texts_of_tokens_are_the_text() -> None:
    for text in ("the maze", "naïve 日本語 😀 end", "a<|im_end|>\nb", ""):
        ids = encode(text)
        texts = split_into_token_texts(ids, TOKENIZER)
        assert len(texts) == len(ids) and "".join(texts) == TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert split_into_token_texts(encode("日"), TOKENIZER) == ["", "", "日"], (
        "a character of three bytes stands with the last"
    )
    rng = random.Random(0)
    for _ in range(50):
        ids = rng.choices(range(len(TOKENIZER)), k=30)
        assert "".join(split_into_token_texts(ids, TOKENIZER)) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_every_trained_token_has_its_loss() -> None:
    given = rollout(("policy", "left"), ("environment", " a wall "), ("masked", "up"), ("policy", "down"))
    losses = [0.123456 + place for place in range(given.num_trained)]
    (segment,) = make_trace([given], ("best",), {"s0": losses}, TOKENIZER).segments
    assert ["".join(piece.texts) for piece in segment.pieces] == ["left", " a wall ", "up", "down"]
    assert [piece.origin for piece in segment.pieces] == ["policy", "environment", "masked", "policy"]
    first, observed, masked, last = segment.pieces
    assert (observed.losses, masked.losses, len(observed.texts)) == ((), (), 1)
    assert [*first.losses, *last.losses] == [round(loss, 4) for loss in losses]
    assert len(last.texts) == len(last.losses) == last.length
    assert [turn for turn, _ in segment.turns] == [1, 1, 2, 2]
    (unknown,) = make_trace([given], (), {}, TOKENIZER).segments
    assert all(piece.losses == () for piece in unknown.pieces)


def test_long_texts_are_cut_and_say_so() -> None:
    wall = "wall " * 3000
    given = rollout(
        ("policy", "x" * (MAX_TOKENS + 50)), ("environment", wall), ("policy", "y"), prompt_ids=encode(wall)
    )
    losses = [0.5] * given.num_trained
    (segment,) = make_trace([given], (), {"s0": losses}, TOKENIZER).segments
    wrote, observed, end = segment.pieces
    assert len(wrote.texts) == len(wrote.losses) == MAX_TOKENS and wrote.left_out == wrote.length - MAX_TOKENS
    assert observed.left_out == len(wall) - MAX_TEXT and len(observed.texts[0]) < MAX_TEXT + 50
    assert "… (11,000 characters) …" in observed.texts[0] and "… (11,000 characters) …" in segment.prompt
    assert end.losses == (0.5,) and segment.prompt_length == len(given.prompt_ids)


def family() -> EpisodeTrace:
    """A segment with a sub-agent, a fork of that, and a summary; the second of two of its roots has lost its parent."""
    segments = [
        rollout(("policy", "a"), next="s0+3"),
        rollout(("policy", "b"), sample_id="s0+1", parent="s0", origin="sub_agent", domain="maps"),
        rollout(("policy", "c"), sample_id="s0+2", parent="s0+1"),
        rollout(("policy", "d"), sample_id="s0+3", parent="s0", origin="summary"),
        rollout(("policy", "e"), sample_id="s0+4", parent="gone"),
    ]
    return make_trace(segments, ("best", "first"), {"s0+3": [2.5]}, TOKENIZER)


def test_the_tree_has_every_segment_once_under_its_parent() -> None:
    assert [(depth, segment.sample_id) for depth, segment in family().tree] == [
        (0, "s0"), (1, "s0+1"), (2, "s0+2"), (1, "s0+3"), (0, "s0+4"),
    ]  # fmt: skip
    assert (family().num_turns, family().sampled, family().trained) == (5, 5, 5)


def test_what_is_stored_is_read(tmp_path: Any) -> None:
    given = StepTraces(step=12, episodes=(family(),))
    given.save(tmp_path / "one.json")
    assert read_traces(tmp_path / "one.json") == given


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 1}', '{"format": 9, "step": 1, "episodes": []}', "{", '{"format": 1, "step": 1, "episodes": [{}]}'])  # fmt: skip
def test_damaged_files_are_told(text: str, tmp_path: Any) -> None:
    from opd.errors import RunDirError

    (tmp_path / "one.json").write_text(text)
    with pytest.raises(RunDirError, match=r"one.json\n  found: (?s:.*)fix:"):
        read_traces(tmp_path / "one.json")


def test_another_tokenizer() -> None:
    letters = chat_tokenizer()
    ids = list(letters("up, left<|im_end|>", add_special_tokens=False)["input_ids"])
    assert split_into_token_texts(ids, letters) == [*"up, left", "<|im_end|>"]
