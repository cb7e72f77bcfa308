"""Output heads of models. A `HeadSource` says where a head can be read; a `Head` has the matrix.

Between processes a head travels as a numpy array, because Ray's object store shares arrays without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from opd.models.files import weight_files
from opd.models.logit_rule import LogitRule

if TYPE_CHECKING:
    from opd.interfaces import HeadHandle


OWN_HEAD = "own"
"""Stands in place of a content hash for the student's own output head, which the trainer has."""


FileStamp = tuple[tuple[str, int, int, int], ...]
"""Path, inode, bytes and time of the last change [ns] of each file of a model."""


@dataclass(frozen=True, slots=True)
class Head:
    """An output head, and the scale and cap that its architecture puts on the logits."""

    weight_V_D: Tensor
    rule: LogitRule
    tables: Tensor | None = None
    """The head's tokens spelt in the student's, packed `opd.vocabularies.spelling.SpellingTables`; None for a head in the student's ids."""


@dataclass(frozen=True, slots=True)
class HeadFile:
    """Place of an output head on disk. A process that can read the directory need not ask a worker, which may be busy or dead."""

    model_dir: Path
    names: tuple[str, ...]
    """Names that the tensor may have; the first of them that the files have is read."""
    dtype: str
    """torch's name of the type to which the head is converted."""

    def stamp(self) -> FileStamp:
        """Return what tells the model's files from changed ones, without reading them."""
        paths = weight_files(self.model_dir) if self.model_dir.is_dir() else []
        facts = [(path, path.stat()) for path in paths]
        return tuple((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in facts)

    def read(self) -> Tensor | None:
        """Read the head [V, D]; None if this machine has no such file. It is memory-mapped if the files have it in `dtype`."""
        paths: dict[str, Path] = {}
        for path in weight_files(self.model_dir) if self.model_dir.is_dir() else []:
            with safe_open(path, framework="pt") as file:
                paths |= dict.fromkeys(set(self.names).intersection(file.keys()), path)
        name = next((name for name in self.names if name in paths), None)
        if name is None:
            return None
        with safe_open(paths[name], framework="pt") as file:
            return file.get_tensor(name).to(getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """Reference to a teacher's output head: a few hundred bytes, without the matrix."""

    key: str
    """Content hash by `head_key`; empty if there is no head."""
    rule: LogitRule
    file: HeadFile | None = None
    """File that may hold the matrix on this machine; it is tried first."""
    handle: HeadHandle | None = None
    """Handle to the matrix. None as long as the teacher's pool has not added one; a pool adds one before it hands the source on."""
    tables: HeadHandle | None = None
    """Handle to `Head.tables`; None for a head in the student's ids."""

    def read(self, hashed: dict[str, FileStamp] | None = None) -> Tensor:
        """Read the head [V, D] to the CPU: from the teacher's files if this machine has them unchanged, else through the handle.

        `hashed`: key -> the files that had this head when this process hashed it. A head is hashed again only if they have changed
        since; new entries are added.
        """
        stamp = self.file.stamp() if self.file is not None else ()
        head_V_D = self.file.read() if self.file is not None else None
        if head_V_D is not None:
            known = hashed is not None and hashed.get(self.key) == stamp
            if known or head_key(head_V_D, self.rule) == self.key:
                if hashed is not None:
                    hashed[self.key] = stamp
                return head_V_D
        assert self.handle is not None, "the pool gives every head a handle"
        return head_tensor(self.handle.fetch())

    def read_tables(self) -> Tensor | None:
        """Return `Head.tables`, on the CPU."""
        return None if self.tables is None else torch.from_numpy(self.tables.fetch().copy())


def logit_rule(config: Any) -> LogitRule:
    """Return the logit rule of a transformers config: Gemma and RecurrentGemma cap the logits, Cohere multiplies them, Granite divides
    them."""
    config = config.get_text_config(decoder=True)  # a model that also sees or hears has several configs
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    caps = (getattr(config, key, None) for key in ("final_logit_softcapping", "logits_soft_cap"))
    return LogitRule(scale=scale, softcap=next((cap for cap in caps if cap is not None), None))


def head_key(head_V_D: Tensor, rule: LogitRule, tables: np.ndarray | None = None) -> str:
    """Return the content hash of a head: BLAKE3 of its type, shape, logit rule, bytes and packed tables. Equal heads have equal keys."""
    digest = blake3(str((head_V_D.dtype, tuple(head_V_D.shape), rule)).encode())
    digest.update(head_V_D.contiguous().view(torch.uint8).numpy().data)
    if tables is not None:
        digest.update(tables.tobytes())
    return digest.hexdigest()


def head_tensor(raw: np.ndarray) -> Tensor:
    """Convert an array of `head_array` back to a tensor; int16 stands for bfloat16, which numpy lacks."""
    tensor = torch.from_numpy(raw.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def head_array(tensor: Tensor) -> np.ndarray:
    """Convert a head to numpy; the inverse of `head_tensor`."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
