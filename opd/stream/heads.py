"""Output heads on the wire: numpy arrays, so that the object store shares them without a copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def head_tensor(raw: np.ndarray) -> Tensor:
    """A head that travelled as numpy (bfloat16 as int16 bits, which numpy lacks) back as a tensor."""
    tensor = torch.from_numpy(raw.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def head_array(tensor: Tensor) -> np.ndarray:
    """Inverse of `head_tensor`."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
