"""The files of a model directory that decide, besides the weights, what the model computes and how text becomes tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from opd.files import blake3_file

CONFIG_FILES = ("config.json",)
"""Files that a forward pass depends on."""

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
"""Files that decide how text becomes tokens, and which tokens end a response. A merged model gets its student's."""

STUDENT_FILES = (*CONFIG_FILES, *TOKENIZER_FILES)
"""The files of a student that matter, and of an expert that reads tokens of its own. Of other experts only `CONFIG_FILES` matter,
because they score, and answer their exams, with the student's tokenizer, chat template and end tokens. Their own vocabulary and end tokens
are compared with the student's at every start.
"""


def matching_files(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the directory's files that match one of the patterns, sorted by name; no subdirectories. Raises: OSError."""
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def file_hashes(path: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return name -> BLAKE3 of the directory's files that match. Raises: OSError."""
    return {file.name: blake3_file(file) for file in matching_files(path, patterns)}


def model_digest(path: Path, weight_files: Mapping[str, str], adapter_files: Mapping[str, str] | None = None) -> str:
    """Return the digest of a model: of its config.json, and of the hashes of its weight files and of an adapter's files.

    Raises: OSError.
    """
    digest = blake3((path / "config.json").read_bytes())
    digest.update(json.dumps(sorted(weight_files.values())).encode())
    if adapter_files is not None:
        digest.update(json.dumps(sorted(adapter_files.items())).encode())
    return digest.hexdigest()
