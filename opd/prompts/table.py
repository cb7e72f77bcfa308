"""The prompts of one domain, tokenised. A `Prompt` is made only when it is asked for.

Rows ─ encode_prompts ─→ token ids, hash of the text, hash of the ids in Arrow ─→ PromptTable ─ where ─→ PromptTable
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
from blake3 import blake3

from opd.config.prompts import PromptsConfig
from opd.interfaces import Tokenizer
from opd.prompts.arrow import Batches, in_batches, open_batches
from opd.prompts.conversation import SYSTEM_ROLES, Messages
from opd.prompts.encode import encode_prompts, make_row_error, mark_prompt
from opd.prompts.line import PromptLine
from opd.prompts.rows import Rows, open_rows
from opd.records.types import Prompt

FORMAT = 2
"""Version of the cached token ids; raise it if the same rows would give other ids."""
SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("side", pa.uint64()),
        ("digest", pa.uint64()),
        ("traits", pa.uint8()),
    ]
)
SYSTEM, TOOLS, VARIABLES, ENDED = 1, 2, 4, 8
"""Bits of the column `traits`, for `opd.prompts.notices`: the prompt has a system message, tools, or variables of the chat
template; its messages end with a turn of the assistant."""
ENCODED_AT_ONCE = 512
"""Prompts that the tokenizer gets in one call."""
_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)  # json.dumps would make a new encoder for each prompt
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class PromptTable(Sequence[Prompt]):
    """Some of a source's prompts, in order. It holds only a few numbers for each, so a million prompts are no problem."""

    domain: str
    rows: Rows
    _tokens: Batches
    indices: Indices
    """The prompts' indices in `rows`."""
    text: str = ""
    """Text with which each prompt begins; see `mark_prompt`."""

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = int(self.indices[index])
        line = self.rows[at]
        return Prompt(
            id=f"{self.domain}/{self.rows.row_number(at)}",
            domain=self.domain,
            token_ids=tuple(self._tokens.read_cell("token_ids", at)),
            text=mark_prompt(line.prompt, self.text),
            answer=line.answer,
            metadata=line.metadata,
            columns=line.more,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Number of tokens of each prompt, [prompts]; 0 for a prompt without text."""
        return self._tokens.read_numbers("length")[self.indices]

    def select_prompts(self, mask: Mask) -> PromptTable:
        """Return the prompts for which `mask` [prompts] is true."""
        return replace(self, indices=self.indices[mask])

    def with_trait(self, trait: int) -> Mask:
        """Return the mask of the prompts that have a trait, such as `SYSTEM`."""
        return (self._tokens.read_numbers("traits")[self.indices] & trait) > 0

    def prompt_ids(self, mask: Mask, limit: int) -> list[str]:
        """Return the names of the first `limit` prompts for which `mask` is true."""
        return [f"{self.domain}/{self.rows.row_number(int(at))}" for at in self.indices[mask][:limit]]

    def find_equal_row(self, other: PromptTable) -> int | None:
        """Return the first of these prompts that has the same token ids in another table of the same rows; None if all differ."""
        own, others = (table._tokens.read_numbers("digest")[self.indices] for table in (self, other))
        equal = np.flatnonzero((own == others) & (self.lengths > 0))
        return int(equal[0]) if len(equal) else None

    def held_out(self, share: float) -> Mask:
        """Return the mask of the prompts for which `is_held_out` is true."""
        return self._tokens.read_numbers("side")[self.indices] < np.uint64(math.ceil(share * 2**64))

    def select_equal_prompts(self, prompts: Sequence[Prompt]) -> PromptTable:
        """Return the prompts that have the same token ids as one of `prompts`.

        They are compared by 64-bit hashes. So none is missed, and it is very unlikely that a wrong one is among them.
        """
        digests = np.array([_hash_token_ids(prompt.token_ids) for prompt in prompts], np.uint64)
        return self.select_prompts(np.isin(self._tokens.read_numbers("digest")[self.indices], digests))


def split_side(prompt: str | Messages) -> int:
    """Return 64 bits of a hash of the prompt's text. They decide whether the prompt is for training or for exams."""
    text = _SORTED.encode(prompt)
    digest = hashlib.sha256(f"opd holdout {text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def is_held_out(prompt: str | Messages, share: float) -> bool:
    """Return True if the prompt is held out of training. It depends on the prompt's text and the share alone.

    A prompt that is held out at some share is held out at every larger share too.
    """
    return split_side(prompt) < share * 2**64


def load_prompts(
    prompts: Path | PromptsConfig,
    domain: str,
    tokenizer: Tokenizer,
    day: date | None = None,
    variables: Mapping[str, Any] | None = None,
    text: str = "",
) -> PromptTable:
    """Load all prompts of one domain, tokenised. A prompt without text gets no token ids.

    `day`: see `encode_prompt`. `variables`: variables of the chat template; a row's own take precedence. `text`: see `mark_prompt`.
    It does not change which prompts are held out. Raises: PromptError.
    """
    template_variables = variables or {}
    rows = open_rows(prompts)
    # A tokenizer written in Python has no hash that would cover all that its ids depend on, so its ids are not cached.
    cached = rows.cached and hasattr(tokenizer, "backend_tokenizer")
    tokens = open_batches(
        f"tokens-{make_cache_key(rows, tokenizer, day, template_variables, text)}" if cached else "",
        SCHEMA,
        lambda: in_batches(_encode_prompts(rows, domain, tokenizer, day, template_variables, text), SCHEMA),
        cached=cached,
    )
    return PromptTable(domain, rows, tokens, np.arange(len(rows), dtype=np.int64), text)


def _encode_prompts(
    rows: Rows, domain: str, tokenizer: Tokenizer, day: date | None, variables: Mapping[str, Any], text: str
) -> Iterator[tuple[np.ndarray[Any, Any], int, int, int, int]]:
    """Yield a row of `SCHEMA` for each prompt. Raises: PromptError."""

    def encode(start: int) -> list[tuple[PromptLine, Sequence[int]]]:
        lines = rows.read_lines(start, start + ENCODED_AT_ONCE)
        return list(zip(lines, _encode_rows(rows, start, lines, domain, tokenizer, day, variables, text), strict=True))

    # The tokenizer releases Python's global lock, so it can encode the next prompts while this thread hashes these.
    with ThreadPoolExecutor(1) as ahead:
        pending = ahead.submit(encode, 0)
        for start in range(0, len(rows), ENCODED_AT_ONCE):
            batch, pending = pending.result(), ahead.submit(encode, start + ENCODED_AT_ONCE)
            for line, ids in batch:
                yield (
                    np.asarray(ids, np.int32),
                    len(ids),
                    split_side(line.prompt),
                    _hash_token_ids(ids),
                    _prompt_traits(line),
                )


def _prompt_traits(line: PromptLine) -> int:
    if isinstance(line.prompt, str) or not line.prompt:
        return 0
    system = any(message["role"] in SYSTEM_ROLES and message["content"].strip() for message in line.prompt)
    ended = line.prompt[-1]["role"] == "assistant"
    return SYSTEM * system | TOOLS * bool(line.tools) | VARIABLES * bool(line.chat_template_kwargs) | ENDED * ended


def _encode_rows(
    rows: Rows,
    start: int,
    lines: Sequence[PromptLine],
    domain: str,
    tokenizer: Tokenizer,
    day: date | None,
    variables: Mapping[str, Any],
    text: str,
) -> list[Sequence[int]]:
    """Return the token ids of the prompts from row `start`. Raises: PromptError naming the one that cannot be encoded."""
    from jinja2 import TemplateError

    try:
        prompts = [mark_prompt(line.prompt, text) for line in lines]
        return encode_prompts(tokenizer, prompts, day, [{**variables, **line.variables} for line in lines])
    except (TemplateError, ValueError, TypeError) as error:
        if len(lines) > 1:  # encode them one by one, to find out which one fails
            return [
                _encode_rows(rows, start + i, [prompt_line], domain, tokenizer, day, variables, text)[0]
                for i, prompt_line in enumerate(lines)
            ]
        raise make_row_error(f"{rows.label}: prompt {domain}/{rows.row_number(start)}", "student", error) from None


def _hash_token_ids(token_ids: Sequence[int]) -> int:
    """Return 64 bits of a hash of the token ids."""
    data = np.asarray(token_ids, np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def make_cache_key(rows: Rows, tokenizer: Any, day: date | None, variables: Mapping[str, Any], text: str = "") -> str:
    """Return the hash of all that decides the token ids: rows and the text before them, tokenizer, chat template with its variables,
    day, and the versions of the libraries."""
    parts = {
        "format": FORMAT,
        "rows": rows.key,
        "tokenizer": blake3(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "class": type(tokenizer).__qualname__,
        "special": tokenizer.all_special_ids,
        "template": tokenizer.chat_template,
        "variables": dict(variables),
        "tokens": tokenizer.special_tokens_map,  # a chat template may write these
        "day": str(day or (date.today() if "strftime_now" in str(tokenizer.chat_template) else None)),
        "versions": [version(name) for name in ("transformers", "tokenizers", "jinja2")],
        **({"text": text} if text else {}),
    }
    return blake3(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
