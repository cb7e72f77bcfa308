"""Domains with objectives of their own in one step: its gradient is the sum of what each gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.config import PipelineConfig
from opd.losses.chunked import Loss, LossHead, Tokens
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.payloads.aligned_states import AlignedStates
from opd.stream.schema import TargetRow
from opd.train import deepspeed
from opd.train.batch import DIVERGENCE, MicroBatch, build_micro_batch, gather_samples, leave_one_out_baselines
from opd.train.components import Component
from opd.train.totals import weigh_rows
from opd.vocabularies.spelling import Spelling, build_tables
from pipelines.specs import trainer_spec
from tests.rows import make_rollout, make_row
from tests.unit.opd.train.test_rank import FakeRank

VOCABULARY, WIDTH, TEACHER_WIDTH = 11, 6, 4
OBJECTIVES: dict[str, dict[str, Any]] = {
    "near": {"kind": "reverse_kl"},
    "far": {"kind": "sampled", "baseline": "leave_one_out"},
    "foreign": {"kind": "aligned_kl"},
    "top": {"kind": "top_k", "k": 3, "normalize": "sequence_mean"},
    "wide": {"kind": "jsd"},
}
PAYLOADS = {"far": "sampled_logprobs", "foreign": "aligned_states", "top": "top_k"}
HEAD_V_D = torch.randn(VOCABULARY, TEACHER_WIDTH, generator=torch.Generator().manual_seed(5))
SPELLING = Spelling([*((i,) for i in range(VOCABULARY - 3)), (0, 1), (0, 2)], VOCABULARY)
TABLES = torch.from_numpy(build_tables(SPELLING).pack())
HEADS = {"h": Head(HEAD_V_D, IDENTITY), "foreign": Head(HEAD_V_D, IDENTITY, TABLES)}


def config(domains: tuple[str, ...] = tuple(OBJECTIVES)) -> PipelineConfig:
    experts: dict[str, Any] = {name: {"model": "m", "domain": name} for name in OBJECTIVES}
    for name, payload in PAYLOADS.items():
        experts[name]["engine"] = {"kind": "transformers", "payload": payload}
    return PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": experts,
            "domains": {name: {"objective": OBJECTIVES[name]} if name in domains else {} for name in OBJECTIVES},
            "objective": OBJECTIVES["near"],
            "trainer": {"ranks": 1, "steps": 4, "samples_per_step": 10},
        }
    )


def row(number: int, domain: str, rng: np.random.Generator) -> TargetRow:
    """A response of its own length, with a made-up answer in the payload of its domain."""
    num = 2 + number % 4
    answers: dict[str, Any] = {
        "hidden": rng.normal(size=(num, TEACHER_WIDTH)).astype(np.float32).tobytes(),
        "hidden_size": TEACHER_WIDTH,
        "head": "h",
    }
    if domain == "far":
        answers = {"teacher_logprobs": (-rng.random(num) * 3).tolist()}
    elif domain == "top":
        ids = np.stack([rng.permutation(VOCABULARY)[:3] for _ in range(num)])
        answers = {"topk_ids": ids.flatten().tolist(), "topk_logprobs": [-1.5, -2.0, -2.5] * num}
    elif domain == "foreign":
        return make_foreign_row(number, num, rng)
    return make_row(
        sample_id=f"{domain}/{number}", step=1, domain=domain, teacher=domain, policy_version=0, prompt_ids=[1, 2],
        response_ids=rng.integers(VOCABULARY, size=num).tolist(), behaviour_logprobs=[-2.0] * num, **answers,
    )  # fmt: skip


def make_foreign_row(number: int, num: int, rng: np.random.Generator) -> TargetRow:
    """A response whose first two tokens are one of the teacher's, and whose last one is two of them."""
    hidden = rng.normal(size=(num, TEACHER_WIDTH)).astype(np.float32).tobytes()
    answer = AlignedStates(
        head="foreign",
        hidden_size=TEACHER_WIDTH,
        hidden=hidden,
        student_counts=[2, *[1] * (num - 2)],
        teacher_counts=[*[1] * (num - 2), 2],
        spelt=[True] * (num - 1),
        last_ids=[-1] * (num - 2) + [0],
        text_logprobs=(-rng.random(num) * 3).tolist(),
    )
    rollout = make_rollout(
        sample_id=f"foreign/{number}", step=1, domain="foreign", prompt_ids=[1, 2],
        response_ids=rng.integers(VOCABULARY, size=num).tolist(), behaviour_logprobs=[-2.0] * num,
    )  # fmt: skip
    return TargetRow(rollout=rollout, teacher="foreign", answer=answer)


@pytest.fixture
def rows() -> list[TargetRow]:
    rng = np.random.default_rng(0)
    return [row(number, domain, rng) for domain in sorted(OBJECTIVES) for number in range(1, 4)]


def gradients(head: LossHead, batch: MicroBatch, weight_N: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient by hidden states and by the head."""
    hidden_N_D = states.clone().requires_grad_()
    head.weight.grad = None
    tokens = Tokens(batch.token_N, weight_N, batch.behaviour_N)
    value, _ = head(hidden_N_D, tokens, batch.blocks, HEADS)
    value.backward()
    assert hidden_N_D.grad is not None and head.weight.grad is not None
    return value.detach(), hidden_N_D.grad, head.weight.grad.clone()


def step_weights(settings: PipelineConfig, rows: list[TargetRow], in_process: Any) -> dict[str, float]:
    """The divergence's weights, as the driver gives them to the ranks."""
    in_process.replace = FakeRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(settings, VOCABULARY))
    work = trainer._make_step_work(1, [r.rollout for r in rows], frozenset(), None)
    return dict(work.components[DIVERGENCE].weights)


def test_a_step_is_the_sum_of_its_objectives_alone(rows: list[TargetRow], in_process: Any) -> None:
    settings = config()
    objectives = {name: settings.objective_of(name) for name in OBJECTIVES}
    samples = gather_samples(rows)
    baselines = leave_one_out_baselines({i: s for i, s in samples.items() if s[0].rollout.domain == "far"})
    weight_V_D = torch.nn.Parameter(
        torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    loss = Loss(objective=settings.objective.build(), chunk=3, vocab_size=VOCABULARY)
    own = {name: Loss(objective=o.build(), chunk=3, vocab_size=VOCABULARY) for name, o in objectives.items()}
    together = LossHead(weight_V_D, loss, own)
    batch = build_micro_batch(list(samples.values()), torch.float32, baselines, own_objectives=tuple(own))
    states_N_D = torch.randn(len(batch.token_N), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = Component(weights=step_weights(settings, rows, in_process))
    found = gradients(together, batch, weights.token_weights(batch, list(samples)), states_N_D)

    value, by_hidden, by_head = torch.zeros((), dtype=torch.float64), [], torch.zeros_like(found[2])
    places = torch.cat([torch.full((r.rollout.num_trained,), sorted(OBJECTIVES).index(r.rollout.domain)) for r in rows])
    for index, name in enumerate(sorted(OBJECTIVES)):
        # Alone: a step of the same responses in which this objective is that of all, and only this domain gives a gradient.
        part = {i: s for i, s in samples.items() if s[0].rollout.domain == name}
        alone = LossHead(weight_V_D, own[name])
        own_batch = build_micro_batch(list(part.values()), torch.float32, baselines if name == "far" else None)
        everyone = weigh_rows([r.rollout for r in rows], objectives[name].weighting, {})
        weight_N = Component(weights=everyone).token_weights(own_batch, list(part))
        one, hidden, head = gradients(alone, own_batch, weight_N, states_N_D[places == index])
        assert hidden.abs().max() > 1e-3, "each objective teaches something"
        value, by_head = value + one, by_head + head
        by_hidden.append(hidden)
    torch.testing.assert_close(found[0], value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[1], torch.cat(by_hidden), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[2], by_head, rtol=1e-6, atol=1e-9)


def test_an_objective_of_one_domain_changes_no_weight_of_another(rows: list[TargetRow], in_process: Any) -> None:
    plain, mixed = (step_weights(config(domains), rows, in_process) for domains in ((), ("far", "top")))
    changed = {i.split("/")[0] for i in plain if plain[i] != mixed[i]}
    assert changed == {"far", "top"} and set(plain) == set(mixed)


def test_blocks_follow_payload_and_objective(rows: list[TargetRow]) -> None:
    samples = list(gather_samples(rows).values())
    batch = build_micro_batch(samples, torch.float32, own_objectives=("far", "wide"))
    kinds = [(type(block).__name__, len(block)) for block in batch.blocks]
    assert kinds == [("DomainBlock", 12), ("AlignedRun", 12), ("HiddenRun", 12), ("TopKBlock", 12), ("DomainBlock", 12)]
