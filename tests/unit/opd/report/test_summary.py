"""report.json: other tools read it, so its keys and its arithmetic are fixed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opd.report import build_report, headroom, table_rows


@pytest.mark.parametrize(
    ("before", "after", "expert", "share"),
    [
        (0.2, 0.8, 1.0, 0.75),
        (0.2, 0.2, 1.0, 0.0),
        (0.2, 1.0, 1.0, 1.0),
        (0.5, 0.25, 1.0, -0.5),
        (0.0, 1.0, 0.5, 2.0),
        (0.5, 0.9, 0.5, None),
        (0.9, 0.9, 0.5, None),
    ],
)
def test_headroom(before: float, after: float, expert: float, share: float | None) -> None:
    assert headroom(before, after, expert) == (None if share is None else pytest.approx(share))


def report(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "two",
        "before": {"a": 0.2, "b": 0.5, "c": 0.9},
        "expert": {"a": 1.0, "b": 1.0, "c": 0.8},
        "after": {"a": 0.6, "b": 1.0, "c": 0.9},
        "records": [
            {"response_tokens": 100, "phase_s": {"rollout": 1.0, "train": 2.0}},
            {"response_tokens": 50, "phase_s": {"rollout": 1.0, "checkpoint": 1.0}},
        ],
        "wall_s": 12.345,
        "versions": {"torch": "2"},
    }
    return build_report(**values | changes)


def test_the_keys_are_a_contract() -> None:
    found = report()
    assert set(found) == {
        "name",
        "steps",
        "domains",
        "mean_headroom",
        "worst_headroom",
        "wall_s",
        "phase_s",
        "response_tokens",
        "response_tokens_per_s",
        "versions",
    }
    assert all(set(d) == {"before", "after", "expert", "headroom"} for d in found["domains"].values())
    assert json.loads(json.dumps(found)) == found


def test_the_numbers() -> None:
    found = report()
    assert (found["name"], found["steps"], found["wall_s"]) == ("two", 2, 12.3)
    assert found["domains"]["a"] == {"before": 0.2, "after": 0.6, "expert": 1.0, "headroom": pytest.approx(0.5)}
    assert found["domains"]["c"]["headroom"] is None
    assert found["mean_headroom"] == pytest.approx(0.75)
    assert found["worst_headroom"] == pytest.approx(0.5)
    assert found["phase_s"] == {"rollout": 2.0, "train": 2.0, "checkpoint": 1.0}
    assert (found["response_tokens"], found["response_tokens_per_s"]) == (150, 30.0)


def test_nothing_to_recover_is_null() -> None:
    found = report(before={"a": 1.0}, expert={"a": 1.0}, after={"a": 1.0})
    assert found["mean_headroom"] is None
    assert found["worst_headroom"] is None


def test_a_run_without_exams_and_records() -> None:
    found = report(before={}, expert={}, after={}, records=[])
    assert (found["domains"], found["mean_headroom"], found["response_tokens_per_s"]) == ({}, None, 0.0)
    assert table_rows(found) == []


def test_the_table_has_a_row_a_domain_and_the_means() -> None:
    rows = table_rows(report())
    assert rows[0] == ("a", "0.20", "1.00", "0.60", "50 %")
    assert rows[2][-1] == "-"
    assert rows[-1] == ("mean", "0.53", "0.93", "0.83", "75 %")
