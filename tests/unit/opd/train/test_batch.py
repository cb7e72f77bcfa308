"""Packed sequences give the numbers that each sequence gives alone, and no neighbour reaches another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.errors import RunError
from opd.losses.chunked import Loss, LossHead
from opd.losses.logits import token_logprobs
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.models.heads import Head
from opd.models.layouts import LAYOUTS, find_positions_before
from opd.models.logit_rule import IDENTITY
from opd.payloads.hidden_states import HiddenRun, MixtureBlock, TeacherBlock
from opd.payloads.sampled_logprobs import SampledBlock
from opd.payloads.top_k import TopKBlock
from opd.stream.schema import TargetRow
from opd.train.batch import (
    MicroBatch,
    gather_samples,
    leave_one_out_baselines,
)
from opd.train.batch import build_micro_batch as tensors
from opd.train.student import Student
from tests.losses import chunked_objective
from tests.rows import changed, make_row

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
    return tensors([(row,) for row in rows], dtype)


def sequences(lengths: Sequence[int], vocab: int = 76, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(vocab), k=n) for n in lengths]


MIXED = sequences([3, 60, 17, 128, 2, 90, 31, 1, 44])


@torch.no_grad()
def alone(lm: Any, ids: Sequence[int]) -> Tensor:
    """[T, V] log-probs of one sequence in a forward pass of its own."""
    return lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_ids_and_positions_lie_where_the_offsets_say() -> None:
    packed = LAYOUTS["packed"](MIXED)
    assert packed.input_ids_B_T.shape == packed.position_ids_B_T.shape
    for ids, offset in zip(MIXED, packed.offsets, strict=True):
        assert packed.input_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == ids
        assert packed.position_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == list(range(len(ids)))
        assert offset // packed.input_ids_B_T.shape[1] == (offset + len(ids) - 1) // packed.input_ids_B_T.shape[1]


def test_a_packed_forward_equals_separate_ones(lm: Any) -> None:
    packed = LAYOUTS["packed"](MIXED)
    assert packed.input_ids_B_T.shape[0] < len(MIXED), "nothing is packed, the test shows nothing"
    with torch.no_grad():
        hidden = student(lm).compute_hidden_states(packed)
        logp = (hidden @ lm.get_output_embeddings().weight.T).log_softmax(-1)
    for ids, offset in zip(MIXED, packed.offsets, strict=True):
        torch.testing.assert_close(logp[offset : offset + len(ids)], alone(lm, ids), rtol=0, atol=1e-5)


def test_the_log_prob_of_token_t_lives_at_t_minus_1(lm: Any) -> None:
    packed = LAYOUTS["packed"](MIXED)
    spans = [(len(ids) // 2 + 1, len(ids)) for ids in MIXED if len(ids) > 1]
    chosen = [ids for ids in MIXED if len(ids) > 1]
    packed = LAYOUTS["packed"](chosen)
    tokens = torch.tensor([t for ids, (a, b) in zip(chosen, spans, strict=True) for t in ids[a:b]])
    with torch.no_grad():
        hidden = student(lm).compute_hidden_states(packed)[find_positions_before(packed, spans)]
        found = token_logprobs(hidden, lm.get_output_embeddings().weight, tokens, IDENTITY, chunk=7)
    want = torch.cat(
        [alone(lm, ids)[range(a - 1, b - 1), ids[a:b]] for ids, (a, b) in zip(chosen, spans, strict=True) if b > a]
    )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_padding_rows_of_the_head_have_no_probability_in_the_probe_either(lm: Any) -> None:
    """The engine that the probe is held against cannot give them any."""
    gen = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(9, 8, generator=gen), torch.randint(0, 5, (9,), generator=gen)
    weight = torch.nn.Parameter(torch.randn(13, 8, generator=gen))
    head = LossHead(weight, Loss(objective=ReverseKL(), chunk=1, vocab_size=5))
    want = (hidden @ weight[:5].T).log_softmax(-1)[range(9), tokens]
    torch.testing.assert_close(head(hidden, tokens), want)


def test_positions_are_direct_indices() -> None:
    packed = LAYOUTS["packed"]([[1, 2, 3, 4, 5], [6, 7, 8]])
    positions = find_positions_before(packed, [(2, 5), (1, 3)])
    assert packed.input_ids_B_T.flatten()[positions].tolist() == [2, 3, 4, 6, 7]
    assert packed.input_ids_B_T.flatten()[positions + 1].tolist() == [3, 4, 5, 7, 8]
    assert find_positions_before(LAYOUTS["packed"]([]), []).tolist() == []


# Micro-batches of scored rows


@torch.no_grad()
def scored(teacher: Any, ids: list[int], prompt: int, **changes: Any) -> TargetRow:
    states = teacher.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    mask = changes.get("loss_mask", [True] * (len(ids) - prompt))
    values: dict[str, Any] = {
        "sample_id": f"s{prompt}/{len(ids)}",
        "step": 1,
        "domain": "d",
        "teacher": "t",
        "policy_version": 0,
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "loss_mask": mask,
        "behaviour_logprobs": [-0.25 * i for i in range(len(ids) - prompt)],
        "head": "h",
        "hidden_size": WIDTH,
        "hidden": states[prompt - 1 : -1][torch.tensor(mask)].numpy().tobytes(),
    }
    return make_row(**values | changes)


def losses(lm: Any, teacher: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Loss of the whole micro-batch, mean over its trained tokens, and KL of each."""
    weight = torch.full((len(batch.token_N),), 1 / len(batch.token_N))
    heads = {"h": Head(teacher.get_output_embeddings().weight.detach(), IDENTITY)}
    loss, stats = student(lm)(batch, heads, {"divergence": weight})
    return loss, stats.kl_N


ROWS = [(ids, max(1, len(ids) // 3)) for ids in MIXED if len(ids) > 1]


def test_a_micro_batch_keeps_every_row_together(teacher: Any) -> None:
    rows = [scored(teacher, ids, prompt, domain=f"d{prompt}") for ids, prompt in ROWS]
    batch = micro_batch(rows)
    assert batch.token_N.tolist() == [t for r in rows for t in r.rollout.response_ids]
    assert batch.behaviour_N.tolist() == [x for r in rows for x in r.rollout.behaviour_logprobs]
    assert batch.trained_lengths == tuple(len(r.rollout.response_ids) for r in rows)
    assert batch.domains == tuple(r.rollout.domain for r in rows)
    flat = batch.packed.input_ids_B_T.flatten()
    assert flat[batch.predict_N + 1].tolist() == batch.token_N.tolist()
    assert flat[batch.predict_N].tolist() == [t for ids, prompt in ROWS for t in ids[prompt - 1 : -1]]


def test_rows_are_grouped_by_head_in_order(teacher: Any) -> None:
    heads = ["a", "a", "b", "a"]
    rows = [scored(teacher, ids, prompt, head=h) for (ids, prompt), h in zip(ROWS, heads, strict=False)]
    batch = micro_batch(rows)
    runs = [block for block in batch.blocks if isinstance(block, HiddenRun)]
    assert len(runs) == len(batch.blocks)
    assert [run.heads for run in runs] == [("a",), ("b",), ("a",)]
    assert [len(run.hidden[0]) for run in runs] == [
        sum(map(len, (rows[0].rollout.response_ids, rows[1].rollout.response_ids))),
        len(rows[2].rollout.response_ids),
        len(rows[3].rollout.response_ids),
    ]
    joined = torch.cat([run.hidden[0] for run in runs])
    assert joined.numpy().tobytes() == b"".join(bytes(r.answer.hidden) for r in rows)


def test_bfloat16_states_keep_their_bits() -> None:
    states = torch.randn(2, WIDTH).bfloat16()
    row = make_row(
        sample_id="s", step=1, domain="d", teacher="t", policy_version=0, prompt_ids=[1], response_ids=[2, 3],
        loss_mask=[True, True], behaviour_logprobs=[0.0, 0.0], head="h", hidden_size=WIDTH,
        hidden=states.view(torch.uint8).numpy().tobytes(),
    )  # fmt: skip
    batch = micro_batch([row], torch.bfloat16)
    (run,) = batch.blocks
    assert isinstance(run, HiddenRun)
    assert torch.equal(run.hidden[0], states)


def test_a_rows_loss_is_that_of_the_row_alone(lm: Any, teacher: Any) -> None:
    rows = [scored(teacher, ids, prompt) for ids, prompt in ROWS]
    _, together = losses(lm, teacher, micro_batch(rows))
    for row, kl in zip(rows, together.split([len(r.rollout.response_ids) for r in rows]), strict=True):
        _, single = losses(lm, teacher, micro_batch([row]))
        torch.testing.assert_close(kl, single, rtol=0, atol=1e-5)
        whole = [*row.rollout.prompt_ids, *row.rollout.response_ids]
        p, q = alone(lm, whole), alone(teacher, whole)
        want = (p.exp() * (p - q)).sum(-1)[len(row.rollout.prompt_ids) - 1 : -1]
        torch.testing.assert_close(kl, want, rtol=0, atol=1e-5)


def test_a_neighbour_cannot_change_a_rows_loss(lm: Any, teacher: Any) -> None:
    kept = scored(teacher, MIXED[2], 5)
    kls = []
    for seed in (1, 2):
        before, after = (scored(teacher, ids, 4) for ids in sequences([31, 20], seed=seed))
        batch = micro_batch([before, kept, after])
        assert batch.packed.input_ids_B_T.shape[0] == 1, "the three must lie in one row"
        kls.append(losses(lm, teacher, batch)[1].split(batch.trained_lengths)[1])
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
    total, num = torch.zeros(()), sum(len(r.rollout.response_ids) for r in rows)
    for row in rows:
        ids = torch.tensor([[*row.rollout.prompt_ids, *row.rollout.response_ids]])
        p = lm(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        q = teacher(input_ids=ids, use_cache=False).logits[0].log_softmax(-1).detach()
        total = total + (p.exp() * (p - q)).sum(-1)[len(row.rollout.prompt_ids) - 1 : -1].sum() / num
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
    loss, stats = student(lm)(batch, {}, {"divergence": torch.zeros(0)})
    loss.backward()
    assert float(loss.detach()) == 0
    assert len(stats.kl_N) == 0
    assert all(p.grad is None or not p.grad.any() for p in lm.parameters())


# Other payloads


def light(**changes: Any) -> TargetRow:
    values: dict[str, Any] = {
        "sample_id": "s", "step": 1, "domain": "d", "teacher": "t", "policy_version": 0, "prompt_ids": [1],
        "response_ids": [2, 3], "loss_mask": [True, True], "behaviour_logprobs": [0.0, 0.0], "head": "h",
        "hidden_size": 0, "hidden": b"",
    }  # fmt: skip
    return make_row(**values | changes)


def test_sampled_log_probs_are_one_run_over_all_teachers() -> None:
    rows = [light(teacher_logprobs=[-1.0, -2.0]), light(head="other", teacher_logprobs=[-3.0, -4.0])]
    (block,) = tensors([(row,) for row in rows], torch.bfloat16).blocks
    assert block.with_heads({}) is block
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
    (block,) = tensors([(row,) for row in rows], torch.bfloat16).blocks
    assert block.with_heads({}) is block
    assert isinstance(block, TopKBlock)
    assert block.ids_N_K.tolist() == [[5, 6], [7, 8], [1, 2]]
    assert block.logprob_N_K.tolist() == [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]


def test_an_empty_micro_batch_has_no_block() -> None:
    batch = tensors([], torch.float32)
    assert (batch.blocks, batch.trained_lengths, len(batch.token_N)) == ((), (), 0)


# Samples with several teachers


def asked(sample_id: str, **teachers: float) -> list[TargetRow]:
    """A row from each teacher, weights as they come out of a stream."""
    return [light(sample_id=sample_id, teacher=t, weight=float(np.float32(w))) for t, w in teachers.items()]


def test_rows_are_gathered_by_sample_in_the_order_of_teachers_names() -> None:
    third = 1 / 3
    parts = [asked("a", t=0.25, s=0.75), asked("b", s=1.0), asked("c", u=third, s=third, t=third)]
    rows = [row for part in parts for row in part]
    want = {"a": ["s", "t"], "b": ["s"], "c": ["s", "t", "u"]}
    for seed in range(5):  # streams come from workers in any order
        random.Random(seed).shuffle(rows)
        found = gather_samples(rows)
        assert {i: [row.teacher for row in scored] for i, scored in found.items()} == want
        assert [row.weight for row in found["a"]] == [0.75, 0.25]
        assert all(row.rollout.sample_id == i for i, scored in found.items() for row in scored)
    assert gather_samples([]) == {}


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([*asked("a", s=0.5, t=0.5), *asked("b", s=0.5, t=0.5)[:1]], "sample b: scored by s 0.5;"),
        ([*asked("a", s=0.5), *asked("a", s=0.5)], "sample a: scored by s 0.5, s 0.5;"),
        ([*asked("a", s=1.0), *asked("a", t=1.0)], "sample a: scored by s 1, t 1;"),
        (asked("a", s=0.6, t=0.3), "sample a: scored by s 0.6, t 0.3;"),
        (asked("a", s=0.999), "sample a: scored by s 0.999;"),
    ],
    ids=["one is missing", "one came twice", "each alone", "too little", "a little too little"],
)
def test_teachers_that_are_not_all_there_once_stop_the_step(rows: list[TargetRow], parts: str) -> None:
    with pytest.raises(RunError, match=parts + " the weights of its teachers do not add up to 1"):
        gather_samples(rows)


@pytest.fixture(scope="module")
def experts(expert_dirs: dict[str, Path], make_model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three teachers by name; one is wider than the student."""
    from transformers import AutoModelForCausalLM

    wide = make_model_dir(tmp_path_factory.mktemp("wide") / "wide", seed=7, hidden=96, heads=3)
    dirs = {**expert_dirs, "wide": wide}
    return {n: AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval() for n, d in dirs.items()}


SHARES = [
    {"rev": 0.25, "up": 0.75}, {"rev": 0.25, "up": 0.75}, {"rev": 0.6, "up": 0.4}, {"rev": 1.0},
    {"rev": 0.2, "up": 0.3, "wide": 0.5}, {"wide": 1.0},
]  # fmt: skip
"""Teachers' weights of the first rows: one kind twice, the same two otherwise weighted, one teacher alone."""


def mixed_samples(experts: Any, payload: str = "hidden_states") -> list[tuple[TargetRow, ...]]:
    def row(index: int, name: str, weight: float) -> TargetRow:
        ids, prompt = ROWS[index]
        model, response = experts[name], ids[prompt:]
        mask = [i % 5 != 2 for i in range(len(response))]
        answer: dict[str, Any] = {"head": name, "hidden_size": model.config.hidden_size}
        if payload == "sampled_logprobs":
            logq = alone(model, ids)[range(prompt - 1, len(ids) - 1), response]
            answer = {"teacher_logprobs": logq[torch.tensor(mask)].tolist()}
        row = scored(model, ids, prompt, sample_id=f"s{index}", weight=float(np.float32(weight)), loss_mask=mask)
        return changed(row, teacher=name, **answer)

    rows = [row(i, name, w) for i, shares in enumerate(SHARES) for name, w in shares.items()]
    return [gather_samples(rows)[f"s{i}"] for i in range(len(SHARES))]


def heads_of(experts: Any) -> dict[str, Head]:
    return {name: Head(m.get_output_embeddings().weight.detach(), IDENTITY) for name, m in experts.items()}


def gradient_of(lm: Any, loss: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters()}


def assert_same_gradient(lm: Any, loss: Tensor, wanted: Tensor) -> None:
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    found, want = gradient_of(lm, loss), gradient_of(lm, wanted)
    for name in want:
        assert float((found[name] - want[name]).norm()) < 1e-4 * float(want[name].norm()), name


def plain_terms(lm: Any, experts: Any) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor, Tensor]]:
    """Of each sample [R, V] log-probs of the student, of each teacher, the sampled ids and the mask."""
    for (ids, prompt), shares in zip(ROWS, SHARES, strict=False):
        p = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)[prompt - 1 : -1]
        qs = {name: alone(experts[name], ids)[prompt - 1 : -1] for name in shares}
        yield p, qs, torch.tensor(ids[prompt:]), torch.tensor([float(i % 5 != 2) for i in range(len(ids) - prompt)])


def test_a_mixtures_loss_is_the_weighted_sum_of_its_teachers_written_plainly(lm: Any, experts: Any) -> None:
    batch = tensors(mixed_samples(experts), torch.float32)
    runs = [block for block in batch.blocks if isinstance(block, HiddenRun)]
    pair = ("rev", "up")
    assert [run.heads for run in runs] == [pair, pair, ("rev",), ("rev", "up", "wide"), ("wide",)]
    assert [run.weights for run in runs] == [
        pytest.approx(w) for w in [(0.25, 0.75), (0.6, 0.4), (1,), (0.2, 0.3, 0.5), (1,)]
    ]
    assert [type(run.with_heads(heads_of(experts))) for run in runs] == [
        MixtureBlock, MixtureBlock, TeacherBlock, MixtureBlock, TeacherBlock
    ]  # fmt: skip
    assert all(abs(sum(run.weights) - 1) < 1e-12 for run in runs), "to more places than they travelled with"
    total, num = torch.zeros(()), len(batch.token_N)
    for (p, qs, _, mask), shares in zip(plain_terms(lm, experts), SHARES, strict=True):
        for name, q in qs.items():
            total = total + shares[name] * (mask * (p.exp() * (p - q)).sum(-1)).sum() / num
    loss, stats = student(lm)(batch, heads_of(experts), {"divergence": torch.full((num,), 1 / num)})
    assert_same_gradient(lm, loss, total)
    assert bool(stats.kl_N.isfinite().all())


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs"])
def test_a_sampled_mixture_weights_its_teachers_log_probs(payload: str, lm: Any, experts: Any) -> None:
    batch = tensors(mixed_samples(experts, payload), torch.float32)
    num = len(batch.token_N)
    total, logqs = torch.zeros(()), []
    for (p, qs, token, mask), shares in zip(plain_terms(lm, experts), SHARES, strict=True):
        logp = p.gather(1, token[:, None])[:, 0]
        logq = sum(shares[name] * q.gather(1, token[:, None])[:, 0] for name, q in qs.items())
        mu = torch.tensor([-0.25 * i for i in range(len(token))])  # as `scored` has it
        logqs.append(logq[mask.bool()])
        ratio = (logp.detach() - mu).exp().clamp(max=2.0)
        total = total + (mask * ratio * (logp.detach() - logq) * logp).sum() / num
    sampled = Student(lm, SampledKL(ratio_clip=2.0), chunk=16, vocab_size=76)
    loss, _ = sampled(batch, heads_of(experts), {"divergence": torch.full((num,), 1 / num)})
    found, want = gradient_of(lm, loss), gradient_of(lm, total)
    for name in want:
        assert float((found[name] - want[name]).norm()) < 1e-4 * float(want[name].norm()), name
    if payload == "sampled_logprobs":
        (block,) = batch.blocks
        assert isinstance(block, SampledBlock)
        assert block.baseline_N is None
        torch.testing.assert_close(block.logprob_N, torch.cat(logqs), rtol=0, atol=1e-5)


def test_top_k_of_several_teachers_is_a_bug_of_the_caller() -> None:
    rows = tuple(light(teacher=t, weight=0.5, topk_ids=[5, 6], topk_logprobs=[-1.0, -2.0]) for t in "st")
    with pytest.raises(AssertionError, match="does not mix"):
        tensors([rows], torch.float32)


# A baseline without the own response


def answered(
    sample_id: str, q: Sequence[float], mu: Sequence[float], mask: Sequence[bool] | None = None, **changes: Any
) -> TargetRow:
    """A response with the teacher's log-probs of the trained tokens, and the engine's of all."""
    return light(
        sample_id=sample_id, response_ids=[0] * len(mu), teacher_logprobs=list(q), behaviour_logprobs=list(mu),
        loss_mask=[True] * len(mu) if mask is None else list(mask), **changes,
    )  # fmt: skip


def one_each(*rows: TargetRow) -> dict[str, tuple[TargetRow, ...]]:
    return {row.rollout.sample_id: (row,) for row in rows}


def some_step(seed: int) -> dict[str, tuple[TargetRow, ...]]:
    """Responses of two domains, one to five tokens, some with two teachers."""
    rng = random.Random(seed)
    samples = {}
    for i in range(9):
        length = rng.randint(1, 5)
        mask = [rng.random() < 0.7 for _ in range(length)]
        mu = [-rng.random() for _ in mask]
        shares = {"s": 0.25, "t": 0.75} if i % 3 else {"s": 1.0}
        samples[f"{i}"] = tuple(
            answered(f"{i}", [-rng.random() for m in mask if m], mu, mask, teacher=t, weight=w, domain="xy"[i % 2])
            for t, w in shares.items()
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("seed", range(5))
def test_a_baseline_is_the_mean_advantage_of_the_domains_other_responses(seed: int) -> None:
    samples = some_step(seed)
    found = leave_one_out_baselines(samples)
    assert list(found) == list(samples)
    for own, scored_own in samples.items():
        others: list[float] = []
        for other, rows in samples.items():
            if other == own or rows[0].rollout.domain != scored_own[0].rollout.domain:
                continue
            for n, t in enumerate(rows[0].rollout.trained_positions):
                logq = sum(row.weight * row.answer.teacher_logprobs[n] for row in rows)
                others.append(logq - rows[0].rollout.behaviour_logprobs[t])
        assert found[own] == pytest.approx(sum(others) / len(others), rel=1e-9)


def test_a_baseline_depends_on_every_response_but_its_own() -> None:
    samples = some_step(0)
    assert all(sum(rows[0].rollout.loss_mask) for rows in samples.values()), "all must have something to say"
    before = leave_one_out_baselines(samples)
    for own, rows in samples.items():
        moved = tuple(changed(row, teacher_logprobs=[x - 3 for x in row.answer.teacher_logprobs]) for row in rows)
        after = leave_one_out_baselines({**samples, own: moved})
        domain = rows[0].rollout.domain
        assert after[own] == pytest.approx(before[own], abs=1e-12)
        for other, scored_other in samples.items():
            if other != own:
                is_other = abs(after[other] - before[other]) > 0.1
                assert is_other == (scored_other[0].rollout.domain == domain)


def test_a_response_that_is_alone_has_no_baseline() -> None:
    alone_in_x = answered("a", [-1.0, -2.0], [-0.5, -0.5], domain="x")
    untrained = answered("b", [], [-0.5], [False], domain="x")
    elsewhere = answered("c", [-9.0], [-0.5], domain="y")
    assert leave_one_out_baselines(one_each(alone_in_x, untrained, elsewhere)) == {
        "a": 0.0, "b": pytest.approx(-1.0), "c": 0.0
    }  # fmt: skip
    assert leave_one_out_baselines({}) == {}


def test_each_token_of_a_response_has_its_baseline() -> None:
    rows = [answered("a", [-1.0, -2.0], [-0.5, -0.5]), answered("b", [-4.0], [-1.0]), answered("c", [-3.0], [-3.0])]
    samples = one_each(*rows)
    (block,) = tensors(list(samples.values()), torch.float32, leave_one_out_baselines(samples)).blocks
    assert isinstance(block, SampledBlock)
    assert block.baseline_N is not None
    # a: (-3 + 0) / 2; b: (-0.5 - 1.5 + 0) / 3; c: (-0.5 - 1.5 - 3) / 3
    torch.testing.assert_close(block.baseline_N, torch.tensor([-1.5, -1.5, -2 / 3, -5 / 3]))


# Whole responses whose later tokens depend on earlier ones: the mean over many steps is the exact gradient


STEPS, GROUP, LENGTH, WORDS = 6000, 3, 2, 3
START = WORDS
"""State before the first word; after it a word's own number is the state."""


@dataclass(frozen=True)
class Chain:
    """Steps of GROUP responses from a student that is a Markov chain, all [STEPS, GROUP, LENGTH]."""

    student: Tensor
    """[WORDS + 1, WORDS] logits by state."""
    teacher: Tensor
    """[WORDS + 1, WORDS] log-probs by state."""
    state: Tensor
    word: Tensor
    advantage: Tensor
    """log q - log p of each word."""

    def gradients(self, baseline: Tensor | None) -> Tensor:
        """[STEPS, (WORDS + 1) * WORDS] by the student's logits, of each step the mean over its tokens."""
        flat, word = self.state.flatten(), self.word.flatten()
        hidden = self.student[flat].clone().requires_grad_()
        block = SampledBlock(self.teacher[flat, word], None if baseline is None else baseline.flatten())
        mu = self.student.log_softmax(-1)[flat, word]
        weight = torch.full_like(mu, 1 / (GROUP * LENGTH))
        loss, _ = chunked_objective(
            SampledKL(), hidden, torch.eye(WORDS, dtype=torch.float64), [block], weight, word, mu, chunk=1 << 16,
            vocab_size=WORDS,
        )  # fmt: skip
        (by_token,) = torch.autograd.grad(loss, hidden)
        steps = torch.arange(STEPS).repeat_interleave(GROUP * LENGTH)
        table = torch.zeros(STEPS, WORDS + 1, WORDS, dtype=torch.float64)
        return table.index_put_((steps, flat), by_token, accumulate=True).flatten(1)

    def exact(self) -> Tensor:
        """[(WORDS + 1) * WORDS] of sum_s visits(s) KL(p_s || q_s), the visits held fixed."""
        logits = self.student.clone().requires_grad_()
        p = logits.log_softmax(-1)
        visits = torch.cat([p[START].exp(), torch.ones(1)]).detach() / LENGTH
        (visits * (p.exp() * (p - self.teacher)).sum(-1)).sum().backward()
        assert logits.grad is not None
        return logits.grad.flatten()


@pytest.fixture(scope="module")
def chain() -> Chain:
    gen = torch.Generator().manual_seed(11)
    logits = torch.tensor([[0.5, -0.5, 0.0], [0.0, 0.4, -0.4], [-0.3, 0.0, 0.6], [0.2, 0.0, -0.2]]).double()
    # After word 0 the teacher agrees, after word 2 it is far off: the second word's advantage depends on the first.
    teacher = torch.tensor([[0.6, -0.5, 0.1], [0.8, -0.4, 0.2], [3.0, -1.0, -3.0], [0.0, 0.5, -0.5]]).double()
    p = logits.softmax(-1)
    first = torch.multinomial(p[START], STEPS * GROUP, replacement=True, generator=gen)
    second = torch.multinomial(p[first], 1, generator=gen)[:, 0]
    word = torch.stack([first, second], -1).view(STEPS, GROUP, LENGTH)
    state = torch.stack([torch.full_like(first, START), first], -1).view(STEPS, GROUP, LENGTH)
    logq = teacher.log_softmax(-1)
    return Chain(logits, logq, state, word, logq[state, word] - logits.log_softmax(-1)[state, word])


def standard_errors_off(grads: Tensor, exact: Tensor) -> float:
    """Largest distance of the mean over steps from the exact gradient."""
    return float(((grads.mean(0) - exact).abs() / (grads.std(0) / len(grads) ** 0.5)).max())


def by_leave_one_out(chain: Chain) -> Tensor:
    """[STEPS, GROUP, LENGTH] what `leave_one_out` says of each step."""
    mu = chain.student.log_softmax(-1)[chain.state, chain.word].tolist()
    logq = chain.teacher[chain.state, chain.word].tolist()
    values = []
    for qs, mus in zip(logq, mu, strict=True):
        found = leave_one_out_baselines(one_each(*(answered(f"{g}", qs[g], mus[g]) for g in range(GROUP))))
        values.append([[found[f"{g}"]] * LENGTH for g in range(GROUP)])
    return torch.tensor(values, dtype=torch.float64)


def by_all_other_tokens(chain: Chain) -> Tensor:
    """The same, but of all tokens except the one itself: the later word of the same response is among them."""
    total = chain.advantage.sum((1, 2), keepdim=True)
    return (total - chain.advantage) / (GROUP * LENGTH - 1)


def test_the_baseline_of_other_responses_leaves_the_mean_gradient_where_it_is(chain: Chain) -> None:
    exact = chain.exact()
    plain, with_baseline = chain.gradients(None), chain.gradients(by_leave_one_out(chain))
    assert standard_errors_off(plain, exact) < 4
    assert standard_errors_off(with_baseline, exact) < 4
    assert standard_errors_off(with_baseline - plain, torch.zeros_like(exact)) < 4
    assert standard_errors_off(plain, torch.zeros_like(exact)) > 20, "the test is blunt"


def test_counter_example_a_baseline_with_later_words_of_the_same_response_is_biased(chain: Chain) -> None:
    grads = chain.gradients(by_all_other_tokens(chain))
    assert standard_errors_off(grads, chain.exact()) > 6
    first = grads.view(STEPS, WORDS + 1, WORDS)
    wanted = chain.exact().view(WORDS + 1, WORDS)
    assert standard_errors_off(first[:, START], wanted[START]) > 6
    # The last word has no later one: there it is only noise.
    assert standard_errors_off(first[:, :START].flatten(1), wanted[:START].flatten()) < 4
