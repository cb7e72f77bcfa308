"""The commands `opd environments ...`, which list environments, make tasks and episodes of them, and play them."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import help_examples, is_terminal, print_line, print_table

app = typer.Typer(no_args_is_help=True, help="What agents can be trained on: games, tools, a sandbox.")

NameArgument = Annotated[
    str,
    typer.Argument(
        help="A name of `opd environments list`, or module:Class.", autocompletion=completion.complete_environments
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the tasks, e.g. size=8; repeat.")
]


@app.command("list", epilog=help_examples("opd environments list"))
def list_environments() -> None:
    """List the environments that come with opd."""
    from pipelines import environments

    print_table("environments", ("name", "tools", "what"), environments.environment_table())


@app.command("tasks", epilog=help_examples("opd environments tasks maze --output maze.jsonl -n 200 --set size=8"))
def tasks(
    name: NameArgument,
    output: Annotated[Path, typer.Option(help="Prompts file to write (JSONL).")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Tasks.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides which tasks.")] = 0,
    options: SetOption = None,
) -> None:
    """Write a prompts file of tasks with different prompts; the same for the same arguments."""
    from pipelines import environments

    num_tasks = environments.write_tasks(name, n, seed, options or [], output)
    print_line(f"{name}: {num_tasks} tasks in {output}", err=False)


@app.command(
    "episodes", epilog=help_examples("opd environments episodes hanoi --output hanoi.jsonl -n 500 --mistakes 0.2")
)
def episodes(
    name: NameArgument,
    output: Annotated[Path, typer.Option(help="Prompts file to write (JSONL), with episodes for `opd experts train`.")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Tasks, one episode each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Decides which tasks, and the mistakes.")] = 0,
    mistakes: Annotated[float, typer.Option(help="Share of turns with a mistake, which nobody learns.")] = 0.3,
    max_turns: Annotated[int, typer.Option(help="Turns of an episode at most.")] = 40,
    options: SetOption = None,
) -> None:
    """Write episodes that the environment's solver plays, with mistakes on purpose."""
    from experts.episodes.play import PlaySettings
    from pipelines import environments

    settings = PlaySettings(mistakes=mistakes, max_turns=max_turns, seed=seed)
    num_episodes = environments.write_episodes(name, n, settings, options or [], output)
    print_line(f"{name}: {num_episodes} episodes in {output}", err=False)


@app.command(
    "prefixes",
    epilog=help_examples("opd environments prefixes maze-episodes.jsonl --model models/base --output prefixes.jsonl"),
)
def prefixes(
    episodes: Annotated[Path, typer.Argument(help="File of `opd environments episodes`, or episodes of your own.")],
    model: Annotated[Path, typer.Option(help="Directory of the student, whose tokenizer and chat template are used.")],
    output: Annotated[Path, typer.Option(help="Prompts file to write (JSONL), for a domain with `replay: true`.")],
    template_date: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"], help="The pipeline's `student.template_date`, for a template that asks for a date."
        ),
    ] = None,
    tool_call_parser: Annotated[
        str, typer.Option(help="The pipeline's `student.tool_call_parser`.", metavar="NAME")
    ] = "auto",
    chat_template_kwargs: Annotated[
        str, typer.Option(help="The pipeline's `student.chat_template_kwargs`, as JSON.", metavar="JSON")
    ] = "{}",
    add_special_tokens: Annotated[bool, typer.Option(help="The pipeline's `student.add_special_tokens`.")] = True,
) -> None:
    """Write what stands before each turn of recorded episodes as prompts."""
    from pipelines import environments

    day = None if template_date is None else template_date.date()
    num_prefixes, left_out = environments.write_prefixes(
        episodes, model, output, day, tool_call_parser, chat_template_kwargs, add_special_tokens
    )
    remark = f"; {left_out} left out, because their text would become other tokens" if left_out else ""
    print_line(f"{num_prefixes} prefixes in {output}{remark}", err=False)


@app.command("play", epilog=help_examples("opd environments play maze --seed 3"))
def play(
    name: NameArgument, seed: Annotated[int, typer.Option(help="Decides which task.")] = 0, options: SetOption = None
) -> None:
    """Play one task at the terminal; `quit` ends it."""
    from opd.errors import ConfigError
    from pipelines import environments

    if not is_terminal(sys.stdin, sys.stdout):
        raise ConfigError.at(
            "opd environments play",
            found="no terminal",
            wanted="a person at a terminal",
            fix="start it in a terminal; programs use the environment's reset and step",
        )
    try:
        reward = environments.play_task(name, seed, options or [], input, lambda text: print_line(text, err=False))
    except EOFError:
        reward = None
    print_line("left" if reward is None else f"reward {reward:g}", err=False)
