"""The tasks and the arithmetic of `benchmarks.indexers`."""

from __future__ import annotations

import random

import pytest

from benchmarks.indexers import (
    COPIED,
    GLM_5_2,
    LENGTH,
    MILLION,
    NEEDLES,
    PUBLISHED,
    TASKS,
    TOPK,
    VALUES,
    count_flops,
    draw_mixture,
    format_interval,
    make_batch,
)


def test_sequences_are_at_least_eight_times_what_is_chosen() -> None:
    assert LENGTH >= 8 * TOPK
    assert {len(draw(random.Random(0))) for draw in TASKS.values()} == {LENGTH}


def test_what_has_to_be_found_is_counted_and_nothing_else() -> None:
    batch = make_batch(draw_mixture(4, "x"))
    copies, needles = batch.counted_B_T[:2], batch.counted_B_T[2:]
    assert copies.sum(1).tolist() == [COPIED] * 2 and bool(copies[:, -COPIED:].all())
    assert needles.sum(1).tolist() == [NEEDLES] * 2
    values = batch.ids_B_T[2:][needles]
    assert bool(((values >= VALUES.start) & (values < VALUES.stop)).all())
    for row, counted in zip(batch.ids_B_T[2:].tolist(), needles.tolist(), strict=True):
        asked = [token for token, count in zip(row, counted, strict=True) if count]
        assert set(asked) <= set(row[: LENGTH - 3 * NEEDLES])


def test_flops_are_those_of_the_weights_and_the_scores() -> None:
    from transformers import GlmMoeDsaConfig

    from opd.indexers.patterns import derive_pattern

    config = GlmMoeDsaConfig()
    full, shared = "F" * 78, derive_pattern(78, GLM_5_2["index_topk_freq"], GLM_5_2["index_skip_topk_offset"])
    every, some = (count_flops(config, pattern, MILLION) for pattern in (full, shared))
    assert every["index scores"] == pytest.approx(2 * 78 * 32 * 128 * MILLION)
    assert some["index scores"] == pytest.approx(every["index scores"] * 21 / 78)
    assert every["weights"] == pytest.approx(80.2e9, rel=1e-2), "two for each of 40 billion weights in use"
    assert every["attention"] == pytest.approx(2 * 78 * 64 * 2048 * (512 + 64 + 512))
    ratio = sum(every.values()) / sum(some.values())
    assert 2.6 < ratio < PUBLISHED


def test_an_interval_is_that_of_student() -> None:
    assert format_interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert format_interval([1.0]) == "1.000"
