"""The settings of `sampled` that are unbiased, by exact enumeration in float64: no sampling error can hide or make a bias.

A student over three tokens (a, b, end) writes at most two or three of them; its logits are a table, one row for each
prefix. An episode may go on in a second segment, which begins with the last token of the first in place of a summary. Every
possible step of a few responses is weighed by its probability. Unbiased means: the estimate's expectation is that of exact
reverse KL's gradient with the same weights, at every entry of the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.payloads.hidden_states import TeacherBlock
from opd.payloads.sampled_logprobs import SampledBlock
from opd.records.types import Rollout
from opd.stream.schema import TargetRow
from opd.train.batch import leave_one_out_baselines
from opd.train.totals import weigh_rows
from tests.losses import chunked_objective
from tests.rows import make_rollout, make_row

END, V = 2, 3
Text = tuple[int, ...]
Episode = tuple[Text, ...]
"""The texts of its segments."""


def texts(limit: int) -> list[Text]:
    """Every response: up to its end token, or `limit` tokens without one."""
    open_ended = [t for n in range(limit) for t in itertools.product((0, 1), repeat=n)]
    return [(*t, END) for t in open_ended] + list(itertools.product((0, 1), repeat=limit))


def episodes(limit: int, goes_on: bool) -> list[Episode]:
    """Every episode: with `goes_on` a second segment follows a first one that reached the limit."""
    every = texts(limit)
    return [
        episode
        for text in every
        for episode in ([(text, second) for second in every] if goes_on and text[-1] != END else [(text,)])
    ]


@dataclass(frozen=True)
class World:
    """One student and one teacher for each prompt, as tables of logits by prefix."""

    student: Tensor
    """[prompts, prefixes, V]"""
    teacher: Tensor
    prefixes: dict[tuple[Text, Text], int]
    """The summary that a segment begins with, and what it has written after it."""

    def states(self, summary: Text, text: Text) -> list[int]:
        return [self.prefixes[summary, text[:t]] for t in range(len(text))]


def world(prompts: int, limit: int, goes_on: bool) -> World:
    written = [t for n in range(limit) for t in itertools.product((0, 1), repeat=n)]
    prefixes = [(summary, t) for summary in ((), (0,), (1,))[: 3 if goes_on else 1] for t in written]
    gen = torch.Generator().manual_seed(0)
    tables = torch.randn(2, prompts, len(prefixes), V, generator=gen, dtype=torch.float64)
    return World(1.5 * tables[0], 1.5 * tables[1], {p: i for i, p in enumerate(prefixes)})


@dataclass(frozen=True, kw_only=True)
class Setting:
    domains: tuple[str, ...] = ("d", "d")
    """Of each episode of a step; each has a prompt of its own."""
    limit: int = 3
    second: str | None = None
    """Domain of second segments; None: an episode is a single response."""
    temperature: float = 1.0
    normalize: str = "leave_one_out"
    baseline: bool = False
    raw: bool = False
    """Behaviour log-probs without the temperature, as vLLM's default reports them."""
    clips: tuple[float | None, float | None] = (None, None)
    age: float = 0.0
    """Distance of the student that wrote the responses from the one that is trained."""
    loss_weights: tuple[tuple[str, float], ...] = ()


def rollout(sample_id: str, episode: str, domain: str, text: Text, behaviour: Sequence[float]) -> Rollout:
    return make_rollout(
        sample_id=sample_id, episode=episode, step=1, domain=domain, policy_version=0, prompt_ids=(0,), response_ids=text,
        behaviour_logprobs=tuple(behaviour),
    )  # fmt: skip


def target(r: Rollout, logq: Sequence[float]) -> TargetRow:
    return make_row(
        sample_id=r.sample_id, episode=r.episode, step=1, domain=r.domain, teacher="t", policy_version=0,
        prompt_ids=r.prompt_ids, response_ids=r.response_ids, loss_mask=r.loss_mask, behaviour_logprobs=r.behaviour_logprobs,
        teacher_logprobs=logq,
    )  # fmt: skip


def expectations(s: Setting) -> tuple[Tensor, Tensor]:
    """Of the estimate's gradient and of the exact one, over every step that can be sampled."""
    goes_on = s.second is not None
    w = world(len(s.domains), s.limit, goes_on)
    drawn = ((w.student - s.age * w.teacher) / s.temperature).log_softmax(-1)
    said, logq = (w.student.log_softmax(-1) if s.raw else drawn), w.teacher.log_softmax(-1)
    columns: dict[str, list[Any]] = {name: [] for name in ("place", "token", "mu", "q", "baseline", "weight")}
    drawn_of, said_of, logq_of = (table.tolist() for table in (drawn, said, logq))
    for step in itertools.product(episodes(s.limit, goes_on), repeat=len(s.domains)):
        segments = [(i, number, text) for i, episode in enumerate(step) for number, text in enumerate(episode)]
        places = [[(i, state) for state in w.states(step[i][0][-1:] if number else (), t)] for i, number, t in segments]
        each = [
            [
                [table[i][state][y] for (i, state), y in zip(part, text, strict=True)]
                for table in (drawn_of, said_of, logq_of)
            ]
            for part, (_, _, text) in zip(places, segments, strict=True)
        ]
        chance = math.exp(math.fsum(x for logp, _, _ in each for x in logp))
        rollouts = [
            rollout(f"{i}.{number}", str(i), s.second if number and s.second else s.domains[i], text, mu)
            for (i, number, text), (_, mu, _) in zip(segments, each, strict=True)
        ]
        rows = {r.sample_id: (target(r, q),) for r, (_, _, q) in zip(rollouts, each, strict=True)}
        weights, means = weigh_rows(rollouts, s.normalize, dict(s.loss_weights)), leave_one_out_baselines(rows)
        for r, part, (_, mu, q) in zip(rollouts, places, each, strict=True):
            columns["place"] += part
            columns["token"] += r.response_ids
            columns["mu"] += mu
            columns["q"] += q
            columns["baseline"] += [means[r.sample_id]] * len(part)
            columns["weight"] += [chance * weights[r.sample_id]] * len(part)
    return gradients(w, s, columns)


def gradients(w: World, s: Setting, columns: dict[str, list[Any]]) -> tuple[Tensor, Tensor]:
    """All steps in one sum: the loss is linear in its weights, which hold the probabilities."""
    place = torch.tensor(columns["place"]).T
    mu, q, baseline, weight = (torch.tensor(columns[k], dtype=torch.float64) for k in ("mu", "q", "baseline", "weight"))
    token, eye = torch.tensor(columns["token"]), torch.eye(V, dtype=torch.float64)
    found = []
    for objective, block in (
        (SampledKL(*s.clips), SampledBlock(q, baseline if s.baseline else None)),
        (ReverseKL(), TeacherBlock(w.teacher[place[0], place[1]], eye)),
    ):
        table = w.student.clone().requires_grad_()
        hidden = table[place[0], place[1]]
        loss, _ = chunked_objective(
            objective, hidden, eye, [block], weight, token, mu, chunk=4096, vocab_size=V, temperature=s.temperature
        )
        found.append(torch.autograd.grad(loss, table)[0])
    return found[0], found[1]


def bias(s: Setting) -> float:
    """Relative to the exact gradient."""
    estimate, exact = expectations(s)
    return float((estimate - exact).norm() / exact.norm())


COMPACTED = Setting(limit=2, second="d")
HELPED = Setting(limit=2, second="e", loss_weights=(("e", 3.0),))
FOUR = Setting(domains=("d", "d", "e", "e"), limit=2, loss_weights=(("e", 3.0),))


@pytest.mark.parametrize("baseline", [False, True], ids=["no baseline", "leave one out"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(
    "setting",
    [Setting(), Setting(domains=("d",) * 3, limit=2), FOUR, COMPACTED, HELPED],
    ids=["two", "three", "four", "two segments", "segments of two domains"],
)
def test_the_estimate_is_unbiased_at_every_temperature(setting: Setting, temperature: float, baseline: bool) -> None:
    assert bias(replace(setting, temperature=temperature, baseline=baseline)) < 1e-12


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_clip_against_stale_samples_leaves_fresh_ones_alone(temperature: float) -> None:
    assert bias(Setting(temperature=temperature, clips=(1.2, None))) < 1e-12


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(normalize="sequence_mean"), 0.1),
        (Setting(normalize="token_mean"), 0.05),
        (Setting(domains=("d", "e")), 0.05),
        (Setting(temperature=0.7, raw=True), 0.1),
        (Setting(temperature=1.5, raw=True), 0.1),
        (Setting(temperature=0.7, age=0.3, clips=(1.2, None)), 0.02),
        (Setting(clips=(None, 0.5)), 0.1),
    ],
    ids=["sequence mean", "own length", "alone in its domain", "raw, 0.7", "raw, 1.5", "ratio clip", "advantage clip"],
)
def test_what_biases_the_estimate(setting: Setting, least: float) -> None:
    """Show why `sampled` has no sequence mean and no length of its own, and asks vLLM for processed log-probs."""
    found = bias(setting)
    assert found > least, found


def test_the_bias_of_the_own_length_falls_with_the_number_of_responses() -> None:
    biases = [bias(Setting(domains=("d",) * n, limit=2, normalize="token_mean")) for n in (1, 2, 4)]
    assert biases[0] > 1.5 * biases[1] > 2 * biases[2]
