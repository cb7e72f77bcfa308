"""Rows that hold a whole episode: a prompts file with the column `messages`, OpenAI's format for fine-tuning.

    {"prompt": "maze to d4\\n", "messages": [
      {"role": "user", "content": "b3:"},                      an observation: read, never learned
      {"role": "assistant", "content": "N", "weight": 0},      a mistake: read, not learned
      {"role": "user", "content": "b2:"},
      {"role": "assistant", "content": "S"}]}                  learned, its end token included

`messages` follow the prompt. Without a `prompt`, the messages before the assistant's first turn are the prompt, as a chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import PromptError
from opd.prompts import Messages, find_source
from opd.prompts.broken_rows import BrokenRow
from opd.prompts.line import read_row
from opd.prompts.readers import RowLocation, source_rows
from opd.records.environments import Tool

Turn = Mapping[str, Any]
"""`role` and `content`, both text; a turn of the assistant may have `weight`, 1 (the default) or 0."""
WANTED = 'an episode, such as {"prompt": "2+2=", "messages": [{"role": "assistant", "content": "4", "weight": 1}]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode that an expert learns."""

    prompt: str | Messages
    """Text for a dialogue in plain text, messages for one through the chat template."""
    observations: tuple[tuple[Turn, ...], ...]
    """The messages before each turn; before the first turn there may be none."""
    turns: tuple[Turn, ...]
    """The assistant's turns, as many as `observations`."""
    tools: tuple[Tool, ...] = ()
    asks: bool = True
    """True if the row has a column `prompt`. Without it no merge can read the file."""


def is_learned(turn: Turn) -> bool:
    """Return True if the expert learns to write this turn."""
    return bool(turn.get("weight", 1) == 1)


def has_episodes(prompts: Path | PromptsConfig) -> bool:
    """Return True if a source holds episodes, which its first row decides: it is JSONL, with `messages` and no `completion`.

    The first row is the first that the pipeline's filter keeps. If the pipeline reads `messages` as one of our columns, such
    as the prompt, they are no episodes. Raises: PromptError.
    """
    source, config = find_source(prompts), as_prompts_config(prompts)
    if source.kind != "jsonl" or "messages" in config.columns.values():
        return False
    first_row = next((row for _, row in source_rows(source, config) if row is not None), None)
    completion = config.columns.get("completion", "completion")
    return isinstance(first_row, dict) and "messages" in first_row and completion not in first_row


def read_episodes(path: Path) -> list[EpisodeRow]:
    """Return every episode of a JSONL file. Raises: PromptError naming file, line and message."""
    return [read_episode_at(location, row) for location, row in source_rows(find_source(path), as_prompts_config(path))]


def read_episode_at(location: RowLocation, row: Any) -> EpisodeRow:
    """Check the row at a place. Raises: PromptError naming file, line and message."""
    try:
        return read_episode(row)
    except BrokenRow as problem:
        raise PromptError.at(str(location), found=problem.fault, wanted=WANTED, fix=problem.fix) from None


def read_episode(row: Any) -> EpisodeRow:
    """Check one row. Raises: BrokenRow."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise BrokenRow("no list `messages`", "give every row of the file its episode")
    messages: list[Turn] = row["messages"]
    for number, turn in enumerate(messages, start=1):
        if problem := _turn_problem(turn):
            raise BrokenRow(f"message {number}: {problem}", "correct or delete this line")
    observations, turns = _split_turns(messages)
    if not any(map(is_learned, turns)):
        raise BrokenRow(
            "no turn of the assistant with weight 1", "delete this line: an expert has nothing to learn of it"
        )
    _check_observations(observations[1:])
    tools = tuple(_read_tool(schema) for schema in row.get("tools") or ())
    if "prompt" not in row:
        head = [{"role": turn["role"], "content": turn["content"]} for turn in observations[0]]
        return EpisodeRow(prompt=head, observations=((), *observations[1:]), turns=turns, tools=tools, asks=False)
    prompt = read_row(row).prompt
    _refuse_repeated_prompt(prompt, messages[0])
    return EpisodeRow(prompt=prompt, observations=observations, turns=turns, tools=tools)


def _split_turns(messages: Sequence[Turn]) -> tuple[tuple[tuple[Turn, ...], ...], tuple[Turn, ...]]:
    """Return the messages before each turn of the assistant, and these turns. Messages after the last turn are dropped."""
    indices = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    starts = [0, *(index + 1 for index in indices)]
    observations = tuple(tuple(islice(messages, start, index)) for start, index in zip(starts, indices, strict=False))
    return observations, tuple(messages[index] for index in indices)


def _turn_problem(turn: Any) -> str:
    """Describe what is wrong with one message; empty if nothing is."""
    if not isinstance(turn, dict):
        return f"{turn!r:.60}"
    if turn.get("tool_calls") or turn.get("function_call"):
        return "a call beside the text; write it into `content`, as the student's chat template has it"
    wrong_key = next((key for key in ("role", "content") if not isinstance(turn.get(key), str)), "")
    if wrong_key:
        return f"`{wrong_key}` is no text: {turn.get(wrong_key)!r:.60}"
    if not turn["role"]:
        return "an empty `role`"
    if "weight" in turn and turn["role"] != "assistant":
        return f"a `weight`, but the role is {turn['role']!r:.60}: only turns of the assistant are learned"
    weight = turn.get("weight", 1)
    return "" if type(weight) is int and weight in (0, 1) else f"the `weight` {weight!r:.60}, wanted 0 or 1"


def _check_observations(observations: Sequence[Sequence[Turn]]) -> None:
    """Refuse observations that are neither one message nor the results of a turn's calls. Raises: BrokenRow."""
    for messages in observations:
        if len(messages) != 1 and {turn["role"] for turn in messages} != {"tool"}:
            roles = " and ".join(turn["role"] for turn in messages) or "nothing"
            raise BrokenRow(
                f"{roles} between two turns of the assistant",
                "put one message of the user there, or one of the role `tool` for each call of the turn before",
            )


def _refuse_repeated_prompt(prompt: str | Messages, first_message: Turn) -> None:
    """Refuse `messages` that begin with the prompt again, as in some public data sets. Raises: BrokenRow."""
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    if first_message["role"] != "assistant" and question.strip() and first_message["content"] == question:
        raise BrokenRow("`messages` that begin with the prompt once more", "delete the column `prompt`")


def _read_tool(schema: Any) -> Tool:
    """Return the tool that OpenAI's schema describes. Raises: BrokenRow."""
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BrokenRow(f"the tool {schema!r:.60}", 'give tools as {"type": "function", "function": {"name": ...}}')
    parameters = {"parameters": function["parameters"]} if isinstance(function.get("parameters"), dict) else {}
    return Tool(name=function["name"], description=str(function.get("description", "")), **parameters)
