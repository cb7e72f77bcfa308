"""The commands `opd models ...`, which bring models into the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import help_examples

app = typer.Typer(no_args_is_help=True, help="Bring models into the Hugging Face layout.")


@app.command("from-gguf", epilog=help_examples("opd models from-gguf model.Q4_1.gguf --output models/base"))
def from_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed Python package that ships one.")],
    output: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
) -> None:
    """Turn a GGUF model into a Hugging Face directory with safetensors."""
    from experts.gguf import import_gguf

    import_gguf(source, output, lambda line: typer.echo(line, err=True))
    typer.echo(str(output))
