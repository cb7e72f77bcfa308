"""Columns of a file of prompts, and the judging of its answers, in each format."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import ConfigError, PromptError
from opd.prompts import PromptLine, read_prompt_lines
from pipelines.propose.columns import Columns, find_columns
from pipelines.propose.domains import propose_verifier


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.jsonl"])
@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "answer": "b", "question": "c"}, "prompt", "answer"),
        ({"id": "1", "Question": "a", "Solution": "b"}, "Question", "Solution"),
        ({"instruction": "a", "output": "b"}, "instruction", "output"),
        ({"problem": "a", "level": "b"}, "problem", None),
        ({"frage": "a"}, "frage", None),
    ],
    ids=str,
)
def test_columns_are_found_by_their_names(
    name: str, row: dict[str, str], prompt: str, answer: str | None, tmp_path: Path
) -> None:
    found = find_columns(write(tmp_path / name, [row]), ())
    assert found == Columns(prompt=prompt, answer=answer, messages=False)
    assert found.renamed == {k: v for k, v in {"prompt": prompt, "answer": answer}.items() if v not in (None, k)}


@pytest.mark.parametrize("name", ["p.parquet", "p.jsonl"])
def test_conversations_are_told_from_texts(name: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    found = find_columns(write(tmp_path / name, [{"messages": turns, "answer": 4}]), ())
    assert (found.prompt, found.answer, found.messages) == ("messages", "answer", True)
    theirs = [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]
    found = find_columns(write(tmp_path / name, [{"conversations": theirs}]), ())
    assert (found.prompt, found.messages) == ("conversations", True)


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.jsonl"])
def test_an_input_that_only_later_rows_have_is_refused_too(name: str, tmp_path: Path) -> None:
    rows = [{"instruction": "Translate", "input": "" if i < 30 else "ja", "output": "yes"} for i in range(31)]
    path = write(tmp_path / name, rows)
    with pytest.raises(PromptError, match=r"p\.\w+(:|, row )31\n  found:  a prompt in two columns"):
        find_columns(path, ())
    assert find_columns(path, ("instruction",)).prompt == "instruction", "the way out that the refusal names"
    assert find_columns(write(tmp_path / name, rows[:30]), ()).prompt == "instruction"


@pytest.mark.parametrize("sign", [";", "\t"])
def test_cells_without_commas_between_them_are_not_taken_for_prompts(sign: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(f"question{sign}answer\n2+2={sign}4\n")
    with pytest.raises(PromptError, match=r"the one column 'question.+answer'(?s:.+)commas between its cells"):
        find_columns(tmp_path / "p.csv", ())


def test_columns_that_are_named_win(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", [{"prompt": "a", "frage": "b", "antwort": "c"}])
    found = find_columns(path, ("frage", "antwort"))
    assert (found.prompt, found.answer) == ("frage", "antwort")
    with pytest.raises(ConfigError, match="no column `frge`"):
        find_columns(path, ("frge",))


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"frage": "a", "antwort": "b"}], "found:  the columns frage, antwort"),
        ([{"instruction": "Translate", "input": "ja", "output": "yes"}], "two columns, `instruction` and `input`"),
        ([{"Instruction": "Translate", "Input": "ja", "Output": "yes"}], "two columns, `Instruction` and `Input`"),
    ],
)
def test_what_does_not_ask_is_refused(rows: list[dict[str, Any]], word: str, tmp_path: Path) -> None:
    for name in ("p.csv", "p.parquet", *(["p.jsonl"] if "two" in word else [])):
        with pytest.raises(PromptError, match=word):
            find_columns(write(tmp_path / name, rows), ())


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("no table")
    with pytest.raises(PromptError, match="a file that cannot be read"):
        find_columns(tmp_path / "p.parquet", ())


def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('\n\nquestion,answer\n"a\n\nb",4\n\nc,5\n')
    found = find_columns(tmp_path / "p.csv", ())
    assert (found.prompt, found.answer) == ("question", "answer")
    assert [
        line.answer for line in read_prompt_lines(PromptsConfig(path=tmp_path / "p.csv", columns=found.renamed))
    ] == [
        "4",
        "5",
    ]


@pytest.mark.parametrize("text", ['["instruction"]\n', '"text"\n'])
def test_a_line_that_is_no_object_is_refused_as_a_merge_refuses_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PromptError) as error:
        find_columns(tmp_path / "p.json", ())
    assert str(error.value).startswith(f"{tmp_path / 'p.json'}:1\n") and "wanted: one JSON object with" in str(
        error.value
    )


def lines(*answers: str, **more: Any) -> list[PromptLine]:
    return [PromptLine(prompt="p", answer=answer, **more) for answer in answers]


@pytest.mark.parametrize(
    ("rows", "verifier"),
    [
        (lines("", ""), None),
        (lines("12", "-3.5", "1,204", "$7"), "numeric"),
        (lines("6 * 7 = 42\n#### 42"), "numeric"),
        (lines("A", "C", "(B)"), "multiple_choice"),
        (lines("A", "E"), {"kind": "multiple_choice", "choices": "ABCDE"}),
        (lines("A", "A"), "exact_match"),
        (lines("Paris", "12"), "exact_match"),
        (lines("qkxh", completion="qk..\nqkxh"), "last_line"),
        (lines("a first\nand a second line"), None),
        (lines("4", "", "5"), None),
        (lines("x" * 101), None),
        (lines("4", metadata={"task": "gcd", "entry": {}}), "reasoning_gym"),
    ],
    ids=str,
)
def test_the_answers_tell_how_they_are_judged(rows: list[PromptLine], verifier: Any) -> None:
    assert propose_verifier(rows)[0] == verifier
