"""The section `draft`, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd.config import PipelineConfig
from tests.unit.opd.config.test_keep import DATA


def make(**changes: Any) -> PipelineConfig:
    return PipelineConfig.model_validate({**DATA, "keep": None, **changes})


def test_a_draft_is_off_unless_it_is_asked_for() -> None:
    assert make().draft is None and make().rollout.num_speculative_tokens == 0
    config = make(draft={}, rollout={"num_speculative_tokens": 2})
    assert config.draft is not None and config.draft.kind == "eagle3"
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rollout": {"num_speculative_tokens": 3}}, "a draft has to learn before engines guess with it"),
        (
            {"draft": {"kind": "shared_kv"}, "rollout": {"num_speculative_tokens": 3}},
            "vLLM does not serve the other kind",
        ),
        (
            {"draft": {}, "trainer": {"steps": 1, "samples_per_step": 4, "ranks": 2, "sequence_parallel_size": 2}},
            "which reads whole rows",
        ),
        ({"draft": {"loss": "kl"}}, "end_to_end_tv"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        make(**changes)
