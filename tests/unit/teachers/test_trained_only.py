"""Teachers answer about trained tokens only, and a step learns what it would learn from answers about all tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.interfaces import Objective
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.losses.top_k import TopK
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.payloads import answer_class
from opd.records.types import Rollout, Span, Teacher
from opd.stream.schema import StreamError, TargetRow, read_stream, write_stream
from opd.train.batch import build_micro_batch, leave_one_out_baselines
from opd.train.student import Student
from opd.train.totals import Totals, token_weights
from teachers.scorers import ScorerOptions
from teachers.scorers.transformers import TransformersScorer
from teachers.scorers.vllm import VLLMScorer
from tests.rows import spans_of
from tests.unit.teachers.conftest import rollout

K, WIDTH, VOCABULARY = 4, 64, 76
OBJECTIVES: dict[str, Objective] = {"hidden_states": ReverseKL(), "sampled_logprobs": SampledKL(), "top_k": TopK()}
OPTIONS: dict[str, Any] = {"dtype": "float32", "top_k": K, "vocab_size": VOCABULARY, "memory_bytes": 1 << 30}


def turns(i: int, *lengths: int) -> Rollout:
    """An episode in one sequence: the policy and an environment write in turn, and the last tokens are masked."""
    origins: Any = ["policy", "environment"] * len(lengths)
    spans = tuple(Span(length=n, origin=o, policy_version=0) for n, o in zip(lengths, origins, strict=False))
    made = rollout(i, prompt=3 + i, response=sum(lengths) + 1)
    return replace(made, spans=(*spans, Span(length=1, origin="masked", policy_version=0)))


GIVEN = [turns(0, 4, 5, 3), turns(1, 0, 6), turns(2, 1, 1, 1, 1, 2), rollout(3, response=7)]
"""Policy, environment, policy; no trained token at all; many turns; one turn."""
TRAINED = [7, 0, 4, 7]


def whole(given: Rollout) -> Rollout:
    """The same tokens, all of them trained."""
    return replace(given, spans=spans_of((True,) * len(given.response_ids)))


def score(payload: str, teacher: Teacher, given: list[Rollout]) -> list[TargetRow]:
    """Rows in the order of the rollouts, after their way through a stream."""
    scoring = TransformersScorer(ScorerOptions(payload=payload, **OPTIONS), "cpu")
    rows = [row for batch in scoring.score(teacher, given, {}) for row in batch]
    sent = read_stream(write_stream(rows, "float32", payload), VOCABULARY).rows
    return sorted(sent, key=lambda row: row.rollout.sample_id)


def columns(row: TargetRow) -> list[Tensor]:
    """[N, ...] each column of an answer."""
    num = row.rollout.num_trained
    values = [getattr(row.answer, name) for name, _ in row.answer.ROW]
    numbers = [
        torch.frombuffer(bytearray(v), dtype=torch.float32) if isinstance(v, memoryview) and v else v for v in values
    ]
    return [torch.as_tensor([] if isinstance(v, memoryview) else v).view(num, -1 if num else 1) for v in numbers]


@pytest.mark.parametrize("payload", OBJECTIVES)
def test_what_is_sent_holds_trained_positions_only(payload: str, teachers: dict[str, Teacher]) -> None:
    teacher = teachers["reverse"]
    rows, wholes = score(payload, teacher, GIVEN), score(payload, teacher, [whole(r) for r in GIVEN])
    each = answer_class(payload).token_bytes(hidden_size=WIDTH, itemsize=4, top_k=K)
    assert [row.rollout.num_trained for row in rows] == TRAINED
    assert [row.answer.nbytes for row in rows] == [num * each for num in TRAINED]
    assert [row.answer.nbytes for row in wholes] == [len(r.response_ids) * each for r in GIVEN]
    for some, all_of_them in zip(rows, wholes, strict=True):
        for found, want in zip(columns(some), columns(all_of_them), strict=True):
            if some.rollout.trained_positions:  # fewer rows in a product: another order of sums on some processors
                torch.testing.assert_close(found, want[list(some.rollout.trained_positions)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("payload", OBJECTIVES)
def test_an_answer_about_all_tokens_is_refused(payload: str, teachers: dict[str, Teacher]) -> None:
    (row,) = score(payload, teachers["reverse"], [whole(GIVEN[0])])
    with pytest.raises(StreamError, match=f"row {GIVEN[0].sample_id}: 7 trained tokens, payload {payload}"):
        read_stream(write_stream([replace(row, rollout=GIVEN[0])], "float32", payload))


def learned(
    payload: str, lm: Any, teacher_head: Tensor, rows: list[TargetRow], masks: list[list[bool]]
) -> tuple[float, Tensor, Totals]:
    """Loss, gradient and sums of one micro-batch; tokens that `masks` leaves out weigh nothing."""
    student = Student(lm, OBJECTIVES[payload], chunk=5, vocab_size=VOCABULARY)
    student.zero_grad()
    batch = build_micro_batch([(row,) for row in rows], torch.float32)
    heads = {key: Head(teacher_head, IDENTITY) for block in batch.blocks for key in block.head_keys()}
    mask_N = torch.tensor([m for mask in masks for m in mask], dtype=torch.bool)
    weight_N = torch.where(mask_N, token_weights(batch, [0.25, 0.5, 0.125, 0.3][: len(rows)]), 0.0)
    loss, stats = student(batch, heads, {"divergence": weight_N})
    loss.backward()
    totals = Totals()
    totals.add(batch, {"divergence": weight_N}, stats)
    grads = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    return float(loss.detach()), grads, totals


@pytest.mark.parametrize("payload", OBJECTIVES)
def test_loss_and_gradients_are_those_of_all_positions_masked(
    payload: str, teachers: dict[str, Teacher], tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    teacher = teachers["reverse"]
    rows, wholes = score(payload, teacher, GIVEN), score(payload, teacher, [whole(r) for r in GIVEN])
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa")
    head = AutoModelForCausalLM.from_pretrained(teacher.model_dir, dtype=torch.float32).get_output_embeddings()
    head_V_D = head.weight.detach()
    found = learned(payload, lm, head_V_D, rows, [[True] * n for n in TRAINED])
    want = learned(payload, lm, head_V_D, wholes, [list(r.loss_mask) for r in GIVEN])
    assert found[0] == pytest.approx(want[0], rel=1e-5) and abs(want[0]) > 1e-3
    assert float((found[1] - want[1]).norm()) < 1e-5 * float(want[1].norm())
    assert found[2].loss == pytest.approx(want[2].loss, rel=1e-5)
    assert (found[2].domains["reverse"].tokens, found[2].domains["reverse"].samples) == (18, 3)
    places = [place for r in GIVEN for place in r.trained_positions]
    assert {bits: p.tokens for bits, p in sorted(found[2].positions.items())} == {
        bits: sum(place.bit_length() == bits for place in places) for bits in range(5)
    }


@pytest.mark.parametrize("payload", OBJECTIVES)
def test_a_micro_batch_without_a_trained_token_moves_nothing(
    payload: str, teachers: dict[str, Teacher], tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    rows = score(payload, teachers["reverse"], [GIVEN[1]])
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa")
    loss, grads, totals = learned(payload, lm, torch.zeros(VOCABULARY, WIDTH), rows, [[]])
    assert loss == 0 and not grads.any()
    assert (totals.domains["reverse"].tokens, totals.domains["reverse"].samples, totals.positions) == (0, 0, {})


def test_a_baseline_counts_trained_tokens_only(teachers: dict[str, Teacher]) -> None:
    rows = score("sampled_logprobs", teachers["reverse"], GIVEN)
    samples = {row.rollout.sample_id: (row,) for row in rows}
    found = leave_one_out_baselines(samples)
    ratios = [[q + 1.0 for q in row.answer.teacher_logprobs] for row in rows]  # each log mu is -1
    for i, row in enumerate(rows):
        others = [x for j, mine in enumerate(ratios) if j != i for x in mine]
        assert found[row.rollout.sample_id] == pytest.approx(sum(others) / len(others))
    (block,) = build_micro_batch([(row,) for row in rows], torch.float32, found).blocks
    assert len(block) == 18


# An engine that gives states or log-probs at every position of the sequence


class Engine:
    """States [t, t + 0.5], and log-prob -t of the token that stands at place t of the sequence."""

    def encode(self, prompts: list[Any], **_: Any) -> list[Any]:
        lengths = [len(p["prompt_token_ids"]) for p in prompts]
        states = [torch.arange(n)[:, None] + torch.tensor([0.0, 0.5]) for n in lengths]
        return [SimpleNamespace(outputs=SimpleNamespace(data=data)) for data in states]

    def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        ids = [p["prompt_token_ids"] for p in prompts]
        steps = [[{token: SimpleNamespace(logprob=-float(t))} for t, token in enumerate(one)] for one in ids]
        return [SimpleNamespace(prompt_logprobs=step) for step in steps]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    anything = SimpleNamespace(SamplingParams=lambda **_: None, PoolingParams=lambda **_: None)
    monkeypatch.setitem(sys.modules, "vllm", anything)


@pytest.mark.parametrize("given", GIVEN)
def test_an_engines_states_and_log_probs_are_taken_at_trained_tokens(given: Rollout, vllm: None) -> None:
    places = [len(given.prompt_ids) + place for place in given.trained_positions]
    pooling = VLLMScorer(ScorerOptions(payload="hidden_states", **OPTIONS))
    pooling._llm = Engine()
    (answer,) = pooling._run_engine([given], "h")
    assert answer is not None
    assert answer.states(torch.float32).tolist() == [[t - 1.0, t - 0.5] for t in places], (
        "a token is predicted one place before it"
    )
    generating = VLLMScorer(ScorerOptions(payload="sampled_logprobs", **OPTIONS))
    generating._llm = Engine()
    (answer,) = generating._run_engine([given], "")
    assert answer is not None and list(answer.teacher_logprobs) == [-float(t) for t in places]
