"""Formats that vLLM's own parsers read, for families that our six leave out: GLM, Kimi, DeepSeek and some forty more.

These parsers serve, and never refuse: half a call is a call for some of them, and text for others. So what a call has to begin and end
with is learned from the turns in which the student's chat template writes calls, and a turn that begins one and leaves it open is
refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.tool_formats.records import BadCall, WrittenCalls, check_arguments, parse_json
from opd.tool_formats.thoughts import TAGS, without_thoughts

CALL_IDS = {"kimi_k2": "functions.{name}:{place}"}
"""Parser -> form of the ids that its family writes in place of names, and reads with results."""
_FAMILIES = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜DSML｜function_calls>", "deepseek_v32"),
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("\n<arg_key>", "glm45"),
    ("<arg_key>", "glm47"),
)
"""Text of a call that no other family writes, and the family's parser; the first that fits."""
_TAG = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]")
"""A mark of a call, also one that a name or a value ends: `<invoke name="`."""
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TimeoutError, TypeError, ValueError)  # fmt: skip
"""Errors of parsers over texts that nobody wrote them for."""


@lru_cache(maxsize=1)
def parser_names() -> tuple[str, ...]:
    """Return the names of the parsers of the vLLM that is installed; none if it is not. They are read from the file of its registry:
    its import takes seconds."""
    spec = PathFinder.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders if (file := Path(folder, "tool_parsers", "__init__.py")).is_file()]
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    tables = (node.value for tree in trees for node in tree.body if isinstance(node, ast.Assign))
    keys = (key for table in tables if isinstance(table, ast.Dict) for key in table.keys)
    return tuple(sorted(str(key.value) for key in keys if isinstance(key, ast.Constant)))


def find_family(turns: Sequence[str]) -> str:
    """Return the name of the parser for a chat template that writes calls so; empty for a family that we do not know."""
    return next((name for text, name in _FAMILIES if any(text in turn for turn in turns)), "")


class VllmFormat:
    """A parser of vLLM's, with the tokenizer of a student whose chat template writes calls in its form."""

    instructions, ends = "", ""

    def __init__(self, name: str, tokenizer: Any, tool: str, turns: Sequence[str]) -> None:
        """`turns` are as the chat template writes calls of `tool`, the value of their last argument being 7 in the last one.

        Raises: ImportError without vLLM, RuntimeError or ValueError for a tokenizer without tokens that the parser needs.
        """
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self.name = name
        self._tokenizer = get_cached_tokenizer(tokenizer)  # else each turn would build the vocabulary's dictionary
        self._make = ToolParserManager.get_tool_parser(name)
        self._make(self._tokenizer)
        before = without_thoughts(turns[0]).partition(tool)[0].strip()
        opened = _TAG.findall(before) or [before]
        if not opened[0]:
            raise ValueError("a call that begins with its name alone")
        self._begin, self._each = opened[0], opened[-1]
        self._end = (_TAG.findall(turns[-1].rpartition("7")[2]) or [""])[-1]
        self.begins = re.compile(f"{re.escape(self._begin)}|{re.escape(self._each)}")
        thoughts = {*chain.from_iterable(TAGS)}
        self.marks = tuple({mark for turn in turns for mark in _TAG.findall(turn)} - thoughts)

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        # First: vLLM's parsers would complete this call, and take the square of its length if a student repeats it without end.
        if text.rfind(self._end) < text.rfind(self._each):
            raise BadCall(f"the last call lacks its {self._end}")
        try:
            written = self._extract_calls(text, tools)
        except _FAILURES as error:
            raise BadCall(f"vLLM's parser {self.name} fails at this turn: {type(error).__name__}: {error}") from None
        calls = tuple(_read_call(call.function.name, call.function.arguments) for call in written.tool_calls)
        if text.count(self._each) > len(calls) or (self._begin in text and not calls):
            names = ", ".join(tool.name for tool in tools)
            raise BadCall(f"a call that begins with {self._begin} cannot be read, or names no tool; there are {names}")
        if not calls:
            return WrittenCalls((), text)
        return WrittenCalls(calls, written.content or "", tuple(str(call.id) for call in written.tool_calls))

    def write(self, calls: Sequence[ToolCall]) -> str:
        raise AssertionError("vLLM's formats are written by chat templates alone")

    def _extract_calls(self, text: str, tools: Sequence[Tool]) -> Any:
        """Return vLLM's `ExtractedToolCallInformation`. A parser keeps what it read: each turn has one of its own."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        listed = [ChatCompletionToolsParam(**tool.schema()) for tool in tools]
        request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], tools=listed)
        return self._make(self._tokenizer, listed).extract_tool_calls(text, request)


def _read_call(name: str, arguments: str) -> ToolCall:
    """Read a call of vLLM's. Raises: BadCall for arguments that are no JSON, or no object."""
    data = parse_json(arguments or "{}", f"in the call of {name:.60}")
    return ToolCall(name=name, arguments=check_arguments(name, data))
