"""Chat templates that write tool calls as families of models do, and turns as these models write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.chatml import WITH_TOOLS, chat_tokenizer

_LISTED = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
)
_END = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def make_template(call: str, before: str = "", between: str = "", after: str = "") -> str:
    """ChatML in which each call `c` is written so, the calls of a turn with these texts around and between."""
    calls = f"{before}{{% for c in m.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}"
    shown = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    return f"{_LISTED}{shown}{{% if m.tool_calls %}}{calls}{{% endif %}}{_END}"


_ONE_ONLY = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
LLAMA3 = make_template(
    """{{ '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}""", _ONE_ONLY
)
"""As Llama 3.1's: one call in a turn."""
MISTRAL = make_template("{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}")
"""As that of Mistral's models since tokenizer v11."""
MISTRAL_IDS = """\
{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}\
{% if m.role == 'user' %}{% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}\
{% endif %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'system' %}{{ '[SYSTEM]' + m.content + '[/SYSTEM]' }}\
{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}\
{{ '[TOOL_RESULTS]{"content": "' + m.content + '", "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}\
{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{% if c.id | length != 9 %}\
{{ raise_exception('ids have nine letters') }}{% endif %}\
{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']<|im_end|>' }}\
{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
"""As that of Mistral's older models: calls with ids, and the tools before the user's last message, wherever that is."""
PYTHONIC = make_template(
    "{{ c.function.name + '(' }}{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}",
    "{{ '[' }}",
    "{{ ', ' }}",
    "{{ ']' }}",
)
"""As Llama 3.2's in vLLM's examples: texts have lost their quotes."""
LLAMA4 = PYTHONIC.replace("k ~ '=' ~ v", "k ~ '=\"' ~ v ~ '\"'").replace("'['", "'<|python_start|>['").replace("']'", "']<|python_end|>'")  # fmt: skip
"""As Llama 4's: everything in quotes, numbers too."""
QWEN3_CODER = make_template(
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' ~ k ~ '>\n' ~ (v if v is string else v | string) ~ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""Qwen3's, but for the words around the tools: thoughts stay while results follow, and are dropped at the next question."""
DROPS_THOUGHTS = WITH_TOOLS.replace(
    "m['role'] + '\n' + m['content']",
    "m['role'] + '\n' + (m['content'].split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content)",
)
"""As DeepSeek-R1's, but for its header: no thought of an earlier turn is ever kept."""
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% else %}"
    "{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') + (m.content | trim) }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
"""As Gemma's and Command R's: no tools, and no two messages of a user in a row."""
ALTERNATES_WITH_TOOLS = (
    _LISTED + "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}"
    + _END
)
"""As Mistral Small 3.2's: calls and results do not count, so that a user's message after results would be the second in a row."""
ODD = make_template("{{ '@' + c.function.name + ' ' + (c.function.arguments | tojson) }}")
"""As nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models."""

    parser: str
    """The format that it writes."""
    template: str
    specials: tuple[str, ...] = ()
    """Its own special tokens, which have no role such as end or padding."""
    turn: str
    """A turn with `add(a=1)` and `add(a=2)`."""
    broken: str
    """A turn with a call that cannot be read."""

    def tokenizer(self) -> Any:
        return chat_tokenizer(self.template, self.specials)


_HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
_XML = "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n</function>\n</tool_call>"
_LLAMA = '{"name": "add", "parameters": {"a": %d}}'
FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        parser="hermes", template=WITH_TOOLS, turn=f"Two: {_HERMES % 1}\n{_HERMES % 2}", broken=(_HERMES % 1)[:-1]
    ),
    "llama3": Family(
        parser="llama3_json",
        template=LLAMA3,
        specials=("<|python_tag|>", "<|eom_id|>"),
        turn=f"<|python_tag|>{_LLAMA % 1}; {_LLAMA % 2}",
        broken="<|python_tag|>print(1)",
    ),
    "mistral": Family(
        parser="mistral",
        template=MISTRAL,
        specials=("[TOOL_CALLS]", "[ARGS]"),
        turn='Two: [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}',
        broken='[TOOL_CALLS]add[ARGS]{"a": 1',
    ),
    "mistral_ids": Family(
        parser="mistral",
        template=MISTRAL_IDS,
        specials=("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[INST]", "[/INST]"),
        turn='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "aB3dE6gH9"}, {"name": "add", "arguments": {"a": 2}}]',
        broken='[TOOL_CALLS] [{"name": "add"',
    ),
    "llama3.2": Family(parser="pythonic", template=PYTHONIC, turn="[add(a=1), add(a=2)]", broken="[add(a=1), add(a=2)"),
    "llama4": Family(
        parser="llama4_pythonic",
        template=LLAMA4,
        specials=("<|python_start|>", "<|python_end|>"),
        turn="<|python_start|>[add(a=1), add(a=2)]<|python_end|>",
        broken="<|python_start|>add(a=1)<|python_end|>",
    ),
    "qwen3_coder": Family(
        parser="qwen3_xml", template=QWEN3_CODER, turn=f"Two: {_XML % 1}\n{_XML % 2}", broken=_XML[:-9] % 1
    ),
}
