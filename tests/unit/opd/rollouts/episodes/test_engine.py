"""One batch that is stepped by hand: who joins late is served, who leaves is forgotten, and a dead engine keeps nobody waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import RunError
from opd.records.types import SampledTurn
from opd.rollouts.episodes import engine as engine_module
from opd.rollouts.episodes.engine import BatchEngine, Sampling
from opd.rollouts.worker import Generated


@dataclass
class SteppedEngine:
    """Behaves as vLLM's: a step gives each running request one token, and tells of those that are done."""

    running: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    breaks_at: int = -1

    def add_request(self, name: str, prompt: dict[str, Any], params: tuple[int, int]) -> None:
        assert name not in self.running and prompt["type"] == "token"
        self.running[name], self.limits[name] = (
            list(prompt["prompt_token_ids"]),
            len(prompt["prompt_token_ids"]) + params[0],
        )

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.running.pop(name, None)

    def step(self) -> list[Any]:
        assert self.running, "nobody steps an engine that has nothing to do"
        self.steps.append(len(self.running))
        if len(self.steps) == self.breaks_at:
            raise ValueError("the kernel is gone")
        done = []
        for name, ids in list(self.running.items()):
            ids.append(ids[-1] + 1)
            finished = len(ids) == self.limits[name]
            done.append(
                SimpleNamespace(
                    request_id=name, finished=finished, outputs=[self.running.pop(name) if finished else ids]
                )
            )
        return done  # fmt: skip


def engine(context: int = 20, unreadable: int = -1, **stepped: Any) -> tuple[BatchEngine, SteppedEngine]:
    inner = SteppedEngine(**stepped)

    def read(ids: list[int]) -> Generated:
        if ids[0] == unreadable:
            raise RunError("NaN")
        return Generated(token_ids=(ids[-1],), logprobs=(-1.0,), stop_reason="length")

    return BatchEngine(
        inner, Sampling(params=lambda n, seed: (n, seed), read=read, context=context, policy_version=4)
    ), inner


def test_requests_of_different_times_are_one_batch() -> None:
    made, inner = engine()

    async def late(start: int) -> tuple[SampledTurn, SampledTurn]:
        first = await made.generate([start], max_tokens=3, seed=0)
        await asyncio.sleep(0.01 * (start % 3))  # a tool
        return first, await made.generate([start, *first.token_ids], max_tokens=2, seed=1)

    async def work() -> list[tuple[SampledTurn, SampledTurn]]:
        return list(await asyncio.gather(*(late(10 * i) for i in range(1, 6))))

    found = made.drive(work)
    assert [(a.token_ids, b.token_ids, a.policy_version) for a, b in found] == [
        ((10 * i + 3,), (10 * i + 5,), 4) for i in range(1, 6)
    ]
    assert max(inner.steps) > 1, "they ran side by side"
    assert inner.running == {} and inner.aborted == []


def test_turns_that_end_together_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than any hand-over takes: that all are there ends the wait.
    for name, seconds in {"FIRST_S": 20.0, "NEXT_S": 0.5, "MOST_S": 60.0}.items():
        monkeypatch.setattr(engine_module, name, seconds)
    made, inner = engine(context=1 << 10)

    async def episode(start: int) -> list[int]:
        ids = [start]
        for _ in range(6):
            ids += (await made.generate(ids, max_tokens=2, seed=0)).token_ids
            await asyncio.to_thread(time.sleep, 0.002 * (start % 5))  # a tool
        return ids

    async def work() -> list[list[int]]:
        return list(await asyncio.gather(*(episode(start) for start in range(1, 25))))

    assert made.drive(work) == [[start + 2 * turn for turn in range(7)] for start in range(1, 25)]
    assert inner.steps == [24] * 12


def test_who_does_not_come_back_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "FIRST_WAIT_S", 0.2)
    made, inner = engine(context=1 << 10)

    async def work() -> float:
        short = [made.generate([start], max_tokens=1, seed=0) for start in range(3)]
        began = time.monotonic()
        await asyncio.gather(*short, made.generate([5], max_tokens=200, seed=0))
        return time.monotonic() - began

    assert 0.2 <= made.drive(work) < 0.2 * 50, "once, and not in each of the other's steps"
    assert len(inner.steps) == 200


def test_a_trickle_of_turns_does_not_hold_the_batch_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"FIRST_S": 20.0, "NEXT_S": 20.0, "MOST_S": 0.2}.items():
        monkeypatch.setattr(engine_module, name, seconds)
    made, inner = engine()
    began = time.monotonic()
    made.drive(lambda: made.generate([1], max_tokens=3, seed=0))  # at the beginning nobody knows how many will come
    assert time.monotonic() - began < 10 and inner.steps == [1, 1, 1]


def test_two_engines_are_stepped_by_one_thread_and_keep_their_turns_apart() -> None:
    made, inner = engine()
    other = SteppedEngine()
    expert = made.add_engine(other)
    threads = set[int]()
    for one in (inner, other):
        plain = one.step
        one.step = lambda plain=plain: (threads.add(threading.get_ident()), plain())[1]  # type: ignore[method-assign]

    async def talk(start: int) -> tuple[SampledTurn, SampledTurn]:
        first = await made.generate([start], max_tokens=2, seed=0)
        return first, await expert.generate([start, *first.token_ids], max_tokens=3, seed=1)

    async def work() -> list[tuple[SampledTurn, SampledTurn]]:
        return list(await asyncio.gather(*(talk(10 * i) for i in range(1, 4))))

    found = made.drive(work)
    assert [(a.token_ids, b.token_ids) for a, b in found] == [((10 * i + 2,), (10 * i + 5,)) for i in (1, 2, 3)]
    tokens = [sum(one.steps) for one in (inner, other)]  # who is in which step depends on how fast the threads are
    assert tokens == [3 * 2, 3 * 3] and threads == {threading.get_ident()}
    assert (inner.running, other.running) == ({}, {})


def test_turns_that_are_left_leave_the_engine_that_has_them() -> None:
    made, inner = engine(context=1 << 30)
    other = SteppedEngine()
    expert = made.add_engine(other)

    async def work() -> None:
        left = [asyncio.create_task(one.generate([1], max_tokens=1 << 28, seed=0)) for one in (made, expert)]
        assert len(left) == 2
        await expert.generate([3], max_tokens=2, seed=0)

    made.drive(work)
    assert (inner.running, other.running) == ({}, {}) and len(inner.aborted) == len(other.aborted) == 1


def test_a_turn_is_as_long_as_the_context_allows() -> None:
    made, inner = engine()

    async def work() -> SampledTurn:
        return await made.generate(list(range(18)), max_tokens=50, seed=0)

    assert made.drive(work).token_ids == (19,)
    assert len(inner.steps) == 2


@pytest.mark.parametrize("ids", [list(range(20)), list(range(30)), []])
def test_a_turn_without_room_is_an_error(ids: list[int]) -> None:
    made, _ = engine()
    with pytest.raises(RunError, match="no room for a turn"):
        made.drive(lambda: made.generate(ids, max_tokens=5, seed=0))


def test_who_leaves_is_taken_out_of_the_batch() -> None:
    made, inner = engine(context=1 << 40)

    async def work() -> SampledTurn:
        gone = asyncio.create_task(made.generate([1], max_tokens=1 << 30, seed=0))
        first = await made.generate([5], max_tokens=1, seed=0)
        gone.cancel()
        assert first.token_ids == (6,)
        return await made.generate([7], max_tokens=3, seed=0)

    assert made.drive(work).token_ids == (10,)
    assert len(inner.aborted) == 1 and inner.running == {}


def test_an_engine_that_fails_ends_every_turn_and_the_error_is_its_own() -> None:
    made, _ = engine(breaks_at=2)
    said: list[str] = []

    async def work() -> None:
        turns = [made.generate([i], max_tokens=9, seed=0) for i in range(1, 4)]
        said.extend(str(error) for error in await asyncio.gather(*turns, return_exceptions=True))
        with pytest.raises(RunError, match="the kernel is gone"):
            await made.generate([9], max_tokens=1, seed=0)
        said.append("and nobody begins another")

    with pytest.raises(ValueError, match="the kernel is gone"):
        made.drive(work)
    assert said == ["the engine failed: the kernel is gone"] * 3 + ["and nobody begins another"]


def test_a_turn_that_cannot_be_read_ends_every_turn_that_one_too() -> None:
    made, _ = engine(unreadable=3)
    said: list[str] = []

    async def work() -> None:
        turns = [made.generate([i], max_tokens=i, seed=0) for i in (1, 3, 5)]
        said.extend(str(one) for one in await asyncio.gather(*turns, return_exceptions=True))

    with pytest.raises(RunError, match=r"^NaN$"):
        made.drive(work)
    assert said[1:] == ["the engine failed: NaN"] * 2


def test_an_error_of_the_episodes_is_raised_and_their_turns_leave_the_engine() -> None:
    made, inner = engine()

    async def work() -> None:
        asyncio.create_task(made.generate([1], max_tokens=19, seed=0))  # noqa: RUF006 it is left on purpose
        await made.generate([5], max_tokens=2, seed=0)
        raise RunError("an episode went wrong")

    with pytest.raises(RunError, match="an episode went wrong"):
        made.drive(work)
    assert inner.running == {}
