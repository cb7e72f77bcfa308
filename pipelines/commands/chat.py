"""`opd chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import typer

from opd.text import escape_control_characters
from pipelines.commands.shell import ModelArgument, avoid_spinning, help_examples, is_terminal, print_line

app = typer.Typer()


@app.command(
    epilog=help_examples(
        "opd chat runs/quickstart",
        "opd chat runs/quickstart/model --temperature 0.7",
        "opd chat runs/mine --effort low",
    )
)
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="First message of every dialogue.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: that of the run's training, else 512.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Decides what is sampled at a temperature above 0.")
    ] = 0,
    effort: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the efforts that the merge was trained for.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue each line as it is, though the model has a chat template.")
    ] = False,
) -> None:
    """Talk to a merged model. Without a terminal it answers the lines of standard input; the line /new begins another dialogue."""
    from pipelines.after.models import find_model

    local_model = find_model(model, print_line)
    avoid_spinning()  # before the next line imports torch
    from pipelines.after.chat import Chat, ChatOptions, run_dialogue

    options = ChatOptions(temperature=temperature, seed=seed, system=system, plain=plain, effort=effort)
    if max_new_tokens is None and local_model.config:
        max_new_tokens = local_model.config.rollout.max_new_tokens
    if max_new_tokens is not None:  # else the default of `ChatOptions`
        options = replace(options, max_new_tokens=max_new_tokens)
    at_terminal = is_terminal(sys.stdin)
    dialogue = Chat(local_model, options)
    if at_terminal:
        mode = "its chat template" if dialogue.templated else "plain text: it continues what you write"
        print_line(f"{local_model.name}, {mode}. /new starts over, Ctrl-C ends an answer, Ctrl-D the talk.")
    lines = _terminal_lines() if at_terminal else _piped_lines()
    run_dialogue(dialogue, lines, _print_piece, print_line, keep_going=at_terminal)


def _print_piece(piece: str) -> None:
    typer.echo(escape_control_characters(piece), nl=False)


def _terminal_lines() -> Iterator[str]:
    """Yield lines from the terminal, until Ctrl-D."""
    import readline  # noqa: F401  makes the arrow keys work in input()

    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def _piped_lines() -> Iterator[str]:
    """Yield the lines of standard input; bytes that are no UTF-8 become replacement characters."""
    if sys.stdin is not None:  # None if the shell closed it
        for line in typer.get_text_stream("stdin", errors="replace"):
            yield line.rstrip("\n")
