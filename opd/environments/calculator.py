"""Arithmetic with a calculator: the tool gives exact results, the policy has to ask for them and to say the answer.

An answer is a turn without a call; its last number counts. A wrong one costs one of a few tries.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pydantic import Field

from opd.environments.game import FormOptions, TaskRow, draw_tasks, make_metadata_error
from opd.environments.question_game import Asking, Judgement, format_turn_with_call
from opd.records.environments import Action, Tool, ToolCall
from opd.verifiers.numeric import last_number

LONGEST = 200
"""The most characters of an expression, so that none is nested too deeply for Python's parser."""
MOST_DIGITS = 60
"""The most digits of the numerator or denominator of any result."""
DECIMALS = 6
"""Decimal places to which a result is rounded."""
OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATE = Tool(
    name="calculate",
    description="Work out an expression exactly. Knows + - * / and brackets.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example 12*(7-3)"}},
        "required": ["expression"],
    },
)


class CalculatorOptions(FormOptions):
    terms: int = Field(3, ge=2, le=6)
    """Numbers of a question."""
    digits: int = Field(3, ge=1, le=6)
    """Digits of each at most. The form `characters` has + and - only, its alphabet has no sign for more."""


class Calculator(Asking):
    """Work out sums and products that are too long for the head, with a calculator as a tool."""

    name = "calculator"
    Options = CalculatorOptions
    tools = (CALCULATE,)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin. Raises: PromptError for metadata without a result."""
        try:
            self._result = last_number(str(metadata["result"]))
            self._task = {"expression": str(metadata["expression"]), "form": metadata["form"]}
        except KeyError as error:
            raise make_metadata_error(self.name, f"no key {error}", "`expression`, `result` and `form`") from None
        self._results: list[str] = []
        return self._begin()

    def called(self, call: ToolCall) -> str:
        """Work out what was asked."""
        result = evaluate_expression(str(call.arguments["expression"]))
        self._results.append(result)
        return f"{result}=" if self._task["form"] == "characters" else result

    def judge(self, text: str) -> Judgement:
        right = self._result is not None and last_number(text) == self._result
        if self._task["form"] == "characters":
            return Judgement(right, "no, calculate or a number=")
        return Judgement(right, "That is not right. Use the tool `calculate` for the whole expression, then answer.")

    def solve(self) -> Action:
        """Ask for the whole expression; answer once its result was seen."""
        if self._result is not None and any(last_number(result) == self._result for result in self._results):
            return Action(text=f"{self._result}")
        arguments = {"expression": self._task["expression"]}
        turn = format_turn_with_call(CALCULATE.name, arguments)
        is_short = self._task["form"] == "characters"
        return replace(turn, text=f"calculate {arguments['expression']}") if is_short else turn

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. Raises: ConfigError."""
        return draw_tasks(cls.name, CalculatorOptions, options, _draw_expressions, n, seed)


def evaluate_expression(expression: str) -> str:
    """Return the exact result as a decimal number with at most six places, or what is wrong with the expression, in words."""
    text = expression.strip().replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{MINUS SIGN}", "-")
    if len(text) > LONGEST:
        return f"error: {len(text)} characters, at most {LONGEST} can be worked out"
    if not re.fullmatch(r"[\d+\-*/(). ]+", text, re.ASCII):
        return "error: numbers, + - * / and brackets can be worked out"
    try:
        return _format_number(_evaluate_node(ast.parse(text, mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: this is no expression of numbers, + - * / and brackets"


def _evaluate_node(node: ast.expr) -> Fraction:
    """Compute the value of a node. Raises: ValueError for anything but numbers, four operations and signs, or for a number too long."""
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        inner = _evaluate_node(node.operand)
        return inner if isinstance(node.op, ast.UAdd) else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        result = OPERATORS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
        if max(abs(result.numerator), result.denominator) < 10**MOST_DIGITS:
            return result
    raise ValueError("no expression that can be worked out")


def _format_number(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**DECIMALS)
    sign, digits = "-" if scaled < 0 else "", str(abs(scaled)).rjust(DECIMALS + 1, "0")
    return f"{sign}{digits[:-DECIMALS]}.{digits[-DECIMALS:]}".rstrip("0").rstrip(".")


def _draw_expressions(rng: random.Random, options: CalculatorOptions, limit: int) -> Iterator[TaskRow]:
    signs = "+-" if options.form == "characters" else "+-*"
    for _ in range(limit):
        numbers = [str(rng.randint(2, 10**options.digits - 1)) for _ in range(options.terms)]
        expression = numbers[0] + "".join(rng.choice(signs) + number for number in numbers[1:])
        result = evaluate_expression(expression)
        question = f"Work out {expression}. Answer with the result only."
        yield {
            "prompt": f"calc {expression}="
            if options.form == "characters"
            else [{"role": "user", "content": question}],
            "answer": result,
            "metadata": {"expression": expression, "result": result, "form": options.form},
        }
