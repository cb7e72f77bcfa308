"""The same rows are the same prompts, whatever they come in; broken ones are named by file and row."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError
from opd.prompts import find_source, load_prompts, open_rows, read_prompt_lines, readers
from opd.prompts.line import MAX_LINE_BYTES
from opd.prompts.readers import BATCH_ROWS
from opd.prompts.rows import refuse_wrong_start

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
    empty = {"completion": None, "answer": "", "metadata": {}, "tools": [], "chat_template_kwargs": {}, "more": {}}
    assert [line.model_dump() for line in lines] == [empty | row for row in ROWS]


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


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_whole_numbers_of_a_column_with_empty_cells_stay_whole(name: str, tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame({"prompt": list("abcd"), "answer": [2, None, -3.0, 0.5]})
    path = tmp_path / name
    frame.to_parquet(path) if name == "p.parquet" else frame.to_json(path, orient="records", lines=True)
    assert [line.answer for line in read_prompt_lines(path)] == ["2", "", "-3", "0.5"]


def test_what_is_no_number_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": NaN, "metadata": NaN}\n')
    (line,) = read_prompt_lines(path)
    assert (line.answer, line.metadata) == ("", {})
    path.write_text('{"prompt": "a", "answer": Infinity}\n')
    assert "column `answer`: inf" in refusal(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.parquet", "saved"])
@pytest.mark.parametrize("column", ["prompt", "completion", "answer"])
def test_a_text_with_nul_is_refused(name: str, column: str, write_rows: WriteRows) -> None:
    path = write_rows(name, [{"prompt": "a", "answer": "b"}, {"prompt": "c", column: "a\0b"}])
    assert f"column `{column}`: a text with the character NUL" in refusal(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table, csv, lines = (tmp_path / f"p.{kind}" for kind in ("parquet", "csv", "jsonl"))
    csv.write_text("prompt,prompt\na,b\n")
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), table)
    for path in (csv, table):
        assert refusal(path).startswith(f"{path}\n  found:  2 columns with the name `prompt`")
    lines.write_text('{"prompt": "a", "prompt": "b"}\n')
    assert refusal(lines).startswith(f"{lines}:1\n") and "the key `prompt` is given twice" in refusal(lines)
    csv.write_text("prompt,id,id\na,1,2\n")
    assert [line.prompt for line in read_prompt_lines(csv)] == ["a"], "columns that nobody reads may be there twice"


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_row_by_row(indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "ARRAY_CHARACTERS", 7)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(ROWS, indent=indent, ensure_ascii=False))
    assert [line.prompt for line in read_prompt_lines(path)] == [row["prompt"] for row in ROWS]
    path.write_text("[]")
    assert refusal(path).startswith(f"{path}\n  found:  no prompts")


@pytest.mark.parametrize(
    ("text", "row", "word"),
    [
        ('[{"prompt": "a"}, {"answer": "b"}]', 2, "no column `prompt`"),
        ('[{"prompt": "a"}, {"prompt": ', 2, "JSON that cannot be read"),
        ('[{"prompt": "a"}', 2, "JSON that cannot be read"),
        ('[{"prompt": "' + "a" * (MAX_LINE_BYTES + 1) + '"}]', 1, "8,388,6"),
    ],
)
def test_a_broken_row_of_an_array_is_named(text: str, row: int, word: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    assert refusal(path).startswith(f"{path}, row {row}\n") and word in refusal(path)


def test_an_object_over_several_lines_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(ROWS[0], indent=2))
    assert "jq -c . OLD.json > NEW.jsonl" in refusal(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.json"])
def test_a_file_that_gzip_packed_is_read(name: str, write_rows: WriteRows, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(ROWS))
    plain = tmp_path / name if name == "p.json" else write_rows(name, ROWS)
    packed = tmp_path / "in" / f"{name}.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    refuse_wrong_start(packed)
    assert read_prompt_lines(packed) == read_prompt_lines(plain) == read_prompt_lines(packed.parent)
    packed.write_bytes(packed.read_bytes()[:-20])
    assert refusal(packed).startswith(f"{packed}\n  found:  a file that cannot be read")


def test_other_packed_files_are_refused_with_the_command_that_unpacks_them(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.zst"
    path.write_bytes(b"(\xb5/\xfd")
    assert f"fix:    unpack it: unzstd {path}" in refusal(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    assert "found:  a pipe or a device" in refusal(tmp_path / "p.jsonl")
    assert "found:  a pipe or a device" in refusal(Path("/dev/zero"))


def test_a_row_beyond_all_bounds_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """In a process of its own, whose memory has room for the libraries, but not for several copies of the row."""
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["b", "a" * (200 << 20)]}), tmp_path / "p.parquet", compression="zstd")
    script = (
        "import sys; from pathlib import Path; from opd.prompts import open_rows; from opd.errors import PromptError\n"
        "try: open_rows(Path(sys.argv[1]))\n"
        "except PromptError as error: print(error)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "p.parquet"], capture_output=True, text=True, check=True, timeout=120
    )
    *message, peak_kib = done.stdout.splitlines()
    assert "209,715," in "".join(message) and int(peak_kib) < 600_000


@pytest.mark.parametrize("header", ["license: !!bool x", "license: [", "configs:\n- 3", "license: {[a]: b}"])
def test_a_directory_with_a_readme_that_is_no_yaml_is_refused(header: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert "found:  a README.md whose header `datasets` cannot read" in refusal(tmp_path)


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
