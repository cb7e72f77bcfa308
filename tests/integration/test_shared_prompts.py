"""Several responses a prompt on the real engines: the prompt is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.records.types import Prompt
from tests.integration.parts import config, plain_logprobs, start_engine, stop, with_n


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


@pytest.mark.slow
def test_responses_to_a_prompt_read_once_are_those_of_prompts_read_alone(
    tiny_model_dir: Path, tiny_tokenizer: Any, ray: None
) -> None:
    prompts = [
        Prompt(id=f"left/{i}", domain="left", token_ids=tuple(5 + (i + 7 * k) % 60 for k in range(40)))
        for i in range(3)
        for _ in range(4)
    ]
    batches = []
    for n in (1, 4):
        engine = start_engine(with_n(config(tiny_model_dir), n), tiny_model_dir, tiny_tokenizer)
        batches.append(engine.generate(prompts, step=1, policy_version=0).rollouts)
        stop(engine)
    alone, shared = batches
    assert [r.response_ids for r in shared] == [r.response_ids for r in alone]
    assert len({r.response_ids for r in shared}) > 6, "seeds of their own"
    assert [r.group for r in shared] == [f"000001/left/{i}" for i in range(3) for _ in range(4)]
    whole = plain_logprobs(tiny_model_dir, [(*r.prompt_ids, *r.response_ids) for r in shared])
    for rollout, logprobs in zip(shared, whole, strict=True):
        assert rollout.behaviour_logprobs == pytest.approx(logprobs[len(rollout.prompt_ids) - 1 :], abs=1e-4)
