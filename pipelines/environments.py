"""`opd environments`: what there is, prompts files of tasks, and a game for a person at the terminal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experts.episodes.play import PlaySettings, play_tasks
from experts.episodes.prefixes import read_prefixes
from experts.model_dir import inspect_model
from opd.config.prompts import ChatTemplateKwargs
from opd.environments import ENVIRONMENTS, find_environment
from opd.errors import ConfigError
from opd.files import atomic_write_text
from opd.prompts import find_source
from opd.records.environments import Action, Outcome, ToolCall
from opd.settings.yaml_files import apply_overrides
from opd.text import escape_control_characters
from opd.tool_formats import AUTO
from pipelines.inputs.read import load_tokenizer

QUIT = "quit"


def environment_table() -> list[tuple[str, str, str]]:
    """Return name, tools and first line of the documentation of every environment that comes with `opd`."""
    rows = []
    for name in ENVIRONMENTS:
        environment_class = find_environment(name, "environments")
        docstring = inspect.getdoc(environment_class) or ""
        rows.append((name, ", ".join(tool.name for tool in environment_class.tools) or "-", docstring.partition("\n")[0]))
    return rows


def write_tasks(name: str, n: int, seed: int, options: list[str], output: Path) -> int:
    """Write a prompts file of `n` tasks, whole or not at all; `options` are KEY=VALUE. Returns the number of rows.

    Raises: ConfigError for an environment without tasks, or options that do not fit.
    """
    return _write_rows(_make_tasks(name, n, seed, options), output)


def write_episodes(name: str, n: int, play: PlaySettings, options: list[str], output: Path) -> int:
    """Write a prompts file of `n` tasks with an episode of the solver each: see `experts.episodes.play`. Else as `write_tasks`.

    Raises: ConfigError, also for an environment without a solver.
    """
    return _write_rows(play_tasks(name, _make_tasks(name, n, play.seed, options), play), output)


def write_prefixes(
    episodes: Path,
    model: Path,
    output: Path,
    day: date | None = None,
    parser: str = AUTO,
    variables: str = "{}",
    add_special_tokens: bool = True,
) -> tuple[int, int]:
    """Write a prompts file of the prefixes of recorded episodes, in the words of the student in `model`; `day`, `parser`, `variables`,
    which are JSON, and `add_special_tokens` are its `template_date`, `tool_call_parser`, `chat_template_kwargs` and
    `add_special_tokens`. Returns the numbers of rows, and of prefixes that were left out.

    Raises: PromptError, ModelError: see `experts.episodes.prefixes`; ModelError for a directory that is no model; ConfigError.
    """
    try:
        template_variables = TypeAdapter(ChatTemplateKwargs).validate_json(variables)
    except ValidationError as error:
        raise ConfigError.at(
            "--chat-template-kwargs",
            found=f"{variables!r:.80} ({error.errors()[0]['msg']})",
            wanted="variables of the chat template's own, as JSON",
            fix="for example --chat-template-kwargs '{\"enable_thinking\": false}'",
        ) from None
    ends = inspect_model(model, hash_weights=False).eos_token_ids
    find_source(episodes)  # a missing file is found before the tokenizer's package is imported
    prefixes = read_prefixes(episodes, load_tokenizer(model, add_special_tokens), ends, day, parser, template_variables)
    return _write_rows(prefixes.rows, output), prefixes.left_out


def _write_rows(rows: Sequence[dict[str, Any]], output: Path) -> int:
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def play_task(
    name: str, seed: int, options: list[str], ask: Callable[[str], str], say: Callable[[str], None]
) -> float | None:
    """Play one task: `ask` gives the player's next turn, `say` shows a text. Returns the reward, None if the player left.

    A turn is text. Where there are tools, `NAME {JSON}` calls one, and `NAME TEXT` one that takes a single text.
    """
    row = _make_tasks(name, 1, seed, options)[0]
    environment = find_environment(name, "environments")()
    try:
        first_observation = environment.reset(row["metadata"], seed)
        say(_message_text(row["prompt"]) + (f"\n{_message_text(first_observation)}" if first_observation else ""))
        while (text := ask("> ")).strip() != QUIT:
            outcome = _make_turn(environment, text, say)
            if outcome.done:
                return outcome.reward
        return None
    finally:
        environment.close()


def _make_turn(environment: Any, text: str, say: Callable[[str], None]) -> Outcome:
    try:
        calls = _parse_typed_call(environment, text)
    except ValueError as error:
        say(f"this call cannot be made: {error}")
        return Outcome()
    outcome: Outcome = environment.step(Action(text=text, calls=calls))
    observation = outcome.observation
    say("\n".join(observation) if isinstance(observation, tuple) else observation)
    return outcome


def _parse_typed_call(environment: Any, text: str) -> tuple[ToolCall, ...]:
    """Return the tool call that a player typed, if it is one. Raises: ValueError for arguments that are missing."""
    name, _, argument_text = text.strip().partition(" ")
    tool = next((tool for tool in environment.tools if tool.name == name), None)
    if tool is None:
        return ()
    needed = list(tool.parameters.get("required", ()))
    typed = {needed[0]: argument_text} if needed else {}
    arguments = json.loads(argument_text) if argument_text.lstrip().startswith("{") else typed
    missing = [key for key in needed if key not in arguments]
    if missing:
        raise ValueError(f"{name} needs {missing[0]}; write {name} {{JSON}}")
    return (ToolCall(name=name, arguments=arguments),)


def _make_tasks(name: str, n: int, seed: int, options: list[str]) -> Sequence[dict[str, Any]]:
    environment_class = find_environment(name, "environments")
    if not hasattr(environment_class, "tasks"):
        raise ConfigError.at(
            f"environment {name}",
            found="a class without `tasks`",
            wanted="a class method tasks(n, seed, **options) that gives rows",
            fix="write one, or write the prompts file yourself",
        )
    rows: Sequence[dict[str, Any]] = environment_class.tasks(n, seed, **apply_overrides({}, options))
    return rows


def _message_text(prompt: Any) -> str:
    """Return the text of a prompt or an observation, for a person."""
    return escape_control_characters(
        prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    )
