"""Faults in episodes: the proofs of `test_bad_inputs` about environments, agents' programs and compaction.

Episodes run through the driver's engine and the real runners, with a policy of a few lines in place of vLLM.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from opd.errors import RunError
from opd.records.environments import Action, Outcome, Tool
from opd.records.episodes import EpisodeResult, EpisodesRecord
from opd.records.types import Prompt, RolloutBatch
from opd.rollouts.endpoint.episode import play_all_episodes
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines.specs import rollout_spec
from tests.chatml import CHATML, chat_tokenizer
from tests.unit.opd.rollouts.endpoint.test_episode import ASK, BARE, CONTEXT, FOR_EVER, Speaker

Policy = Callable[[str], str]
HERE = __name__


class Trouble:
    """Does what its task says; without trouble it asks for the next number until there are three."""

    tools: tuple[Tool, ...] = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        self.what = metadata.get("what")
        if self.what == "no beginning":
            raise OSError("the map is gone")
        return "0 "

    def step(self, action: Action) -> Any:
        if self.what == "raises":
            raise OSError("the disk is gone")
        if self.what == "hangs":
            time.sleep(3)
        seen = {"10 MB": "x" * (10 << 20), "control": "a\x1b[2J\x00b", "for ever": " 0 "}.get(str(self.what))
        number = int(action.text)
        return Outcome(observation=seen or f" {number} ", reward=0.5, done=number >= 3 and self.what != "for ever")

    def close(self) -> None:
        pass


class Adding(Trouble):
    """Remembers the calls that reach it."""

    tools = (
        Tool(name="add", description="Add.", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    )
    reached: list[Any] = []  # noqa: RUF012 of all, so that a proof finds them

    def step(self, action: Action) -> Outcome:
        self.reached += action.calls
        return Outcome(observation=("5",) * len(action.calls), done=not action.calls, reward=1.0)


def counts(text: str) -> str:
    return str(int(re.findall(r"\d+", text)[-1]) + 1)


@dataclass
class Played:
    """A step's episodes of the domain `d`."""

    batch: RolloutBatch
    results: list[EpisodeResult]

    @property
    def record(self) -> EpisodesRecord:
        """Return their record in `metrics.jsonl`."""
        return EpisodesRecord.from_stats(self.batch.episodes["d"], {})


def played(b: Any, options: Any, tasks: Sequence[Any], policy: Policy = counts, text: Any = "count:") -> Played:
    """Play a task each; raises what the engine raises."""
    from opd.config import PipelineConfig

    tokenizer, results = chat_tokenizer(CHATML), list[EpisodeResult]()

    class Worker:
        def __init__(self, *_: Any) -> None:
            pass

        def generate(self, requests: Sequence[Any]) -> list[Any]:
            assert not requests, "every prompt is a task"
            return []

        def episodes(self, requests: Sequence[EpisodeRequest], temperature: float, version: int) -> Any:
            dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])
            found = asyncio.run(play_all_episodes(requests, Speaker(policy, tokenizer), dialogues, CONTEXT, version))
            results.extend(found)
            return found

    b.in_process.replace = Worker
    spec = rollout_spec(PipelineConfig.model_validate(b.data), b.root / "base", 76, (2,))
    size = replace(spec.engine, vocab_size=len(tokenizer), max_model_len=CONTEXT)
    prompts = [
        Prompt(id=f"d/{i}", domain="d", token_ids=(1,), text=text, metadata={"what": what})
        for i, what in enumerate(tasks)
    ]
    engine = VLLMRolloutEngine(replace(spec, engine=size, episodes={"d": options}), tokenizer)
    return Played(engine.generate(prompts, step=1, policy_version=0), results)


def white(**more: Any) -> EpisodeOptions:
    known = {"max_turns": 9, "max_turn_tokens": 99, "step_timeout_s": 0.5, "max_broken": 1.0}
    return EpisodeOptions(environment=f"{HERE}:{more.pop('place', 'Trouble')}", **known | more)


def black(b: Any, code: str, **more: Any) -> AgentOptions:
    """The program reads its task's `what` as `task["metadata"]["what"]`."""
    (b.root / "program.py").write_text(code)
    known = {"max_calls": 20, "max_turn_tokens": 99, "timeout_s": 30.0, "parallel": 8, "max_broken": 1.0}
    command = (sys.executable, str(b.root / "program.py"))
    return AgentOptions(command=command, metadata=("what",), **known | more)


def troubled_environment(b: Any) -> None:
    tasks = [None, "raises", "hangs", "10 MB", "control", "no beginning", None]
    found = played(b, white(), tasks)
    reasons = ["done", "raised", "timeout", "observation", "observation", "raised", "done"]
    assert [result.stop_reason for result in found.results] == reasons
    assert found.record.stop_reasons == {"done": 2, "raised": 2, "timeout": 1, "observation": 2}
    assert (found.record.broken, found.record.episodes) == (5, 7)
    assert found.record.error == "000001/d/1: step: OSError: the disk is gone", "the first that broke"
    told = [result.error for result in found.results]
    assert "step was not back after 0.5 s" in told[2] and "10,485,760 characters" in told[3]
    assert "control character '\\x1b'" in told[4]
    assert [r.sample_id for r in found.batch.rollouts] == [f"000001/d/{i}" for i in (0, 1, 2, 3, 4, 6)]
    assert all(r.num_trained > 0 for r in found.batch.rollouts), "what was written before is trained"
    (left_out,) = found.batch.quarantined
    assert left_out.prompt_id == "d/5" and "before the first turn (raised)" in left_out.reason


def call_that_does_not_parse(b: Any) -> None:
    said = [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "multiply", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "four"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>',
        "5",
    ]
    chat = [{"role": "user", "content": "4+1"}]
    Adding.reached.clear()
    turns = iter(said)
    found = played(b, white(place="Adding"), [None], lambda _: next(turns), chat)
    assert (found.record.invalid_calls, found.record.stop_reasons, found.record.broken) == (3, {"done": 1}, 0)
    assert [call.arguments for call in Adding.reached] == [{"a": 4}], "no other reached the environment"
    assert found.results[0].text.count("error: this call cannot be made") == 3
    tools = {"tools": [Adding.tools[0].schema()]}
    code = f"{BARE}assert 'broken' in ask([{{'role': 'user', 'content': '1'}}], **{tools!r})['content']\n"
    outside = played(b, black(b, code), [None], lambda _: said[0], chat)
    assert (outside.record.invalid_calls, outside.record.stop_reasons) == (1, {"done": 1}), "there it stays text"


def agent_that_does_not_do_its_part(b: Any) -> None:
    code = BARE + (
        "import time\nwhat = task['metadata']['what']\n"
        f"if what != 'silent':\n    {ASK.replace('2', '200')}"
        "if what == 'exits': sys.exit('out of paper')\n"
        "if what == 'hangs': time.sleep(60)\n"
        f"if what == 'for ever':\n    {FOR_EVER.replace(chr(10), chr(10) + '    ')}"
    )
    tasks = ["well", "exits", "silent", "hangs", "for ever", "well"]
    found = played(b, black(b, code, timeout_s=8.0, max_calls=5), tasks, text=[{"role": "user", "content": "Count."}])
    assert [r.stop_reason for r in found.results] == ["done", "agent", "silent", "timeout", "turns", "done"]
    assert [r.audit.turns for r in found.results] == [1, 1, 0, 1, 5, 1]
    assert (found.record.broken, found.record.stop_reasons["done"]) == (3, 2), "to ask for ever is a limit, no fault"
    assert found.record.error == "000001/d/1: the program ended with exit status 1: out of paper"
    assert [q.prompt_id for q in found.batch.quarantined] == ["d/2"]
    assert {r.episode for r in found.batch.rollouts} == {f"000001/d/{i}" for i in (0, 1, 3, 4, 5)}


def agent_in_anothers_name(b: Any) -> None:
    url = b.root / "url"
    code = BARE + (
        f"import time\nurl = {str(url)!r}\n"
        "if task['metadata']['what'] == 'victim':\n"
        "    open(url + '.tmp', 'w').write(os.environ['OPENAI_BASE_URL']); os.rename(url + '.tmp', url)\n"
        "    time.sleep(1)\n"
        "else:\n"
        "    while not os.path.exists(url): time.sleep(0.05)\n"
        "    try: ask([{'role': 'user', 'content': '7'}], base=open(url).read())\n"
        "    except urllib.error.HTTPError as error: assert error.code == 401\n"
        f"{ASK}"
    )
    found = played(b, black(b, code), ["victim", "thief"], text=[{"role": "user", "content": "Count."}])
    victim, thief = found.results
    assert (victim.stop_reason, victim.audit.turns, victim.audit.lost_turns) == ("done", 1, 0)
    assert thief.stop_reason == "foreign" and "another episode's session" in thief.error
    assert found.record.broken == 1


def template_that_cannot_append(b: Any) -> None:
    b.prompts(*({"prompt": [{"role": "user", "content": f"go {n}"}]} for n in range(3)))
    b.starts()  # a single turn needs no appending, which the template of these models cannot do
    domain = b.data["domains"]["upper"]
    del domain["eval"]
    domain["environment"] = {"name": f"{HERE}:Trouble"}
    b.refused("the student's chat template")
    del domain["environment"]
    domain["agent"] = {"command": ["python", "-c", "pass"], "timeout_s": 5}
    b.refused("the student's chat template")


def episode_beyond_the_context(b: Any) -> None:
    def shouts(text: str) -> str:
        return "1" * 90

    found = played(b, white(max_turns=999), ["for ever", "for ever"], shouts)
    assert found.record.stop_reasons == {"context": 2} and found.record.broken == 0
    for rollout in found.batch.rollouts:
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        assert CONTEXT - 100 < length <= CONTEXT and rollout.num_trained > 0.9 * length
    code = BARE + "ask([{'role': 'user', 'content': 'x' * 5000}])\n"
    outside = played(b, black(b, code), [None], text=[{"role": "user", "content": "Count."}])
    assert outside.record.stop_reasons == {"context": 1} and not outside.batch.rollouts


def too_many_broken_episodes(b: Any) -> None:
    tasks = ["raises"] * 3 + [None] * 7
    assert played(b, white(max_broken=0.3), tasks).record.broken == 3
    with pytest.raises(
        RunError, match=r"domain d: 3 of 10 episodes broke \(3 raised\), first: 000001/d/0: step: OSError.*max_broken"
    ):
        played(b, white(max_broken=0.2), tasks)
    assert played(b, white(max_broken=0.0), tasks[2:]).record.broken == 1, "one always may"
    chat = [{"role": "user", "content": "Count."}]
    with pytest.raises(RunError, match=r"domain d: 2 of 2 episodes broke \(2 agent\).*exit status 3"):
        played(b, black(b, "import sys\nsys.exit(3)\n", max_broken=0.5), [None, None], text=chat)


def compaction_that_cannot_work(b: Any) -> None:
    environment = {"name": f"{HERE}:Trouble", "context": {"compact_at": 32}}
    b.data["domains"]["upper"]["environment"] = environment
    b.refused("domains.upper.environment.context.compact_at", "at most 16", "raise rollout.max_model_len")
    environment["context"] = {"compact_at": 10, "resume": "go on"}
    b.refused("domains.upper.environment.context.resume", "{summary}")
    del b.data["domains"]["upper"]["environment"]
    compaction = CompactionOptions(
        compact_at=30, keep_last=1, prompt="sum up: ", resume="so far {summary} ", max_tokens=9, max_compactions=2
    )

    def mumbles(text: str) -> str:
        return "\x0b\x0c" if text.endswith("sum up: ") else "1"

    found = played(b, white(max_turns=999, compaction=compaction), ["for ever"], mumbles)
    assert found.record.stop_reasons == {"context": 1} and found.record.segments == 3, "no more than two summaries"
    assert not any(c in found.results[0].text for c in "\x0b\x0c"), "what nobody can read is left out of the copy"


def environment_or_program_that_is_not_there(b: Any) -> None:
    domain = b.data["domains"]["upper"]
    for changes, words in (
        ({"name": "nowhere:Maze"}, ["environment.name", "no module `nowhere`"]),
        ({"name": f"{HERE}:Nothing"}, ["environment.name", "no `Nothing`"]),
        ({"name": "labyrinth"}, ["environment.name", "module:Class"]),
        ({"name": f"{HERE}:Trouble", "options": {"width": 3}}, ["environment.options", "takes no arguments"]),
        ({"name": f"{HERE}:Trouble", "turns": 3}, ["did you mean `max_turns`?"]),
    ):
        domain["environment"] = changes
        b.refused(*words)
    domain["environment"] = {"name": "sorting"}
    b.refused("upper.jsonl", "KeyError: 'game'", "opd environments tasks sorting")
    del domain["environment"]
    domain["agent"] = {"command": ["python", "agnet.py"], "render": "text"}
    b.refused("domains.upper.agent.command", "'agnet.py', which is no file")
    domain["agent"] = {"command": ["no-such-program"]}
    b.refused("domains.upper.agent.command", "'no-such-program', which is no program")
    domain["agent"] = {"command": ["python"], "env": {"OPENAI_API_KEY": "mine"}}
    b.refused("domains.upper.agent.env", "OPENAI_API_KEY")
