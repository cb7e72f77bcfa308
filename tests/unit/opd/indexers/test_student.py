"""Indexers that learn in the student's own steps: what they learn from, and that nothing else feels it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.indexers.distillation import distil_indexer, run_groups
from opd.indexers.layers import LayerRunner, TextBatch, TextRow
from opd.indexers.student import LearningIndexersSpec, spread_weights
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.train import zero
from opd.train.batch import MicroBatch, build_micro_batch
from opd.train.student import Student
from tests.rows import make_row
from tests.sparse_models import TOPK, make_sparse_model

LENGTHS = {"a": (5, 25), "b": (3, 14)}
"""Tokens of each sample's prompt and response."""
WEIGHTS = {"a": 0.02, "b": 0.035}
SHARED = ["full", "shared", "full", "shared"]
SPEC = LearningIndexersSpec(loss_weight=0.5)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw_ids(length: int, seed: int) -> list[int]:
    return torch.randint(4, 70, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_batch(layout: str = "packed", samples: str = "ab", dtype: torch.dtype = torch.float64) -> MicroBatch:
    rows = []
    for seed, name in enumerate("ab"):
        prompt, response = LENGTHS[name]
        hidden = np.random.default_rng(seed).normal(size=(response, 2))
        rows.append(
            make_row(
                sample_id=name, step=1, domain="d", teacher="t", prompt_ids=draw_ids(prompt, seed),
                response_ids=draw_ids(response, 9 + seed), head="h", hidden_size=2,
                hidden=torch.tensor(hidden, dtype=dtype).numpy().tobytes(),
            )
        )  # fmt: skip
    return build_micro_batch([(row,) for row in rows if row.rollout.sample_id in samples], dtype, layout=layout)


def make_student(spec: LearningIndexersSpec | None = SPEC) -> Student:
    # Experts' kernels do not know float64.
    lm = make_sparse_model(4, indexer_types=SHARED, mlp_layer_types=["dense"] * 4)
    student = Student(lm, ReverseKL(), chunk=8, vocab_size=70, indexers=spec)
    zero._disable_randomness(student, False)
    return student


def make_inputs(batch: MicroBatch) -> tuple[dict[str, Head], Tensor]:
    """The teacher's head, and the tokens' weights."""
    head = Head(torch.randn(70, 2, generator=torch.Generator().manual_seed(0)), IDENTITY)
    weights = [WEIGHTS["a" if length == 30 else "b"] for length in batch.lengths]
    weight_N = torch.tensor([w for w, n in zip(weights, batch.trained_lengths, strict=True) for _ in range(n)])
    return {"h": head}, weight_N


def compute_loss(student: Student, batch: MicroBatch) -> Tensor:
    heads, weight_N = make_inputs(batch)
    loss: Tensor = student(batch, heads, {"divergence": weight_N})[0]
    return loss


def compute_gradients(student: Student, batch: MicroBatch) -> dict[str, Tensor]:
    student.zero_grad()
    compute_loss(student, batch).backward()
    return {name: p.grad.clone() for name, p in student.lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_no_other_gradient_changes(recompute: bool) -> None:
    alone, learning = make_student(None), make_student()
    for student in (alone, learning):
        zero._disable_randomness(student, recompute)
    without, found = (compute_gradients(student, make_batch()) for student in (alone, learning))
    indexers = {name for name, _ in learning.lm.named_parameters() if ".indexer." in name}
    assert len(indexers) == 2 * 5 and set(found) == set(without) | indexers and not indexers & set(without)
    assert all(torch.equal(found[name], without[name]) for name in without), "bit for bit"
    assert all(found[name].norm() > 0 for name in indexers)
    assert compute_loss(learning, make_batch()) > compute_loss(alone, make_batch())


def test_the_term_and_its_gradients_are_those_of_the_layers_alone() -> None:
    """Of each sample by itself, as `opd indexers train` computes them, weighed as in the objective."""
    student = make_student()
    found = compute_gradients(student, make_batch())
    total = student.indexers.take_sum()
    assert student.indexers.take_sum() == 0
    student.lm.zero_grad()
    runner, expected = LayerRunner(student.lm), 0.0
    for seed, (name, (prompt, response)) in enumerate(LENGTHS.items()):
        length = prompt + response
        row = TextRow(token_ids=(*draw_ids(prompt, seed), *draw_ids(response, 9 + seed)), num_prompt=1)
        batch = TextBatch.of_rows([row], torch.device("cpu"))
        divisor = (length - 1) / (WEIGHTS[name] * response)
        for served in run_groups(runner, batch, "FSFS", dense=False):
            sums = distil_indexer(served, TOPK, dense=False, chunk=7, divisor=2 * divisor / SPEC.loss_weight)
            expected += sums.loss / divisor / 2
    assert total == pytest.approx(expected, rel=1e-9)
    for name, param in student.lm.named_parameters():
        if ".indexer." in name:
            assert (found[name] - param.grad).abs().max() < 1e-9 * param.grad.abs().max(), name


def test_gradients_are_those_of_finite_differences() -> None:
    """Of the whole loss: the steps are too small to change a choice."""
    student, batch = make_student(), make_batch()
    exact = compute_gradients(student, batch)
    for name, param in student.lm.named_parameters():
        if ".indexer." not in name:
            continue
        index = int(exact[name].abs().argmax())
        losses = []
        for step in (1e-5, -1e-5):
            param.data.view(-1)[index] += step
            losses.append(float(compute_loss(student, batch).detach()))
            param.data.view(-1)[index] -= step
        assert float(exact[name].view(-1)[index]) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4), name


@pytest.mark.parametrize("layout", ["padded", "packed_indexed"])
def test_the_layout_does_not_matter(layout: str) -> None:
    student = make_student()
    packed, other = (compute_gradients(student, make_batch(kind)) for kind in ("packed", layout))
    for name, gradient in packed.items():
        assert (gradient - other[name]).abs().max() < 1e-9 * gradient.abs().max(), name


def test_a_rows_positions_share_its_weight() -> None:
    batch = make_batch("padded")
    weight_B_T = spread_weights(batch, torch.tensor([1.0] * 25 + [2.0] * 14))
    assert weight_B_T.shape == (2, 30) and (weight_B_T[:, 0] == 0).all() and (weight_B_T[1, 17:] == 0).all()
    assert torch.allclose(weight_B_T[0, 1:], torch.tensor(25 / 29))
    assert torch.allclose(weight_B_T[1, 1:17], torch.tensor(28 / 16))


def test_a_rank_without_rows_gives_zeros() -> None:
    """DeepSpeed wants a gradient of every weight on every rank."""
    student = make_student()
    found = compute_gradients(student, make_batch(samples=""))
    indexers: dict[str, Any] = {name: gradient for name, gradient in found.items() if ".indexer." in name}
    assert len(indexers) == 10 and all((gradient == 0).all() for gradient in indexers.values())
