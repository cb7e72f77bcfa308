"""Conversations as OpenAI, TRL and ShareGPT write them, what of a row reaches the chat template, and what is said of the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError
from opd.prompts import collect_notices, load_prompts, open_rows, read_prompt_lines, render_prompt

ASKS = {"role": "user", "content": "2+2="}
SAYS = {"role": "assistant", "content": "4"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
"""A template that reads tools, calls and a variable."""
WriteRows = Callable[[str, Any], Path]
FORMATS = ["p.jsonl", "p.parquet", "saved"]


@pytest.fixture
def reader(tiny_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(source: Path | PromptsConfig, tokenizer: Any) -> list[str]:
    """The texts that the student reads, each proven to be what its ids were made from."""
    table = load_prompts(source, "d", tokenizer)
    texts = []
    for index, prompt in enumerate(table):
        line = table.rows[index]
        texts.append(render_prompt(tokenizer, line.prompt, **line.variables))
        assert list(prompt.token_ids) == tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
    return texts


def refusal(source: Path | PromptsConfig) -> str:
    with pytest.raises(PromptError) as error:
        open_rows(source)
    return str(error.value)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "2+2="}]}, "user:2+2=\n"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "user:a\nb\n"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, 'assistant:add({"a": 2})\n'),
        ({"role": "assistant", "content": "4", "weight": 0}, "assistant:4\n"),
    ],
    ids=["a part", "two parts", "a call", "a weight"],
)
def test_messages_of_openai_are_read(
    name: str, message: dict[str, Any], text: str, write_rows: WriteRows, reader: Any
) -> None:
    """Also out of tables, in which every message has the keys of all."""
    first = {**ASKS, "content": [{"type": "text", "text": "2+2="}]} if isinstance(message["content"], list) else ASKS
    path = write_rows(name, [{"prompt": [first, message]}, {"prompt": [first, {**message, "name": "me"}]}])
    assert rendered(path, reader) == [f"user:2+2=\n{text}"] * 2


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "`content` is no text: a part of type `image_url`"),
        ({"role": "assistant", "content": None}, "`content` is no text: None"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, "the call {'id': 'a'}"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "the arguments '{'"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "a `function_call`"),
        ({"role": "assistant", "content": "a", "weight": 2}, "the `weight` 2"),
    ],
)  # fmt: skip
def test_what_no_template_can_read_is_refused(message: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [ASKS, message]}))
    assert f"column `prompt`, message 2: {word}" in refusal(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=str)
def test_tools_of_a_row_reach_the_template(name: str, tools: Any, write_rows: WriteRows, reader: Any) -> None:
    if name != "p.jsonl" and isinstance(tools, list) and isinstance(tools[0], dict):
        tools = [{**tools[0], "strict": None}]  # as in a table where another tool has this key
    path = write_rows(name, [{"prompt": [ASKS], "tools": tools}] * 2)
    assert [json.loads(text.partition("\n")[0]) for text in rendered(path, reader)] == [[TOOL]] * 2
    config = PromptsConfig(path=path, columns={"tools": None})
    assert rendered(config, reader) == ["user:2+2=\n"] * 2
    assert open_rows(config).unread == ("tools",)


@pytest.mark.parametrize("name", [*FORMATS, "p.csv"])
def test_what_is_said_to_the_system_comes_first(name: str, write_rows: WriteRows, reader: Any) -> None:
    rows = [{"prompt": "2+2=", "system": "Be short."}, {"prompt": "2+2=", "system": " "}]
    path = write_rows(name, rows)
    chat = PromptsConfig(path=path, chat=True)
    assert rendered(chat, reader) == ["system:Be short.\nuser:2+2=\n", "user:2+2=\n"]
    assert rendered(path, reader) == ["2+2=", "2+2="] and open_rows(path).unread == ("system",)


def test_two_system_messages_that_differ_are_refused(tmp_path: Path, reader: Any) -> None:
    path = tmp_path / "p.jsonl"
    row = {"prompt": [{"role": "system", "content": "a"}, ASKS], "system": "b"}
    path.write_text(json.dumps(row))
    assert "another system message" in refusal(path) and "columns: {system: null}" in refusal(path)
    assert rendered(PromptsConfig(path=path, columns={"system": None}), reader) == ["system:a\nuser:2+2=\n"]
    path.write_text(json.dumps({**row, "system": "a"}))
    assert rendered(path, reader) == ["system:a\nuser:2+2=\n"]


@pytest.mark.parametrize(
    ("column", "value"), [("tools", "hammer, nail"), ("system", 3), ("chat_template_kwargs", "fast")]
)
def test_a_column_of_that_name_with_something_else_is_refused_with_the_way_out(
    column: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [ASKS], column: value}))
    assert f"column `{column}`" in refusal(path) and f"{{{column}: null}}" in refusal(path)
    assert read_prompt_lines(PromptsConfig(path=path, columns={column: None}))  # type: ignore[dict-item]


@pytest.mark.parametrize("name", FORMATS)
def test_variables_of_a_row_reach_the_template_and_go_before_the_students(
    name: str, write_rows: WriteRows, reader: Any
) -> None:
    rows = [{"prompt": [ASKS], "chat_template_kwargs": {"enable_thinking": value}} for value in (False, True)]
    path = write_rows(name, rows)
    quick = "user:2+2=\n<think></think>"
    assert rendered(path, reader) == [quick, "user:2+2=\n"]
    plain = PromptsConfig(path=path, columns={"chat_template_kwargs": None})
    lengths = [
        load_prompts(one, "d", reader, None, {"enable_thinking": False}).lengths.tolist() for one in (path, plain)
    ]
    assert lengths == [[25, 10], [25, 25]]
    bad = [{"prompt": [ASKS], "chat_template_kwargs": {"tokenize": True}}]
    assert "`tokenize`, which is no variable" in refusal(write_rows("p.jsonl", bad))


SHAREGPT = [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "turns", [[ASKS, SAYS], SHAREGPT, [ASKS, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]]
)
def test_the_last_turn_is_the_answer(name: str, turns: Any, write_rows: WriteRows, reader: Any) -> None:
    if name != "p.jsonl" and isinstance(turns[-1].get("content"), list):  # a table's column has one type
        turns = [{**ASKS, "content": [{"type": "text", "text": "2+2="}]}, turns[-1]]
    chat = PromptsConfig(path=write_rows(name, [{"prompt": turns}, {"prompt": turns, "answer": "four"}]), chat=True)
    assert [(line.prompt, line.answer) for line in read_prompt_lines(chat)] == [([ASKS], "4"), ([ASKS], "four")]
    told = list(collect_notices(chat, load_prompts(chat, "d", reader), reader))
    assert len(told) == 1 and "in 1 of 2 conversations the assistant's last turn is the answer" in told[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("said", "answer"),
    [([SAYS], "4"), ([SHAREGPT[1]], "4"), ([SAYS, ASKS, SAYS], ""), ([{**SAYS, "weight": 0}], "")],
    ids=["trl", "sharegpt", "several turns", "unlearned"],
)
def test_a_completion_of_one_turn_is_the_answer(
    name: str, said: Any, answer: str, write_rows: WriteRows, reader: Any
) -> None:
    rows = [{"prompt": [ASKS], "completion": said}, {"prompt": [ASKS], "completion": said, "answer": "four"}]
    chat = PromptsConfig(path=write_rows(name, rows), chat=True)
    assert [line.answer for line in read_prompt_lines(chat)] == [answer, "four"]
    assert [line.prompt for line in read_prompt_lines(chat)] == [[ASKS]] * 2
    assert open_rows(chat).num_answered == bool(answer)


@pytest.mark.parametrize(
    "last",
    [{**SAYS, "weight": 0}, {**SAYS, "content": None, "tool_calls": [CALL]}, ASKS],
    ids=["unlearned", "call", "user"],
)
def test_a_last_turn_that_answers_nothing_is_no_answer(last: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [ASKS, last]}))
    (line,) = read_prompt_lines(PromptsConfig(path=path, chat=True))
    assert line.answer == "" and (line.completion is None) == ("tool_calls" not in last)
    assert len(line.prompt) == (2 if last is ASKS else 1)


@pytest.mark.parametrize("name", [*FORMATS, "p.csv"])
def test_columns_that_nothing_reads_are_named(name: str, write_rows: WriteRows, reader: Any) -> None:
    rows = [{"prompt": "a", "answer": "b", "level": "1"}] * 30 + [
        {"prompt": "a", "answer": "b", "level": "2", "image": "x"}
    ]
    path = write_rows(name, rows)
    assert list(collect_notices(path, load_prompts(path, "d", reader), reader)) == [
        f"{path}: columns that are not read: level, image"
    ]
    chosen = PromptsConfig(path=path, filter={"column": "level", "equals": "2"}, columns={"answer": "image"})
    assert open_rows(chosen).unread == ("answer",)


def test_a_merge_is_told_what_its_template_leaves_out(tiny_tokenizer: Any, tmp_path: Path) -> None:
    deaf = copy.deepcopy(tiny_tokenizer)
    deaf.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    path = tmp_path / "p.jsonl"
    row = {"prompt": [{"role": "system", "content": "Be short."}, ASKS], "tools": [TOOL]}
    row |= {"chat_template_kwargs": {"enable_thinking": False}}
    path.write_text((json.dumps({"prompt": [ASKS]}) + "\n") * 30 + (json.dumps(row) + "\n") * 2)
    assert list(collect_notices(path, load_prompts(path, "d", deaf), deaf)) == [
        f"{path}: the chat template leaves out {what} of 2 prompts"
        for what in ("the system message", "the tools", "chat_template_kwargs")
    ]
    deaf.chat_template = TEMPLATE
    assert list(collect_notices(path, load_prompts(path, "d", deaf), deaf)) == []


def test_a_system_message_that_names_special_tokens_is_not_left_out(tmp_path: Path, reader: Any) -> None:
    path, mark = tmp_path / "p.jsonl", reader.eos_token
    path.write_text(json.dumps({"prompt": [{"role": "system", "content": f"End with {mark}"}, ASKS]}))
    assert f"End with {mark}" not in rendered(path, reader)[0], "broken up, as a message brings no special token"
    assert list(collect_notices(path, load_prompts(path, "d", reader), reader)) == []


def test_prompts_that_go_on_after_the_assistants_turn_are_told_of(tmp_path: Path, reader: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [ASKS]}) + "\n" + json.dumps({"prompt": [ASKS, SAYS]}) + "\n")
    (told,) = collect_notices(path, load_prompts(path, "d", reader), reader)
    assert "1 prompts end with a turn of the assistant" in told and "chat: true" in told
