"""Write a model whose layers share indexers: the files of another model, without the indexers that are not used any more."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experts.bound_files import TOKENIZER_FILES, matching_files
from experts.licences import FILES as LICENCE_FILES
from experts.safetensors_header import read_header
from experts.weight_files import weight_shards
from opd.files import atomic_write_text
from opd.indexers.patterns import SHARED, set_pattern
from opd.models.files import ModelFiles

_INDEXER = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.indexer\.(.+)$")
NOTHING: Mapping[int, Mapping[str, Any]] = MappingProxyType({})


def write_shared_model(
    source: Path, target: Path, pattern: str, indexers: Mapping[int, Mapping[str, Any]] = NOTHING
) -> None:
    """Write the model of `source` with another pattern into an empty directory. `indexers`: layer -> name -> tensor of those that are new.

    Layers behind the last of the pattern, which predict further tokens, keep theirs. Raises: OSError, StorageError.
    """
    _write_weights(source, target, pattern, indexers)
    config = set_pattern(json.loads((source / "config.json").read_text(encoding="utf-8")), pattern)
    atomic_write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
    for file in matching_files(source, (*TOKENIZER_FILES, *LICENCE_FILES)):
        shutil.copy(file, target / file.name)


def _write_weights(source: Path, target: Path, pattern: str, indexers: Mapping[int, Mapping[str, Any]]) -> None:
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = {shard: stack.enter_context(safe_open(shard, framework="pt")) for shard in weight_shards(source)}
        files = {
            name: opened[shard] for shard in opened for name in read_header(shard) if not _is_shared(name, pattern)
        }
        # Meta tensors have a shape and a dtype but no data: the files are divided up before any weight is read.
        shapes = {name: file.get_tensor(name).to("meta") for name, file in files.items()}
        written = stack.enter_context(ModelFiles(target, shapes))
        for name, file in files.items():
            tensor, match = file.get_tensor(name), _INDEXER.search(name)
            trained = indexers.get(int(match[1])) if match else None
            written.write({name: tensor if trained is None or not match else trained[match[2]].to(tensor.dtype)})
        written.finish()


def _is_shared(name: str, pattern: str) -> bool:
    """Return True for a tensor of the indexer of a layer that is shared now."""
    match = _INDEXER.search(name)
    return match is not None and int(match[1]) < len(pattern) and pattern[int(match[1])] == SHARED
