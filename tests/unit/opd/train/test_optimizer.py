"""AdamW as the trainers set it up: the published rule, in place, and the same numbers however a weight is cut."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from opd.train.optimizer import AdamWOptions, build_adamw, split_parameters

OPTIONS = AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
RATE = 1e-2


def module(rows: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(67, rows)


def by_hand(weight: torch.Tensor, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Loshchilov and Hutter, 1711.05101, algorithm 2, in float64."""
    (beta1, beta2), first, second = OPTIONS.betas, 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        move = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + OPTIONS.epsilon)
        weight = weight - RATE * decay * weight - RATE * move
    return weight


def test_it_is_the_published_rule_and_decays_matrices_only() -> None:
    model = module(97)
    start = [param.detach().double() for param in model.parameters()]
    one, seen = build_adamw(model, OPTIONS, lr=RATE), [[], []]  # type: tuple[torch.optim.AdamW, list[list[torch.Tensor]]]
    for _ in range(3):
        for param, kept in zip(model.parameters(), seen, strict=True):
            param.grad = torch.randn_like(param)
            kept.append(param.grad.double())
        one.step()
    for param, begin, gradients, decay in zip(
        model.parameters(), start, seen, (OPTIONS.weight_decay, 0.0), strict=True
    ):
        torch.testing.assert_close(param.double(), by_hand(begin, gradients, decay), rtol=0, atol=1e-6)


def test_a_rank_with_a_part_of_a_weight_has_the_bits_of_the_whole() -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6_500, 1))
    cuts = (0, 1, 3_271, 6_500)
    parts = [nn.Parameter(whole.detach()[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    steps = [build_adamw(nn.ParameterList(owned), OPTIONS, lr=RATE) for owned in ([whole], parts)]
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        for part, (a, b) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = whole.grad[a:b].clone()
        for one in steps:
            one.step()
    assert torch.equal(whole, torch.cat(list(parts)))


def test_a_step_makes_no_tensor_of_a_weight_s_size() -> None:
    model = module(977)
    one = build_adamw(model, OPTIONS, lr=RATE)
    for _ in range(2):  # the first step makes the moments
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            one.step()
    assert max(event.cpu_memory_usage for event in seen.events()) <= 1 << 12


def test_an_indexer_does_not_decay() -> None:
    """It gets no gradient from a loss on the model's output: decay alone would move what nothing corrects."""
    from tests.sparse_models import make_sparse_model

    lm = make_sparse_model(2)
    decaying, others = split_parameters(lm, 0.1)
    indexers = {p for name, p in lm.named_parameters() if ".indexer." in name}
    assert indexers and indexers <= set(others["params"]) and others["weight_decay"] == 0.0
    assert {*decaying["params"], *others["params"]} == set(lm.parameters())
