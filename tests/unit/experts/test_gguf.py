"""A conversion from a GGUF file: what it takes, how it is proven, and files that are none."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from typer.testing import CliRunner

import cli
from experts import gguf_proof
from experts.gguf import carry_over_tokens, import_gguf
from experts.gguf_header import read_gguf_header
from opd.errors import ModelError

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def keys_only(path: Path, texts: dict[str, str] | None = None, flags: dict[str, bool] | None = None, **ids: int) -> Any:
    """The header of a file that says nothing of a tokenizer but this."""
    writer = GGUFWriter(path, "llama")
    for name, token_id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    names = [
        name.removeprefix("tokenizer.chat_template.")
        for name in texts or {}
        if name.startswith("tokenizer.chat_template.")
    ]
    for name, text in ({"tokenizer.ggml.model": "gpt2"} | (texts or {})).items():
        writer.add_string(name, text)
    if names:
        writer.add_array("tokenizer.chat_templates", names)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), dtype=np.float32))
    return written(writer, path)


def written(writer: GGUFWriter, path: Path) -> Any:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_header(path)


def test_the_special_tokens_are_those_that_the_file_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """transformers 5.17 gives SmolLM2 its start token as end token, and no padding token."""
    tokenizer.pad_token = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    found = carry_over_tokens(tokenizer, keys_only(tmp_path / "x.gguf", bos=1, eos=2, padding=5))
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 5)


def test_what_the_file_does_not_name_stays(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    before = tokenizer.special_tokens_map
    assert carry_over_tokens(tokenizer, keys_only(tmp_path / "x.gguf", bos=1)).special_tokens_map == before


@pytest.mark.parametrize(
    ("flags", "texts", "first", "last"),
    [
        ({"add_bos_token": True, "add_eos_token": False}, {}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, {}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": False}, {"tokenizer.ggml.model": "llama"}, [], []),
        ({}, {"tokenizer.ggml.model": "llama"}, [1], []),
        ({}, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, [1], []),
        ({}, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, [], []),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_text_begins_and_ends_as_llama_cpp_has_it(
    flags: dict[str, bool], texts: dict[str, str], first: list[int], last: list[int], before: bool,
    tokenizer: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """Also after the tokenizer was saved and read again, and whatever transformers made of it before."""
    tokenizer.add_bos_token = before
    header = keys_only(tmp_path / "x.gguf", flags=flags, texts=texts, bos=1, eos=2)
    carry_over_tokens(tokenizer, header).save_pretrained(tmp_path / "saved")
    read = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert read("ab").input_ids == [*first, *read("ab", add_special_tokens=False).input_ids, *last]


def test_a_token_that_is_to_be_added_has_to_be_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.bos_token = None
    with pytest.raises(ModelError, match="add_bos_token\n  found:  true, and no token to add"):
        carry_over_tokens(tokenizer, keys_only(tmp_path / "x.gguf", flags={"add_bos_token": True}))


def test_chat_templates_with_names_are_kept(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    texts = {"tokenizer.chat_template": "{{ 'plain' }}", "tokenizer.chat_template.tool_use": "{{ 'tools' }}"}
    carry_over_tokens(tokenizer, keys_only(tmp_path / "x.gguf", texts=texts)).save_pretrained(tmp_path / "saved")
    read = AutoTokenizer.from_pretrained(tmp_path / "saved")
    turns = [{"role": "user", "content": "a"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert read.apply_chat_template(turns, tokenize=False) == "plain"
    assert read.apply_chat_template(turns, tokenize=False, tools=tools) == "tools"


# A whole file


VOCABULARY = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"]


def write_llama(path: Path, *, leave_out: tuple[str, ...] = (), **keys: Any) -> Path:
    """A Llama of two layers with a vocabulary of bytes; `keys` replace or, with None, remove keys of the file."""
    from transformers import LlamaConfig

    tokens = [*VOCABULARY, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-5,
    )  # fmt: skip
    state = LlamaForCausalLM(config).state_dict()
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 5, *[TokenType.BYTE] * 256, TokenType.NORMAL]
    said: dict[str, Any] = {
        "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 32,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 1, "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 32,
        "llama.vocab_size": len(tokens), "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens), "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    } | keys  # fmt: skip
    writer = GGUFWriter(path, said.pop("general.architecture", "llama"))
    for name, value in said.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    }  # fmt: skip
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            number, part = module.removeprefix("model.layers.").split(".", 1)
            module = f"blk.{number}.{parts[part]}"
        else:
            module = names[module]
        if module not in leave_out:
            array = tensor.numpy()
            if module.endswith(("attn_q", "attn_k")):  # llama.cpp's order of rotary dimensions
                array = array.reshape(1, 2, 16, 32).swapaxes(1, 2).reshape(32, 32)
            writer.add_tensor(f"{module}.weight", np.ascontiguousarray(array))
    written_by = writer
    written_by.write_header_to_file()
    written_by.write_kv_data_to_file()
    written_by.write_tensors_to_file()
    written_by.close()
    return path


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights knows no text; what is tested is what else is in the file."""
    monkeypatch.setattr(gguf_proof, "PLAUSIBLE", 2.0)


@pytest.mark.usefixtures("believed")
def test_a_file_becomes_a_directory_with_its_weights_tokens_and_ends(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "x.gguf", **{"tokenizer.ggml.eom_token_id": 5})
    said: list[str] = []
    out = import_gguf(str(file), tmp_path / "out", said.append)
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert tokenizer("ab").input_ids[0] == 1, "llama.cpp adds the begin token to such a vocabulary"
    assert tokenizer.chat_template == TEMPLATE
    assert model.generation_config.eos_token_id == [2, 5, 3], (
        "the text's end, the one named, and the one of the template"
    )
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [2, 5, 3]
    assert said[0].startswith(("plausible: ", "proven: "))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_model_to_which_plain_texts_are_as_good_as_random_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A begin token that is lost, weights in a wrong order: the model that comes out knows nothing."""
    monkeypatch.setattr(gguf_proof, "find_spec", lambda name: None)
    file = write_llama(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"(?s)nats a token on 3 plain texts.*llama-cpp-python"):
        import_gguf(str(file), tmp_path / "out", print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf"], "nothing is left of it"


def test_llama_cpp_has_the_last_word_where_it_is_installed(tmp_path: Path) -> None:
    """It scores the file itself: a model of random weights is converted right, one whose begin token is lost is not."""
    pytest.importorskip("llama_cpp")
    file, said = write_llama(tmp_path / "x.gguf"), []
    out = import_gguf(str(file), tmp_path / "out", said.append)
    assert said[0].startswith("proven: ")
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    tokenizer.add_bos_token = False
    tokenizer.save_pretrained(out)
    with pytest.raises(ModelError, match=r"wanted: those of llama\.cpp: \[1, "):
        gguf_proof.prove_conversion(out, file)


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        (([[1, 7], [1, 8], [1, 9]], [2.0, 2.0, 2.5]), "2.00 nats a token"),
        (([[1, 7], [1, 8], [1, 9]], [2.0, float("nan"), 2.0]), "2.10 nats a token"),
        (([[1, 7], [1, 8], [9]], [2.0, 2.0, 2.0]), r"as the tokens \[1, 9\]"),
    ],
)
def test_other_tokens_or_likelihoods_than_llama_cpps_are_refused(theirs: Any, found: str) -> None:
    ours = ([[1, 7], [1, 8], [1, 9]], [2.0, 2.1, 2.0])
    gguf_proof._compare_scores(Path("x.gguf"), *ours, ours[0], [2.1, 2.0, 1.9])
    with pytest.raises(ModelError, match=f"(?s){found}.*those of llama"):
        gguf_proof._compare_scores(Path("x.gguf"), *ours, *theirs)


# Files that are none


def patched(at: int, form: str, *values: Any) -> Callable[[Path], Any]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        struct.pack_into(f"<{form}", data, at, *values)
        file.write_bytes(data)

    return damage


def behind(name: bytes, skip: int, form: str, value: Any) -> Callable[[Path], Any]:
    """Overwrite what stands `skip` bytes behind the first occurrence of a name."""

    def damage(file: Path) -> None:
        patched(file.read_bytes().index(name) + len(name) + skip, form, value)(file)

    return damage


def cut(size: int) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(file.read_bytes()[:size])


def replaced(old: bytes, new: bytes) -> Callable[[Path], Any]:
    assert len(old) == len(new)
    return lambda file: file.write_bytes(file.read_bytes().replace(old, new))


def again(**changes: Any) -> Callable[[Path], Any]:
    return lambda file: write_llama(file, **changes)


CONTEXT = b"llama.context_length"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (cut(0), "0 bytes"),
    "four bytes": (cut(4), "4 bytes"),
    "another magic": (patched(0, "4s", b"GGML"), "begins with b'GGML'"),
    "version 1": (patched(4, "I", 1), "GGUF version 1\n"),
    "big-endian": (patched(4, "I", 3 << 24), "that is 3 of a big-endian file"),
    "countless tensors": (patched(8, "Q", 1 << 60), "1,152,921,504,606,846,976 tensors"),
    "countless keys": (patched(16, "Q", (1 << 64) - 1), "18,446,744,073,709,551,615 keys"),
    "a few keys too many": (patched(16, "Q", 60), "are left"),
    "no tensors": (patched(8, "Q", 0), "no tensors"),
    "cut in the keys": (cut(1500), "are left"),
    "cut in the tensors": (lambda file: cut(file.stat().st_size - 5000)(file), "the file is cut off"),
    "a key of endless length": (patched(24, "Q", 1 << 62), "4,611,686,018,427,387,904 bytes"),
    "a value of no type": (behind(CONTEXT, 0, "I", 99), "'llama.context_length': a value of type 99"),
    "an endless array": (behind(b"tokenizer.ggml.scores", 8, "Q", 1 << 60), "'tokenizer.ggml.scores'"),
    "an array of arrays": (behind(b"tokenizer.ggml.scores", 4, "I", 9), "'tokenizer.ggml.scores': a value of type 9"),
    "a name that is no text": (replaced(CONTEXT, b"llama.context_lengt\xff"), "the name of a key"),
    "control characters": (
        replaced(b"tokenizer.chat_templat", b"\x1b]0;\x07\x1b[2J.chat_templa\xff"),
        "the name of a key",
    ),
    "an escape as architecture": (again(**{"general.architecture": "\x1b[31mred"}), r"\x1b[31mred.block_count"),
    "a tensor elsewhere": (behind(b"blk.0.attn_q.weight", 24, "Q", 1 << 50), "so far reaches tensor"),
    "a tensor out of line": (behind(b"blk.0.attn_q.weight", 24, "Q", 7), "at a multiple of 32 bytes"),
    "a tensor without end": (behind(b"blk.0.attn_q.weight", 4, "Q", 1 << 62), "so far reaches tensor"),
    "a tensor of 1000 dimensions": (behind(b"blk.0.attn_q.weight", 0, "I", 1000), "of 1,000 dimensions"),
    "a tensor of no type": (behind(b"blk.0.attn_q.weight", 20, "I", 777), "of type 777"),
    "one part of three": (again(**{"split.count": 3}), "llama-gguf-split --merge"),
    "no vocabulary": (again(**{"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens\n  found:  no such key"),
    "a vocabulary of another model": (again(**{"tokenizer.ggml.tokens": ["a"] * 999}), "at least 999 rows"),
    "no number of layers": (again(**{"llama.block_count": None}), "llama.block_count\n  found:  no such key"),
    "the number of layers as text": (again(**{"llama.block_count": "two"}), "llama.block_count\n  found:  'two'"),
    "more layers than weights": (again(**{"llama.block_count": 3}), "no weights"),
    "an end token of no vocabulary": (
        again(**{"tokenizer.ggml.eos_token_id": 70000}),
        "eos_token_id\n  found:  70,000",
    ),
    "another tokenizer": (again(**{"tokenizer.ggml.model": "no-such\x1b[0m"}), r"no-such\x1b[0m"),
    "another family": (
        again(**{"general.architecture": "clip", "clip.block_count": 2, "clip.embedding_length": 32}),
        "`clip`",
    ),
    "no weights of a layer": (again(leave_out=("blk.1.ffn_up",)), "model.layers.1.mlp.up_proj.weight"),
    "no embedding": (again(leave_out=("token_embd",)), "no such tensor"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_file_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    """Each of these was a traceback, or would have been: the readers of the libraries trust the numbers of a file."""
    damage, wanted = BROKEN[kind]
    file = write_llama(tmp_path / "x.gguf")
    damage(file)
    result = CliRunner().invoke(cli.app, ["models", "from-gguf", str(file), "--output", str(tmp_path / "out")])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit), result.output
    assert wanted in result.stderr and "  fix:    " in result.stderr, result.stderr
    assert all(c.isprintable() or c == "\n" for c in result.stderr.rpartition("x.gguf")[2])
    assert not (tmp_path / "out").exists()
