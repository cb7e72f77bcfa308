"""Questions to one model within what the user allows to be spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.config.endpoint import TextServerConfig
from opd.errors import RunError
from opd.records.texts import TextSpending
from opd.records.types import Prompt
from opd.servers.answers_file import AnswersFile
from opd.servers.text_server import TextServer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBudget:
    """Limits of what is spent on one model, and its prices."""

    max_calls: int | None
    """Most requests of the run; None: no limit."""
    max_cost: float | None
    """Money after which no further answer is asked for; None: no limit."""
    input_price: float
    """Money for a million tokens of prompts."""
    output_price: float
    """Money for a million tokens of answers."""

    @classmethod
    def from_config(cls, config: TextServerConfig) -> CallBudget:
        """Return the budget that a pipeline states."""
        return cls(
            max_calls=config.max_calls,
            max_cost=config.max_cost,
            input_price=config.price.input,
            output_price=config.price.output,
        )


class BudgetedServer:
    """Asks one model, keeps its answers in a file, and counts what they take."""

    def __init__(self, server: TextServer, budget: CallBudget, file: AnswersFile) -> None:
        self._server = server
        self._budget = budget
        self._file = file

    def ask_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Ask the model about these prompts. Raises: RunError where a budget ends, or if the server refuses every request; StorageError."""
        server, budget = self._server, self._budget
        cost = self.sum_spending().cost
        if budget.max_cost is not None and cost >= budget.max_cost:
            raise RunError(
                f"{server.role} {server.name}: its answers cost {cost:g}, max_cost is {budget.max_cost:g}; raise it and resume"
            )

        def count_call() -> None:
            if budget.max_calls is not None and self._file.calls[server.name] >= budget.max_calls:
                raise RunError(
                    f"{server.role} {server.name}: all {budget.max_calls} requests of max_calls were made; raise it and resume"
                )
            self._file.calls[server.name] += 1

        server.ask_prompts(prompts, self._file.append_answer, count_call)

    def sum_spending(self) -> TextSpending:
        """Return what the model's answers have taken since the run began."""
        lines = self._file.list_answers(self._server.name)
        prompt_tokens = sum(line.prompt_tokens for line in lines)
        completion_tokens = sum(line.completion_tokens for line in lines)
        price = self._budget
        return TextSpending(
            calls=self._file.calls[self._server.name],
            failed=sum(bool(line.problem) for line in lines),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=(prompt_tokens * price.input_price + completion_tokens * price.output_price) / 1e6,
        )
