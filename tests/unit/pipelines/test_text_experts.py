"""Experts that only write text show that they answer before there is a run directory, and `opd check` says what they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, RunError
from opd.run.paths import RunPaths
from pipelines.check.text_experts import measure_texts
from pipelines.inputs.read import read_inputs
from pipelines.merging import rounds
from pipelines.merging import run as merging
from tests.writer import Writer


@pytest.fixture
def borrowed(world: Any, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The world with an expert that only writes text in place of `up`; no merge comes as far as Ray."""

    def no_ray(*_: Any) -> None:
        raise RunError("it would start now")

    monkeypatch.setattr(merging, "ray_session", no_ray)
    engine = {"kind": "text", "base_url": writer.url, "model": "far", "server_timeout_s": 5}
    world.data["experts"]["up"] = {"domain": "upper", "engine": engine}
    world.data["domains"]["upper"]["objective"] = {"kind": "sft"}
    writer.write = lambda text: text[4:7]
    return world


BAD: dict[str, tuple[int, Any, str]] = {
    "does not answer": (503, b"", "4 attempts failed, the last with: status 503"),
    "wrong key": (401, b"no", "the key is missing or wrong"),
    "too many requests": (429, b"slow", "4 attempts failed, the last with: status 429"),
    "another model": (200, {"model": "near", "choices": [{"finish_reason": "stop", "message": {"content": "a"}}]},
                      "'near' answered, asked was 'far'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("number", [1, 2])
def test_a_server_that_does_not_answer_is_refused_before_there_is_a_run(
    kind: str, number: int, borrowed: Any, writer: Writer
) -> None:
    status, body, said = BAD[kind]
    writer.spoil = lambda text, reply: (status, body)
    borrowed.data["rounds"] = number
    config = load_pipeline(borrowed.write())
    with pytest.raises(ConfigError) as refused:
        rounds.begin_rounds(config, borrowed.root / "runs" / "a", print)
    assert str(refused.value).startswith("experts.up.engine\n") and said in str(refused.value)
    assert "--resume" not in str(refused.value), "there is nothing to resume"
    assert not list((borrowed.root / "runs").iterdir())
    with pytest.raises(ConfigError) as checked:
        measure_texts(config, read_inputs(config), print)
    assert str(checked.value) == str(refused.value)


def test_the_first_answer_is_not_asked_for_again(borrowed: Any, writer: Writer) -> None:
    root = borrowed.root / "run"
    work = rounds.begin_rounds(load_pipeline(borrowed.write()), root, print)
    with pytest.raises(RunError, match="it would start now"):
        work.carry_out()
    assert [line["prompt_id"] for line in read_lines(RunPaths(root).texts)] == ["upper/0"]
    assert len(writer.requests) == 1


def test_the_first_answer_is_for_every_round(borrowed: Any, writer: Writer) -> None:
    borrowed.data["rounds"] = 2
    root = borrowed.root / "run"
    work = rounds.begin_rounds(load_pipeline(borrowed.write()), root, print)
    with pytest.raises(RunError, match="it would start now"):
        work.carry_out()
    paths = RunPaths(root)
    assert read_lines(paths.texts) == read_lines(paths.round_dir(1).texts) and len(writer.requests) == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [("right", "the verifier's score is 1"), ("wrong", "the verifier's score is 0"), ("no exam", "nothing says whether it is right")],
)  # fmt: skip
def test_a_check_shows_what_the_expert_answers(change: str, verdict: str, borrowed: Any, writer: Writer) -> None:
    if change == "wrong":
        writer.write = lambda text: "no"
    if change == "no exam":
        del borrowed.data["domains"]["upper"]["eval"]
    writer.spoil = lambda text, reply: (200, {**reply, "model": "far-2026-11-30"})
    config = load_pipeline(borrowed.write())
    said: list[str] = []
    (measured,) = measure_texts(config, read_inputs(config), said.append)
    assert said == ["asking experts that only write text: up"] and len(writer.requests) == 1
    line = measured.describe()
    assert line.startswith("upper: expert up answers as far-2026-11-30: prompt upper/0 in ") and verdict in line
    text = "no" if change == "wrong" else "aaa"
    assert f"{len(text)} characters, {len(text)} tokens by its own count;" in line


def test_nothing_is_asked_where_no_expert_only_writes_text(world: Any) -> None:
    config = load_pipeline(world.write())
    assert measure_texts(config, read_inputs(config), print) == ()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]
