"""Files of exams and baselines that are damaged are named, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.errors import RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.records.scores import Evaluation


@pytest.mark.parametrize("kind", [Evaluation, BaselineResult])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ('{"format": 1, "scores": {}', "delimiter"),
        ("[]", "TypeError"),
        ('{"format": 2}', "format 2"),
        ("{}", "'format'"),
        ('{"format": 1, "scores": {"a": 3}}', "Error"),
        ('{"format": 1, "model": "m", "scores": [], "answers": []}', "TypeError"),
        ("\udcff", "UnicodeDecodeError"),
    ],
)
def test_a_damaged_file_is_named(kind: type[Evaluation | BaselineResult], text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "after.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RunDirError, match=says) as error:
        kind.load(file)
    assert str(error.value).startswith(f"{file}\n") and "move it away" in str(error.value)
