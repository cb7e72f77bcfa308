"""Guarded episodes: no blocked call runs, the episode goes on, and the white box and the black box give the same tokens."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config.guard import GuardConfig
from opd.guard.build import guard_spec
from opd.records.environments import Action, Outcome, Tool
from opd.records.episodes import EpisodeResult
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.endpoint.episode import play_all_episodes
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.sub_agents import SubAgentOptions, SubAgentsOptions
from opd.rollouts.episodes.trace import EpisodeKey
from opd.traces.rendering import make_trace
from pipelines.evaluation.traces import tree_lines
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer

CONTEXT = 6000
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = Tool(name="shell", description="Run.", parameters=PARAMETERS)
RAN: list[str] = []
"""Commands that the environment below carried out."""
NO_FILE = "cat: /tests/{}: No such file or directory"


class Shell:
    """Says `ran: COMMAND` to every call. A turn without a call ends it; the reward is 1 for `done`."""

    tools = (SHELL,)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, action: Action) -> Outcome:
        RAN.extend(call.arguments["command"] for call in action.calls)
        if action.calls:
            return Outcome(observation=tuple(f"ran: {call.arguments['command']}" for call in action.calls))
        return Outcome(reward=float(action.text == "done"), done=True)

    def close(self) -> None:
        pass


PROGRAM = """
import json, os
ran, chat = [], [{"role": "user", "content": json.load(open(os.environ["OPD_TASK"]))["prompt"][0]["content"]}]
while True:
    message = ask(chat)
    chat.append(message)
    calls = message.get("tool_calls", [])
    if not calls:
        break
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        ran.append(command)
        chat.append({"role": "tool", "tool_call_id": call["id"], "content": "ran: " + command})
json.dump(ran, open(LOG, "w"))
print(json.dumps({"reward": float(message["content"] == "done")}))
"""
BARE = """
import urllib.request
def ask(chat):
    body = json.dumps({"model": "m", "messages": chat, "tools": [TOOL]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
"""
STOCK = """
import openai
client = openai.OpenAI(max_retries=0)
def ask(chat):
    reply = client.chat.completions.create(model="m", messages=chat, tools=[TOOL])
    return reply.choices[0].message.model_dump(exclude_none=True)
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(max_retries=0)
tool = {"name": TOOL["function"]["name"], "description": "Run.", "input_schema": TOOL["function"]["parameters"]}
def ask(chat):
    messages = []
    for m in chat:
        if m["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
            if messages[-1]["role"] == "user":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
        else:
            messages.append({"role": m["role"], "content": m.get("blocks") or m["content"]})
    with client.messages.stream(model="m", messages=messages, max_tokens=500, tools=[tool]) as events:
        reply = events.get_final_message()
    calls = [{"id": b.id, "function": {"arguments": json.dumps(b.input)}} for b in reply.content if b.type == "tool_use"]
    text = "".join(b.text for b in reply.content if b.type == "text")
    return {"role": "assistant", "content": text, "tool_calls": calls, "blocks": reply.content}
"""


class Speaker:
    """Says one turn after the other, whichever way the dialogue came to it: it counts the turns before."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer, turns
        self.asked: list[tuple[tuple[int, ...], int]] = []

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        assert len(token_ids) + max_tokens <= CONTEXT
        self.asked.append((tuple(token_ids), seed))
        before = self.tokenizer.decode(list(token_ids)).count("<|im_start|>assistant") - 1
        said = self.tokenizer(self.turns[before], add_special_tokens=False)["input_ids"]
        ids = (*said, self.tokenizer.eos_token_id)[:max_tokens]
        logprobs = tuple(-0.01 * (1 + (seed + place) % 97) for place in range(len(ids)))
        stop = "stop" if len(ids) > len(said) else "length"
        return SampledTurn(token_ids=ids, logprobs=logprobs, stop_reason=stop, policy_version=2)


class Several(Speaker):
    """The same for several agents: each has turns of its own, and is known by a word that its dialogue begins with."""

    def __init__(self, tokenizer: Any, turns: Mapping[str, Sequence[str]]) -> None:
        super().__init__(tokenizer, ())
        self.by_word = turns

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        begin = self.tokenizer.decode(list(token_ids)).partition("<|im_start|>assistant")[0]
        self.turns = next(turns for word, turns in self.by_word.items() if f"{word}<|im_end|>" in begin)
        return await super().generate(token_ids, max_tokens=max_tokens, seed=seed)


def wanted(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def call(*commands: str) -> str:
    return "Let me see. " + "".join(wanted("shell", command=command) for command in commands)


MIXED = [call("ls", "cat /tests/a", "pwd"), call("cat /tests/b"), call("cat /tests/c", "cat /tests/d"), "done"]
"""A turn with one blocked call among three, two turns of which nothing may happen, an answer."""


def request(options: EpisodeOptions | AgentOptions) -> EpisodeRequest:
    return EpisodeRequest(
        prompt=Prompt(id="d/0", domain="d", token_ids=(1,), text=[{"role": "user", "content": "Go."}]),
        sample=EpisodeKey(sample_id="s0", group="s0", step=1, domain="d"),
        options=options,
        seed=5,
    )


def white(guard: GuardConfig | None, **more: Any) -> EpisodeRequest:
    known: dict[str, Any] = {"max_turns": 9, "max_turn_tokens": 400, "step_timeout_s": 20.0, "max_broken": 1.0}
    spec = None if guard is None else guard_spec(guard)
    return request(EpisodeOptions(environment=f"{__name__}:Shell", guard=spec, **known | more))


def black(guard: GuardConfig | None, client: str, tmp_path: Path, **more: Any) -> EpisodeRequest:
    known: dict[str, Any] = {
        "max_calls": 20,
        "max_turn_tokens": 400,
        "timeout_s": 60.0,
        "parallel": 8,
        "max_broken": 1.0,
    }
    header = f"import json, os\nTOOL, LOG = {SHELL.schema()}, {str(tmp_path / 'ran.json')!r}\n"
    (tmp_path / "agent.py").write_text(header + client + PROGRAM)
    command = (sys.executable, str(tmp_path / "agent.py"))
    spec = None if guard is None else guard_spec(guard)
    return request(AgentOptions(command=command, guard=spec, **known | more))


def run(asked: EpisodeRequest, turns: Sequence[str], template: str = WITH_TOOLS) -> tuple[EpisodeResult, Speaker]:
    RAN.clear()
    tokenizer = chat_tokenizer(template)
    speaker = Speaker(tokenizer, turns)
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    (found,) = asyncio.run(play_all_episodes([asked], speaker, dialogues, CONTEXT, 2))
    return found, speaker


def test_without_a_guard_everything_runs() -> None:
    found, _ = run(white(None), MIXED)
    assert RAN == ["ls", "cat /tests/a", "pwd", "cat /tests/b", "cat /tests/c", "cat /tests/d"]
    assert found.guard is None and found.reward == 1.0


def test_no_blocked_call_runs_and_the_episode_goes_on() -> None:
    found, speaker = run(white(GuardConfig()), MIXED)
    assert RAN == ["ls", "pwd"] and (found.stop_reason, found.reward, found.audit.turns) == ("done", 1.0, 4)
    (rollout,) = found.rollouts
    text = speaker.tokenizer.decode(rollout.response_ids)
    results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", text, re.S)
    assert results == ["ran: ls", NO_FILE.format("a"), "ran: pwd", *(NO_FILE.format(n) for n in "bcd")]
    assert [text.partition("<|im_end|>")[0], "block" in text] == [MIXED[0], False], "the policy cannot tell"
    assert found.guard is not None
    assert [(event.turn, event.text) for event in found.guard.events] == [
        (0, "cat /tests/a"), (1, "cat /tests/b"), (2, "cat /tests/c"), (2, "cat /tests/d"),
    ]  # fmt: skip
    assert (found.guard.checked, found.guard.blocked_turns) == (6, 3)
    lines = found.text.splitlines()
    place = lines.index(f"policy: {MIXED[1]}")
    assert lines[place + 1].startswith("guard: blocked by the rules, hidden-tests: ")
    assert lines[place + 2] == f"environment: {NO_FILE.format('b')}"


@pytest.mark.parametrize(
    ("client", "template", "on_hit"),
    [
        (BARE, CHATML, "keep"),
        (BARE, WITH_TOOLS, "mask"),
        (BARE, WITH_TOOLS, "negative"),
        (STOCK, WITH_TOOLS, "keep"),
        (ANTHROPIC, CHATML, "keep"),
        (ANTHROPIC, WITH_TOOLS, "keep"),
    ],
)
def test_the_same_guarded_dialogue_in_white_and_in_black(
    client: str, template: str, on_hit: Any, tmp_path: Path
) -> None:
    guard = GuardConfig(on_hit=on_hit)
    wanted, reference = run(white(guard), MIXED, template)
    assert RAN == ["ls", "pwd"]
    found, speaker = run(black(guard, client, tmp_path), MIXED, template)
    assert found.error == "" and json.loads((tmp_path / "ran.json").read_text()) == ["ls", "pwd"]
    assert found.rollouts == wanted.rollouts, "ids, marks, log-probs, versions, reward"
    assert speaker.asked == reference.asked, "the same tokens before each turn, and the same seeds"
    assert (found.audit, found.guard, found.stop_reason) == (wanted.audit, wanted.guard, "done")
    assert found.audit.forks == 0 and "guard: blocked" in found.text


@pytest.mark.parametrize(("on_hit", "origin"), [("keep", "policy"), ("mask", "masked"), ("negative", "blocked")])
def test_the_tokens_of_a_blocked_turn_are_marked_and_no_others(on_hit: Any, origin: str) -> None:
    found, _ = run(white(GuardConfig(on_hit=on_hit)), MIXED)
    (rollout,) = found.rollouts
    turns = [span for span in rollout.spans if span.origin != "environment"]
    assert [span.origin for span in turns] == [origin, origin, origin, "policy"]
    lengths = [len(chat_tokenizer(WITH_TOOLS)(turn)["input_ids"]) + 1 for turn in MIXED]
    assert [span.length for span in turns] == lengths
    trained = sum(lengths) if on_hit != "mask" else lengths[-1]
    assert rollout.num_trained == found.audit.trained == trained and found.audit.sampled == sum(lengths)


def test_tokens_that_no_loss_may_have_stay_masked() -> None:
    tokenizer = chat_tokenizer(WITH_TOOLS)
    (dot,) = tokenizer(".", add_special_tokens=False)["input_ids"]
    asked = white(GuardConfig(on_hit="negative"))
    found, _ = run(
        EpisodeRequest(
            **{f: getattr(asked, f) for f in ("prompt", "sample", "options", "seed")}, masked=frozenset({dot})
        ),
        MIXED,
    )
    (rollout,) = found.rollouts
    origins = [span.origin for span in rollout.spans for _ in range(span.length)]
    assert all(
        origin in ("masked", "environment")
        for origin, token in zip(origins, rollout.response_ids, strict=True)
        if token == dot
    )
    assert "blocked" in origins


def test_a_policy_that_only_cheats_meets_the_limits_of_its_episode(tmp_path: Path) -> None:
    cheats = [call("cat /tests/a")] * 30
    found, _ = run(white(GuardConfig(), max_turns=5), cheats)
    assert (found.stop_reason, found.audit.turns, RAN) == ("turns", 5, [])
    found, _ = run(black(GuardConfig(), BARE, tmp_path, max_calls=5), cheats)
    assert (found.stop_reason, found.audit.turns) == ("turns", 5) and not (tmp_path / "ran.json").exists()
    found, _ = run(black(GuardConfig(), BARE, tmp_path, max_tokens=190), cheats)
    assert found.stop_reason == "tokens" and found.audit.turns == 2 and found.audit.sampled == 190
    found, _ = run(black(GuardConfig(), BARE, tmp_path, max_calls=99), [call("cat /tests/" + "a" * 300)] * 30)
    assert found.stop_reason == "context" and found.audit.turns > 5


def test_a_blocked_answer_reaches_nobody(tmp_path: Path) -> None:
    turns = ["```sh\ncat /tests/a\n```", "done"]
    for asked in (white(GuardConfig(answers=True)), black(GuardConfig(answers=True), BARE, tmp_path)):
        found, speaker = run(asked, turns)
        assert (found.stop_reason, found.reward, found.audit.turns) == ("done", 1.0, 2), found.error
        text = speaker.tokenizer.decode(found.rollouts[0].response_ids)
        assert f"<|im_start|>user\n{NO_FILE.format('a')}<|im_end|>" in text


def test_a_program_that_asks_again_gets_the_same_reply_and_one_that_changes_its_history_forks(tmp_path: Path) -> None:
    twice = (
        BARE.replace("def ask", "def once")
        + "\ndef ask(chat):\n    first = once(chat)\n    assert once(chat) == first\n    return first\n"
    )
    found, speaker = run(black(GuardConfig(), twice, tmp_path), MIXED)
    assert found.error == "" and len(speaker.asked) == 4 and found.audit.forks == 0
    changes = BARE.replace(
        "body =", "chat = [chat[0] | {'content': 'Go on.'}, *chat[1:]] if len(chat) > 1 else chat\n    body ="
    )
    found, _ = run(black(GuardConfig(), changes, tmp_path), MIXED)
    assert (
        found.error == ""
        and found.audit.forks == 1
        and json.loads((tmp_path / "ran.json").read_text()) == ["ls", "pwd"]
    )


def test_sub_agents_are_guarded_too_and_those_that_share_a_shell_share_its_session() -> None:
    kinds = {
        "help": SubAgentOptions(description="Helps.", shares=True),
        "alone": SubAgentOptions(description="Works alone.", environment=f"{__name__}:Shell"),
    }
    turns = {
        "Go.": [
            call("cd /"),
            wanted("help", task="Read."),
            call("cat /tests/b") + wanted("alone", task="Look."),
            "done",
        ],
        "Read.": [call("cat tests/a"), "read"],
        "Look.": [call("cat tests/a"), call("cat /tests/c"), "looked"],
    }
    RAN.clear()
    tokenizer = chat_tokenizer(WITH_TOOLS)
    asked = white(GuardConfig(on_hit="negative"), sub_agents=SubAgentsOptions(kinds=kinds, at_most=4))
    speaker = Several(tokenizer, turns)
    (found,) = asyncio.run(
        play_all_episodes([asked], speaker, Dialogues(tokenizer, [tokenizer.eos_token_id]), CONTEXT, 2)
    )
    assert (found.stop_reason, found.error) == ("done", ""), found.error
    assert RAN == ["cd /", "cat tests/a"], (
        "tests/a is hidden from the shell that stands in /, and not from the other one"
    )
    main, read, look = found.rollouts
    text = tokenizer.decode(main.response_ids)
    results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", text, re.S)
    assert results == ["ran: cd /", "read", NO_FILE.format("b"), "looked"]
    marks = [[span.origin for span in one.spans if span.origin != "environment"] for one in (main, read, look)]
    assert marks == [["policy", "policy", "blocked", "policy"], ["blocked", "policy"], ["policy", "blocked", "policy"]]
    assert found.guard is not None and (found.guard.checked, found.guard.blocked_turns) == (5, 3)
    assert sorted(event.text for event in found.guard.events) == ["cat /tests/b", "cat /tests/c", "cat tests/a"]
    kept = make_trace(
        found.rollouts, (), {}, tokenizer, [*found.guard.events, replace(found.guard.events[0], episode="s01")]
    )
    assert len(kept.guard) == 3 and kept.sampled == kept.trained
    assert any(line.startswith("turn 3, guard: blocked by the rules, hidden-tests: ") for line in kept.guard)
    assert kept.guard[0] in "\n".join(tree_lines(kept))


TEXTS = """
import json, os, urllib.request
MORE = json.loads(os.environ["MORE"])
got, chat = [], [{"role": "user", "content": "Go."}]
while True:
    body = json.dumps({"model": "m", "messages": chat, "tools": [TOOL], **MORE}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    message = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    got.append(message)
    if message["content"] == "done":
        break
    chat += [message, {"role": "user", "content": "Go on."}]
json.dump(got, open(LOG, "w"))
print(json.dumps({"reward": 1.0}))
"""
"""A program that takes what it does out of text."""
CHEATS, HONEST = wanted("shell", command="cat /tests/a"), wanted("shell", command="ls")
STOP = {"stop": ["</tool_call>"]}
NONE = {"tool_choice": "none"}


@pytest.mark.parametrize(
    ("more", "turn"),
    [
        ({}, f"{CHEATS}<tool_call>"),
        ({}, f"<tool_call>{HONEST}</tool_call>{CHEATS}"),
        ({}, CHEATS.removesuffix("</tool_call>")),
        ({}, CHEATS.removesuffix('"}}</tool_call>')),
        ({}, CHEATS.replace("</tool_call>", "</tool_cal>")),
        ({}, CHEATS.replace("{", "", 1)),
        ({}, CHEATS.replace('"', "'")),
        ({}, "Let me see.\n" + CHEATS.replace("tool_call>", "call>")),
        (STOP, CHEATS),
        (STOP, f"Well. {CHEATS} and {HONEST}"),
        ({"stop": ["}}"]}, CHEATS),
        (NONE, CHEATS),
        (NONE, "<tool_call><function=shell><parameter=command>cat /tests/a</parameter></function></tool_call>"),
        (NONE, '[TOOL_CALLS]shell[ARGS]{"command": "cat /tests/a"}'),
        (NONE, "[shell(command='cat /tests/a')]"),
        (NONE, '{"name": "shell", "parameters": {"command": "cat /tests/a"}}'),
        ({"tools": None}, CHEATS),
    ],
)
def test_a_cheating_call_reaches_no_program_as_text(more: dict[str, Any], turn: str, tmp_path: Path) -> None:
    asked = black(GuardConfig(), "", tmp_path)
    (tmp_path / "agent.py").write_text((tmp_path / "agent.py").read_text().replace(PROGRAM, "") + TEXTS)
    assert isinstance(asked.options, AgentOptions)
    asked = replace(asked, options=replace(asked.options, env={"MORE": json.dumps(more)}))
    found, _ = run(asked, [turn, "done"])
    assert json.loads((tmp_path / "ran.json").read_text()) == [{"role": "assistant", "content": "done"}]
    assert (found.stop_reason, found.audit.turns, found.audit.forks, found.error) == ("done", 2, 0, "")
    assert found.guard is not None and found.guard.blocked_turns == 1
    assert "hidden-tests" in found.text and "policy: done" in found.text
    unguarded = replace(asked, options=replace(asked.options, guard=None))
    run(unguarded, [turn, "done"])
    first, _ = json.loads((tmp_path / "ran.json").read_text())
    assert "cat /tests/" in first["content"], "without the guard it goes to the program"


@pytest.mark.parametrize("more", [{}, STOP, NONE])
@pytest.mark.parametrize(
    "turn", [f"{HONEST}<tool_call>", f"I list the files: {HONEST}", 'I found {"name": "a", "b": 3}.']
)
def test_honest_text_reaches_the_program(more: dict[str, Any], turn: str, tmp_path: Path) -> None:
    asked = black(GuardConfig(), "", tmp_path)
    (tmp_path / "agent.py").write_text((tmp_path / "agent.py").read_text().replace(PROGRAM, "") + TEXTS)
    assert isinstance(asked.options, AgentOptions)
    found, _ = run(replace(asked, options=replace(asked.options, env={"MORE": json.dumps(more)})), [turn, "done"])
    got = json.loads((tmp_path / "ran.json").read_text())
    assert len(got) == 2 and (
        got[0].get("tool_calls") or got[0]["content"] in (turn, turn.partition("</tool_call>")[0])
    )
    assert found.guard is not None and not found.guard.events


def test_a_turn_that_cannot_be_read_is_answered_alike_in_white_and_in_black(tmp_path: Path) -> None:
    turns = [f"{CHEATS}<tool_call>", "done"]
    asked = black(GuardConfig(), BARE, tmp_path)
    (expected, _), (found, _) = run(white(GuardConfig()), turns), run(asked, turns)
    assert [one.response_ids for one in found.rollouts] == [one.response_ids for one in expected.rollouts]
    assert json.loads((tmp_path / "ran.json").read_text()) == []
