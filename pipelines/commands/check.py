"""`opd check`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import PipelineArgument, SetOption, help_examples, print_line, print_table

if TYPE_CHECKING:
    from opd.config import PipelineConfig

app = typer.Typer()

TEACHER_COLUMNS = ("domain", "expert", "student", "expert alone", "same first token", "KL", "NLL / ln V", "verdict")
MEMORY_COLUMNS = ("what", "GiB", "decided by")
GPU_COLUMNS = ("while", "on one GPU, GiB", "GiB needed", "GiB there")


@app.command(
    epilog=help_examples(
        "opd check quickstart", "opd check mine.yaml --samples 8 --fix-up", "opd check mine.yaml --cluster 8-gpus"
    )
)
def check(
    pipeline: PipelineArgument,
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts per domain.")] = 32,
    fix_up: Annotated[bool, typer.Option("--fix-up", help="Say with each finding what to change.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Check against the machines of a cluster spec, or of a shipped one (`opd plan --cluster list`), instead of this one. "
            "Nothing is computed; models may be their config.json alone.",
            autocompletion=completion.complete_clusters,
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Can the experts of a merge teach its student anything? Short exams before the long run; exit code 1 if not."""
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline
    from pipelines.inputs.early_checks import refuse_at_once
    from pipelines.inputs.read import refuse_without_experts

    config = load_pipeline(find_pipeline(pipeline), overrides)
    if cluster is not None:
        if fix_up:
            raise typer.BadParameter("--cluster measures nothing that --fix-up could explain: leave one of the two out")
        check_described(config, cluster)
        return
    refuse_without_experts(config, "`opd check`")
    refuse_at_once(config)
    from pipelines.check import measure
    from pipelines.sizing.memory import need_rows

    checked = measure.check_pipeline(config, samples, print_line)
    print_table(config.name, TEACHER_COLUMNS, measure.teacher_rows(checked))
    for line in (expert.describe() for expert in checked.own_tokens):
        print_line(line, err=False)
    for line in (*(expert.describe() for expert in checked.texts), *checked.judges):
        print_line(line, err=False)
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


def check_described(config: PipelineConfig, cluster: str) -> None:
    """Check a pipeline against the machines of a cluster spec, and print the sums. Raises: OpdError for what a merge refuses there."""
    from pipelines.check.described import check_on_cluster
    from pipelines.plan.spec import load_spec
    from pipelines.sizing.memory import need_rows

    spec = load_spec(cluster)
    reports = check_on_cluster(config, spec)
    for number, report in enumerate(reports, start=1):
        title = f"memory of the merge on {spec.name}" + (f", round {number}" if len(reports) > 1 else "")
        print_table(title, MEMORY_COLUMNS, need_rows(report.memory, report.machine))
        if report.gpus:
            print_table("memory of each GPU", GPU_COLUMNS, report.gpus)
        for note in report.notes:
            print_line(f"note: {note}", err=False)
        print_line(report.log, err=False)
        if report.numbers:
            print_line(f"auto: {report.numbers}", err=False)
    print_line("not measured: nothing was loaded or computed; `opd check` without --cluster does it", err=False)
    print_line(f"nothing is refused on {spec.name}")
