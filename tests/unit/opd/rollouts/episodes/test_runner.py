"""The white box: turns and observations in order, every bad environment ends its own episode alone, and limits hold."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from experts.suites.letters import build_tokenizer
from opd.errors import ConfigError, ModelError, RunError
from opd.records.environments import Action, Outcome, Tool
from opd.records.episodes import EpisodeResult, EpisodeStats
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.episodes.dialogue import ChatDialogue
from opd.rollouts.episodes.runner import Dialogues, run_episodes
from opd.rollouts.episodes.spec import LIMITS, EpisodeOptions, EpisodeRequest, refuse_many_broken
from opd.rollouts.episodes.trace import EpisodeKey, TraceSegment
from opd.traces.rendering import make_trace
from tests.chatml import CHATML, LAST_ONLY, bpe_tokenizer, chat_tokenizer, smollm2_tokenizer

TOKENIZER = chat_tokenizer(CHATML)
EOS = TOKENIZER.eos_token_id
CONTEXT = 1200
Policy = Callable[[str], str]


class Speaker:
    """A policy that is a function of all the text so far; it takes its turns token by token, as an engine does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seeds: list[int] = []
        self.limits: list[int] = []

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        assert len(token_ids) + max_tokens <= CONTEXT and max_tokens > 0
        self.seeds.append(seed)
        self.limits.append(max_tokens)
        await asyncio.sleep(0)
        ids = [*encode(self.policy(TOKENIZER.decode(list(token_ids)))), EOS]
        kept = tuple(ids[:max_tokens])
        return SampledTurn(
            token_ids=kept,
            logprobs=(-1.0,) * len(kept),
            stop_reason="stop" if kept[-1] == EOS else "length",
            policy_version=2,
        )


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Counting:
    """Asks for the next number; done at `goal`. Everything that it does is told in `calls`."""

    tools: tuple[Tool, ...] = ()
    made: list[Counting] = []  # noqa: RUF012 of all, so that a test finds them

    def __init__(self, goal: int = 3, **odd: Any) -> None:
        self.goal, self.odd, self.calls = goal, odd, list[Any]()
        Counting.made.append(self)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> Any:
        self.calls.append(("reset", dict(metadata), seed, threading.current_thread()))
        return self._act("reset", "0 ")

    def step(self, action: Action) -> Any:
        self.calls.append(("step", action, threading.current_thread()))
        number = int(action.text) if action.text.isdigit() else -1
        seen = f" {number} "
        return self._act("step", Outcome(observation=seen, reward=0.25, done=number >= self.goal))

    def close(self) -> None:
        self.calls.append(("close",))
        self._act("close", None)

    def _act(self, where: str, usual: Any) -> Any:
        odd = self.odd.get(where)
        if isinstance(odd, BaseException):
            raise odd
        if callable(odd):
            return odd()
        return usual if odd is None else odd


class Adding(Counting):
    """Adds with a tool, and is done when it is told a bare number."""

    tools = (
        Tool(name="add", description="Add.", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    )

    def step(self, action: Action) -> Any:
        self.calls.append(action)
        if not action.calls:
            return Outcome(reward=1.0, done=True)
        return Outcome(observation=tuple(str(call.arguments["a"] + 1) for call in action.calls))


def counts(text: str) -> str:
    return str(int(re.findall(r"\d+", text)[-1]) + 1)


def request(i: int = 0, text: Any = "count:", place: str = "Counting", **options: Any) -> EpisodeRequest:
    known = {"max_turns": 8, "max_turn_tokens": 20, "step_timeout_s": 20.0, "max_broken": 1.0}
    return EpisodeRequest(
        prompt=Prompt(id=f"d/{i}", domain="d", token_ids=(1,), text=text, metadata={"i": i}),
        sample=EpisodeKey(sample_id=f"s{i}", group=f"s{i}", step=1, domain="d"),
        options=EpisodeOptions(environment=f"{__name__}:{place}", **known | options),
        seed=5,
    )


def play(
    *requests: EpisodeRequest, policy: Policy = counts, tokenizer: Any = TOKENIZER
) -> tuple[list[EpisodeResult], Speaker]:
    Counting.made.clear()
    speaker = Speaker(policy)
    dialogues = Dialogues(tokenizer, [EOS])
    return asyncio.run(run_episodes(requests, speaker, dialogues, CONTEXT, 2)), speaker


def test_an_episode_in_plain_text() -> None:
    (found,), speaker = play(request())
    (rollout,) = found.rollouts
    assert TOKENIZER.decode(rollout.prompt_ids) == "count:0 "
    assert TOKENIZER.decode(rollout.response_ids) == "1<|im_end|> 1 2<|im_end|> 2 3<|im_end|>"
    assert [span.origin for span in rollout.spans] == ["policy", "environment", "policy", "environment", "policy"]
    assert TOKENIZER.decode(rollout.trained_ids) == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert (found.stop_reason, found.reward, found.error) == ("done", 0.75, "")
    assert (found.audit.turns, found.audit.sampled, found.audit.trained, found.audit.forks) == (3, 6, 6, 0)
    assert len(set(speaker.seeds)) == 3, "every turn has a seed of its own"
    (environment,) = Counting.made
    assert [call[0] for call in environment.calls] == ["reset", "step", "step", "step", "close"]
    assert environment.calls[0][1] == {"i": 0}
    threads = {call[-1] for call in environment.calls if isinstance(call[-1], threading.Thread)}
    assert len(threads) == 1 and threads != {threading.current_thread()}


def test_turns_that_get_no_observation_are_counted_one_by_one() -> None:
    (found,), _ = play(request(options={"step": Outcome()}, max_turns=3))
    assert found.rollouts[0].turns == (0, 0, 1, 1, 2, 2)
    (piece,) = make_trace(found.rollouts, (), {}, TOKENIZER).segments
    assert [turn for turn, _ in piece.turns] == [1, 1, 2, 2, 3]


def test_an_episode_through_the_chat_template() -> None:
    (found,), _ = play(request(text=[{"role": "user", "content": "Count."}]))
    (rollout,) = found.rollouts
    whole = TOKENIZER.decode(rollout.prompt_ids + rollout.response_ids)
    head, turn = "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n {} <|im_end|>\n<|im_start|>assistant\n"
    assert whole == f"<|im_start|>user\nCount.\n\n0 <|im_end|>\n{head}1{turn.format(1)}2{turn.format(2)}3<|im_end|>"
    assert TOKENIZER.decode(rollout.trained_ids) == "1<|im_end|>2<|im_end|>3<|im_end|>"


def test_tools_are_called_and_a_call_that_does_not_parse_is_an_observation() -> None:
    said = iter(
        ['<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>', "<tool_call>{broken</tool_call>", "5"]
    )
    (found,), _ = play(
        request(text=[{"role": "user", "content": "4+1"}], place="Adding", max_turn_tokens=90),
        policy=lambda _: next(said),
    )
    text = TOKENIZER.decode(found.rollouts[0].response_ids)
    assert "<tool_response>\n5\n</tool_response>" in text and "error: this call cannot be made: not JSON" in text
    assert (found.invalid_calls, found.stop_reason, found.reward, found.audit.turns) == (1, "done", 1.0, 3)
    assert [len(action.calls) for action in Counting.made[0].calls[1:3]] == [1, 0], "the broken call did not reach it"


@pytest.mark.parametrize(
    ("options", "reason", "told"),
    [
        ({"reset": ValueError("no map")}, "raised", "reset: ValueError: no map"),
        ({"reset": SystemExit(3)}, "raised", "SystemExit"),
        ({"reset": 7}, "raised", "reset returned 7"),
        ({"reset": "\x1b[2J"}, "observation", "control character '\\x1b'"),
        ({"step": KeyError("x")}, "raised", "step: KeyError: 'x'"),
        ({"step": "text"}, "raised", "step returned 'text', wanted an Outcome"),
        ({"step": Outcome(observation="a" * (10 << 20))}, "observation", "10,485,760 characters"),
        ({"step": Outcome(observation="a\x00b")}, "observation", "control character"),
        ({"step": Outcome(observation=3)}, "raised", "the observation 3"),  # type: ignore[arg-type]
        ({"step": Outcome(observation=("a", "b"))}, "raised", "2 observations for 0 calls"),
        ({"step": Outcome(reward=float("nan"))}, "raised", "the reward nan"),
        ({"nonsense": 1, "goal": "x"}, "raised", "step: TypeError"),
    ],
)
def test_a_bad_environment_ends_its_own_episode_and_no_other(options: dict[str, Any], reason: str, told: str) -> None:
    results, _ = play(request(0), request(1, options=options), request(2))
    assert [r.stop_reason for r in results] == ["done", reason, "done"]
    assert told in results[1].error and results[1].error.startswith("s1: ")
    assert all(not r.error for r in (results[0], results[2]))
    assert all(environment.calls[-1] == ("close",) for environment in Counting.made)
    stats = EpisodeStats.from_results(results)
    assert (stats.broken, stats.stop_reasons, stats.error) == (1, {"done": 2, reason: 1}, results[1].error)
    for rollout in results[1].rollouts:
        assert rollout.stop_reason == reason and rollout.response_ids[-1] == EOS, "what was sampled before is kept"


@pytest.mark.parametrize(
    ("options", "reason", "error", "told"),
    [
        ({"close": OSError("stuck")}, "done", "", "close: OSError: stuck"),
        ({"close": lambda: time.sleep(3)}, "done", "", "close was not back after 1 s"),
        ({"close": OSError("stuck"), "step": KeyError("x")}, "raised", "step: KeyError: 'x'", "close: OSError: stuck"),
    ],
)
def test_an_environment_that_cannot_be_closed_leaves_its_episode_as_it_ended(
    options: dict[str, Any], reason: str, error: str, told: str
) -> None:
    (found, usual), _ = play(request(options=options, step_timeout_s=1.0), request(1))
    assert found.stop_reason == reason and error in found.error and bool(error) == bool(found.error)
    assert found.reward == (usual.reward if reason == "done" else None)
    assert found.close_error.startswith("s0: ") and told in found.close_error
    stats = EpisodeStats.from_results([found, usual])
    assert (stats.broken, stats.not_closed, stats.close_error) == (int(reason == "raised"), 1, found.close_error)
    assert EpisodeStats.from_json(asdict(stats)) == stats


def test_an_environment_that_hangs_is_left_behind() -> None:
    waits = threading.Event()
    began = time.monotonic()
    results, _ = play(request(0), request(1, options={"step": lambda: waits.wait(60)}, step_timeout_s=1.0))
    assert time.monotonic() - began < 20
    assert [r.stop_reason for r in results] == ["done", "timeout"]
    assert "step was not back after 1 s" in results[1].error
    (hung,) = (environment for environment in Counting.made if environment.odd)  # each is made in a thread of its own
    assert hung.calls[-1][0] == "step", "its thread is still in there"
    waits.set()
    deadline = time.monotonic() + 20
    while hung.calls[-1] != ("close",):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_episodes_wait_side_by_side() -> None:
    began = time.monotonic()

    def slow() -> Outcome:
        time.sleep(0.3)
        return Outcome(done=True)

    results, _ = play(*(request(i, options={"step": slow}) for i in range(20)))
    assert {r.stop_reason for r in results} == {"done"}
    assert time.monotonic() - began < 3, "one after the other is 6 s"


@pytest.mark.parametrize(
    ("options", "reason", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_tokens": 4}, "tokens", 2),
        ({"max_tokens": 5}, "tokens", 3),
        ({"options": {"step": Outcome(observation="x" * 600)}, "max_turns": 50}, "context", 2),
        ({"options": {"reset": "x" * 1500}}, "context", 0),
        ({"options": {"step": Outcome(observation=" 0 ")}, "max_turns": 50}, "turns", 50),
    ],
)
def test_limits_end_an_episode(options: dict[str, Any], reason: str, turns: int) -> None:
    (found,), speaker = play(request(**options), policy=lambda _: "1")
    assert (found.stop_reason, found.audit.turns, found.error) == (reason, turns, "")
    assert len(speaker.limits) == turns
    for rollout in found.rollouts:
        assert rollout.stop_reason == reason in LIMITS and not rollout.truncated
        assert len(rollout.prompt_ids) + len(rollout.response_ids) <= CONTEXT


def test_a_turn_that_was_cut_at_its_own_limit_goes_on_and_the_end_is_not_the_policys() -> None:
    said = iter(["x" * 50, "3"])
    (found,), _ = play(
        request(text=[{"role": "user", "content": "Count."}], max_turn_tokens=5), policy=lambda _: next(said)
    )
    (rollout,) = found.rollouts
    assert TOKENIZER.decode(rollout.trained_ids) == "xxxxx3<|im_end|>"
    assert rollout.response_ids[5] == EOS and not rollout.loss_mask[5]
    assert (found.stop_reason, found.audit.turns) == ("done", 2)


def test_a_rollout_does_not_depend_on_its_neighbours() -> None:
    _, alone = play(request(3))
    results, _ = play(*(request(i) for i in range(6)))
    (again,), _ = play(request(3))
    assert results[3] == again
    _, other = play(replace(request(3), seed=6))
    assert alone.seeds != other.seeds


class Babbler:
    """Samples any ids at all, as a policy at a high temperature does, and remembers them."""

    def __init__(self, vocabulary: int, end: int) -> None:
        self.vocabulary, self.end, self.wrote = vocabulary, end, Counter[tuple[int, ...]]()

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        rng = random.Random(seed)
        ids = [*rng.choices(range(5, self.vocabulary), k=rng.randint(0, min(9, max_tokens - 1))), self.end]
        ids = ids[:max_tokens]
        self.wrote[(*token_ids, *ids)] += 1
        logprobs = tuple(-rng.random() - 0.1 for _ in ids)
        return SampledTurn(token_ids=tuple(ids), logprobs=logprobs, stop_reason="stop", policy_version=3)


@pytest.mark.parametrize(
    ("make", "changed"),
    [(bpe_tokenizer, 100), (build_tokenizer, 0), pytest.param(smollm2_tokenizer, 50, marks=pytest.mark.slow)],
    ids=["bpe", "quickstart", "smollm2"],
)
@pytest.mark.parametrize("text", ["count:", [{"role": "user", "content": "Count."}]], ids=["text", "chat"])
def test_no_sampled_token_is_changed_in_two_hundred_random_episodes(
    text: Any, make: Callable[[], Any], changed: int
) -> None:
    """`changed`: episodes that encoding their text again would change, at least."""
    tokenizer, redone = make(), 0
    babbler = Babbler(len(tokenizer), tokenizer.eos_token_id)
    requests = [request(i, text=text, options={"goal": 1 << 60}, max_turns=1 + i % 7) for i in range(200)]
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    results = asyncio.run(run_episodes(requests, babbler, dialogues, CONTEXT, 3))
    assert max(found.audit.turns for found in results) == 7
    for found in results:
        (rollout,) = found.rollouts
        ids, at = [*rollout.prompt_ids, *rollout.response_ids], len(rollout.prompt_ids)
        for span in rollout.spans:
            if span.origin == "policy":
                babbler.wrote[tuple(ids[: at + span.length])] -= 1
            at += span.length
        assert sum(rollout.loss_mask) == found.audit.sampled == found.audit.trained
        assert all(
            (value < 0) == mask for value, mask in zip(rollout.behaviour_logprobs, rollout.loss_mask, strict=True)
        )
        redone += list(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]) != ids
    assert set(babbler.wrote.values()) == {0}, "every turn is in a rollout, after the tokens that it was sampled after"
    assert redone >= changed


def test_a_template_that_cannot_append_ends_the_run() -> None:
    with pytest.raises(ModelError, match="the student's chat template"):
        play(request(text=[{"role": "user", "content": "Count."}]), tokenizer=chat_tokenizer(LAST_ONLY))


def test_a_class_that_is_not_there_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="no `Nothing`"):
        play(request(0), request(1, place="Nothing"))


def test_an_engine_that_fails_ends_the_run_and_environments_are_closed() -> None:
    def fails(text: str) -> str:
        raise RunError("the engine is gone")

    with pytest.raises(RunError, match="the engine is gone"):
        play(request(0), request(1), policy=fails)
    assert Counting.made
    deadline = time.monotonic() + 20
    while any(environment.calls[-1:] != [("close",)] for environment in Counting.made):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_too_many_broken_episodes_stop_the_run_by_name() -> None:
    results, _ = play(*(request(i, options={"step": KeyError("x")} if i < 3 else {}) for i in range(8)))
    stats = EpisodeStats.from_results(results)
    refuse_many_broken("maze", stats, 0.4)
    with pytest.raises(RunError, match=r"domain maze: 3 of 8 episodes broke \(3 raised\), first: s0: step: KeyError"):
        refuse_many_broken("maze", stats, 0.3)
    refuse_many_broken("maze", EpisodeStats.from_results(results[:1]), 0.0)  # one always may


assert __name__ in sys.modules, "the runner imports the environments of this file by its name"


class Looping:
    """Writes tags until its limit; all of its turns end in the same moment."""

    def __init__(self, turns: int) -> None:
        self.turns, self.waiting = turns, list[asyncio.Future[None]]()

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        self.waiting.append(asyncio.get_running_loop().create_future())
        mine = self.waiting[-1]
        if len(self.waiting) == self.turns:
            for future in self.waiting:
                future.set_result(None)
            self.waiting.clear()
        await mine
        ids = tuple((encode("<tool_call>") * max_tokens)[:max_tokens])
        return SampledTurn(token_ids=ids, logprobs=(-0.5,) * len(ids), stop_reason="length", policy_version=2)


def test_turns_that_loop_do_not_stop_the_loop_of_all_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn is read in the loop's thread, and where all end in the same moment it comes to itself between any two of them."""
    monkeypatch.setattr(f"{__name__}.CONTEXT", 30_000)
    rounds, taken, readers = 0, list[int](), set[str]()
    sampled, text, calls = TraceSegment.append_policy_turn, ChatDialogue.text, ChatDialogue.calls

    def took(segment: TraceSegment, turn: SampledTurn) -> None:
        taken.append(rounds)
        sampled(segment, turn)

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        readers.add(threading.current_thread().name.partition("_")[0])
        return function(*arguments)

    monkeypatch.setattr(TraceSegment, "append_policy_turn", took)
    monkeypatch.setattr(ChatDialogue, "text", lambda *given: read(text, *given))
    monkeypatch.setattr(ChatDialogue, "calls", lambda *given: read(calls, *given))

    async def work() -> list[EpisodeResult]:
        async def count() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        chat = [{"role": "user", "content": "4+1"}]
        asked = [request(i, chat, "Adding", max_turns=2, max_turn_tokens=8192) for i in range(64)]
        found = await run_episodes(asked, Looping(64), Dialogues(TOKENIZER, [EOS]), CONTEXT, 2)
        counting.cancel()
        return found

    found = asyncio.run(work())
    assert [(one.stop_reason, one.invalid_calls, one.audit.sampled) for one in found] == [("turns", 2, 16384)] * 64
    assert len(taken) == len(set(taken)) == 128 and readers == {"reader"}
