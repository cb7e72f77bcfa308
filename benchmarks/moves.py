"""Measure how sure models of a game are of each right move, where nobody has made a mistake yet.

    python -m benchmarks.moves hanoi --tasks eval.jsonl --trained train.jsonl --expert MODEL MODEL ...

Every model reads the right way of each task as an agent would who plays it, and gives each of its moves a probability. Two figures
for the states that the right ways of `--trained` pass, and two for all others: the mean probability of the right move, and the share
of moves that are right when the likeliest tokens are taken. The last column tells of moves that the expert gives 0.9 and more: to
which share of them the model gives less than 0.01. Reverse KL hardly teaches these moves (docs/objectives.md).

A game may have several right moves in a state. Only the one that its solver makes counts here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.visited import right_ways
from experts.episodes.encode import EpisodeEncoder
from experts.episodes.play import PlaySettings, play_tasks
from experts.episodes.rows import read_episode
from opd.environments.game import MOST_MOVES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SURE, LOST = 0.9, 0.01


@dataclass(frozen=True, slots=True)
class Move:
    """One right move."""

    state: str
    start: int
    """Place of its first token in the episode."""
    end: int
    """The place after its end token."""


@dataclass(frozen=True, slots=True)
class Read:
    """A model's reading of one right move."""

    state: str
    p: float
    likeliest: bool
    """True if each of its tokens is the likeliest one."""


def right_episodes(tokenizer: PreTrainedTokenizerBase, game: str, tasks: Path) -> list[tuple[list[int], list[Move]]]:
    """For each task of a file the token ids of an episode without mistakes, and where its moves stand."""
    rows = [json.loads(line) for line in tasks.read_text(encoding="utf-8").splitlines()]
    played = play_tasks(game, rows, PlaySettings(mistakes=0.0, max_turns=MOST_MOVES))
    encoder, found = EpisodeEncoder(tokenizer), []
    for row, states in zip(played, right_ways(game, tasks), strict=True):
        ids, learned = encoder.encode(read_episode(row))
        runs = [[place for place, _ in run] for said, run in groupby(enumerate(learned), itemgetter(1)) if said]
        found.append((ids, [Move(state, run[0], run[-1] + 1) for state, run in zip(states, runs, strict=True)]))
    return found


def read(model: PreTrainedModel, ids: Sequence[int], moves: Sequence[Move]) -> list[Read]:
    """Return what a model says of each move of an episode."""
    with torch.no_grad():
        logprobs_T_V = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = torch.tensor(ids)
    said_T = logprobs_T_V[:-1].gather(1, told[1:, None])[:, 0]
    right_T = logprobs_T_V[:-1].argmax(-1) == told[1:]
    places = [(move.state, slice(move.start - 1, move.end - 1)) for move in moves]
    return [Read(state, said_T[at].sum().exp().item(), bool(right_T[at].all())) for state, at in places]


def of_model(directory: Path, game: str, tasks: Path) -> list[Read]:
    """Return what the model of a directory says of the right moves of all tasks."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return [said for ids, moves in right_episodes(tokenizer, game, tasks) for said in read(model, ids, moves)]


def figures(said: Sequence[Read], expert: Sequence[Read], trained: set[str]) -> list[str]:
    """The cells of a model's row."""
    cells = []
    for known in (True, False):
        mine = [one for one in said if (one.state in trained) == known]
        cells += [mean([one.p for one in mine]), mean([one.likeliest for one in mine])]
    sure = [one.p < LOST for one, other in zip(said, expert, strict=True) if other.p >= SURE]
    return [*cells, f"{100 * fmean(sure):.1f} %" if sure else "-"]


def mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="How sure models of a game are of each right move.")
    parser.add_argument("game")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--tasks", type=Path, required=True, help="JSONL: the tasks whose right ways are read")
    parser.add_argument("--trained", type=Path, required=True, help="JSONL: the tasks that training began at")
    parser.add_argument("--expert", type=Path, required=True)
    args = parser.parse_args()
    trained = {state for way in right_ways(args.game, args.trained) for state in way}
    expert = of_model(args.expert, args.game, args.tasks)
    head = ["model", "p, trained ways", "right, trained ways", "p, elsewhere", "right, elsewhere", f"below {LOST}"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], [str(args.expert), *figures(expert, expert, trained)]]
    lines += [[str(model), *figures(of_model(model, args.game, args.tasks), expert, trained)] for model in args.models]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    print(f"\n{len(expert)} moves; the expert is sure of {sum(one.p >= SURE for one in expert)}.")


if __name__ == "__main__":
    main()
