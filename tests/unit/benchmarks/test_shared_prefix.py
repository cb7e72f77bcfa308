"""The benchmark of shared prompts without an engine: its responses, what each way has to compute, and its medians."""

from __future__ import annotations

import pytest

from benchmarks.shared_prefix import SEPARATE, SHARED, Case, Time, sizes, summary


def test_both_ways_have_the_same_responses_and_one_computes_each_prompt_once() -> None:
    case = Case(
        prompts=3, n=4, prompt_tokens=150, new_tokens=8, dtype="float32", micro_batch_tokens=512, vocab_size=49152
    )
    rollouts = case.rollouts(0)
    assert [len({r.prompt_ids for r in rollouts[i : i + 4]}) for i in (0, 4, 8)] == [1, 1, 1]
    assert len({r.response_ids for r in rollouts}) == 12 and len({r.sample_id for r in rollouts}) == 12
    assert case.rollouts(0) == rollouts != case.rollouts(1)
    assert sorted(row.length for row in sizes(rollouts, SHARED)) == [150 + 4 * 8] * 3
    assert sorted(row.length for row in sizes(rollouts, SEPARATE)) == [158] * 12


def test_ratios_are_within_a_round() -> None:
    walls = {SHARED: (1.0, 10.0, 2.0), SEPARATE: (3.0, 50.0, 8.0)}
    times = [
        Time("scoring", way, walls[way][number], 2 * walls[way][number], 100 if way == SHARED else 300)
        for number, ways in enumerate([(SHARED, SEPARATE), (SEPARATE, SHARED), (SHARED, SEPARATE)])
        for way in ways
    ]
    found = summary(times, [(1.0, 1.0), (2.002, 2.0), (3.0, 3.0)])
    assert found["scoring"]["speedup"] == found["scoring"]["speedup_cpu"] == 4.0
    assert found["scoring"][SHARED] == {"wall_s": 2.0, "cpu_s": 4.0, "tokens": 100}
    assert found["largest_loss_difference"] == pytest.approx(1e-3)
