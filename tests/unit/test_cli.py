"""The command line: a mistake ends with exit code 2, says where, what, what instead and how, and writes nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

import pipelines.baselines.run
import pipelines.check.measure
import pipelines.merging.run
from experts.registry import Registry
from opd import __version__
from opd.config import PipelineConfig
from opd.errors import Paused, RunError, StorageError
from opd.evaluation.baselines import BaselineResult
from opd.records.scores import DomainScore
from pipelines.baselines.jobs import BaselineJob
from pipelines.check.comparison import TeacherComparison
from pipelines.check.judge import CheckFinding, MeasuredTeacher
from pipelines.check.measure import CheckReport
from pipelines.interrupts import Interrupted, Stopped
from pipelines.sizing.memory import HostMemoryNeed
from tests import messages
from tests.messages import opd

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["demo"],
    ["merge"],
    ["check"],
    ["evaluate"],
    ["report"],
    ["baseline"],
    ["compare"],
    ["export"],
    ["serve"],
    ["chat"],
    *(["experts", c] for c in ("add", "list", "show", "verify", "remove", "train")),
    *(["pipelines", c] for c in ("list", "show", "schema")),
    ["prompts", "make"],
    ["models", "from-gguf"],
    ["teachers", "serve"],
]


@pytest.fixture(autouse=True)
def no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that gets past the checks must not start Ray."""

    def started(*_: Any) -> dict[str, Any]:
        raise AssertionError("the run started")

    monkeypatch.setattr(pipelines.merging.run, "_run_session", started)


def refused(result: Result, *words: str | Path) -> None:
    """Exit code 2 and a message of four lines, with these words in it."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert re.match(r"error: .+\n  found:  .+\n(?s:.*)  wanted: .+\n(?s:.*)  fix:    .+\n", result.stderr), (
        result.stderr
    )
    assert result.stdout == ""
    for word in words:
        assert str(word) in result.stderr, result.stderr


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Mistakes in what a merge is given


def unknown_key(world: Any) -> list[str]:
    world.data["trainer"]["step"] = 3
    return ["pipeline.yaml: trainer.step\n", "did you mean `steps`?"]


def wrong_type(world: Any) -> list[str]:
    world.data["trainer"]["steps"] = "many"
    return ["pipeline.yaml: trainer.steps\n", "found:  'many'"]


def too_few_samples(world: Any) -> list[str]:
    world.data["trainer"]["samples_per_step"] = 1
    return ["trainer.samples_per_step", "2 domains"]


def unknown_verifier(world: Any) -> list[str]:
    world.data["domains"]["upper"]["eval"]["verifier"] = "exact_mach"
    return ["domains.upper.eval.verifier", "found:  exact_mach", "did you mean `exact_match`?", "multiple_choice"]


def missing_student(world: Any) -> list[str]:
    shutil.rmtree(world.root / "base")
    return ["base\n", "no such directory"]


def missing_expert(world: Any) -> list[str]:
    shutil.rmtree(world.root / "up")
    return ["up\n", "no such directory"]


def pickled_weights(world: Any) -> list[str]:
    (world.root / "up" / "model.safetensors").rename(world.root / "up" / "pytorch_model.bin")
    return ["up/pytorch_model.bin\n", "only pytorch_model.bin", "safetensors"]


def no_weights(world: Any) -> list[str]:
    (world.root / "base" / "model.safetensors").unlink()
    return ["base\n", "no weights"]


def truncated_weights(world: Any) -> list[str]:
    file = world.root / "up" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return ["up/model.safetensors\n", "bytes", "truncated"]


def damaged_config(world: Any) -> list[str]:
    (world.root / "up" / "config.json").write_text("{")
    return ["up/config.json\n"]


def custom_code(world: Any) -> list[str]:
    edit(world.root / "up" / "config.json", auto_map={"AutoModel": "modeling.Evil"})
    return ["up/config.json: auto_map\n", "modeling.Evil"]


def other_vocabulary(world: Any) -> list[str]:
    edit(
        world.root / "up" / "tokenizer.json",
        added_tokens=[*_added(world), {**_added(world)[0], "id": 75, "content": "<extra>"}],
    )
    return ["expert `up`", "tokenizer.json", "<extra>"]


def smaller_vocabulary(world: Any) -> list[str]:
    file = world.root / "up" / "tokenizer.json"
    data = json.loads(file.read_text())
    (last,) = (t for t, i in data["model"]["vocab"].items() if i == 75)
    del data["model"]["vocab"][last]
    file.write_text(json.dumps(data))
    return ["expert `up`", "tokenizer.json", "75 tokens, the student has 76"]


def _added(world: Any) -> list[dict[str, Any]]:
    return json.loads((world.root / "up" / "tokenizer.json").read_text())["added_tokens"]


def other_end(world: Any) -> list[str]:
    for name in ("config.json", "generation_config.json"):
        edit(world.root / "up" / name, eos_token_id=1)
    edit(world.root / "up" / "tokenizer_config.json", eos_token="<bos>")
    return ["expert `up`", "eos_token_id", "1 ('<bos>')", "2 ('<eos>')"]


def domain_without_expert(world: Any) -> list[str]:
    del world.data["experts"]["up"]
    return ["domains.upper\n", "no expert", "rev → reverse"]


def expert_without_domain(world: Any) -> list[str]:
    del world.data["domains"]["upper"]
    return ["experts.up.domain\n", "found:  upper"]


def domain_without_prompts(world: Any) -> list[str]:
    del world.data["domains"]["upper"]["prompts"]
    return ["domains.upper.prompts\n"]


def missing_prompts(world: Any) -> list[str]:
    (world.root / "upper.jsonl").unlink()
    return ["upper.jsonl\n", "no such file"]


def broken_prompts(world: Any) -> list[str]:
    (world.root / "upper.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    return ["upper.jsonl:2\n", "column"]


def empty_prompts(world: Any) -> list[str]:
    (world.root / "upper.jsonl").write_text("")
    return ["upper.jsonl\n", "no prompts"]


def broken_exam(world: Any) -> list[str]:
    world.data["domains"]["upper"]["eval"]["prompts"] = "exam.jsonl"
    (world.root / "exam.jsonl").write_text('{"question": "a"}\n')
    return ["exam.jsonl:1\n", "`prompt`"]


def long_context(world: Any) -> list[str]:
    world.data["rollout"]["max_model_len"] = 4096
    return ["rollout.max_model_len\n", "found:  4096", "at most 512"]


def unregistered_expert(world: Any) -> list[str]:
    Registry(world.root / "registry").add("reverse", world.root / "rev", "reverse")
    world.data["experts"] = {"use": ["revers"]}
    return ["'revers'", "did you mean `reverse`?"]


def bad_name(world: Any) -> list[str]:
    world.data["name"] = "../elsewhere"
    return ["pipeline.yaml: name\n", "'../elsewhere'"]


MISTAKES = [
    unknown_key, wrong_type, too_few_samples, unknown_verifier, missing_student, missing_expert, pickled_weights,
    no_weights, truncated_weights, damaged_config, custom_code, other_vocabulary, smaller_vocabulary, other_end,
    domain_without_expert, expert_without_domain, domain_without_prompts, missing_prompts, broken_prompts,
    empty_prompts, broken_exam, long_context, unregistered_expert, bad_name,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_refused_before_anything_is_written(mistake: Callable[[Any], list[str]], world: Any) -> None:
    words = mistake(world)
    pipeline = world.write()
    messages.forget()
    before = sorted(world.root.rglob("*"))
    refused(opd("merge", pipeline.name), *words)
    refused(opd("merge", pipeline.name, "--run-dir", "here"), *words)
    refused(opd("check", pipeline.name), *words)
    messages.check(f"mistake: {mistake.__name__}", world.root)
    assert sorted(world.root.rglob("*")) == before


def test_permuted_ids_of_an_equal_size_are_refused(world: Any, make_model_dir: Any) -> None:
    shutil.rmtree(world.root / "up")
    make_model_dir(world.root / "up", seed=2, permute_vocab=True)
    refused(opd("merge", "pipeline.yaml"), "expert `up`", "tokenizer.json", "permuted ids: id 4 is '?'")
    assert not (world.root / "runs").exists()


def test_all_right_gets_as_far_as_the_run(world: Any) -> None:
    result = opd("merge", "pipeline.yaml")
    assert isinstance(result.exception, AssertionError)
    assert "the run started" in str(result.exception)
    assert sorted(p.name for p in (world.root / "runs").iterdir()) == ["two"]
    resolved = yaml.safe_load((world.root / "runs" / "two" / "pipeline.yaml").read_text())
    config = PipelineConfig.model_validate(resolved)
    assert config.student.model == world.root / "base"
    assert config.domains["upper"].prompts == world.root / "upper.jsonl"
    manifest = json.loads((world.root / "runs" / "two" / "manifest.json").read_text())
    assert set(manifest["experts"]) == {"rev", "up"}


@pytest.fixture
def started(world: Any) -> Path:
    """The run directory of a merge that was interrupted at once."""
    opd("merge", "pipeline.yaml")
    return Path("runs/two")


def test_a_run_directory_that_exists_is_refused(started: Path) -> None:
    before = {p: p.read_bytes() for p in started.rglob("*") if p.is_file()}
    refused(opd("merge", "pipeline.yaml"), "runs/two\n", "exists", "opd merge --resume runs/two", "--run-dir")
    assert {p: p.read_bytes() for p in started.rglob("*") if p.is_file()} == before


def test_any_directory_that_exists_is_refused(world: Any) -> None:
    (world.root / "here").mkdir()
    refused(opd("merge", "pipeline.yaml", "--run-dir", "here"), "here\n", "that is no run")
    assert list((world.root / "here").iterdir()) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_resume_reads_the_runs_own_pipeline(
    elsewhere: bool, started: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.root / "pipeline.yaml").unlink()
    if elsewhere:
        monkeypatch.chdir("/")
    result = opd("merge", "--resume", world.root / started if elsewhere else started)
    assert "the run started" in str(result.exception), result.output


def test_a_resume_of_no_run_is_refused(world: Any) -> None:
    for path in ("nowhere", "base"):
        refused(opd("merge", "--resume", path), f"{path}\n", "no pipeline.yaml")
    assert not (world.root / "nowhere").exists()


@pytest.mark.parametrize(
    ("what", "word", "name"),
    [
        ("upper.jsonl", "prompts", "upper\n"),
        ("up", "experts", "up (model.safetensors)\n"),
        ("base", "student", "model.safetensors\n"),
    ],
)
def test_a_resume_with_other_inputs_is_refused(
    what: str, word: str, name: str, started: Path, world: Any, make_model_dir: Any
) -> None:
    path = world.root / what
    if path.is_dir():
        shutil.rmtree(path)
        make_model_dir(path, seed=9)
    else:
        path.write_text('{"prompt": "other"}\n')
    refused(opd("merge", "--resume", started), "manifest.json", f"{word} changed since the run began: {name}")


def test_a_resume_with_another_pipeline_shows_what_differs(started: Path, world: Any) -> None:
    before = {p: p.read_bytes() for p in started.rglob("*") if p.is_file()}
    world.data["trainer"]["lr"] = 0.5
    refused(opd("merge", world.write(), "--resume", started), "runs/two/pipeline.yaml\n", "trainer.lr  1e-06    0.5")
    refused(opd("merge", "--resume", started, "--set", "seed=9"), "seed  0        9")
    assert {p: p.read_bytes() for p in started.rglob("*") if p.is_file()} == before
    edited = yaml.safe_load((started / "pipeline.yaml").read_text())
    (started / "pipeline.yaml").write_text(yaml.safe_dump(edited | {"seed": 9}))
    refused(opd("merge", "--resume", started), "seed  0        9")


def test_a_resume_may_change_what_decides_nothing(started: Path, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(pipelines.merging.run, "_run_session", lambda *args: ran.append(args) or REPORT)
    result = opd("merge", "--resume", started, "--set", "trainer.ranks=1")
    assert result.exit_code == 0, result.output
    run, checkpoint, notices, _ = ran[0]
    assert (run.config.trainer.ranks, checkpoint) == (1, None)
    assert notices[0] == "trainer.ranks: 2 before, 1 now"
    # From now on these are the run's own.
    assert opd("merge", "--resume", started).exit_code == 0
    run, _, notices, _ = ran[1]
    assert (run.config.trainer.ranks, notices) == (1, [])
    world.data["trainer"]["ranks"] = 1
    assert opd("merge", world.write(), "--resume", started).exit_code == 0
    assert ran[2][2] == []


def test_a_resume_from_a_checkpoint_that_is_not_there_is_refused(started: Path) -> None:
    before = (started / "pipeline.yaml").read_bytes()
    words = ("--resume-from 7\n", "no checkpoint in", "latest-valid or the step")
    refused(opd("merge", "--resume", started, "--resume-from", "7", "--set", "trainer.ranks=1"), *words)
    assert (started / "pipeline.yaml").read_bytes() == before


def test_a_resume_names_other_versions(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(pipelines.merging.run, "_run_session", lambda *args: ran.append(args) or REPORT)
    recorded = json.loads((started / "manifest.json").read_text())["versions"]
    edit(started / "manifest.json", versions=recorded | {"torch": "1.0"})
    assert opd("merge", "--resume", started).exit_code == 0
    (notice,) = ran[0][2]
    assert notice.startswith(f"torch 1.0 when the run began, {recorded['torch']} now")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (None, ["FileNotFoundError", "the manifest of a run"]),
        ("[]", ["the manifest of a run"]),
        ('{"format": 1}', ["run format 1", "format 4"]),
        ('{"format": 5}', ["run format 5", "the release of opd-merge that began the run"]),
    ],
)
def test_a_run_of_another_format_is_refused(manifest: str | None, words: list[str], started: Path) -> None:
    file = started / "manifest.json"
    file.write_text(manifest) if manifest else file.unlink()
    refused(opd("merge", "--resume", started), f"{file}\n", *words)


def test_a_missing_pipeline_is_refused(world: Any) -> None:
    refused(opd("merge", "nowhere.yaml"), "nowhere.yaml\n", "no such file", "opd pipelines list")
    assert not (world.root / "runs").exists()


def test_set_reaches_the_run_and_is_checked(world: Any) -> None:
    refused(opd("merge", "pipeline.yaml", "--set", "trainer.stepz=3"), "trainer.stepz", "did you mean `steps`?")
    refused(opd("merge", "pipeline.yaml", "--set", "trainer.steps"), "--set trainer.steps", "found:  no key=value")
    opd("merge", "pipeline.yaml", "--set", "trainer.steps=7", "--set", "name=seven")
    assert yaml.safe_load(Path("runs/seven/pipeline.yaml").read_text())["trainer"]["steps"] == 7


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--resume", "r", "--run-dir", "x"],
        ["pipeline.yaml", "--resume-from", "latest"],
        ["--resume", "r", "--from", "x@1"],
    ],
)
def test_arguments_that_contradict_each_other(args: list[str], world: Any) -> None:
    result = opd("merge", *args)
    assert result.exit_code == 2
    assert "--resume" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--extend", "r"],
        ["pipeline.yaml", "--steps", "3"],
        ["pipeline.yaml", "--extend", "r", "--steps", "3"],
        ["--extend", "r", "--steps", "3", "--run-dir", "x"],
    ],
)
def test_a_longer_run_takes_only_what_it_can_use(args: list[str], world: Any) -> None:
    result = opd("merge", *args)
    assert result.exit_code == 2
    assert "--extend" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["merge", "--extend", "nowhere", "--steps", "3"],
        ["merge", "--from", "nowhere@3"],
        ["merge", "pipeline.yaml", "--from", "base"],
        ["export", "nowhere", "--output", "out"],
        ["export", "base", "--output", "base"],
        ["export", "base", "--output", "out", "--max-shard-size", "large"],
        ["serve", "nowhere"],
        ["chat", "nowhere"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_continued_or_used_is_refused(args: list[str], world: Any) -> None:
    before = sorted(world.root.rglob("*"))
    refused(opd(*args))
    assert sorted(world.root.rglob("*")) == before


# Runs that fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("teacher worker 0: the worker died"), 1, ["failed: teacher worker 0: the worker died"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/two/x"),
            3,
            ["failed: runs/two/x: could not be written: No space left", "no checkpoint", "opd merge --resume runs/two"],
        ),
        (
            StorageError("step-000005: could not be written: Disk quota exceeded"),
            3,
            [
                "failed: step-000005: could not be written: Disk quota exceeded",
                "intact: ",
                "opd merge --resume runs/two",
            ],
        ),
        (KeyboardInterrupt(), 130, ["stopped by Ctrl-C"]),
        (Stopped(signal.SIGINT), 130, ["stopped by Ctrl-C"]),
        (Stopped(signal.SIGTERM), 143, ["stopped by SIGTERM"]),
        (Paused("step 5: monitor length: ..."), 4, ["paused: step 5: monitor length"]),
        (Interrupted(5, Path("runs/two"), signal.SIGTERM), 143, ["opd merge --resume runs/two"]),
        (Interrupted(5, Path("runs/two"), 2), 130, ["after step 5", "opd merge --resume runs/two"]),
    ],
)
def test_how_a_run_ends(
    error: BaseException, code: int, words: list[str], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pipelines.merging.run, "_run_session", fails)
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == code
    assert all(word in result.stderr for word in words), result.stderr


def test_a_bug_of_ours_keeps_its_traceback(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pipelines.merging.run, "_run_session", fails)
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(("package", "engine"), [("torch", True), ("vllm", True), ("a_plugin", False)])
def test_an_engine_that_is_not_installed_is_named(
    package: str, engine: bool, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr(pipelines.merging.run, "_run_session", fails)
    result = opd("merge", "pipeline.yaml")
    if engine:
        refused(result, f"error: package {package}\n", "opd-merge[cpu]", "opd doctor")
    else:
        assert isinstance(result.exception, ModuleNotFoundError)


REPORT = {
    "name": "two",
    "steps": 4,
    "wall_s": 8.0,
    "phase_s": {},
    "response_tokens": 100,
    "response_tokens_per_s": 12.5,
    "versions": {},
    "domains": {"reverse": {"before": 0.25, "after": 0.75, "expert": 1.0, "headroom": 2 / 3}},
    "mean_headroom": 2 / 3,
    "worst_headroom": 2 / 3,
}


def test_a_merge_prints_its_table(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.merging.run, "_run_session", lambda *_: REPORT)
    result = opd("merge", "pipeline.yaml")
    assert result.exit_code == 0
    assert re.search(r"reverse +│ +0\.25 +│ +1\.00 +│ +0\.75 +│ +67 %", result.stdout)
    assert "model: runs/two/model" in result.stdout


def test_an_adapter_is_listed_at_the_end(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(run: Any, *_: Any) -> Any:
        run.paths.adapter.mkdir()
        return REPORT

    monkeypatch.setattr(pipelines.merging.run, "_run_session", session)
    assert "adapter: runs/two/adapter\n" in opd("merge", "pipeline.yaml").stdout
    told = json.loads(opd("merge", "pipeline.yaml", "--run-dir", "runs/b", "--json").stdout.splitlines()[-1])
    assert told["adapter"] == "runs/b/adapter"


@pytest.mark.parametrize(("gained", "goes_on"), [(0.67, True), (0.8, False), (None, False)])
def test_a_merge_says_what_comes_next(
    gained: float | None, goes_on: bool, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pipelines.merging.run, "_run_session", lambda *_: REPORT | {"mean_headroom": gained, "steps": 7}
    )
    said = opd("merge", "pipeline.yaml").stderr
    assert "next: opd chat runs/two, or opd serve runs/two\n" in said
    assert ("further steps: opd merge --extend runs/two --steps 7" in said) is goes_on


def test_a_merge_in_rounds_prints_what_each_gained(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"round": 1, "steps": 2, "mean_gain": 0.25, "mean_headroom": 1 / 3, "mean_headroom_in_round": 1 / 3},
        {"round": 2, "steps": 2, "mean_gain": -0.05, "mean_headroom": None, "mean_headroom_in_round": 0.5},
    ]
    monkeypatch.setattr("pipelines.merging.rounds._merge_rounds", lambda *_: REPORT | {"rounds": rows})
    world.data["rounds"] = 2
    result = opd("merge", world.write())
    assert result.exit_code == 0, result.output
    assert re.search(r"1 +│ +2 +│ +\+0\.25 +│ +33 % +│ +33 %", result.stdout)
    assert re.search(r"2 +│ +2 +│ +-0\.05 +│ +- +│ +50 %", result.stdout)
    assert opd("merge", "--resume", "runs/two").stdout == result.stdout
    refused(opd("merge", world.write(), "--set", "rounds=[{}, {trainer: {stepz: 1}}]"), "rounds.1.trainer.stepz")


def test_report_prints_it_again(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    result = opd("report", tmp_path)
    assert result.exit_code == 0
    assert "67 %" in result.stdout
    assert "<h1>two</h1>" in (tmp_path / "report.html").read_text()
    assert "| reverse | 0.25 | 1.00 | 0.75 | 67 % |" in opd("report", tmp_path, "--markdown").stdout.splitlines()
    refused(opd("report", tmp_path / "none"), tmp_path / "none", "run directory")


def test_a_gate_decides_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    passed = opd("report", tmp_path, "--min-headroom", "0.6", "--max-regression", "0.02")
    assert passed.exit_code == 0 and "gate:" not in passed.stderr
    missed = opd("report", tmp_path, "--min-headroom", "0.9")
    assert missed.exit_code == 1 and "67 %" in missed.stdout
    assert "gate: reverse: headroom 0.667 < 0.9" in missed.stderr
    assert json.loads((tmp_path / "report.json").read_text())["gate"]["passed"] is False
    even = {"even": {"before": 0.5, "after": 0.5, "expert": 0.5, "headroom": None}}
    (tmp_path / "report.json").write_text(json.dumps({**REPORT, "domains": {**REPORT["domains"], **even}}))
    unjudged = opd("report", tmp_path, "--min-headroom", "0.6")
    assert unjudged.exit_code == 0 and "gate: even: --min-headroom does not judge it" in unjudged.stderr
    refused(opd("report", tmp_path, "--min-headroom", "90"), "--min-headroom\n", "90.0")
    refused(opd("report", tmp_path, "--max-regression", "-0.1"), "--max-regression\n")


def test_a_gate_on_a_merge_that_goes_on_is_refused(world: Any) -> None:
    refused(opd("report", world.root, "--min-headroom", "0.9"), world.root, "not finished", "--resume")
    assert not (world.root / "report.html").exists()
    assert opd("report", world.root).exit_code == 0
    assert "not finished" in (world.root / "report.html").read_text()


# Checks


@pytest.mark.parametrize("level", ["fail", "warn"])
@pytest.mark.parametrize("fix_up", [False, True])
def test_a_check_prints_its_findings_and_fails_only_for_failures(
    level: Any, fix_up: bool, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = TeacherComparison(kl=1.25, overlap=0.5, answer_nll=1.0)
    measured = MeasuredTeacher(
        domain="upper", expert="up", leads=True, student_accuracy=0.25, expert_accuracy=0.2, compared=compared
    )
    findings = (
        CheckFinding(level=level, domain="upper", message="no better", fix="leave it out"),
        CheckFinding(level="warn", domain="", message="of all", fix="look"),
    )
    asked = []

    def found(config: PipelineConfig, samples: int, tell: Any) -> CheckReport:
        asked.append((config.seed, samples))
        tell("working")
        memory = (HostMemoryNeed(part="all of it", nbytes=3 << 29, knobs="trainer.ranks"),)
        return CheckReport(
            vocab_size=76, measured=(measured,), findings=findings, memory=memory, log="the log", numbers="chunk 128"
        )

    monkeypatch.setattr(pipelines.check.measure, "check_pipeline", found)
    more = ["--samples", "5", "--set", "seed=3"] + ["--fix-up"] * fix_up
    result = opd("check", "pipeline.yaml", *more)
    assert result.exit_code == (1 if level == "fail" else 0)
    fails = "something fails" + ("" if fix_up else "; `--fix-up` says what to change")
    end = fails if level == "fail" else "nothing fails; next: opd merge pipeline.yaml --set seed=3"
    assert (asked, result.stderr.splitlines()) == ([(3, 5)], ["working", end])
    assert re.search(rf"upper +│ +up +│ +0\.25 +│ +0\.20 +│ +50% +│ +1\.250 +│ +0\.23 +│ +{level}", result.stdout)
    assert re.search(r"all of it +│ +1\.50 +│ +trainer\.ranks", result.stdout)
    assert "the log\nauto: chunk 128\n" in result.stdout
    lines = [f"{level}: upper: no better", "  fix: leave it out", "warn: of all", "  fix: look"]
    assert result.stdout.splitlines()[-len(lines) if fix_up else -2 :] == (lines if fix_up else lines[::2])


# Experts


def add(name: str, *more: str) -> Result:
    return opd("experts", "add", name, "--model", "rev", "--domain", "reverse", *more)


@pytest.mark.parametrize(
    ("command", "args", "word"),
    [
        ("baseline", ["--method", "tie"], "one of: linear"),
        ("baseline", ["--method", "off_policy", "--share", "1.5"], "--share"),
        ("baseline", ["--method", "linear", "--share", "0.5"], "no tokens"),
        ("compare", ["--method", "tie"], "one of: linear"),
        ("compare", ["--share", "0"], "--share"),
        ("compare", ["--seeds", "0,0"], "--seeds"),
    ],
)
def test_baselines_refuse_what_they_cannot_do(command: str, args: list[str], word: str, world: Any) -> None:
    refused(opd(command, "pipeline.yaml", *args), word)
    assert not Path("runs").exists()


def test_a_baseline_of_a_directory_without_a_run_is_refused(world: Any) -> None:
    refused(opd("baseline", ".", "--method", "linear"), "no metrics.jsonl")


def test_a_run_directory_has_its_own_pipeline(world: Any) -> None:
    result = opd("baseline", ".", "--method", "linear", "--run-dir", "other")
    assert result.exit_code == 2
    assert "goes with a PIPELINE" in result.stderr


def test_a_baseline_prints_its_table(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(jobs: list[BaselineJob], tell: object, keep_models: bool) -> list[BaselineResult]:
        assert [(job.root, job.config.seed, keep_models) for job in jobs] == [(Path("runs/two-baselines"), 4, True)] * 2
        score = DomainScore(accuracy=0.25, stderr=0.1, low=0.1, high=0.4, questions=10)
        return [
            BaselineResult(
                method=job.method,
                label=job.method,
                token_share=job.share,
                tokens=12345 if job.share else None,
                seed=4,
                scores={"reverse": score},
                wall_s=1.0,
            )
            for job in jobs
        ]

    monkeypatch.setattr(pipelines.baselines.run, "compute_results", compute)
    result = opd("baseline", "pipeline.yaml", "--method", "slerp,mixed_sft", "--seed", "4", "--keep-models")
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "0.250" in line]
    assert rows == [["slerp", "-", "-", "0.250"], ["mixed_sft", "1", "12,345", "0.250"]]


def test_an_expert_is_registered_listed_shown_verified_and_removed(world: Any) -> None:
    result = add("rev", "--prompts", "reverse.jsonl")
    assert result.exit_code == 0, result.output
    assert "registered rev: LlamaForCausalLM" in result.stdout
    assert json.loads(opd("experts", "list", "--json").stdout)[0]["name"] == "rev"
    assert "reverse" in opd("experts", "list").stdout
    assert json.loads(opd("experts", "show", "rev").stdout)["prompts_count"] == 6
    assert opd("experts", "verify").stdout == "rev: ok\n"
    (world.root / "reverse.jsonl").write_text('{"prompt": "a"}\n')
    verified = opd("experts", "verify", "rev")
    assert verified.exit_code == 1
    assert "changed prompts" in verified.stdout
    assert opd("experts", "remove", "rev").exit_code == 0
    assert json.loads(opd("experts", "list", "--json").stdout) == []
    assert (world.root / "rev" / "model.safetensors").exists()


def test_an_adapter_is_registered_listed_and_verified(world: Any, make_adapter: Any) -> None:
    make_adapter(world.root / "lora", world.root / "base", base_model_name_or_path="org/base")
    given = ("experts", "add", "math", "--model", "lora", "--domain", "reverse")
    refused(opd(*given), "adapter_config.json: base_model_name_or_path", "'org/base'", "--base DIR")
    result = opd(*given, "--base", "base")
    assert result.exit_code == 0, result.output
    assert "registered math: LlamaForCausalLM + LoRA r=4, " in result.stdout
    assert "LlamaForCausalLM + LoRA r=4" in opd("experts", "list").stdout
    shown = json.loads(opd("experts", "show", "math").stdout)
    assert (shown["model"], shown["adapter"]["base"]) == (str(world.root / "lora"), str(world.root / "base"))
    assert opd("experts", "verify").stdout == "math: ok\n"
    (world.root / "base" / "model.safetensors").unlink()
    verified = opd("experts", "verify")
    assert (verified.exit_code, "missing weight file" in verified.stdout) == (1, True)
    refused(add("full", "--base", "base"), "a full model, and the base base", "leave out the base")


def test_two_experts_of_one_name_are_refused(world: Any) -> None:
    assert add("rev").exit_code == 0
    before = (world.root / "registry" / "rev" / "manifest.json").read_bytes()
    refused(add("rev", "--prompts", "reverse.jsonl"), "expert `rev`", "taken", "opd experts remove rev")
    assert (world.root / "registry" / "rev" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["a/b", "..", "../rev", "/rev", "a b", ""])
def test_a_name_that_is_a_path_is_refused(name: str, world: Any) -> None:
    refused(add(name), "name\n", repr(name))
    assert not (world.root / "registry").exists()


def test_twins_are_a_warning(world: Any) -> None:
    add("first")
    result = add("second")
    assert result.exit_code == 0
    assert "warning: first has the same weights" in result.stderr


@pytest.mark.parametrize("command", ["show", "remove", "verify"])
def test_an_unknown_expert_is_refused(command: str, world: Any) -> None:
    add("reverse")
    refused(opd("experts", command, "revers"), "did you mean `reverse`?")


@pytest.mark.parametrize("damage", ["missing", "pickle", "truncated"])
def test_a_bad_model_is_not_registered(damage: str, world: Any) -> None:
    file = world.root / "rev" / "model.safetensors"
    if damage == "missing":
        shutil.rmtree(world.root / "rev")
    elif damage == "pickle":
        file.rename(world.root / "rev" / "pytorch_model.bin")
    else:
        file.write_bytes(file.read_bytes()[:-1])
    refused(add("rev"), "rev")
    assert not (world.root / "registry").exists()


def test_the_registry_is_where_the_user_says(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_REGISTRY", "by-env")
    assert add("rev").exit_code == 0
    assert add("rev", "--registry", "by-option").exit_code == 0
    assert (world.root / "by-env" / "rev" / "manifest.json").exists()
    assert (world.root / "by-option" / "rev" / "manifest.json").exists()
    assert not (world.root / "registry").exists()


# Pipelines and prompts


def test_shipped_pipelines_are_listed_and_can_be_copied(tmp_path: Path) -> None:
    assert "quickstart" in opd("pipelines", "list").stdout
    shown = opd("pipelines", "show", "quickstart").stdout
    assert shown == (ROOT / "pipelines" / "quickstart.yaml").read_text()
    resolved = yaml.safe_load(opd("pipelines", "show", "quickstart", "--set", "seed=5").stdout)
    assert PipelineConfig.model_validate(resolved).seed == 5
    assert resolved["rollout"]["temperature"] == 1.0
    refused(opd("pipelines", "show", "quickstrat"), "quickstrat\n", "opd pipelines list")


def test_the_schema_is_json() -> None:
    assert json.loads(opd("pipelines", "schema").stdout)["properties"]["trainer"]


def test_prompts_are_made_and_read_back(tmp_path: Path) -> None:
    result = opd("prompts", "make", "letters", "--output", tmp_path, "--train", "5", "--eval", "3")
    assert result.exit_code == 0, result.output
    files = sorted(tmp_path.rglob("*.jsonl"))
    assert {f.name for f in files} == {"train.jsonl", "eval.jsonl"}
    assert len((files[0]).read_text().splitlines()) == 3
    assert len((files[1]).read_text().splitlines()) == 5


def test_evaluate_refuses_a_domain_without_an_exam(world: Any) -> None:
    refused(opd("evaluate", "base", "--pipeline", "pipeline.yaml", "--domains", "upper,lower"), "--domains", "lower")


def test_evaluate_refuses_a_model_that_is_not_there(world: Any) -> None:
    refused(opd("evaluate", "nowhere", "--pipeline", "pipeline.yaml"), "nowhere\n")


# Teachers


@pytest.fixture
def no_serving(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what got as far as starting Ray."""
    import pipelines.serve

    started: list[Any] = []

    class Started(Exception):
        pass

    def session(*args: Any) -> None:
        started.append(args)
        raise Started

    monkeypatch.delenv("OPD_TEACHERS_TOKEN", raising=False)
    monkeypatch.setattr(pipelines.serve, "ray_session", session)
    return started


def test_teachers_are_not_served_to_other_machines_without_tls_and_token(
    world: Any, no_serving: list[Any], certificate: tuple[Path, Path]
) -> None:
    def serve(*more: str | Path, listen: str = "0.0.0.0:0") -> Result:
        return opd("teachers", "serve", "pipeline.yaml", "--listen", listen, *more)

    token = world.root / "token"
    token.write_text("s3cret")
    token.chmod(0o644)
    tls = ("--tls-cert", certificate[0], "--tls-key", certificate[1])
    refused(serve(), "--listen\n", "without TLS and a token")
    refused(serve(*tls), "--listen\n", "without a token")
    refused(serve(*tls, "--token-file", token), "chmod 600")
    token.chmod(0o600)
    refused(serve("--token-file", token), "--listen\n", "without TLS")
    refused(serve(*tls[:2], listen="127.0.0.1:0"), "--tls-cert and --tls-key\n")
    refused(serve(listen="8815"), "--listen\n", "HOST:PORT")
    assert no_serving == []
    serve(*tls, "--token-file", token)
    serve(listen="127.0.0.1:0")
    assert len(no_serving) == 2


def test_teachers_are_checked_before_anything_starts(world: Any, no_serving: list[Any]) -> None:
    def serve(*more: str, listen: str = "127.0.0.1:0") -> Result:
        return opd("teachers", "serve", "pipeline.yaml", "--listen", listen, *more)

    for domain in ("reverse", "upper"):
        (world.root / f"{domain}.jsonl").unlink()
    serve()
    assert len(no_serving) == 1, "serving needs no prompts"
    elsewhere = ["--set", "teachers.engine=flight", "--set", "teachers.address=grpc://localhost:1"]
    refused(serve(*elsewhere), "teachers.engine\n", "found:  flight")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(serve(listen=f"127.0.0.1:{taken.getsockname()[1]}"), "--listen\n", "in use")
    (world.root / "up" / "model.safetensors").unlink()
    refused(serve(), "up\n", "no weights")
    assert len(no_serving) == 1


def test_a_merge_with_teachers_elsewhere_reads_its_secrets_first(world: Any, certificate: tuple[Path, Path]) -> None:
    world.data["teachers"] = {
        "engine": "flight",
        "address": "grpc+tls://teachers.example:1",
        "tls_root_certs": "nowhere.pem",
        "token_file": "token",
    }
    (world.root / "token").write_text("s3cret")
    (world.root / "token").chmod(0o640)
    refused(opd("merge", world.write()), "token\n", "mode 640")
    (world.root / "token").chmod(0o600)
    refused(opd("merge", world.write()), "teachers.tls_root_certs\n", "nowhere.pem")
    assert not (world.root / "runs").exists()


# Help


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_every_command_has_help(command: list[str]) -> None:
    result = opd(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_version() -> None:
    assert opd("--version").stdout == f"{__version__}\n"


def test_exit_codes_reach_the_shell(world: Any) -> None:
    (world.root / "pipeline.yaml").write_text("name: [\n")
    done = subprocess.run(
        [sys.executable, ROOT / "cli.py", "merge", "pipeline.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: pipeline.yaml: line 2")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [(["init", "--student", "x"], "no terminal to ask at"), (["environments", "play", "maze"], "no terminal")],
)
def test_a_closed_standard_input_is_no_terminal(args: list[str], says: str, tmp_path: Path) -> None:
    """As a service manager or `<&-` leaves it: Python has no stream then."""
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-P", "-m", "cli", *args]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and says in done.stderr, done.stderr
