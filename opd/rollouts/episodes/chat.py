"""Text that an episode appends to a dialogue: new messages as tokens after the tokens that the policy sampled.

    rendered so far   <|im_start|>user ... <|im_end|>\n<|im_start|>assistant\n
    sampled           I look it up. <tool_call>...</tool_call><|im_end|>
    appended          \n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n

A chat template is a program, and not every one gives such a text: some drop or rewrite earlier turns when a new message
comes. So the template at hand is tried on probes first, and one that cannot append is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from itertools import chain, count
from typing import Any

from opd.errors import ModelError
from opd.prompts.encode import encode_text, render_messages
from opd.prompts.untrusted_text import escape_specials, escape_specials_inside, special_texts
from opd.records.environments import Tool, ToolCall
from opd.rollouts.decoding import TurnTokenizer, end_ids, written_text
from opd.tool_formats import AUTO, FALLBACK, TOOL_FORMATS, tool_format
from opd.tool_formats.records import BadCall, ToolFormat, WrittenCalls
from opd.tool_formats.thoughts import TAGS, has_thoughts, split_thoughts
from opd.tool_formats.vllm_parsers import CALL_IDS, VllmFormat, find_family

Message = Mapping[str, Any]
REPLY = "I see 7."
"""Text of the assistant's turn in probes; it must not occur in any chat template."""
THOUGHT = "Is it 6, or 7?"
"""A thought before that turn, in probes for thoughts."""
_USER, _SYSTEM = {"role": "user", "content": "What is it?"}, {"role": "system", "content": "Be short."}
_GO_ON = {"role": "user", "content": "Go on."}
_REPLIED = {"role": "assistant", "content": REPLY}
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_SYSTEM, _USER, {"role": "assistant", "content": "No."}, {"role": "user", "content": "And now?"}),
)
_PROBE = Tool(
    name="look_up",
    description="Look up a word.",
    parameters={"type": "object", "properties": {"word": {"type": "string"}, "line": {"type": "integer"}}},
)
_ASKED: tuple[Mapping[str, Any], ...] = ({"word": "it"}, {"line": 7})
"""Arguments of the two calls in probes, one with a text and one with a number: some templates write numbers as their models do, but
texts without the quotes that the models write."""
CALL_ID = "call{place:05d}"
"""Format of the ids of calls: nine letters and digits, as the strictest chat templates want them."""
CALLING = """You can call these functions:
<tools>
{tools}
</tools>
{told}"""
"""Text about the tools in the system message, for a chat template that does not list them."""


class ChatAppender:
    """Renders the first prompt of a dialogue and what follows each turn, with one student's own chat template."""

    def __init__(
        self,
        tokenizer: TurnTokenizer,
        stop_token_ids: Sequence[int],
        day: date | None = None,
        parser: str = AUTO,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Prove that the template can append. `day` is the date for a template that asks for one; `parser` names the format of tool
        calls, `auto` for the one in which the template writes them; `variables` are further variables for the template.

        Raises: ModelError with what the template does instead.
        """
        self._tokenizer = tokenizer
        self._day = day
        self._variables = variables or {}
        self._stop_ids = list(stop_token_ids)
        self._ends = end_ids(tokenizer, stop_token_ids)
        self._stops: list[str] = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_token_ids]
        self._special = special_texts(tokenizer)
        self._closer = ""
        """The end token that the template writes after a turn of the assistant."""
        self._histories = [history for history in _HISTORIES if self._accepts_history(history)]
        # This comes first, because it finds the end token at which all renderings below are cut.
        self._prove_template()
        self.call_ids = CALL_ID
        """Format of the ids of a turn's calls that the template takes."""
        self.parallel = self._renders_text(
            lambda: self._render([*_HISTORIES[0], self._turn_with_probe_calls(*_ASKED)], [_PROBE])
        )
        """True if the template takes more than one call in a turn."""
        self._tools_stay = self._renders_text(lambda: self._render_following(_HISTORIES[0], [_GO_ON], [_PROBE]))
        """True if the template leaves the list of tools where it is when a message follows; some move it to the last message."""
        # This is assumed until the last line of this method tries it, because the trial itself renders such a message.
        self._note_apart = True
        """True if the template takes a message of the user right after the results of tools; some want every message of the user
        answered first."""
        self._unread = ""
        """Description of the template's calls, for the error if no format reads them."""
        self._call_closer = self._closer
        """The end token that the template writes after a turn with calls."""
        self._format, self.tools_in_template = self._find_format(parser)
        """`tools_in_template` is True if the template lists tools and shows results in the way of the format. Otherwise the tools stand in
        the system message, and results in a message of the user."""
        self._dropped = {
            role: [tag for tag in TAGS if self._probe_dropped_thoughts(tag, role)] for role in ("user", "tool")
        }
        """Role of a message -> tags of thoughts: between these tags, the template leaves out the thoughts of earlier turns once a message
        of that role follows."""
        self._note_apart = self._renders_text(self._render_note_after_result)

    def end_id(self, *, calls: bool) -> int:
        """Return the end token that the template writes after a turn of the assistant, with calls or without."""
        closer = self._call_closer if calls and self.tools_in_template else self._closer
        return self._stop_ids[self._stops.index(closer)]

    def encode_opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of the messages before the first turn. The caller has made each harmless with `make_message_safe`.
        Raises: what the template raises."""
        opening_messages = [dict(message) for message in messages]
        if tools and not self.tools_in_template:
            listed = "\n".join(map(json.dumps, self._tool_schemas(tools)))
            tools_text = CALLING.format(tools=listed, told=self.format.instructions)
            opening_messages = (
                _with_system(opening_messages, tools_text)
                if self._accepts_history(_HISTORIES[1])
                else _with_preface(opening_messages, tools_text)
            )
            tools = ()
        return encode_text(self._tokenizer, self._render(opening_messages, tools=tools))

    def encode_following(
        self, messages: Sequence[Message], *, ended: bool, tools: Sequence[Tool] = (), note: str = "", turn: str = ""
    ) -> list[int]:
        """Return the token ids of these messages after a turn, up to the place where the policy writes again.

        If `ended` is true, the turn ends with an end token; else the ids begin with the template's own, which the policy did not sample.
        Messages of the role `tool` come first among them, one for each call of the turn. `note` is a text of the user's that comes last.
        `turn` is the turn's text, for a template whose results repeat the ids that the policy gave to its calls.
        Special tokens in the texts are broken up, so that what an environment says stays text. Raises: what the template raises.
        """
        named = number_call_results(messages, self._name_calls(turn, tools))
        safe = [self.make_message_safe(dict(message) | {"content": str(message["content"])}) for message in named]
        if not self.tools_in_template:
            safe = without_tool_role(safe)
        if note:
            safe = self._with_note(safe, self.break_special_tokens(note))
        if not self.tools_in_template or not self._tools_stay:
            tools = ()
        text = self._render_following(_HISTORIES[0], safe, tools)
        return encode_text(self._tokenizer, self._split_at_end(text)[2] if ended else text)

    def _name_calls(self, turn: str, tools: Sequence[Tool]) -> list[Mapping[str, str]]:
        """Return name and id of each call of a turn, which its result repeats, if the policy writes ids of its own; else nothing."""
        try:
            written = self.read(turn, tools) if self.call_ids != CALL_ID else WrittenCalls((), "")
        except BadCall:
            return []
        calls = zip(written.calls, written.ids, strict=False)
        return [{"name": call.name, "tool_call_id": own_id} for call, own_id in calls]

    @property
    def format(self) -> ToolFormat:
        """Format in which the student writes calls. Raises: ModelError if its template writes them in a way that no format reads."""
        if self._format is None:
            raise ModelError.at(
                "the student's chat template",
                found=self._unread,
                wanted=f"calls in one of the forms {', '.join(TOOL_FORMATS)}, or in one that a parser of vLLM's reads",
                fix="set student.tool_call_parser to one of these forms, such as hermes: then the system message lists the tools "
                "and says how to call them; or to the parser of vLLM's for this family, with a chat template that lists tools",
            )
        return self._format

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        """Read the calls of a turn, of whatever tools. Calls in thoughts are no calls, and without tools the whole turn is text. Raises:
        BadCall, ModelError."""
        if not tools or not has_thoughts(text):
            return self.format.read(text, tools) if tools else WrittenCalls((), text)
        parts = split_thoughts(text, self.format.begins, self.format.ends)
        parts_read = [WrittenCalls((), part) if thought else self.format.read(part, tools) for part, thought in parts]
        calls = tuple(call for part_read in parts_read for call in part_read.calls)
        return WrittenCalls(
            calls,
            "".join(part_read.text for part_read in parts_read),
            tuple(i for part_read in parts_read for i in part_read.ids),
        )

    def drops_thoughts(self, *, calls: int, noted: bool) -> bool:
        """Return True if the template leaves out the thoughts of earlier turns once a turn with so many calls is answered. `noted` says
        that a text of the user's stands last in the answer."""
        as_user = not calls or (noted and self._note_apart)
        return bool(self._dropped["tool"] if calls else ()) or bool(self._dropped["user"] if as_user else ())

    def drops_thoughts_of(self, written: Sequence[int], roles: Iterable[str]) -> bool:
        """Return True if these tokens have thoughts that the template leaves out once messages of these roles follow."""
        dropped = [end for role in {*roles} for _, end in self._dropped.get(role, ())]
        return bool(dropped) and any(end in self.turn_text(written) for end in dropped)

    def without_thoughts(self, turn: Sequence[int]) -> list[int]:
        """Return the token ids of a turn as the template writes it once a message of the user follows, which is without its thoughts. A
        turn without thoughts keeps its tokens.

        Raises: what the template raises.
        """
        if not self.drops_thoughts_of(turn, self._dropped):
            return list(turn)
        written = {"role": "assistant", "content": escape_specials(self.turn_text(turn), self._specials_to_escape)}
        start, continuation = self._render_around_turn(_HISTORIES[0], written, [_GO_ON], ())
        after = self._render_following(_HISTORIES[0], [_GO_ON])
        if not continuation.endswith(after):
            raise self._make_template_error("writes another text after a turn with thoughts", start, continuation)
        ended = [turn[-1]] if turn[-1] in self._stop_ids else []
        return [*encode_text(self._tokenizer, continuation.removesuffix(after)), *ended]

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of what the policy wrote, without the tokens that end a turn."""
        return written_text(self._tokenizer, token_ids, self._ends)

    def break_special_tokens(self, text: str) -> str:
        """Return the text with a blank inside of each part that would be read as a special token."""
        return escape_specials(text, self._special)

    def make_message_safe(self, message: Message) -> dict[str, Any]:
        """Return the message with special tokens broken up in all of its texts, those of its calls included. A message of the assistant
        keeps the tags of thoughts, by which the template finds them."""
        thinks = message.get("role") == "assistant"
        specials = [special for special in self._special if not (thinks and has_thoughts(special))]
        safe_message: dict[str, Any] = escape_specials_inside(message, specials)
        return safe_message

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        variables = {**self._variables, **({"tools": self._tool_schemas(tools)} if tools else {})}
        return render_messages(self._tokenizer, [dict(m) for m in messages], self._day, **variables)

    def _tool_schemas(self, tools: Sequence[Tool]) -> list[Any]:
        """Return the schemas of tools with special tokens broken up, since descriptions of tools are text, too."""
        return [escape_specials_inside(tool.schema(), self._special) for tool in tools]

    def _accepts_history(self, history: Sequence[Message]) -> bool:
        return self._renders_text(lambda: self._render(history))

    def _renders_text(self, rendered: Callable[[], str]) -> bool:
        """Return True if the template renders a text, and no error."""
        from jinja2 import TemplateError

        try:
            return bool(rendered())
        except (TemplateError, ValueError, TypeError, KeyError):  # an error of ours about the template is a ValueError
            return False

    def _render_following(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text that the template writes for new messages after a turn that follows `history`, from the turn's end token on.

        Raises: ModelError if the template then writes the history before the turn in another way than the engine saw it.
        """
        called = sum(message["role"] == "tool" for message in new)
        turn = self._turn_with_probe_calls(*_ASKED[:1] * (called if self.parallel else 1)) if called else _REPLIED
        start, continuation = self._render_around_turn(history, turn, new, tools)
        if not called:
            before, _, after = continuation.partition(REPLY)
            if not _is_blank(before):
                raise self._make_template_error(
                    "writes something between the assistant's header and its turn", start, continuation
                )
            return after
        _, closer, after = self._split_at_end(continuation)
        return closer + after

    def _split_at_end(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first end token, the token, and the text after it. Which end token it is may depend on what follows:
        some templates end a turn by the mark of the next message, so that results of calls have another one."""
        places = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop and stop in text]
        if not places:
            return text, "", ""
        start, _, stop = min(places)
        return text[:start], stop, text[start + len(stop) :]

    def _render_around_turn(
        self, history: Sequence[Message], turn: Message, new: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[str, str]:
        """Return the text before a turn, and the text of the turn and of the new messages. Raises: as `_render_following`."""
        start, full_text = self._render(history, tools), self._render([*history, turn, *new], tools)
        if not full_text.startswith(start):
            raise self._make_template_error(
                "changes what stands before a turn when a message follows it", start, full_text
            )
        return start, full_text[len(start) :]

    def _prove_template(self) -> None:
        """Prove that the template writes the same text for a message after several histories. Raises: ModelError."""
        if _HISTORIES[0] not in self._histories:
            raise self._make_template_error("refuses a message of a user", "", "")
        new = [_GO_ON]
        continuation = self._render_following(_HISTORIES[0], new)
        self._closer = next((stop for stop in self._stops if stop and continuation.startswith(stop)), "")
        if not self._closer:
            raise self._make_template_error(
                f"does not end a turn with an end token ({', '.join(self._stops)})", REPLY, continuation
            )
        for history in self._histories:
            self._prove_history(history, new, continuation)

    def _prove_history(self, history: Sequence[Message], new: Sequence[Message], expected: str) -> None:
        continuation = self._render_following(history, new)
        if continuation != expected:
            raise self._make_template_error(
                "writes another text for the same message after another history", expected, continuation
            )
        pieces = [self._render(history) + REPLY + self._closer, continuation.removeprefix(self._closer)]
        joint_ids = encode_text(self._tokenizer, "".join(pieces))
        if [token for piece in pieces for token in encode_text(self._tokenizer, piece)] != joint_ids:
            raise self._make_template_error("gives other tokens if a message is tokenised alone", pieces[0], pieces[1])

    def _find_format(self, parser: str) -> tuple[ToolFormat | None, bool]:
        """Return the format of calls, and whether the template lists tools and shows results in that format. The format is None if none
        reads the calls that the template writes."""
        turns = self._render_probe_calls() if self._renders_text(self._prove_tools_listed) else []
        if parser == AUTO:
            form = next((form for form in TOOL_FORMATS.values() if _count_turns_read(form, turns, alone=True)), None)
            parser = "" if form else find_family(turns)
        else:
            form = tool_format(parser)
        if form is not None:
            return form, bool(_count_turns_read(form, turns)) and self._renders_text(self._render_two_results)
        if parser:
            theirs = self._make_vllm_format(parser, turns)
            return theirs, theirs is not None
        odd = next((turn for turn in turns if _PROBE.name in turn), "")
        self._unread = odd and f"it lists tools, and writes a call as {odd!r:.200}"
        return (None if odd else tool_format(FALLBACK)), False

    def _make_vllm_format(self, parser: str, turns: list[str]) -> ToolFormat | None:
        """Return the format of one of vLLM's parsers; None, with the reason in `_unread`, if the parser does not read the calls that the
        template writes."""
        if parser in CALL_IDS:
            self.call_ids = CALL_IDS[parser]
            turns = self._render_probe_calls() if turns else []
        if not turns or not self._renders_text(self._render_two_results):
            self._unread = (
                f"it does not list tools and their results, and vLLM's parser {parser} reads what it writes alone"
            )
            return None
        self._unread = f"it writes a call as {turns[0]!r:.200}, which vLLM's parser {parser} does not read"
        try:
            form = VllmFormat(parser, self._tokenizer, _PROBE.name, turns)
        except (ImportError, LookupError, RuntimeError, ValueError) as error:
            self._unread += f": {error}"
            return None
        return form if _count_turns_read(form, turns) == len(turns) else None

    def _prove_tools_listed(self) -> str:
        """Render the tools, to prove that the template lists them. Raises: ValueError if it leaves them out."""
        texts = [self._render(history, [_PROBE]) for history in self._histories]
        if not all(_PROBE.name in text for text in texts):
            raise ValueError("a template without tools")
        return texts[0]

    def _render_probe_calls(self) -> list[str]:
        """Return, for each of the probe's calls, the text of a turn with that call as the template writes it before a result; nothing if
        the template takes no results."""
        from jinja2 import TemplateError

        result = number_call_results([{"role": "tool", "name": _PROBE.name, "content": "result"}])
        try:
            continuations = [
                self._render_around_turn(_HISTORIES[0], self._turn_with_probe_calls(arguments), result, [_PROBE])[1]
                for arguments in _ASKED
            ]
        except (TemplateError, ValueError, TypeError, KeyError):
            return []
        self._call_closer = self._split_at_end(continuations[0])[1] or self._closer
        return [self._split_at_end(continuation)[0] for continuation in continuations]

    def _turn_with_probe_calls(self, *argument_sets: Mapping[str, Any]) -> Message:
        """Return a turn of the assistant with one call of the probe's tool for each set of arguments."""
        calls = [
            {
                "id": make_call_id(i, _PROBE.name, self.call_ids),
                "type": "function",
                "function": {"name": _PROBE.name, "arguments": dict(arguments)},
            }
            for i, arguments in enumerate(argument_sets)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def prove_note(self) -> None:
        """Prove that a text of the user's can follow the results of tools, as the request for a summary does. Raises: ModelError."""
        if not self._renders_text(self._render_note_after_result):
            raise self._make_template_error("refuses a text of the user's after the results of tools", "", "")

    @property
    def _specials_to_escape(self) -> list[str]:
        """Special tokens to break up where a turn is rendered again: all but the marks of calls and thoughts."""
        calls = () if self._format is None else self._format.marks
        return [special for special in self._special if special not in (*calls, *chain.from_iterable(TAGS))]

    def _probe_dropped_thoughts(self, tag: tuple[str, str], role: str) -> bool:
        """Return True if the template leaves out a thought between these tags once a message of the role follows its turn."""
        from jinja2 import TemplateError

        turn = _turn_with_thought(tag)
        try:
            if role == "user":
                _, continuation = self._render_around_turn(_HISTORIES[0], turn, [_GO_ON], ())
            else:
                result = number_call_results([{"role": "tool", "name": _PROBE.name, "content": "result"}])
                new: Sequence[Message] = without_tool_role([dict(m) for m in result])
                if self.tools_in_template:
                    turn = {**self._turn_with_probe_calls(_ASKED[0]), "content": turn["content"]}
                    new = result
                tools = [_PROBE] if self.tools_in_template and self._tools_stay else []
                _, continuation = self._render_around_turn(_HISTORIES[0], turn, new, tools)
        except (TemplateError, ValueError, TypeError, KeyError):  # no such turn is ever followed by such a message
            return False
        return THOUGHT not in continuation

    def _with_note(self, messages: list[dict[str, Any]], note: str) -> list[dict[str, Any]]:
        """Return the messages with a text of the user's after them: in a message of its own if the template takes that, else at the end of
        the last message."""
        if messages and not self._note_apart:
            return [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']}\n\n{note}"}]
        return [*messages, {"role": "user", "content": note}]

    def _render_note_after_result(self) -> str:
        """Try to render a text of the user's after a result, and return that text. Raises: what the template raises."""
        result = [{"role": "tool", "name": _PROBE.name, "content": "result 42"}]
        self.encode_following(result, ended=True, tools=[_PROBE], note="Sum up.")
        return "Sum up."

    def _render_two_results(self) -> str:
        """Return the text that the template writes for the results of a turn with two calls. Raises: ValueError if the text depends on the
        history, or lacks a result."""
        results = ("result 42", "result 43")
        new = number_call_results([{"role": "tool", "name": _PROBE.name, "content": text} for text in results])
        tools = [_PROBE] if self._tools_stay else []
        renderings = {self._render_following(history, new, tools) for history in self._histories}
        if len(renderings) > 1 or not all(text in next(iter(renderings)) for text in results):
            raise ValueError("a template that does not show results")
        return renderings.pop()

    def _make_template_error(self, problem: str, start: str, continuation: str) -> ModelError:
        return ModelError.at(
            "the student's chat template",
            found=f"it {problem}: {start[-80:]!r}, then {continuation[-160:]!r}",
            wanted="one that writes a new message after the turns before it and leaves them as they are",
            fix="give the domain's prompts as text (for an agent's program, set agent.render to text), or take a student whose "
            "chat_template appends, such as ChatML",
        )


def _turn_with_thought(tag: tuple[str, str]) -> Message:
    """Return a turn of the assistant with a thought."""
    return {"role": "assistant", "content": f"{tag[0]}\n{THOUGHT}\n{tag[1]}\n\n{REPLY}"}


def number_call_results(messages: Sequence[Message], names: Sequence[Mapping[str, str]] = ()) -> list[Message]:
    """Return the messages, with ids on the results of a turn's calls as `make_call_id` gives them to the calls. Templates may ask for ids,
    and a client's own would give other tokens than an environment's. The first results get the fields of `names` instead."""
    ids = ({"tool_call_id": make_call_id(place)} for place in count(len(names)))
    named = chain(names, ids)
    return [{**message, **next(named)} if message["role"] == "tool" else message for message in messages]


def make_call_id(number: int, name: str = "", form: str = CALL_ID) -> str:
    """Return the id of the call with that number in a turn; `name` is its tool."""
    return form.format(place=number, name=name)


def _is_blank(text: str) -> bool:
    """Return True if the text is only white space and empty blocks for thoughts."""
    for tag in chain.from_iterable(TAGS):
        text = text.replace(tag, "")
    return not text.strip()


def _count_turns_read(form: ToolFormat, turns: Sequence[str], *, alone: bool = False) -> int:
    """Return how many of the probe's turns a format reads. With `alone` only those count that have nothing around the call but an empty
    block for thoughts."""
    number = 0
    for turn, asked in zip(turns, _ASKED, strict=False):
        try:
            reading = form.read(turn, [_PROBE])
        except BadCall:
            continue
        called = reading.calls == (ToolCall(name=_PROBE.name, arguments=asked),)
        number += called and (not alone or _is_blank(reading.text))
    return number


def _with_preface(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with the text before that of the first, for a template that refuses the role `system`."""
    return [messages[0] | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with the text at the end of the system message, which is made if there is none."""
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def without_tool_role(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the results of tools in the role `user`: all of a turn in one message, which comes first."""
    results = [m["content"] for m in messages if m["role"] == "tool"]
    other_messages = [m for m in messages if m["role"] != "tool"]
    results_text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": results_text}, *other_messages] if results else other_messages
