"""Episodes through the student's training path: who wrote a token decides whether its prediction has a gradient, and no split of
segments over ranks and micro-batches changes loss or gradient.

The episodes are played: one that is compacted, one with a sub-agent, and one whose history was rewritten, so that it forks.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head, HeadSource
from opd.models.layouts import Packed, list_candidate_layouts
from opd.models.logit_rule import IDENTITY
from opd.models.packing import SHARED
from opd.payloads.hidden_states import HiddenStates
from opd.records.types import Rollout, SampledTurn
from opd.rollouts.episodes.sub_agents import SubAgentOptions, SubAgentsOptions
from opd.rollouts.episodes.trace import EpisodeKey, Trace
from opd.stream.schema import TargetRow, write_stream
from opd.train.batch import build_micro_batch
from opd.train.components import Component
from opd.train.plan import measure_row_sizes, plan_micro_batches
from opd.train.rank import RankWork, TrainerRank
from opd.train.student import Student
from opd.train.totals import token_weights, weigh_rows
from pipelines.specs import rank_options
from tests.unit.opd.rollouts.episodes.test_compaction import options, policy
from tests.unit.opd.rollouts.episodes.test_runner import TOKENIZER, encode, play, request
from tests.unit.opd.train.test_rank import config

VOCABULARY, WIDTH, TEACHERS_WIDTH = len(TOKENIZER), 32, 16
SAID = -1.0
"""Log-prob of what the policy sampled in all of these episodes; other tokens have 0."""
MASKED = frozenset(encode("9"))
DOMAIN_WEIGHTS = {"d": 2.0, "math": 0.5}


def compacted() -> list[Rollout]:
    """Eleven turns in three segments, of which two begin with a summary and a copied turn; one token of it is masked."""
    asked = request(options={"goal": 11}, max_turns=20, compaction=options())
    (found,), _ = play(dataclasses.replace(asked, masked=MASKED), policy=policy)
    return found.rollouts


def delegated() -> list[Rollout]:
    """A dialogue, and the sub-agent of another domain that it started."""
    kind = SubAgentOptions(description="Adds.", prompt="sum {task}=", result="{answer};", domain="math")

    def says(text: str) -> str:
        return "7" if text.startswith("sum") else "ask 3+4" if ";" not in text else "3"

    asked = request(1, sub_agents=SubAgentsOptions(kinds={"ask": kind}, at_most=8))
    (found,), _ = play(asked, policy=says)
    return found.rollouts


def forked() -> list[Rollout]:
    """Two turns, and a third after a history that has another observation in the place of the second turn's."""
    trace = Trace(policy_version=2)
    for history, turn in (
        ("go:", "left"),
        ("go:left wall ", "up"),
        ("go:left door ", "in"),
        ("go:left door in ok ", "x"),
    ):
        ids = tuple(encode(turn))
        said = SampledTurn(token_ids=ids, logprobs=(SAID,) * len(ids), stop_reason="stop", policy_version=2)
        trace.continue_or_fork(encode(history)).append_policy_turn(said)
    assert trace.audit.forks == 1
    return trace.to_rollouts(EpisodeKey(sample_id="f", group="f", step=1, domain="chat"), "done", None)


STEP = [*compacted(), *delegated(), *forked()]


def written(rollout: Rollout) -> list[int]:
    """Places of the response that the policy wrote, without the masked tokens: told by log-probs, not by spans."""
    pairs = enumerate(zip(rollout.behaviour_logprobs, rollout.response_ids, strict=True))
    masked = MASKED if rollout.episode == "s0" else frozenset()
    return [place for place, (logprob, token) in pairs if logprob == SAID and token not in masked]


def row(rollout: Rollout) -> TargetRow:
    gen = torch.Generator().manual_seed(int.from_bytes(rollout.sample_id.encode(), "big"))
    states = torch.randn(rollout.num_trained, TEACHERS_WIDTH, generator=gen)
    return TargetRow(rollout=rollout, teacher=rollout.domain, answer=HiddenStates.from_states(states, rollout.domain))


@functools.cache
def head(key: str) -> Head:
    gen = torch.Generator().manual_seed(len(key))
    return Head(0.3 * torch.randn(VOCABULARY, TEACHERS_WIDTH, generator=gen), IDENTITY)


HEADS = {rollout.domain: head(rollout.domain) for rollout in STEP}


class Kept(Student):
    """Keeps the hidden states of its last forward pass, from which the loss reads, with their gradient."""

    def compute_hidden_states(self, packed: Packed, log: Any = None) -> Tensor:
        self.kept = super().compute_hidden_states(packed, log)
        self.kept.retain_grad()
        return self.kept


@pytest.fixture(scope="module")
def student() -> Kept:
    """A tied Llama in float64; transformers computes its norms in float32 all the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    lm = LlamaForCausalLM._from_config(llama, attn_implementation="sdpa").double()
    return Kept(lm, ReverseKL(), chunk=7, vocab_size=VOCABULARY)


def test_the_step_has_all_that_an_episode_may_have() -> None:
    assert {r.origin for r in STEP} == {"main", "summary", "sub_agent"} and {r.domain for r in STEP} == set(HEADS)
    assert {span.origin for r in STEP for span in r.spans} == {"policy", "environment", "masked"}
    assert len({r.sample_id for r in STEP}) == len(STEP) == 7
    first, second, *_, before, fork = STEP
    copied = TOKENIZER.decode(second.prompt_ids)
    assert copied == "count:0 so far at 6 6<|im_end|> 6 " and "at 6" in TOKENIZER.decode(first.trained_ids)
    assert (fork.origin, fork.parent) == ("main", before.sample_id)
    assert TOKENIZER.decode(fork.prompt_ids) == "go:left door ", "with a turn that was sampled in its parent"


def moved(student: Kept, rollouts: Sequence[Rollout], layout: str) -> tuple[set[int], Packed]:
    """Flat positions whose hidden state has a gradient that is not exactly 0, and where the tokens lie."""
    batch = build_micro_batch([(row(r),) for r in rollouts], torch.float32, None, layout)
    weights = weigh_rows(rollouts, "token_mean", DOMAIN_WEIGHTS)
    loss, _ = student(batch, HEADS, {"divergence": token_weights(batch, [weights[r.sample_id] for r in rollouts])})
    loss.backward()
    assert student.kept.grad is not None
    return set(student.kept.grad.ne(0).any(-1).nonzero()[:, 0].tolist()), batch.packed


def predicting(packed: Packed, rollouts: Sequence[Rollout], places: Mapping[str, Sequence[int]]) -> set[int]:
    """Flat positions that predict tokens at these places of the responses."""
    ids_N = packed.input_ids_B_T.flatten().tolist()
    found = set()
    for index, rollout in enumerate(rollouts):
        sequence = (*rollout.prompt_ids, *rollout.response_ids)
        flat = [packed.flat_index(index, place) for place in range(len(sequence))]
        assert [ids_N[at] for at in flat] == list(sequence)
        found |= {flat[len(rollout.prompt_ids) + place - 1] for place in places[rollout.sample_id]}
    return found


@pytest.mark.parametrize("layout", list_candidate_layouts(share=True))
def test_what_the_policy_did_not_write_here_has_no_gradient(layout: str, student: Kept) -> None:
    found, packed = moved(student, STEP, layout)
    wanted = predicting(packed, STEP, {r.sample_id: written(r) for r in STEP})
    assert found == wanted, "exactly 0 everywhere else: prompts, copies, observations, masked tokens, padding"
    # A tree has the prompt of two episodes once, so one position predicts the first token of both.
    assert len(wanted) == sum(r.num_trained for r in STEP) - (layout == SHARED)
    assert len(wanted) < len(student.kept) / 2


@pytest.mark.parametrize("layout", list_candidate_layouts(share=True))
@pytest.mark.parametrize("index", [i for i, r in enumerate(STEP) if "environment" in {s.origin for s in r.spans}])
def test_an_observation_that_is_called_the_policys_would_be_seen(index: int, layout: str, student: Kept) -> None:
    spans = STEP[index].spans
    odd = next(place for place, span in enumerate(spans) if span.origin == "environment")
    end = list(accumulate(span.length for span in spans))[odd]
    wrong = dataclasses.replace(spans[odd], origin="policy")
    claimed = dataclasses.replace(STEP[index], spans=(*spans[:odd], wrong, *spans[odd + 1 :]))
    rollouts = [*STEP[:index], claimed, *STEP[index + 1 :]]
    before, _ = moved(student, STEP, layout)
    found, packed = moved(student, rollouts, layout)
    places = {r.sample_id: () for r in STEP} | {claimed.sample_id: range(end - wrong.length, end)}
    new = predicting(packed, rollouts, places)
    assert len(new) == wrong.length and not new & before and found == before | new


class Engine:
    """Stands for DeepSpeed's engine of one rank: gradients stay in the student, which all ranks of a test have in common."""

    def __init__(self, student: Student) -> None:
        self.module = student
        self.loss = 0.0

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None:
        self.loss += float(loss.detach())
        loss.backward()


Cut = Sequence[Sequence[Sequence[str]]]
"""[rank][micro-batch] -> sample ids."""
ROWS = {r.sample_id: row(r) for r in STEP}


def trained(student: Kept, cut: Cut, layout: str = "packed") -> tuple[float, float, dict[str, Tensor]]:
    """Loss as it is optimised, loss as it is reported, and gradient by parameter, of one step in these parts."""
    student.zero_grad()
    weights = weigh_rows(STEP, "token_mean", DOMAIN_WEIGHTS)
    whole = RankWork(step=1, lr=0.1, micro_batches=(), components={"divergence": Component(weights=weights)})
    optimised = reported = 0.0
    for index, part in enumerate(cut):
        one = TrainerRank(dataclasses.replace(rank_options(config(), VOCABULARY), world_size=len(cut)), index)
        one._engine, one._device = Engine(student), torch.device("cpu")
        one._fetch_head = lambda source: head(source.key)  # type: ignore[method-assign]
        one.use_layout(layout)
        one.begin_step(whole.select_micro_batches(part), {key: HeadSource(key=key, rule=IDENTITY) for key in HEADS})
        mine = write_stream([ROWS[i] for ids in part for i in ids], "float32")
        for place in range(len(part)):
            one.accumulate_micro_batch(
                place, frozenset(), *([np.frombuffer(mine, dtype=np.uint8)] if place == 0 else [])
            )
        optimised, reported = optimised + one._engine.loss, reported + one._step.totals.loss
    # A rank scales its weights by the number of ranks, because DeepSpeed takes the mean of their gradients.
    gradient = {name: p.grad / len(cut) for name, p in student.named_parameters() if p.grad is not None}
    return optimised / len(cut), reported, gradient


def cuts(layout: str) -> list[Cut]:
    """The driver's plans for 1, 2 and 5 ranks with large and small micro-batches, and drawn ones, some with empty parts."""
    sizes = measure_row_sizes(STEP, share=layout == SHARED)
    found: list[Cut] = [
        plan_micro_batches(sizes, ranks, tokens, padded=layout == "padded")
        for ranks, tokens in product((1, 2, 5), (40, 120, 4000))
    ]
    for ranks in (1, 2, 5):
        rng = random.Random(ranks)
        drawn: list[list[list[str]]] = [[[] for _ in range(3)] for _ in range(ranks)]
        for sample_id in rng.sample(sorted(ROWS), len(ROWS)):
            rng.choice(rng.choice(drawn)).append(sample_id)
        found.append(drawn)
    return found


@pytest.mark.parametrize("layout", list_candidate_layouts(share=True))
def test_no_split_over_ranks_and_micro_batches_changes_loss_or_gradient(layout: str, student: Kept) -> None:
    loss, reported, gradient = trained(student, [[list(ROWS)]])
    assert loss > 0.1 and reported == pytest.approx(loss, rel=1e-6)
    assert len(gradient) == len(list(student.named_parameters())) and all(g.norm() > 0 for g in gradient.values())
    tried = cuts(layout)
    assert {len(cut) for cut in tried} == {1, 2, 5} and {len(cut[0]) for cut in tried} > {1, 3}
    assert any(not ids for cut in tried for part in cut for ids in part), "a rank with nothing to do"
    for cut in tried:
        other, other_reported, other_gradient = trained(student, cut, layout)
        assert other == pytest.approx(loss, rel=1e-6) and other_reported == pytest.approx(loss, rel=1e-6)
        for name, wanted in gradient.items():
            assert float((other_gradient[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), (name, cut)
