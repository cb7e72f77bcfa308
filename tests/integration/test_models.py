"""Families of models through the whole merge on the real engines; the table of all is docs/models.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import row as models_row
from tests.models.families import FAMILIES
from tests.models.row import make_row

SHORT = ("DeepSeek-V3",)
"""Experts, and a router's bias in a buffer; the other families take an hour."""
PADDED = 140
"""Rows of the head and the embedding, of which the tokenizer knows 76."""


@pytest.mark.parametrize("name", SHORT)
def test_a_family_merges_and_is_exported(name: str, tmp_path: Path) -> None:
    """With padding rows, and without a resume, which `test_merge.py` has; the table of all families resumes each."""
    row = make_row(name, replace(FAMILIES[name], rows=PADDED), tmp_path, resumes=False)
    assert (row.state, row.said) == ("works", [])
    assert row.adapter == "scored"
    measured = (row.trainer_packing, row.probe_gap, row.export_transformers, row.export_vllm, *row.scorer_gaps.values())
    assert len(measured) == 6 and None not in measured


@pytest.mark.slow
def test_a_student_with_sparse_attention_is_rolled_out_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build has no sparse attention. Ten steps, then the last five once more."""
    monkeypatch.setattr(models_row, "STEPS", 10)
    monkeypatch.setattr(models_row, "RESUME_FROM", 5)
    row = make_row("glm_moe_dsa", FAMILIES["glm_moe_dsa"], tmp_path)
    assert (row.state, row.said, row.resumed_alike) == ("works", [], True)
    measured = (row.trainer_packing, row.probe_gap, row.export_transformers, row.export_vllm, *row.scorer_gaps.values())
    assert None not in measured and max(measured) < 1e-4, "engine, trainer, scorer and export compute the same"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_works_or_is_refused_before_a_worker_starts(name: str, tmp_path: Path) -> None:
    row = make_row(name, FAMILIES[name], tmp_path)
    assert row.state in ("works", "refused") and row.resumed_alike is not False, row.said
