"""The same rows in every format that prompts may come in."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = Sequence[Mapping[str, Any]]


def as_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_csv(path: Path, rows: Rows) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([_cell(row.get(name, "")) for name in names] for row in rows)
    return path


def as_parquet(path: Path, rows: Rows) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_json_if_metadata(name, row.get(name)) for row in rows] for name in names}
    parquet.write_table(pa.table(columns), path, row_group_size=3)
    return path


def as_saved(path: Path, rows: Rows) -> Path:
    import datasets

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_json_if_metadata(name, row.get(name)) for row in rows] for name in names}
    datasets.Dataset.from_dict(columns).save_to_disk(path, num_shards=2)
    return path


def as_splits(path: Path, rows: Rows) -> Path:
    import datasets

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_json_if_metadata(name, row.get(name)) for row in rows] for name in names}
    other = datasets.Dataset.from_dict({"prompt": ["another split"]})
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns), "test": other}).save_to_disk(path)
    return path


def as_data_files(path: Path, rows: Rows) -> Path:
    (path / "data").mkdir(parents=True)
    as_parquet(path / "data" / "train-00000-of-00002.parquet", rows[:4])
    as_parquet(path / "data" / "train-00001-of-00002.parquet", rows[4:])
    as_parquet(path / "data" / "test-00000-of-00001.parquet", [{"prompt": "another split"}])
    return path


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _json_if_metadata(name: str, value: Any) -> Any:
    return json.dumps(value) if name == "metadata" and value is not None else value


WRITERS: dict[str, Callable[[Path, Rows], Path]] = {
    "p.jsonl": as_jsonl,
    "p.csv": as_csv,
    "p.parquet": as_parquet,
    "saved": as_saved,
    "splits": as_splits,
    "files": as_data_files,
}
"""By the name that the file or directory must have."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Rows], Path]:
    """`write_rows(name, rows)`: the rows in the format that goes with the name."""
    return lambda name, rows: WRITERS[name](tmp_path / name, rows)
