"""`opd export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import ModelArgument, help_examples, print_line

app = typer.Typer()


class ExportDtype(StrEnum):
    """Types of weights that an export can have."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command(epilog=help_examples("opd export runs/quickstart --output quickstart-bf16 --dtype bfloat16"))
def export(
    model: ModelArgument,
    output: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Default: as the model is stored.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file, such as 2GB or 500MiB.")
    ] = "5GB",
    gguf: Annotated[bool, typer.Option("--gguf", help="Write a GGUF file too, by llama.cpp's converter.")] = False,
) -> None:
    """Write a merged model for other tools: safetensors that plain transformers loads, in the dtype and shards you want."""
    from pipelines.after.export import ExportOptions, export_model
    from pipelines.after.models import find_model

    options = ExportOptions(
        dtype=dtype.value if dtype else None, max_shard_bytes=_parse_size(max_shard_size), gguf=gguf
    )
    for file in export_model(find_model(model, print_line), output, options):
        typer.echo(str(file))


def _parse_size(text: str) -> int:
    """Return the bytes of a size such as `5GB`. Raises: ConfigError for a text that is no size, or a size below one byte."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from opd.errors import ConfigError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise ConfigError.at(
            "--max-shard-size",
            found=repr(text),
            wanted="a number of bytes with its unit",
            fix="for example 5GB or 500MiB",
        )
    return size
