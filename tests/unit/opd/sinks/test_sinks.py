"""Numbers that reach a sink come back out of it, and a resume shows no step twice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from opd.config.sections import LoggingConfig
from opd.errors import ConfigError, RunError
from opd.records.step import StepRecord
from opd.sinks import open_sinks, refuse_missing
from opd.sinks.scalars import flatten_record


def record(step: int, loss: float, **more: Any) -> StepRecord:
    numbers = {"grad_norm": 1.0, "lr": 0.1, "logprob_gap": 0.0, "probe_gap": 0.0}
    counts = {"response_tokens": 8, "prompt_tokens": 6, "truncated": 1, "quarantined": {"a": 1, "b": 2}}
    domains = {"a": {"loss": 2 * loss, "tokens": 5, "samples": 2}}
    first = {"step": step, "loss": loss}
    return StepRecord.from_json({**first, **numbers, **counts, "domains": domains, "phase_s": {"train": 0.5}, **more})


def take(config: LoggingConfig, run_dir: Path, done: int, records: list[StepRecord]) -> None:
    with open_sinks(config, run_dir, done) as sinks:
        for one in records:
            for sink in sinks:
                sink.step(one)


def test_the_names_of_a_record() -> None:
    found = flatten_record(record(3, 0.25, accuracy={"a": 0.5, "b": 1.0}))
    assert found == {
        "step/loss": 0.25, "step/grad_norm": 1.0, "step/lr": 0.1, "step/logprob_gap": 0.0, "step/probe_gap": 0.0,
        "step/drift": 0.0,
        "step/response_tokens": 8.0, "step/prompt_tokens": 6.0, "step/truncated": 1.0, "step/quarantined": 3.0,
        "step/accuracy": 0.75, "phase_s/train": 0.5, "loss/a": 0.5, "tokens/a": 5.0, "samples/a": 2.0,
        "accuracy/a": 0.5, "accuracy/b": 1.0,
    }  # fmt: skip


def test_how_busy_the_roles_were_and_how_old_the_tokens() -> None:
    found = flatten_record(record(3, 0.25, busy_s={"rollout": 0.25, "trainer": 0.5}, token_ages={"0": 4, "1": 6}))
    assert {name: found[name] for name in found if name.split("/")[0] in ("utilisation", "token_age")} == {
        "utilisation/rollout": 0.5, "utilisation/trainer": 1.0, "token_age/0": 4.0, "token_age/1": 6.0,
    }  # fmt: skip


def test_indexers_that_learn_have_a_loss() -> None:
    found, plain = flatten_record(record(3, 0.25, indexer_loss=0.5)), flatten_record(record(3, 0.25))
    assert found == plain | {"step/indexer_loss": 0.5}


def test_rewards_have_curves_of_their_own() -> None:
    a = {"episodes": 2, "reward": 0.5, "tokens": 8, "loss": 0.75, "masked": 0.25}
    b = {"episodes": 0, "reward": 0.0, "tokens": 0, "loss": 0.0, "masked": 0.0}
    reward = {"weight": 2.0, "loss": 0.125, "masked": 0.25, "domains": {"a": a, "b": b}, "credit": {"flat": 0.5}}
    found = flatten_record(record(3, 0.25, reward=reward | {"cosine": -0.5}))
    plain = flatten_record(record(3, 0.25))
    assert found["step/loss"] == 0.25
    assert {name: value for name, value in found.items() if name not in plain} == {
        "step/policy_loss": 0.125, "step/reward_weight": 2.0, "step/masked": 0.25, "step/cosine": -0.5,
        "reward/a": 0.5, "policy_loss/a": 0.75, "masked/a": 0.25, "credit/flat": 0.5,
    }  # fmt: skip


def test_tensorboard_forgets_the_steps_that_a_resume_takes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Event files are read by name: second, host, process, number. Two of one second are read in the wrong order where the
    # number gains a digit ("10" before "9"); a run and its resume are never of one second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))

    def read() -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return {name: [(e.step, round(e.value, 4)) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}

    config = LoggingConfig()
    take(config, tmp_path, 0, [record(1, 0.5), record(2, 0.4), record(3, 0.9)])
    assert read()["step/loss"] == [(1, 0.5), (2, 0.4), (3, 0.9)]
    take(config, tmp_path, 1, [record(2, 0.4), record(3, 0.3), record(4, 0.2)])
    found = read()
    assert found["step/loss"] == [(1, 0.5), (2, 0.4), (3, 0.3), (4, 0.2)]
    assert found["loss/a"] == [(1, 1.0), (2, 0.8), (3, 0.6), (4, 0.4)]


def test_a_killed_run_has_its_steps_on_disk(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(LoggingConfig(), tmp_path, 0) as sinks:
        sinks[0].step(record(1, 0.5))
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [e.step for e in events.Scalars("step/loss")] == [1]


def test_nothing_is_written_that_was_not_asked_for(tmp_path: Path) -> None:
    take(LoggingConfig(tensorboard=False), tmp_path, 0, [record(1, 0.5)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "mlflow"])
def test_a_sink_without_its_package_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorboard", "wandb", "mlflow"} - {key}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    asked = {"tensorboard": True, "wandb": "a-project", "mlflow": "sqlite:///x.db"}
    refuse_missing(LoggingConfig(**asked | {key: False if key == "tensorboard" else None}))
    with pytest.raises(ConfigError, match=rf"logging\.{key}\n(?s:.*)pip install {key}"):
        refuse_missing(LoggingConfig(**asked))


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = LoggingConfig(tensorboard=False, mlflow=uri)
    take(config, tmp_path, 0, [record(1, 0.5), record(2, 0.4)])
    with pytest.raises(RunError, match="died"):
        fail(config, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "opd-merge"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    take(config, tmp_path, 1, [record(2, 0.4), record(3, 0.3)])
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/a")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.8), (3, 0.6)]
    assert run.info.status == "FINISHED"


def fail(config: LoggingConfig, run_dir: Path) -> None:
    with open_sinks(config, run_dir, 2):
        raise RunError("a worker died")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = LoggingConfig(tensorboard=False, wandb="a-project")
    take(config, tmp_path, 0, [record(1, 0.5), record(2, 0.4)])
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    name = (tmp_path / "wandb" / "id").read_text()
    assert kept.name == f"run-{name}.wandb"
    data = kept.read_bytes()
    assert b"step/loss" in data and b"a-project" in data
