"""The commands `opd experts ...`, which register, list, verify and train experts. Heavy imports are inside the functions, so that the help
is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import SetOption, avoid_spinning, end_command, help_examples, print_line, print_table
from pipelines.interrupts import Interrupted

if TYPE_CHECKING:
    from experts.registry import Registry
    from experts.rl.spec import ReinforceSpec
    from experts.spec import ExpertsSpec

app = typer.Typer(no_args_is_help=True, help="Register, inspect and train experts.")

RegistryOption = Annotated[
    Path | None, typer.Option("--registry", envvar="OPD_REGISTRY", help="Registry root. Default: ./registry.")
]
ExpertArgument = Annotated[
    str, typer.Argument(help="Name of a registered expert.", autocompletion=completion.complete_experts)
]
EXPERT_COLUMNS = ("name", "domain", "architecture", "parameters", "dtype", "model")


@app.command(
    "add",
    epilog=help_examples(
        "opd experts add math --model models/math --domain math --prompts math.jsonl",
        "opd experts add law --model adapters/law --base models/base --domain law",
    ),
)
def add(
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
    expert_registry = _open_registry(registry)
    manifest = expert_registry.add(name, model, domain, prompts, base)
    print_line(
        f"registered {name}: {manifest.architecture}, {manifest.parameters:,} parameters, domain {domain}", err=False
    )
    for duplicate in expert_registry.list_duplicates(manifest):
        print_line(f"warning: {duplicate} has the same weights")


@app.command("list", epilog=help_examples("opd experts list", "opd experts list --json"))
def list_experts(
    registry: RegistryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List registered experts."""
    manifests = _open_registry(registry).list_manifests()
    if as_json:
        typer.echo(json.dumps([m.model_dump(mode="json") for m in manifests]))
        return
    rows = [(m.name, m.domain, m.architecture, f"{m.parameters:,}", m.info.dtype, m.model) for m in manifests]
    print_table("experts", EXPERT_COLUMNS, rows)


@app.command("show", epilog=help_examples("opd experts show math"))
def show(name: ExpertArgument, registry: RegistryOption = None) -> None:
    """Print an expert's manifest as JSON."""
    typer.echo(json.dumps(_open_registry(registry).get(name).model_dump(mode="json"), indent=2))


@app.command("verify", epilog=help_examples("opd experts verify", "opd experts verify math law"))
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Default: all.", autocompletion=completion.complete_experts)
    ] = None,
    registry: RegistryOption = None,
) -> None:
    """Check that experts' files are still the ones that were registered; exit code 1 if not."""
    expert_registry = _open_registry(registry)
    failed = False
    hashes: dict[Path, dict[str, str]] = {}  # adapters share bases, and a base is long to read
    for name in names or expert_registry.names():
        problems = expert_registry.verify(name, hashes)
        failed = failed or bool(problems)
        print_line(f"{name}: {'; '.join(problems) or 'ok'}", err=False)
    if failed:
        raise typer.Exit(1)


@app.command("remove", epilog=help_examples("opd experts remove math"))
def remove(name: ExpertArgument, registry: RegistryOption = None) -> None:
    """Forget an expert; its model files stay."""
    _open_registry(registry).remove(name)
    typer.echo(f"removed {name}")


@app.command(
    "train",
    epilog=help_examples(
        "opd experts train quickstart-experts", "opd experts train mine.yaml --method lora --set train.max_steps=50"
    ),
)
def train(
    spec: Annotated[
        str,
        typer.Argument(
            help="A training spec (YAML), or the name of a shipped one.",
            autocompletion=completion.complete_training_specs,
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="full or lora on texts; ppo, grpo or rloo on rewards. Default: the spec's.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Train experts from one base, on texts or on rewards, and register them if the spec says where."""
    from experts.rl.spec import load_training
    from experts.spec import ExpertsSpec, find_spec

    method_override = [] if method is None else [f"method={method}"]
    training = load_training(find_spec(spec), [*(overrides or ()), *method_override])
    avoid_spinning()
    model_dirs = _train_on_texts(training) if isinstance(training, ExpertsSpec) else _train_on_rewards(training)
    for model_dir in model_dirs:
        typer.echo(str(model_dir))


def _train_on_texts(spec: ExpertsSpec) -> list[Path]:
    from experts.train import train_experts

    return train_experts(spec, print_line)


def _train_on_rewards(spec: ReinforceSpec) -> list[Path]:
    from pipelines.inputs.early_checks import refuse_wrong_training

    refuse_wrong_training(spec)  # before the import below, which takes seconds: a refusal is quick
    from pipelines.reinforce import reinforce_experts

    try:
        return reinforce_experts(spec, print_line)
    except Interrupted as interrupted:
        # The exit code of a process that a signal ends, as shells have it.
        end_command("stopped, checkpoint written; go on with the same command", 128 + interrupted.number)


def _open_registry(root: Path | None) -> Registry:
    from experts.registry import Registry, default_root

    return Registry(root or default_root())
