"""Output heads: a `HeadSource` describes a head that may have to be fetched, and reading it gives the matrix of a `Head`.

On the wire a head is a numpy array, so that the object store shares it without a copy.
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
"""In place of a content hash: the student's own output head, which the trainer has."""


@dataclass(frozen=True, slots=True)
class Head:
    """An output head and what its architecture does to the logits."""

    weight_V_D: Tensor
    rule: LogitRule


@dataclass(frozen=True, slots=True)
class HeadFile:
    """Location of an output head on disk: a process that has the directory need not ask a worker, which may be busy or dead."""

    model_dir: Path
    names: tuple[str, ...]
    """Names that the tensor may have; the first that is in the files counts."""
    dtype: str

    def read(self) -> Tensor | None:
        """Read [V, D], memory-mapped if it has the wanted type already; None if this machine has no such file."""
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
    """`head_key` of the matrix and its rule; empty if there is no head."""
    rule: LogitRule
    file: HeadFile | None = None
    """File that may have the matrix on this machine; it is tried first."""
    handle: HeadHandle | None = None
    """Handle to the matrix; None as long as only the teacher's own worker has it."""

    def read(self) -> Tensor:
        """Read [V, D] to the CPU: from the teacher's files if they are on this machine and unchanged, else through the handle."""
        head_V_D = self.file.read() if self.file is not None else None
        if head_V_D is not None and head_key(head_V_D, self.rule) == self.key:
            return head_V_D
        assert self.handle is not None, "the pool gives every head a handle"
        return head_tensor(self.handle.fetch())


def logit_rule(config: Any) -> LogitRule:
    """Return the logit rule of a transformers config: Gemma's cap, Cohere's factor, Granite's divisor."""
    config = config.get_text_config(decoder=True)  # of a model that also sees or hears, the part that writes
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def head_key(head_V_D: Tensor, rule: LogitRule) -> str:
    """Return BLAKE3 of a head's type, shape, logit rule and bytes: equal heads have one key."""
    digest = blake3(str((head_V_D.dtype, tuple(head_V_D.shape), rule)).encode())
    digest.update(head_V_D.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def head_tensor(raw: np.ndarray) -> Tensor:
    """Convert a head that travelled as numpy back to a tensor; int16 stands for bfloat16, which numpy lacks."""
    tensor = torch.from_numpy(raw.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def head_array(tensor: Tensor) -> np.ndarray:
    """Convert a head to numpy; the inverse of `head_tensor`."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
