"""`opd doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pipelines.commands.shell import help_examples, print_line

app = typer.Typer()


@app.command(epilog=help_examples("opd doctor", "opd doctor --quick", "opd doctor --json"))
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the import of the engines, which takes half a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Can a merge run on this machine? Says what is missing and what to do; exit code 1 if something has failed."""
    from pipelines.doctor.examine import as_json as told
    from pipelines.doctor.examine import examine_machine, is_failed

    findings = []
    for finding in examine_machine(imports=not quick):
        findings.append(finding)
        if not as_json:
            print_line(f"{finding.level:<8} {finding.name}: {finding.found}", err=False)
            if finding.fix:
                print_line(f"         fix: {finding.fix}", err=False)
    if as_json:
        typer.echo(json.dumps(told(findings), indent=1))
    if is_failed(findings):
        raise typer.Exit(1)
