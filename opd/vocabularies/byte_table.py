"""The bytes of a tokenizer's tokens. A token may be a part of a character, so its text alone says nothing.

A tokenizer's decoder tells how a token's name becomes bytes:

    ByteLevel            each character of the name stands for a byte (GPT-2, Llama 3, Qwen)
    Metaspace, Replace   the name is text, with a mark for the blank; <0xE2> is a byte (sentencepiece: Llama 2, Gemma, Mistral)
    Fuse alone           the name is text
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "▁"


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The tokens of a vocabulary of V ids."""

    token_bytes: tuple[bytes, ...]
    """[V] bytes that a token writes; empty for a special token, and for an id without a token."""
    special: Mapping[int, str]
    """Id -> name of each special token: it marks something and writes nothing."""
    fallback: frozenset[int]
    """Ids of tokens for single bytes that stand beside tokens of text with the same bytes."""

    def join(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of some tokens."""
        return b"".join(self.token_bytes[i] for i in token_ids)

    def find_byte_tokens(self) -> dict[int, int]:
        """Return byte -> id of a token that writes this byte alone."""
        ids = {}
        for i, written in enumerate(self.token_bytes):
            if len(written) == 1 and (written[0] not in ids or i in self.fallback):
                ids[written[0]] = i
        return ids


def read_byte_table(tokenizer: Any) -> ByteTable:
    """Return the table of a tokenizer. Raises: ValueError if its tokens cannot be told as bytes."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"a {type(tokenizer).__name__}, which is not of the library `tokenizers`")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in settings["added_tokens"]}
    special = {i: token["content"] for i, token in added.items() if token["special"]}
    # Some directories flag a token as special only in tokenizer_config.json.
    special |= {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    decoders = list(_list_decoders(settings["decoder"]))
    kinds = {decoder["type"] for decoder in decoders}
    is_sentencepiece = _marks_blanks(decoders)
    if not ("ByteLevel" in kinds or is_sentencepiece or kinds == {"Fuse"}):
        shown = ", ".join(sorted(kinds)) or "none"
        raise ValueError(f"a tokenizer whose decoder ({shown}) does not tell the bytes of a token")
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    names = {i: name for name, i in tokenizer.get_vocab().items()}
    written: list[bytes] = []
    fallback: set[int] = set()
    for i in range(max(names) + 1):
        name = names.get(i, "")
        as_byte = _BYTE.fullmatch(name) if is_sentencepiece else None
        if i in special or not name:
            written.append(b"")
        elif i in added:
            written.append(added[i]["content"].encode())
        elif as_byte:
            fallback.add(i)
            written.append(bytes([int(as_byte[1], 16)]))
        elif is_sentencepiece:
            written.append(name.replace(_BLANK, " ").encode())
        elif "ByteLevel" in kinds and letters.keys() >= set(name):
            written.append(bytes(letters[letter] for letter in name))
        else:
            written.append(name.encode())
    return ByteTable(tuple(written), special, frozenset(fallback))


def _list_decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a decoder that is a sequence, or the one that it is."""
    for part in (decoder or {}).get("decoders", [decoder] if decoder else []):
        yield from _list_decoders(part) if part["type"] == "Sequence" else [part]


def _marks_blanks(decoders: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the decoders turn a mark into a blank, as those of sentencepiece do."""
    return any(
        d["type"] == "Metaspace" or (d["type"] == "Replace" and d["pattern"].get("String") == _BLANK) for d in decoders
    )


def _byte_letters() -> dict[int, str]:
    """Return byte -> letter of GPT-2's alphabet: printable bytes stand for themselves, the others are moved beyond 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(moved)}
