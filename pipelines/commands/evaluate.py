"""`opd evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import SetOption, check_output_file, help_examples, print_line, print_table, split_names

app = typer.Typer()

ModelsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="MODEL...",
        help="Hugging Face or LoRA adapter directories, or a run directory.",
        autocompletion=completion.complete_runs,
    ),
]
PipelineOption = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        help="Whose exams to take. Default: that of the run the first MODEL comes from.",
        autocompletion=completion.complete_pipelines,
    ),
]
MatrixOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN_DIR|PIPELINE",
        help="Every expert, the student and the merged model on every domain.",
        autocompletion=completion.complete_runs_and_pipelines,
    ),
]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts", metavar="[DOMAIN=]FILE", help="Questions of your own in place of a domain's, all of them; repeat."
    ),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option("--lm-eval", metavar="TASK", help="A task of lm-evaluation-harness, by name or YAML file; repeat."),
]


@app.command(
    epilog=help_examples(
        "opd evaluate runs/quickstart",
        "opd evaluate runs/mine --prompts math=new-questions.jsonl",
        "opd evaluate models/a models/b --pipeline quickstart --compare",
        "opd evaluate --matrix runs/quickstart --output matrix.json",
    )
)
def evaluate(
    models: ModelsArgument = None,
    pipeline: PipelineOption = None,
    domains: Annotated[str | None, typer.Option(help="Comma-separated; default: all that have an eval.")] = None,
    prompts: PromptsOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Several models side by side in one table.")] = False,
    matrix: MatrixOption = None,
    lm_eval: TasksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write that JSON object to a file too.", callback=check_output_file),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Measure models on held-out prompts of a pipeline's domains, with intervals, and on public tasks."""
    if bool(models) == bool(matrix) or (matrix and (pipeline or compare or lm_eval or prompts)):
        raise typer.BadParameter("give MODELs, or --matrix alone (with --domains and --set)")
    _refuse_at_once(models or [], pipeline or matrix)
    from pipelines.evaluation import command

    options = command.EvaluateOptions(
        models=models or [],
        matrix=matrix,
        pipeline=pipeline,
        domains=split_names(domains),
        prompts=prompts or (),
        tasks=[task for item in lm_eval or () for task in item.split(",")],
        overrides=overrides,
        side_by_side=compare,
    )
    result = command.run_evaluation(options, print_line)
    if as_json:
        typer.echo(json.dumps(result.data))
    else:
        for title, columns, rows in result.tables:
            print_table(title, columns, rows)
    if output:
        from opd.files import atomic_write_text

        atomic_write_text(output, json.dumps(result.data, indent=1) + "\n")
    if result.failure:
        raise result.failure


def _refuse_at_once(models: list[Path], pipeline: str | None) -> None:
    """Refuse a wrong path or name before the engines' packages are imported, which takes seconds. Raises: OpdError."""
    from opd.run.paths import RunPaths
    from pipelines.catalog import find_pipeline
    from pipelines.inputs.early_checks import refuse_wrong_directories

    if pipeline is not None and not RunPaths(Path(pipeline)).is_run:
        find_pipeline(pipeline)
    refuse_wrong_directories(models)
