"""The loss against finite differences and against the same formula written with whole logit matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opd.config.objectives import find_objective_section
from opd.losses.reverse_kl import ReverseKL
from opd.payloads.hidden_states import TeacherBlock
from tests.losses import chunked_objective

V, D = 23, 6
Case = tuple[Tensor, Tensor, list[TeacherBlock], Tensor, Tensor]


def case(
    sizes: tuple[int, ...] = (5, 9, 3), dtype: torch.dtype = torch.float64, vocab: int = V, scale: float = 1.0
) -> Case:
    """Student states and head, one teacher block a size (widths differ), weights with zeros, sampled ids."""
    gen = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=gen, dtype=torch.float64) * scale).to(dtype)

    num = sum(sizes)
    hidden, head = rand(num, D).requires_grad_(), rand(vocab, D).requires_grad_()
    teachers = [TeacherBlock(rand(n, D + 2 * i), rand(vocab, D + 2 * i)) for i, n in enumerate(sizes)]
    weight = torch.rand(num, generator=gen, dtype=torch.float64).to(dtype)
    weight[::4] = 0
    return hidden, head, teachers, weight, torch.randint(vocab, (num,), generator=gen)


def materialised(hidden: Tensor, head: Tensor, teachers: list[TeacherBlock], weight: Tensor, vocab: int) -> Tensor:
    logp = (hidden @ head[:vocab].T).log_softmax(-1)
    logq = torch.cat([t.hidden_N_E @ t.head_V_E[:vocab].T for t in teachers]).log_softmax(-1)
    return (weight * torch.nn.functional.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)).sum()


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


CHUNKS = [1, 7, 128, 17]  # 17 is N of the default case


@pytest.mark.parametrize("chunk", CHUNKS)
def test_value_and_per_token_numbers_are_torchs(chunk: int) -> None:
    hidden, head, teachers, weight, token = case()
    loss, stats = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=chunk, vocab_size=V)
    torch.testing.assert_close(loss, materialised(hidden, head, teachers, weight, V), rtol=1e-12, atol=0)
    for n in range(len(hidden)):
        one = torch.zeros_like(weight)
        one[n] = 1
        torch.testing.assert_close(stats.kl_N[n], materialised(hidden, head, teachers, one, V).detach())
        torch.testing.assert_close(stats.logprob_N[n], (hidden[n] @ head.T).log_softmax(-1)[token[n]].detach())
    assert not stats.kl_N.requires_grad
    assert not stats.logprob_N.requires_grad


@pytest.mark.parametrize("chunk", [1, 7, 128, 210])
def test_float32_gradients_are_autograds(chunk: int) -> None:
    hidden, head, teachers, weight, token = case((70, 129, 11), torch.float32, vocab=211)
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=chunk, vocab_size=211)
    wanted = materialised(hidden, head, teachers, weight, 211)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for found, want in zip(gradients(loss, hidden, head), gradients(wanted, hidden, head), strict=True):
        assert relative(found, want) < 1e-5


def test_the_incoming_gradient_scales_both() -> None:
    hidden, head, teachers, weight, token = case()
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    tripled, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    for once, thrice in zip(gradients(loss, hidden, head), gradients(tripled * -3, hidden, head), strict=True):
        torch.testing.assert_close(once * -3, thrice)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_side_gets_no_gradient_and_leaves_the_others_alone(frozen: str) -> None:
    hidden, head, teachers, weight, token = case()
    both = gradients(
        chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)[0], hidden, head
    )
    (hidden if frozen == "hidden" else head).requires_grad_(False)
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    loss.backward()
    moving, still, want = (head, hidden, both[1]) if frozen == "hidden" else (hidden, head, both[0])
    assert still.grad is None
    torch.testing.assert_close(moving.grad, want)


def test_tokens_without_weight_move_nothing_whatever_their_teacher_says() -> None:
    hidden, head, teachers, weight, token = case()
    clean, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    want = gradients(clean, hidden, head)
    start = 0
    for block in teachers:
        block.hidden_N_E[weight[start : start + len(block.hidden_N_E)] == 0] = torch.nan
        start += len(block.hidden_N_E)
    loss, stats = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    torch.testing.assert_close(loss, clean)
    found = gradients(loss, hidden, head)
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(found[1], want[1])
    assert not found[0][weight == 0].any()
    assert bool(stats.kl_N[weight != 0].isfinite().all())


def test_a_nan_that_carries_weight_is_not_hidden() -> None:
    hidden, head, teachers, weight, token = case()
    teachers[0].hidden_N_E[1] = torch.nan
    assert weight[1] > 0
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    assert bool(loss.isnan())


def test_rows_beyond_the_vocabulary_have_no_probability_and_no_gradient() -> None:
    hidden, head, teachers, weight, token = case()
    cut = V - 4
    token = token % cut
    trimmed = [TeacherBlock(t.hidden_N_E, t.head_V_E[:cut].clone()) for t in teachers]
    want, want_stats = chunked_objective(
        ReverseKL(), hidden, head[:cut], trimmed, weight, token, chunk=7, vocab_size=cut
    )
    want_grads = gradients(want, hidden, head)
    with torch.no_grad():
        head[cut:] = 50.0
        for t in teachers:
            t.head_V_E[cut:] = -50.0
    loss, stats = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=cut)
    grads = gradients(loss, hidden, head)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(stats.logprob_N, want_stats.logprob_N)
    torch.testing.assert_close(grads[0], want_grads[0])
    torch.testing.assert_close(grads[1][:cut], want_grads[1][:cut])
    assert not grads[1][cut:].any()


def test_teacher_heads_may_have_other_padding() -> None:
    hidden, head, teachers, weight, token = case()
    padded = [TeacherBlock(t.hidden_N_E, torch.cat([t.head_V_E, t.head_V_E[:i]])) for i, t in enumerate(teachers)]
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    other, _ = chunked_objective(ReverseKL(), hidden, head, padded, weight, token, chunk=7, vocab_size=V)
    torch.testing.assert_close(other, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(dtype: torch.dtype) -> None:
    hidden, head, _, weight, token = case((40,), dtype, scale=3.0)
    teacher = [TeacherBlock(hidden.detach().clone(), head.detach().clone())]
    loss, stats = chunked_objective(ReverseKL(), hidden, head, teacher, weight, token, chunk=7, vocab_size=V)
    assert abs(float(loss.detach())) < 1e-6
    assert float(stats.kl_N.abs().max()) < 1e-6
    for grad in gradients(loss, hidden, head):
        assert float(grad.abs().max()) < 1e-6


def test_the_loss_is_not_blind_to_which_token_is_which() -> None:
    hidden, head, teachers, weight, token = case()
    loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    turned = [TeacherBlock(t.hidden_N_E, t.head_V_E.roll(1, 0)) for t in teachers]
    other, _ = chunked_objective(ReverseKL(), hidden, head, turned, weight, token, chunk=7, vocab_size=V)
    for found, was in zip(gradients(other, hidden, head), gradients(loss, hidden, head), strict=True):
        assert relative(found, was) > 0.1


def test_the_loss_is_reverse_and_not_forward() -> None:
    # One token, two words: p = (.9, .1), q = (.5, .5).
    hidden = torch.ones(1, 1, dtype=torch.float64)
    head = torch.tensor([[0.9], [0.1]], dtype=torch.float64).log()
    teacher = TeacherBlock(hidden, torch.zeros(2, 1, dtype=torch.float64))
    _, stats = chunked_objective(
        ReverseKL(), hidden, head, [teacher], torch.ones(1), torch.zeros(1, dtype=torch.long), chunk=8, vocab_size=2
    )
    assert float(stats.kl_N[0]) == pytest.approx(
        0.9 * torch.log(torch.tensor(1.8)) + 0.1 * torch.log(torch.tensor(0.2))
    )


def test_following_the_gradient_brings_the_student_to_the_teacher() -> None:
    hidden, head, teachers, weight, token = case((17,))
    optimizer = torch.optim.Adam([hidden, head], lr=0.05)
    losses = []
    for _ in range(200):
        loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


def test_extreme_logits_stay_finite() -> None:
    hidden, head, teachers, weight, token = case(dtype=torch.float32, scale=30.0)
    loss, stats = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=7, vocab_size=V)
    assert bool(loss.isfinite())
    assert bool(stats.kl_N.isfinite().all())
    assert float(stats.kl_N.min()) > -1e-3
    assert all(bool(g.isfinite().all()) for g in gradients(loss, hidden, head))


def test_bfloat16_gradients_point_the_same_way() -> None:
    exact = case()
    rounded = case(dtype=torch.bfloat16)
    want = gradients(chunked_objective(ReverseKL(), *exact, chunk=7, vocab_size=V)[0], *exact[:2])
    loss, stats = chunked_objective(ReverseKL(), *rounded, chunk=7, vocab_size=V)
    assert stats.kl_N.dtype == torch.float32
    for found, grad in zip(gradients(loss, *rounded[:2]), want, strict=True):
        assert found.dtype == torch.bfloat16
        assert float(torch.cosine_similarity(found.double().flatten(), grad.flatten(), 0)) > 0.999


def test_no_tokens_is_no_loss_and_a_zero_gradient() -> None:
    # A rank with nothing to do still runs forward and backward in step with the others.
    hidden, head = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    loss, stats = chunked_objective(
        ReverseKL(), hidden, head, [], torch.zeros(0), torch.zeros(0, dtype=torch.long), chunk=7, vocab_size=V
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert len(stats.kl_N) == len(stats.logprob_N) == 0
    assert head.grad is not None
    assert not head.grad.any()


def test_blocks_that_do_not_cover_the_tokens_are_a_bug_of_the_caller() -> None:
    hidden, head, teachers, weight, token = case()
    with pytest.raises(AssertionError):
        chunked_objective(ReverseKL(), hidden, head, teachers[:-1], weight, token, chunk=7, vocab_size=V)


def test_no_logit_matrix_larger_than_a_chunk_exists() -> None:
    # 4096 tokens x 4001 words of float32 are 65 MB; a chunk of 16 needs 0.26 MB.
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    hidden, head, teachers, weight, token = case((1000, 1048), torch.float32, vocab=401)
    with Watch():
        loss, _ = chunked_objective(ReverseKL(), hidden, head, teachers, weight, token, chunk=16, vocab_size=401)
        loss.backward()
    assert len(sizes) > 100
    assert max(sizes) < 2048 * 16


def test_the_objective_is_found_by_its_name() -> None:
    assert find_objective_section("reverse_kl").OBJECTIVE is ReverseKL
