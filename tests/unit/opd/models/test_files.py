"""Weight files written tensor by tensor are those that huggingface_hub writes of all tensors at once, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from opd.errors import ModelError, StorageError
from opd.files import raise_storage_errors
from opd.models import files as model_files
from opd.models.files import ModelFiles, weight_files, write_file

STATE = {
    "z.weight": torch.arange(6.0).view(2, 3),
    "a.weight": torch.ones(5, dtype=torch.bfloat16),
    "b.bias": torch.arange(3, dtype=torch.int64),
    "naïve": torch.tensor(2.5),
    "m.weight": torch.arange(12.0).view(3, 4).t(),
    "empty": torch.empty(0, 4),
}


def write(path: Path, names: list[str]) -> Path:
    path.mkdir()
    with ModelFiles(path, {name: torch.empty_like(t, device="meta") for name, t in STATE.items()}) as files:
        for name in names:
            files.write({name: STATE[name]})
        files.finish()
    return path


@pytest.mark.parametrize("shard", ["5GB", 60, 20])
def test_the_files_are_the_same_in_whatever_order_the_tensors_come(
    shard: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "SHARD", shard)
    (tmp_path / "wanted").mkdir()
    save_torch_state_dict(dict(STATE), tmp_path / "wanted", max_shard_size=shard)
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "wanted").iterdir()}
    assert ("model.safetensors" in wanted) == (shard == "5GB")
    for number, names in enumerate((list(STATE), list(reversed(STATE)))):
        out = write(tmp_path / str(number), names)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == wanted
    found = {name: t for name in wanted if name.endswith("s") for name, t in load_file(out / name).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


def test_a_single_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in STATE.items()}
    save_file(state, tmp_path / "wanted")
    write_file(tmp_path / "found", state)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def index(path: Path, **files: list[str]) -> None:
    names = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_the_files_of_a_model_are_those_that_transformers_reads(
    tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    """An index of two shards beside three of an earlier save, and Mistral's `consolidated.safetensors`."""
    from transformers import AutoModelForCausalLM

    model = make_model_dir(tmp_path / "model", seed=1)
    state = load_file(model / "model.safetensors")
    names = sorted(state)
    parts = {"model-00001-of-00002": names[:5], "model-00002-of-00002": names[5:]}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, model / f"{file}.safetensors", {"format": "pt"})
    for i in range(3):
        stale = {name: state[name] * 0 for name in names[i::3]}
        save_file(stale, model / f"model-0000{i + 1}-of-00003.safetensors", {"format": "pt"})
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, model / "consolidated.safetensors")
    index(model, **parts)
    (model / "model.safetensors").unlink()
    assert [file.stem for file in weight_files(model)] == list(parts)
    found = {name: t for file in weight_files(model) for name, t in load_file(file).items()}
    theirs = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert found.keys() == state.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "b"}}',
    ],
)
def test_an_index_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json.*\n  found:"):
        weight_files(tmp_path)


def test_a_tensor_that_never_came_or_is_another_is_no_small_matter(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"never written: \['a.weight'\]"):
        write(tmp_path / "a", [name for name in STATE if name != "a.weight"])
    (tmp_path / "b").mkdir()
    with ModelFiles(tmp_path / "b", {"x": torch.empty(3, device="meta")}) as files, pytest.raises(AssertionError):
        files.write({"x": torch.zeros(3, dtype=torch.bfloat16)})


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    files = ModelFiles(tmp_path, {"x": torch.empty(3, device="meta")})
    with (
        pytest.raises(StorageError, match="could not be written: No space left on device"),
        raise_storage_errors(tmp_path),
        files,
    ):
        pass
