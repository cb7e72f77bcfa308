"""`opd merge`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.run_dir import RunPaths
from pipelines.commands.report import print_report
from pipelines.commands.shell import SetOption, run_root, say

if TYPE_CHECKING:
    from pipelines.merging.rounds import Rounds
    from pipelines.merging.run import Run

app = typer.Typer()


@app.command()
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
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Take every exam here, whatever other runs measured: evaluate.cache=false."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the result, and nothing else.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON for each step, and a last one with the result.")
    ] = False,
) -> None:
    """Merge experts into one student; prints what each domain gained.

    On a terminal it shows one screen while it goes on, elsewhere a line for each step.
    """
    if no_cache:
        overrides = [*(overrides or []), "evaluate.cache=false"]
    given = _Given(pipeline, run_dir, overrides, resume, resume_from)
    from opd.live.displays import CHOICES, waiting
    from pipelines.commands.result import JsonResult
    from pipelines.merging.surroundings import Surroundings

    with JsonResult(as_json) as result:
        with nullcontext() if quiet else waiting("reading models and prompts"):
            paths, work = given.read(_nothing if quiet else say)
        found = work.carry_out(Surroundings(display=CHOICES[quiet, as_json]))
        result.finished(paths, found)
    if not as_json:
        print_report(found)
        typer.echo(f"model: {paths.model}\nreport: {paths.page}")


@dataclass(frozen=True, slots=True)
class _Given:
    """What the command line says of a merge."""

    pipeline: str | None
    run_dir: Path | None
    overrides: list[str] | None
    resume: Path | None
    resume_from: str | None

    def __post_init__(self) -> None:
        """Raises: BadParameter for options that do not go together."""
        if self.pipeline is None and self.resume is None:
            raise typer.BadParameter("give a PIPELINE, or --resume RUN_DIR")
        if self.resume is not None and self.run_dir:
            raise typer.BadParameter("--resume names the run directory; --run-dir does not go with it")
        if self.resume is None and self.resume_from:
            raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")

    def read(self, tell: Callable[[str], None]) -> tuple[RunPaths, Run | Rounds]:
        """Read and check everything. Returns the run directory and the merge in it. Raises: OpdError."""
        from opd.config import load_pipeline
        from pipelines.catalog import find

        config = None if self.pipeline is None else load_pipeline(find(self.pipeline), self.overrides)
        from pipelines.merging import rounds

        if self.resume is not None:
            wanted = self.resume_from or "latest"
            return RunPaths(self.resume), rounds.reopen(self.resume, config, self.overrides, wanted, tell)
        assert config is not None
        paths = RunPaths(run_root(self.run_dir, config.name))
        return paths, rounds.begin(config, paths.root, tell)


def _nothing(line: str) -> None: ...
