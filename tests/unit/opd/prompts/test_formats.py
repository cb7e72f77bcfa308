"""The same rows are the same prompts, whatever they come in; broken ones are named by file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError
from opd.prompts import find_source, load_prompts, open_rows, read_prompt_lines
from opd.prompts.line import MAX_LINE_BYTES
from opd.prompts.readers import BATCH_ROWS

FORMATS = ["p.jsonl", "p.csv", "p.parquet", "saved", "splits", "files"]
TABLES = [name for name in FORMATS if name != "p.jsonl"]
ROWS: list[dict[str, Any]] = [
    {"prompt": "rev ab=", "answer": "ba"},
    {"prompt": 'two\r\nlines, "quoted" é \U0001f600 \u2028', "answer": "007", "metadata": {"a": 1}},
    {"prompt": " ", "answer": "NA"},
    {"prompt": "null", "answer": "None", "metadata": {"b": [None, {"c": 0.1}]}, "completion": "1e3"},
    {"prompt": "", "answer": "x"},
    {"prompt": "0012", "answer": "true", "completion": "é"},
    {"prompt": "rev ab=", "answer": "ba"},
]
CHAT: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"rev {i}"}], "answer": str(i)} for i in range(5)
] + [{"prompt": [{"role": "system", "content": "s", "name": "me"}, {"role": "user", "content": "é"}], "answer": "5"}]

WriteRows = Callable[[str, Any], Path]


def refusal(path: Path | PromptsConfig) -> str:
    with pytest.raises(PromptError) as error:
        open_rows(path)
    return str(error.value)


@pytest.mark.parametrize("name", TABLES)
def test_the_same_rows_are_the_same_prompts(name: str, write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    plain, other = write_rows("p.jsonl", ROWS), write_rows(name, ROWS)
    assert read_prompt_lines(other) == read_prompt_lines(plain)
    want, found = (load_prompts(path, "d", tiny_tokenizer) for path in (plain, other))
    assert list(found) == list(want)
    assert list(found.held_out(0.5)) == list(want.held_out(0.5)) and 0 < sum(want.held_out(0.5)) < len(ROWS)
    assert list(found.lengths) == [len(p.token_ids) for p in want]
    assert [p.id for p in found] == [f"d/{i}" for i in range(len(ROWS))]


def test_rows_are_as_they_were_written(write_rows: WriteRows) -> None:
    lines = read_prompt_lines(write_rows("p.jsonl", ROWS))
    assert [line.model_dump() for line in lines] == [
        {"completion": None, "answer": "", "metadata": {}} | row for row in ROWS
    ]


@pytest.mark.parametrize("name", ["p.parquet", "saved", "splits", "files"])
def test_chat_messages_come_from_lists(name: str, write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    plain, other = write_rows("p.jsonl", CHAT), write_rows(name, CHAT)
    assert read_prompt_lines(other) == read_prompt_lines(plain)
    assert list(load_prompts(other, "d", tiny_tokenizer)) == list(load_prompts(plain, "d", tiny_tokenizer))


def test_what_the_library_keeps_as_json_is_read_as_json(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a", "metadata": {"k": 1}}, {"prompt": "b", "metadata": {"z": [2]}}]
    saved = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "p.parquet")
    for path in ("saved", "p.parquet"):
        assert [line.metadata for line in read_prompt_lines(tmp_path / path)] == [{"k": 1}, {"z": [2]}]


def test_metadata_of_one_row_does_not_reach_another(tmp_path: Path) -> None:
    # The library's own JSON reader takes the columns of a block together.
    rows = [{"prompt": "p", "metadata": {f"k{i % 3}": i}} for i in range(3000)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [line.metadata for line in read_prompt_lines(path)] == [row["metadata"] for row in rows]


def test_names_with_special_signs_are_files(write_rows: WriteRows, tmp_path: Path) -> None:
    for name in ("p.csv", "p.parquet"):
        odd = write_rows(name, ROWS).rename(tmp_path / f"a [1]* {name}")
        assert len(open_rows(odd)) == len(ROWS)


@pytest.mark.parametrize("place", ["../files", "../link"])
def test_a_directory_may_be_reached_through_its_parent_or_a_link(
    place: str, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(write_rows("files", ROWS))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(read_prompt_lines(Path(place))) == len(ROWS)
    assert all(Path(shown).is_file() for shown in find_source(Path(place)).shown)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_a_null_of_a_message_is_a_key_that_it_does_not_have(name: str, write_rows: WriteRows) -> None:
    turn = {"role": "user", "content": "a", "name": None, "tool_calls": None}
    (line,) = read_prompt_lines(write_rows(name, [{"prompt": [turn]}]))
    assert line.prompt == [{"role": "user", "content": "a"}]


def test_a_csv_with_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes("\ufeffprompt,answer\r\na,é\r\n\r\nb,\r\n".encode())
    assert [(line.prompt, line.answer) for line in read_prompt_lines(path)] == [("a", "é"), ("b", "")]


# Refusals


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"prompt": None}, "column `prompt"),
        ({"prompt": "x", "answer": "a" * (8 << 20)}, "a row of 8,388,"),
        ({"prompt": "x", "metadata": [1]}, "column `metadata`"),
    ],
)
@pytest.mark.parametrize("name", ["p.parquet", "saved"])
def test_a_broken_row_of_a_table_is_named(name: str, row: dict[str, Any], word: str, write_rows: WriteRows) -> None:
    path = write_rows(name, [{"prompt": "a"}] * (BATCH_ROWS + 2) + [row])
    message = refusal(path)
    assert message.startswith(f"{path}, row {BATCH_ROWS + 3}\n")
    assert word in message
    assert all(f"\n  {part}" in message for part in ("found:  ", "wanted: a row with `prompt`", "fix:    "))


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"prompt": 3}], "column `prompt"),
        ([{"prompt": "a", "answer": [4]}], "column `answer`"),
        ([{"prompt": [{"from": "human", "value": "a"}]}], "message 1: the keys `from`, `value`"),
        ([{"prompt": [{"role": "user", "content": None}]}], "message 1: the keys `role`"),
        ([{"prompt": [{"role": "user", "content": 3}]}], "message 1: `content` is no text: 3"),
        ([{"prompt": ["a"]}], "message 1: 'a'"),
    ],
)
def test_the_refusals_are_those_of_jsonl(rows: Any, word: str, write_rows: WriteRows) -> None:
    path = write_rows("p.parquet", rows)
    assert refusal(path).startswith(f"{path}, row 1\n  found:  ")
    assert word in refusal(path)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_the_column_is_refused_by_its_columns(name: str, write_rows: WriteRows) -> None:
    path = write_rows(name, [{"question": "a", "id": "3"}] * 5)
    assert "no column `prompt`, but `question`, `id`" in refusal(path)
    assert "columns: {prompt: NAME}" in refusal(path)


def test_metadata_that_is_no_json_is_refused(tmp_path: Path, write_rows: WriteRows) -> None:
    path = tmp_path / "p.csv"
    path.write_text('prompt,metadata\na,"{""k"": 1}"\nb,{k: 1}\n')
    assert refusal(path).startswith(f"{path}, row 2\n  found:  column `metadata`: ")
    dates = tmp_path / "dates.parquet"
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"prompt": ["a"], "metadata": pa.array([{"d": 0}], pa.struct({"d": pa.date32()}))}), dates
    )
    assert "column `metadata`: Object of type date is not JSON" in refusal(dates)


def test_chat_messages_in_a_cell_of_text_are_refused(write_rows: WriteRows) -> None:
    path = write_rows("p.csv", [{"prompt": "[{"}, {"prompt": '[{"k": 1}]'}, {"prompt": CHAT[0]["prompt"]}])
    assert refusal(path).startswith(f"{path}, row 3\n  found:  column `prompt`: chat messages as JSON")


def test_files_that_are_not_what_their_ending_says_are_refused(tmp_path: Path) -> None:
    for content, name, word in (
        (b'{"prompt": "a"}\n', "p.parquet", "magic bytes"),
        (b"prompt,answer\na,b\nc,d,e\n", "p.csv", "line 3"),
        (b"prompt,answer\nrev aa, or bb=,aa\nc,d\n", "p.csv", "more cells in row 1"),
        (b"prompt,answer\na,b,\nc,d,\n", "p.csv", "more cells in row 1"),
        (b'prompt,answer\n"a,b\n', "p.csv", "EOF inside string"),
        (b'"prompt,answer\n' + b"a,b\n" * (MAX_LINE_BYTES // 4 + 1), "p.csv", "field larger than"),
        (b"", "p.csv", "no column `prompt`"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert refusal(path).startswith(str(path)) and word in refusal(path)
    path.write_bytes(b"prompt,answer\na,b\n\xff,c\n")
    assert refusal(path).startswith(f"{path}:3\n  found:  bytes that are not UTF-8")


def test_a_null_is_a_column_that_the_row_does_not_have(write_rows: WriteRows) -> None:
    row = {"prompt": "a", "answer": None, "completion": None, "metadata": None}
    lines = [read_prompt_lines(write_rows(name, [row, ROWS[0]])) for name in ("p.jsonl", "p.parquet")]
    assert [(one.prompt, one.answer) for one in lines[0]] == [(one.prompt, one.answer) for one in lines[1]]
    assert "column `prompt`" in refusal(write_rows("p.jsonl", [{"prompt": None, "answer": "b"}]))


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_a_table_without_rows_is_refused(name: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / name
    if name == "p.csv":
        path.write_text("prompt,answer\n")
    else:
        parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert refusal(path).startswith(f"{path}\n  found:  no prompts")


def test_a_saved_directory_that_is_damaged_is_refused(write_rows: WriteRows) -> None:
    path = write_rows("saved", ROWS)
    arrow = next(path.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "a file that cannot be read" in refusal(path)
    (path / "state.json").write_text("{}")
    assert "state.json\n  found:  KeyError" in refusal(path)


# What decides the content


@pytest.mark.parametrize("name", ["p.parquet", "saved", "files"])
def test_the_content_hash_changes_with_a_row(name: str, write_rows: WriteRows, tmp_path: Path) -> None:
    before = find_source(write_rows(name, ROWS)).content_hash()
    (tmp_path / "b").mkdir()
    (tmp_path / name).rename(tmp_path / "b" / name)
    assert find_source(tmp_path / "b" / name).content_hash() == before, "wherever it lies"
    again = find_source(write_rows(name, [*ROWS[:-1], {"prompt": "other", "answer": "ba"}])).content_hash()
    assert again != before
