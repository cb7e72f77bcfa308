"""`opd traces`: episodes turn by turn."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.commands.shell import RunArgument, help_examples, print_line

app = typer.Typer()


@app.command(
    epilog=help_examples("opd traces runs/agents --domain maze", "opd traces runs/agents --step last --limit 2")
)
def traces(
    run_dir: RunArgument,
    exam: Annotated[
        str, typer.Option(help="Which exam: before, expert, after, or step-NNNNNN. Default: the newest of the student.")
    ] = "",
    domain: Annotated[list[str] | None, typer.Option(help="Only this domain; may come several times.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Episodes of each domain.")] = 5,
    step: Annotated[
        str,
        typer.Option(
            metavar="N|last", help="Episodes that were trained in this step instead, each as a tree of segments."
        ),
    ] = "",
) -> None:
    """Print the episodes that a merge's exams kept, or those of a training step, turn by turn."""
    from pipelines.evaluation.traces import exam_episodes, step_episodes, trace_lines, tree_lines

    if step:
        for episode in step_episodes(run_dir, step, domain or (), limit):
            print_line("\n".join(tree_lines(episode)), err=False)
        return
    for answer in exam_episodes(run_dir, exam, domain or (), limit):
        print_line("\n".join(trace_lines(answer)), err=False)
