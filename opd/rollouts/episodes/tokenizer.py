"""The part of the student's tokenizer that episodes of several turns need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from opd.interfaces import Decoder, Tokenizer


class TurnTokenizer(Tokenizer, Decoder, Protocol):
    """The part of a Hugging Face tokenizer that turns and their observations are encoded with."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a turn; None if the tokenizer has none."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> token, for tokens that were added to the vocabulary; `opd.prompts.untrusted_text` looks for special tokens among them."""
        ...
