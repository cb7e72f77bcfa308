"""Read the header of a safetensors file: names, shapes, types and positions of its tensors, but no tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, NonNegativeInt
from pydantic_core import from_json

from experts.json_files import Lenient, validate_json
from opd.errors import ModelError, OpdError

# The safetensors library has the same limit.
_MAX_HEADER_BYTES = 100_000_000
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


class Tensor(Lenient):
    """One entry of a safetensors header."""

    dtype: str
    """The type by safetensors' name, e.g. `BF16`."""
    shape: list[NonNegativeInt]
    data_offsets: list[NonNegativeInt] = Field(min_length=2, max_length=2)
    """Position of the first byte and of the byte after the last one, counted from the end of the header."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's header, checked against the file's size.

    Raises: ModelError with byte counts if the file is truncated, the header longer than the file or not JSON, or if
    the tensors overlap or do not cover the data.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = _read_length(stream.read(8))
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _broken_file_error(
                file, f"a header of {length} bytes in a file of {size} bytes", f"8 + header <= {size} bytes"
            )
        raw = stream.read(length)
    tensors = _parse_header(file, raw)
    _check_cover(file, tensors, start=8 + length, size=size)
    return tensors


def data_start(file: Path) -> int:
    """Return the position of the first byte after the header, from which offsets count. The header was checked before."""
    with file.open("rb") as stream:
        return 8 + _read_length(stream.read(8))


def _read_length(prefix: bytes) -> int:
    """Return the length of the header in bytes; 0 if the file ends before the length."""
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    return length


def _parse_header(file: Path, raw: bytes) -> dict[str, Tensor]:
    try:
        header = from_json(raw)
    except ValueError as error:
        raise _broken_file_error(file, f"a header that is not JSON: {error}", "a JSON object of tensors") from None
    if not isinstance(header, dict):
        raise _broken_file_error(file, f"a header that is a {type(header).__name__}", "a JSON object of tensors")
    return {
        name: validate_json(Tensor, entry, f"{file}: tensor `{name}`")
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _check_cover(file: Path, tensors: Mapping[str, Tensor], start: int, size: int) -> None:
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in _BITS:
            raise _broken_file_error(file, f"tensor `{name}` of type {tensor.dtype}", f"one of {', '.join(_BITS)}")
        end = position + tensor.numel * _BITS[tensor.dtype] // 8
        if tensor.data_offsets != [position, end]:
            raise _broken_file_error(
                file, f"tensor `{name}` at bytes {tensor.data_offsets}", f"bytes {[position, end]}: no gap, no overlap"
            )
        position = end
    if start + position != size:
        raise _broken_file_error(file, f"{size} bytes", f"{start + position} bytes, as the header says")


def _broken_file_error(file: Path, actual: str, expected: str) -> OpdError:
    return ModelError.at(
        file, found=actual, wanted=expected, fix="copy or save the file again; it is truncated or damaged"
    )
