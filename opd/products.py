"""Float32 matrix products by oneDNN, where MKL would compute them at half the speed.

On a CPU torch has MKL compute products of float32, and MKL uses AVX-512 on processors of its own maker alone. One core of an AMD EPYC
(Zen 5) computed 105 GFLOP/s with MKL and 230 with oneDNN (1,627 rows of 128 numbers by 344 columns). torch asks oneDNN only where it is told
that the products may be rounded to bfloat16; and oneDNN rounds them only for cores with AMX, because no others would gain. So it is told, and
then a product is looked at: it has to be as exact as one of MKL.
"""

from __future__ import annotations

import torch

from opd.processor import maker

INTEL = "GenuineIntel"
HIGHEST, LESS = "highest", "medium"
"""torch's names for MKL, which it uses by default, and for oneDNN, which may round."""
EXACT = 1e-5
"""Error of a float32 product, as a part of the sum of its terms without their signs. It is about 4e-7; that of bfloat16 is 4e-3."""


def use_quick_products(device: torch.device) -> bool:
    """Have this process compute float32 products by oneDNN if it computes on a CPU, MKL is slow there, and no digit is lost.

    Returns whether it does.
    """
    if device.type != "cpu" or maker() in ("", INTEL) or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(LESS)
    if product_error() > EXACT:
        torch.set_float32_matmul_precision(before)
        return False
    return True


def product_error() -> float:
    """The largest error of a float32 product as torch computes it now, measured like `EXACT`."""
    random = torch.Generator().manual_seed(0)
    a_M_K, b_N_K = (torch.randn(rows, 512, generator=random) for rows in (96, 128))
    wanted_M_N = a_M_K.double() @ b_N_K.double().T
    sum_M_N = a_M_K.double().abs() @ b_N_K.double().abs().T
    return float(((a_M_K @ b_N_K.T - wanted_M_N).abs() / sum_M_N).max())
