"""Thoughts: nobody acts on them, and what the template leaves out of later prompts is left out of later states, as in service."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from opd.config.sub_agents import ANSWER
from opd.records.environments import Outcome, Tool, ToolCall
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.sub_agents import SubAgentOptions, SubAgentsOptions
from opd.tool_formats import TOOL_FORMATS
from opd.tool_formats.thoughts import split_thoughts, without_thoughts
from opd.traces.rendering import make_trace
from opd.train.turns import count_earlier_turns
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer
from tests.tool_templates import DROPS_THOUGHTS, QWEN3
from tests.unit.opd.rollouts.episodes.test_compaction import options
from tests.unit.opd.rollouts.episodes.test_runner import EOS, TOKENIZER, encode, play, request

ADD = Tool(name="add", description="Add.", parameters={"properties": {"a": {"type": "string"}}})
ASKED = [{"role": "user", "content": "count"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'


def thinking(said: str, thought: str = "hm") -> str:
    return f"<think>\n{thought}\n</think>\n\n{said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain ", "plain "),
        ("<think>a</think>\n\nb", "b"),
        ("I see. <think>a</think> b <think>c", "I see.  b"),
        ("a</think>b", "b"),
        ("<think>a</think>b</think>c", "c"),
        ("[THINK]a[/THINK]b<seed:think>c</seed:think>", "b"),
        ("<think>a <tool_call>x</tool_call> b</think>c", "c"),
        ("<tool_call><think>x</think></tool_call>", "<tool_call><think>x</think></tool_call>"),
        ("a<tool_call></think></tool_call></think>b", "b"),
        ("<tool_call><think>", "<tool_call><think>"),
    ],
)
def test_what_is_said(text: str, said: str) -> None:
    form = TOOL_FORMATS["hermes"]
    assert without_thoughts(text, form.begins, form.ends) == said
    assert "".join(part for part, _ in split_thoughts(text, form.begins, form.ends)) == text, "nothing is lost"


def test_many_tags_take_linear_time() -> None:
    form, began = TOOL_FORMATS["hermes"], time.monotonic()
    for piece in ("<think>", "</think>", "<think></think>", "<tool_call>", "<think>a</think><tool_call>b</tool_call>"):
        list(split_thoughts(piece * 50_000, form.begins, form.ends))
    assert time.monotonic() - began < 5


INSIDE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": "<think>x</think>"}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n<think>x</think>\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": "<think>x</think>"}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": "<think>x</think>"}',
    "pythonic": '[add(a="<think>x</think>")]',
    "llama4_pythonic": '[add(a="<think>x</think>")]',
}


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_a_call_in_a_thought_is_no_call_and_a_tag_in_a_call_is_text(parser: str) -> None:
    made = ChatAppender(chat_tokenizer(CHATML), [EOS], None, parser)
    call = TOOL_FORMATS[parser].write([ToolCall(name="add", arguments={"a": "1"})])
    assert len(made.read(call, [ADD]).calls) == 1
    for text in (
        f"<think>\n{call}\n</think>\n\nNo.",
        f"<think>{call}",
        f"{call}</think>No.",
        f"Well. <think>{call}</think>",
    ):
        assert made.read(text, [ADD]).calls == (), text
    found = made.read(thinking(call, call), [ADD])
    assert found.calls == (ToolCall(name="add", arguments={"a": "1"}),)
    assert found.text.startswith(f"<think>\n{call}\n</think>"), "a program reads the thought as the student wrote it"
    (inside,) = made.read(INSIDE[parser], [ADD]).calls
    assert inside.arguments == {"a": "<think>x</think>"}


def test_tags_that_are_special_tokens_are_thoughts_too() -> None:
    template = QWEN3.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    tokenizer = chat_tokenizer(template, ["[THINK]", "[/THINK]"])
    made = ChatAppender(tokenizer, [EOS])
    text = f"[THINK]\nhm\n[/THINK]\n\n{CALL % 1}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert made.turn_text(ids) == text
    assert tokenizer.decode(made.without_thoughts([*ids, EOS])) == CALL % 1 + "<|im_end|>"
    assert made.make_message_safe({"role": "assistant", "content": text})["content"] == text
    assert "[ THINK]" in made.make_message_safe({"role": "user", "content": text})["content"]


@pytest.mark.parametrize(
    ("template", "after_user", "after_tool"),
    [(CHATML, False, False), (WITH_TOOLS, False, False), (QWEN3, True, False), (DROPS_THOUGHTS, True, True)],
)
def test_the_template_decides_what_is_kept(template: str, after_user: bool, after_tool: bool) -> None:
    made = ChatAppender(chat_tokenizer(template), [EOS])
    assert made.drops_thoughts(calls=0, noted=False) == after_user
    assert made.drops_thoughts(calls=1, noted=False) == after_tool
    assert made.drops_thoughts(calls=1, noted=True) == (after_user or after_tool)
    turn = [*encode(thinking("7")), EOS]
    assert TOKENIZER.decode(made.without_thoughts(turn)) == (
        "7<|im_end|>" if after_user else thinking("7") + "<|im_end|>"
    )


def counting(text: str) -> str:
    """Thinks, and says the next number."""
    number = int(without_thoughts(text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]).split()[-1])
    return thinking(str(number + 1), f"after {number}")


class Counting:
    """Goes by what is said, without its thoughts."""

    tools: tuple[Tool, ...] = ()

    def reset(self, metadata: Any, seed: int) -> str:
        return "0 "

    def step(self, action: Any) -> Outcome:
        number = int(without_thoughts(action.text))
        return Outcome(observation=f" {number} ", reward=0.25, done=number >= 3)

    def close(self) -> None:
        pass


def served(template: str, *turns: tuple[str, str]) -> str:
    """Render a history as a server does before the next turn, with the turns' content as it was written."""
    messages = [{"role": "user", "content": "count\n\n0 "}]
    for said, seen in turns:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]
    return str(chat_tokenizer(template).apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


@pytest.mark.parametrize("template", [QWEN3, DROPS_THOUGHTS])
def test_every_state_is_that_in_which_the_student_serves(template: str) -> None:
    (found,), _ = play(counts_in_thoughts(), policy=counting, tokenizer=chat_tokenizer(template))
    assert (found.stop_reason, found.error, found.reward) == ("done", "", 0.75)
    said = [thinking(str(n + 1), f"after {n}") for n in range(3)]
    seen = [f" {n + 1} " for n in range(3)]
    for number, rollout in enumerate(found.rollouts):
        before = list(zip(said, seen, strict=True))[:number]
        assert TOKENIZER.decode(rollout.prompt_ids) == served(template, *before)
        assert TOKENIZER.decode(rollout.response_ids) == said[number] + "<|im_end|>"
        assert all(rollout.loss_mask)
    ids = [rollout.sample_id for rollout in found.rollouts]
    assert [(r.origin, r.parent, r.next) for r in found.rollouts] == [
        ("main", None, ids[1]), ("main", ids[0], ids[2]), ("main", ids[1], None),
    ]  # fmt: skip
    assert count_earlier_turns(found.rollouts) == {ids[1]: 1, ids[2]: 2}, "turns are counted on"
    shown = make_trace(found.rollouts, (), {}, TOKENIZER)
    assert [shown.segment_kind(segment) for segment in shown.segments] == [
        "main",
        *["continuation without thoughts"] * 2,
    ]
    assert (found.audit.turns, found.audit.forks, found.audit.sampled) == (3, 0, found.audit.trained)


def counts_in_thoughts() -> EpisodeRequest:
    asked = request(text=ASKED, max_turn_tokens=90)
    assert isinstance(asked.options, EpisodeOptions)
    return replace(asked, options=replace(asked.options, environment=f"{__name__}:Counting"))


def test_a_template_that_keeps_thoughts_and_turns_without_any_stay_one_segment() -> None:
    (kept,), _ = play(counts_in_thoughts(), policy=counting, tokenizer=chat_tokenizer(CHATML))
    (plain,), _ = play(request(text=ASKED), tokenizer=chat_tokenizer(QWEN3))
    assert len(kept.rollouts) == len(plain.rollouts) == 1 and kept.audit.turns == plain.audit.turns == 3


def test_thoughts_stay_while_results_follow_and_go_when_the_user_asks() -> None:
    """A chain of calls, and then the request for a summary, which is the next question."""

    def policy(text: str) -> str:
        if "sum up" in text.rpartition("<|im_start|>")[0].rpartition("<|im_start|>")[2]:
            return thinking("at 2", "to sum up")
        return "9" if "so far" in text else thinking(CALL % 1, f"{text.count('tool_response>') // 2} results")

    (found,), _ = play(
        request(text=ASKED, place="Adding", max_turn_tokens=120, compaction=options(compact_at=700, max_tokens=90)),
        policy=policy,
        tokenizer=chat_tokenizer(QWEN3),
    )
    assert (found.stop_reason, found.error) == ("done", "")
    chain, asked, after = (TOKENIZER.decode(r.prompt_ids + r.response_ids) for r in found.rollouts)
    assert chain.count("<think>") > 1 and chain.count("results\n</think>") == found.audit.turns - 2
    assert asked.count("<think>") == 1 and asked.endswith(thinking("at 2<|im_end|>", "to sum up"))
    assert "so far at 2" in after and "to sum up" not in after, "a summary is what was said"
    assert count_earlier_turns(found.rollouts)[found.rollouts[1].sample_id] == found.audit.turns - 2


def test_a_caller_reads_what_its_sub_agent_said_and_not_what_it_thought() -> None:
    kinds = {"ask": SubAgentOptions(description="Asks.", result=f"It says: {ANSWER}", max_tokens=200)}

    def policy(text: str) -> str:
        if "<|im_start|>user\n2+3" in text:
            return thinking("five", "it is 5, surely")
        return "9" if "It says" in text else '<tool_call>\n{"name": "ask", "arguments": {"task": "2+3"}}\n</tool_call>'

    (found,), _ = play(
        request(
            text=ASKED, options={"goal": 9}, max_turn_tokens=100, sub_agents=SubAgentsOptions(kinds=kinds, at_most=2)
        ),
        policy=policy,
        tokenizer=chat_tokenizer(WITH_TOOLS),
    )
    assert found.stop_reason == "done", found
    caller = TOKENIZER.decode(found.rollouts[0].response_ids)
    assert "It says: five" in caller and "surely" not in caller
    assert "surely" in TOKENIZER.decode(found.rollouts[1].trained_ids), "it is trained where it was written"
