"""Changes that would make a merge fit."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ByteSize

from pipelines.plan.advice import needs_less_memory


@pytest.mark.parametrize(
    "value, current, less",
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "bfloat16", False),
        ("1GiB", ByteSize(3 << 29), True),
        ("1GiB", ByteSize(1 << 30), False),
        ("2GiB", ByteSize(3 << 29), False),
        ("2GiB", ByteSize(3 << 30), True),
        (True, False, True),
        (True, True, False),
        (64, 256, True),
        (256, 64, False),
        ({"r": 16}, None, True),
        ({"r": 16}, object(), False),
    ],
)
def test_a_change_is_compared_with_what_the_key_has_now(value: Any, current: Any, less: bool) -> None:
    assert needs_less_memory(value, current) == less
