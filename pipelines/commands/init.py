"""`opd init`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import avoid_spinning, help_examples, is_terminal, print_line

app = typer.Typer()

Many = list[str] | None
Student = Annotated[Path | None, typer.Option(help="Directory of the model that learns.")]
Experts = Annotated[Many, typer.Option("--expert", metavar="[NAME=]DIR", help="A model or LoRA adapter; repeat.")]
Prompts = Annotated[
    Many, typer.Option("--prompts", metavar="[EXPERT=]FILE", help="Prompts of an expert's domain: CSV, Parquet, JSONL.")
]
Exams = Annotated[
    Many, typer.Option("--eval", metavar="[EXPERT=]FILE", help="Held-out prompts. Default: a share of the prompts.")
]
Columns = Annotated[
    Many, typer.Option(metavar="[EXPERT=]PROMPT[,ANSWER]", help="What the file calls them. Default: by their names.")
]
Verifiers = Annotated[
    Many,
    typer.Option(
        "--verifier", metavar="[EXPERT=]NAME", help="How answers are judged; `none`: no exam. Default: proposed."
    ),
]
Bases = Annotated[
    Many,
    typer.Option(
        "--base", metavar="[EXPERT=]DIR", help="Base of an adapter. Default: the one it names, or the student."
    ),
]
Keep = Annotated[
    Path | None, typer.Option(metavar="FILE", help="General prompts: what the student can on them now, it keeps.")
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--plain", help="Texts go through the chat template, or not. Default: if it has words."),
]
Output = Annotated[Path | None, typer.Option(help="File to write. Default: pipeline.yaml, or NAME.yaml with --from.")]
Shipped = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="NAME",
        help="Copy a shipped pipeline; `opd pipelines list` names them.",
        autocompletion=completion.complete_shipped_pipelines,
    ),
]
Efforts = Annotated[
    bool | None,
    typer.Option(
        "--efforts/--no-efforts",
        help="Experts called DOMAIN-EFFORT (math-low, math-high) are one domain's, or not. Default: asks.",
    ),
]
Lora = Annotated[bool, typer.Option("--lora", help="Train LoRA adapters in place of all weights.")]
Probe = Annotated[bool, typer.Option("--probe", help="Let the models write a little, to choose the objective.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]


@app.command(
    epilog=help_examples(
        "opd init --student base --expert math --expert code --prompts math=math.csv --prompts code=code.jsonl",
        "opd init --from quickstart",
    )
)
def init(
    student: Student = None,
    experts: Experts = None,
    prompts: Prompts = None,
    exams: Exams = None,
    columns: Columns = None,
    verifiers: Verifiers = None,
    bases: Bases = None,
    keep: Keep = None,
    chat: Chat = None,
    efforts: Efforts = None,
    lora: Lora = False,
    probe: Probe = False,
    output: Output = None,
    shipped: Shipped = None,
    force: Force = False,
) -> None:
    """Write a commented pipeline for your student, experts and prompts; asks for what no option says.

    Example: opd init --student base --expert models/math --expert models/law --prompts math.csv --prompts law.jsonl
    """
    from pipelines.propose.flags import Flags
    from pipelines.propose.run import OutputFile, copy_shipped, write_proposal

    flags = Flags(
        student=student,
        experts=tuple(experts or ()),
        prompts=tuple(prompts or ()),
        exams=tuple(exams or ()),
        columns=tuple(columns or ()),
        verifiers=tuple(verifiers or ()),
        bases=tuple(bases or ()),
        keep=keep,
        chat=chat,
        efforts=efforts,
        lora=lora,
        probe=probe,
    )
    if shipped and flags != Flags():
        raise typer.BadParameter("--from copies a pipeline as it is; it takes --output and --force alone")
    target = OutputFile(path=output or Path(f"{shipped or 'pipeline'}.yaml"), force=force)
    avoid_spinning()
    ask = _ask_question if is_terminal(sys.stdin, sys.stdout) else None
    next_commands = copy_shipped(shipped, target) if shipped else write_proposal(flags, target, ask, print_line)
    print_line(f"wrote {target.path}; next:", err=False)
    for command in next_commands:
        print_line(f"  {command}", err=False)


def _ask_question(question: str, proposal: str) -> str:
    return str(typer.prompt(question, default=proposal, show_default=bool(proposal)))
