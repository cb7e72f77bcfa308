"""Text and loose bytes in the tokens of one tokenizer, as they stand within a turn: nothing is added in front, no special token is made of
text, and bytes that are no UTF-8, of a character that was cut, become tokens for single bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from opd.vocabularies.byte_table import ByteTable, read_byte_table


class UnreadableResponseError(ValueError):
    """A response that the teacher cannot read in its own tokens. The message says why."""


class BytesEncoder:
    """Encodes bytes with a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises: ValueError if the bytes of the tokenizer's tokens cannot be told."""
        self.table: ByteTable = read_byte_table(tokenizer)
        self._byte_tokens = self.table.find_byte_tokens()
        self._backend = build_text_encoder(tokenizer)

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Return the ids of some bytes. Raises: UnreadableResponseError."""
        ids: list[int] = []
        for part, text in _split_utf8(raw):
            ids += self._spell_bytes(part) if text is None else self._encode_text(text)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of a text. Characters that the tokenizer changes, such as sentencepiece's mark for the blank, are spelt in
        bytes. Raises: UnreadableResponseError."""
        if (ids := self._find_ids(text)) is not None:
            return ids
        ids = []
        for survives, part in groupby(text, lambda character: self._find_ids(character) is not None):
            own = "".join(part)
            own_ids = self._find_ids(own) if survives else self._spell_bytes(own.encode())
            if own_ids is None:
                raise UnreadableResponseError("text that the teacher's tokenizer does not give back as it was")
            ids += own_ids
        return ids

    def _find_ids(self, text: str) -> list[int] | None:
        """Return the ids of a text; None if these have other bytes."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids if self.table.join(ids) == text.encode() else None

    def _spell_bytes(self, raw: bytes) -> list[int]:
        """Return the tokens for single bytes. Raises: UnreadableResponseError."""
        if not self._byte_tokens.keys() >= set(raw):
            raise UnreadableResponseError(f"{raw!r:.40}, which the teacher has no tokens for")
        return [self._byte_tokens[byte] for byte in raw]


def _split_utf8(raw: bytes) -> Iterator[tuple[bytes, str | None]]:
    """Yield the parts of some bytes: those that are UTF-8 with their text, others with None."""
    while raw:
        try:
            yield raw, raw.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield raw[: error.start], raw[: error.start].decode()
            yield raw[error.start : error.end], None
            raw = raw[error.end :]


def build_text_encoder(tokenizer: Any) -> Any:
    """Return the tokenizer's backend as it encodes text that goes on within a turn: it puts no blank in front of the text, adds
    nothing, and takes special tokens that are spelt out for plain text."""
    from tokenizers import Tokenizer

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings = {**settings, "post_processor": None, "truncation": None, "padding": None}
    settings["normalizer"] = _without_blank(settings["normalizer"])
    settings["pre_tokenizer"] = _without_blank(settings["pre_tokenizer"])
    backend = Tokenizer.from_str(json.dumps(settings))
    backend.encode_special_tokens = True
    return backend


def _without_blank(part: Any) -> Any:
    """Return a normaliser or pre-tokenizer that puts no blank in front of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = copy.deepcopy(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [own for own in map(_without_blank, part[key]) if own is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part
