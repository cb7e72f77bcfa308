"""Write a model as GGUF, by llama.cpp's own converter: it knows the families and their tokenizers, and is kept with the format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, RunError
from opd.text import escape_control_characters

CONVERTERS = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf")
"""Names under which llama.cpp's packages and its repository have the converter."""
_GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
TIMEOUT_S = 12 * 3600.0
"""Limit of a conversion, which is as fast as the disk: one that takes longer hangs."""
_SHOWN_LINES = 15
"""Last lines of the converter's output that an error shows."""


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
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    try:
        process = subprocess.run(command, env=env, timeout=TIMEOUT_S, check=False, **options)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{converter.name} took longer than {TIMEOUT_S / 3600:.0f} hours, and nothing was exported"
        ) from None
    if process.returncode or not output.is_file():
        last_lines = escape_control_characters("\n  ".join(process.stdout.splitlines()[-_SHOWN_LINES:]))
        raise RunError(f"{converter.name} ended with {process.returncode}, and nothing was exported:\n  {last_lines}")
