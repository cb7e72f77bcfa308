"""Carry out `opd indexers train`: train the indexers of a pattern, and write the model with them.

MODEL, pattern ─→ dense stage ─→ sparse stage ─→ OUTPUT: the model's files with new indexers, without those of shared layers
                                                 OUTPUT/indexers.json: settings, and losses before and after on rows that were held out
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError, RunDirError
from opd.files import atomic_file, atomic_write_text, fill_output, raise_storage_errors, refuse_existing_output
from opd.indexers.patterns import find_pattern
from pipelines.indexers.inputs import (
    Tell,
    count_indexers,
    inspect_indexed_model,
    make_batches,
    read_texts,
)
from pipelines.shared_indexers import write_shared_model

if TYPE_CHECKING:
    from opd.indexers.distillation import DistillationSums
    from opd.indexers.layers import TextBatch
    from opd.indexers.training import IndexerTraining, IndexerTrainingSpec

RECORD = "indexers.json"
HELD_OUT = 10
"""One row in so many is held out, to measure before and after."""
SAVE_EVERY = 50
"""Steps after which an interrupted training can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of one call of `opd indexers train`, beside the settings of the training."""

    model: Path
    prompts: Path
    output: Path
    pattern: str | None
    """A pattern, or a directory whose config.json has one; None: the model's own."""
    max_length: int | None
    """Tokens of a row; None: `CONTEXTS` times what an indexer chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTraining:
    """The files and numbers of an interrupted training."""

    tensors: Mapping[str, Any]
    steps_done: int
    """Steps that were taken."""
    result: Mapping[str, Any]
    """Measurements from before the first step."""


def train_indexers(options: TrainOptions, spec: IndexerTrainingSpec, tell: Tell) -> dict[str, Any]:
    """Train and write the model; returns what indexers.json has under `result`. `tell` gets about ten lines of each stage.

    Raises: OpdError before anything is computed; StorageError.
    """
    from opd.indexers.search import measure_loss
    from opd.indexers.training import IndexerTraining

    refuse_existing_output(options.output)
    model = inspect_indexed_model(options.model, tell)
    pattern = find_pattern(options.pattern, model.pattern, "--pattern")
    texts = read_texts(options.prompts, model, options.max_length, tell)
    held_out = texts.rows[::HELD_OUT]
    rows = [row for i, row in enumerate(texts.rows) if i % HELD_OUT]
    if not rows:
        raise ConfigError.at(
            "--prompts", found="1 row", wanted="at least 2: one in ten is held out", fix="give more rows"
        )
    request = {
        "weights": model.info.weight_files,
        "pattern": pattern,
        "rows": texts.digest,
        "settings": asdict(spec),
    }
    state_file = options.output.with_name(f".{options.output.name}.safetensors")
    saved = _read_state(state_file, request)
    runner = model.load()
    tell(count_indexers(pattern))
    batches = make_batches(held_out, spec.batch_size, runner.device)
    training = IndexerTraining(runner, pattern, spec)
    result = _restore_training(training, saved, tell) or {
        "own_loss": measure_loss(runner, batches, model.pattern),
        "loss_before": measure_loss(runner, batches, pattern),
        "indexers_before": _measure_indexers(training, batches),
    }
    total = spec.steps + spec.sparse_steps
    for sums in training.train(rows):
        if training.steps_done % max(1, total // 20) == 0:
            mean = sum(one.loss / one.num_queries for one in sums.values()) / len(sums)
            tell(
                f"step {training.steps_done}/{total}  {'dense' if training.steps_done <= spec.steps else 'sparse'} KL {mean:.4f}"
            )
        if training.steps_done % SAVE_EVERY == 0:
            _write_state(state_file, training, request, result)
    result |= {
        "loss_after": measure_loss(runner, batches, pattern),
        "indexers_after": _measure_indexers(training, batches),
    }
    record = {"pattern": pattern, "model": str(model.path), "settings": asdict(spec), "result": result}
    with fill_output(options.output) as temporary:
        write_shared_model(model.path, temporary, pattern, training.weights())
        atomic_write_text(temporary / RECORD, json.dumps(record, indent=2) + "\n")
    state_file.unlink(missing_ok=True)
    return result


def _write_state(file: Path, training: IndexerTraining, request: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write what a training goes on from. Raises: StorageError."""
    from safetensors.torch import save

    progress = {"asked": request, "steps_done": training.steps_done, "result": result}
    with raise_storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as stream:
            stream.write(save(training.state(), {"progress": json.dumps(progress)}))


def _read_state(file: Path, request: Mapping[str, Any]) -> SavedTraining | None:
    """Return what an interrupted training left; None if there is nothing. Raises: RunDirError if another one left it."""
    from safetensors import safe_open

    if not file.exists():
        return None
    with safe_open(file, framework="pt") as stream:
        progress = json.loads(stream.metadata()["progress"])
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 it is no mapping
    differing = sorted(key for key in request if progress["asked"].get(key) != json.loads(json.dumps(request[key])))
    if differing:
        raise RunDirError.at(
            file,
            found=f"an interrupted training with another {', '.join(differing)}",
            wanted="the training that was begun for this directory",
            fix="remove the file, or give another --output",
        )
    return SavedTraining(tensors=tensors, steps_done=progress["steps_done"], result=progress["result"])


def _restore_training(training: IndexerTraining, saved: SavedTraining | None, tell: Tell) -> dict[str, Any] | None:
    """Bring a training to where it was interrupted, and return what was measured before it; None if it is a new one."""
    if saved is None:
        return None
    training.load_state(saved.tensors, saved.steps_done)
    tell(f"going on after step {saved.steps_done}")
    return dict(saved.result)


def _measure_indexers(training: IndexerTraining, batches: list[TextBatch]) -> dict[str, dict[str, float]]:
    """Return, as JSON has it, layer -> KL in nats a query, and the share of the attention that the chosen tokens have, both over all tokens."""
    by_batch: list[dict[int, DistillationSums]] = [training.measure(batch, dense=True) for batch in batches]
    sums = {layer: reduce(add, (batch[layer] for batch in by_batch)) for layer in by_batch[0]}
    return {
        str(layer): {"kl": one.loss / one.num_queries, "chosen_mass": one.chosen_mass / max(1, one.num_choosing)}
        for layer, one in sums.items()
    }
