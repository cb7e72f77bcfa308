"""Compare the student with one teacher on the same tokens, in one process. It runs in a Ray actor but does not know Ray.

The teacher goes through the scorer that a merge uses, the student through the trainer's own module and loss, both in
float32. So the comparison covers the code that a merge would run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from opd.config.payloads import OWN_TOKENS
from opd.errors import RunError
from opd.losses.aligned_kl import AlignedKL
from opd.losses.chunked import Loss, LossHead, Tokens
from opd.losses.reverse_kl import ReverseKLConfig
from opd.machine.devices import to_device
from opd.models.heads import Head, logit_rule
from opd.models.layouts import find_positions_before_trained, lay_out_single
from opd.models.weights import load_causal_lm
from opd.payloads.aligned_states import AlignedRun, AlignedStates
from opd.payloads.hidden_states import HiddenStates
from opd.records.types import EncodedRollout, Rollout, Teacher
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.train.student import Student
from opd.vocabularies.spelling import Spelling, build_tables
from teachers.probe import check_probe, cut_head
from teachers.scorers import ScorerOptions, make_scorer
from teachers.scorers.division import measure_free_memory

PAYLOAD, DTYPE = "hidden_states", "float32"
"""Answers of the teachers, and type of all numbers, for the comparison."""
NO_LIMIT = 1 << 60
"""Bytes, more than any disk has."""
OBJECTIVE = ReverseKLConfig(kind="reverse_kl")
"""Its loss computes the KL and the agreement of both models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherComparison:
    """Means over tokens for one teacher; None where there was no token."""

    broken: str = ""
    """Reason why the teacher cannot be used at all; then there are no figures. Empty if it can."""
    kl: float | None = None
    """|KL(student || teacher)| on the student's responses, nats."""
    overlap: float | None = None
    """Share of the responses' tokens where both rank the same token first."""
    prompt_nll: float | None = None
    """-log q of the domain's prompts, nats a token."""
    answer_nll: float | None = None
    """-log q of the domain's answers, nats a token."""

    def guessing_ratio(self, vocab_size: int) -> float | None:
        """Return the smaller NLL, of prompts or of answers, as a share of ln V, the NLL of a blind guess among all tokens.

        A model that was only trained on answers may know nothing of prompts, and one that reasons first nothing of bare
        answers. A garbled one knows neither.
        """
        measured_nlls = [nll for nll in (self.prompt_nll, self.answer_nll) if nll is not None]
        if any(map(math.isnan, measured_nlls)):  # `min` might drop a NaN and return the other number
            return math.nan
        return min(measured_nlls) / math.log(vocab_size) if measured_nlls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensComparison:
    """Means for one teacher with another tokenizer; None where there was nothing to measure."""

    broken: str = ""
    """Reason why the teacher cannot be used at all; then there are no figures. Empty if it can."""
    single: float | None = None
    """Share of the chunks that are one token on both sides."""
    student_mass: float | None = None
    """The student's probability, before each chunk, of the tokens that are not longer than the teacher's."""
    gap: float | None = None
    """The objective's value, nats a token of the student's."""
    overlap: float | None = None
    """Share of the chunks of one token of the teacher's before which both rank the same token first."""


class Comparer:
    """Holds the student, and one teacher at a time."""

    def __init__(self, student_dir: Path, merge: ScorerOptions) -> None:
        """`merge` are the options of the merge's scoring workers."""
        vocab_size = merge.vocab_size
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        lm = load_causal_lm(student_dir, getattr(torch, DTYPE))
        objective = OBJECTIVE.build()
        student = Student(lm, objective, chunk=OBJECTIVE.chunk, vocab_size=vocab_size)
        self._student = student.to(self._device).eval()
        loss = Loss(objective=objective, chunk=OBJECTIVE.chunk, vocab_size=vocab_size, rule=logit_rule(lm.config))
        self._loss = loss
        self._loss_head = LossHead(lm.get_output_embeddings().weight.detach().cpu(), loss)
        self._options = ScorerOptions(
            dtype=DTYPE,
            payload=PAYLOAD,
            top_k=0,
            vocab_size=vocab_size,
            memory_bytes=merge.memory_bytes,
            device_map=merge.device_map,
            # In float32 and beside the student a teacher may need more than the merge gives it.
            max_memory={**measure_free_memory(), "disk": NO_LIMIT} if merge.device_map else {},
        )
        self._scorer = make_scorer("transformers", self._options)

    def compare_teacher(
        self, teacher: Teacher, responses: Sequence[Rollout], texts: Sequence[Rollout]
    ) -> TeacherComparison:
        """Measure one teacher against the student. `responses` are the student's; `texts` are prompts with their answers as
        `response_ids`."""
        try:
            self._scorer.head_key(teacher)
            check_probe(self._scorer, teacher, self._options)
            kl, overlap = self._measure_distance(teacher, responses)
            prompt_nll, answer_nll = self._measure_nll(teacher, texts)
        except RunError as error:  # about this teacher alone; others can be compared
            return TeacherComparison(broken=str(error))
        return TeacherComparison(kl=kl, overlap=overlap, prompt_nll=prompt_nll, answer_nll=answer_nll)

    def compare_own_tokens(
        self, teacher: Teacher, spelling: Spelling, rollouts: Sequence[EncodedRollout]
    ) -> TokensComparison:
        """Measure a teacher with another tokenizer against the student, on the student's responses in the teacher's tokens."""
        options = replace(self._options, payload=OWN_TOKENS, spellings={teacher.name: spelling})
        scorer = make_scorer("transformers", options)
        broken: dict[str, str] = {}
        loss_head = LossHead(self._loss_head.weight, replace(self._loss, objective=AlignedKL()))
        try:
            tables = torch.from_numpy(build_tables(spelling).pack())
            head = Head(scorer.head(teacher), scorer.head_rule(teacher), tables)
            heads = {scorer.head_key(teacher): head}
            rows = [row.as_sampled() for batch in scorer.score(teacher, rollouts, broken) for row in batch]
            if broken:
                raise RunError(next(iter(broken.values())))
        except RunError as error:  # about this teacher alone; others can be compared
            return TokensComparison(broken=str(error))
        if not rows:
            return TokensComparison()
        batch = build_micro_batch([(row,) for row in rows], getattr(torch, DTYPE))
        tokens = Tokens(batch.token_N, torch.ones(len(batch.token_N)), batch.behaviour_N)
        _, stats = loss_head(self._student_hidden(rows), tokens, [block.with_heads(heads) for block in batch.blocks])
        columns = [block.columns for block in batch.blocks if isinstance(block, AlignedRun)]
        first_N = torch.cat([own.first_N for own in columns])
        spelt_N = torch.cat([own.spelt_N for own in columns])
        answers = [row.answer for row in rows if isinstance(row.answer, AlignedStates)]
        counts = [pair for own in answers for pair in zip(own.student_counts, own.teacher_counts, strict=True)]
        return TokensComparison(
            single=_mean_or_none([float(pair == (1, 1)) for pair in counts]),
            student_mass=_mean_or_none(stats.student_mass_N[first_N].tolist()),
            gap=_mean_or_none(stats.kl_N.tolist()),
            overlap=_mean_or_none(stats.agree_N[first_N & spelt_N].tolist()),
        )

    def _measure_distance(self, teacher: Teacher, responses: Sequence[Rollout]) -> tuple[float | None, float | None]:
        """Return the mean |KL| in nats, and the share of tokens on which both rank the same token first; None without a token."""
        kl: list[float] = []
        agree: list[float] = []
        heads = {self._scorer.head_key(teacher): Head(self._scorer.head(teacher), self._scorer.head_rule(teacher))}
        for rows in self._score_rows(teacher, responses):
            batch = build_micro_batch([(row,) for row in rows], getattr(torch, DTYPE))
            tokens = Tokens(batch.token_N, torch.ones(len(batch.token_N)), batch.behaviour_N)
            blocks = [block.with_heads(heads) for block in batch.blocks]
            _, stats = self._loss_head(self._student_hidden(rows), tokens, blocks)
            kl += stats.kl_N.abs().tolist()
            agree += stats.agree_N.tolist()
        return _mean_or_none(kl), _mean_or_none(agree)

    @torch.no_grad()
    def _student_hidden(self, rows: Sequence[TargetRow]) -> Tensor:
        """Return the student's hidden states, [N, D] on the CPU, like the teacher's. Each row is computed alone, so that an
        error of a scorer's layout shows."""
        parts = []
        for row in rows:
            packed = lay_out_single([*row.rollout.prompt_ids, *row.rollout.response_ids])
            states_T_D = self._student.compute_hidden_states(to_device(packed, self._device))
            parts.append(states_T_D[find_positions_before_trained(packed, [row.rollout])].cpu())
        return torch.cat(parts)

    def _measure_nll(self, teacher: Teacher, texts: Sequence[Rollout]) -> tuple[float | None, float | None]:
        """Return the mean NLL of prompts and of answers, nats a token; None without a token. A text's first token has no NLL."""
        num_prompt_nlls = {t.sample_id: max(0, len(t.prompt_ids) - 1) for t in texts}  # a prompt may have no token
        rollouts = [_from_second_token(t) for t in texts if len(t.prompt_ids) + len(t.response_ids) > 1]
        prompts: list[float] = []
        answers: list[float] = []
        for row in (row for rows in self._score_rows(teacher, rollouts) for row in rows):
            assert isinstance(row.answer, HiddenStates)
            head = cut_head(self._scorer, teacher, self._options)
            nll = (-row.answer.logprobs(row.rollout.trained_ids, getattr(torch, DTYPE), head)).tolist()
            prompts += nll[: num_prompt_nlls[row.rollout.sample_id]]
            answers += nll[num_prompt_nlls[row.rollout.sample_id] :]
        return _mean_or_none(prompts), _mean_or_none(answers)

    def _score_rows(self, teacher: Teacher, rollouts: Sequence[Rollout]) -> Iterator[list[TargetRow]]:
        """Yield the rollouts with the teacher's answers. Raises: RunError if it cannot score one of them."""
        broken: dict[str, str] = {}
        yield from (rows for rows in self._scorer.score(teacher, rollouts, broken) if rows)
        if broken:
            raise RunError(next(iter(broken.values())))


def _from_second_token(text: Rollout) -> Rollout:
    """Return the same tokens as a rollout in which every token but the first is scored."""
    ids = (*text.prompt_ids, *text.response_ids)
    return Rollout.from_tokens(text.sample_id, ids[:1], ids[1:], text.domain)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
