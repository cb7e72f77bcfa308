"""Split, columns, filter, shuffle, limit and longest prompt, as a pipeline maps them; and where a path may lead."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError
from opd.prompts import find_source, is_hub_name, load_prompts, open_rows, read_prompt_lines

WriteRows = Callable[[str, Any], Path]
ROWS = [{"question": f"q{i}", "solution": str(i), "level": i % 3, "hard": i % 2 == 1} for i in range(12)]
COLUMNS = {"prompt": "question", "answer": "solution"}
FORMATS = ["p.jsonl", "p.csv", "p.parquet", "saved", "splits"]


def texts(**mapping: Any) -> list[Any]:
    return [line.prompt for line in open_rows(PromptsConfig(**mapping))]


def refusal(**mapping: Any) -> str:
    with pytest.raises(PromptError) as error:
        open_rows(PromptsConfig(**mapping))
    return str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_read_by_their_own_names(name: str, write_rows: WriteRows) -> None:
    path = write_rows(name, ROWS)
    lines = list(open_rows(PromptsConfig(path=path, columns=COLUMNS)))
    assert [(line.prompt, line.answer) for line in lines] == [(f"q{i}", str(i)) for i in range(12)]
    for columns, word in (({**COLUMNS, "answer": "x"}, "column `x`"), ({"prompt": "x"}, "no column `x`")):
        assert word in refusal(path=path, columns=columns)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_kept_by_a_value(name: str, write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    mapping = {"path": write_rows(name, ROWS), "columns": COLUMNS}
    assert texts(**mapping, filter={"column": "level", "equals": 2}) == ["q2", "q5", "q8", "q11"]
    assert texts(**mapping, filter={"column": "solution", "one_of": ["7", "3"]}) == ["q3", "q7"]
    config = PromptsConfig(**mapping, filter={"column": "level", "equals": 1}, limit=2)
    assert [p.id for p in load_prompts(config, "d", tiny_tokenizer)] == ["d/1", "d/4"], "ids are numbers in the source"
    message = refusal(**mapping, filter={"column": "level", "equals": 3})
    assert "no prompts: of 12 rows none has 3 in the column `level`" in message
    if name != "p.csv":
        assert texts(**mapping, filter={"column": "hard", "equals": True}) == [f"q{i}" for i in range(1, 12, 2)]
        assert "none has 1 in" in refusal(**mapping, filter={"column": "hard", "equals": 1}), "true is not 1"


def test_a_row_that_the_filter_leaves_out_may_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": 3, "level": 1}\n{"prompt": "a", "level": 2}\n[1]\n')
    assert texts(path=path, filter={"column": "level", "equals": 2}) == ["a"]
    assert refusal(path=path).startswith(f"{path}:1\n")


def test_a_shuffle_is_the_same_everywhere_and_the_limit_comes_after_it(write_rows: WriteRows) -> None:
    path = write_rows("p.jsonl", ROWS)
    shuffled = texts(path=path, columns=COLUMNS, shuffle_seed=7)
    order = list(range(12))
    random.Random("opd prompts 7").shuffle(order)
    assert shuffled == [f"q{i}" for i in order]
    assert texts(path=path, columns=COLUMNS, shuffle_seed=7, limit=5) == shuffled[:5]
    assert texts(path=path, columns=COLUMNS, shuffle_seed=8) != shuffled
    assert texts(path=path, columns=COLUMNS, limit=5) == [f"q{i}" for i in range(5)]


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    assert texts(path=path, limit=2) == ["a", "b"]
    assert refusal(path=path, limit=3).startswith(f"{path}:3\n")


def test_a_split_is_named_or_the_only_one(write_rows: WriteRows, tmp_path: Path) -> None:
    import datasets

    for name in ("splits", "files"):
        path = write_rows(name, [{"prompt": str(i)} for i in range(6)])
        assert texts(path=path) == texts(path=path, split="train") == [str(i) for i in range(6)]
        assert texts(path=path, split="test") == ["another split"]
        assert find_source(PromptsConfig(path=path, split="test")).label == f"{path} (split test)"
        message = refusal(path=path, split="validation")
        assert "the splits " in message and "wanted: a split `validation`" in message
    datasets.DatasetDict({"only": datasets.Dataset.from_dict({"prompt": ["a"]})}).save_to_disk(tmp_path / "one")
    assert texts(path=tmp_path / "one") == ["a"]
    assert "which has no splits" in refusal(path=write_rows("p.jsonl", ROWS), split="test")


# The hub


class Hub:
    """A hub data set of two files as `datasets` handles it, without a network."""

    def __init__(self, files: dict[str, Path], reader: str = "parquet") -> None:
        self.files, self.reader = files, reader
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset_builder(self, path: str, name: str | None, revision: str | None) -> Any:
        self.asked.append((path, name, revision))
        config = SimpleNamespace(data_files={"train": list(self.files)})
        return SimpleNamespace(name=self.reader, config=config)

    def DownloadManager(self) -> Any:
        return SimpleNamespace(download=lambda names: [str(self.files[name]) for name in names])


@pytest.fixture
def hub(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import datasets

    fake = Hub({"hf://datasets/owner/name@abc/data/p.parquet": write_rows("p.parquet", ROWS)})
    monkeypatch.setattr(datasets, "load_dataset_builder", fake.load_dataset_builder)
    monkeypatch.setattr(datasets, "DownloadManager", fake.DownloadManager)
    return fake


def test_a_hub_data_set_is_read_as_its_files_are(hub: Hub) -> None:
    mapping = {"path": "owner/name", "name": "main", "revision": "abc", "columns": COLUMNS}
    assert texts(**mapping, limit=2) == ["q0", "q1"]
    assert hub.asked == [("owner/name", "main", "abc")]
    assert (
        find_source(PromptsConfig(**mapping)).content_hash()
        == find_source(next(iter(hub.files.values()))).content_hash()
    )
    assert "data/p.parquet\n  found:  no column `prompt`" in refusal(path="owner/name")


def test_a_reader_that_could_unpickle_is_refused(hub: Hub) -> None:
    hub.reader = "pandas"
    assert "its reader `pandas`" in refusal(path="owner/name")


def test_files_of_somebody_else_are_refused(hub: Hub) -> None:
    hub.files = {"https://elsewhere.example/p.parquet": Path("p.parquet")}
    assert "names https://elsewhere.example/p.parquet" in refusal(path="owner/name")


def test_only_a_mapping_names_the_hub_and_only_where_nothing_is_here(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(PromptsConfig(path="owner/name"))
    for path in ("name", "a/b/c", "./owner/name/x", "/owner/name", "owner/p.jsonl", "../name"):
        assert not is_hub_name(PromptsConfig(path=path)), path
    assert not is_hub_name(Path("owner/name"))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text(json.dumps({"prompt": "here"}))
    assert texts(path="owner/name") == ["here"]


def test_without_a_network_the_way_out_is_told(monkeypatch: Any) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    message = refusal(path="owner/name")
    assert message.startswith("prompts: owner/name\n  found:  Couldn't reach")
    assert "hf download owner/name --repo-type dataset --local-dir DIR" in message


def test_without_the_library_jsonl_is_read_and_the_rest_refused(write_rows: WriteRows, monkeypatch: Any) -> None:
    from opd.prompts import sources

    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert len(read_prompt_lines(write_rows("p.jsonl", [{"prompt": "a"}]))) == 1
    with pytest.raises(PromptError, match=r"pip install 'opd-merge\[engines\]'"):
        open_rows(write_rows("p.parquet", [{"prompt": "a"}]))
