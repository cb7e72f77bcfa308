"""PEFT LoRA adapters: read and check a directory, and merge an adapter into its base.

    adapter_config.json ─── rank, alpha, base ──┐
    adapter_model.safetensors ── header only ───┴─ inspect_adapter ── AdapterInfo
                                                   merge_adapter ──── a full model directory, tensor by tensor

Only adapters for which PEFT computes y = W x + scaling * B (A x) on linear layers are accepted. Any other option is refused,
and the error names it.
"""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experts.json_files import read_json, refuse_custom_code, validate_json
from experts.merge_first import explain_merging
from experts.model_dir import EMBEDDINGS, HEADS, ModelInfo, inspect_model
from experts.safetensors_header import Tensor, data_start, read_header
from experts.weight_files import GATHER, OTHER_FORMATS, Hashes, refuse_no_directory, weight_shards, weight_tensors
from opd.errors import ModelError
from opd.files import blake3_file
from opd.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, merge_update, read_updates, split_name
from opd.records.types import Teacher
from opd.settings.strict import Strict

_READ = {"peft_type", "base_model_name_or_path", "bias", "init_lora_weights", *LoraConfig.model_fields}
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "peft_version", "revision", "runtime_config", "task_type"),
    # These say which modules were chosen, which the tensors' names show as well.
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
    # These matter only in training, or only together with another option, which is refused.
    *("ensure_weight_tying", "eva_config", "lora_dropout", "megatron_core", "qalora_group_size"),
}
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Harmless values of `init_lora_weights`. PiSSA, OLoRA, LoftQ and others also change the base, so their adapters do not fit
the original base."""
_FLOATS = ("F64", "F32", "BF16", "F16")


class AdapterInfo(Strict):
    """The facts about an adapter directory; the registry's manifests hold this record."""

    path: str
    """Absolute directory, symbolic links resolved."""
    base: str
    """Absolute directory of its base model."""
    rank: int
    """The largest of its modules' ranks."""
    alpha: float
    """`lora_alpha`; a module may have a value of its own."""
    target_modules: tuple[str, ...]
    """Last parts of the names of the modules that it changes, e.g. `q_proj`."""
    parameters: int
    """Count of the numbers in its weight file."""
    files: dict[str, str]
    """File name → BLAKE3 hash of its weights and its configuration; empty if hashing was not asked for."""


def is_adapter(path: Path) -> bool:
    """Return True if the directory holds an adapter's configuration."""
    return (path / ADAPTER_CONFIG).is_file()


def inspect_expert(
    path: Path, base: Path | None = None, hash_cache: Hashes | None = None, *, hash_files: bool = True
) -> tuple[ModelInfo, AdapterInfo | None]:
    """Read and hash a full model, or an adapter and its base.

    `base`: see `inspect_adapter`. `hash_cache`: see `weight_hashes`. Without `hash_files` only headers are read. Raises:
    ModelError, also if `base` is given for a full model.
    """
    if is_adapter(path):
        adapter = inspect_adapter(path, base, hash_files)
        return inspect_model(Path(adapter.base), hash_files, hash_cache), adapter
    if base is not None:
        refuse_no_directory(path)
        raise ModelError.at(
            path,
            found=f"a full model, and the base {base}",
            wanted=f"a base only for a LoRA adapter, a directory with {ADAPTER_CONFIG}",
            fix="leave out the base (`base` in a pipeline, --base), or give the adapter's directory",
        )
    return inspect_model(path, hash_files, hash_cache), None


def inspect_adapter(path: Path, base: Path | None = None, hash_files: bool = True) -> AdapterInfo:
    """Read and check an adapter directory against the headers of its base; no tensor is loaded.

    `base` is the base's directory; by default the one that the adapter names, if there is one.
    Raises: ModelError if it is not plain LoRA on linear layers, if files are missing, damaged or pickles, if the base
    cannot be found or is itself refused, or if a tensor has no module in the base or does not fit the module's shape.
    """
    refuse_no_directory(path)
    weights = _weight_file(path)
    file = path / ADAPTER_CONFIG
    data = read_json(file)
    refuse_custom_code(file, data)
    _refuse_unsupported(file, data)
    config = validate_json(LoraConfig, data, file)
    base_dir = _find_base(file, data, base)
    tensors = read_header(weights)
    empty = next((name for name, tensor in tensors.items() if not tensor.numel), None)
    if empty is not None:
        raise ModelError.at(
            f"{weights}: tensor `{empty}`",
            found=f"shape {tensors[empty].shape}, no number",
            wanted="whole matrices",
            fix=f"the ranks of DeepSpeed's ZeRO-3 (or FSDP) did not gather them: {GATHER}",
        )
    ranks = _check_tensors(weights, tensors, config, base_dir)
    return AdapterInfo(
        path=str(path.resolve()),
        base=str(base_dir.resolve()),
        rank=max(ranks.values()),
        alpha=config.lora_alpha,
        target_modules=tuple(sorted({module.rpartition(".")[2] for module in ranks})),
        parameters=sum(t.numel for t in tensors.values()),
        files=adapter_hashes(path) if hash_files else {},
    )


def adapter_hashes(path: Path) -> dict[str, str]:
    """Return file name -> BLAKE3 hash of those of an adapter's two files that exist."""
    files = [path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS]
    return {file.name: blake3_file(file) for file in files if file.is_file()}


def merge_adapter(base: Path, adapter: Path, out: Path) -> None:
    """Write base + scaling * B A as a full model to `out`, which must not exist, in the base's types.

    `inspect_adapter` has accepted both before. Weight files are copied, and the changed tensors are then overwritten in the
    copies, so that only one tensor at a time is in memory, in float32. Raises: OSError.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    config = validate_json(LoraConfig, read_json(adapter / ADAPTER_CONFIG), adapter / ADAPTER_CONFIG)
    changes = read_updates(config, load_file(adapter / ADAPTER_WEIGHTS))
    out.mkdir(parents=True)
    # Weights in other formats are not copied, because a loader could prefer them to the merged safetensors.
    for file in base.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", *OTHER_FORMATS):
            shutil.copyfile(file, out / file.name)
    for shard in weight_shards(base):
        shutil.copyfile(shard, out / shard.name)
        with safe_open(shard, framework="pt") as source, (out / shard.name).open("r+b") as target:
            for name, tensor in read_header(shard).items():
                change = changes.pop(name.removesuffix(".weight"), None)
                if change is not None:
                    weight = source.get_tensor(name)
                    target.seek(data_start(shard) + tensor.data_offsets[0])
                    # Viewed as bytes, because numpy has no bfloat16.
                    target.write(merge_update(weight, change).contiguous().view(torch.uint8).numpy().data)
    assert not changes, f"modules that the base lacks: {sorted(changes)}"


def _refuse_unsupported(file: Path, data: Mapping[str, Any]) -> None:
    """Refuse every option that is set and not known to be harmless, options of future PEFT versions included. Raises: ModelError."""
    if data.get("peft_type") != "LORA":
        raise _unsupported_error(file, "peft_type", repr(data.get("peft_type")), "'LORA'")
    if data.get("bias", "none") != "none":
        raise _unsupported_error(file, "bias", repr(data["bias"]), "'none'")
    if data.get("lora_bias"):
        raise ModelError.at(
            f"{file}: lora_bias",
            found=repr(data["lora_bias"])[:80],
            wanted="nothing: the biases have no place in a base whose layers have none, and PEFT cannot merge them either",
            fix="train it again with lora_bias=False",
        )
    if data.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise ModelError.at(
            f"{file}: init_lora_weights",
            found=repr(data["init_lora_weights"])[:80],
            wanted="a start that leaves the base as it is; this one changed the base's weights too",
            fix="save the adapter again with save_pretrained(dir, path_initial_model_for_weight_conversion=...)",
        )
    for key, value in data.items():
        if value and key not in _READ | _WITHOUT_EFFECT:
            raise _unsupported_error(file, key, repr(value), "nothing: plain LoRA on linear layers")


def _unsupported_error(file: Path, part: str, actual: str, expected: str) -> ModelError:
    return ModelError.at(f"{file}: {part}", found=actual[:80], wanted=expected, fix=explain_merging(file.parent))


def _weight_file(path: Path) -> Path:
    """Return the adapter's weight file. Raises: ModelError if it is missing, or if there is another file that could be loaded."""
    names = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", *OTHER_FORMATS))
    other_weights = [name for name in names if name.endswith(".safetensors") and name != ADAPTER_WEIGHTS]
    if other_weights:
        raise ModelError.at(
            path / ADAPTER_CONFIG,
            found=f"an adapter beside {', '.join(other_weights)}",
            wanted="either an adapter or a full model in a directory",
            fix="move the other weights away; if they are the merged model, delete adapter_config.json",
        )
    if ADAPTER_WEIGHTS not in names:
        raise ModelError.at(
            path / ADAPTER_WEIGHTS,
            found=f"only {', '.join(names)}" if names else "no such file",
            wanted="the adapter's weights as safetensors; the other formats may run code when loaded",
            fix="save the adapter again with save_pretrained(dir, safe_serialization=True), in a place you trust",
        )
    return path / ADAPTER_WEIGHTS


def named_base(path: Path) -> Path | None:
    """Return the directory that an adapter's configuration names as its base; None if there is no such directory.

    A relative path is tried in the adapter's directory, then in the current one. Raises: ModelError if the configuration
    cannot be read.
    """
    name = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    # If the name is absolute, both candidates are the same path.
    candidates = [path / name, Path(name)] if isinstance(name, str) and name else []
    return next((directory for directory in candidates if directory.is_dir()), None)


def _find_base(file: Path, data: Mapping[str, Any], user_base: Path | None) -> Path:
    base = user_base or named_base(file.parent)
    if base is None:
        name = data.get("base_model_name_or_path")
        raise ModelError.at(
            f"{file}: base_model_name_or_path",
            found=f"{name!r}, which is no directory here" if name else "nothing",
            wanted="the base's directory, absolute or relative to the adapter's or the current one; hubs are not asked",
            fix="name it: `--base DIR`, or `base: DIR` beside `model` in a pipeline",
        )
    return base


def _check_tensors(file: Path, tensors: Mapping[str, Tensor], config: LoraConfig, base: Path) -> dict[str, int]:
    """Return module → rank. Raises: ModelError for a tensor that plain LoRA does not have, or that does not fit the base."""
    base_tensors = weight_tensors(base)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = split_name(name)
        if part is None or f"{part[0]}.weight" in HEADS or f"{part[0]}.weight".endswith(EMBEDDINGS):
            raise _unsupported_error(
                file,
                f"tensor `{name}`",
                "a tensor of another kind" if part is None else "an adapter of an embedding or output head",
                "lora_A.weight and lora_B.weight of linear layers inside the model",
            )
        if tensor.dtype not in _FLOATS:
            raise _unsupported_error(file, f"tensor `{name}`", tensor.dtype, f"one of {', '.join(_FLOATS)}")
        pairs.setdefault(part[0], {})[part[1]] = tensor
    if not pairs:
        raise ModelError.at(file, found="no tensors", wanted="lora_A and lora_B of some modules", fix="save it again")
    return {module: _check_module(file, module, pair, config, base_tensors, base) for module, pair in pairs.items()}


def _check_module(
    file: Path,
    module: str,
    pair: Mapping[str, Tensor],
    config: LoraConfig,
    base_tensors: Mapping[str, Tensor],
    base: Path,
) -> int:
    weight = base_tensors.get(f"{module}.weight")
    if weight is None or len(weight.shape) != 2:
        near = difflib.get_close_matches(module, [name.removesuffix(".weight") for name in base_tensors], n=1)
        raise ModelError.at(
            f"{file}: module `{module}`",
            found=f"an adapter of a module that the base {base} lacks",
            wanted=f"modules of the base, such as `{near[0]}`" if near else "modules of the base",
            fix="name the base that it was trained on: `--base DIR`, or `base: DIR` beside `model` in a pipeline",
        )
    try:
        rank = config.rank(module)
        config.scaling(module)
    except (re.error, OverflowError) as error:  # OverflowError for a{9999999999}
        raise ModelError.at(
            f"{file.parent / ADAPTER_CONFIG}: rank_pattern, alpha_pattern",
            found=f"{[*(config.rank_pattern or ()), *(config.alpha_pattern or ())]}: {error}"[:200],
            wanted="names or regular expressions of modules",
            fix="copy the file again",
        ) from None
    outputs, inputs = weight.shape
    expected_shapes = {"A": [rank, inputs], "B": [outputs, rank]}
    shapes = {letter: tensor.shape for letter, tensor in sorted(pair.items())}
    if shapes != expected_shapes:
        raise ModelError.at(
            f"{file}: module `{module}`",
            found=", ".join(f"lora_{letter} {shape}" for letter, shape in shapes.items()),
            wanted=f"lora_A {expected_shapes['A']}, lora_B {expected_shapes['B']}: rank {rank}, {inputs} inputs and {outputs} outputs in {base}",
            fix="name the base that it was trained on; if it is the right one, the adapter is damaged: copy it again",
        )
    return rank


@contextmanager
def open_full_model(teacher: Teacher, scratch: Path) -> Iterator[Path]:
    """Make a context with a directory of the teacher's full model. For an adapter that is `scratch`, into which it is merged with
    its base, and which is deleted at the end."""
    if teacher.adapter_dir is None:
        yield teacher.model_dir
        return
    shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
    try:
        merge_adapter(teacher.model_dir, teacher.adapter_dir, scratch)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
