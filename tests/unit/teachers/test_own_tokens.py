"""A teacher with another tokenizer, from the pool to the loss: the student's rows come back, with the teacher's log-probs of their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.config import PipelineConfig
from opd.errors import RunError
from opd.losses.aligned_kl import AlignedKL
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.payloads.aligned_states import AlignedStates
from opd.prompts.encode import load_tokenizer
from opd.records.types import Probe, Rollout, Teacher, WeightedTeacher
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.vocabularies.response_encoder import ResponseEncoder
from pipelines.specs import pool_spec
from teachers.pool import Pool
from tests.conftest import build_tokenizer, read_rows
from tests.losses import chunked_objective
from tests.tokenizers import permute_model, train_sentencepiece
from tests.unit.teachers.conftest import VOCABULARY, rollout
from tests.unit.teachers.test_own_prompts import plain_logprobs
from tests.unit.teachers.test_pool import pool


def foreign_pool(model_dir: Path, workers: int = 1, probe: Probe | None = None) -> tuple[Pool, ResponseEncoder]:
    """A pool whose teacher has the tokenizer of its own directory; it reads the student's prompts as text."""
    own, tokenizer = build_tokenizer(), load_tokenizer(model_dir)
    encoder = ResponseEncoder(own, tokenizer, {own.eos_token_id: tokenizer.eos_token_id})
    teacher = WeightedTeacher(
        teacher=Teacher(name="foreign", model_dir=model_dir, probe=probe),
        weight=1.0,
        prompts=lambda rollout: encoder.encode_response(rollout.prompt_ids).token_ids,
        encoder=encoder,
    )
    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 1, "samples_per_step": 2},
            "objective": {"kind": "aligned_kl"},
            "teachers": {"workers": workers, "payload": "aligned_states", "max_quarantined": 0.5},
        }
    )
    made = Pool(pool_spec(config, VOCABULARY), {"reverse": (teacher,)})
    made.wait_ready()
    return made, encoder


@pytest.fixture
def permuted(expert_dirs: dict[str, Path], tmp_path: Path) -> Path:
    return permute_model(expert_dirs["rev"], tmp_path / "permuted")


def gradient(rows: Sequence[TargetRow], made: Pool, objective: Any) -> Tensor:
    """The loss's gradient by the logits of a student that knows no difference between tokens, but for some noise."""
    batch = build_micro_batch([(row,) for row in rows], torch.float32)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(batch.token_N), VOCABULARY, generator=generator).requires_grad_()
    sources = made.heads()
    heads = {
        key: Head(sources[key].read(), IDENTITY, sources[key].read_tables())
        for block in batch.blocks
        for key in block.head_keys()
    }
    blocks = [block.with_heads(heads) for block in batch.blocks]
    weights = torch.ones(len(batch.token_N))
    value, _ = chunked_objective(
        objective, logits, torch.eye(VOCABULARY), blocks, weights, batch.token_N, chunk=16, vocab_size=VOCABULARY
    )
    value.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_model_with_permuted_ids_gives_the_gradient_of_the_exact_loss(
    workers: int, permuted: Path, teachers: dict[str, Teacher], in_process: Any
) -> None:
    rollouts = [rollout(i, prompt=3 + i, response=2 + 3 * i) for i in range(4)]
    exact, (foreign, _) = pool({"reverse": teachers["reverse"]}, 1), foreign_pool(permuted, workers)

    def score(made: Pool) -> list[TargetRow]:
        return sorted(read_rows(made.score(rollouts)), key=lambda row: row.rollout.sample_id)

    own, other = score(foreign), score(exact)
    assert [row.rollout for row in own] == [row.rollout for row in other] == rollouts
    wanted = gradient(other, exact, ReverseKL())
    torch.testing.assert_close(gradient(own, foreign, AlignedKL()), wanted, rtol=1e-5, atol=1e-5)
    assert wanted.abs().max() > 1e-2


def test_another_tokenizer_scores_the_text_of_the_response(
    make_model_dir: Callable[..., Path], tmp_path: Path, in_process: Any
) -> None:
    tokenizer = train_sentencepiece(340, ["rev abcabc= cbacba", "the fox"])
    model_dir = make_model_dir(tmp_path / "other", tokenizer=tokenizer)
    own = build_tokenizer()
    text, answer = "rev abc=", "cbacba the abc"
    sent = Rollout.from_tokens(
        "000001/reverse/0",
        tuple(own.encode(text, add_special_tokens=False)),
        (*own.encode(answer, add_special_tokens=False), own.eos_token_id),
        "reverse",
    )
    made, encoder = foreign_pool(model_dir)
    (row,) = read_rows(made.score([sent]))
    assert row.rollout == sent and isinstance(row.answer, AlignedStates)
    encoded = encoder.encode_rollout(sent, encoder.encode_response(sent.prompt_ids).token_ids)
    plain = plain_logprobs(model_dir, encoded.prompt_ids, encoded.response_ids)
    assert max(encoded.alignment.student_counts) > 1
    assert sum(row.answer.student_counts) == len(sent.response_ids) == len(row.answer.text_logprobs)
    # What a piece of text gains because its last token may go on, the next one loses; the end of the turn does not go on.
    assert sum(row.answer.text_logprobs) == pytest.approx(sum(plain), abs=1e-4)
    assert any(row.answer.spelt) and max(row.answer.last_ids) >= 0
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    begin = [i for i, name in enumerate(names) if name.startswith(answer[0])]
    first = torch.tensor([plain_logprobs(model_dir, encoded.prompt_ids, (i,))[0] for i in begin])
    assert len(begin) > 1 and row.answer.text_logprobs[0] == pytest.approx(float(first.logsumexp(0)), abs=1e-4)
    assert torch.isfinite(gradient([row], made, AlignedKL())).all()


def test_the_probe_of_its_registration_is_in_its_own_tokens(
    make_model_dir: Callable[..., Path], tmp_path: Path, in_process: Any
) -> None:
    tokenizer = train_sentencepiece(340, ["rev abcabc= cbacba", "the fox"])
    model_dir = make_model_dir(tmp_path / "other", tokenizer=tokenizer)
    # The last ids are pieces of text, some of which begin others.
    ids = tuple(range(len(tokenizer) - 60, len(tokenizer)))
    probe = Probe(token_ids=ids, logprobs=tuple(plain_logprobs(model_dir, ids[:1], ids[1:])), dtype="float32")
    made, _ = foreign_pool(model_dir, probe=probe)
    assert made.heads()
    other = replace(probe, logprobs=tuple(value - 1 for value in probe.logprobs))
    with pytest.raises(RunError, match="differ by 1"):
        foreign_pool(model_dir, probe=other)


def test_a_response_that_the_teacher_cannot_read_is_left_out_by_its_id(
    make_model_dir: Callable[..., Path], tmp_path: Path, in_process: Any
) -> None:
    model_dir = make_model_dir(tmp_path / "other", tokenizer=train_sentencepiece(340))
    own = build_tokenizer()
    readable = [i for i in range(len(own)) if i not in own.all_special_ids]
    good = Rollout.from_tokens("000001/reverse/0", tuple(readable[:3]), tuple(readable[:5]), "reverse")
    bad = Rollout.from_tokens("000001/reverse/1", tuple(readable[:3]), (5, own.pad_token_id), "reverse")
    empty = Rollout.from_tokens("000001/reverse/2", tuple(readable[:3]), (), "reverse")
    made, _ = foreign_pool(model_dir)
    targets = made.score([good, bad, empty])
    rows = {row.rollout.sample_id: row for row in read_rows(targets)}
    assert sorted(rows) == [good.sample_id, empty.sample_id]
    assert len(gradient(list(rows.values()), made, AlignedKL())) == len(good.response_ids)
    assert targets.quarantined == {bad.sample_id: "teacher foreign: the special token '<pad>', which the teacher lacks"}
