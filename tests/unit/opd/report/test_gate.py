"""Domains that fail a threshold."""

from __future__ import annotations

from typing import Any

import pytest

from opd.errors import ConfigError
from opd.report import Gate, recovered_share


def report(**domains: tuple[float, float, float]) -> dict[str, Any]:
    """name=(before, after, expert)"""
    return {
        "domains": {
            name: {"before": b, "after": a, "expert": e, "headroom": recovered_share(b, a, e)}
            for name, (b, a, e) in domains.items()
        }
    }


def test_domains_that_miss_are_named_with_their_numbers() -> None:
    gate = Gate(min_headroom=0.9, max_regression=0.02)
    found = gate.verdict(report(good=(0.2, 0.9, 0.9), short=(0.2, 0.55, 0.9), lost=(0.95, 0.9, 0.9)))
    assert found["passed"] is False
    assert found["failures"] == [
        "short: headroom 0.500 < 0.9 (before 0.200, merged 0.550, expert 0.900)",
        "lost: lost 0.050 > 0.02 (before 0.950, merged 0.900)",
    ]


def test_a_domain_can_fail_both() -> None:
    assert len(Gate(min_headroom=0.9, max_regression=0.02).list_failures(report(a=(0.5, 0.4, 0.9)))) == 2


def test_only_what_was_asked_for() -> None:
    found = report(short=(0.2, 0.55, 0.9), lost=(0.95, 0.9, 0.9))
    assert [f.split(":")[0] for f in Gate(min_headroom=0.9).list_failures(found)] == ["short"]
    assert [f.split(":")[0] for f in Gate(max_regression=0.0).list_failures(found)] == ["lost"]
    assert not Gate().has_thresholds


def test_exactly_at_a_threshold_passes() -> None:
    """0.98 - 0.96 is 0.020000000000000018, and (0.95 - 0.5) / (1 - 0.5) is 0.8999999999999999."""
    assert Gate(max_regression=0.02).list_failures(report(a=(0.98, 0.96, 1.0))) == []
    assert Gate(min_headroom=0.9).list_failures(report(a=(0.5, 0.95, 1.0))) == []
    assert len(Gate(max_regression=0.02).list_failures(report(a=(0.98, 0.959, 1.0)))) == 1


@pytest.mark.parametrize("value", [-0.01, 1.01, 90.0, float("nan")])
def test_a_threshold_is_a_share(value: float) -> None:
    with pytest.raises(ConfigError, match="--min-headroom\n"):
        Gate(min_headroom=value)
    with pytest.raises(ConfigError, match="--max-regression\n"):
        Gate(max_regression=value)


def test_a_gate_that_can_judge_no_domain_does_not_pass() -> None:
    domains = {"a": {"before": 0.5, "after": 0.5, "expert": 0.51, "headroom": None}}
    verdict = Gate(min_headroom=0.0).verdict({"domains": domains})
    assert not verdict["passed"] and "nothing to judge" in verdict["failures"][0]
    assert Gate(max_regression=0.1).verdict({"domains": domains})["passed"]
