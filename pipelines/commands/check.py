"""`opd check`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from pipelines.commands.shell import PipelineArgument, SetOption, help_examples, print_line, print_table

app = typer.Typer()

TEACHER_COLUMNS = ("domain", "expert", "student", "expert alone", "same first token", "KL", "NLL / ln V", "verdict")
MEMORY_COLUMNS = ("what", "GiB", "decided by")


@app.command(epilog=help_examples("opd check quickstart", "opd check mine.yaml --samples 8 --fix-up"))
def check(
    pipeline: PipelineArgument,
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts per domain.")] = 32,
    fix_up: Annotated[bool, typer.Option("--fix-up", help="Say with each finding what to change.")] = False,
    overrides: SetOption = None,
) -> None:
    """Can the experts of a merge teach its student anything? Short exams before the long run; exit code 1 if not."""
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline
    from pipelines.inputs.early_checks import refuse_at_once
    from pipelines.inputs.read import refuse_without_experts

    config = load_pipeline(find_pipeline(pipeline), overrides)
    refuse_without_experts(config, "`opd check`")
    refuse_at_once(config)
    from pipelines.check import measure
    from pipelines.sizing.memory import need_rows

    checked = measure.check_pipeline(config, samples, print_line)
    print_table(config.name, TEACHER_COLUMNS, measure.teacher_rows(checked))
    print_table("memory of the merge", MEMORY_COLUMNS, need_rows(checked.memory))
    print_line(checked.log, err=False)
    if checked.numbers:
        print_line(f"auto: {checked.numbers}", err=False)
    for finding in checked.findings:
        print_line(f"{finding.level}: {finding.domain + ': ' if finding.domain else ''}{finding.message}", err=False)
        if fix_up:
            print_line(f"  fix: {finding.fix}", err=False)
    if checked.failed:
        print_line("something fails" + ("" if fix_up else "; `--fix-up` says what to change"))
        raise typer.Exit(1)
    changes = [part for override in overrides or () for part in ("--set", override)]
    print_line(f"nothing fails; next: {shlex.join(['opd', 'merge', pipeline, *changes])}")
