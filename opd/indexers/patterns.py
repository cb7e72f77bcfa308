"""Patterns: which layers of a model choose the tokens that they attend to (`F`, full), and which take the choice of the layer before
them (`S`, shared). A pattern is the `index_topk_pattern` of a config.json, one letter for each layer. This needs no torch.

transformers reads `indexer_types` first, then the pattern, then `index_topk_freq` with `index_skip_topk_offset`. vLLM does not know
`indexer_types`, and reads the pattern before the others. So a config that both read alike has the list and the pattern, and no frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.errors import ConfigError

FULL, SHARED = "F", "S"
KINDS = {FULL: "full", SHARED: "shared"}
"""Letter of a pattern -> word in `indexer_types`."""
FAMILIES = ("glm_moe_dsa",)
"""Each `model_type` whose layers can share an indexer in transformers and in vLLM."""
CONFIG = "config.json"
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset")


def derive_pattern(num_layers: int, freq: int, offset: int) -> str:
    """Return the pattern that `index_topk_freq` and `index_skip_topk_offset` mean, in transformers and in vLLM: every layer before
    `offset` is full, and from `offset - 1` on every `freq`-th."""
    return "".join(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers))


def read_pattern(config: Any) -> str:
    """Return the pattern of a config object of transformers."""
    letters = {kind: letter for letter, kind in KINDS.items()}
    return "".join(letters[kind] for kind in config.indexer_types)


def spread_pattern(num_layers: int, num_full: int) -> str:
    """Return the uniform pattern: the first layer is full, and the distances between full layers differ by one at most."""
    full = {i * num_layers // num_full for i in range(num_full)}
    return "".join(FULL if i in full else SHARED for i in range(num_layers))


def count_full(share: float, num_layers: int) -> int:
    """Return how many layers keep their indexer if at least this share of all does."""
    # Without the rounding 0.1 of 10 layers would be a hair more than one.
    return max(1, math.ceil(round(share * num_layers, 9)))


def list_groups(pattern: str) -> list[range]:
    """Return, for each full layer, the layers that it serves: itself, and the shared ones behind it."""
    starts = [i for i, letter in enumerate(pattern) if letter == FULL]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(pattern)], strict=True)]


def find_pattern(choice: str | None, stored: str, key: str) -> str:
    """Return the pattern that a user chose for a model whose own pattern is `stored`: letters, or the directory of a search, or its
    config.json; None: the model's own. Raises: what `check_pattern` and `opd.models.weights.load_config` raise."""
    if choice is None:
        return stored
    if set(choice) <= set(KINDS):
        return check_pattern(choice, stored, key)
    path = Path(choice)
    directory = path.parent if path.name == CONFIG else path
    if not (directory / CONFIG).is_file():
        raise ConfigError.at(
            key,
            found=choice,
            wanted="a pattern such as FSSF, or a directory with a config.json, such as `opd indexers search` writes",
            fix=f"the model's own is {stored}",
        )
    from opd.models.weights import load_config

    config = load_config(directory)
    if config.model_type not in FAMILIES:
        raise ConfigError.at(
            key,
            found=f"a config of the family {config.model_type} in {directory}",
            wanted=f"one of the family {' or '.join(FAMILIES)}, which has a pattern",
            fix="give the directory of a search",
        )
    return check_pattern(read_pattern(config), stored, f"{key} {choice}")


def check_pattern(pattern: str, stored: str, key: str) -> str:
    """Return a pattern that fits a model whose own pattern is `stored`. Raises: ConfigError, which names `key`, if the letters or their
    number are wrong, the first layer is shared, or a layer without an indexer would be full."""
    if set(pattern) - {FULL, SHARED} or len(pattern) != len(stored):
        raise ConfigError.at(
            key,
            found=f"{pattern!r}, {len(pattern)} letters",
            wanted=f"{len(stored)} letters, one for each layer: F (chooses tokens) or S (takes the choice of the layer before)",
            fix=f"the model's own is {stored}",
        )
    if pattern[0] == SHARED:
        raise ConfigError.at(
            key,
            found="S for the first layer",
            wanted="F: there is no layer before it whose choice it could take",
            fix=f"begin with F: {FULL + pattern[1:]}",
        )
    lacking = [i for i, letters in enumerate(zip(pattern, stored, strict=True)) if letters == (FULL, SHARED)]
    if lacking:
        raise ConfigError.at(
            key,
            found=f"F for layer {lacking[0]}, counted from 0, which has no indexer in this model",
            wanted=f"F only where the model's own pattern has it: {stored}",
            fix="take the model before its indexers were dropped, or another pattern",
        )
    return pattern


def set_pattern(config: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the content of a config.json with another pattern, which transformers and vLLM read alike."""
    unchanged = {key: value for key, value in config.items() if key not in _SCHEDULE}
    return {**unchanged, "indexer_types": [KINDS[letter] for letter in pattern], "index_topk_pattern": pattern}
