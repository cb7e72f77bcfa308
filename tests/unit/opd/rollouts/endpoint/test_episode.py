"""Agents' programs: the same episode as in the white box, and every bad program ends its own episode alone."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from opd.credit.episodes import group_into_episodes
from opd.credit.gae import split_into_lines
from opd.errors import RunError
from opd.records.environments import Action, Outcome, Tool
from opd.records.episodes import EpisodeResult
from opd.records.types import Prompt, SampledTurn
from opd.rollouts.endpoint.episode import play_all_episodes
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.trace import EpisodeKey
from opd.tool_formats.thoughts import without_thoughts
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer
from tests.tool_templates import DROPS_THOUGHTS, FAMILIES, QWEN3, Family

CONTEXT = 4000
Policy = Callable[[str], str]

# What an agent without a client library looks like; `ask` gives the reply's message.
BARE = """
import json, os, sys, urllib.error, urllib.request
def ask(messages, base=None, **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    url = (base or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    asked = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
task = json.load(sys.stdin)
"""
OPENAI = """
import json, openai, re
client = openai.OpenAI(max_retries=0)
task = json.load(open(os.environ["OPD_TASK"]))
chat = [{"role": "user", "content": task["prompt"][0]["content"] + "\\n\\n0 "}]
while True:
    reply = client.chat.completions.create(model="m", messages=chat, temperature=0.3, stream=STREAM, **TOOLS)
    if STREAM:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        message = {"role": "assistant", "content": text}
    else:
        message = reply.choices[0].message.model_dump(exclude_none=True)
    calls = message.get("tool_calls", [])
    if not calls and int(message["content"]) >= 3:
        break
    chat.append(message)
    chat += [{"role": "tool", "tool_call_id": c["id"], "content": str(json.loads(c["function"]["arguments"])["a"] + 1)}
             for c in calls]
    if not calls:
        chat.append({"role": "user", "content": " %d " % int(message["content"])})
print(json.dumps({"reward": 0.75}))
"""
ANTHROPIC = """
import anthropic, json
client = anthropic.Anthropic(max_retries=0)
task = json.load(open(os.environ["OPD_TASK"]))
chat = [{"role": "user", "content": task["prompt"][0]["content"] + "\\n\\n0 "}]
while True:
    asked = {"model": "m", "messages": chat, "max_tokens": 500, "extra_body": {"temperature": 0.3}, **TOOLS}
    if STREAM:
        with client.messages.stream(**asked) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(**asked)
    calls = [block for block in reply.content if block.type == "tool_use"]
    text = "".join(block.text for block in reply.content if block.type == "text")
    if not calls and int(text) >= 3:
        break
    chat.append({"role": "assistant", "content": reply.content})
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(c.input["a"] + 1)} for c in calls]
    chat.append({"role": "user", "content": results or " %d " % int(text)})
json.dump({"reward": 0.75}, open(os.environ["OPD_RESULT"], "w"))
"""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = Tool(name="add", description="Add.", parameters=PARAMETERS)


class Speaker:
    """A policy that is a function of all the text so far; it takes its turns token by token, as an engine does."""

    def __init__(self, policy: Policy, tokenizer: Any, step_s: float = 0.0) -> None:
        self.policy, self.tokenizer, self.step_s = policy, tokenizer, step_s
        self.asked: list[tuple[tuple[int, ...], int, int]] = []
        self.fails = False

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        assert len(token_ids) + max_tokens <= CONTEXT and max_tokens > 0
        self.asked.append((tuple(token_ids), max_tokens, seed))
        text = self.policy(self.tokenizer.decode(list(token_ids)))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id][:max_tokens]
        for _ in ids:
            await asyncio.sleep(self.step_s)
            if self.fails:
                raise RunError("the engine is gone")
        return SampledTurn(
            token_ids=tuple(ids),
            logprobs=tuple(-0.01 * (1 + (seed + place) % 97) for place in range(len(ids))),
            stop_reason="stop" if ids[-1] == self.tokenizer.eos_token_id else "length",
            policy_version=2,
        )


class Counting:
    """The white box of what the agents above do."""

    tools: tuple[Tool, ...] = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return "0 "

    def step(self, action: Action) -> Outcome:
        if action.calls:
            return Outcome(observation=tuple(str(call.arguments["a"] + 1) for call in action.calls))
        number = int(action.text)
        return Outcome(observation=f" {number} ", done=number >= 3, reward=0.75 if number >= 3 else None)

    def close(self) -> None:
        pass


class Adding(Counting):
    tools = (ADD,)


class Thinking(Adding):
    def step(self, action: Action) -> Outcome:
        return super().step(Action(text=without_thoughts(action.text), calls=action.calls))


def counts(text: str) -> str:
    return str(int(re.findall(r"\d+", text)[-1]) + 1)


def adds(text: str) -> str:
    """Calls the tool twice in one turn, then says the number that it gave."""
    dialogue = text.rpartition("Count.")[2]
    numbers = re.findall(r"\d+", dialogue)
    if len(numbers) > 1:
        return "3"
    return 'Two calls: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>\n{"arguments": {"a": 2}, "name": "add"}\n</tool_call>'


def agent(code: str | list[str], tmp_path: Path, i: int = 0, **options: Any) -> EpisodeRequest:
    """An episode of a program: Python code, or a command."""
    command = code if isinstance(code, list) else [sys.executable, str(tmp_path / f"agent-{i}.py")]
    if isinstance(code, str):
        (tmp_path / f"agent-{i}.py").write_text(code)
    known = {"max_calls": 20, "max_turn_tokens": 200, "timeout_s": 60.0, "parallel": 8, "max_broken": 1.0}
    return EpisodeRequest(
        prompt=Prompt(
            id=f"d/{i}",
            domain="d",
            token_ids=(1,),
            text=[{"role": "user", "content": "Count."}],
            answer="3",
            metadata={"shown": i, "hidden": "the key"},
        ),
        sample=EpisodeKey(sample_id=f"s{i}", group=f"s{i}", step=1, domain="d"),
        options=AgentOptions(command=tuple(command), **known | options),
        seed=5,
    )


def white(place: str) -> EpisodeRequest:
    return EpisodeRequest(
        prompt=Prompt(id="w/0", domain="w", token_ids=(1,), text=[{"role": "user", "content": "Count."}]),
        sample=EpisodeKey(sample_id="s0", group="s0", step=1, domain="d"),
        options=EpisodeOptions(
            environment=f"{__name__}:{place}", max_turns=9, max_turn_tokens=200, step_timeout_s=20.0, max_broken=1.0
        ),
        seed=5,
    )


def run(
    *requests: EpisodeRequest,
    policy: Policy = counts,
    template: str | None = CHATML,
    step_s: float = 0.0,
    specials: Sequence[str] = (),
) -> tuple[list[EpisodeResult], Speaker]:
    tokenizer = chat_tokenizer(template, specials)
    speaker = Speaker(policy, tokenizer, step_s)
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    return asyncio.run(play_all_episodes(requests, speaker, dialogues, CONTEXT, 2)), speaker


def with_stock_client(code: str, stream: bool, tools: dict[str, Any]) -> str:
    return f"import os\nSTREAM, TOOLS = {stream}, {tools}\n{code}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [OPENAI, ANTHROPIC])
def test_the_same_agent_in_white_and_in_black(code: str, stream: bool, tmp_path: Path) -> None:
    (found,), speaker = run(agent(with_stock_client(code, stream, {}), tmp_path))
    (wanted,), reference = run(white("Counting"))
    assert found.error == "" and found.rollouts == wanted.rollouts, "ids, masks, log-probs, versions, reward"
    assert [(ids, seed) for ids, _, seed in speaker.asked] == [(ids, seed) for ids, _, seed in reference.asked]
    assert (found.stop_reason, found.reward, found.audit) == ("done", 0.75, wanted.audit)
    assert found.audit.turns == 3 and "temperature (3 requests)" in found.text


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
@pytest.mark.parametrize(
    ("code", "tool"),
    [(OPENAI, ADD.schema()), (ANTHROPIC, {"name": "add", "description": "Add.", "input_schema": PARAMETERS})],
)
def test_the_same_tools_in_white_and_in_black(code: str, tool: Any, template: str, tmp_path: Path) -> None:
    program = agent(with_stock_client(code, False, {"tools": [tool]}), tmp_path)
    (found,), _ = run(program, policy=adds, template=template)
    (wanted,), _ = run(white("Adding"), policy=adds, template=template)
    assert found.error == "" and found.rollouts == wanted.rollouts and found.audit.turns == 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("code", [OPENAI, ANTHROPIC])
def test_every_format_of_calls_is_the_same_in_white_and_in_black(family: Family, code: str, tmp_path: Path) -> None:
    def policy(text: str) -> str:
        return "3" if len(re.findall(r"\d+", text.rpartition("Count.")[2])) > 1 else family.turn

    tool = ADD.schema()
    if code is ANTHROPIC:
        tool = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
    how: Any = {"policy": policy, "template": family.template, "specials": family.specials}
    (found,), _ = run(agent(with_stock_client(code, False, {"tools": [tool]}), tmp_path), **how)
    (wanted,), speaker = run(white("Adding"), **how)
    assert found.error == wanted.error == "" and found.rollouts == wanted.rollouts and found.audit.turns == 2
    (rollout,) = found.rollouts
    sampled = [i for i, mask in zip(rollout.response_ids, rollout.loss_mask, strict=True) if mask]
    tokens = speaker.tokenizer(family.turn, add_special_tokens=False)["input_ids"]
    assert sampled[: len(tokens)] == tokens, "the very tokens that were sampled carry the loss"
    assert found.invalid_calls == wanted.invalid_calls == 0


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_call_that_cannot_be_read_is_counted_in_every_format(family: Family, tmp_path: Path) -> None:
    how: Any = {"template": family.template, "specials": family.specials}
    code = (
        BARE
        + f"said = ask([{{'role': 'user', 'content': 'Count.'}}], tools=[{ADD.schema()}])\nprint(json.dumps({{'answer': said['content']}}))\n"
    )
    (found,), _ = run(agent(code, tmp_path), policy=lambda text: family.broken, **how)
    assert found.invalid_calls == 1 and found.error == ""
    (wanted,), _ = run(white("Adding"), policy=lambda text: "3" if "cannot be made" in text else family.broken, **how)
    assert (wanted.invalid_calls, wanted.reward, wanted.error) == (1, 0.75, "")


def test_a_student_without_a_chat_template(tmp_path: Path) -> None:
    code = BARE + (
        "first = ask([{'role': 'user', 'content': 'count 0 '}])\n"
        "ask([{'role': 'user', 'content': 'count 0 '}, first, {'role': 'user', 'content': ' more '}])\n"
    )
    (found,), speaker = run(agent(code, tmp_path), template=None)
    (rollout,) = found.rollouts
    assert speaker.tokenizer.decode(rollout.prompt_ids + rollout.response_ids) == "count 0 1<|im_end|> more 2<|im_end|>"
    assert found.stop_reason == "done" and found.reward is None


@pytest.mark.parametrize("template", [QWEN3, DROPS_THOUGHTS])
def test_thoughts_that_the_template_drops_are_dropped_in_white_and_in_black(template: str, tmp_path: Path) -> None:
    """Thoughts stay in a chain of calls with Qwen3's, and are gone at the user's next message, whatever the program sends back."""

    def policy(text: str) -> str:
        said = re.sub(r"<think>.*?</think>", "", text.rpartition("Count.")[2], flags=re.DOTALL)
        numbers = re.findall(r"\d+", said)
        if len(numbers) == 1:
            call = '<tool_call>\n{"name": "add", "arguments": {"a": 0}}\n</tool_call>'
            return f"<think>\nI could call {call}, so:\n</think>\n\n{call}"
        return f"<think>\nafter 77\n</think>\n\n{min(3, int(numbers[-1]) + 1)}"

    code = with_stock_client(OPENAI, False, {"tools": [ADD.schema()]})
    code = code.replace('int(message["content"])', 'int(message["content"].rpartition("</think>")[2])')
    (found,), _ = run(agent(code, tmp_path), policy=policy, template=template)
    (wanted,), speaker = run(white("Thinking"), policy=policy, template=template)
    assert found.error == wanted.error == "" and found.invalid_calls == wanted.invalid_calls == 0
    ours, theirs = ([(r.prompt_ids, r.response_ids, r.spans) for r in one.rollouts] for one in (wanted, found))
    assert ours == theirs and len(ours) > 1
    last = speaker.tokenizer.decode(found.rollouts[-1].prompt_ids)
    assert "<think>" not in last and last.count('<tool_call>\n{"name": "add"') == 1
    assert found.audit.turns == wanted.audit.turns == 3


def test_a_fork_in_plain_text_keeps_the_end_tokens(tmp_path: Path) -> None:
    code = BARE + (
        "chat = [{'role': 'user', 'content': 'count 0 '}]\n"
        "for more in (' a ', ' b '):\n"
        "    chat += [ask(chat), {'role': 'user', 'content': more}]\n"
        "ask(chat)\n"
        "ask([{'role': 'user', 'content': 'Count 0 '}, *chat[1:]])\n"
    )
    (found,), speaker = run(agent(code, tmp_path), template=None)
    whole, forked = (speaker.tokenizer.decode(r.prompt_ids + r.response_ids) for r in found.rollouts)
    assert whole == "count 0 1<|im_end|> a 2<|im_end|> b 3<|im_end|>" and forked == whole.replace("c", "C", 1)


def test_dialogues_that_a_program_leads_one_after_the_other_are_lines_of_their_own(tmp_path: Path) -> None:
    code = BARE + (
        "main = [{'role': 'system', 'content': 'lead'}, {'role': 'user', 'content': 'plan 5'}]\n"
        "main += [ask(main), {'role': 'user', 'content': 'go on'}]\n"
        "for task in (10, 20):\n"
        "    part = [{'role': 'system', 'content': 'work'}, {'role': 'user', 'content': 'do %d' % task}]\n"
        "    part += [ask(part), {'role': 'user', 'content': 'and more'}]\n"
        "    ask(part)\n"
        "part[1]['content'] = 'do 20 fast'\n"  # the last of them goes on with a history that was rewritten
        "ask(part)\n"
        "ask(main)\n"
        "ask([{'role': 'user', 'content': 'the last 30'}])\n"
    )
    (found,), _ = run(agent(code, tmp_path))
    assert [r.origin for r in found.rollouts] == ["main", "aside", "aside", "main", "aside"]
    judged = [replace(rollout, reward=1.0) for rollout in found.rollouts]
    (episode,) = group_into_episodes(judged)
    assert [[r.sample_id for r in line] for line in split_into_lines(episode)] == [
        ["s0"], ["s0+1"], ["s0+2", "s0+3"], ["s0+4"],
    ]  # fmt: skip


@pytest.mark.parametrize("thought", ["", "<think>\nHow did I come here?\n</think>\n\n"])
def test_a_summary_that_a_program_quotes_goes_on_in_its_line(thought: str, tmp_path: Path) -> None:
    said = f"{thought}so far the way was north, north, west and then south"
    code = BARE + (
        "summary = ask([{'role': 'user', 'content': 'walk, then sum up'}])['content']\n"
        "summary = summary.split('</think>')[-1].strip()\n"
        "ask([{'role': 'user', 'content': 'walk on. ' + summary}])\n"
    )
    (found,), _ = run(agent(code, tmp_path), policy=lambda _: said)
    assert [r.origin for r in found.rollouts] == ["main", "main"]


def test_what_a_program_is_told_and_what_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY_OF_OURS", "hunter2")
    monkeypatch.setenv("ANOTHER", "given")
    code = BARE + (
        "ask([{'role': 'user', 'content': '1'}])\n"
        "same = task == json.load(open(os.environ['OPD_TASK']))\n"
        "told = {'task': task, 'same': same, 'env': dict(os.environ), 'cwd': os.getcwd()}\n"
        "open(os.environ['SEEN'], 'w').write(json.dumps(told))\n"
    )
    seen = tmp_path / "seen.json"
    run(agent(code, tmp_path, env={"SEEN": str(seen)}, inherit=("ANOTHER",), metadata=("shown",)))
    told = json.loads(seen.read_text())
    assert told["same"] and told["task"] == {
        "id": "s0",
        "prompt": [{"role": "user", "content": "Count."}],
        "metadata": {"shown": 0},
    }
    assert "hunter2" not in seen.read_text() and told["env"]["ANOTHER"] == "given"
    assert told["env"]["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert told["cwd"] == told["env"]["HOME"] and not Path(told["cwd"]).exists(), "its directory is gone"


@pytest.mark.parametrize(
    ("ending", "verifier", "reward", "reason"),
    [
        ("print('{\"reward\": 0.5}')", None, 0.5, "done"),
        ("print('hello')", None, None, "done"),
        ("json.dump({'reward': 1}, open(os.environ['OPD_RESULT'], 'w')); print('{\"reward\": 0}')", None, 1.0, "done"),
        ('print(\'{"answer": "3"}\')', "exact_match", 1.0, "done"),
        ('print(\'{"answer": "4", "reward": 1}\')', "exact_match", 0.0, "done"),
        ("pass", "exact_match", 1.0, "done"),  # its last reply
        ("print('{\"reward\": NaN}')", None, None, "agent"),
        ('print(\'{"reward": "all"}\')', None, None, "agent"),
        ("os.mkfifo(os.environ['OPD_RESULT'])", None, None, "done"),
    ],
)
def test_the_reward(ending: str, verifier: Any, reward: float | None, reason: str, tmp_path: Path) -> None:
    code = f"{BARE}ask([{{'role': 'user', 'content': '2'}}])\n{ending}\n"
    (found,), _ = run(agent(code, tmp_path, verifier=verifier))
    assert (found.reward, found.stop_reason) == (reward, reason)
    assert len(found.rollouts) == 1 and found.rollouts[0].reward == reward


FOR_EVER = "n = 0\nwhile True:\n    n += 1\n    ask([{'role': 'user', 'content': str(n)}])\n"
ASK = "ask([{'role': 'user', 'content': '2'}])\n"


@pytest.mark.parametrize(
    ("code", "options", "reason", "error", "turns"),
    [
        (["sh", "-c", "echo a; echo 'it is broken' >&2; exit 3"], {}, "agent", "exit status 3: it is broken", 0),
        (BARE + ASK + "sys.exit('gone\\x1b[31m')\n", {}, "agent", "exit status 1: gone\\x1b[31m", 1),
        (["true"], {}, "silent", "without one reply", 0),
        (["sleep", "60"], {"timeout_s": 0.5}, "timeout", "did not end within 0.5 s", 0),
        (BARE + ASK + "import time; time.sleep(60)\n", {"timeout_s": 3.0}, "timeout", "did not end within 3 s", 1),
        (BARE + FOR_EVER, {"max_calls": 4}, "turns", "", 4),
        (BARE + FOR_EVER, {"max_tokens": 5}, "tokens", "", 3),
        (BARE + "ask([{'role': 'user', 'content': 'x' * 5000}])\n", {}, "context", "", 0),
        (["/no/such/program"], {}, "agent", "cannot be started", 0),
        (["sh", "-c", "trap '' TERM; while true; do sleep 1; done"], {"timeout_s": 0.5}, "timeout", "0.5 s", 0),
    ],
)
def test_bad_programs_end_their_own_episode(
    code: Any, options: dict[str, Any], reason: str, error: str, turns: int, tmp_path: Path
) -> None:
    begun = time.monotonic()
    good = agent(BARE + ASK, tmp_path, i=1)
    (found, other), _ = run(agent(code, tmp_path, **options), good)
    assert (found.stop_reason, found.audit.turns) == (reason, turns) and error in found.error
    assert bool(error) == bool(found.error) and bool(found.rollouts) == bool(turns)
    assert other.stop_reason == "done" and other.audit.turns == 1
    assert time.monotonic() - begun < 30


def test_a_program_that_uses_another_episodes_session(tmp_path: Path) -> None:
    shared = tmp_path / "url"
    victim = (
        BARE
        + f"import time\nask([{{'role': 'user', 'content': '2'}}])\nopen({str(shared)!r}, 'w').write(os.environ['OPENAI_BASE_URL'])\ntime.sleep(2)\n"
    )
    thief = (
        BARE
        + f"import time\nwhile not os.path.exists({str(shared)!r}): time.sleep(0.05)\ntime.sleep(0.1)\n{ASK}ask([], base=open({str(shared)!r}).read())\n"
    )
    (robbed, found), _ = run(agent(victim, tmp_path, 0), agent(thief, tmp_path, 1))
    assert found.stop_reason == "foreign" and "another episode" in found.error
    assert robbed.stop_reason == "done" and robbed.audit.turns == 1


def test_what_a_program_leaves_behind_is_gone(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run(agent(["sh", "-c", f"sleep 600 & echo $! > {pid}"], tmp_path))
    left, deadline = int(pid.read_text()), time.monotonic() + 10  # a process that was killed takes a moment to go
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_that_fails_ends_all_and_every_program(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = BARE + f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n" + FOR_EVER
    tokenizer = chat_tokenizer(CHATML)
    speaker = Speaker(counts, tokenizer)
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
    requests = [agent(code, tmp_path, max_calls=10**6), agent(["sleep", "600"], tmp_path, 1)]

    async def work() -> None:
        playing = asyncio.ensure_future(play_all_episodes(requests, speaker, dialogues, CONTEXT, 2))
        async with asyncio.timeout(30):
            while len(speaker.asked) < 3:
                await asyncio.sleep(0.02)
        speaker.fails = True
        await playing

    with pytest.raises(RunError, match="the engine is gone"):
        asyncio.run(work())
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_program_that_is_killed_while_the_policy_writes(tmp_path: Path) -> None:
    code = (
        BARE + ASK + "import os, threading\nthreading.Timer(0.3, lambda: os._exit(7)).start()\n" + ASK.replace("2", "5")
    )
    (found,), _ = run(agent(code, tmp_path), step_s=0.4, policy=lambda text: "12345")
    assert found.stop_reason == "agent" and "exit status 7" in found.error
    assert found.audit.turns == 1 and found.audit.lost_turns == 1, "the turn that nobody read is in no segment"
    assert len(found.rollouts) == 1


def test_episodes_of_both_boxes_in_one_step(tmp_path: Path) -> None:
    mixed = [agent(BARE + ASK, tmp_path, 1), white("Counting"), agent(BARE + ASK, tmp_path, 2)]
    found, _ = run(*mixed)
    assert [result.audit.turns for result in found] == [1, 3, 1]
    assert [result.rollouts[0].sample_id for result in found] == ["s1", "s0", "s2"]


def test_no_more_programs_at_a_time_than_allowed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        BARE
        + f"import time\nsay = lambda t: open({str(log)!r}, 'a').write(t)\nsay('<')\n{ASK}time.sleep(0.2)\nsay('>')\n"
    )
    run(*(agent(code, tmp_path, i, parallel=2) for i in range(5)))
    depth = [log.read_text()[:n].count("<") - log.read_text()[:n].count(">") for n in range(11)]
    assert max(depth) == 2 and depth[-1] == 0
