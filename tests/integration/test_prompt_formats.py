"""The same prompts as JSONL, CSV and Parquet are one merge, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from tests.integration.test_merge import opd, records, write

FORMATS = ("jsonl", "csv", "parquet")


def as_format(jsonl: str, suffix: str) -> str:
    """A file with the rows of a JSONL file, beside it."""
    path = Path(jsonl)
    table = pa.Table.from_pylist([json.loads(line) for line in path.read_text().splitlines()])
    new = path.with_suffix(f".{suffix}")
    if suffix == "csv":
        pyarrow.csv.write_csv(table, new)
    elif suffix == "parquet":
        pyarrow.parquet.write_table(table, new)
    return str(new)


@pytest.mark.slow  # three merges; tests/unit/opd/prompts holds the three files against each other
def test_the_same_rows_in_three_formats_are_the_same_merge(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    import torch

    pipeline["trainer"]["steps"] = 3
    files = {name: (d["prompts"], d["eval"]["prompts"]) for name, d in pipeline["domains"].items()}
    weights, losses = [], []
    for suffix in FORMATS:
        for name, (prompts, exam) in files.items():
            pipeline["domains"][name]["prompts"] = as_format(prompts, suffix)
            pipeline["domains"][name]["eval"]["prompts"] = as_format(exam, suffix)
        run = tmp_path / suffix
        done = opd("merge", write(tmp_path, pipeline), "--run-dir", run, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        weights.append(load_file(run / "model" / "model.safetensors"))
        losses.append([(r["loss"], r["grad_norm"]) for r in records(run)])
    assert losses[0] == losses[1] == losses[2]
    for other in weights[1:]:
        assert set(other) == set(weights[0])
        assert all(torch.equal(weights[0][name], other[name]) for name in other)
