"""The loss to a teacher with another tokenizer: its exact part, and the mean of its estimate over all responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log

import pytest
import torch
from torch import Tensor

from opd.losses.aligned_kl import AlignedKL
from opd.losses.blocks import Block
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.payloads.aligned_states import AlignedStates
from opd.payloads.answer import TeacherStates
from opd.payloads.hidden_states import HiddenStates
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.vocabularies.alignment import align_tokens
from opd.vocabularies.spelling import Spelling, build_tables
from tests.losses import chunked_objective
from tests.rows import make_rollout

V, D = 7, 5
NEVER = -60.0
"""A logit without probability."""


def gradient(
    answer: AlignedStates | HiddenStates, head: Head, logits_N_V: Tensor, ids: Sequence[int], clip: float | None = None
) -> Tensor:
    """Return [N, V] the loss's gradient by the student's logits, with weight 1 for each token sampled from these very logits."""
    logp_N_V = logits_N_V.detach().log_softmax(-1)
    behaviour = tuple(float(logp_N_V[n, i]) for n, i in enumerate(ids))
    hidden = logits_N_V.detach().clone().requires_grad_()
    objective = AlignedKL(clip) if isinstance(answer, AlignedStates) else ReverseKL()
    value, _ = chunked_objective(
        objective,
        hidden,
        torch.eye(logits_N_V.shape[1], dtype=torch.float64),
        build_blocks(answer, head, ids, behaviour),
        torch.ones(len(ids), dtype=torch.float64),
        torch.tensor(ids),
        torch.tensor(behaviour, dtype=torch.float64),
        chunk=3,
        vocab_size=logits_N_V.shape[1],
    )
    value.backward()
    assert hidden.grad is not None
    return hidden.grad


def build_blocks(
    answer: AlignedStates | HiddenStates, head: Head, ids: Sequence[int], behaviour: Sequence[float]
) -> list[Block]:
    rollout = make_rollout(
        sample_id="a", step=1, domain="d", prompt_ids=(0,), response_ids=tuple(ids), behaviour_logprobs=tuple(behaviour)
    )
    batch = build_micro_batch([(TargetRow(rollout=rollout, teacher="t", answer=answer),)], torch.float64)
    return [block.with_heads({"head": head}) for block in batch.blocks]


@cache
def cut_text(text: str, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """The ids of a text: always the longest token that fits."""
    ids = []
    while text:
        own = max((token for token in tokens if text.startswith(token)), key=len)
        ids.append(tokens.index(own))
        text = text[len(own) :]
    return tuple(ids)


@dataclass(frozen=True)
class Pair:
    """Tokens of a student and of a teacher that knows no difference between ways to write a text; `$` ends a response."""

    student: tuple[str, ...]
    teacher: tuple[str, ...]
    letters: int
    """Length of the longest response."""
    seed: int = 0
    canonical: bool = False
    """The student, too, writes a text in one way only, and the teacher's text is compared as the student would write it."""

    @property
    def spelling(self) -> Spelling:
        fits = [set(own) <= {*"".join(self.student)} for own in self.teacher]
        return Spelling(
            [cut_text(own, self.student) if fit else () for own, fit in zip(self.teacher, fits, strict=True)],
            len(self.student),
        )

    @property
    def head(self) -> Head:
        weight = torch.eye(len(self.teacher), dtype=torch.float64)
        return Head(weight, IDENTITY, torch.from_numpy(build_tables(self.spelling).pack()))

    def logits(self, of_student: bool, begun: tuple[int, ...]) -> Tensor:
        """The logits after some tokens, which no other context has."""
        tokens = self.student if of_student else self.teacher
        generator = torch.Generator().manual_seed(hash((self.seed, of_student, begun)) % 2**31)
        values = 1.5 * torch.randn(len(tokens), generator=generator, dtype=torch.float64)
        for i, own in enumerate(tokens):
            if begun and (self.canonical or not of_student) and own != "$":
                last = tokens[begun[-1]]
                if cut_text(last + own, tokens) != (begun[-1], i):
                    values[i] = NEVER
        return values

    def answer(self, ids: Sequence[int]) -> AlignedStates:
        """The teacher's answer about a response, as a scorer makes it."""
        own = cut_text("".join(self.student[i] for i in ids), self.teacher)
        hidden = torch.stack([self.logits(False, own[:n]) for n in range(len(own))])
        lengths = [len(self.student[i]) for i in ids], [len(self.teacher[i]) for i in own]
        return AlignedStates.of_states(
            TeacherStates(
                token_ids=own,
                hidden_N_D=hidden,
                head="head",
                logprobs=lambda: hidden.log_softmax(-1),
                top_k=0,
                sampled_ids=ids,
                alignment=align_tokens(*lengths),
                spelling=self.spelling,
            )
        )

    def responses(self, begun: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        """All responses that go on from some tokens."""
        text = "".join(self.student[i] for i in begun)
        if text.endswith("$") or len(text) >= self.letters:
            return [begun]
        return [whole for i in range(len(self.student)) for whole in self.responses((*begun, i))]

    def text_probability(self, ids: tuple[int, ...]) -> float:
        """The teacher's probability of all its texts that begin with these tokens of the student's, by adding up all ways to write them."""

        def write(own: int) -> tuple[int | str, ...]:
            return self.spelling.tokens[own] if self.canonical else tuple(self.teacher[own])

        def add_up(begun: tuple[int, ...], left: tuple[int | str, ...]) -> float:
            if not left:
                return 1.0
            total, p = 0.0, self.logits(False, begun).softmax(-1)
            for i in range(len(self.teacher)):
                piece = write(i)
                if piece and piece[: len(left)] == left[: len(piece)]:
                    total += float(p[i]) * add_up((*begun, i), left[len(piece) :])
            return total

        return add_up((), ids if self.canonical else tuple("".join(self.student[i] for i in ids)))


PAIRS = {
    "letters, pairs": Pair(("a", "b", "$"), ("a", "b", "aa", "ab", "ba", "bb", "$"), 4),
    "letters, some pairs": Pair(("a", "b", "$"), ("$", "b", "a", "ab"), 4),
    "letters, words": Pair(("a", "b", "$"), ("a", "b", "ab", "aba", "abab", "$"), 5),
    "words, letters": Pair(("a", "b", "ab", "aba", "$"), ("b", "a", "$"), 4),
    "words, letters and a stranger": Pair(("a", "ab", "b", "$"), ("b", "c", "a", "$"), 3),
    "words, longer words": Pair(("a", "b", "ab", "$"), ("a", "b", "ab", "aba", "abab", "$"), 4, canonical=True),
    "the same words": Pair(("a", "b", "ab", "$"), ("ab", "b", "$", "a"), 3, canonical=True),
}


SAME_ENDS = ("words, letters", "words, letters and a stranger", "the same words")
"""Pairs whose teacher's tokens end wherever the student's do."""


@pytest.mark.parametrize("name", SAME_ENDS)
def test_the_mean_over_responses_is_the_gradient_of_the_divergence_between_texts(name: str) -> None:
    pair = PAIRS[name]
    means: dict[tuple[int, ...], Tensor] = {}
    wanted: dict[tuple[int, ...], Tensor] = {}
    total = 0.0
    for ids in pair.responses():
        states = [ids[:n] for n in range(len(ids))]
        logits = torch.stack([pair.logits(True, begun) for begun in states])
        chance = exp(sum(float(row[i]) for row, i in zip(logits.log_softmax(-1), ids, strict=True)))
        total += chance
        if chance < 1e-20:
            continue
        ours = gradient(pair.answer(ids), pair.head, logits, ids)
        for begun, row, own in zip(states, logits, ours, strict=True):
            means[begun] = means.get(begun, torch.zeros_like(row)) + chance * own
            if begun not in wanted:
                wanted[begun] = torch.zeros_like(row)
            wanted[begun] += chance * divergence_gradient(pair, begun, row)
    assert total == pytest.approx(1)
    for begun, mean in means.items():
        torch.testing.assert_close(
            mean, wanted[begun], rtol=1e-5, atol=1e-7, msg=lambda text, at=begun: f"{at}: {text}"
        )


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in SAME_ENDS])
def test_a_student_that_writes_as_the_teacher_has_no_gradient(name: str) -> None:
    pair = PAIRS[name]
    largest = 0.0
    for ids in pair.responses():
        states = [ids[:n] for n in range(len(ids))]
        if pair.text_probability(ids) < 1e-9:
            continue
        logits = torch.stack([text_logratios(pair, begun).clamp(min=NEVER) for begun in states])
        ours = gradient(pair.answer(ids), pair.head, logits, ids)
        largest = max(largest, float(ours.abs().max()))
    assert largest < 1e-6


@cache
def text_logratios(pair: Pair, begun: tuple[int, ...]) -> Tensor:
    """[V] log-probs with which the teacher's text goes on with each of the student's tokens."""
    before = pair.text_probability(begun)
    after = [pair.text_probability((*begun, v)) for v in range(len(pair.student))]
    return torch.tensor([log(max(own, 1e-300) / before) for own in after], dtype=torch.float64)


def divergence_gradient(pair: Pair, begun: tuple[int, ...], logits: Tensor) -> Tensor:
    values = logits.clone().requires_grad_()
    logp = values.log_softmax(-1)
    (logp.exp() * (logp - text_logratios(pair, begun))).sum().backward()
    assert values.grad is not None
    return values.grad


def score_singles(hidden_M_D: Tensor, head_U_D: Tensor, ids: Sequence[int], spelling: Spelling) -> AlignedStates:
    """A teacher's answer to a response of which each token is one of its own, spelt by one of the student's."""
    sampled = [spelling.tokens[i][0] for i in ids]
    singles = align_tokens([1] * len(ids), [1] * len(ids))
    return AlignedStates.of_states(
        TeacherStates(
            token_ids=ids,
            hidden_N_D=hidden_M_D,
            head="head",
            logprobs=lambda: (hidden_M_D @ head_U_D.double().T).log_softmax(-1),
            top_k=0,
            sampled_ids=sampled,
            alignment=singles,
            spelling=spelling,
        )
    )


def make_head(weight_U_D: Tensor, spelling: Spelling) -> Head:
    return Head(weight_U_D, IDENTITY, torch.from_numpy(build_tables(spelling).pack()))


def test_the_same_model_with_permuted_ids_gives_the_exact_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(6, D, generator=generator).double(), torch.randn(V, D, generator=generator).double()
    logits, ids = torch.randn(6, V, generator=generator).double(), [3, 1, 1, 6, 0, 2]
    permutation = torch.randperm(V, generator=generator).tolist()  # student's id -> teacher's
    own_head = torch.empty_like(head)
    own_head[permutation] = head
    spelling = Spelling([(permutation.index(u),) for u in range(V)], V)
    answer = score_singles(hidden, own_head, [permutation[i] for i in ids], spelling)
    ours = gradient(answer, make_head(own_head, spelling), logits, ids)
    exact = gradient(HiddenStates.from_states(hidden, "head"), Head(head, IDENTITY), logits, ids)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


SPELT = [(2,), (), (0,), (5,), (0, 3), (6,), (0, 3, 1), (1,), (5, 2)]
"""Of nine tokens of a teacher's. The student's tokens 3 and 4 are longer than the teacher's."""


def measure_spelt(hidden_D: Tensor, head_U_D: Tensor, first: int) -> Tensor:
    """Log-prob of all of the teacher's tokens whose spelling begins with one of the student's."""
    logq_U = (head_U_D @ hidden_D).log_softmax(-1)
    return logq_U[[u for u, own in enumerate(SPELT) if own[:1] == (first,)]].logsumexp(0)


def test_the_exact_part_is_the_slope_of_the_divergence_among_the_tokens_that_the_teacher_tells() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, head = torch.randn(1, D, generator=generator).double(), torch.randn(9, D, generator=generator).double()
    logits, spelling = torch.randn(1, V, generator=generator).double(), Spelling(SPELT, V)
    covered = [0, 1, 2, 5, 6]
    ours = gradient(score_singles(hidden, head, [2], spelling), make_head(head, spelling), logits, [0])

    def divergence(values: Tensor) -> Tensor:
        logpi = values[0, covered].log_softmax(-1)
        logr = torch.stack([measure_spelt(hidden[0], head, v) for v in covered]).log_softmax(-1)
        return (logpi.exp() * (logpi - logr)).sum()

    compare_slopes(ours, divergence, logits)
    # Without evidence no probability leaves the tokens that the teacher lacks.
    assert ours[0, [3, 4]].abs().max() < 1e-12


def test_after_a_token_that_may_go_on_longer_ones_of_the_teacher_count() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(2, D, generator=generator).double(), torch.randn(9, D, generator=generator).double()
    logits, spelling = torch.randn(2, V, generator=generator).double(), Spelling(SPELT, V)
    ours = gradient(score_singles(hidden, head, [2, 0], spelling), make_head(head, spelling), logits, [0, 2])
    logq_U = (head @ hidden[0]).log_softmax(-1)
    total = logq_U[[2, 4, 6]].logsumexp(0)  # (0), (0, 3) and (0, 3, 1)
    known = [0, 1, 2, 3, 5, 6]
    stays = [logq_U[2] - total + measure_spelt(hidden[1], head, v) for v in known if v != 3]
    stays.insert(
        3, logq_U[[4, 6]].logsumexp(0) - total
    )  # 3 is longer than the teacher's tokens, but may be what goes on
    logr = torch.stack(stays).log_softmax(-1)

    def divergence(values: Tensor) -> Tensor:
        logpi = values[0, known].log_softmax(-1)
        return (logpi.exp() * (logpi - logr)).sum()

    compare_slopes(ours[1:], divergence, logits[1:])


def compare_slopes(ours: Tensor, function: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    for v in range(V):
        step = torch.zeros_like(logits)
        step[0, v] = 1e-6
        slope = (function(logits + step) - function(logits - step)) / 2e-6
        assert float(ours[0, v]) == pytest.approx(float(slope), abs=1e-8)


@pytest.mark.parametrize("pair", [PAIRS["letters, pairs"], PAIRS["words, letters"]])
def test_a_clip_bounds_what_a_sampled_token_may_weigh(pair: Pair) -> None:
    ids = (0, 1) if pair.student[2] == "$" else (2,)
    logits = torch.full((len(ids), len(pair.student)), 30.0, dtype=torch.float64)
    logits[range(len(ids)), list(ids)] = 0.0
    free, bounded = (gradient(pair.answer(ids), pair.head, logits, ids, clip)[-1, ids[-1]] for clip in (None, 0.5))
    assert float(free) < -20
    assert float(bounded) == pytest.approx(-0.5)


def test_probabilities_too_small_for_their_type_leave_the_gradient_finite() -> None:
    spelling = Spelling(SPELT, V)
    head = torch.zeros(9, D)
    head[[4, 6, 8], 0] = -1.0
    hidden = torch.full((2, D), 300.0).double()
    answer = score_singles(hidden, head, [2, 3], spelling)
    (block,) = build_blocks(answer, make_head(head, spelling), [0, 5], (-1.0, -1.0))
    chunk = block.select_chunk(slice(0, 2), V).view_chunk(torch.tensor([0, 5]), torch.float32)
    assert torch.isfinite(chunk.logq_C_V[:, [0, 1, 2, 5, 6]]).all()  # type: ignore[attr-defined]
