"""The table of what hooks cost."""

from __future__ import annotations

from benchmarks.hooks import ARMS, table


def test_every_arm_is_held_to_plain_torch() -> None:
    rows = {arm: {"forward_s": 0.01 * n, "backward_s": 0.03 * n} for n, arm in enumerate(ARMS, 1)}
    assert table(rows).splitlines()[2:] == [
        "| torch | 10 | 30 | 1.00 |",
        "| engine | 20 | 60 | 2.00 |",
        "| engine with every hook | 30 | 90 | 3.00 |",
    ]
