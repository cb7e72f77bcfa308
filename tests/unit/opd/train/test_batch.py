"""Packed sequences give the numbers that each sequence gives alone, and no neighbour reaches another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.losses.chunked import IDENTITY, SampledBlock, TopKBlock
from opd.losses.reverse_kl import ReverseKL
from opd.stream.heads import Head
from opd.stream.schema import TargetRow
from opd.train.batch import HiddenRun, MicroBatch, pack_sequences, predict_positions
from opd.train.batch import micro_batch as tensors
from opd.train.student import Student, token_logprobs

WIDTH = 64


@pytest.fixture(scope="module")
def lm(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def teacher(expert_dirs: dict[str, Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(expert_dirs["rev"], dtype=torch.float32, attn_implementation="sdpa")


def student(lm: Any) -> Student:
    return Student(lm, ReverseKL(), chunk=16, vocab_size=76)


def micro_batch(rows: Sequence[TargetRow], dtype: torch.dtype = torch.float32) -> MicroBatch:
    return tensors([(row,) for row in rows], "hidden_states", dtype)


def sequences(lengths: Sequence[int], vocab: int = 76, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(vocab), k=n) for n in lengths]


MIXED = sequences([3, 60, 17, 128, 2, 90, 31, 1, 44])


@torch.no_grad()
def alone(lm: Any, ids: Sequence[int]) -> Tensor:
    """[T, V] log-probs of one sequence in a forward pass of its own."""
    return lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_ids_and_positions_lie_where_the_offsets_say() -> None:
    packed = pack_sequences(MIXED)
    assert packed.input_ids_B_T.shape == packed.position_ids_B_T.shape
    for ids, offset in zip(MIXED, packed.offsets, strict=True):
        assert packed.input_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == ids
        assert packed.position_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == list(range(len(ids)))
        assert offset // packed.input_ids_B_T.shape[1] == (offset + len(ids) - 1) // packed.input_ids_B_T.shape[1]


def test_a_packed_forward_equals_separate_ones(lm: Any) -> None:
    packed = pack_sequences(MIXED)
    assert packed.input_ids_B_T.shape[0] < len(MIXED), "nothing is packed, the test shows nothing"
    with torch.no_grad():
        hidden = student(lm).hidden(packed)
        logp = (hidden @ lm.get_output_embeddings().weight.T).log_softmax(-1)
    for ids, offset in zip(MIXED, packed.offsets, strict=True):
        torch.testing.assert_close(logp[offset : offset + len(ids)], alone(lm, ids), rtol=0, atol=1e-5)


def test_the_log_prob_of_token_t_lives_at_t_minus_1(lm: Any) -> None:
    packed = pack_sequences(MIXED)
    spans = [(len(ids) // 2 + 1, len(ids)) for ids in MIXED if len(ids) > 1]
    chosen = [ids for ids in MIXED if len(ids) > 1]
    packed = pack_sequences(chosen)
    tokens = torch.tensor([t for ids, (a, b) in zip(chosen, spans, strict=True) for t in ids[a:b]])
    with torch.no_grad():
        hidden = student(lm).hidden(packed)[predict_positions(packed, spans)]
        found = token_logprobs(hidden, lm.get_output_embeddings().weight, tokens, IDENTITY, chunk=7)
    want = torch.cat(
        [alone(lm, ids)[range(a - 1, b - 1), ids[a:b]] for ids, (a, b) in zip(chosen, spans, strict=True) if b > a]
    )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_positions_are_direct_indices() -> None:
    packed = pack_sequences([[1, 2, 3, 4, 5], [6, 7, 8]])
    positions = predict_positions(packed, [(2, 5), (1, 3)])
    assert packed.input_ids_B_T.flatten()[positions].tolist() == [2, 3, 4, 6, 7]
    assert packed.input_ids_B_T.flatten()[positions + 1].tolist() == [3, 4, 5, 7, 8]
    assert predict_positions(pack_sequences([]), []).tolist() == []


# Micro-batches of scored rows


@torch.no_grad()
def scored(teacher: Any, ids: list[int], prompt: int, **changes: Any) -> TargetRow:
    states = teacher.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    values: dict[str, Any] = {
        "sample_id": f"s{prompt}/{len(ids)}",
        "step": 1,
        "domain": "d",
        "teacher": "t",
        "policy_version": 0,
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "loss_mask": [True] * (len(ids) - prompt),
        "behaviour_logprobs": [-0.25 * i for i in range(len(ids) - prompt)],
        "head": "h",
        "hidden_size": WIDTH,
        "hidden": states[prompt - 1 : -1].contiguous().numpy().tobytes(),
    }
    return TargetRow(**values | changes)


def losses(lm: Any, teacher: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Loss of the whole micro-batch, mean over its trained tokens, and KL of each token."""
    weight = batch.mask_N.float() / batch.mask_N.sum()
    heads = {"h": Head(teacher.get_output_embeddings().weight.detach(), IDENTITY)}
    loss, stats = student(lm)(batch, heads, weight)
    return loss, stats.kl_N


ROWS = [(ids, max(1, len(ids) // 3)) for ids in MIXED if len(ids) > 1]


def test_a_micro_batch_keeps_every_row_together(teacher: Any) -> None:
    rows = [scored(teacher, ids, prompt, domain=f"d{prompt}") for ids, prompt in ROWS]
    batch = micro_batch(rows)
    assert batch.token_N.tolist() == [t for r in rows for t in r.response_ids]
    assert batch.behaviour_N.tolist() == [x for r in rows for x in r.behaviour_logprobs]
    assert batch.row_lengths == tuple(len(r.response_ids) for r in rows)
    assert batch.domains == tuple(r.domain for r in rows)
    flat = batch.packed.input_ids_B_T.flatten()
    assert flat[batch.predict_N + 1].tolist() == batch.token_N.tolist()
    assert flat[batch.predict_N].tolist() == [t for ids, prompt in ROWS for t in ids[prompt - 1 : -1]]


def test_rows_are_grouped_by_head_in_order(teacher: Any) -> None:
    heads = ["a", "a", "b", "a"]
    rows = [scored(teacher, ids, prompt, head=h) for (ids, prompt), h in zip(ROWS, heads, strict=False)]
    batch = micro_batch(rows)
    runs = [run for run in batch.runs if isinstance(run, HiddenRun)]
    assert len(runs) == len(batch.runs)
    assert [run.heads for run in runs] == [("a",), ("b",), ("a",)]
    assert [len(run.hidden[0]) for run in runs] == [
        sum(map(len, (rows[0].response_ids, rows[1].response_ids))),
        len(rows[2].response_ids),
        len(rows[3].response_ids),
    ]
    joined = torch.cat([run.hidden[0] for run in runs])
    assert joined.numpy().tobytes() == b"".join(bytes(r.hidden) for r in rows)


def test_bfloat16_states_keep_their_bits() -> None:
    states = torch.randn(2, WIDTH).bfloat16()
    row = TargetRow(
        sample_id="s", step=1, domain="d", teacher="t", policy_version=0, prompt_ids=[1], response_ids=[2, 3],
        loss_mask=[True, False], behaviour_logprobs=[0.0, 0.0], head="h", hidden_size=WIDTH,
        hidden=states.view(torch.uint8).numpy().tobytes(),
    )  # fmt: skip
    batch = micro_batch([row], torch.bfloat16)
    (run,) = batch.runs
    assert isinstance(run, HiddenRun)
    assert torch.equal(run.hidden[0], states)
    assert batch.mask_N.tolist() == [True, False]


def test_a_rows_loss_is_that_of_the_row_alone(lm: Any, teacher: Any) -> None:
    rows = [scored(teacher, ids, prompt) for ids, prompt in ROWS]
    _, together = losses(lm, teacher, micro_batch(rows))
    for row, kl in zip(rows, together.split([len(r.response_ids) for r in rows]), strict=True):
        _, single = losses(lm, teacher, micro_batch([row]))
        torch.testing.assert_close(kl, single, rtol=0, atol=1e-5)
        whole = [*row.prompt_ids, *row.response_ids]
        p, q = alone(lm, whole), alone(teacher, whole)
        want = (p.exp() * (p - q)).sum(-1)[len(row.prompt_ids) - 1 : -1]
        torch.testing.assert_close(kl, want, rtol=0, atol=1e-5)


def test_a_neighbour_cannot_change_a_rows_loss(lm: Any, teacher: Any) -> None:
    kept = scored(teacher, MIXED[2], 5)
    kls = []
    for seed in (1, 2):
        before, after = (scored(teacher, ids, 4) for ids in sequences([31, 20], seed=seed))
        batch = micro_batch([before, kept, after])
        assert batch.packed.input_ids_B_T.shape[0] == 1, "the three must lie in one row"
        kls.append(losses(lm, teacher, batch)[1].split(batch.row_lengths)[1])
    torch.testing.assert_close(kls[0], kls[1], rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_whole_model_written_plainly(lm: Any, teacher: Any) -> None:
    # The embedding is also the head: both uses must be in its gradient.
    assert lm.config.tie_word_embeddings
    rows = [scored(teacher, ids, prompt) for ids, prompt in ROWS]
    lm.zero_grad()
    loss, _ = losses(lm, teacher, micro_batch(rows))
    loss.backward()
    found = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    total, num = torch.zeros(()), sum(len(r.response_ids) for r in rows)
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        p = lm(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        q = teacher(input_ids=ids, use_cache=False).logits[0].log_softmax(-1).detach()
        total = total + (p.exp() * (p - q)).sum(-1)[len(row.prompt_ids) - 1 : -1].sum() / num
    total.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    for name, param in lm.named_parameters():
        assert float((found[name] - param.grad).norm()) < 1e-4 * float(param.grad.norm()), name


def test_untrained_tokens_move_nothing(lm: Any, teacher: Any) -> None:
    ids, prompt = MIXED[1], 20
    mask = [i < 10 for i in range(40)]
    half = scored(teacher, ids, prompt, loss_mask=mask)
    short = scored(teacher, ids[:30], prompt)
    grads = []
    for row in (half, short):
        lm.zero_grad()
        losses(lm, teacher, micro_batch([row]))[0].backward()
        grads.append(torch.cat([p.grad.flatten() for p in lm.parameters()]))
    assert float((grads[0] - grads[1]).norm()) < 1e-5 * float(grads[1].norm())


def test_an_empty_micro_batch_runs_and_moves_nothing(lm: Any) -> None:
    batch = micro_batch([])
    lm.zero_grad()
    loss, stats = student(lm)(batch, {}, torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0
    assert len(stats.kl_N) == 0
    assert all(p.grad is None or not p.grad.any() for p in lm.parameters())


# Other payloads


def light(**changes: Any) -> TargetRow:
    values: dict[str, Any] = {
        "sample_id": "s", "step": 1, "domain": "d", "teacher": "t", "policy_version": 0, "prompt_ids": [1],
        "response_ids": [2, 3], "loss_mask": [True, True], "behaviour_logprobs": [0.0, 0.0], "head": "h",
        "hidden_size": 0,
    }  # fmt: skip
    return TargetRow(**values | changes)


def test_sampled_log_probs_are_one_run_over_all_teachers() -> None:
    rows = [light(teacher_logprobs=[-1.0, -2.0]), light(head="other", teacher_logprobs=[-3.0, -4.0])]
    (run,) = tensors([(row,) for row in rows], "sampled_logprobs", torch.bfloat16).runs
    block = run.block({})
    assert isinstance(block, SampledBlock)
    assert block.logprob_N.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert block.logprob_N.dtype == torch.float32


def test_top_k_is_one_run_over_all_teachers() -> None:
    rows = [
        light(topk_ids=[5, 6, 7, 8], topk_logprobs=[-1.0, -2.0, -3.0, -4.0]),
        light(
            topk_ids=[1, 2], topk_logprobs=[-5.0, -6.0], response_ids=[9], loss_mask=[True], behaviour_logprobs=[0.0]
        ),
    ]
    (run,) = tensors([(row,) for row in rows], "top_k", torch.bfloat16).runs
    block = run.block({})
    assert isinstance(block, TopKBlock)
    assert block.ids_N_K.tolist() == [[5, 6], [7, 8], [1, 2]]
    assert block.logprob_N_K.tolist() == [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs", "top_k"])
def test_an_empty_micro_batch_of_any_payload_has_no_run(payload: str) -> None:
    batch = tensors([], payload, torch.float32)
    assert (batch.runs, batch.row_lengths, len(batch.token_N)) == ((), (), 0)
