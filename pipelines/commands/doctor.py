"""`opd doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
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

    from opd import __version__
    from pipelines.doctor.machine import machine_findings
    from pipelines.doctor.packages import package_findings
    from pipelines.doctor.traps import trap_findings

    findings = []
    for finding in chain(machine_findings(), trap_findings(), package_findings(imports=not quick)):
        findings.append(finding)
        if not as_json:
            print_line(f"{finding.level:<8} {finding.name}: {finding.found}", err=False)
            if finding.fix:
                print_line(f"         fix: {finding.fix}", err=False)
    failed = any(finding.level == "failed" for finding in findings)
    if as_json:
        data = {"opd": __version__, "ok": not failed, "checks": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(data, indent=1))
    if failed:
        raise typer.Exit(1)
