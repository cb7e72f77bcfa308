"""Many prompts are read and tokenised once, mapped from then on, and never half."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError, StorageError
from opd.prompts import load_prompts, open_rows, rows, table
from opd.prompts.arrow import STALE_S, cache_dir

WriteRows = Callable[[str, Any], Path]
ROWS = [{"prompt": f"rev {i}=", "answer": str(i)} for i in range(3000)]


@pytest.fixture(autouse=True)
def _all_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "IN_MEMORY_BYTES", 0)


def files() -> list[str]:
    return sorted(path.name for path in cache_dir().iterdir()) if cache_dir().is_dir() else []


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is read and tokenised from now on."""
    done: list[str] = []
    read, encode = rows.read_row, table.encode_prompts
    monkeypatch.setattr(rows, "read_row", lambda *a: (done.append("row"), read(*a))[1])
    monkeypatch.setattr(table, "encode_prompts", lambda *a: (done.append("ids"), encode(*a))[1])
    return done


def test_a_second_start_reads_nothing_again(write_rows: WriteRows, tiny_tokenizer: Any, work: list[str]) -> None:
    path = write_rows("p.jsonl", ROWS)
    first = list(load_prompts(path, "d", tiny_tokenizer))
    assert work.count("row") == 3000
    work.clear()
    assert list(load_prompts(path, "d", tiny_tokenizer)) == first
    assert [p.id for p in load_prompts(path, "other", tiny_tokenizer)][:2] == ["other/0", "other/1"]
    assert work == [] and len(files()) == 2
    plain = [json.loads(line) for line in path.read_text().splitlines()]
    assert [p.answer for p in first] == [row["answer"] for row in plain]


@pytest.mark.parametrize(
    "change",
    ["file", "columns", "limit", "template", "day", "tokenizer"],
)
def test_what_decides_the_ids_decides_the_file(
    change: str, write_rows: WriteRows, tiny_tokenizer: Any, work: list[str]
) -> None:
    import copy

    path, day, tokenizer, mapping = write_rows("p.jsonl", ROWS[:9]), None, copy.deepcopy(tiny_tokenizer), {}
    list(load_prompts(path, "d", tokenizer, day))
    work.clear()
    if change == "file":
        write_rows("p.jsonl", [*ROWS[:8], ROWS[9]])
    elif change == "columns":
        mapping = {"columns": {"completion": "answer"}}
    elif change == "limit":
        mapping = {"limit": 5}
    elif change == "template":
        tokenizer.chat_template = "{{ messages }}"
    elif change == "day":
        day = date(2026, 1, 1)
    else:
        tokenizer.add_tokens(["rev"])
    load_prompts(PromptsConfig(path=path, **mapping), "d", tokenizer, day)
    assert "ids" in work
    assert ("row" in work) == (change in ("file", "columns", "limit"))


def test_an_order_is_no_reason_to_read_again(write_rows: WriteRows, tiny_tokenizer: Any, work: list[str]) -> None:
    path = write_rows("p.jsonl", ROWS)
    plain = list(load_prompts(path, "d", tiny_tokenizer))
    work.clear()
    some = load_prompts(PromptsConfig(path=path, shuffle_seed=3, limit=700), "d", tiny_tokenizer)
    assert "row" not in work
    assert len(some) == 700 and [p.id for p in some] != [p.id for p in plain[:700]]
    by_id = {p.id: p for p in plain}
    assert all(p == by_id[p.id] for p in some)


def test_a_broken_row_leaves_no_file(write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    path = write_rows("p.jsonl", [*ROWS, {"prompt": 3}])
    for _ in range(2):
        with pytest.raises(PromptError, match=r":3001\n"):
            open_rows(path)
    assert files() == []


def test_a_prompt_that_cannot_be_encoded_is_named(write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    path = write_rows("p.jsonl", [*ROWS[:1500], {"prompt": "a\ud800"}, *ROWS])
    with pytest.raises(PromptError, match=r"p\.jsonl: prompt d/1500\n"):
        load_prompts(path, "d", tiny_tokenizer)
    assert [name.split("-")[0] for name in files()] == ["rows"]


def test_a_killed_process_leaves_nothing_that_is_read(write_rows: WriteRows, tiny_tokenizer: Any) -> None:
    path = write_rows("p.jsonl", ROWS)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from opd.prompts import rows\n"
        "rows.IN_MEMORY_BYTES = 0\n"
        "read, seen = rows.read_row, []\n"
        "def dying(*a):\n"
        "    seen.append(1)\n"
        "    if len(seen) == 2500: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return read(*a)\n"
        "rows.read_row = dying\n"
        "rows.open_rows(Path(sys.argv[1]))\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert died.returncode == -9
    (left,) = files()
    assert left.endswith(".tmp")
    assert len(open_rows(path)) == 3000
    old = time.time() - STALE_S - 1
    os.utime(cache_dir() / left, (old, old))
    load_prompts(path, "d", tiny_tokenizer)
    assert [name.split("-")[0] for name in files()] == ["rows", "tokens"], "swept once it is old enough"


def test_a_file_that_was_cut_off_is_made_again(write_rows: WriteRows, work: list[str]) -> None:
    path = write_rows("p.jsonl", ROWS)
    want = list(open_rows(path))
    (name,) = files()
    file = cache_dir() / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert list(open_rows(path)) == want


def test_two_processes_at_once_make_the_same_file(write_rows: WriteRows) -> None:
    path = write_rows("p.jsonl", ROWS)
    code = (
        "import sys; from pathlib import Path; from opd.prompts import rows; rows.IN_MEMORY_BYTES = 0\n"
        "print(len(rows.open_rows(Path(sys.argv[1]))), rows.open_rows(Path(sys.argv[1]))[2999].answer)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in both] == ["3000 2999\n"] * 2
    assert len(files()) == 1


def test_a_full_disk_is_told_and_freed(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows("p.jsonl", ROWS)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"could not be written: No space left.*HF_DATASETS_CACHE"):
        open_rows(path)
    assert files() == []


def test_a_file_that_grows_while_it_is_read_is_refused(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows("p.jsonl", ROWS)
    read = rows.read_row

    def growing(*arguments: Any) -> Any:
        with path.open("a") as file:
            file.write('{"prompt": "more"}\n')
        monkeypatch.setattr(rows, "read_row", read)
        return read(*arguments)

    monkeypatch.setattr(rows, "read_row", growing)
    with pytest.raises(PromptError, match="written to while it was read"):
        open_rows(path)


def test_few_prompts_leave_nothing_on_disk(
    write_rows: WriteRows, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "IN_MEMORY_BYTES", 1 << 20)
    load_prompts(write_rows("p.parquet", ROWS), "d", tiny_tokenizer)
    assert files() == []


def test_the_cache_lies_where_the_libraries_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache" / "opd"
    monkeypatch.delenv("HF_DATASETS_CACHE")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert cache_dir() == Path("/hf/datasets/opd")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path.home() / ".cache/huggingface/datasets/opd"
