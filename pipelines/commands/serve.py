"""`opd serve`."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import ModelArgument, help_examples, print_line

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True},
    epilog=help_examples("opd serve runs/quickstart", "opd serve runs/quickstart -- --max-num-seqs 8"),
)
def serve(
    ctx: typer.Context,
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Beyond this machine only with a key in VLLM_API_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What requests call the model. Default: the run's name.")] = None,
    effort: Annotated[
        str | None, typer.Option(metavar="NAME", help="Effort of requests without `reasoning_effort`.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: rollout.dtype of the run's pipeline.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompt and answer. Default: rollout.max_model_len of the pipeline."),
    ] = None,
    draft: Annotated[bool, typer.Option(help="Guess tokens with the draft that learned beside the model.")] = True,
) -> None:
    """Serve a merged model by vLLM, with the OpenAI API, until Ctrl-C. What follows `--` is handed to vLLM.

    The process becomes vLLM's server: signals and exit code are the server's.
    """
    from opd.machine.address import Address
    from opd.rollouts.engine_files import own_folder
    from pipelines.after.efforts import write_effort_template
    from pipelines.after.models import find_model
    from pipelines.after.serve import ServeOptions, check_serving, run_server, server_command

    options = ServeOptions(
        address=Address(host, port),
        name=name,
        effort=effort,
        dtype=dtype,
        max_model_len=max_model_len,
        draft=draft,
        vllm_arguments=tuple(ctx.args),
    )
    local_model = find_model(model, print_line)
    check_serving(options, os.environ)
    options = replace(options, chat_template=write_effort_template(local_model, Path(own_folder()), effort))
    print_line("starting: " + shlex.join(["python", *server_command(local_model, options)[1:]]))
    print_line(f"as model `{options.name or local_model.name}` at http://{options.address}/v1, as soon as vLLM says so")
    run_server(local_model, options)
