"""What an episode appends to a dialogue: new messages as tokens after the tokens that the policy sampled.

    rendered so far   <|im_start|>user ... <|im_end|>\n<|im_start|>assistant\n
    sampled           I look it up. <tool_call>...</tool_call><|im_end|>
    appended          \n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n

A chat template is a program, and not every one gives such a text: some drop or rewrite earlier turns when a new message
comes. So the template at hand is tried on probes first, and one that cannot append is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from opd.environments.records import Tool
from opd.errors import ModelError
from opd.interfaces import TurnTokenizer
from opd.prompts.encode import encode_text, render_prompt
from opd.rollouts.episodes.tools import BadCall, tagged_calls

Message = Mapping[str, Any]
REPLY = "I see 7."
"""A turn of the assistant in probes; it must not occur in any template."""
_USER, _SYSTEM = {"role": "user", "content": "What is it?"}, {"role": "system", "content": "Be short."}
_REPLIED = {"role": "assistant", "content": REPLY}
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_SYSTEM, _USER, {"role": "assistant", "content": "No."}, {"role": "user", "content": "And now?"}),
)
_PROBE = Tool(
    name="look_up",
    description="Look up a word.",
    parameters={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
CALLING = """You can call these functions:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments between tags; you may write several:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""
"""What the system message says of tools, where the chat template does not."""


def special_texts(tokenizer: TurnTokenizer) -> list[str]:
    """The texts that the tokenizer reads as one special token, the longest first."""
    found = {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.all_special_ids}
    return sorted(found - {""}, key=lambda text: (-len(text), text))


def harmless(text: str, specials: Sequence[str]) -> str:
    """The text with a blank inside of whatever would be read as a special token; in place of one of a single character, which would
    leave what stands around it side by side."""
    for special in specials:
        text = text.replace(special, f"{special[0]} {special[1:]}" if len(special) > 1 else " ")
    return text


def harmless_inside(value: Any, specials: Sequence[str]) -> Any:
    """A JSON value with all of its texts harmless, keys too."""
    if isinstance(value, str):
        return harmless(value, specials)
    if isinstance(value, Mapping):
        return {harmless(str(key), specials): harmless_inside(inner, specials) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [harmless_inside(inner, specials) for inner in value]
    return value


class ChatAppender:
    """Renders the first prompt of a dialogue and what follows each turn, with one student's own chat template."""

    def __init__(self, tokenizer: TurnTokenizer, stop_token_ids: Sequence[int], day: date | None = None) -> None:
        """Prove that the template can append. `day` is for a template that asks for a date.

        Raises: ModelError with what the template does instead.
        """
        self._tokenizer = tokenizer
        self._day = day
        self._stops: list[str] = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_token_ids]
        self._special = special_texts(tokenizer)
        self._closer = ""
        """The end token that the template writes after a turn of the assistant."""
        self._histories = [history for history in _HISTORIES if self._takes(history)]
        self._prove()
        self.tools_in_template = self._template_has_tools()
        """Whether the template knows tools; else they stand in the system message, and results in a user's."""

    def first(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids of the messages that come before the first turn. Raises: what the template raises."""
        given = [dict(message) for message in messages]
        if tools and not self.tools_in_template:
            told = CALLING.format(tools="\n".join(json.dumps(tool.schema()) for tool in tools))
            given = _with_system(given, told) if self._takes(_HISTORIES[1]) else _with_preface(given, told)
            tools = ()
        return encode_text(self._tokenizer, self._render(given, tools=tools))

    def after(self, messages: Sequence[Message], *, ended: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids that follow a turn and bring these messages, up to where the policy writes again.

        `ended`: the turn ends with an end token; else the template's own comes first, which the policy did not sample.
        Messages of the role `tool` come first among them, one for each call of the turn. Special tokens in their texts are
        broken up: what an environment says is text. Raises: what the template raises.
        """
        safe = [self.safe(dict(message) | {"content": str(message["content"])}) for message in messages]
        if not self.tools_in_template:
            safe, tools = without_tool_role(safe), ()
        text = self._following(_HISTORIES[0], safe, tools)
        return encode_text(self._tokenizer, text[len(self._closer) :] if ended else text)

    def harmless(self, text: str) -> str:
        """The text with a blank inside of whatever would be read as a special token."""
        return harmless(text, self._special)

    def safe(self, message: Message) -> dict[str, Any]:
        """The message with all of its texts harmless, those of its calls too."""
        found: dict[str, Any] = harmless_inside(message, self._special)
        return found

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        variables: dict[str, Any] = {"tools": [tool.schema() for tool in tools]} if tools else {}
        return render_prompt(self._tokenizer, [dict(m) for m in messages], self._day, **variables)

    def _takes(self, history: Sequence[Message]) -> bool:
        from jinja2 import TemplateError

        try:
            return bool(self._render(history))
        except (TemplateError, ValueError, TypeError):
            return False

    def _following(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """What the template writes after a turn that follows `history`, from its end token on.

        Raises: ModelError if what came before the turn is not what the engine saw.
        """
        called = sum(message["role"] == "tool" for message in new)
        start, rest = self._turn_and_rest(history, _calling(called) if called else _REPLIED, new, tools)
        if not called:
            if not rest.startswith(REPLY):
                raise self._cannot("writes something between the assistant's header and its turn", start, rest)
            return rest.removeprefix(REPLY)
        _, closer, after = rest.partition(self._closer)
        return closer + after

    def _turn_and_rest(
        self, history: Sequence[Message], turn: Message, new: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[str, str]:
        """The text before a turn, and the text of the turn with what follows it. Raises: as `_following`."""
        start, whole = self._render(history, tools), self._render([*history, turn, *new], tools)
        if not whole.startswith(start):
            raise self._cannot("changes what stands before a turn when a message follows it", start, whole)
        return start, whole[len(start) :]

    def _prove(self) -> None:
        """Try the template with several histories and further messages. Raises: ModelError."""
        if _HISTORIES[0] not in self._histories:
            raise self._cannot("refuses a message of a user", "", "")
        new = [{"role": "user", "content": "Go on."}]
        rest = self._following(_HISTORIES[0], new)
        self._closer = next((stop for stop in self._stops if stop and rest.startswith(stop)), "")
        if not self._closer:
            raise self._cannot(f"does not end a turn with an end token ({', '.join(self._stops)})", REPLY, rest)
        for history in self._histories:
            self._prove_one(history, new, rest)

    def _prove_one(self, history: Sequence[Message], new: Sequence[Message], wanted: str) -> None:
        found = self._following(history, new)
        if found != wanted:
            raise self._cannot("writes another text for the same message after another history", wanted, found)
        pieces = [self._render(history) + REPLY + self._closer, found.removeprefix(self._closer)]
        whole = encode_text(self._tokenizer, "".join(pieces))
        if [token for piece in pieces for token in encode_text(self._tokenizer, piece)] != whole:
            raise self._cannot("gives other tokens if a message is tokenised alone", pieces[0], pieces[1])

    def _template_has_tools(self) -> bool:
        """True if the template lists tools, has calls between tags as our parser reads them, and shows their results, after
        any history in the same words."""
        from jinja2 import TemplateError

        tools, told = [_PROBE], ("result 42", "result 43")
        new = [{"role": "tool", "name": _PROBE.name, "content": text} for text in told]
        try:
            if not all(_PROBE.name in self._render(history, tools) for history in self._histories):
                return False
            found = {self._following(history, new, tools) for history in self._histories}
            _, rest = self._turn_and_rest(_HISTORIES[0], _calling(2), new, tools)
            read = tagged_calls(rest.partition(self._closer)[0], tools)
        except (TemplateError, ModelError, BadCall, ValueError, TypeError, KeyError):
            return False
        return len(found) == 1 and all(text in next(iter(found)) for text in told) and len(read) == 2

    def _cannot(self, what: str, before: str, after: str) -> ModelError:
        return ModelError.at(
            "the student's chat template",
            found=f"it {what}: {before[-80:]!r}, then {after[-160:]!r}",
            wanted="one that writes a new message after the turns before it and leaves them as they are",
            fix="give the domain's prompts as text (for an agent's program, set agent.render to text), or take a student whose "
            "chat_template appends, such as ChatML",
        )


def _calling(calls: int) -> Message:
    """A turn of the assistant that calls the probe's tool so many times."""
    call = {"type": "function", "function": {"name": _PROBE.name, "arguments": {"word": "it"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * calls}


def _with_preface(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The text before the first message, for a template that refuses the role `system`."""
    return [messages[0] | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def without_tool_role(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results in the role `user`, all of a turn in one message."""
    results = [m["content"] for m in messages if m["role"] == "tool"]
    others = [m for m in messages if m["role"] != "tool"]
    told = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": told}, *others] if results else others
