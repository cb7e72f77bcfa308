"""Read a Hugging Face model directory, without torch and without running code that is in it.

    inspect_model ─┬─ weight_tensors   names, shapes, dtypes, sizes      first bytes of each weight file
                   ├─ _read_config     architecture, sizes, custom code  config.json
                   ├─ token_map        id → token                        tokenizer.json
                   ├─ _named_tokens    tokens that other files name      tokenizer_config.json, or older files beside it
                   └─ weight_hashes    BLAKE3 of each weight file

Every refusal is a ModelError that names the file, and the field where there is one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import AliasChoices, Field, NonNegativeInt

from experts.json_files import Lenient, read_json, read_model, refuse_custom_code, validate_json
from experts.safetensors_header import Tensor
from experts.weight_files import GATHER, Hashes, weight_hashes, weight_shards, weight_tensors
from experts.weight_values import refuse_other_head
from opd.errors import ModelError
from opd.files import blake3_file
from opd.settings.strict import Strict

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
QUANTISED = ("I8", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
TOKENIZER_CONFIG, NAMED, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ADDED = "added_tokens_decoder"
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
"""Keys of tokenizer_config.json that hold any number of tokens."""
_SAVE_TOKENIZER = "AutoTokenizer.from_pretrained(dir).save_pretrained(dir) writes it"
_TORCH_DTYPE = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class ModelInfo(Strict):
    """The facts about a model directory; the registry's manifests hold this record."""

    path: str
    """Absolute directory, symbolic links resolved."""
    architecture: str
    """Class name, e.g. `LlamaForCausalLM`."""
    model_type: str
    """Family, e.g. `llama`."""
    dtype: str
    """Type of most weights, by torch's name, e.g. `bfloat16`."""
    parameters: int
    """Count of the numbers in the weight files; a tied head counts once."""
    hidden_size: int
    """Width of the last hidden state."""
    vocab_rows: int
    """Rows of the embedding; at least the highest token id + 1, often padded beyond."""
    tied: bool
    """True if the output head is the embedding."""
    final_logit_softcapping: float | None
    """Gemma's bound on logits: cap * tanh(logit / cap)."""
    context: int | None
    """Positions the model was made for."""
    vocab_size: int
    """Tokens of the tokenizer, added ones included; their ids are 0 to vocab_size - 1."""
    vocab_hash: str
    """BLAKE3 of the id → token map as canonical JSON; equal hashes mean that ids mean the same."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a response, as vLLM sees them: generation config (else config), then the tokenizer's own."""
    pad_token_id: int | None
    bos_token_id: int | None
    chat_template_hash: str | None
    """BLAKE3 of the chat template's text; None without one."""
    weight_files: dict[str, str]
    """File name → BLAKE3 of every file that holds the weights; empty if hashing was not asked for."""


class _SpecialIds(Lenient):
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None


class _Config(_SpecialIds):
    architectures: list[str] = Field(min_length=1)
    model_type: str
    hidden_size: int = Field(validation_alias=AliasChoices("hidden_size", "n_embd", "d_model"))
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None
    final_logit_softcapping: float | None = Field(
        None, validation_alias=AliasChoices("final_logit_softcapping", "logits_soft_cap")
    )
    max_position_embeddings: int | None = Field(
        None, validation_alias=AliasChoices("max_position_embeddings", "n_positions")
    )


class _AddedToken(Lenient):
    content: str


class _TokenizerConfig(Lenient):
    eos_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    bos_token: str | _AddedToken | None = None
    chat_template: str | list[dict[str, str]] | None = None


class _NumberedToken(_AddedToken):
    id: NonNegativeInt


class _Vocabulary(Lenient):
    vocab: dict[str, int] | list[list[Any]]
    """Unigram models list [piece, score] pairs; the others map token → id."""


class _Tokenizer(Lenient):
    model: _Vocabulary
    added_tokens: list[_NumberedToken] = Field(default_factory=list)


def inspect_model(path: Path, hash_weights: bool = True, hash_cache: Hashes | None = None) -> ModelInfo:
    """Read and check a model directory. This is cheap, except for the hashes, which read every weight file once.

    Raises: ModelError if the directory is missing, is an adapter, needs custom code, has no safetensors weights or
    no tokenizer.json, if a shard is missing, truncated or quantised, if a token is not in tokenizer.json, if a field has the
    wrong type, or if config.json says that the head is tied and the files hold another head.
    """
    tensors = weight_tensors(path)
    _refuse_empty(path, tensors)
    config = _read_config(path)
    files = _read_tokenizer_files(path)
    tokenizer = validate_json(
        _TokenizerConfig, files.get(TOKENIZER_CONFIG, {}) | files.get(NAMED, {}), path / TOKENIZER_CONFIG
    )
    generation_file = path / "generation_config.json"
    generation = read_model(_SpecialIds, generation_file) if generation_file.is_file() else _SpecialIds()
    tokens = token_map(path)
    _refuse_holes(path, tokens)
    _refuse_unlisted(path, files, tokens)
    ids = _special_ids(tokenizer, tokens)
    tied = _is_tied(config, tensors)
    embedding = next((name for name in tensors if name.endswith(EMBEDDINGS)), "")
    head = next((name for name in tensors if name.endswith("lm_head.weight")), "")
    if tied and embedding and head:  # most tied models store no head, so there is nothing to compare
        refuse_other_head(path, weight_shards(path), (embedding, head))
    return ModelInfo(
        path=str(path.resolve()),
        architecture=config.architectures[0],
        model_type=config.model_type,
        dtype=_read_dtype(path, tensors),
        parameters=sum(t.numel for t in tensors.values()),
        hidden_size=config.hidden_size,
        vocab_rows=_vocab_rows(path, config, tensors, tokens),
        tied=tied,
        final_logit_softcapping=config.final_logit_softcapping,
        context=config.max_position_embeddings,
        vocab_size=len(tokens),
        vocab_hash=blake3(json.dumps(list(tokens.items()), separators=(",", ":")).encode()).hexdigest(),
        eos_token_ids=_eos_token_ids(generation, config, ids),
        pad_token_id=_first_item(generation.pad_token_id, config.pad_token_id, ids["pad_token"]),
        bos_token_id=_first_item(generation.bos_token_id, config.bos_token_id, ids["bos_token"]),
        chat_template_hash=_hash_chat_template(path, tokenizer),
        weight_files=weight_hashes(path.resolve(), hash_cache) if hash_weights else {},
    )


def token_map(path: Path) -> dict[int, str]:
    """Return id → token of the directory's tokenizer, added tokens included, in the order of the ids.

    Raises: ModelError if tokenizer.json is missing or is not a tokenizer.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError.at(
            file, found="no such file", wanted="the fast tokenizer in one JSON file", fix=_SAVE_TOKENIZER
        )
    tokenizer = read_model(_Tokenizer, file)
    vocab = tokenizer.model.vocab
    tokens = (
        {i: t for t, i in vocab.items()}
        if isinstance(vocab, dict)
        else {i: str(p[0]) for i, p in enumerate(vocab) if p}
    )
    tokens |= {token.id: token.content for token in tokenizer.added_tokens}
    if not tokens:
        raise ModelError.at(
            f"{file}: model.vocab", found="no tokens", wanted="at least one", fix="save the tokenizer again"
        )
    return dict(sorted(tokens.items()))


def refuse_other_tokens(path: Path, tokenizer: Any) -> None:
    """Refuse the directory if transformers' tokenizer of it has other tokens or ids than tokenizer.json. Raises: ModelError.

    The tokenizer classes of some families add tokens of their own.
    """
    tokens = token_map(path)
    mismatch = next(((token, i) for token, i in tokenizer.get_vocab().items() if tokens.get(i) != token), None)
    if mismatch is not None:
        raise ModelError.at(
            path / "tokenizer.json",
            found=f"{type(tokenizer).__name__} of transformers reads the directory with {mismatch[0]!r} as id {mismatch[1]}, which here "
            + (f"is {tokens[mismatch[1]]!r}" if mismatch[1] in tokens else "does not exist"),
            wanted="every token in tokenizer.json, where each has its id",
            fix=_SAVE_TOKENIZER,
        )


def _read_config(path: Path) -> _Config:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError.at(
            file,
            found="no such file",
            wanted="the model's configuration",
            fix="copy config.json from the original model",
        )
    config = read_json(file)
    refuse_custom_code(file, config)
    if config.get("quantization_config"):
        raise ModelError.at(
            f"{file}: quantization_config",
            found=str(config["quantization_config"])[:80],
            wanted="nothing: the loss needs unquantised weights",
            fix="dequantise the model and save it again with save_pretrained",
        )
    # Multimodal models keep the language model's fields one level down.
    text = config.get("text_config")
    return _refuse_wrapper(file, validate_json(_Config, {**text, **config} if isinstance(text, dict) else config, file))


def _read_tokenizer_files(path: Path) -> dict[str, dict[str, Any]]:
    """Return file -> content of the files beside tokenizer.json that transformers reads. Raises: ModelError.

    It reads the two older ones only if tokenizer_config.json has no list of added tokens.
    """
    files = {TOKENIZER_CONFIG: read_json(path / TOKENIZER_CONFIG)} if (path / TOKENIZER_CONFIG).is_file() else {}
    for file, data in files.items():
        refuse_custom_code(path / file, data)
    older = () if _ADDED in files.get(TOKENIZER_CONFIG, {}) else (NAMED, ADDED)
    return files | {name: read_json(path / name) for name in older if (path / name).is_file()}


def _refuse_unlisted(path: Path, files: Mapping[str, Mapping[str, Any]], tokens: Mapping[int, str]) -> None:
    """Refuse tokens that another file names and tokenizer.json lacks. Raises: ModelError.

    transformers would add them when it loads the tokenizer, with ids that no file states.
    """
    listed = set(tokens.values())
    missing = [(field, token) for field, token in _named_tokens(files) if token not in listed]
    if missing:
        field, token = missing[0]
        count = len({token for _, token in missing}) - 1
        raise ModelError.at(
            path / field,
            found=f"{token!r}{f' and {count} more' if count else ''}, which tokenizer.json lacks",
            wanted="every token in tokenizer.json, where each has its id",
            fix=_SAVE_TOKENIZER,
        )


def _named_tokens(files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield a place (file and field) and the token that is named there."""
    for file, data in files.items():
        for field, value in data.items():
            if file == ADDED:  # token -> id
                yield f"{file}: {field}", field
            elif field.endswith("_token") or field in (_ADDED, *_MORE_SPECIAL):
                yield from ((f"{file}: {field}", token) for token in _read_texts(value))


def _read_texts(value: Any) -> Iterator[str]:
    """Yield the tokens of a field: text, a mapping with `content`, or several of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield from _read_texts(value["content"])
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _read_texts(item)


def _refuse_empty(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors without numbers, which a rank of ZeRO-3 saves for tensors that it has only parts of. Raises: ModelError."""
    empty = [name for name, tensor in tensors.items() if not tensor.numel]
    if empty:
        raise ModelError.at(
            path,
            found=f"{len(empty)} of {len(tensors)} tensors without a number, such as `{empty[0]}`",
            wanted="whole weights",
            fix=f"the ranks of DeepSpeed's ZeRO-3 (or FSDP) did not gather them: {GATHER}; or "
            "`python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT --safe_serialization` of a checkpoint that is there",
        )


def _refuse_wrapper(file: Path, config: _Config) -> _Config:
    """Refuse the class name of a wrapper that a training put around the model: vLLM knows no such class. Raises: ModelError."""
    name = config.architectures[0]
    inner = re.fullmatch(r"(?:FSDP|DDP|DeepSpeed)(\w+)", name)
    if inner or name.startswith(("PeftModel", "OptimizedModule")):
        raise ModelError.at(
            f"{file}: architectures",
            found=name,
            wanted="the class of the model itself: this is what training had put around it",
            fix=f'set it to ["{inner[1]}"]' if inner else "set it to what the base model's config.json has there",
        )
    return config


def _read_dtype(path: Path, tensors: Mapping[str, Tensor]) -> str:
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel
    dtype = counts.most_common(1)[0][0] if counts else "no tensors"
    packed = next((name for name, tensor in tensors.items() if tensor.dtype in QUANTISED), None)
    if packed is not None:
        dtype = f"tensor `{packed}` of type {tensors[packed].dtype}"
    if dtype not in _TORCH_DTYPE:
        raise ModelError.at(
            path,
            found=f"weights: {dtype}",
            wanted=f"{', '.join(_TORCH_DTYPE)}: the loss needs unquantised weights",
            fix="dequantise the model and save it again with save_pretrained",
        )
    return _TORCH_DTYPE[dtype]


def _vocab_rows(path: Path, config: _Config, tensors: Mapping[str, Tensor], tokens: Mapping[int, str]) -> int:
    embedding = next((t.shape[0] for name, t in tensors.items() if name.endswith(EMBEDDINGS) and t.shape), None)
    rows = _first_item(embedding, config.vocab_size)
    if rows is None:
        raise ModelError.at(
            f"{path / 'config.json'}: vocab_size", found="nothing", wanted="rows of the embedding", fix="add the key"
        )
    if max(tokens) >= rows:
        raise ModelError.at(
            path / "tokenizer.json",
            found=f"token {tokens[max(tokens)]!r} with id {max(tokens)}",
            wanted=f"ids below {rows}, the rows of the embedding",
            fix="model.resize_token_embeddings(len(tokenizer)) and save again, or use the weights' own tokenizer",
        )
    return rows


def _refuse_holes(path: Path, tokens: Mapping[int, str]) -> None:
    """Refuse a tokenizer that has no token for some id below its highest. Raises: ModelError.

    Such an id could be sampled but not decoded. Also, the library that reads the file numbers added tokens by their count,
    so two tokens above the hole would get the same id.
    """
    count = max(tokens) + 1 - sum(i >= 0 for i in tokens)
    if count > 0:
        # No set of all ids is made, because the highest id may be a huge number.
        missing = list(islice((i for i in range(max(tokens)) if i not in tokens), 3))
        listed = ", ".join(map(str, missing)) + (" ..." if count > 3 else "")
        raise ModelError.at(
            path / "tokenizer.json",
            found=f"no token for {count} ids below {max(tokens)}: {listed}",
            wanted="a token for every id from 0 to the highest",
            fix=f"give each of them an unused name in model.vocab, such as <|unused_{missing[0]}|>, in the student's and in "
            "every expert's tokenizer.json",
        )


def _is_tied(config: _Config, tensors: Mapping[str, Tensor]) -> bool:
    # A config may leave the field out if it has the family's default. Then a head that is not stored can only be tied.
    if config.tie_word_embeddings is not None:
        return config.tie_word_embeddings
    return not any(name.endswith(HEADS) for name in tensors)


def _special_ids(tokenizer: _TokenizerConfig, tokens: Mapping[int, str]) -> dict[str, int | None]:
    """Return the tokenizer's own special tokens as ids."""
    ids = {token: i for i, token in tokens.items()}
    special_ids: dict[str, int | None] = {}
    for field in ("eos_token", "pad_token", "bos_token"):
        token = getattr(tokenizer, field)
        special_ids[field] = None if token is None else ids[token.content if isinstance(token, _AddedToken) else token]
    return special_ids


def _eos_token_ids(generation: _SpecialIds, config: _Config, ids: Mapping[str, int | None]) -> tuple[int, ...]:
    declared = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ends = [declared] if isinstance(declared, int) else list(declared or ())
    tokenizer_eos = ids["eos_token"]
    return tuple(dict.fromkeys([*ends, *([] if tokenizer_eos is None else [tokenizer_eos])]))


def _hash_chat_template(path: Path, tokenizer: _TokenizerConfig) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return blake3_file(file)
    template = tokenizer.chat_template
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return blake3(text.encode()).hexdigest()


def _first_item(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
