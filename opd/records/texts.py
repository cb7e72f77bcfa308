"""Records of models on servers that write text, experts and judges: an answer, and what a model's answers have cost."""

from __future__ import annotations

from dataclasses import dataclass

from opd.records.sums import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """The answer of a model to a prompt, or why there is none that can be used."""

    expert: str
    """The expert's name, or the domain that the judge is for."""
    prompt_id: str
    text: str = ""
    finished: bool = True
    """True if the expert ended the answer itself, False if it was cut at its limit of tokens."""
    model: str = ""
    """Name of the model, as the server gives it."""
    problem: str = ""
    """Reason why the answer cannot be used; empty if it can."""
    answered: bool = True
    """False if every request failed in a way that may pass, so that the expert may be asked again."""
    attempts: int = 1
    """Requests that were sent for it."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as the server counts them in its own."""
    completion_tokens: int = 0
    """Tokens of the answer, counted alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpending(Sums):
    """Calls, tokens and money that an expert's answers have taken since the run began."""

    calls: int = 0
    """Requests, those that failed among them."""
    failed: int = 0
    """Answers that could not be used."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """Money, by the price that the user stated."""
