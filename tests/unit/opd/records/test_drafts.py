"""Figures made of an engine's counts of kept guesses."""

from __future__ import annotations

import pytest

from opd.records.drafts import add_histograms, compute_accepted_length, summarise_engine


def test_a_pass_writes_one_token_more_than_it_keeps_guesses() -> None:
    assert compute_accepted_length((2, 1, 1)) == 1 + (0 * 2 + 1 + 2) / 4
    assert compute_accepted_length(()) == compute_accepted_length((0, 0)) == 1


def test_histograms_add_up_and_empty_ones_do_not_count() -> None:
    assert add_histograms([(1, 2), (), (3, 4)]) == (4, 6)
    assert add_histograms([(), ()]) == ()


def test_a_summary_is_by_domain_and_by_guess() -> None:
    assert summarise_engine({"a": (2, 1, 1), "b": (0, 0, 4)}) == pytest.approx(
        {
            "engine_accepted_length": 1 + 11 / 8,
            "engine_kept_1": 6 / 8,
            "engine_kept_2": 5 / 8,
            "engine_accepted_length/a": 1.75,
            "engine_accepted_length/b": 3.0,
        }
    )
    assert summarise_engine({}) == summarise_engine({"a": ()}) == {}
