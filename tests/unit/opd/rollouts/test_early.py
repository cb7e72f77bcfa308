"""Engines hand over what is whole while the rest is still written: the same responses, each once, whoever dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from opd import cluster
from opd.errors import RunError
from opd.records.types import Prompt, Rollout
from opd.rollouts.early import Part, in_groups, sample_requests
from opd.rollouts.episodes.spec import EpisodeRequest
from opd.rollouts.groups import Groups
from opd.rollouts.responses import sample_ids
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.rollouts.worker import GenerateRequest
from tests.unit.opd.rollouts import test_vllm as plain
from tests.unit.opd.rollouts.episodes.test_engine import SteppedEngine, engine


class Worker(plain.FakeWorker):
    """Is done with its requests in an order of its own, and dies before a part that a test names."""

    seed = 0
    dies_at = -1
    began = 0

    def begin_generate(self, requests: Sequence[GenerateRequest], groups: Sequence[int]) -> None:
        self._begin(self.generate(requests), groups)

    def begin_episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int, groups: Sequence[int]
    ) -> None:
        self._begin(self.episodes(requests, temperature, policy_version), groups)

    def next_part(self) -> Part | None:
        self.asked += 1
        if self.asked - 1 == self.dies_at:
            raise cluster.WorkerDied("died", self)  # type: ignore[arg-type]
        return next(self._parts, None)

    def _begin(self, answers: Sequence[Any], groups: Sequence[int]) -> None:
        order = random.Random(self.seed).sample(range(len(answers)), k=len(answers))
        self._parts: Iterator[Part] = in_groups(([(place, answers[place])] for place in order), groups)
        self.began, self.asked = self.began + 1, 0


class Listener:
    """Implements `opd.rollouts.groups.Early` as far as an engine uses it."""

    def __init__(self, prompts: Sequence[Prompt], step: int, size: int = 2) -> None:
        ids = sample_ids(prompts, step)
        self.groups: dict[int, Sequence[Rollout]] = {}
        self._groups = Groups(prompts, ids, size, self.groups.__setitem__)
        self.group_of = self._groups.of
        self.told: list[str] = []

    def written(self, sample_id: str, rollouts: Sequence[Rollout]) -> None:
        self.told.append(sample_id)
        self._groups.written(sample_id, rollouts)

    def stream(self, rollouts: Sequence[Rollout]) -> Any:
        raise AssertionError("an engine does not ask for scores")


PROMPTS = [
    plain.prompt(0), plain.task(1), plain.prompt(1, plain.ROOM), plain.task(2), *map(plain.prompt, range(2, 7)), plain.task(3)
]  # fmt: skip
"""Single turns, one that does not fit, and episodes."""


def made(in_process: Any, workers: int, dies_at: dict[int, int] | None = None, seed: int = 0) -> VLLMRolloutEngine:
    in_process.workers.clear()
    agents = plain.acting(plain.engine(in_process, workers))

    def make(options: Any, stop: Sequence[int]) -> Worker:
        worker = Worker(options, stop)
        worker.seed = seed + len(in_process.workers)
        worker.dies_at = (dies_at or {}).get(len(in_process.workers), -1)
        return worker

    in_process.workers.clear()
    in_process.replace = make
    found = VLLMRolloutEngine(replace(agents._spec, workers=workers), plain.Letters())
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_the_batch_is_that_of_an_engine_that_tells_nobody(workers: int, seed: int, in_process: Any) -> None:
    wanted = made(in_process, workers).generate(PROMPTS, step=7, policy_version=6)
    hears = Listener(PROMPTS, 7)
    assert made(in_process, workers, seed=seed).generate(PROMPTS, step=7, policy_version=6, early=hears) == wanted
    assert sorted(hears.told) == sorted(sample_ids(PROMPTS, 7)), "each prompt once, also those that come to nothing"
    rows = {number: list(found) for number, found in hears.groups.items()}
    by_domain = sorted(wanted.rollouts, key=lambda r: r.domain)
    assert [r for number in sorted(rows) for r in rows[number]] == by_domain, "the rows of the batch"


@pytest.mark.parametrize("dies_at", [{0: 0}, {0: 1}, {1: 2}, {0: 1, 1: 0}])
def test_an_engine_that_dies_writes_its_part_again_and_tells_nothing_twice(
    dies_at: dict[int, int], in_process: Any
) -> None:
    prompts = [plain.prompt(i) for i in range(12)]
    wanted = made(in_process, 2).generate(prompts, step=1, policy_version=0)
    hears = Listener(prompts, 1)
    engines = made(in_process, 2, dies_at)
    batch = engines.generate(prompts, step=1, policy_version=0, early=hears)
    assert batch == replace(wanted, restarted=batch.restarted)
    assert sorted(batch.restarted) == [f"rollout worker {index}" for index in sorted(dies_at)]
    assert sorted(hears.told) == sorted(sample_ids(prompts, 1))


def test_an_engine_that_dies_twice_in_a_step_ends_the_run(in_process: Any) -> None:
    prompts = [plain.prompt(i) for i in range(4)]
    engines = made(in_process, 1, {0: 1, 1: 1})
    with pytest.raises(RunError, match="died"):
        engines.generate(prompts, step=1, policy_version=0, early=Listener(prompts, 1))


def test_an_unknown_token_is_refused_before_anybody_hears_of_it(in_process: Any) -> None:
    prompts = [Prompt(id="d/0", domain="d", token_ids=(plain.VOCABULARY, 1))]
    hears = Listener(prompts, 1)
    with pytest.raises(RunError, match=f"token id {plain.VOCABULARY}"):
        made(in_process, 1).generate(prompts, step=1, policy_version=0, early=hears)
    assert hears.told == []


def test_answers_wait_for_the_others_of_their_group() -> None:
    parts: list[Part] = [[(3, "d")], [(0, "a"), (4, "e")], [(1, "b")], [(2, "c")]]
    found = list(in_groups(parts, [0, 0, 1, 1, 2]))
    assert found == [[(4, "e")], [(0, "a"), (1, "b")], [(3, "d"), (2, "c")]]


class Stepped(SteppedEngine):
    """As vLLM's, which also says whether it has something to do."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)


def test_requests_are_told_in_the_step_that_ends_them() -> None:
    inner = Stepped()
    parts = sample_requests(inner, [((10,), (3, 0)), ((20,), (1, 0)), ((30,), (2, 0))], lambda ids: ids[-1])
    assert next(parts) == [(1, 21)] and len(inner.steps) == 1, "two are still written"
    assert [*parts] == [[(2, 32)], [(0, 13)]]
    assert inner.steps == [3, 2, 1], "one batch"


def test_an_episode_is_told_while_the_tool_of_another_runs() -> None:
    made_engine, _ = engine()
    heard = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def short() -> None:
        await made_engine.generate([1], max_tokens=2, seed=0)
        made_engine.publish("short")

    async def long() -> None:
        await made_engine.generate([5], max_tokens=1, seed=0)
        await asyncio.wait_for(heard.wait(), 20)  # a tool, which ends when the other episode was heard of
        await made_engine.generate([7], max_tokens=1, seed=0)
        made_engine.publish("long")

    async def work() -> str:
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(short(), long())
        return "all"

    steps = made_engine.iterate_steps(work)
    assert next(steps) == ["short"]
    loops[0].call_soon_threadsafe(heard.set)
    assert next(steps) == ["long"]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == "all"


def test_who_stops_listening_leaves_no_turn_in_the_engine() -> None:
    made_engine, inner = engine(context=1 << 20)

    async def work() -> None:
        made_engine.publish("begun")
        await made_engine.generate([1], max_tokens=1 << 19, seed=0)

    steps = made_engine.iterate_steps(work)
    assert next(steps) == ["begun"]
    steps.close()
    assert inner.running == {}


def test_the_worker_tells_of_episodes_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin_episodes` and `episodes` are one way: what is told together and what is returned are the same."""
    from opd.rollouts import worker as module

    worker = module.VLLMWorker.__new__(module.VLLMWorker)
    asked = [SimpleNamespace(guide=None, place=i) for i in range(4)]
    order = [2, 0, 3, 1]
    monkeypatch.setattr(
        module.VLLMWorker, "_play_with_expert", lambda self, requests, *_: iter([[(i, f"result {i}")] for i in order])
    )
    given: Any = asked
    assert worker.episodes(given, 1.0, 0) == [f"result {i}" for i in range(4)]
    worker.begin_episodes(given, 1.0, 0, [0, 0, 1, 1])
    assert worker.next_part() == [(2, "result 2"), (3, "result 3")]
    assert worker.next_part() == [(0, "result 0"), (1, "result 1")]
    assert worker.next_part() is None
