"""Carry out `opd indexers search`: the search itself, what it is compared with, and the files that it leaves.

OUTPUT/search.json   what was asked, every step with the loss of each candidate, and the result; a search that was cut off goes on from it
OUTPUT/config.json   the model's, with the pattern that was found
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError, RunDirError
from opd.files import atomic_write_text, raise_storage_errors
from opd.indexers.patterns import FULL, count_full, set_pattern, spread_pattern
from pipelines.indexers.inputs import Tell, Texts, count_indexers, inspect_indexed_model, make_batches, read_texts

if TYPE_CHECKING:
    from opd.indexers.layers import LayerRunner, TextBatch
    from opd.indexers.search import SearchState

SEARCH = "search.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of one call of `opd indexers search`."""

    model: Path
    prompts: Path
    output: Path
    keep: float
    """Share of the layers that keep their indexer, rounded up to whole layers."""
    max_length: int | None
    """Tokens of a row; None: `CONTEXTS` times what an indexer chooses."""
    batch_size: int
    """Rows of a forward pass."""


def search_indexers(options: SearchOptions, tell: Tell) -> dict[str, Any]:
    """Search, and return what search.json has under `result`. `tell` gets a line for each step.

    Raises: OpdError before anything is computed; StorageError.
    """
    model = inspect_indexed_model(options.model, tell)
    num_full = count_full(options.keep, len(model.pattern))
    if num_full >= model.pattern.count(FULL):
        raise ConfigError.at(
            "--keep",
            found=f"{options.keep:g}, {num_full} of {len(model.pattern)} layers, in a model with {count_indexers(model.pattern)}",
            wanted="fewer indexers than the model has",
            fix="take a smaller share",
        )
    texts = read_texts(options.prompts, model, options.max_length, tell)
    request = {
        "weights": model.info.weight_files,
        "pattern": model.pattern,
        "index_topk": model.topk,
        "rows": texts.digest,
        "num_full": num_full,
        "batch_size": options.batch_size,
    }
    file = options.output / SEARCH
    state = _read_state(file, request)
    runner = model.load()
    batches = make_batches(texts.rows, options.batch_size, runner.device)
    with raise_storage_errors(file):
        options.output.mkdir(parents=True, exist_ok=True)
        state = _run_search(runner, batches, num_full, state, file, request, tell)
        result = _compare_patterns(runner, batches, state, num_full, texts)
        _write_state(file, request, state, result)
        config = set_pattern(json.loads((model.path / "config.json").read_text(encoding="utf-8")), state.pattern)
        atomic_write_text(options.output / "config.json", json.dumps(config, indent=2) + "\n")
    return result


def _run_search(
    runner: LayerRunner,
    batches: list[TextBatch],
    num_full: int,
    state: SearchState,
    file: Path,
    request: Mapping[str, Any],
    tell: Tell,
) -> SearchState:
    from opd.indexers.search import search_pattern

    if state.steps or state.batches_done:
        tell(f"going on after {len(state.steps)} steps and {state.batches_done} of {len(batches)} batches")

    def save(state: SearchState) -> None:
        _write_state(file, request, state)
        if state.steps and not state.batches_done:
            step = state.steps[-1]
            tell(f"layer {step.layer} shares: loss {step.loss:.4f}  {count_indexers(step.pattern)}")

    return search_pattern(runner, batches, num_full, state, save)


def _compare_patterns(
    runner: LayerRunner, batches: list[TextBatch], state: SearchState, num_full: int, texts: Texts
) -> dict[str, Any]:
    """Return the pattern that was found with its loss, and those of the model's own and of the uniform one."""
    from opd.indexers.search import measure_loss, measure_overlaps

    uniform = spread_pattern(runner.num_layers, num_full)
    possible = all(own == FULL for own, letter in zip(runner.pattern, uniform, strict=True) if letter == FULL)
    return {
        "pattern": state.pattern,
        "loss": state.steps[-1].loss,
        "own_pattern": runner.pattern,
        "own_loss": measure_loss(runner, batches, runner.pattern),
        "uniform_pattern": uniform,
        "uniform_loss": measure_loss(runner, batches, uniform) if possible else None,
        "overlaps": measure_overlaps(runner, batches),
        "choosing": texts.choosing,
    }


def _write_state(
    file: Path, request: Mapping[str, Any], state: SearchState, result: Mapping[str, Any] | None = None
) -> None:
    data = {"asked": request, "state": asdict(state)} | ({"result": result} if result else {})
    atomic_write_text(file, json.dumps(data, indent=2) + "\n")


def _read_state(file: Path, request: Mapping[str, Any]) -> SearchState:
    """Return the state of a search that was cut off, or of a new one. Raises: RunDirError if something else was asked for in this
    directory."""
    from opd.indexers.search import SearchState, SearchStep

    if not file.exists():
        return SearchState(pattern=str(request["pattern"]))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        earlier, saved = data["asked"], data["state"]
        steps = [
            SearchStep(**{**step, "candidates": {int(k): v for k, v in step["candidates"].items()}})
            for step in saved["steps"]
        ]
        state = SearchState(**{**saved, "steps": steps, "sums": {int(k): v for k, v in saved["sums"].items()}})
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError.at(
            file, found=f"no state of a search: {error}", wanted="one of this version", fix="remove the file"
        ) from None
    differing = sorted(key for key in request if earlier.get(key) != request[key])
    if differing:
        raise RunDirError.at(
            file,
            found=f"a search with another {', '.join(differing)}",
            wanted="the search that was begun here, or a new directory",
            fix="give another --output, or remove this one",
        )
    return state
