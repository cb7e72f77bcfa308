"""The commands `opd guard ...`, which measure the guard, and ask it about a command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.shell import end_command, help_examples, print_line, print_table

if TYPE_CHECKING:
    from opd.guard.guard import Guard
    from opd.guard.measure import GuardMeasurement

app = typer.Typer(no_args_is_help=True, help="The guard against reward hacking: measure it, or ask it about a command.")
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="A YAML file with the keys of `guard:`; default: the shipped rules, no judge."),
]


@app.command(
    "test",
    epilog=help_examples("opd guard test shipped", "opd guard test mine.jsonl --config guard.yaml --min-recall 0.9"),
)
def test(
    file: Annotated[str, typer.Argument(help="Labelled commands or trajectories; `shipped` is our own set.")],
    form: Annotated[str, typer.Option("--format", help="commands, trace, atif or rewardhackbench.")] = "commands",
    half: Annotated[str, typer.Option(help="Of the shipped set: development, held_out or both.")] = "both",
    config: ConfigOption = None,
    min_recall: Annotated[float, typer.Option(min=0, max=1, help="Least recall of all rules.")] = 0.0,
    min_precision: Annotated[float, typer.Option(min=0, max=1, help="Least precision after the judge.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers and the mistakes as JSON.")] = False,
) -> None:
    """Recall and precision of each stage; exit code 1 below what is asked for."""
    from opd.errors import OpdError
    from opd.guard.labelled_cases import read_cases, shipped_cases
    from opd.guard.measure import AFTER_JUDGE, ALL_RULES, measure_guard

    if half not in ("development", "held_out", "both") or (half != "both" and file != "shipped"):
        fix = "name `shipped`, or leave --half out"
        raise OpdError.at("--half", found=half, wanted="development, held_out or both, of the shipped set", fix=fix)
    cases = shipped_cases(half) if file == "shipped" else read_cases(Path(file), form)  # type: ignore[arg-type]
    measurement = measure_guard(_build_guard(config), cases)
    if as_json:
        _print_json(measurement)
    else:
        _print_measurement(measurement, len(cases))
    recall, precision = measurement.scores[ALL_RULES].recall, measurement.scores[AFTER_JUDGE].precision
    if recall < min_recall or precision < min_precision:
        end_command(
            f"recall of all rules {recall:.3f} (wanted {min_recall:g}), precision {precision:.3f} (wanted {min_precision:g})",
            1,
        )


@app.command(
    "check",
    epilog=help_examples("opd guard check 'rm -rf tests'", "opd guard check 'cat answers.txt' --config guard.yaml"),
)
def check(
    command: Annotated[list[str], typer.Argument(help="The command; several words are put together with blanks.")],
    workdir: Annotated[str | None, typer.Option(help="Working directory; default: that of the configuration.")] = None,
    config: ConfigOption = None,
) -> None:
    """Print the guard's verdict on one shell command, as JSON; nothing is run. Exit code 1 if it is blocked."""
    from opd.records.environments import ToolCall

    guard = _build_guard(config)
    call = ToolCall(name="bash", arguments={"command": " ".join(command)})
    verdict = guard.check(call, guard.session(workdir))
    print_line(json.dumps(asdict(verdict), indent=2, ensure_ascii=False), err=False)
    if not verdict.allowed:
        raise typer.Exit(1)


def _build_guard(config: Path | None) -> Guard:
    from opd.config.guard import GuardConfig
    from opd.guard.build import guard_spec, shared_guard
    from opd.guard.examples import refuse_wrong_rules
    from opd.settings.yaml_files import load_yaml, validate_section

    spec = guard_spec(GuardConfig() if config is None else validate_section(GuardConfig, load_yaml(config), config))
    refuse_wrong_rules(spec)
    return shared_guard(spec)


def _print_measurement(measurement: GuardMeasurement, num_cases: int) -> None:
    rows = [
        (stage, f"{s.recall:.3f}", f"{s.precision:.3f}", *map(str, (s.caught, s.missed, s.false_alarms, s.passed)))
        for stage, s in measurement.scores.items()
    ]
    columns = ("stage", "recall", "precision", "caught", "missed", "false alarms", "let pass")
    print_table(
        f"{num_cases} cases, {measurement.judged} for the judge, {measurement.unanswered} unanswered", columns, rows
    )
    hits = sorted(measurement.by_rule.items(), key=lambda pair: -pair[1])
    print_table("which rule hit first", ("rule", "cases"), [(rule, str(count)) for rule, count in hits])
    for mistake in measurement.mistakes:
        verdict = mistake.verdict
        kind = "missed" if verdict.allowed else f"false alarm of {verdict.rule or verdict.suspicion}"
        print_line(f"{kind}: {mistake.id}", err=False)


def _print_json(measurement: GuardMeasurement) -> None:
    data = asdict(measurement)
    for stage, score in measurement.scores.items():
        data["scores"][stage] |= {"recall": score.recall, "precision": score.precision}
    print_line(json.dumps(data, indent=2, ensure_ascii=False), err=False)
