"""Decode what a model wrote into the text that verifiers, environments, agents and people read.

Tokens that end or pad a response are no part of the text. All other special tokens are: tags such as `<answer>`, marks of calls and of
thoughts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from opd.interfaces import Decoder


def end_ids(tokenizer: Decoder, stop_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the ids that end or pad a response: those of the model, and those that the tokenizer names itself."""
    own = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return frozenset([*stop_token_ids, *(i for i in own if i is not None)])


def written_text(tokenizer: Decoder, token_ids: Sequence[int], ends: Collection[int]) -> str:
    """Return the text of sampled tokens without those in `ends`, which are the ids of `end_ids`."""
    return tokenizer.decode([i for i in token_ids if i not in ends], skip_special_tokens=False)
