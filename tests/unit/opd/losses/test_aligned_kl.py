"""The loss to a teacher with another tokenizer: its exact part, and the mean of its estimate over all responses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from opd.losses.aligned_kl import AlignedKL
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.payloads.aligned_states import AlignedStates
from opd.payloads.answer import TeacherStates
from opd.payloads.hidden_states import HiddenStates
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.vocabularies.alignment import Alignment
from tests.losses import chunked_objective
from tests.rows import make_rollout

V, D = 7, 5


def score_response(
    hidden_M_D: Tensor, head_u_D: Tensor, token_ids: Sequence[int], shared_ids: Sequence[int], alignment: Alignment
) -> AlignedStates:
    """Return a teacher's answer, whose own head is `head_u_D`, as a scorer makes it."""
    states = TeacherStates(
        token_ids=token_ids,
        hidden_N_D=hidden_M_D,
        head="head",
        logprobs=lambda: (hidden_M_D @ head_u_D.T).log_softmax(-1),
        top_k=0,
        shared_ids=shared_ids,
    )
    return AlignedStates.of_states(states).join_chunks(alignment)


def in_student_ids(head_u_D: Tensor, teacher_ids: Sequence[int]) -> Tensor:
    """Return the teacher's head as it comes to the trainer."""
    rows = [head_u_D[u] if u >= 0 else torch.full_like(head_u_D[0], torch.nan) for u in teacher_ids]
    return torch.stack(rows)


def gradient(answer: AlignedStates | HiddenStates, head_V_D: Tensor, logits_N_V: Tensor, ids: Sequence[int]) -> Tensor:
    """Return [N, V] the loss's gradient by the student's logits, with weight 1 for each token sampled from these very logits."""
    logp_N_V = logits_N_V.detach().log_softmax(-1)
    behaviour = tuple(float(logp_N_V[n, i]) for n, i in enumerate(ids))
    rollout = make_rollout(
        sample_id="a", step=1, domain="d", prompt_ids=(0,), response_ids=tuple(ids), behaviour_logprobs=behaviour
    )
    batch = build_micro_batch([(TargetRow(rollout=rollout, teacher="t", answer=answer),)], torch.float64)
    blocks = [block.with_heads({"head": Head(head_V_D, IDENTITY)}) for block in batch.blocks]
    hidden = logits_N_V.detach().clone().requires_grad_()
    objective = AlignedKL() if isinstance(answer, AlignedStates) else ReverseKL()
    value, _ = chunked_objective(
        objective,
        hidden,
        torch.eye(logits_N_V.shape[1], dtype=torch.float64),
        blocks,
        torch.ones(len(ids), dtype=torch.float64),
        batch.token_N,
        torch.tensor(behaviour, dtype=torch.float64),
        chunk=3,
        vocab_size=logits_N_V.shape[1],
    )
    value.backward()
    assert hidden.grad is not None
    return hidden.grad


def test_the_same_model_with_permuted_ids_gives_the_exact_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(6, D, generator=generator).double(), torch.randn(V, D, generator=generator).double()
    logits, ids = torch.randn(6, V, generator=generator).double(), [3, 1, 1, 6, 0, 2]
    permutation = torch.randperm(V, generator=generator).tolist()  # student's id -> teacher's
    own_head = torch.empty_like(head)
    own_head[permutation] = head
    singles = Alignment((1,) * 6, (1,) * 6)
    answer = score_response(hidden, own_head, [permutation[i] for i in ids], permutation, singles)
    ours = gradient(answer, in_student_ids(own_head, permutation), logits, ids)
    exact = gradient(HiddenStates.from_states(hidden, "head"), head, logits, ids)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_the_exact_part_is_the_slope_of_the_divergence_among_shared_tokens() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, head = torch.randn(1, D, generator=generator).double(), torch.randn(V, D, generator=generator).double()
    logits, teacher_ids = torch.randn(1, V, generator=generator).double(), [2, -1, 0, 5, -1, 6, 1]
    shared = [u for u in teacher_ids if u >= 0]
    answer = score_response(hidden, head, [5], shared, Alignment((1,), (1,)))
    ours = gradient(answer, in_student_ids(head, teacher_ids), logits, [3])

    def divergence(values: Tensor) -> Tensor:
        kept = torch.tensor([u >= 0 for u in teacher_ids])
        logpi = values[0].log_softmax(-1)[kept].log_softmax(-1)
        logr = (hidden @ head.T)[0, shared].log_softmax(-1)
        return (logpi.exp() * (logpi - logr)).sum()

    for v in range(V):
        step = torch.zeros_like(logits)
        step[0, v] = 1e-6
        slope = (divergence(logits + step) - divergence(logits - step)) / 2e-6
        assert float(ours[0, v]) == pytest.approx(float(slope), abs=1e-8)


def test_the_mean_over_tokens_is_the_gradient_of_the_divergence_between_texts() -> None:
    """The student writes a, b, ab and an end; the teacher a, b, c and an end, so that `ab` is two of its tokens."""
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(4, D, generator=generator).double()
    hidden = torch.randn(2, D, generator=generator).double()  # before the response, and after its first `a`
    spelt = {0: [0], 1: [1], 2: [0, 1], 3: [3]}
    teacher_ids = [0, 1, -1, 3]
    logits = torch.randn(1, 4, generator=generator).double()
    logq = (hidden @ head.T).log_softmax(-1)
    q = torch.stack([logq[range(len(own)), own].sum() for own in spelt.values()])

    mean = torch.zeros(1, 4, dtype=torch.float64)
    for token, own in spelt.items():
        answer = score_response(hidden[: len(own)], head, own, [0, 1, 3], Alignment((1,), (len(own),)))
        ours = gradient(answer, in_student_ids(head, teacher_ids), logits, [token])
        mean += float(logits.softmax(-1)[0, token]) * ours

    values = logits.clone().requires_grad_()
    logp = values[0].log_softmax(-1)
    (logp.exp() * (logp - q)).sum().backward()
    torch.testing.assert_close(mean, values.grad, rtol=1e-6, atol=1e-7)  # q travels as float32


def test_the_mean_over_chunks_is_the_gradient_of_the_divergence_between_chunks() -> None:
    """The student writes single letters, the teacher pairs of them, so that a chunk is two of the student's tokens."""
    generator = torch.Generator().manual_seed(6)
    head, hidden = torch.randn(4, D, generator=generator).double(), torch.randn(1, D, generator=generator).double()
    logits = torch.randn(3, 2, generator=generator).double()  # before the first letter, after a, after b
    logq = (hidden @ head.T).log_softmax(-1)[0]
    mean = torch.zeros(3, 2, dtype=torch.float64)
    for first in range(2):
        for second in range(2):
            states = [0, 1 + first]
            answer = score_response(hidden, head, [2 * first + second], [0], Alignment((2,), (1,)))
            # The teacher has the letter a, too, as its id 0: that one token is shared must not change the mean.
            ours = gradient(answer, in_student_ids(head, [0, -1]), logits[states], [first, second])
            logp = logits.log_softmax(-1)
            mean[states] += float((logp[0, first] + logp[1 + first, second]).exp()) * ours

    values = logits.clone().requires_grad_()
    logp = values.log_softmax(-1)
    chunks = (logp[0][:, None] + logp[1:]).flatten()
    (chunks.exp() * (chunks - logq)).sum().backward()
    torch.testing.assert_close(mean, values.grad, rtol=1e-6, atol=1e-7)


def test_without_evidence_no_probability_leaves_the_tokens_that_the_teacher_lacks() -> None:
    generator = torch.Generator().manual_seed(7)
    hidden, head = torch.randn(1, D, generator=generator).double(), torch.randn(V, D, generator=generator).double()
    teacher_ids = [0, 1, 2, 3, -1, -1, -1]
    answer = score_response(hidden, head, [2], [0, 1, 2, 3], Alignment((1,), (1,)))
    logits = torch.randn(1, V, generator=generator).double()
    ours = gradient(answer, in_student_ids(head, teacher_ids), logits, [2])
    assert ours[0, 4:].abs().max() < 1e-12
    assert abs(float(ours[0, :4].sum())) < 1e-12


def test_a_clip_bounds_what_a_chunk_may_weigh() -> None:
    answer = score_response(
        torch.zeros(2, D).double(), torch.ones(V, D).double(), [1, 2], range(V), Alignment((1,), (2,))
    )
    rollout = make_rollout(sample_id="a", step=1, domain="d", prompt_ids=(0,), response_ids=(4,))
    (block,) = build_micro_batch([(TargetRow(rollout=rollout, teacher="t", answer=answer),)], torch.float64).blocks
    block = block.with_heads({"head": Head(in_student_ids(torch.ones(V, D).double(), range(V)), IDENTITY)})
    inputs = (torch.zeros(1, V).double(), torch.eye(V).double(), [block], torch.ones(1).double(), torch.tensor([4]))
    _, free = chunked_objective(AlignedKL(), *inputs, chunk=1, vocab_size=V)
    _, clipped = chunked_objective(AlignedKL(advantage_clip=0.5), *inputs, chunk=1, vocab_size=V)
    assert (free.clipped_N.item(), clipped.clipped_N.item()) == (0, 1)
