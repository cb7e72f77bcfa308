"""The section `evaluate`: when the student sits its exams, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import PathOrName, Strict


class LMEvalConfig(Strict):
    tasks: list[Annotated[PathOrName, Field(min_length=1)]] = []
    """Names of the harness, such as `gsm8k`, or YAML files of yours."""
    model: Literal["hf", "vllm"] = "hf"
    """Adapter of the harness that runs the model."""
    limit: int | None = Field(None, ge=1)
    """Questions per task, for a first look; default: all."""
    timeout_s: float = Field(14400, gt=0, allow_inf_nan=False)
    """Deadline for all tasks of one model."""


def _read_lm_eval_tasks(value: Any) -> Any:
    return {"tasks": value} if isinstance(value, list) else value


class EvaluateConfig(Strict):
    every: int = Field(0, ge=0)
    """Steps between exams during the merge; 0: only before and after."""
    samples: int = Field(100, ge=1)
    """Held-out prompts per domain, the first ones of the file."""
    n: int = Field(1, ge=1)
    """Answers to each prompt."""
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    """0: greedy."""
    pass_at: list[Annotated[int, Field(ge=1)]] = [1]
    """For each k up to `n`: the chance that one of k answers is right."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Answer limit; default: the rollout's."""
    cache: bool = True
    """Take over equal exams of start student and experts from other runs, see docs/evaluation.md."""
    lm_eval: Annotated[LMEvalConfig, BeforeValidator(_read_lm_eval_tasks)] = LMEvalConfig()
    """Tasks of lm-evaluation-harness for start student and merged model; a list will do."""

    @model_validator(mode="after")
    def _check_answers_differ(self) -> EvaluateConfig:
        if self.n > 1 and self.temperature == 0:
            raise PydanticCustomError(
                "temperature",
                "above 0 for n: {n} answers to each prompt; greedy ones are all the same",
                {"n": self.n, "where": "evaluate.temperature", "found": "0"},
            )
        if max(self.pass_at, default=1) > self.n:
            raise PydanticCustomError(
                "pass_at",
                "at most n, which is {n}: pass@k needs k answers to a prompt",
                {"n": self.n, "where": "evaluate.pass_at", "found": str(self.pass_at)},
            )
        return self
