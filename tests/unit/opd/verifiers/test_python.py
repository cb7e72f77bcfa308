"""A user's own function: found before any compute, trusted with nothing but its score."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.errors import ConfigError
from opd.verifiers.python import Python

MODULE = """
import numpy
LIMIT = 3

def half(text, answer, metadata):
    return 0.5 if text == answer else metadata["otherwise"]

def same(text, answer, metadata):
    return numpy.array([text])[0] == answer

def fails(text, answer, metadata):
    raise KeyError(text)

def alone(text):
    return 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with the user's module, as the current one; nothing of it stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_judge.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_unread.py").write_text("\ndef f(:\n")
    (tmp_path / "my_needy.py").write_text("import a_module_that_nobody_has")
    (tmp_path / "re.py").write_text("1 / 0")
    yield
    for name in ("my_judge", "my_broken", "my_needy"):
        sys.modules.pop(name, None)


def test_the_functions_score_counts() -> None:
    judge = Python("my_judge:half")
    assert judge("x", "x", {}) == 0.5
    assert judge("x", "y", {"otherwise": 1}) == 1.0
    assert judge.problem("", {}) == ""
    assert [Python("my_judge:same")("x", other, {}) for other in "xy"] == [1.0, 0.0]


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="the text"):
        Python("my_judge:fails")("the text", "", {})


@pytest.mark.parametrize("score", [1.5, -0.1, float("nan"), float("inf")])
def test_a_score_outside_of_the_range_is_an_error(score: float) -> None:
    with pytest.raises(ValueError, match=r"no score in 0\.\.1"):
        Python("my_judge:half")("x", "y", {"otherwise": score})


def test_a_score_that_is_no_number_is_an_error() -> None:
    with pytest.raises(TypeError):
        Python("my_judge:half")("x", "y", {"otherwise": None})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_such_module:f", ["no module `no_such_module`\n", "that holds no_such_module.py"]),
        (
            "my_needy:f",
            ["no module `a_module_that_nobody_has`, which my_needy imports", "install a_module_that_nobody_has"],
        ),
        ("my_broken:f", ["ZeroDivisionError", "python -c 'import my_broken'"]),
        ("my_unread:f", ["SyntaxError: ", "line 2 of my_unread.py"]),
        ("my_judge:alone", ["found:  alone(text)", "give it these three parameters"]),
        ("my_judge:haf", ["no `haf` in my_judge", "correct the name after the colon"]),
        ("my_judge:LIMIT", ["`LIMIT` is a int"]),
    ],
)
def test_a_function_that_is_not_there_is_refused_when_the_verifier_is_made(function: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Python(function)
    assert str(error.value).startswith(f"verifier {function}\n")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_file_here_does_not_stand_in_for_an_installed_module() -> None:
    import re

    Python("re:sub")  # the standard library's: the re.py here divides by zero
    assert Path(re.__file__).parent != Path.cwd()
