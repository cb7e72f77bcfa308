"""The commands `opd teachers ...`, which serve teachers to merges elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import PipelineArgument, SetOption, help_examples, print_line

app = typer.Typer(no_args_is_help=True, help="Serve teachers to merges elsewhere.")


@app.command(
    "serve",
    epilog=help_examples(
        "opd teachers serve quickstart --listen 127.0.0.1:0",
        "opd teachers serve mine.yaml --listen 10.0.0.5:8815 --tls-cert c.pem --tls-key k.pem",
    ),
)
def serve(
    pipeline: PipelineArgument,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one and prints it.")],
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of mode 600 with the token to ask for. Default: OPD_TEACHERS_TOKEN.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Serve a pipeline's teachers over Arrow Flight until Ctrl-C; beyond this machine only with TLS and a token."""
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline
    from pipelines.inputs.early_checks import refuse_wrong_models
    from teachers.flight.access import parse_endpoint

    endpoint = parse_endpoint(listen, tls_cert, tls_key, token_file)
    config = load_pipeline(find_pipeline(pipeline), overrides)
    refuse_wrong_models(config)
    from pipelines.serve import serve_teachers

    serve_teachers(config, endpoint, typer.echo, print_line)
