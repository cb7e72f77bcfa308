"""Cross-entropy on what a teacher wrote, and nothing on what the student sampled."""

from __future__ import annotations

import torch
from torch.nn import functional

from opd.losses.chunked import Loss, LossHead, Tokens
from opd.losses.sft import CrossEntropy, SFTConfig
from opd.payloads.text import WrittenAnswer
from opd.records.types import Span
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from tests.rows import make_rollout

WIDTH, VOCABULARY = 8, 11


def test_value_and_gradients_are_those_of_torch_on_taught_tokens_alone() -> None:
    torch.manual_seed(0)
    taught = make_rollout(
        sample_id="t", step=1, domain="a", prompt_ids=(1,), response_ids=(3, 4, 5, 2),
        spans=(Span(length=4, origin="taught", policy_version=0),),
    )  # fmt: skip
    own = make_rollout(sample_id="s", step=1, domain="a", prompt_ids=(1,), response_ids=(6, 7))
    rows = [TargetRow(rollout=rollout, teacher="e", answer=WrittenAnswer()) for rollout in (taught, own)]
    batch = build_micro_batch([(row,) for row in rows], torch.float64)
    hidden_N_D = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    weight_V_D = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    weight_N = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.7, 0.9], dtype=torch.float64)
    head = LossHead(
        torch.nn.Parameter(weight_V_D.detach().clone()), Loss(objective=CrossEntropy(), chunk=4, vocab_size=VOCABULARY)
    )
    value, stats = head(hidden_N_D, Tokens(batch.token_N, weight_N, batch.behaviour_N), batch.blocks)
    value.backward()
    ours = hidden_N_D.grad.clone()  # type: ignore[union-attr]
    hidden_N_D.grad = None
    losses_N = functional.cross_entropy(hidden_N_D @ weight_V_D.T, batch.token_N, reduction="none")
    (losses_N[:4] * weight_N[:4]).sum().backward()
    assert torch.allclose(stats.kl_N[:4], losses_N[:4].detach()) and not stats.kl_N[4:].any()
    assert torch.allclose(ours, hidden_N_D.grad) and not ours[4:].any()
    assert torch.allclose(head.weight.grad, weight_V_D.grad)


def test_only_text_goes_with_it() -> None:
    config = SFTConfig(kind="sft")
    assert config.problem_with("text") is None and config.problem_with("hidden_states") is not None
    assert config.problem_with_extrapolation("text") is not None
