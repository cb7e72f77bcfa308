"""Students whose calls vLLM's own parsers read: found by their chat template, read strictly, refused where that cannot be."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

from opd.errors import ConfigError, ModelError
from opd.records.environments import Tool, ToolCall
from opd.rollouts.endpoint.dialogue import ChatMessages
from opd.rollouts.endpoint.messages import Call, Message
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import ChatDialogue
from opd.tool_formats import ALIASES, TOOL_FORMATS, check_parser_name, forbidden_in_turns, vllm_parsers
from opd.tool_formats.call_fragments import find_begun_calls
from opd.tool_formats.records import BadCall
from opd.tool_formats.vllm_parsers import VllmFormat, parser_names
from pipelines.environments import write_prefixes
from tests.chatml import CHATML, chat_tokenizer
from tests.tool_templates import QWEN3_CODER, make_template

ADD = Tool(
    name="add",
    description="Add.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a"],
    },
)
ONE, TWO = (ToolCall(name="add", arguments={"a": a}) for a in (1, 2))
DEEPSEEK = tuple(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI = tuple(
    f"<|tool_{part}|>"
    for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_VALUE = "(v if v is string else (v | tojson))"
GLM_ROLES = (
    "{% for t in tools or [] %}{{ '<|system|>' + (t | tojson) }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|assistant|>\n<think></think>' }}{% if m.content %}{{ '\n' + m.content.split('</think>')[-1].strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    + _ITEMS
    + "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + "
    + _VALUE
    + " + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As GLM 4.6's: the mark of what comes next ends a turn, and a turn without a thought has an empty one."""
KIMI_ROLES = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + (m.name or m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}{% if m.tool_calls %}"
    "{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}{{ '<|tool_call_begin|>' + c.id + "
    "'<|tool_call_argument_begin|>' + (c.function.arguments | tojson) + '<|tool_call_end|>' }}{% endfor %}"
    "{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Kimi K2's, but for the names of its marks: ids stand for the names of tools, and results repeat them."""


@dataclass(frozen=True, kw_only=True)
class Student:
    """A student with calls that vLLM's parser of this name reads."""

    template: str
    specials: tuple[str, ...] = ()
    call: str
    """A call of `add`, with a place for `a`."""
    around: tuple[str, str, str] = ("", "", "")
    """Text before, between and after the calls of a turn."""
    broken: tuple[str, ...]
    """Turns with a call that cannot be read."""
    stops: tuple[str, ...] = ("<|im_end|>",)

    @property
    def turn(self) -> str:
        before, between, after = self.around
        return before + self.call % 1 + between + self.call % 2 + after

    def tokenizer(self) -> Any:
        return chat_tokenizer(self.template, (*self.specials, *self.stops))

    def appender(self, parser: str = "auto") -> ChatAppender:
        tokenizer = self.tokenizer()
        return ChatAppender(tokenizer, tokenizer.convert_tokens_to_ids(list(self.stops)), None, parser)


_GLM45 = "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%d</arg_value>\n</tool_call>"
_GLM47 = "<tool_call>add<arg_key>a</arg_key><arg_value>%d</arg_value></tool_call>"
_KIMI = '<|tool_call_begin|>functions.add:%d<|tool_call_argument_begin|>{"a": %%d}<|tool_call_end|>'
_V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": %d}\n```<｜tool▁call▁end｜>'
_V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": %d}<｜tool▁call▁end｜>'
_V32 = '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">%d</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
_JSON = "(c.function.arguments | tojson)"
STUDENTS = {
    "glm45": Student(
        template=GLM_ROLES,
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        specials=("<|assistant|>", "<|system|>", "<tool_call>", "</tool_call>"),
        call=_GLM45,
        broken=((_GLM45 % 1)[:-12], _GLM45.replace("%d", "one"), "I write <tool_call>.", "<tool_call>sub\n</tool_call>"),
    ),
    "glm47": Student(
        template=make_template(
            "{{ '<tool_call>' + c.function.name }}" + _ITEMS + "{{ '<arg_key>' + k + '</arg_key><arg_value>' + "
            + _VALUE + " + '</arg_value>' }}{% endfor %}{{ '</tool_call>' }}"
        ),
        call=_GLM47,
        broken=(_GLM47[:20], (_GLM47 % 1)[:-1], _GLM47 % 1 + "<tool_call>add<arg_key>"),
    ),
    "kimi_k2": Student(
        template=KIMI_ROLES,
        specials=KIMI,
        call=_KIMI % 3,
        around=("Two.<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        broken=(
            "<|tool_calls_section_begin|>" + _KIMI % 0 % 1,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{'a': 1<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        ),
    ),
    "deepseek_v3": Student(
        template=make_template(
            "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + " + _JSON
            + " + '\n```<｜tool▁call▁end｜>' }}",
            "{{ '<｜tool▁calls▁begin｜>' }}", "{{ '\n' }}", "{{ '<｜tool▁calls▁end｜>' }}",
        ),
        specials=DEEPSEEK,
        call=_V3,
        around=("Two.<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        broken=("<｜tool▁calls▁begin｜>" + _V3 % 1, f"<｜tool▁calls▁begin｜>{_V3 % 1}\n{(_V3 % 2)[:-4]}<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": Student(
        template=make_template(
            "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + " + _JSON + " + '<｜tool▁call▁end｜>' }}",
            "{{ '<｜tool▁calls▁begin｜>' }}", "", "{{ '<｜tool▁calls▁end｜>' }}",
        ),
        specials=DEEPSEEK,
        call=_V31,
        around=("Two.<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        broken=(
            "<｜tool▁calls▁begin｜>" + _V31 % 1,
            "<｜tool▁calls▁begin｜>" + _V31.replace("%d", "1,") + "<｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>add(1)<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": Student(
        template=make_template(
            """{{ '<｜DSML｜invoke name="' + c.function.name + '">\n' }}""" + _ITEMS
            + """{{ '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' + """
            + _VALUE + " + '</｜DSML｜parameter>\n' }}{% endfor %}{{ '</｜DSML｜invoke>\n' }}",
            "{{ '\n\n<｜DSML｜function_calls>\n' }}", "", "{{ '</｜DSML｜function_calls>' }}",
        ),
        specials=("｜DSML｜",),
        call=_V32,
        around=("Two.\n\n<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
        broken=("<｜DSML｜function_calls>\n" + _V32 % 1, "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"add\">\n</｜DSML｜function_calls>"),
    ),
}  # fmt: skip
_OLDER = STUDENTS["deepseek_v32"]
STUDENTS["deepseek_v4"] = replace(
    _OLDER,
    template=_OLDER.template.replace("function_calls", "tool_calls"),
    around=tuple(text.replace("function_calls", "tool_calls") for text in _OLDER.around),
    broken=tuple(text.replace("function_calls", "tool_calls") for text in _OLDER.broken),
)
students = pytest.mark.parametrize("name", STUDENTS)


@students
def test_the_parser_follows_from_the_calls_that_the_template_writes(name: str) -> None:
    for parser in ("auto", name):
        made = STUDENTS[name].appender(parser)
        assert isinstance(made.format, VllmFormat) and made.format.name == name and made.tools_in_template


@students
def test_a_turn_is_read_from_its_tokens_and_stays_as_it_was_sampled(name: str) -> None:
    student = STUDENTS[name]
    tokenizer, appender = student.tokenizer(), student.appender()
    dialogue = ChatDialogue(appender, [ADD])
    sampled = [*tokenizer(student.turn, add_special_tokens=False)["input_ids"], appender.end_id(calls=True)]
    text = dialogue.text(sampled)
    assert text == student.turn and dialogue.calls(text) == (ONE, TWO)
    assert appender.read(text, [ADD]).text.strip() in ("", "Two.")
    follows = tokenizer.decode(dialogue.encode_following(("3", "4"), calls=2, ended=True, turn=text))
    assert "3" in follows and "4" in follows and "add(" not in follows and student.call % 1 not in follows
    assert dialogue.calls("Nothing to call.") == ()
    assert ChatDialogue(appender, ()).calls(text) == (), "without tools it is text"


@students
def test_a_call_that_cannot_be_read_is_refused(name: str) -> None:
    dialogue = ChatDialogue(STUDENTS[name].appender(), [ADD])
    for turn in STUDENTS[name].broken:
        with pytest.raises(BadCall):
            dialogue.calls(turn)
    with pytest.raises(BadCall, match=r"no tool.*; there are sub"):
        ChatDialogue(STUDENTS[name].appender(), [Tool(name="sub", description="")]).calls(STUDENTS[name].turn)


@students
def test_a_turn_that_was_cut_is_no_call(name: str) -> None:
    """vLLM's engine completes a call that breaks off; a command that was cut must not be run."""
    student = STUDENTS[name]
    dialogue, turn = ChatDialogue(student.appender(), [ADD]), student.turn
    begin = turn.index("add") + 3
    for end in range(begin, len(turn) - len(student.around[2]) - len(student.call % 2)):
        with pytest.raises(BadCall):
            dialogue.calls(turn[:end])


@students
def test_a_student_that_begins_calls_without_end_is_refused_soon(name: str) -> None:
    student = STUDENTS[name]
    appender, began = student.appender(), time.monotonic()
    with pytest.raises(BadCall):
        appender.read(student.around[0] + student.call[: -len(student.call) // 3] * 2000, [ADD])
    assert time.monotonic() - began < 5


@students
def test_marks_of_calls_are_the_students_own(name: str) -> None:
    specials = [*STUDENTS[name].specials, "<｜tool▁output▁begin｜>", "<|im_end|>"]
    forbidden = forbidden_in_turns(specials)
    assert {"<｜tool▁output▁begin｜>", "<|im_end|>"} <= {*forbidden} <= {*specials} - {*DEEPSEEK, *KIMI}


@students
def test_the_guard_finds_what_was_begun(name: str) -> None:
    call = STUDENTS[name].call.replace('"a"', '"command"')
    (found, *_) = find_begun_calls(call.replace("%d", '"rm -rf /"' if "{" in call else "rm -rf /"))
    assert "rm -rf /" in str(found.arguments)


def test_thoughts_are_left_out_and_not_called() -> None:
    dialogue = ChatDialogue(STUDENTS["glm47"].appender(), [ADD])
    assert dialogue.calls(f"<think>{_GLM47 % 1}</think>{_GLM47 % 2}") == (TWO,)


def test_qwen3_coder_is_ours_and_vllm_reads_the_same() -> None:
    made = Student(template=QWEN3_CODER, call="", broken=()).appender("qwen3_coder")
    assert made.format is TOOL_FORMATS["qwen3_xml"]
    turns = [made.format.write([ToolCall(name="add", arguments={"a": a})]) for a in (1, 7)]
    theirs = VllmFormat("qwen3_coder", chat_tokenizer(QWEN3_CODER), "add", turns)
    assert theirs.read("\n".join(turns), [ADD]).calls == (ONE, ToolCall(name="add", arguments={"a": 7}))
    with pytest.raises(BadCall):
        theirs.read(turns[0][:-1], [ADD])


def test_results_name_calls_as_kimi_did() -> None:
    made, tokenizer = STUDENTS["kimi_k2"].appender(), STUDENTS["kimi_k2"].tokenizer()
    turn = f"<|tool_calls_section_begin|>{_KIMI % 7 % 1}{_KIMI % 8 % 2}<|tool_calls_section_end|>"
    results = [
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "Go on."},
    ]
    found = tokenizer.decode(made.encode_following(results, ended=True, tools=[ADD], turn=turn))
    assert found == (
        "<|im_start|>add\n## Return of functions.add:7\n3<|im_end|><|im_start|>add\n## Return of functions.add:8\n4<|im_end|>"
        "<|im_start|>user\nGo on.<|im_end|><|im_start|>assistant\n"
    )
    found = tokenizer.decode(made.encode_following(results[:1], ended=True, tools=[ADD], turn="<|tool_call_begin|>"))
    assert "## Return of call00000\n3" in found


def test_the_mark_of_what_comes_next_ends_a_turn_of_glm() -> None:
    made, tokenizer = STUDENTS["glm45"].appender(), STUDENTS["glm45"].tokenizer()
    ends = [tokenizer.decode([made.end_id(calls=calls)]) for calls in (True, False)]
    assert ends == ["<|observation|>", "<|user|>"]
    found = [
        tokenizer.decode(made.encode_following([{"role": "tool", "content": "3"}], ended=e)) for e in (True, False)
    ]
    assert found == [
        f"{before}\n<tool_response>\n3\n</tool_response><|assistant|>" for before in ("", "<|observation|>")
    ]


@pytest.mark.parametrize(
    ("student", "parser", "problem"),
    [
        (Student(template=CHATML, call="", broken=()), "glm45", "does not list tools and their results"),
        (STUDENTS["glm47"], "kimi_k2", "does not read"),
        (Student(template=STUDENTS["deepseek_v31"].template, call="", broken=()), "auto", "could not locate tool call"),
        (STUDENTS["glm47"], "openai", "does not read"),
        (STUDENTS["glm47"], "hf", "does not read"),
    ],
)
def test_a_parser_that_cannot_serve_the_student_is_refused_where_there_are_tools(
    student: Student, parser: str, problem: str
) -> None:
    made = student.appender(parser)
    assert made.encode_opening([{"role": "user", "content": "1+2?"}]) and made.read("x", ()).calls == ()
    with pytest.raises(ModelError, match=problem) as caught:
        made.encode_opening([{"role": "user", "content": "1+2?"}], [ADD])
    assert "hermes" in str(caught.value)


def test_names_are_those_of_vllm_and_found_without_it(monkeypatch: Any) -> None:
    from vllm.tool_parsers import ToolParserManager

    assert {*parser_names()} == {*ToolParserManager.list_registered()} >= {*ALIASES, *TOOL_FORMATS} - {"auto"}
    parser_names.cache_clear()
    began = time.process_time()
    assert check_parser_name("kimi_k2") == "kimi_k2" and time.process_time() - began < 0.2
    monkeypatch.setattr(vllm_parsers.PathFinder, "find_spec", lambda name: None)
    parser_names.cache_clear()
    assert parser_names() == () and check_parser_name("hermes") == "hermes"
    with pytest.raises(ValueError, match="where vLLM is installed"):
        check_parser_name("kimi_k2")
    parser_names.cache_clear()


@pytest.mark.parametrize(("name", "meant"), [("hermess", "hermes"), ("glm-45", "glm45"), ("kimi-k2", "kimi_k2")])
def test_an_unknown_name_is_refused_with_the_nearest(name: str, meant: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=f"did you mean `{meant}`"):
        check_parser_name(name)
    with pytest.raises(ConfigError, match=f"did you mean `{meant}`"):
        write_prefixes(tmp_path / "e.jsonl", tmp_path, tmp_path / "p.jsonl", parser=name)


def test_every_parser_of_vllm_can_be_made_but_for_those_that_serve_another_way() -> None:
    """docs/agents.md has the numbers."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    marks = ["<tool_calls>", "</tool_calls>", "<tool_sep>", "<|tool_call_start|>", "<|tool_call_end|>", *DEEPSEEK]
    for part in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"):
        marks += [f"<{part}:opensource>", f"</{part}:opensource>", f"<{part}>", f"</{part}>"]
    tokenizer, request = chat_tokenizer(None, marks), ChatCompletionRequest(model="", messages=[])
    unfit = []
    theirs = [name for name in parser_names() if name not in {*TOOL_FORMATS, *ALIASES}]
    for name in theirs:
        try:
            found = ToolParserManager.get_tool_parser(name)(tokenizer).extract_tool_calls("Hello.", request)
        except (NotImplementedError, RuntimeError) as error:
            unfit.append(f"{name}: {type(error).__name__}: {error}")
        else:
            assert (found.tool_calls, found.content) == ([], "Hello.")
    assert [line.partition(":")[0] for line in unfit] == ["cohere_command3", "cohere_command4", "hf", "openai"], unfit
    assert (len(parser_names()), len(theirs)) == (54, 45)


def test_a_client_s_conversation_has_the_ids_of_kimi() -> None:
    made, tokenizer = STUDENTS["kimi_k2"].appender(), STUDENTS["kimi_k2"].tokenizer()
    call = Call(id="xyz", name="add", arguments={"a": 1})
    chat = [
        Message(role="user", text="1+2?"),
        Message(role="assistant", calls=(call,)),
        Message(role="tool", text="3", answers="xyz"),
    ]
    messages = ChatMessages(made, frozenset([made.end_id(calls=False)]))
    text = tokenizer.decode(messages.encode_conversation(chat, [ADD]))
    assert _KIMI % 0 % 1 in text and "## Return of functions.add:0\n3" in text
    sampled = tokenizer(STUDENTS["kimi_k2"].turn, add_special_tokens=False)["input_ids"]
    follows = tokenizer.decode(messages.encode_following(sampled, [replace(chat[2], answers="other")], [ADD]))
    assert "add\n## Return of functions.add:3\n3" in follows
