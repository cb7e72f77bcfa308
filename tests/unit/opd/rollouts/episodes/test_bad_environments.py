"""Odd acts of anybody's environment, no plain errors: each ends its own episode with a reason, and no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from opd.records.environments import Outcome, Tool
from opd.records.episodes import EpisodeResult
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer
from tests.unit.opd.rollouts.episodes.test_runner import Counting, play, request

CHAT = [{"role": "user", "content": "Count."}]


class Wordless:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Stuck(Counting):
    """Does not come back from where it is told to hang, until the test is over."""

    over = threading.Event()

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self.hangs = hangs
        self._wait("class")

    def reset(self, metadata: Mapping[str, Any], seed: int) -> Any:
        self._wait("reset")
        return super().reset(metadata, seed)

    def close(self) -> None:
        self._wait("close")
        super().close()

    def _wait(self, where: str) -> None:
        if self.hangs == where:
            Stuck.over.wait(60)


class Dressed(Counting):
    """Has tools only once it was reset, and they are not what tools are."""

    @property
    def tools(self) -> Any:  # type: ignore[override]
        if self.odd["dress"] == "raises":
            raise KeyError("no dress")
        return self.odd["dress"]


class Stepless:
    tools: tuple[Tool, ...] = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return "0 "

    def close(self) -> None:
        pass


def beside_a_good_one(place: type = Counting, template: str = CHATML, **options: Any) -> EpisodeResult:
    """Play the episode and return its result; the one beside it is whole."""
    bad = request(1, **options)
    bad = replace(bad, options=replace(bad.options, environment=f"{place.__module__}:{place.__name__}"))
    (good, found), _ = play(request(0), bad, tokenizer=chat_tokenizer(template))
    assert (good.stop_reason, good.error, good.reward) == ("done", "", 0.75)
    return found


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (Wordless(), "step: ValueError: no words"),
        (Outcome(reward=10**400), "the reward 1000"),
        (Outcome(reward=-1e308), "the reward -1e+308"),  # two of them have no sum
        (asyncio.CancelledError("mine"), "step: asyncio.exceptions.CancelledError: mine"),
        (KeyboardInterrupt(), "step: KeyboardInterrupt"),
    ],
    ids=["no repr", "no float", "no sum", "cancelled", "interrupted"],
)
def test_a_step_like_no_other(step: Any, told: str) -> None:
    found = beside_a_good_one(options={"step": step})
    assert found.stop_reason == "raised" and told in found.error, found.error
    (bad,) = (environment for environment in Counting.made if environment.odd)  # each is made in a thread of its own
    assert bad.calls[-1] == ("close",) and found.rollouts, "what was written before it is trained"


@pytest.mark.parametrize(("max_turns", "reason"), [(9, "observation"), (1, "turns")])
@pytest.mark.parametrize("seen", ["x" * (10 << 20), "\x1b[2J"], ids=["10 MB", "control"])
def test_what_nobody_can_read_is_not_kept_for_people(seen: str, max_turns: int, reason: str) -> None:
    found = beside_a_good_one(options={"step": Outcome(observation=seen)}, max_turns=max_turns)
    assert found.stop_reason == reason
    assert seen not in found.text and len(found.text) < 200


@pytest.mark.parametrize(("hangs", "turns"), [("class", 0), ("reset", 0), ("close", 3)])
def test_an_environment_may_hang_anywhere(hangs: str, turns: int) -> None:
    Stuck.over.clear()
    try:
        found = beside_a_good_one(Stuck, options={"hangs": hangs}, step_timeout_s=0.5)
    finally:
        Stuck.over.set()
    assert (found.stop_reason, found.audit.turns) == ("done" if turns else "timeout", turns)
    assert "was not back after 0.5 s" in (found.close_error if turns else found.error)


@pytest.mark.parametrize(
    ("dress", "told"),
    [
        ("raises", "reset: KeyError: 'no dress'"),
        (["hammer"], "tools = ['hammer'], which is no tuple of"),
        ((Tool(name="x", description="", parameters={"properties": {"a": {"enum": {1, 2}}}}),), "written as JSON"),
    ],
)
def test_tools_that_are_none(dress: Any, told: str) -> None:
    found = beside_a_good_one(Dressed, options={"dress": dress}, text=CHAT)
    assert found.stop_reason == "raised" and told in found.error and not found.rollouts


def test_a_class_without_a_method_ends_its_own_episode() -> None:
    found = beside_a_good_one(Stepless)
    assert found.stop_reason == "raised" and "'Stepless' object has no attribute 'step'" in found.error


@pytest.mark.parametrize("first", ["x" * (10 << 20), "\x1b[2J"], ids=["10 MB", "control"])
def test_a_first_observation_that_nobody_can_read_is_not_in_the_episodes_text(first: str) -> None:
    found = beside_a_good_one(options={"reset": first})
    assert (found.stop_reason, found.audit.turns, found.text) == ("observation", 0, "")


def test_messages_that_the_chat_template_cannot_read() -> None:
    odd = [{"role": "user", "content": "0 ", "tool_calls": 3}]
    found = beside_a_good_one(template=WITH_TOOLS, options={"reset": odd}, text=CHAT)
    assert found.stop_reason == "observation" and "the chat template cannot read the messages" in found.error


def test_what_the_policy_calls_is_the_policys_fault() -> None:
    said = r'<tool_call>{"name": "a\u001b[2J\u0000", "arguments": 4}</tool_call>'
    (found,), _ = play(request(text=CHAT, place="Adding", max_turn_tokens=99, max_turns=2), policy=lambda _: said)
    assert (found.invalid_calls, found.stop_reason, found.error) == (2, "turns", ""), "the reason can be read"
