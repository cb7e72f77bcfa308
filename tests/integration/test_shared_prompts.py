"""Several responses a prompt on the real engines: the prompt is computed once, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opd import cluster
from opd.config import PipelineConfig
from opd.types import Prompt, Rollout
from tests.integration.test_engines import (
    config,
    plain_logprobs,
    rollouts,
    start_engine,
    start_pool,
    start_trainer,
    stop,
    weights,
)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


def responses(n: int) -> list[Rollout]:
    """48 made-up responses, `n` to each prompt."""
    made = rollouts(48)
    # The domain alternates, so a prompt goes on to rows of its own domain: two apart.
    prompts = [made[i % 2 + 2 * n * (i // (2 * n))].prompt_ids * 5 for i in range(48)]
    return [dataclasses.replace(r, prompt_ids=p) for r, p in zip(made, prompts, strict=True)]


def with_n(given: PipelineConfig, n: int) -> PipelineConfig:
    return given.model_copy(update={"rollout": given.rollout.model_copy(update={"n": n})})


def test_a_step_is_the_same_with_shared_prompts_and_on_any_number_of_ranks(
    tmp_path: Path, make_model_dir: Make, ray: None
) -> None:
    """Adam's usual epsilon would blow rounding noise up to full steps; a large one compares gradients."""
    student, expert = make_model_dir(tmp_path / "s"), make_model_dir(tmp_path / "e", seed=1)
    rows = responses(4)
    found = {}
    for name, n, ranks, tokens in (("separate", 1, 1, 100_000), ("shared", 4, 1, 100_000), ("ranks", 4, 2, 128)):
        cfg = with_n(config(student, lr=1e-2, adam_epsilon=1e-3, ranks=ranks, micro_batch_tokens=tokens), n)
        trainer, pool = start_trainer(cfg), start_pool(cfg, {"left": expert, "right": expert})
        layout = "packed" if n == 1 else "shared"
        assert {trainer.layout.layout, *(p.layout for p in pool.layouts.values())} == {layout}
        reports = [trainer.train_step(step, rows, pool.score(rows)) for step in (1, 2)]
        found[name] = reports, weights(trainer, tmp_path / name)
        stop(trainer, pool)
    slow, weights_slow = found.pop("separate")
    for reports, trained in found.values():
        for a, b in zip(slow, reports, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-5)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
            for domain, stats in a.domains.items():
                other = dataclasses.asdict(b.domains[domain])
                assert dataclasses.asdict(stats) == pytest.approx(other, rel=1e-5, abs=1e-4, nan_ok=True)
        for name, weight in weights_slow.items():
            assert torch.allclose(weight, trained[name], rtol=0, atol=1e-5), name


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
