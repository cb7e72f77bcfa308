"""Families of models through the whole merge on the real engines; the table of all is docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families import FAMILIES
from tests.models.row import make_row

SHORT = ("DeepSeek-V3",)
"""Experts, and a router's bias in a buffer. Padding rows are in `test_padded.py`; the other families take an hour."""


@pytest.mark.parametrize("name", SHORT)
def test_a_family_merges_resumes_and_is_exported(name: str, tmp_path: Path) -> None:
    row = make_row(name, FAMILIES[name], tmp_path)
    assert (row.state, row.said) == ("works", [])
    assert row.resumed_alike is True and row.adapter == "scored"
    measured = (row.trainer_packing, row.probe_gap, row.export_transformers, row.export_vllm, *row.scorer_gaps.values())
    assert len(measured) == 6 and None not in measured


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SHORT])
def test_every_other_family_works_or_is_refused_before_a_worker_starts(name: str, tmp_path: Path) -> None:
    row = make_row(name, FAMILIES[name], tmp_path)
    assert row.state in ("works", "refused"), row.said
