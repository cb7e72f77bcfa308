"""The default queue lets the trainer work while teachers score: counted with clocks in place of cores."""

from __future__ import annotations

import pytest

from benchmarks.timeline import simulate_step, workload


@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
def test_nearly_every_part_is_taken_while_a_round_trains(tokens: int) -> None:
    timeline = simulate_step(workload(f"trainer.micro_batch_tokens={tokens}"))
    assert timeline.parts == 512
    assert timeline.overlapped == timeline.parts - timeline.first >= 0.95 * timeline.parts
    assert timeline.step_s < 0.9 * timeline.apart_s


def test_a_queue_of_less_than_a_round_overlaps_next_to_nothing() -> None:
    timeline = simulate_step(workload("trainer.micro_batch_tokens=16384", "teachers.queue=256MiB"))
    assert timeline.overlapped < 0.01 * timeline.parts
