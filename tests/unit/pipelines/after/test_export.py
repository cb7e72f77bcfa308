"""Copies of a model for other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.errors import ConfigError, ModelError, OpdError, RunDirError, RunError
from pipelines.after.export import ExportOptions, export_model
from pipelines.after.models import LocalModel, find_model

CONVERTER = """#!/bin/sh
echo "$@"
[ -e "$1/model.safetensors" ] && [ "{wanted}" = ok ] && echo GGUF > "$3"
"""


def found(path: Path) -> LocalModel:
    return find_model(path, lambda line: None)


def test_a_copy_in_shards_of_another_dtype_is_what_transformers_would_make(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "model"
    files = export_model(found(tiny_model_dir), output, ExportOptions(dtype="bfloat16", max_shard_bytes=20_000))
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert len(shards) > 2 and all(file.stat().st_size < 22_000 for file in shards)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in shards for t in load_file(file).values())
    copy = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    want = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).to(torch.bfloat16)
    assert copy.dtype == torch.bfloat16
    for (name, mine), (other, theirs) in zip(copy.named_parameters(), want.named_parameters(), strict=True):
        assert name == other and torch.equal(mine, theirs)
    assert AutoTokenizer.from_pretrained(output)("abc")["input_ids"]
    assert [p.name for p in tmp_path.joinpath("out").iterdir()] == ["model"]


def test_a_plain_copy_has_the_same_bits(tiny_model_dir: Path, tmp_path: Path) -> None:
    export_model(found(tiny_model_dir), tmp_path / "out", ExportOptions())
    mine, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "out", tiny_model_dir))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_an_architecture_wants_in_float32_stays_so(make_mixture_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = make_mixture_dir(tmp_path / "model", "deepseek_v3")
    export_model(found(source), tmp_path / "out", ExportOptions(dtype="bfloat16"))
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    biases = {kind for name, kind in kinds.items() if name.endswith("e_score_correction_bias")}
    assert biases == {torch.float32} and kinds["model.norm.weight"] == torch.bfloat16


def test_directories_beside_the_weights_stay_behind(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "model")
    for name in ("LICENSES", "tokenizer", "README.md"):
        (source / name).mkdir()
    files = export_model(found(source), tmp_path / "out", ExportOptions())
    assert all(file.is_file() for file in files) and "tokenizer.json" in [file.name for file in files]


def test_numbers_that_the_dtype_cannot_hold_are_refused(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 70_000.0
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"(?s)tensor `model.norm.weight`.*bfloat16"):
        export_model(found(source), tmp_path / "out", ExportOptions(dtype="float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export_model(found(source), tmp_path / "out", ExportOptions(dtype="bfloat16"))


def test_an_architecture_that_transformers_does_not_know_is_refused(
    make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model_dir(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "newest"}))
    with pytest.raises(ModelError, match="newest"):
        export_model(found(source), tmp_path / "out", ExportOptions(dtype="bfloat16"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def converter(root: Path, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = root / "bin" / "llama-convert-hf-to-gguf"
    file.parent.mkdir()
    file.write_text(CONVERTER.format(wanted=wanted))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_gguf_is_written_by_the_converter(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(tmp_path, "ok", monkeypatch)
    files = export_model(found(tiny_model_dir), tmp_path / "out", ExportOptions(gguf=True))
    (file,) = [file for file in files if file.suffix == ".gguf"]
    assert file.name == f"{tiny_model_dir.name}-float32.gguf" and file.read_text() == "GGUF\n"


def test_a_refused_or_failed_export_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "there"))
    options = ExportOptions(gguf=True)
    with pytest.raises(ConfigError, match=r"convert_hf_to_gguf\.py on PATH"):
        export_model(found(tiny_model_dir), tmp_path / "out", options)
    with pytest.raises(RunDirError, match="something that exists"):
        export_model(found(tiny_model_dir), tmp_path / "there", options)
    converter(tmp_path, "fail", monkeypatch)
    with pytest.raises(RunError, match=r"ended with 1, and nothing was exported:\n.*--outtype f32"):
        export_model(found(tiny_model_dir), tmp_path / "out", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "there"]


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpdError):
        found(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "pipeline.yaml").write_text("{}")
    with pytest.raises(RunDirError, match="the merge has not come to its end"):
        found(tmp_path)
