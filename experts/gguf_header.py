"""Read the header of a GGUF file: its keys and the shapes of its tensors, but no tensor.

Every length is checked against the file's size. The readers of transformers and of the package `gguf` trust all numbers in a
file, so a damaged file gives a traceback there, or an endless loop.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

from opd.errors import ModelError, OpdError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a value type -> its letter in `struct`."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file: everything before its tensors."""

    file: Path
    keys: Mapping[str, Any]
    """Key -> number, bool, text, or a list of these."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor -> shape in GGUF's order, the fastest axis first."""

    def get_value(self, key: str, kind: type[T]) -> T | None:
        """Return the value of a key; None if the file lacks it. Raises: ModelError for a value of another kind."""
        value = self.keys.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise ModelError.at(
            f"{self.file}: {key}", found=repr(value)[:80], wanted=f"a value of type {kind.__name__}", fix=COPY_AGAIN
        )

    def require_value(self, key: str, kind: type[T]) -> T:
        """Return the value of a key. Raises: ModelError if the file lacks it, or for a value of another kind."""
        value = self.get_value(key, kind)
        if value is None:
            raise ModelError.at(
                f"{self.file}: {key}", found="no such key", wanted=f"a value of type {kind.__name__}", fix=COPY_AGAIN
            )
        return value


COPY_AGAIN = (
    "copy or download the file again; if it stays so, convert the original model with llama.cpp's convert_hf_to_gguf.py"
)


def read_gguf_header(file: Path) -> GGUFHeader:
    """Read and check the header of a file.

    Raises: ModelError if it is no GGUF file of a known version, is cut off, or contradicts itself.
    """
    if file.stat().st_size < 24:
        raise _make_error(file, f"{file.stat().st_size} bytes", "a GGUF file: its header alone has 24 bytes")
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        reader = _Reader(file, data)
        tensors, keys = _read_counts(reader)
        values: dict[str, Any] = {}
        for _ in range(keys):
            name = reader.read_text("the name of a key")
            if name in values:
                raise _make_error(file, f"the key {name!r} twice", "each key once")
            values[name] = reader.read_value(name)
        return GGUFHeader(file, values, _read_tensor_shapes(reader, tensors, values.get("general.alignment", 32)))


def _read_counts(reader: _Reader) -> tuple[int, int]:
    magic = bytes(reader.data[:4])
    if magic != MAGIC:
        raise _make_error(
            reader.file, f"a file that begins with {magic!r}", f"one that begins with {MAGIC!r}: a GGUF file"
        )
    reader.at = 4
    version, tensors, keys = reader.read_numbers("IQQ", "the header")
    if version not in VERSIONS:
        swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
        raise ModelError.at(
            reader.file,
            found=f"GGUF version {version}"
            + (f", that is {swapped} of a big-endian file" if swapped in VERSIONS else ""),
            wanted=f"a little-endian file of version {' or '.join(map(str, VERSIONS))}",
            fix="convert the original model with llama.cpp's convert_hf_to_gguf.py, without --bigendian",
        )
    size = len(reader.data)
    # A key takes at least 13 bytes, a tensor's entry 24.
    if 13 * keys + 24 * tensors > size:
        raise _make_error(reader.file, f"{keys:,} keys and {tensors:,} tensors in {size:,} bytes", "as many as fit")
    if not tensors:
        raise _make_error(reader.file, "no tensors", "the weights of a model")
    return tensors, keys


def _read_tensor_shapes(reader: _Reader, count: int, alignment: object) -> dict[str, tuple[int, ...]]:
    from gguf.constants import GGML_QUANT_SIZES

    file = reader.file
    if not isinstance(alignment, int) or alignment < 1:
        raise _make_error(file, f"general.alignment {alignment!r}", "a number of bytes")
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    ends: dict[str, int] = {}
    for _ in range(count):
        name = reader.read_text("the name of a tensor")
        (dims,) = reader.read_numbers("I", f"tensor {name!r}")
        if name in shapes or not 1 <= dims <= _MAX_DIMS:
            actual = f"tensor {name!r} twice" if name in shapes else f"tensor {name!r} of {dims:,} dimensions"
            raise _make_error(file, actual, f"each tensor once, with 1 to {_MAX_DIMS} dimensions")
        shape = reader.read_numbers(f"{dims}Q", f"tensor {name!r}")
        kind, offset = reader.read_numbers("IQ", f"tensor {name!r}")
        if kind not in sizes:
            raise _make_error(file, f"tensor {name!r} of type {kind}", "a type of ggml's that the package gguf knows")
        block, nbytes = sizes[kind]
        if 0 in shape or shape[0] % block or offset % alignment:
            raise _make_error(
                file,
                f"tensor {name!r} of shape {list(shape)} at byte {offset:,}",
                f"rows of whole blocks of {block}, at a multiple of {alignment} bytes",
            )
        shapes[name], ends[name] = shape, offset + math.prod(shape) // block * nbytes
    # Tensors begin at the first multiple of the alignment after the header: division rounds up.
    start = -(-reader.at // alignment) * alignment
    last = max(ends, key=lambda name: ends[name])
    if start + ends[last] > len(reader.data):
        raise _make_error(
            file,
            f"{len(reader.data):,} bytes",
            f"at least {start + ends[last]:,}: so far reaches tensor {last!r}; the file is cut off",
        )
    return shapes


class _Reader:
    """Reads values one after the other, the next one from byte `at`. Its methods raise ModelError if the file ends too early."""

    def __init__(self, file: Path, data: mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def read_numbers(self, form: str, subject: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        self._refuse_end(size, subject)
        numbers = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += size
        return numbers

    def read_text(self, subject: str) -> str:
        (length,) = self.read_numbers("Q", subject)
        self._refuse_end(length, subject)
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode()
        except UnicodeDecodeError as error:
            raise _make_error(self.file, f"{subject}: {error}", "text in UTF-8") from None

    def read_value(self, name: str) -> Any:
        (kind,) = self.read_numbers("I", repr(name))
        if kind != _ARRAY:
            return self._read_single(kind, name)
        kind, count = self.read_numbers("IQ", repr(name))
        if kind == _STRING:
            self._refuse_end(8 * count, repr(name))
            return [self.read_text(repr(name)) for _ in range(count)]
        self._refuse_end(count * struct.calcsize(f"<{self._look_up_format(kind, name)}"), repr(name))
        return list(self.read_numbers(f"{count}{self._look_up_format(kind, name)}", repr(name)))

    def _read_single(self, kind: int, name: str) -> Any:
        return (
            self.read_text(repr(name))
            if kind == _STRING
            else self.read_numbers(self._look_up_format(kind, name), repr(name))[0]
        )

    def _look_up_format(self, kind: int, name: str) -> str:
        if kind not in _FORMATS:
            raise _make_error(self.file, f"{name!r}: a value of type {kind}", f"a type from 0 to {max(_FORMATS)}")
        return _FORMATS[kind]

    def _refuse_end(self, size: int, subject: str) -> None:
        remaining = len(self.data) - self.at
        if size > remaining:
            raise _make_error(
                self.file, f"{subject}: {size:,} bytes, and {remaining:,} are left", "a file that is not cut off"
            )


def _make_error(file: Path, actual: str, expected: str) -> OpdError:
    return ModelError.at(file, found=actual[:300], wanted=expected, fix=COPY_AGAIN)
