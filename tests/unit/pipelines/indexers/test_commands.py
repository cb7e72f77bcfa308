"""`opd indexers search` and `opd indexers train`, on a tiny model."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import opd.indexers.search
from cli import app
from experts.weight_check import check_weights
from opd.indexers.training import IndexerTraining
from opd.models.weights import load_causal_lm
from tests.conftest import build_model_dir
from tests.sparse_models import TOPK, build_sparse_model_dir

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def opd_indexers(*args: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["indexers", *map(str, args)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sparse_model_dir(tmp_path_factory.mktemp("sparse") / "model", layers=4)


def write_texts(file: Path, length: int = 8 * TOPK, rows: int = 12, **columns: str) -> Path:
    rng = random.Random(0)
    lines = [{"prompt": "".join(rng.choices(LETTERS, k=length)), **columns} for _ in range(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl")


def search(model: Path, texts: Path, output: Path, *args: str) -> Result:
    return opd_indexers("search", model, "--prompts", texts, "--output", output, "--keep", 0.5, *args)


def test_a_search_leaves_a_config_that_transformers_loads_with_the_same_loss(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    done = search(model, texts, tmp_path / "found", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["pattern"].count("F") == 2 and result["pattern"][0] == "F" and result["uniform_pattern"] == "FSFS"
    shutil.copytree(model, tmp_path / "model")
    shutil.copy(tmp_path / "found" / "config.json", tmp_path / "model")
    lm = load_causal_lm(tmp_path / "model", torch.float32)
    assert [layer.self_attn.indexer is not None for layer in lm.model.layers] == [c == "F" for c in result["pattern"]]
    ids = torch.tensor([list(range(4, 4 + 26)) * 2])
    assert lm(ids[:, : 8 * TOPK], labels=ids[:, : 8 * TOPK]).loss > 0


def test_a_search_that_is_killed_goes_on_to_the_same_result(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(model, texts, tmp_path / "whole", "--json", "--batch-size", "4")
    sweeps = 0
    original = opd.indexers.search._sum_candidate_losses

    def break_in_second_step(*args: Any) -> Any:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 5:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(opd.indexers.search, "_sum_candidate_losses", break_in_second_step)
        assert search(model, texts, tmp_path / "cut", "--batch-size", "4").exit_code == 130
    done = search(model, texts, tmp_path / "cut", "--json", "--batch-size", "4")
    assert "going on after 1 steps and 1 of 3 batches" in done.stderr
    assert json.loads(done.stdout) == json.loads(whole.stdout)
    other = search(model, texts, tmp_path / "cut", "--batch-size", "5")
    assert other.exit_code == 2 and "a search with another batch_size" in other.stderr


def test_texts_in_which_nothing_is_chosen_are_refused(model: Path, tmp_path: Path) -> None:
    short = write_texts(tmp_path / "short.jsonl", length=TOPK)
    for args in (("search", "--keep", "0.5"), ("train", "--steps", "1")):
        done = opd_indexers(args[0], model, "--prompts", short, "--output", tmp_path / "out", *args[1:])
        assert done.exit_code == 2 and "no counted token has more than 6 to read" in done.stderr, done.output
        assert not (tmp_path / "out").exists()


def test_texts_in_which_little_is_chosen_are_warned_about(model: Path, tmp_path: Path) -> None:
    done = search(model, write_texts(tmp_path / "short.jsonl", length=TOPK + 3), tmp_path / "out")
    assert done.exit_code == 0 and "warning: only 25 % of the counted tokens" in done.stderr


def test_a_model_without_shared_indexers_is_refused(tmp_path: Path, texts: Path) -> None:
    done = search(build_model_dir(tmp_path / "llama"), texts, tmp_path / "out")
    assert done.exit_code == 2 and "share no indexer" in done.stderr


def test_keeping_all_is_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    done = opd_indexers("search", model, "--prompts", texts, "--output", tmp_path / "out", "--keep", 1)
    assert done.exit_code == 2 and "fewer indexers than the model has" in done.stderr


def test_training_changes_the_indexers_that_are_kept_and_nothing_else(model: Path, texts: Path, tmp_path: Path) -> None:
    done = opd_indexers(
        "train", model, "--prompts", texts, "--output", tmp_path / "out", "--pattern", "FSFS", "--steps", 30,
        "--sparse-steps", 4, "--lr", 1e-2, "--chunk", 16, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result["indexers_after"]) == {"0", "2"}
    for layer in ("0", "2"):
        assert result["indexers_after"][layer]["kl"] < 0.5 * result["indexers_before"][layer]["kl"]
    check_weights(tmp_path / "out")
    old, new = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    gone = {name for name in old if ".indexer." in name and int(name.split(".")[2]) in (1, 3)}
    assert set(old) - set(new) == gone and gone
    changed = {name for name in new if not torch.equal(old[name], new[name])}
    assert changed == {name for name in new if ".indexer." in name}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["index_topk_pattern"] == "FSFS"
    again = opd_indexers("train", model, "--prompts", texts, "--output", tmp_path / "out")
    assert again.exit_code == 2 and "something that exists" in again.stderr


def test_a_training_that_is_killed_goes_on_to_the_same_model(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.indexers.train.SAVE_EVERY", 4)
    steps = 0
    original = IndexerTraining.measure

    def train(output: Path, *args: str) -> Result:
        options = ("--pattern", "FSFS", "--steps", 6, "--sparse-steps", 5, "--lr", 1e-2, "--batch-size", 5)
        return opd_indexers("train", model, "--prompts", texts, "--output", output, *options, *args)

    def break_in_second_stage(*args: Any, train: bool = False, **kwargs: Any) -> Any:
        nonlocal steps
        steps += train
        if steps == 10:
            raise KeyboardInterrupt
        return original(*args, train=train, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(IndexerTraining, "measure", break_in_second_stage)
        assert train(tmp_path / "cut").exit_code == 130
    assert not (tmp_path / "cut").exists()
    other = train(tmp_path / "cut", "--seed", "1")
    assert other.exit_code == 2 and "another settings" in other.stderr
    done, whole = train(tmp_path / "cut", "--json"), train(tmp_path / "whole", "--json")
    assert "going on after step 8" in done.stderr and json.loads(done.stdout) == json.loads(whole.stdout)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert not list(tmp_path.glob(".cut*"))


def test_without_steps_a_model_gets_the_pattern_of_a_search(model: Path, texts: Path, tmp_path: Path) -> None:
    result = json.loads(search(model, texts, tmp_path / "found", "--json").stdout)
    done = opd_indexers(
        "train", model, "--prompts", texts, "--output", tmp_path / "out", "--pattern", tmp_path / "found", "--steps", 0,
        "--sparse-steps", 0,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["index_topk_pattern"] == result["pattern"]
    old, new = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert all(torch.equal(old[name], tensor) for name, tensor in new.items())
