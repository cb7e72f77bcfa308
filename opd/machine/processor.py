"""Instructions that this machine's cores have for bfloat16, and the cores' vendor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names of the instructions that multiply in bfloat16, on x86_64 and on aarch64."""
_FLAG_LINES = ("flags", "Features")
"""Beginnings of the line of /proc/cpuinfo that lists instructions, on x86_64 and on aarch64."""


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the cores can multiply in bfloat16.

    If they cannot, torch converts each number: a core with AVX2 only reached 0.6 GFLOP/s in bfloat16 and 69 in float32
    (matrices of 1,024 x 1,024).
    """
    return not BF16_FLAGS.isdisjoint(_find_cpuinfo_line(cpuinfo, _FLAG_LINES).split())


def read_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's vendor, such as `GenuineIntel` or `AuthenticAMD`; empty where Linux does not say, as on aarch64."""
    return _find_cpuinfo_line(cpuinfo, ("vendor_id",)).partition(":")[2].strip()


def slow_bf16_warnings(keys: Sequence[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return a warning if these cores are slow in bfloat16. `keys`: the settings that ask for bfloat16 on them.

    The list is empty if `keys` is, or if the cores can multiply in bfloat16.
    """
    if not keys or has_bf16(cpuinfo):
        return []
    return [
        f"{', '.join(keys)}: these cores have no instructions for bfloat16, so it may take a hundred times as long as "
        "float32: use float32 here"
    ]


def _find_cpuinfo_line(cpuinfo: Path, beginnings: tuple[str, ...]) -> str:
    """Return the first line with one of these beginnings; empty if there is none, or no such file."""
    if not cpuinfo.is_file():
        return ""
    return next((line for line in cpuinfo.read_text().splitlines() if line.startswith(beginnings)), "")
