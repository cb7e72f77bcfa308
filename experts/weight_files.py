"""The weight files of a model directory: which of them a loader reads, their headers and their hashes.

Every refusal is a ModelError that names the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from experts.merge_first import explain_merging
from experts.safetensors_header import Tensor, read_header
from opd.errors import ModelError
from opd.files import blake3_file
from opd.models.files import INDEX, SINGLE, read_index, weight_files
from opd.models.lora import ADAPTER_CONFIG
from opd.text import quote_for_shell

Hashes = dict[Path, dict[str, str]]
"""Directory → weight file → BLAKE3."""

_TO_SAFETENSORS = (
    "AutoModelForCausalLM.from_pretrained(dir).save_pretrained(out, safe_serialization=True), and the tokenizer with it: "
    "AutoTokenizer.from_pretrained(dir).save_pretrained(out)"
)
GATHER = (
    "save with `stage3_gather_16bit_weights_on_model_save: true`, or within deepspeed.zero.GatheredParameters, or with "
    "accelerator.get_state_dict(model)"
)
"""Advice for users: how to save whole tensors if each rank has only a part of each."""
_PARTS = {
    r"model_world_size_\d+_rank_\d+\.pt": "python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir OUT",
    r"zero_to_fp32\.py": "python {path}/zero_to_fp32.py {path} OUT --safe_serialization",
    r".*\.distcp": "accelerate merge-weights {path} OUT",
}
"""Files in which ranks saved their parts of a model -> the command of the tool that wrote them, which joins the parts."""
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")


def weight_hashes(path: Path, hash_cache: Hashes | None = None) -> dict[str, str]:
    """Return file name → BLAKE3 hash of every weight file of the model that exists.

    Hashes in `hash_cache` are not computed again, and new ones are added to it, so that the base of several adapters is read
    once. Raises: OSError; ModelError for a damaged index.
    """
    hash_cache = {} if hash_cache is None else hash_cache
    if path not in hash_cache:
        hash_cache[path] = {file.name: blake3_file(file) for file in weight_files(path) if file.is_file()}
    return hash_cache[path]


def weight_tensors(path: Path) -> dict[str, Tensor]:
    """Return the header's entry of every tensor that a loader reads. Raises: ModelError."""
    return {name: tensor for shard in weight_shards(path) for name, tensor in read_header(shard).items()}


def weight_shards(path: Path) -> list[Path]:
    """Return the files that hold the model: `weight_files`, checked. Raises: ModelError."""
    refuse_no_directory(path)
    _refuse_adapter(path)
    names = [file.name for file in _list_files(path, ".safetensors")]
    if (path / INDEX).is_file():
        # transformers would read model.safetensors, vLLM the shards of the index.
        ambiguous = _shards_of_index(path / INDEX) != [SINGLE] and SINGLE in names
    else:
        if not names:
            _refuse_no_safetensors(path)
        # Without an index transformers reads model.safetensors and vLLM every file.
        ambiguous = names != [SINGLE]
    if ambiguous:
        raise ModelError.at(
            path,
            found=f"weights {', '.join(names)}, {'an' if (path / INDEX).is_file() else 'no'} index",
            wanted=f"{SINGLE} alone, or {INDEX} and the shards that it names",
            fix="move the other files away or save the model again with save_pretrained",
        )
    return weight_files(path)


def _shards_of_index(index: Path) -> list[str]:
    shards = sorted(set(read_index(index)))
    for name in shards:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError.at(
                f"{index}: weight_map",
                found=f"shard {name!r}",
                wanted="the name of a .safetensors file in the same directory",
                fix="save the model again with save_pretrained",
            )
        if not (index.parent / name).is_file():
            raise ModelError.at(
                index.parent / name,
                found="no such file",
                wanted=f"the shard that {index.name} names",
                fix="copy the missing shard; the download or copy was not complete",
            )
    return shards


def refuse_no_directory(path: Path) -> None:
    """Refuse a path that is missing or a file, and a directory with a link that leads out of it. Raises: ModelError."""
    if not path.is_dir():
        raise ModelError.at(
            path,
            found="a file" if path.is_file() else "no such directory",
            wanted="a Hugging Face model directory",
            fix="give the directory that holds config.json; paths are relative to the current directory",
        )
    _refuse_links_out(path)


def _refuse_links_out(path: Path) -> None:
    """Refuse links out of the directory. In somebody else's directory such a link could copy any file here into a model.

    Links from `snapshots/REVISION/` to `blobs/` of the same repository are fine, because the hub's cache is made of them.
    """
    root = path.resolve()
    inside = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for file in path.iterdir():
        # Unlike `resolve`, `realpath` does not raise for a loop of links; reading the file fails later.
        target = Path(os.path.realpath(file))
        if file.is_symlink() and not any(target.is_relative_to(root_dir) for root_dir in inside):
            raise ModelError.at(
                file,
                found=f"a link to {file.readlink()}, outside of the directory",
                wanted="files that lie in the model's directory",
                fix=f"if you trust it, copy the directory with what its links name: cp -rL {path} COPY",
            )


def _refuse_adapter(path: Path) -> None:
    # An adapter is refused even beside full weights, because transformers would then load the adapter's base instead.
    if (path / ADAPTER_CONFIG).is_file():
        raise ModelError.at(
            path / ADAPTER_CONFIG,
            found="a PEFT adapter",
            wanted="a full model",
            fix=f"{explain_merging(path)}; if the weights here are merged already, delete {ADAPTER_CONFIG}",
        )


def _refuse_no_safetensors(path: Path) -> None:
    names = sorted(file.name for file in path.iterdir())
    for pattern, command in _PARTS.items():
        part_files = [name for name in names if re.fullmatch(pattern, name)]
        if part_files:
            raise ModelError.at(
                path,
                found=f"parts of a model, as the ranks of a training saved them: {', '.join(part_files[:3])}",
                wanted=f"{SINGLE} or {INDEX} with its shards",
                fix=f"join them: {command.format(path=quote_for_shell(path))}; then give OUT, with the model's config.json and tokenizer",
            )
    other_weights = [file.name for suffix in OTHER_FORMATS for file in _list_files(path, suffix)]
    if not other_weights:
        raise ModelError.at(
            path,
            found="no weights",
            wanted=f"{SINGLE} or {INDEX} with its shards",
            fix="copy the weight files into the directory",
        )
    if other_weights[0].endswith(".gguf"):
        fix = f"`opd models from-gguf {quote_for_shell(path / other_weights[0])} --output OUT` converts it, with its tokenizer"
    else:
        fix = f"convert in a place you trust: {_TO_SAFETENSORS}"
    raise ModelError.at(
        path / other_weights[0],
        found=f"only {', '.join(other_weights)}",
        wanted="safetensors weights; the other formats may run code when loaded or need conversion",
        fix=fix,
    )


def _list_files(path: Path, suffix: str) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.name.endswith(suffix) and file.is_file())
