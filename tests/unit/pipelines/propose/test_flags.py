"""Flags and answers: which file belongs to which expert, and what is asked where a flag is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opd.errors import ConfigError
from pipelines.propose.efforts import find_efforts
from pipelines.propose.flags import Flags, assign_to_experts, complete_flags, make_expert_name, parse_experts


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "math", "law", "runs/chat/model"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("math.csv", "law-train.jsonl", "other.parquet"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("math", "math"),
        ("runs/chat/model", "chat"),
        ("models/law/checkpoint-500", "law"),
        ("my expert (v2)", "my-expert-v2"),
        ("/model", "expert"),
    ],
)
def test_an_expert_is_called_after_the_directory_that_says_most(path: str, name: str) -> None:
    assert make_expert_name(Path(path)) == name


def test_experts_are_named_or_found_by_their_directories() -> None:
    assert parse_experts(["math", "talk=runs/chat/model"]) == {"math": Path("math"), "talk": Path("runs/chat/model")}
    with pytest.raises(ConfigError, match="two experts named math: math, law\n"):
        parse_experts(["math", "math=law"])


def test_the_home_directory_is_found_where_a_shell_leaves_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert parse_experts(["exact=~/math"]) == {"exact": here / "math"}
    flags = Flags(student=Path("base"), experts=("exact=~/math",), prompts=("exact=~/math.csv",), bases=("~/base",))
    (expert,) = complete_flags(flags, None, lambda _: None).experts.values()
    assert expert.prompts == here / "math.csv"


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["math.csv", "law-train.jsonl"], {"math": "math.csv", "law": "law-train.jsonl"}),
        (["law=math.csv", "math=law-train.jsonl"], {"law": "math.csv", "math": "law-train.jsonl"}),
        (["data/law/train.csv"], {"law": "data/law/train.csv"}),
    ],
    ids=str,
)
def test_a_file_goes_to_the_expert_that_it_names(texts: list[str], found: dict[str, str]) -> None:
    assert assign_to_experts("--prompts", texts, {"math": Path("math"), "law": Path("law")}) == found


def test_an_adapter_named_after_its_task_gets_the_file_of_the_task() -> None:
    experts = {"math": Path("math"), "law-lora": Path("law")}
    assert assign_to_experts("--prompts", ["data/law.csv"], experts) == {"law-lora": "data/law.csv"}
    for unsure in ({"law-lora": Path(), "law-full": Path()}, {"math": Path(), "lawful": Path()}):
        with pytest.raises(ConfigError, match=r"EXPERT=data/law\.csv"):
            assign_to_experts("--prompts", ["data/law.csv"], unsure)


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["other.parquet"], "a file whose name tells no expert"),
        (["math.csv", "math=other.parquet"], "a second value for math"),
        (["maths=math.csv"], "maths, which is no expert"),
        (["math-and-law.csv"], "a file whose name tells no expert"),
    ],
)
def test_a_file_of_nobody_or_of_two_is_refused(texts: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        assign_to_experts("--prompts", texts, {"math": Path("math"), "law": Path("law")})


def test_a_value_without_a_name_is_for_all_that_have_none() -> None:
    experts = {"math": Path("math"), "law": Path("law")}
    assert assign_to_experts("--verifier", ["numeric", "law=last_line"], experts, files=False) == {
        "math": "numeric",
        "law": "last_line",
    }
    one = "{kind: regex, pattern: 'x=(.*)'}"
    assert assign_to_experts("--verifier", [one], experts, files=False) == {"math": one, "law": one}


def answers(*given: str) -> Callable[[str, str], str]:
    waiting = list(given)
    return lambda question, proposal: waiting.pop(0)


def test_what_no_flag_says_is_asked_until_it_is_right() -> None:
    told: list[str] = []
    asked = answers(
        "bas",
        "base",
        "math",
        "low",
        "law",
        "",
        "other.csv",
        "other.parquet",
        "law-train.jsonl",
        "other.csv",
        "math.csv",
    )
    given = complete_flags(Flags(), asked, told.append)
    assert given.student == Path("base") and given.keep == Path("math.csv")
    assert {name: (e.model, e.prompts) for name, e in given.experts.items()} == {
        "math": (Path("math"), Path("other.parquet")),
        "law": (Path("law"), Path("law-train.jsonl")),
    }
    assert [line.splitlines()[0] for line in told] == ["error: bas", "error: low", *["error: other.csv"] * 2]


def test_what_flags_say_is_not_asked() -> None:
    flags = Flags(student=Path("base"), experts=("math", "law"), prompts=("law=other.parquet",))
    given = complete_flags(flags, answers("math.csv", ""), lambda line: None)
    assert given.experts["math"].prompts == Path("math.csv") and given.experts["law"].prompts == Path("other.parquet")
    assert given.keep is None
    flags = replace(flags, keep=Path("math.csv"))
    assert complete_flags(flags, answers("math.csv"), lambda line: None).keep == Path("math.csv")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags(), ["no --student and no --expert and no --prompts, and no terminal to ask at", "--from quickstart"]),
        (Flags(student=Path("base"), experts=("math",)), ["no --prompts, and no terminal"]),
        (
            Flags(student=Path("base"), experts=("math", "law"), prompts=("math.csv",)),
            ["no file for law", "--prompts law=FILE"],
        ),
        (Flags(student=Path("base"), experts=("maths",), prompts=("math.csv",)), ["maths\n", "no such directory"]),
        (Flags(student=Path("base"), experts=("math",), prompts=("maths.csv",)), ["maths.csv\n", "no such file"]),
    ],
    ids=lambda value: "",
)
def test_what_is_missing_without_a_terminal_is_refused(flags: Flags, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        complete_flags(flags, None, lambda line: None)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("said", "domains"), [("yes", {"math"}), ("no", set())])
def test_experts_called_after_efforts_are_asked_about(said: str, domains: set[str], here: Path) -> None:
    for name in ("math-low", "math-high"):
        (here / name).mkdir()
    flags = Flags(student=Path("base"), experts=("math-low", "math-high"))
    told: list[str] = []
    given = complete_flags(flags, answers("perhaps", said, *["math.csv"] * (2 - len(domains)), ""), told.append)
    assert {effort.domain for effort in given.efforts.values()} == domains
    assert [str(expert.prompts) for expert in given.experts.values()] == ["math.csv"] * 2
    assert told == [told[0]] and "'perhaps'" in told[0]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["math-low", "math-high", "law-high", "law-low"], {"math", "law"}),
        (["math-low", "math-high", "law-low"], set()),
        (["math-low", "math-high", "law"], set()),
        (["math-low", "law-low"], set()),
        (["math-a", "math-b"], set()),
        (["low", "high"], set()),
        ([], set()),
    ],
)
def test_efforts_are_found_by_the_names_of_experts(names: list[str], found: set[str]) -> None:
    assert {effort.domain for effort in find_efforts(names).values()} == found
