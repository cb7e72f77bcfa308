"""Read the few fields that we need from JSON files of others; every error names the file and the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from opd.errors import ModelError
from opd.settings.wording import describe_wanted


class Lenient(BaseModel):
    """Base of the models for Hugging Face files: types are checked, unknown keys ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())


M = TypeVar("M", bound=BaseModel)

MAX_JSON_BYTES = 256 << 20
"""Largest file that is read; the largest tokenizers of today are a tenth of this."""


def refuse_custom_code(file: Path, data: Mapping[str, Any]) -> None:
    """Refuse a file that asks for custom code. Raises: ModelError if `auto_map` occurs anywhere in `data`."""
    for field, value in _find_key(data, "auto_map"):
        raise ModelError.at(
            f"{file}: {field}",
            found=f"custom code, {str(value)[:100]}",
            wanted="an architecture that transformers and vLLM have built in",
            fix="opd never runs code from a model directory; if the architecture is built in, delete `auto_map`",
        )


def _find_key(data: object, key: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        if name == key:
            yield f"{prefix}{name}", value
        yield from _find_key(value, key, f"{prefix}{name}.")


def read_model(model: type[M], file: Path) -> M:
    """Read a file as `model`. Raises: ModelError if the file cannot be read or a field has the wrong type."""
    return validate_json(model, read_json(file), file)


def read_json(file: Path) -> dict[str, Any]:
    """Read one JSON object. Raises: ModelError if the file cannot be read, is too large, is nested too deep or is no object."""
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size:,} bytes, at most {MAX_JSON_BYTES:,} are read")
        data = from_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError.at(
            file, found=str(error), wanted="one JSON object", fix="copy the file again; it is damaged"
        ) from None
    if not isinstance(data, dict):
        raise ModelError.at(file, found=f"a {type(data).__name__}", wanted="one JSON object", fix="copy the file again")
    return data


def validate_json(model: type[M], data: object, source: object) -> M:
    """Check `data` as `model`. Raises: ModelError that names the first wrong field of `source`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first_error = error.errors()[0]
        raise ModelError.at(
            f"{source}: {first_error['loc'][0] if first_error['loc'] else 'the whole'}",
            found="nothing" if first_error["type"] == "missing" else repr(first_error["input"])[:80],
            wanted=describe_wanted(first_error),
            fix="copy the file from the original model or save the model again with save_pretrained",
        ) from None
