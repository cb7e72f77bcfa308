"""The student's tokenizer, as far as episodes need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from opd.interfaces import Decoder, Tokenizer


class TurnTokenizer(Tokenizer, Decoder, Protocol):
    """The part of a Hugging Face tokenizer that dialogues need."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
