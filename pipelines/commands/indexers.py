"""The commands `opd indexers ...`, which find and train sparse indexers that several layers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.commands.shell import ModelArgument, avoid_spinning, help_examples, print_line, print_table

app = typer.Typer(
    no_args_is_help=True,
    help="Sparse indexers that several layers share (family glm_moe_dsa): search them, train them.",
)

PromptsOption = Annotated[
    Path,
    typer.Option(help="Long texts: `prompt`, and `completion` where the loss is on that alone (JSONL, CSV, Parquet)."),
]
LengthOption = Annotated[
    int | None, typer.Option(min=2, help="Cut rows to so many tokens. Default: 8 times what an indexer chooses.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(
    "search",
    epilog=help_examples("opd indexers search models/glm --keep 0.25 --prompts texts.jsonl --output runs/pattern"),
)
def search(
    model: ModelArgument,
    prompts: PromptsOption,
    output: Annotated[
        Path, typer.Option(help="Directory for search.json and config.json; a search that was cut off goes on there.")
    ],
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of the layers that keep their indexer.")] = 0.25,
    max_length: LengthOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a forward pass.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Find out which layers can do with the indexer of a layer before, without training."""
    from pipelines.indexers.search import SearchOptions, search_indexers

    avoid_spinning()
    result = search_indexers(
        SearchOptions(
            model=model, prompts=prompts, output=output, keep=keep, max_length=max_length, batch_size=batch_size
        ),
        print_line,
    )
    if as_json:
        print_line(json.dumps(result, indent=2), err=False)
        return
    _print_search(result)
    print_line(result["pattern"], err=False)


@app.command(
    "train",
    epilog=help_examples(
        "opd indexers train models/glm --pattern runs/pattern --prompts texts.jsonl --output models/glm-shared",
        "opd indexers train models/glm --pattern FSSSFSSS --steps 0 --sparse-steps 0 --prompts texts.jsonl --output models/glm-plain",
    ),
)
def train(
    model: ModelArgument,
    prompts: PromptsOption,
    output: Annotated[Path, typer.Option(help="Directory of the new model; must not exist.")],
    pattern: Annotated[
        str | None,
        typer.Option(help="A pattern such as FSSF, or the directory of a search. Default: the model's own."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps in which all tokens count.")] = 1000,
    sparse_steps: Annotated[int, typer.Option(min=0, help="Steps after these in which chosen tokens count.")] = 200,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 1e-3,
    sparse_lr: Annotated[float, typer.Option(min=0, help="The same, of the sparse steps.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    max_length: LengthOption = None,
    chunk: Annotated[int, typer.Option(min=1, help="Queries whose attention is in memory together.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the rows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train each indexer on the attention of all layers that it serves; every other weight stays as it is."""
    from opd.indexers.training import IndexerTrainingSpec
    from pipelines.indexers.train import TrainOptions, train_indexers

    avoid_spinning()
    result = train_indexers(
        TrainOptions(model=model, prompts=prompts, output=output, pattern=pattern, max_length=max_length),
        IndexerTrainingSpec(
            steps=steps,
            sparse_steps=sparse_steps,
            batch_size=batch_size,
            lr=lr,
            sparse_lr=sparse_lr,
            chunk=chunk,
            seed=seed,
        ),
        print_line,
    )
    if as_json:
        print_line(json.dumps(result, indent=2), err=False)
    else:
        _print_training(result)


def _print_search(result: dict[str, Any]) -> None:
    rows = [("own", result["own_pattern"], f"{result['own_loss']:.4f}")]
    if result["uniform_loss"] is not None:
        rows.append(("uniform", result["uniform_pattern"], f"{result['uniform_loss']:.4f}"))
    rows.append(("searched", result["pattern"], f"{result['loss']:.4f}"))
    print_table("patterns", ("", "pattern", "loss"), rows)
    overlaps = [(str(layer), f"{overlap:.3f}") for layer, overlap in enumerate(result["overlaps"], start=1)]
    print_table("tokens chosen that the layer before chose too", ("layer", "share"), overlaps)


def _print_training(result: dict[str, Any]) -> None:
    before, after = result["indexers_before"], result["indexers_after"]
    rows = [
        (layer, *(f"{one[layer][key]:.4f}" for key in ("kl", "chosen_mass") for one in (before, after)))
        for layer in before
    ]
    columns = ("layer", "KL before", "after", "attention to chosen tokens before", "after")
    print_table("indexers, on rows held out", columns, rows)
    print_line(
        f"loss on rows held out: {result['own_loss']:.4f} with the model's own pattern, with this one {result['loss_before']:.4f} "
        f"before and {result['loss_after']:.4f} after training",
        err=False,
    )
