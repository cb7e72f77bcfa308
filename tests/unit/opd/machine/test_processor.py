"""Number types that the cores can compute with, read from files such as Linux shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.machine.processor import has_bf16, read_vendor, slow_bf16_warnings


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu fma avx avx2", False),
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("bogomips\t: 100", False),
    ],
)
def test_bfloat16_is_read_from_the_flags(tmp_path: Path, line: str, has: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n")
    assert has_bf16(cpuinfo) is has
    said = slow_bf16_warnings(["rollout.dtype", "trainer.dtype"], cpuinfo)
    assert len(said) == (0 if has else 1)
    assert has or said[0].startswith("rollout.dtype, trainer.dtype: ")


def test_no_file_is_no_bfloat16(tmp_path: Path) -> None:
    assert not has_bf16(tmp_path / "none")


def test_who_asks_for_float32_is_not_warned(tmp_path: Path) -> None:
    assert slow_bf16_warnings([], tmp_path / "none") == []


@pytest.mark.parametrize(
    ("line", "who"), [("vendor_id\t: AuthenticAMD", "AuthenticAMD"), ("CPU implementer\t: 0x41", "")]
)
def test_the_maker_is_read_where_it_stands(tmp_path: Path, line: str, who: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n")
    assert read_vendor(cpuinfo) == who
    assert read_vendor(tmp_path / "none") == ""
