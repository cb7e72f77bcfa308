"""Rollouts that the student wrote ahead of their step. They are on disk as soon as they are written.

    targets/written-000013/  written.arrow  written.json

`written.arrow` has the rollouts in order. `written.json` has the request to which they belong (step, policy version, prompts), the
prompts that were refused, the counts of episodes, and BLAKE3 and size of each file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from opd.files import blake3_file, raise_storage_errors, replace_dir
from opd.records.episodes import EpisodeStats
from opd.records.types import Prompt, QuarantinedPrompt, RolloutBatch
from opd.stream.rollouts import RolloutError, read_file, write_file

MANIFEST = "written.json"
ROLLOUTS = "written.arrow"
FILES = (ROLLOUTS, MANIFEST)
FORMAT = 2
"""Number of the files' format. Format 1 had no `origin`, `parent` and `next` of a rollout."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RolloutError)
"""Errors that reading raises if files were damaged or changed."""


class WrittenRollouts:
    """Stores and reads the rollouts of steps that have not begun; each step has a directory in `root`."""

    def __init__(self, root: Path, vocab_size: int, say: Callable[[str], None]) -> None:
        """Keep the settings. `say` is called with a line about stored rollouts that cannot be used."""
        self._root = root
        self._vocab_size = vocab_size
        self._say = say

    def store_rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        """Store a step's rollouts, all or none. Raises: StorageError."""
        raw = memoryview(write_file(batch.rollouts))
        manifest = {
            **describe_request(FORMAT, step, policy_version, prompts),
            **make_manifest_entries(batch),
            "files": {ROLLOUTS: describe_file(raw)},
        }
        self._store_files(step, {ROLLOUTS: raw, MANIFEST: json.dumps(manifest).encode()})

    def read(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch | None:
        """Return the rollouts as they were stored; None if there are none, they are damaged, or belong to another request."""
        path = self._step_path(step)
        if not path.exists():
            return None
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            refuse_other_request(manifest, describe_request(FORMAT, step, policy_version, prompts), MANIFEST)
            raw = read_verified(path / ROLLOUTS, manifest["files"][ROLLOUTS])
            return read_batch(raw, manifest, self._vocab_size)
        except UNREADABLE as error:
            self._say(f"warning: step {step} is rolled out again, what was written ahead cannot be used: {error}")
            return None

    def read_files(self, step: int) -> dict[str, bytes]:
        """Return name -> content of the step's files; empty if there are none."""
        return _whole_files(self._step_path(step))

    def bring_back(self, step: int, directory: Path) -> None:
        """Copy the files of `read_files` from a directory back into the log, if it has them. Raises: StorageError."""
        if (directory / MANIFEST).exists():
            self._store_files(step, _whole_files(directory))

    def delete_steps(self, unwanted: Callable[[int], bool]) -> None:
        """Delete the rollouts of all steps for which `unwanted` returns True."""
        for path in self._root.glob("written-*"):
            number = path.name.removeprefix("written-")
            if number.isdigit() and unwanted(int(number)):
                shutil.rmtree(path)

    def _store_files(self, step: int, files: Mapping[str, bytes | memoryview]) -> None:
        final = self._step_path(step)
        temporary = final.with_name(f".tmp-{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with raise_storage_errors(temporary):
                temporary.mkdir(parents=True)
                for name, content in files.items():
                    (temporary / name).write_bytes(content)
                replace_dir(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room

    def _step_path(self, step: int) -> Path:
        return self._root / f"written-{step:06d}"


def _whole_files(directory: Path) -> dict[str, bytes]:
    """Return name -> content of those of `FILES` that the directory has."""
    paths = (directory / name for name in FILES)
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def make_manifest_entries(batch: RolloutBatch) -> dict[str, Any]:
    """Return a manifest's entries about a batch beside the file of its rollouts. `RolloutBatch.restarted` is not stored."""
    return {
        "refused": [asdict(q) for q in batch.quarantined],
        "episodes": {domain: asdict(stats) for domain, stats in batch.episodes.items()},
    }


def read_batch(raw: np.ndarray, manifest: Mapping[str, Any], vocab_size: int) -> RolloutBatch:
    """Make the batch from the bytes of its rollouts' file, and its manifest's entries of `make_manifest_entries`.

    Raises: KeyError, TypeError or RolloutError if anything was damaged or changed.
    """
    return RolloutBatch(
        rollouts=tuple(read_file(pa.py_buffer(raw), vocab_size)),
        quarantined=tuple(QuarantinedPrompt(**data) for data in manifest["refused"]),
        episodes={domain: EpisodeStats.from_json(data) for domain, data in manifest.get("episodes", {}).items()},
    )


def describe_request(form: int, step: int, policy_version: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return a manifest's entries about the request to which stored rollouts belong.

    These are the format `form`, the step, the policy version, and a hash of the prompts' ids, domains and tokens.
    """
    encoded = json.dumps([[p.id, p.domain, list(p.token_ids)] for p in prompts]).encode()
    return {"format": form, "step": step, "policy_version": policy_version, "prompts": blake3(encoded).hexdigest()}


def refuse_other_request(manifest: Mapping[str, Any], request: Mapping[str, Any], file_name: str) -> None:
    """Refuse files that belong to another request than `request`, the result of `describe_request`.

    Raises: ValueError that names the first key that differs; KeyError if the manifest lacks a key.
    """
    for key, expected in request.items():
        if manifest[key] != expected:
            raise ValueError(f"{file_name}: {key} is {manifest[key]}, wanted {expected}")


def describe_file(raw: memoryview) -> dict[str, Any]:
    """Return a manifest's entry about a file."""
    return {"blake3": blake3(raw).hexdigest(), "bytes": raw.nbytes}


def read_verified(path: Path, facts: Mapping[str, Any]) -> np.ndarray:
    """Read a file, and compare it with `facts`, its entry in the manifest. Raises: ValueError if it differs; OSError."""
    verify_file(path, facts)
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def verify_file(path: Path, facts: Mapping[str, Any]) -> None:
    """Compare a file with `facts`, its entry in the manifest, without keeping its bytes. Raises: ValueError if it differs; OSError."""
    nbytes = path.stat().st_size
    if nbytes != facts["bytes"]:
        raise ValueError(f"{path.name}: {nbytes} bytes, wanted {facts['bytes']}")
    if {"blake3": blake3_file(path), "bytes": nbytes} != dict(facts):
        raise ValueError(f"{path.name}: its bytes were changed")
