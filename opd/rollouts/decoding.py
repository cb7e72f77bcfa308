"""The text of what a model wrote, as verifiers, environments, agents and people read it.

What ends or pads a response is no part of the text. All other special tokens are: tags such as `<answer>`, marks of calls, thoughts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from opd.interfaces import Decoder


def end_ids(tokenizer: Decoder, stop_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the ids that end or pad a response: the model's, and the tokenizer's own."""
    own = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return frozenset([*stop_token_ids, *(i for i in own if i is not None)])


def written_text(tokenizer: Decoder, token_ids: Sequence[int], ends: Collection[int]) -> str:
    """Return the text of sampled tokens without those in `ends`, which is what `end_ids` returns."""
    return tokenizer.decode([i for i in token_ids if i not in ends], skip_special_tokens=False)
