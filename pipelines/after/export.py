"""Write a model to a directory of its own: another dtype, shards of another size, GGUF.

The weights pass through memory a file of the copy at a time, so a model may be larger than the machine. GGUF is written by
llama.cpp's own converter: it knows the families and their tokenizers, and is kept with the format.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.bound_files import TOKENIZER_FILES, matching_files
from experts.licences import FILES as LICENCE_FILES
from experts.safetensors_header import Tensor, read_header
from experts.weight_files import weight_shards
from opd.errors import ConfigError, ModelError, RunError
from opd.files import atomic_write_text, fill_output, refuse_existing_output
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.models.files import ModelFiles
from opd.text import escape_control_characters
from pipelines.after.models import LocalModel

if TYPE_CHECKING:
    import torch

COPIED_FILES = (*TOKENIZER_FILES, "README.md", *LICENCE_FILES)
"""Files beside the weights that are copied as they are."""
_FLOATS = {"F64", "F32", "BF16", "F16"}
"""Types that are cast, as safetensors names them; quantized weights and integers stay."""
CONVERTERS = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf")
"""Names under which llama.cpp's packages and its repository have the converter."""
_GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
TIMEOUT_S = 12 * 3600.0
"""Limit of a conversion, which is as fast as the disk: one that takes longer hangs."""
_ERROR_LINES = 15
"""Last lines of the converter's output that an error shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Differences of the copy from the model."""

    dtype: str | None = None
    """float32, bfloat16 or float16; None keeps each tensor's own."""
    max_shard_bytes: int = 5 * 10**9
    """Size of a file of weights at most, unless one tensor alone is larger."""
    gguf: bool = False
    """True if a GGUF file is written beside the safetensors."""


def export_model(model: LocalModel, output: Path, options: ExportOptions) -> list[Path]:
    """Write the copy to `output`, which must not exist. Returns its files.

    Raises: OpdError, before anything is written or for a number that `dtype` cannot hold; RunError if the converter fails. Then nothing
    is left at `output`.
    """
    refuse_existing_output(output)
    converter = find_converter() if options.gguf else None
    with fill_output(output) as temporary:
        _write_weights(model.path, temporary, options)
        _write_config(model.path, temporary, options.dtype)
        for file in matching_files(model.path, COPIED_FILES):
            shutil.copy(file, temporary / file.name)
        if model.draft is not None:
            # An engine casts the draft to its model's dtype.
            shutil.copytree(model.draft, temporary / model.draft.name)
        if converter is not None:
            dtype = options.dtype or model.info.dtype
            write_gguf(converter, temporary, temporary / f"{model.name}-{dtype}.gguf", dtype, model.name)
    return sorted(output.iterdir())


class _TensorCaster:
    """Casts tensors into another dtype, except for those that the architecture needs in float32, such as the bias of a router."""

    def __init__(self, source: Path, dtype: str | None) -> None:
        self._dtype = dtype
        self._float32_pattern = _make_float32_pattern(source, dtype) if dtype else None

    def cast(self, name: str, tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name` in the dtype that it has in the copy; `tensor` is its entry in the file's header.

        Raises: ModelError for a number that would become infinite.
        """
        import torch

        if not self._dtype or not self._must_cast(name, tensor):
            return value
        result = value.to(getattr(torch, self._dtype))
        if not value.is_meta and bool((result.isinf() & ~value.isinf()).any()):
            raise ModelError.at(
                f"--dtype {self._dtype}: tensor `{name}`",
                found=f"numbers up to {value.abs().max().item():g}, of which the largest would become infinite",
                wanted=f"numbers up to {torch.finfo(result.dtype).max:g}",
                fix="take bfloat16, which has the range of float32",
            )
        return result

    def _must_cast(self, name: str, tensor: Tensor) -> bool:
        return tensor.dtype in _FLOATS and not (self._float32_pattern and self._float32_pattern.search(name))


def _make_float32_pattern(source: Path, dtype: str) -> re.Pattern[str] | None:
    """Return a pattern that fits the names of tensors which transformers keeps in float32, whatever dtype a caller wants; None if
    there are none.

    Raises: ModelError for an architecture that transformers does not know.
    """
    import_lightly(TRANSFORMERS)
    from opd.models.weights import find_causal_lm_class, load_config

    model_class = find_causal_lm_class(load_config(source))
    # transformers keeps the modules of the strict list in float32 for bfloat16 too, those of the other one for float16 alone.
    names = set(model_class._keep_in_fp32_modules_strict or ()) if model_class else set()
    if model_class and dtype == "float16":
        names |= set(model_class._keep_in_fp32_modules or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(names))) if names else None


def _write_weights(source: Path, target: Path, options: ExportOptions) -> None:
    """Write every tensor, and the index if there are several files."""
    from safetensors import safe_open

    caster = _TensorCaster(source, options.dtype)
    with ExitStack() as stack:
        headers = {shard: read_header(shard) for shard in weight_shards(source)}
        opened = {shard: stack.enter_context(safe_open(shard, framework="pt")) for shard in headers}
        tensors = {
            name: (opened[shard], tensor) for shard, header in headers.items() for name, tensor in header.items()
        }
        # Meta tensors have a shape and a dtype but no data: the files of the copy are divided up before any weight is cast.
        meta_tensors = {
            name: caster.cast(name, tensor, file.get_tensor(name).to("meta"))
            for name, (file, tensor) in tensors.items()
        }
        files = stack.enter_context(ModelFiles(target, meta_tensors, options.max_shard_bytes))
        for name, (file, tensor) in tensors.items():
            files.write({name: caster.cast(name, tensor, file.get_tensor(name))})
        files.finish()


def _write_config(source: Path, target: Path, dtype: str | None) -> None:
    """Write config.json with the dtype of the copy, which loaders take from there unless their caller names one."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        # A model of texts and images has a second config inside; older files call the key `torch_dtype`.
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and (part is config or "dtype" in part or "torch_dtype" in part):
                part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype
    atomic_write_text(target / "config.json", json.dumps(config, indent=2) + "\n")


def find_converter() -> Path:
    """Return the path of llama.cpp's converter. Raises: ConfigError if none is on PATH."""
    converter = next((path for name in CONVERTERS if (path := shutil.which(name))), None)
    if converter is None:
        raise ConfigError.at(
            "--gguf",
            found=f"no {CONVERTERS[0]} on PATH",
            wanted="llama.cpp's converter",
            fix="clone https://github.com/ggml-org/llama.cpp, make the script executable and add its directory to PATH (or "
            "`brew install llama.cpp`); its other needs are in requirements/requirements-convert_hf_to_gguf.txt; or leave --gguf out",
        )
    return Path(converter)


def write_gguf(converter: Path, model_dir: Path, output: Path, dtype: str, name: str) -> None:
    """Convert a model directory into the file `output`, in which the model is called `name`.

    Raises: RunError with the converter's last lines if it fails or takes too long.
    """
    # The script's first line starts `python3` from PATH: this one, with torch and gguf, comes first there.
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(converter), str(model_dir), "--outfile", str(output), "--outtype", _GGUF_TYPES.get(dtype, "f32")]
    command += ["--model-name", name]
    try:
        process = subprocess.run(
            command,
            env=env,
            timeout=TIMEOUT_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{converter.name} took longer than {TIMEOUT_S / 3600:.0f} hours, and nothing was exported"
        ) from None
    if process.returncode or not output.is_file():
        last_lines = escape_control_characters("\n  ".join(process.stdout.splitlines()[-_ERROR_LINES:]))
        raise RunError(f"{converter.name} ended with {process.returncode}, and nothing was exported:\n  {last_lines}")
