"""A question of reasoning-gym with several tries: answer, feedback, answer again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import TaskRow, take_unique
from opd.environments.question_game import Asking, Judgement
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action, Outcome
from opd.settings.strict import Strict
from opd.settings.yaml_files import validate_section
from opd.verifiers.reasoning_gym import TASKS, ReasoningGym

INSTRUCTION = "Answer with the result only."
DRAWS_PER_ROW = 20


class RetryOptions(Strict):
    family: str = "chain_sum"
    """Family of tasks; only those whose scoring function runs no code."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of reasoning-gym for that family."""


class Retry(Asking):
    """Questions of reasoning-gym, several tries each; also plays what `opd prompts make reasoning` wrote."""

    name = "retry"
    Options = RetryOptions

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin. Raises: PromptError for metadata that reasoning-gym's verifier cannot use."""
        self._verifier, self._metadata = ReasoningGym(), metadata
        problem = self._verifier.problem("", metadata)
        if problem:
            raise PromptError.at(
                "environment retry: metadata",
                found=problem,
                wanted="a task of reasoning-gym",
                fix="make the prompts with `opd environments tasks retry` or `opd prompts make reasoning`",
            )
        return self._begin()

    def step(self, action: Action) -> Outcome:
        """Judge the answer."""
        return self._judge_turn(action.text)

    def judge(self, text: str) -> Judgement:
        right = self._verifier(text, str(self._metadata["entry"]["answer"]), self._metadata) == 1
        tries_left = self._tries_left - 1
        feedback = f"That is not right. {tries_left} more {'try' if tries_left == 1 else 'tries'}. {INSTRUCTION}"
        return Judgement(right, feedback)

    def solve(self) -> Action:
        """Return the answer that the task came with."""
        return Action(text=str(self._metadata["entry"]["answer"]))

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. Raises: ConfigError."""
        task_options = validate_section(RetryOptions, options, "environment retry")
        if task_options.family not in TASKS:
            raise ConfigError.at(
                "environment retry: family",
                found=repr(task_options.family),
                wanted=f"one of: {', '.join(sorted(TASKS))}",
                fix="choose one of them: scoring functions of other families run code",
            )
        return take_unique(_draw_entries(task_options, seed, n * DRAWS_PER_ROW), n, "environment retry")


def _draw_entries(options: RetryOptions, seed: int, limit: int) -> Iterator[TaskRow]:
    import reasoning_gym

    try:
        entries = reasoning_gym.create_dataset(options.family, seed=seed, size=limit, **options.config)
    except (TypeError, AssertionError, ValueError) as error:  # its own checks are asserts
        raise ConfigError.at(
            "environment retry: config",
            found=str(error),
            wanted=f"options of reasoning-gym's {options.family}",
            fix="correct or leave out the option",
        ) from None
    for entry in entries:
        yield gym_row(options.family, entry)


def gym_row(family: str, entry: Mapping[str, Any]) -> TaskRow:
    """Return the prompts row of an entry of reasoning-gym, which it carries along for the scorer."""
    stored_entry: dict[str, Any] = json.loads(json.dumps(entry))  # the scorer gets what a file gives back
    question, answer = f"{stored_entry['question'].strip()}\n{INSTRUCTION}", stored_entry["answer"]
    if family == "number_sorting":  # its scorer runs a list with other quotes than JSON's as code
        stored_entry["answer"] = answer.replace("'", '"')
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": answer,
        "metadata": {"source": "reasoning_gym", "task": family, "entry": stored_entry},
    }
