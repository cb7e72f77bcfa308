"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

from opd.interfaces import Decoder

_NOT_WHOLE = "�"
"""Ends a text whose last character is not complete."""


def token_texts(ids: Sequence[int], tokenizer: Decoder) -> list[str]:
    """Return the text that each token adds to those before it, special tokens too; joined they are the text of all.

    A character of several tokens stands with the last of them. Tokens are decoded a few at a time, since the text of a token
    may depend on the one before it, and that of a whole episode would be decoded once for each token.
    """
    texts: list[str] = []
    start, at = 0, 0
    for end in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[start:at], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith(_NOT_WHOLE) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        start, at = at, end
    return texts
