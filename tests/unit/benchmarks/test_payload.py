"""A step's bytes that go through the driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_driver_touches_less_than_two_percent_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("payload", None)
    import payload

    for width, response in ((3584, 512), (576, 256)):
        states = payload.Payload("hidden_states", width, "bfloat16")
        seen, total = payload.count_driver_bytes(10, 300, response, states)
        assert total > 10 * response * 2 * width
        assert 0 < seen < 0.02 * total
