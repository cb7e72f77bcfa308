"""What a conversion takes from a GGUF file beside its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from experts.gguf import with_special_tokens


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def gguf_file(path: Path, **ids: int) -> Path:
    """A file that says nothing but these ids of special tokens."""
    writer = GGUFWriter(path, "llama")
    for name, token_id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_special_tokens_are_those_that_the_file_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """transformers 5.17 gives SmolLM2 its start token as end token, and no padding token."""
    tokenizer.pad_token = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    found = with_special_tokens(tokenizer, gguf_file(tmp_path / "x.gguf", bos=1, eos=2, padding=5))
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 5)


def test_what_the_file_does_not_name_stays(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    before = tokenizer.special_tokens_map
    assert with_special_tokens(tokenizer, gguf_file(tmp_path / "x.gguf", bos=1)).special_tokens_map == before
