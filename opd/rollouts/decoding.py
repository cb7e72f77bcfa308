"""Decode what a model wrote into the text that verifiers, environments, agents and people read.

Tokens that end or pad a response are no part of the text. All other special tokens are: tags such as `<answer>`, marks of calls and of
thoughts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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


def end_ids(tokenizer: Decoder, stop_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the ids that end or pad a response: those of the model, and those that the tokenizer names itself."""
    named = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return frozenset([*stop_token_ids, *(i for i in named if i is not None)])


def written_text(tokenizer: Decoder, token_ids: Sequence[int], ends: Collection[int]) -> str:
    """Return the text of sampled tokens without those in `ends`, which are the ids of `end_ids`."""
    return tokenizer.decode([i for i in token_ids if i not in ends], skip_special_tokens=False)
