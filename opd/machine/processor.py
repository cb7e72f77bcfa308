"""What this machine's cores can compute with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls the instructions that multiply in bfloat16, on x86_64 and on aarch64."""
_KEYS = ("flags", "Features")
"""Beginnings of the lines of /proc/cpuinfo that name them."""


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the cores multiply in bfloat16. Without it torch converts number by number: one core with AVX2 alone gave 0.6
    GFLOP/s in bfloat16 and 69 in float32 (matrices of 1,024)."""
    return not BF16_FLAGS.isdisjoint(_find_cpuinfo_line(cpuinfo, _KEYS).split())


def read_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's vendor, as an x86_64 one says: `GenuineIntel`, `AuthenticAMD`; empty where Linux does not say."""
    return _find_cpuinfo_line(cpuinfo, ("vendor_id",)).partition(":")[2].strip()


def slow_bf16_warnings(keys: Sequence[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return a warning if `keys`, settings that ask for bfloat16 on these cores, make them crawl; empty if there is none."""
    if not keys or has_bf16(cpuinfo):
        return []
    return [
        f"{', '.join(keys)}: these cores have no instructions for bfloat16, so it may take a hundred times as long as "
        "float32: use float32 here"
    ]


def _find_cpuinfo_line(cpuinfo: Path, beginnings: tuple[str, ...]) -> str:
    """Return the first line that begins so; empty if there is none, or no file."""
    if not cpuinfo.is_file():
        return ""
    return next((line for line in cpuinfo.read_text().splitlines() if line.startswith(beginnings)), "")
