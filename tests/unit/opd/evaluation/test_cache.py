"""Kept results of exams: the same bits come back, and what is damaged or cannot be written is said and passed over."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from opd.evaluation.cache import ExamCache, exam_cache_dir
from opd.files import cache_dir
from opd.records.scores import DomainScore, Evaluation, ScoredAnswer

SCORE = DomainScore(accuracy=1 / 3, stderr=0.1, low=0.0, high=2 / 3, questions=3, pass_at={"1": 1 / 3}, mean_tokens=0.1)
ANSWER = ScoredAnswer(domain="d", prompt_id="d/0", prompt="<bos>a\u2028=", answer="b", text="\ud800 c", score=1 / 3)
FOUND = Evaluation(model="expert", scores={"d": SCORE, "a": SCORE}, answers=(ANSWER,))
FACTS = {"model": "abc", "domains": [{"name": "d"}], "answers": {"temperature": 0.0}}


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def test_what_was_kept_comes_back_to_the_bit_and_says_whence(tmp_path: Path) -> None:
    said = Said()
    ExamCache(tmp_path / "new" / "exams", said).keep(FACTS, FOUND, tmp_path / "runs" / "a")
    found = ExamCache(tmp_path / "new" / "exams", said).find(dict(reversed(FACTS.items())))
    assert found is not None
    assert replace(found, cached={}).as_text() == FOUND.as_text(), "floats, order of domains, odd characters"
    assert list(found.cached) == ["d", "a"] and found.cached["d"].startswith(f"{tmp_path}/runs/a, 20")
    assert said == []


@pytest.mark.parametrize(
    "other",
    [
        FACTS | {"model": "abd"},
        FACTS | {"domains": [{"name": "d"}, {"name": "e"}]},
        FACTS | {"answers": {"temperature": 1.0}},
        FACTS | {"more": None},
        {"model": "abc"},
    ],
)
def test_other_facts_are_another_exam(other: dict[str, object], tmp_path: Path) -> None:
    cache = ExamCache(tmp_path, Said())
    cache.keep(FACTS, FOUND, tmp_path)
    assert cache.find(other) is None and cache.find(FACTS) is not None


@pytest.mark.parametrize("damage", ["", "{", "[]", "3", "null", "{}", '{"blake3": "x"}', "half", "byte", b"\xff\xfe"])
def test_a_damaged_entry_is_said_passed_over_and_replaced(damage: str | bytes, tmp_path: Path) -> None:
    said = Said()
    cache = ExamCache(tmp_path, said)
    cache.keep(FACTS, FOUND, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    entry = {"half": whole[: len(whole) // 2], "byte": whole.replace('"mean_tokens": 0.1', '"mean_tokens": 0.2')}
    file.write_bytes(damage if isinstance(damage, bytes) else entry.get(damage, damage).encode())
    assert cache.find(FACTS) is None
    assert len(said) == 1 and file.name in said[0] and "damaged" in said[0] and "taken again" in said[0]
    cache.keep(FACTS, FOUND, tmp_path)
    assert cache.find(FACTS) is not None and len(said) == 1 and len(list(tmp_path.iterdir())) == 1


def test_an_exam_in_which_a_verifier_failed_is_not_kept(tmp_path: Path) -> None:
    cache = ExamCache(tmp_path, Said())
    cache.keep(FACTS, replace(FOUND, scores={"d": SCORE, "a": replace(SCORE, failed=1)}), tmp_path)
    assert cache.find(FACTS) is None and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = Said()
    cache = ExamCache(tmp_path / "file" / "exams", said)
    cache.keep(FACTS, FOUND, tmp_path)
    assert len(said) == 1 and "not kept" in said[0] and cache.find(FACTS) is None
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0)
        assert ExamCache(tmp_path / "closed", said).find(FACTS) is None and "taken again" in said[-1]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPD_EXAM_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert exam_cache_dir() == cache_dir() / "exams" == tmp_path / "opd-merge" / "exams"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert exam_cache_dir() == tmp_path / "me" / ".cache" / "opd-merge" / "exams"
    monkeypatch.setenv("OPD_EXAM_CACHE", "elsewhere")
    assert exam_cache_dir() == Path("elsewhere")
    monkeypatch.setenv("OPD_EXAM_CACHE", "off")
    assert exam_cache_dir() is None


def test_old_files_have_nothing_cached() -> None:
    data = json.loads(FOUND.as_text())
    del data["cached"]
    assert Evaluation.from_json(data).cached == {}
