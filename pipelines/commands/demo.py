"""`opd demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from opd.run.paths import RunPaths
from opd.text import quote_for_shell
from pipelines.commands import experts, prompts
from pipelines.commands.merge import merge
from pipelines.commands.shell import help_examples, print_line

SUITE, SPEC, PIPELINE = "letters", "quickstart-experts", "quickstart"
PROMPTS, RUN = Path("prompts/letters"), Path("runs/quickstart")
OUTPUTS = (PROMPTS, Path("models/quickstart"), Path("registry/quickstart"), RUN)
"""Directories that the demo writes; the shipped pipeline and training spec name them."""

app = typer.Typer()


@app.command(epilog=help_examples("opd demo", "opd demo --output tryout"))
def demo(
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where everything goes. Default: the current directory.")
    ] = None,
) -> None:
    """Make prompts, train ten tiny experts on them, and merge them into one model: minutes on two cores, no download.

    What is finished is kept: after an interruption the same command goes on. To begin anew, delete what it made.
    """
    directory = Path() if output is None else output.absolute()
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        os.chdir(output)  # paths in the shipped files are relative to it
    run = RunPaths(directory / RUN)
    output_paths = ", ".join(str(directory / path) for path in OUTPUTS)
    if _is_finished(run):
        print_line(
            f"finished before: `opd report {quote_for_shell(run.root)}` shows it; to begin anew, delete {output_paths}"
        )
        return
    print_line(f"makes {output_paths}; after an interruption the same command goes on")
    if run.root.exists():
        print_line(f"3 of 3: opd merge --resume {quote_for_shell(run.root)}")
        merge(resume=run.root)
    else:
        _make_experts()
        print_line(f"3 of 3: opd merge {PIPELINE} --run-dir {run.root}")
        merge(PIPELINE, run.root)
    print_line(f"next: `opd evaluate --matrix {run.root}`; `opd init` writes a pipeline for experts of your own")


def _is_finished(run: RunPaths) -> bool:
    from opd.report import read_run

    return run.is_run and read_run(run.root).finished


def _make_experts() -> None:
    """Make the prompts, unless all of them are there, and train the experts that are not finished."""
    from experts.suites import DOMAINS

    files = [PROMPTS / domain / f"{part}.jsonl" for domain in DOMAINS[SUITE] for part in ("train", "eval")]
    if all(file.is_file() for file in files):
        print_line(f"1 of 3: {PROMPTS} is there, and is kept")
    else:
        print_line(f"1 of 3: opd prompts make {SUITE} --output {PROMPTS}")
        prompts.make(SUITE, PROMPTS)
    print_line(f"2 of 3: opd experts train {SPEC}")
    experts.train(SPEC)
