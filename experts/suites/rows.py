"""The row that every suite makes, and the choice of rows with different prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypedDict

from opd.errors import ConfigError

Messages = list[dict[str, str]]


class Row(TypedDict):
    """One JSONL line in TRL's columns.

    Example: {"prompt": "rev hxkq=", "completion": "qkxh", "answer": "qkxh", "metadata": {"suite": "letters"}}
    """

    prompt: str | Messages
    completion: str | Messages
    answer: str
    metadata: dict[str, Any]


def take_unique(drawn: Iterable[Row], count: int, where: str) -> list[Row]:
    """The first `count` rows whose prompts all differ; `drawn` must be finite.

    Raises: ConfigError if `drawn` ends before that.
    """
    rows: dict[str, Row] = {}
    for row in drawn:
        if len(rows) == count:
            break
        rows.setdefault(json.dumps(row["prompt"]), row)
    if len(rows) < count:
        raise ConfigError.at(
            where,
            found=f"only {len(rows)} different prompts",
            wanted=f"{count} for train and eval together",
            fix="ask for fewer rows",
        )
    return list(rows.values())
