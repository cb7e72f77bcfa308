"""Prompt files, and the domain mix of each step.

A prompts file is JSONL with TRL's column names: `prompt` is text or a list of chat messages, `completion` (same
kind) is only read when an expert is trained on the file, `answer` and `metadata` only by the verifier.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.errors import PromptError
from opd.types import Prompt

Messages = list[dict[str, str]]
"""Each with `role` and `content`."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
"""Whose messages a chat template may leave out on purpose."""
MAX_LINE_BYTES = 8 << 20
"""A longer line is no prompt but a file of another kind; the longest contexts of today are a few MB of text."""


class PromptLine(BaseModel):
    """One line of a prompts file. Unknown columns are ignored: data sets carry many."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str | Messages
    """One without text is left out of a merge, and counted."""
    completion: str | Messages | None = None
    answer: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Messages, *, add_generation_prompt: bool, tokenize: bool, **variables: Any
    ) -> Any: ...


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Read a whole prompts file; a byte-order mark, CRLF and blank lines are accepted.

    Raises: PromptError naming the file and the line that is not valid or over-long, or the file if it is missing or empty.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise PromptError.at(
            path,
            found="no such file",
            wanted="a JSONL file of prompts",
            fix="check the path; it is relative to the current directory",
        ) from None
    except OSError as error:
        raise PromptError.at(
            path,
            found=error.strerror or str(error),
            wanted="a JSONL file of prompts",
            fix="check the path and its rights",
        ) from None
    raw = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = [_parse(path, number, line) for number, line in enumerate(raw, start=1) if line.strip()]
    if not lines:
        raise PromptError.at(
            path,
            found="no prompts",
            wanted="at least one line",
            fix='lines look like {"prompt": "2+2=", "answer": "4"}',
        )
    return lines


def _parse(path: Path, number: int, line: bytes) -> PromptLine:
    fix = "correct or delete this line"
    if len(line) > MAX_LINE_BYTES:
        found, fix = f"a line of {len(line):,} bytes", "is it JSONL, one object a line? Split or delete this line"
    else:
        try:
            data = json.loads(line.decode("utf-8"))
            problem = _shape_problem(data)
            if problem is None:
                return PromptLine.model_validate(data)
            found, fix = problem
        except UnicodeDecodeError as error:
            found, fix = f"byte {error.start + 1} is not UTF-8: {error.reason}", "convert the file to UTF-8"
        except json.JSONDecodeError as error:
            found = f"{error.msg} at column {error.colno}: {error.doc.strip()[:60]!r}"
        except ValidationError as error:
            first = error.errors()[0]
            found = f"column `{'.'.join(map(str, first['loc'])) or 'line'}`: {first['msg']}"
        except (RecursionError, ValueError) as error:  # the latter for a number of thousands of digits
            found = f"JSON that cannot be read: {error}"
    raise PromptError.at(
        f"{path}:{number}",
        found=found,
        wanted='one JSON object with `prompt`, text or messages like {"role": "user", "content": "2+2="}, '
        f"at most {MAX_LINE_BYTES >> 20} MiB",
        fix=fix,
    )


def _shape_problem(data: Any) -> tuple[str, str] | None:
    """What was found and the way out, of a line whose columns or messages have other names than ours."""
    if not isinstance(data, dict):
        return None
    if "prompt" not in data:
        return (
            f"no column `prompt`{', but ' + _names(data) if data else ''}",
            "call what asks `prompt`; of a conversation, the turns before the answer are the `prompt`, the answer is the "
            "`completion`",
        )
    for column in ("prompt", "completion"):
        messages = data.get(column)
        for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
            found = _message_problem(message)
            if found:
                theirs = isinstance(message, dict) and message.keys() >= {"from", "value"}
                fix = FROM_SHAREGPT if theirs else "give every message a `role` and a `content`, both text"
                return f"column `{column}`, message {number}: {found}", fix
    return None


FROM_SHAREGPT = (
    """python3 -c 'import json, sys; who = {"human": "user", "gpt": "assistant"}; new = lambda ms: [{"role": """
    """who.get(m["from"], m["from"]), "content": m["value"]} for m in ms]; [print(json.dumps({**(d := json.loads(l)), """
    """**{c: new(d[c]) for c in ("prompt", "completion") if c in d}})) for l in sys.stdin]' < OLD.jsonl > NEW.jsonl"""
)
"""Makes `role` and `content` of `from` and `value`."""


def _message_problem(message: Any) -> str:
    """What is wrong with one message; nothing if it has a role and a text."""
    if not isinstance(message, dict):
        return f"{message!r:.60}"
    if not message.keys() >= {"role", "content"}:
        return f"the keys {_names(message)}" if message else "no keys"
    odd = next((key for key, value in message.items() if not isinstance(value, str)), "")
    return f"`{odd}` is no text: {message[odd]!r:.60}" if odd else "" if message["role"] else "an empty `role`"


def _names(data: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key:.40}`" for key in list(data)[:8])


def encode_prompt(tokenizer: Tokenizer, prompt: str | Messages, day: date | None = None) -> tuple[int, ...]:
    """Token ids of a prompt: text as it is, chat messages through the model's own template.

    `day` is what a template that asks for the date is told; None: today.
    """
    text = prompt if isinstance(prompt, str) else _rendered(tokenizer, prompt, day)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _rendered(tokenizer: Tokenizer, messages: Messages, day: date | None) -> str:
    # A variable of a template comes before a function of the same name that transformers gives it.
    clock = {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **clock)
    return text


def _asks(tokenizer: Tokenizer, prompt: str | Messages, day: date | None) -> tuple[int, ...]:
    """As `encode_prompt`, but none where there is nothing to answer: no visible sign, or special tokens only.

    Raises: ValueError if the template leaves the question out: then all prompts would be one.
    """
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not "".join(texts).strip():
        return ()
    if not isinstance(prompt, str):
        text = _rendered(tokenizer, prompt, day)
        lost = [message["role"] for message in prompt if message["content"].strip() not in text]
        if len(lost) == len(prompt) or not set(lost) <= ROLES:
            odd = next((role for role in lost if role not in ROLES), lost[0])
            raise ValueError(f"a chat template that leaves out what has the role {odd!r}; most know user and assistant")
    ids = encode_prompt(tokenizer, prompt, day)
    return () if set(ids) <= set(tokenizer.all_special_ids) else ids


def load_prompts(path: Path, domain: str, tokenizer: Tokenizer, day: date | None = None) -> list[Prompt]:
    """All prompts of one domain, tokenised; one that asks nothing has no token ids. `day` as for `encode_prompt`.

    Raises: PromptError.
    """
    from jinja2 import TemplateError

    prompts = []
    for index, line in enumerate(read_prompt_lines(path)):
        try:
            token_ids = _asks(tokenizer, line.prompt, day)
        except (TemplateError, ValueError, TypeError) as error:
            # No chat template, roles that the template refuses, or text that is not Unicode.
            raise PromptError.at(
                f"{path}: prompt {domain}/{index}",
                found=str(error),
                wanted="a prompt that the student's tokenizer and chat template take",
                fix="correct this prompt, give text instead of messages, or choose a student with a chat template",
            ) from None
        prompts.append(
            Prompt(
                id=f"{domain}/{index}", domain=domain, token_ids=token_ids, answer=line.answer, metadata=line.metadata
            )
        )
    return prompts


def split_samples(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Deal `total` samples out in proportion to the weights, at least one each, by largest remainder."""
    assert total >= len(weights) > 0
    spare = total - len(weights)
    exact = {name: spare * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (int(exact[name]) - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class MixedPrompts:
    """Every domain in every step. Each domain is read in a fresh seeded order per epoch, as an endless sequence.

    `take(step)` depends on nothing but (seed, step): resuming needs no stored cursor.
    """

    def __init__(self, by_domain: Mapping[str, Sequence[Prompt]], counts: Mapping[str, int], seed: int) -> None:
        assert set(by_domain) == set(counts)
        self._by_domain = by_domain
        self._counts = counts
        self._seed = seed
        self._orders: dict[tuple[str, int], list[int]] = {}

    def take(self, step: int) -> list[Prompt]:
        """The prompts of one step (from 1), grouped by domain."""
        return [
            prompt
            for domain, count in self._counts.items()
            for prompt in self._window(domain, (step - 1) * count, count)
        ]

    def _window(self, domain: str, start: int, count: int) -> list[Prompt]:
        prompts = self._by_domain[domain]
        return [prompts[self._order(domain, i // len(prompts))[i % len(prompts)]] for i in range(start, start + count)]

    def _order(self, domain: str, epoch: int) -> list[int]:
        key = (domain, epoch)
        if key not in self._orders:
            order = list(range(len(self._by_domain[domain])))
            # A string seed is hashed with SHA-512 by the standard library, so it is the same in every process.
            random.Random(f"{self._seed}/{domain}/{epoch}").shuffle(order)
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or k[1] >= epoch - 1} | {key: order}
        return self._orders[key]
