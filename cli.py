"""The command line. One function a command; torch, ray and vllm are imported inside the commands that need them.

Exit codes: 0 done, 1 a run that failed (or a check that found something), 2 a mistake in the input, 3 a disk that is
full, over quota, read-only or broken (what was finished before is intact), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from opd import __version__
from opd.errors import OpdError, RunError, StorageError
from opd.signals import patient
from opd.text import printable

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Merge many expert models into one by on-policy distillation.",
)
experts_app = typer.Typer(no_args_is_help=True, help="Register, inspect and train experts.")
pipelines_app = typer.Typer(no_args_is_help=True, help="Look at pipeline definitions.")
prompts_app = typer.Typer(
    no_args_is_help=True, help="Look at a pipeline's prompts, or make some for the shipped suites."
)
teachers_app = typer.Typer(no_args_is_help=True, help="Serve teachers to merges elsewhere.")
models_app = typer.Typer(no_args_is_help=True, help="Bring models into the Hugging Face layout.")
app.add_typer(experts_app, name="experts")
app.add_typer(pipelines_app, name="pipelines")
app.add_typer(prompts_app, name="prompts")
app.add_typer(models_app, name="models")
app.add_typer(teachers_app, name="teachers")

RegistryOption = Annotated[
    Path | None, typer.Option("--registry", envvar="OPD_REGISTRY", help="Registry root. Default: ./registry")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a pipeline key, e.g. trainer.steps=10.")
]

REPORT_COLUMNS = ("domain", "student before", "expert", "merged", "headroom recovered")
BASELINE_COLUMNS = ("method", "share", "response tokens", "seeds", "headroom recovered", "out of date")
ROUND_COLUMNS = ("round", "steps", "mean gain", "headroom recovered", "of what was left")

CHECK_COLUMNS = ("domain", "expert", "student", "expert alone", "same first token", "KL", "NLL / ln V", "verdict")
MEMORY_COLUMNS = ("what", "GiB", "decided by")

P = ParamSpec("P")
R = TypeVar("R")


def fails_clearly(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that a user can act on into a message and an exit code; anything else keeps its traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with patient():
                return command(*args, **kwargs)
        except OpdError as error:
            _end(f"error: {error}", 2)
        except StorageError as error:
            _end(f"failed: {error}", 3)
        except RunError as error:
            _end(f"failed: {error}", 1)
        except KeyboardInterrupt as error:
            _end(f"stopped by {str(error) or 'Ctrl-C'}", 128 + getattr(error, "number", signal.SIGINT))
        except OSError as error:
            from opd.files import STORAGE_ERRNOS

            if error.errno not in STORAGE_ERRNOS:
                raise
            _end(
                f"failed: {error.strerror}: {error.filename or 'while writing'}; what was finished before is intact", 3
            )

    return wrapped


def _say(line: str, err: bool = True) -> None:
    """Names, prompts and others' words may be in it: nothing that a terminal would obey."""
    typer.echo(printable(line), err=err)


def _end(message: str, code: int) -> NoReturn:
    _say(message)
    raise typer.Exit(code)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Merge many expert models into one by on-policy distillation."""


@app.command()
@fails_clearly
def merge(
    pipeline: Annotated[str | None, typer.Argument(help="A pipeline file, or the name of a shipped one.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: runs/NAME.")] = None,
    overrides: SetOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with an interrupted run; PIPELINE and --set may change some keys."),
    ] = None,
    resume_from: Annotated[
        str | None, typer.Option(help="latest (default), latest-valid (pass over damaged ones), or a step.")
    ] = None,
) -> None:
    """Merge experts into one student; prints what each domain gained."""
    if pipeline is None and resume is None:
        raise typer.BadParameter("give a PIPELINE, or --resume RUN_DIR")
    if resume is not None and run_dir:
        raise typer.BadParameter("--resume names the run directory; --run-dir does not go with it")
    if resume is None and resume_from:
        raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")
    from opd.config import load_pipeline
    from pipelines.catalog import find

    config = None if pipeline is None else load_pipeline(find(pipeline), overrides)
    from pipelines import rounds
    from pipelines.merge import Interrupted

    try:
        if resume is not None:
            root = resume
            report = rounds.resume(root, config, overrides, resume_from or "latest", _say)
        else:
            assert config is not None
            root = run_dir or Path("runs") / config.name
            report = rounds.start(config, root, _say)
    except Interrupted as stopped:
        _end(str(stopped), 128 + stopped.number)
    _print_report(report)
    typer.echo(f"model: {root / 'model'}\nreport: {root / 'report.html'}")


@app.command()
@fails_clearly
def evaluate(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL...", help="Hugging Face or LoRA adapter directories, or a run directory."),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", help="Whose exams to take. Default: that of the run the first MODEL comes from."),
    ] = None,
    domains: Annotated[str | None, typer.Option(help="Comma-separated; default: all that have an eval.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Several models side by side in one table.")] = False,
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR|PIPELINE", help="Every expert, the student and the merged model on every domain."
        ),
    ] = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            "--lm-eval", metavar="TASK", help="A task of lm-evaluation-harness, by name or YAML file; repeat."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that JSON object to a file too.")] = None,
    overrides: SetOption = None,
) -> None:
    """How well models answer: held-out prompts of a pipeline's domains, with intervals, and public tasks."""
    if bool(models) == bool(matrix) or (matrix and (pipeline or compare or lm_eval)):
        raise typer.BadParameter("give MODELs, or --matrix alone (with --domains and --set)")
    from pipelines.examine import examine_matrix, examine_models

    named = domains.split(",") if domains else None
    if matrix:
        found = examine_matrix(matrix, named, overrides, _say)
    else:
        tasks = [task for item in lm_eval or () for task in item.split(",")]
        found = examine_models(models or [], pipeline, named, tasks, overrides, compare, _say)
    if output:
        from opd.files import atomic_write_text

        atomic_write_text(output, json.dumps(found.data, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(found.data))
        return
    for title, columns, rows in found.tables:
        _print_table(title, columns, rows)


@app.command()
@fails_clearly
def check(
    pipeline: Annotated[str, typer.Argument(help="A pipeline file, or the name of a shipped one.")],
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts per domain.")] = 32,
    fix_up: Annotated[bool, typer.Option("--fix-up", help="Say with each finding what to change.")] = False,
    overrides: SetOption = None,
) -> None:
    """Can the experts of a merge teach it anything? Short exams before the long run; exit code 1 if not."""
    from opd.config import load_pipeline
    from pipelines.catalog import find

    config = load_pipeline(find(pipeline), overrides)
    from pipelines.check import check_pipeline, table_rows
    from pipelines.memory import table_rows as memory_rows

    checked = check_pipeline(config, samples, _say)
    _print_table(config.name, CHECK_COLUMNS, table_rows(checked))
    _print_table("memory of the merge", MEMORY_COLUMNS, memory_rows(checked.memory))
    for finding in checked.findings:
        _say(f"{finding.level}: {finding.domain + ': ' if finding.domain else ''}{finding.message}", err=False)
        if fix_up:
            _say(f"  fix: {finding.fix}", err=False)
    if checked.failed:
        raise typer.Exit(1)


@app.command()
@fails_clearly
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a merge, finished or not.")],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As a Markdown table, to paste into a document.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the page goes. Default: report.html in RUN_DIR.")
    ] = None,
    min_headroom: Annotated[
        float | None, typer.Option(help="Exit with 1 if a domain recovered less of its headroom (0 to 1).")
    ] = None,
    max_regression: Annotated[
        float | None, typer.Option(help="Exit with 1 if a domain lost more of the student's accuracy (0 to 1).")
    ] = None,
) -> None:
    """Print a merge's table and write it as a page, report.html, with report.json beside it."""
    from opd.report import Gate, write_report

    gate = Gate(min_headroom=min_headroom, max_regression=max_regression)
    found = write_report(run_dir, output, gate)
    if markdown:
        from opd.report import baseline_rows, markdown_table, table_rows

        _say(markdown_table(REPORT_COLUMNS, table_rows(found)), err=False)
        if rows := baseline_rows(found):
            _say("\n" + markdown_table(BASELINE_COLUMNS, rows), err=False)
        _say_what_is_missing(found)
    else:
        _print_report(found)
    _say(f"page: {output or run_dir / 'report.html'}")
    if gate.asked:
        for failure in found["gate"]["failures"]:
            _say(f"gate: {failure}")
        if not found["gate"]["passed"]:
            raise typer.Exit(1)


@app.command()
@fails_clearly
def baseline(
    target: Annotated[str, typer.Argument(metavar="RUN_DIR|PIPELINE", help="A merge's run directory, or a pipeline.")],
    method: Annotated[
        str,
        typer.Option(
            help="Comma-separated: linear, task_arithmetic, ties, dare_ties, slerp, off_policy, mixed_sft, opd."
        ),
    ],
    share: Annotated[
        str | None, typer.Option(help="Comma-separated shares of the merge's training, e.g. 0.1,0.3,1. Default: 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the pipeline's.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a PIPELINE: where results go. Default: runs/NAME-baselines.")
    ] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the models that were compared.")] = False,
    overrides: SetOption = None,
) -> None:
    """Merge the same experts in another way, and measure the result on the same exams."""
    _wait_passively()
    from opd.config import load_pipeline
    from pipelines.baselines.jobs import open_run, parse_methods, parse_shares, plan
    from pipelines.catalog import find

    methods, shares = parse_methods(method), parse_shares(share) if share is not None else None
    if Path(target).is_dir():
        if run_dir:
            raise typer.BadParameter("--run-dir goes with a PIPELINE; a run directory is where its results go")
        root = Path(target)
        config = open_run(root, overrides)
    else:
        config = load_pipeline(find(target), overrides)
        root = run_dir or Path("runs") / f"{config.name}-baselines"
    jobs = plan(config, root, methods, shares, seed)
    from pipelines.baselines.run import compute
    from pipelines.merge import Interrupted

    try:
        results = compute(jobs, _say, keep_models)
    except Interrupted as stopped:
        _end(f"{stopped}, or the same command again", 128 + stopped.number)
    rows = [
        (r.label, "-" if r.token_share is None else f"{r.token_share:g}", _count(r.tokens), f"{r.accuracy:.3f}")
        for r in results
    ]
    _print_table(config.name, ("method", "share", "response tokens", "mean accuracy"), rows)
    typer.echo(f"results: {root / 'baselines'}")


@app.command()
@fails_clearly
def compare(
    pipeline: Annotated[str, typer.Argument(help="A pipeline file, or the name of a shipped one.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated, at most ten.")] = "0,1,2",
    method: Annotated[str | None, typer.Option(help="As of `opd baseline`, comma-separated. Default: all.")] = None,
    share: Annotated[str, typer.Option(help="Shares of the merge's training for methods that train.")] = "0.1,0.3,1",
    run_dir: Annotated[Path | None, typer.Option(help="Where it all goes. Default: runs/NAME-compare.")] = None,
    overrides: SetOption = None,
) -> None:
    """A merge and every baseline, over several seeds, as one table and one picture; goes on where it was interrupted."""
    _wait_passively()
    from opd.config import load_pipeline
    from pipelines.baselines.jobs import METHODS, parse_methods, parse_seeds, parse_shares
    from pipelines.catalog import find

    numbers, methods, shares = parse_seeds(seeds), parse_methods(method or ",".join(METHODS)), parse_shares(share)
    config = load_pipeline(find(pipeline), overrides)
    root = run_dir or Path("runs") / f"{config.name}-compare"
    from pipelines.baselines import compare as comparing
    from pipelines.merge import Interrupted

    try:
        rows = comparing.compare(config, root, numbers, methods, shares, _say)
    except Interrupted as stopped:
        _end("stopped, checkpoint written; go on with the same command", 128 + stopped.number)
    _print_table(config.name, comparing.COLUMNS, [comparing.cells(row) for row in rows])
    typer.echo(f"table: {root / 'comparison.md'}\npicture: {root / 'comparison.svg'}")


@experts_app.command("add")
@fails_clearly
def experts_add(
    name: Annotated[str, typer.Argument(help="Letters, digits, dot, dash and underscore.")],
    model: Annotated[Path, typer.Option(help="Hugging Face or LoRA adapter directory, safetensors only.")],
    domain: Annotated[str, typer.Option(help="Domain the expert is good at.")],
    prompts: Annotated[
        Path | None, typer.Option(help="The domain's prompts: a file (JSONL, CSV, Parquet) or a saved data set.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Base model of a LoRA adapter. Default: the one that the adapter names.")
    ] = None,
    registry: RegistryOption = None,
) -> None:
    """Register an expert: check its files and write its manifest."""
    store = _registry(registry)
    manifest = store.add(name, model, domain, prompts, base)
    _say(f"registered {name}: {manifest.architecture}, {manifest.parameters:,} parameters, domain {domain}", err=False)
    for twin in store.twins(manifest):
        _say(f"warning: {twin} has the same weights")


@experts_app.command("list")
@fails_clearly
def experts_list(
    registry: RegistryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List registered experts."""
    manifests = _registry(registry).all()
    if as_json:
        typer.echo(json.dumps([m.model_dump(mode="json") for m in manifests]))
        return
    rows = [(m.name, m.domain, m.architecture, f"{m.parameters:,}", m.info.dtype, m.model) for m in manifests]
    _print_table("experts", ("name", "domain", "architecture", "parameters", "dtype", "model"), rows)


@experts_app.command("show")
@fails_clearly
def experts_show(name: str, registry: RegistryOption = None) -> None:
    """Print an expert's manifest as JSON."""
    typer.echo(json.dumps(_registry(registry).get(name).model_dump(mode="json"), indent=2))


@experts_app.command("verify")
@fails_clearly
def experts_verify(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None, registry: RegistryOption = None
) -> None:
    """Check that experts' files are still the ones that were registered; exit code 1 if not."""
    store = _registry(registry)
    failed = False
    known: dict[Path, dict[str, str]] = {}  # adapters share bases, and a base is long to read
    for name in names or store.names():
        problems = store.verify(name, known)
        failed = failed or bool(problems)
        _say(f"{name}: {'; '.join(problems) or 'ok'}", err=False)
    if failed:
        raise typer.Exit(1)


@experts_app.command("remove")
@fails_clearly
def experts_remove(name: str, registry: RegistryOption = None) -> None:
    """Forget an expert; its model files stay."""
    _registry(registry).remove(name)
    typer.echo(f"removed {name}")


@experts_app.command("train")
@fails_clearly
def experts_train(
    spec: Annotated[str, typer.Argument(help="A training spec (YAML), or the name of a shipped one.")],
    overrides: SetOption = None,
) -> None:
    """Fine-tune experts from one base, and register them if the spec says where."""
    from experts.spec import find_spec, load_spec

    loaded = load_spec(find_spec(spec), overrides)
    _wait_passively()
    from experts.train import train_experts

    for path in train_experts(loaded, _say):
        typer.echo(str(path))


@pipelines_app.command("list")
@fails_clearly
def pipelines_list() -> None:
    """List the shipped pipelines."""
    from opd.config import load_pipeline
    from pipelines.catalog import shipped

    configs = {name: load_pipeline(path) for name, path in shipped().items()}
    rows = [(name, str(c.student.model), str(len(c.domains)), str(c.trainer.steps)) for name, c in configs.items()]
    _print_table("pipelines", ("name", "student", "domains", "steps"), rows)


@pipelines_app.command("show")
@fails_clearly
def pipelines_show(
    pipeline: str,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default filled in.")] = False,
    overrides: SetOption = None,
) -> None:
    """Print a pipeline; copy it to a file to make your own."""
    from opd.config import load_pipeline
    from pipelines.catalog import find

    path = find(pipeline)
    config = load_pipeline(path, overrides)
    if resolved or overrides:
        import yaml

        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
    else:
        typer.echo(path.read_text(), nl=False)


@pipelines_app.command("schema")
def pipelines_schema() -> None:
    """Print the JSON Schema of a pipeline, for editors."""
    from opd.config import PipelineConfig

    typer.echo(json.dumps(PipelineConfig.model_json_schema(), indent=2))


@prompts_app.command("make")
@fails_clearly
def prompts_make(
    suite: Annotated[str, typer.Argument(help="letters or reasoning.")],
    output: Annotated[Path, typer.Option(help="Directory; gets DOMAIN/train.jsonl and DOMAIN/eval.jsonl.")],
    domains: Annotated[str | None, typer.Option(help="Comma-separated; default: all of the suite.")] = None,
    train: Annotated[int, typer.Option(min=1, help="Training prompts per domain.")] = 2000,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out prompts per domain.")] = 200,
    seed: int = 0,
) -> None:
    """Write a suite's prompts and answers, training and held-out apart."""
    from experts.suites import write_suite

    written = write_suite(
        suite, output, domains=domains.split(",") if domains else None, train=train, eval=held_out, seed=seed
    )
    typer.echo(f"{suite}: {len(written)} domains under {output}: {', '.join(written)}")


@prompts_app.command("show")
@fails_clearly
def prompts_show(
    pipeline: Annotated[str, typer.Argument(help="A pipeline file, or the name of a shipped one.")],
    domain: Annotated[str | None, typer.Option(help="Default: every domain.")] = None,
    count: Annotated[int, typer.Option("-n", min=0, help="Prompts to show of each source.")] = 3,
    overrides: SetOption = None,
) -> None:
    """Show prompts as the student reads them, their token ids, and how many are left out and why."""
    from opd.config import load_pipeline
    from pipelines.catalog import find

    config = load_pipeline(find(pipeline), overrides)
    from pipelines.show_prompts import show_prompts

    for line in show_prompts(config, domain, count):
        _say(line, err=False)


@models_app.command("from-gguf")
@fails_clearly
def models_from_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed Python package that ships one.")],
    output: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
) -> None:
    """Turn a GGUF model into a Hugging Face directory with safetensors."""
    from experts.gguf import import_gguf

    import_gguf(source, output)
    typer.echo(str(output))


@teachers_app.command("serve")
@fails_clearly
def teachers_serve(
    pipeline: Annotated[str, typer.Argument(help="A pipeline file, or the name of a shipped one.")],
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
    from pipelines.catalog import find
    from teachers.flight.access import endpoint

    door = endpoint(listen, tls_cert, tls_key, token_file)
    config = load_pipeline(find(pipeline), overrides)
    from pipelines.serve import serve

    serve(config, door, typer.echo, _say)


def _wait_passively() -> None:
    """Before torch is imported, which reads it then: spinning threads slow down 10-fold as soon as another wants a core."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _registry(root: Path | None) -> Any:
    from experts.registry import Registry, default_root

    return Registry(root or default_root())


def _print_report(report: dict[str, Any]) -> None:
    from opd.report import baseline_rows, round_rows, table_rows

    _print_table(report["name"], REPORT_COLUMNS, table_rows(report))
    if "rounds" in report:
        _print_table("rounds", ROUND_COLUMNS, round_rows(report))
    if rows := baseline_rows(report):
        _print_table("beside other ways to merge", BASELINE_COLUMNS, rows)
    _say_what_is_missing(report)


def _say_what_is_missing(report: dict[str, Any]) -> None:
    if "unfinished" in report:
        _say(f"not finished: {report['unfinished']}")
    for line in report.get("stale", ()):
        _say(f"out of date: {line}")


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    # Piped output has no width of its own: wide enough that no cell is cut.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    app()
