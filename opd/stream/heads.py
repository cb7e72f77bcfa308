"""Output heads on the wire: numpy arrays, so that the object store shares them without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from opd.losses.blocks import LogitRule


@dataclass(frozen=True, slots=True)
class Head:
    """An output head and what its architecture does to the logits."""

    weight_V_D: Tensor
    rule: LogitRule


@dataclass(frozen=True, slots=True)
class HeadFile:
    """Where an output head lies on disk: whoever finds the directory need not ask a worker, which may be busy or dead."""

    model_dir: Path
    names: tuple[str, ...]
    """Of the tensor; the first that the files have."""
    dtype: str

    def read(self) -> Tensor | None:
        """[V, D], mapped where it has the type already; None if this machine has no such file."""
        for path in sorted(self.model_dir.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                known = set(file.keys())
                for name in self.names:
                    if name in known:
                        return file.get_tensor(name).to(getattr(torch, self.dtype))
        return None


def logit_rule(config: Any) -> LogitRule:
    """What a transformers config says about its logits: Gemma's cap, Cohere's factor, Granite's divisor."""
    config = config.get_text_config(decoder=True)  # of a model that also sees or hears, the part that writes
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def head_key(head_V_D: Tensor, rule: LogitRule) -> str:
    """BLAKE3 of a head's type, shape, logit rule and bytes: equal heads have one key."""
    digest = blake3(str((head_V_D.dtype, tuple(head_V_D.shape), rule)).encode())
    digest.update(head_V_D.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def head_tensor(raw: np.ndarray) -> Tensor:
    """A head that travelled as numpy (bfloat16 as int16 bits, which numpy lacks) back as a tensor."""
    tensor = torch.from_numpy(raw.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def head_array(tensor: Tensor) -> np.ndarray:
    """Inverse of `head_tensor`."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
