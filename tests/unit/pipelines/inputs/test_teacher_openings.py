"""Episodes under a teacher's own prompt: it reads its own opening, then the very tokens of all turns; what changes the opening is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, OpdError, PromptError, RunError
from opd.records.environments import Tool
from opd.records.types import Rollout, SampledTurn
from opd.rollouts.episodes.runner import Dialogues, run_episodes
from opd.rollouts.episodes.spec import EpisodeRequest
from opd.rollouts.episodes.trace import EpisodeKey
from pipelines.inputs.environments import episode_options
from pipelines.inputs.read import Inputs, read_inputs
from tests.chatml import CHATML, WITH_TOOLS
from tests.conftest import read_rows
from tests.unit.teachers.test_own_prompts import plain_logprobs
from tests.unit.teachers.test_pool import pool

JOIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WORLD = """
from opd.records.environments import Outcome, Tool

class Corridor:
    tools = ()
    def reset(self, metadata, seed):
        self.turn = 0
        return metadata.get("begins", "")
    def step(self, action):
        self.turn += 1
        return Outcome(observation=("wall ",) * len(action.calls) or "wall ", done=self.turn == 2)
    def close(self):
        pass

class Looking(Corridor):
    tools = (Tool(name="look", description="Look around."),)

class Talking(Corridor):
    def reset(self, metadata, seed):
        super().reset(metadata, seed)
        return "you stand "
"""


@pytest.fixture
def playing(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Domain `reverse` is a corridor of two turns; its expert reads a hint first."""
    (world.root / "corridors.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(world.root))
    (world.root / "join.jinja").write_text(JOIN)
    world.data["domains"]["reverse"] = {"prompts": "tasks.jsonl", "environment": {"name": "corridors:Corridor"}}
    world.data["experts"]["rev"]["prompt"] = {
        "system": "{{ row.hint }} ",
        "template": "join.jinja",
        "max_model_len": 100,
    }
    write_tasks(world, [f"walk {letter}: " for letter in "abc"])
    return world


def write_tasks(world: Any, prompts: Sequence[Any], **metadata: Any) -> None:
    rows = [{"prompt": p, "hint": f"go left {n} times", "metadata": {"n": n} | metadata} for n, p in enumerate(prompts)]
    (world.root / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def play_chat(world: Any, template: str, environment: str = "corridors:Corridor") -> None:
    """The tasks become chat messages, which student and teacher read by this template."""
    end = json.loads((world.root / "base" / "tokenizer_config.json").read_text())["eos_token"]
    for name in ("base", "rev", "up"):
        (world.root / name / "chat_template.jinja").write_text(template.replace("<|im_end|>", end))
    write_tasks(world, [[{"role": "user", "content": f"walk {letter}: "}] for letter in "abc"])
    world.data["domains"]["reverse"]["environment"]["name"] = environment
    del world.data["experts"]["rev"]["prompt"]["template"]
    world.data["experts"]["rev"]["prompt"]["max_model_len"] = 512
    world.data["rollout"]["max_model_len"] = 440


def read(world: Any) -> Inputs:
    return read_inputs(load_pipeline(world.write()))


def refuse(world: Any, error: type[OpdError] = ConfigError) -> str:
    with pytest.raises(error) as caught:
        read(world)
    return str(caught.value)


class Walker:
    """A student that says `up` and `down` in turns and ends each."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.said = 0

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        ids = [*self.tokenizer.encode(("up", "down")[self.said % 2], add_special_tokens=False)]
        ids.append(self.tokenizer.eos_token_id)
        self.said += 1
        return SampledTurn(token_ids=tuple(ids), logprobs=(-1.0,) * len(ids), stop_reason="stop", policy_version=0)


def play(world: Any, inputs: Inputs, index: int = 1) -> Rollout:
    """The rollout of a whole episode."""
    config = load_pipeline(world.write())
    prompt = inputs.prompts["reverse"][index]
    key = EpisodeKey(sample_id=f"000003/{prompt.id}", group=f"000003/{prompt.id}", step=3, domain="reverse")
    options = episode_options(config)["reverse"]
    request = EpisodeRequest(prompt=prompt, sample=key, options=options, seed=0)
    dialogues = Dialogues(inputs.tokenizer, inputs.student.eos_token_ids)
    (result,) = asyncio.run(
        run_episodes([request], Walker(inputs.tokenizer), dialogues, config.rollout.max_model_len, 0)
    )
    (rollout,) = result.rollouts
    assert [span.origin for span in rollout.spans] == ["policy", "environment", "policy"]
    return rollout


def check_scores(inputs: Inputs, sent: Rollout, prefix: str) -> None:
    """The teacher's log-probs are those of plain transformers after `prefix`, on the tokens of both turns alone."""
    (assigned,) = inputs.scoring["reverse"]
    assert assigned.prompts is not None
    ids = tuple(inputs.tokenizer.encode(prefix, add_special_tokens=False))
    assert assigned.prompts(sent) == ids != sent.prompt_ids
    scored = pool({"reverse": assigned.teacher}, 1, payload="sampled_logprobs", objective={"kind": "sampled"})
    scored._routes = {"reverse": (assigned,)}
    (row,) = read_rows(scored.score([sent]))
    assert row.rollout == sent
    every = plain_logprobs(assigned.teacher.model_dir, ids, sent.response_ids)
    expected = [every[position] for position in sent.trained_positions]
    assert 0 < len(expected) < len(every)
    assert row.answer.teacher_logprobs == pytest.approx(expected, abs=1e-5)  # type: ignore[attr-defined]
    students = plain_logprobs(assigned.teacher.model_dir, sent.prompt_ids, sent.response_ids)
    assert max(abs(students[place] - every[place]) for place in sent.trained_positions) > 1e-3


def test_both_turns_of_an_episode_of_text_are_scored_after_the_teachers_own_prompt(
    playing: Any, in_process: Any
) -> None:
    inputs = read(playing)
    sent = play(playing, inputs)
    assert inputs.tokenizer.decode(sent.prompt_ids) == "walk b: "
    check_scores(inputs, sent, "go left 1 times walk b: ")


@pytest.mark.parametrize("environment", ["corridors:Corridor", "corridors:Looking"])
def test_both_turns_of_a_chat_are_scored_after_the_teachers_own_messages_and_the_same_tools(
    environment: str, playing: Any, in_process: Any
) -> None:
    play_chat(playing, WITH_TOOLS, environment)
    inputs = read(playing)
    sent = play(playing, inputs)
    shown = WITH_TOOLS.replace("<|im_end|>", inputs.tokenizer.eos_token)
    tools = [Tool(name="look", description="Look around.").schema()]
    messages = [{"role": "system", "content": "go left 1 times "}, {"role": "user", "content": "walk b: "}]

    def render(messages: list[dict[str, str]]) -> str:
        asked = {"tools": tools} if environment.endswith("Looking") else {}
        text: str = inputs.tokenizer.apply_chat_template(
            messages, chat_template=shown, tokenize=False, add_generation_prompt=True, **asked
        )
        return text

    assert list(sent.prompt_ids) == inputs.tokenizer.encode(render(messages[1:]), add_special_tokens=False)
    check_scores(inputs, sent, render(messages))


def test_a_segment_whose_prompt_has_earlier_turns_keeps_them(playing: Any) -> None:
    inputs = read(playing)
    sent = play(playing, inputs)
    later = replace(sent, sample_id="later", prompt_ids=(*sent.prompt_ids, 9, 8, 7))
    prompts = inputs.scoring["reverse"][0].prompts
    assert prompts is not None and prompts(later) == (*prompts(sent), 9, 8, 7)


def test_an_episode_that_begins_with_other_tokens_is_an_error(playing: Any) -> None:
    inputs = read(playing)
    sent = play(playing, inputs)
    prompts = inputs.scoring["reverse"][0].prompts
    assert prompts is not None
    with pytest.raises(RunError, match="begins with other tokens than its prompt"):
        prompts(replace(sent, prompt_ids=sent.prompt_ids[1:]))


def test_an_environment_that_begins_with_a_text_is_refused(playing: Any) -> None:
    playing.data["domains"]["reverse"]["environment"]["name"] = "corridors:Talking"
    message = refuse(playing)
    assert "begins an episode with 'you stand '" in message and "write that text into the prompts" in message
    del playing.data["experts"]["rev"]["prompt"]
    read(playing)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"context": {"compact_at": 10}}, "domains.reverse.environment.context"),
        ({"teacher_turns": {"share": 0.5, "over_steps": 2}}, "domains.reverse.environment.teacher_turns"),
        ({"replay": True}, "domains.reverse.environment.replay"),
        ({"sub_agents": {"ask": {"description": "Ask."}}}, "domains.reverse.environment.sub_agents.ask"),
    ],
)
def test_what_changes_how_an_episode_begins_is_refused(keys: dict[str, Any], named: str, playing: Any) -> None:
    playing.data["domains"]["reverse"]["environment"] |= keys
    message = refuse(playing)
    assert message.startswith("experts.rev.prompt") and named in message


def test_sub_agents_of_another_domain_and_programs_are_refused(playing: Any) -> None:
    asks = {"ask": {"description": "Ask.", "domain": "reverse"}}
    playing.data["domains"]["upper"]["environment"] = {"name": "corridors:Corridor", "sub_agents": asks}
    assert "domains.upper.environment.sub_agents.ask" in refuse(playing)
    del playing.data["domains"]["upper"]["environment"], playing.data["domains"]["reverse"]["environment"]
    playing.data["domains"]["reverse"]["agent"] = {"command": ["true"]}
    assert "an agent's program" in refuse(playing)


def test_a_template_that_writes_something_else_between_turns_is_refused(playing: Any) -> None:
    (playing.root / "join.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ '!' if m.role == 'assistant' }}{% endfor %}"
    )
    assert "writes '!qz4qz' between two turns" in (message := refuse(playing, PromptError))
    assert "has 'qz4qz' there" in message


def test_a_template_that_cannot_hold_a_dialogue_is_refused(playing: Any) -> None:
    play_chat(playing, CHATML)
    (playing.root / "own.jinja").write_text(JOIN)
    playing.data["experts"]["rev"]["prompt"]["template"] = "own.jinja"
    message = refuse(playing)
    assert message.startswith("experts.rev.prompt") and "cannot hold the episode" in message


def test_the_context_has_room_for_the_longest_episode_after_the_teachers_own_opening(playing: Any) -> None:
    playing.data["rollout"]["max_model_len"] = 40
    longest = 40 + len("go left 1 times ")
    playing.data["experts"]["rev"]["prompt"]["max_model_len"] = longest
    read(playing)
    playing.data["experts"]["rev"]["prompt"]["max_model_len"] = longest - 1
    assert f"set experts.rev.prompt.max_model_len to {longest} or more" in refuse(playing, PromptError)
