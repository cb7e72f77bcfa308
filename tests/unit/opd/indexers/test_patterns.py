"""Patterns, and the configs that transformers and vLLM read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.errors import ConfigError
from opd.indexers.patterns import (
    check_pattern,
    count_full,
    derive_pattern,
    list_groups,
    read_pattern,
    set_pattern,
    spread_pattern,
)
from tests.sparse_models import make_sparse_config

GLM_5_2 = [0, 1, 2, *range(6, 75, 4)]
"""The layers that choose in GLM-5.2 (78 layers, frequency 4, offset 3), as published."""


def full_layers(pattern: str) -> list[int]:
    return [i for i, letter in enumerate(pattern) if letter == "F"]


def test_the_schedule_of_glm_5_2_gives_the_published_layers() -> None:
    pattern = derive_pattern(78, freq=4, offset=3)
    assert full_layers(pattern) == GLM_5_2 and GLM_5_2[-1] == 74


@pytest.mark.parametrize(("freq", "offset"), [(1, 2), (2, 2), (4, 3), (3, 1), (4, 0)])
def test_a_schedule_means_what_transformers_makes_of_it(freq: int, offset: int) -> None:
    config = make_sparse_config(12, index_topk_freq=freq, index_skip_topk_offset=offset)
    assert derive_pattern(12, freq, offset) == read_pattern(config)


@pytest.mark.parametrize("schedule", [{}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}])
def test_transformers_and_vllm_read_the_same_pattern(tmp_path: Path, schedule: dict[str, int]) -> None:
    """vLLM skips the indexer of a layer by the rule of `deepseek_v2.py`, which is repeated here."""
    from transformers import AutoConfig
    from vllm.transformers_utils.config import get_config

    make_sparse_config(8, **schedule).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(set_pattern(json.loads(file.read_text()), "FFSSFSSS")))
    of_vllm = get_config(str(tmp_path), trust_remote_code=False)
    assert read_pattern(AutoConfig.from_pretrained(tmp_path)) == "FFSSFSSS"
    assert of_vllm.index_topk_pattern == "FFSSFSSS"
    assert [of_vllm.index_topk_pattern[i] == "S" for i in range(8)] == [
        kind == "shared" for kind in of_vllm.indexer_types
    ]


def test_a_uniform_pattern_keeps_as_many_as_asked_for() -> None:
    assert spread_pattern(8, 2) == "FSSSFSSS" == derive_pattern(8, freq=4, offset=1)
    assert [spread_pattern(7, n).count("F") for n in range(1, 8)] == list(range(1, 8))
    assert all(spread_pattern(7, n)[0] == "F" for n in range(1, 8))


def test_a_share_is_rounded_up() -> None:
    assert [count_full(share, 10) for share in (0.01, 0.1, 0.25, 0.3, 1.0)] == [1, 1, 3, 3, 10]


def test_groups_are_a_full_layer_and_the_shared_ones_behind_it() -> None:
    assert [list(group) for group in list_groups("FFSSFS")] == [[0], [1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("FF", "2 letters"), ("FXFF", "F \\(chooses tokens\\)"), ("SFFF", "S for the first"), ("FFSF", "layer 1")],
)
def test_a_pattern_that_does_not_fit_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pattern(pattern, "FSFF", "--pattern")
