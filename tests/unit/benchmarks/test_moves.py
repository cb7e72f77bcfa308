"""The readings of `benchmarks.moves`: right episodes, and what a model says of each of their moves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.moves import Move, Read, figures, read, right_episodes
from opd.environments import find_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def test_a_right_episode_is_what_an_agent_that_plays_right_reads_and_writes(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    def text(ids: list[int]) -> str:
        return tiny_tokenizer.decode(ids).replace(tiny_tokenizer.eos_token, "|")

    [row] = find_environment("hanoi", "--environment").tasks(1, 0, min_moves=3, max_moves=3)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(row))
    [(ids, moves)] = right_episodes(tiny_tokenizer, "hanoi", tasks)
    assert text(ids).startswith(row["prompt"])
    assert [text(ids[move.start : move.end]) for move in moves] == [f"{one}|" for one in row["answer"].split()]
    assert row["prompt"] == f"hanoi {moves[0].state}=" and f"={text(ids[moves[0].start : moves[0].end])}" in text(ids)
    assert f"|{moves[1].state}=" in text(ids)


def test_a_move_has_the_probability_of_all_its_tokens() -> None:
    def model(ids: torch.Tensor) -> Any:
        """Says 1 with 0.9, then 2 with 0.6 and 3 with 0.4."""
        logits = torch.full((1, ids.shape[1], 4), -30.0)
        logits[0, 0, 1], logits[0, 0, 0] = torch.tensor([0.9, 0.1]).log()
        logits[0, 1, 2], logits[0, 1, 3] = torch.tensor([0.6, 0.4]).log()
        logits[0, 2, 0] = 0.0
        return SimpleNamespace(logits=logits)

    [right] = read(model, [0, 1, 2], [Move("s", 1, 3)])
    assert abs(right.p - 0.54) < 1e-6 and right.likeliest
    [other] = read(model, [0, 1, 3], [Move("s", 1, 3)])
    assert abs(other.p - 0.36) < 1e-6 and not other.likeliest


def test_figures_tell_trained_states_from_others_and_whom_no_loss_reaches() -> None:
    expert = [Read("a", 0.95, True), Read("b", 0.92, True), Read("c", 0.5, False)]
    student = [Read("a", 0.001, False), Read("b", 0.899, True), Read("c", 0.001, False)]
    assert figures(student, expert, {"a", "b"}) == ["0.450", "0.500", "0.001", "0.000", "50.0 %"]
