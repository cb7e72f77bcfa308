"""Decode tokens one by one, as far as that is possible."""

from __future__ import annotations

from collections.abc import Sequence

from opd.interfaces import Decoder

_INCOMPLETE = "�"
"""The replacement character, at the end of a text whose last character lacks bytes."""


def token_texts(ids: Sequence[int], tokenizer: Decoder) -> list[str]:
    """Return the text that each token adds to those before it, special tokens too; joined they are the text of all.

    A character that takes several tokens is the text of the last of them; the others have an empty text. A token is decoded together
    with those just before it, on which its text may depend. To decode all before it would take time that grows with the square of
    their number.
    """
    texts: list[str] = []
    start, at = 0, 0
    for end in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[start:at], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith(_INCOMPLETE) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        start, at = at, end  # the next one is decoded together with the tokens of this text
    return texts
