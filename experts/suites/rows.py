"""The row that every suite makes."""

from __future__ import annotations

from typing import Any, TypedDict

Messages = list[dict[str, str]]


class SuiteRow(TypedDict):
    """One JSONL line in TRL's columns.

    Example: {"prompt": "rev hxkq=", "completion": "qkxh", "answer": "qkxh", "metadata": {"suite": "letters"}}
    """

    prompt: str | Messages
    completion: str | Messages
    answer: str
    metadata: dict[str, Any]
