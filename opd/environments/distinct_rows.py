"""The choice of rows with different prompts, for whatever makes prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from opd.errors import ConfigError

R = TypeVar("R", bound=Mapping[str, Any])


def take_unique(drawn: Iterable[R], count: int, setting: str) -> list[R]:
    """Return the first `count` rows whose prompts all differ; `drawn` must be finite.

    Raises: ConfigError if `drawn` ends before that.
    """
    rows: dict[str, R] = {}
    for row in drawn:
        if len(rows) == count:
            break
        rows.setdefault(json.dumps(row["prompt"]), row)
    if len(rows) < count:
        raise ConfigError.at(
            setting,
            found=f"only {len(rows)} different prompts",
            wanted=f"{count} of them",
            fix="ask for fewer rows",
        )
    return list(rows.values())
