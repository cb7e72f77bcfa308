"""`trainer.compile` and `objective.compile`: what is fused changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opd import cluster
from opd.config import PipelineConfig
from opd.interfaces import Objective
from opd.losses import chunked
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.sampled import SampledKL
from opd.losses.top_k import TopK
from tests.integration.parts import (
    PROBE,
    config,
    mean_gap,
    plain_logprobs,
    rollouts,
    save,
    start_pool,
    start_trainer,
    stop,
    weights,
    with_n,
)
from tests.unit.opd.losses.test_gpu_path import make_case

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    from opd.config.sections import ClusterConfig

    with cluster.ray_session(ClusterConfig(), 8):
        yield


def test_a_layer_is_compiled_once_and_in_one_piece(tiny_model_dir: Path) -> None:
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    from opd.models.layouts import lay_out_packed
    from opd.train.compiled_layers import compile_layers

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="eager")
    sizes = [
        lay_out_packed([tuple(range(5, 5 + n)) for n in lengths])
        for lengths in ((20, 9, 13), (30, 31, 7), (11, 25, 12))
    ]
    before = [lm.base_model(**one.inputs(lm.dtype)).last_hidden_state for one in sizes]
    counters.clear()
    compile_layers(lm)
    for one, expected in zip(sizes, before, strict=True):
        found = lm.base_model(**one.inputs(lm.dtype)).last_hidden_state
        assert (found - expected).abs().max() < 1e-5
        assert not torch.equal(found, expected), "what is compared would be the same code"
    assert len(lm.base_model.layers) > 1 and counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("objective", [AdaptiveKL(), SampledKL(), TopK(k=4)], ids=str)
def test_the_loss_that_is_compiled_for_a_gpu_takes_chunks_of_any_length(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for a CPU here: once for the first length, and once for all others. For payloads that are cut and not multiplied with a
    head once more, because those of the first chunk begin with their memory."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(chunked, "_runs_on_gpu", lambda values: True)
    torch._dynamo.reset()
    counters.clear()
    for tokens in (16, 27, 39, 5):  # the last chunks have 11, 7 and 5
        grads = []
        for compiled in ("auto", False):
            c = make_case(objective, tokens, 211, dtype=torch.float32)
            c.loss(16, compiled=compiled).backward()
            grads.append((c.hidden_N_D.grad, c.head_V_D.grad))
        for found, want in zip(*grads, strict=True):
            assert found is not None and want is not None
            assert float((found - want).norm() / want.norm()) < 1e-6
    assert counters["stats"]["unique_graphs"] == (2 if isinstance(objective, AdaptiveKL) else 3)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "trees", "lora"])
def test_steps_of_a_compiled_trainer_are_those_of_an_eager_one(
    kind: str, ray: None, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    """Same losses and weights at one rank and at two; and a checkpoint goes on to the same bits in new processes."""
    student, expert = make_model_dir(tmp_path / "s", seed=0), make_model_dir(tmp_path / "e", seed=1)

    def settings(**trainer: Any) -> PipelineConfig:
        cfg = config(student, lr=1e-2, adam_epsilon=1e-3, **trainer)
        lora = {"student": {"model": student, "lora": {"r": 4, "alpha": 8}}} if kind == "lora" else {}
        return PipelineConfig.model_validate(with_n(cfg, 2 if kind == "trees" else 1).model_dump() | lora)

    pool, rows = start_pool(settings(), {"left": expert, "right": expert}), rollouts(32)
    ways: list[dict[str, Any]] = [{}, {"compile": True}, {"compile": True, "ranks": 2}]
    ways += [] if kind == "packed" else [{"compile": True, "gradient_checkpointing": True}]
    losses, after = [], []
    for number, way in enumerate(ways):
        trainer = start_trainer(settings(**way))
        losses.append([trainer.train_step(step, rows, pool.score(rows)).loss for step in STEPS[:2]])
        kept = save(trainer, tmp_path / f"checkpoint-{number}")
        losses[-1].append(trainer.train_step(STEPS[2], rows, pool.score(rows)).loss)
        after.append(weights(trainer, tmp_path / f"weights-{number}"))
        assert mean_gap(trainer.logprobs(PROBE), plain_logprobs(tmp_path / f"weights-{number}", PROBE)) < 1e-5
        stop(trainer)
        if way == {"compile": True}:
            again = start_trainer(settings(**way))
            again.load(kept)
            assert again.train_step(STEPS[2], rows, pool.score(rows)).loss == losses[-1][2]
            for name, weight in weights(again, tmp_path / "again").items():
                assert torch.equal(weight, after[-1][name]), name
            stop(again)
    stop(pool)
    assert losses[0][0] > 1.1 * losses[0][2] > 0.02, "it learns"
    for found, weight_of in zip(losses[1:], after[1:], strict=True):
        assert found == pytest.approx(losses[0], abs=1e-5)
        assert any(not torch.equal(weight, weight_of[name]) for name, weight in after[0].items()), "the same code ran"
        for name, weight in after[0].items():
            assert torch.allclose(weight, weight_of[name], rtol=0, atol=1e-5), name
