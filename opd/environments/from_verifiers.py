"""Environments of the package `verifiers`, for text alone: its tasks, its answers to a turn, its rubric as the reward.

The object that `verifiers` loads does the work. In `verifiers` that object runs the whole episode and calls the model; here the policy
samples elsewhere, so this file calls the parts of its loop one by one. That needs the interface of `verifiers` since 0.1.8. Environments
of its newer interface (task sets and harnesses) talk to an endpoint instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import TaskRow, take_unique
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action, Outcome, Tool
from opd.settings.strict import Strict
from opd.settings.yaml_files import validate_section

WHERE = "environment verifiers"
NEEDED = (
    "get_dataset", "init_state", "setup_state", "is_completed", "get_prompt_messages", "add_trajectory_step", "rubric",
)  # fmt: skip


class VerifiersOptions(Strict):
    id: str
    """Name that `verifiers.load_environment` is asked for."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class FromVerifiers:
    """An environment of the package verifiers, which has to be installed."""

    name = "verifiers"
    Options = VerifiersOptions
    tools: tuple[Tool, ...] = ()

    def __init__(self, **options: Any) -> None:
        """`options` are `id` and `arguments`. Raises: ConfigError if the package or the environment is not there."""
        self._environment = load_environment(validate_section(VerifiersOptions, options, WHERE))
        self._loop = asyncio.new_event_loop()
        self._wait = self._loop.run_until_complete
        self._state: dict[str, Any] = {}
        self._message_count = 0

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin. Raises: PromptError for metadata of another kind, and whatever the environment raises."""
        if "input" not in metadata:
            raise PromptError.at(
                f"{WHERE}: metadata",
                found="no key `input`",
                wanted="a task of verifiers",
                fix="make the prompts with `opd environments tasks verifiers --set id=NAME`",
            )
        task = dict(metadata["input"])
        self._state = self._wait(self._environment.init_state(input=task, client=None, model="", sampling_args={}))
        self._state = self._wait(self._environment.setup_state(self._state)) or self._state
        messages = self._wait(self._environment.get_prompt_messages(self._state))
        self._prompt, self._message_count = messages, len(messages)
        return ""

    def step(self, action: Action) -> Outcome:
        """Give the turn to the environment, and its answer back; the rubric judges at the end."""
        turn = [{"role": "assistant", "content": action.text}]
        record = _trajectory_step(self._prompt, turn)
        self._wait(self._environment.add_trajectory_step(self._state, record))
        if self._wait(self._environment.is_completed(self._state)):
            self._wait(self._environment.rubric.score_group([self._state]))
            return Outcome(reward=float(self._state["reward"]), done=True)
        self._prompt = self._wait(self._environment.get_prompt_messages(self._state))
        new, self._message_count = self._prompt[self._message_count + len(turn) :], len(self._prompt)
        return Outcome(observation="\n".join(str(message["content"]) for message in new))

    def close(self) -> None:
        """Close the event loop in which the environment ran."""
        self._loop.close()

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows of the environment's data set. Raises: ConfigError."""
        environment = load_environment(validate_section(VerifiersOptions, options, WHERE))
        return take_unique(_draw_rows(environment, n, seed), n, WHERE)


def load_environment(options: VerifiersOptions) -> Any:
    """Load the environment's object. Raises: ConfigError if there is none, or if it cannot be played in this way."""
    try:
        import verifiers
    except ModuleNotFoundError:
        raise ConfigError.at(
            WHERE,
            found="the package verifiers is not installed",
            wanted="it, and the environment's own package",
            fix="`pip install verifiers` and the environment, or choose another: `opd environments list`",
        ) from None
    try:
        environment = verifiers.load_environment(options.id, **options.arguments)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError.at(
            WHERE,
            found=str(error),
            wanted=f"an environment {options.id}",
            fix="install it, or correct `id` and `arguments`",
        ) from None
    missing = [name for name in NEEDED if not hasattr(environment, name)]
    if missing:
        version = getattr(verifiers, "__version__", "of an unknown version")
        raise ConfigError.at(
            WHERE,
            found=f"verifiers {version}, whose {options.id} has no `{missing[0]}`",
            wanted="the interface of `MultiTurnEnv` since 0.1.8",
            fix="use such an environment, or run its harness against an endpoint of `opd`",
        )
    return environment


def _draw_rows(environment: Any, n: int, seed: int) -> Iterator[TaskRow]:
    for number, row in enumerate(environment.get_dataset(n=n, seed=seed)):
        info = row.get("info") or {}
        task_input = {
            "prompt": row["prompt"],
            "answer": str(row.get("answer") or ""),
            "info": json.loads(info) if isinstance(info, str) else info,
            "task": str(row.get("task") or ""),
            "example_id": row.get("example_id", number),
        }
        yield {"prompt": row["prompt"], "answer": task_input["answer"], "metadata": {"input": task_input}}


def _trajectory_step(prompt: Any, turn: list[dict[str, str]]) -> dict[str, Any]:
    """Return a turn in the form in which `verifiers` records it, without tokens and rewards, which are kept elsewhere."""
    nothing = dict.fromkeys(("response", "tokens", "reward", "advantage"))
    return nothing | {"prompt": prompt, "completion": turn, "is_truncated": False, "trajectory_id": "", "extras": {}}
