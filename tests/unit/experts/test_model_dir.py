"""Facts read from a model directory, and every directory that is refused before anything is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from experts.model_dir import inspect_model, token_map
from experts.registry import Registry
from experts.safetensors_header import read_header
from opd.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def drop(file: Path, *keys: str) -> None:
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in keys}))


def write_tensors(file: Path, header: dict[str, object] | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def shard(model: Path) -> None:
    """Turn the single weight file into one shard with an index."""
    name = "model-00001-of-00001.safetensors"
    tensors = read_header(model / WEIGHTS)
    (model / WEIGHTS).rename(model / name)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}))


# What a good directory says


def test_a_tied_model(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    info = inspect_model(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert (info.architecture, info.model_type, info.dtype) == ("LlamaForCausalLM", "llama", "float32")
    assert info.parameters == model.num_parameters()
    assert (info.hidden_size, info.vocab_rows, info.tied, info.context) == (64, 76, True, 512)
    assert (info.eos_token_ids, info.pad_token_id, info.bos_token_id) == ((2,), 0, 1)
    assert info.final_logit_softcapping is None
    template = AutoTokenizer.from_pretrained(tiny_model_dir).chat_template
    assert info.chat_template_hash == blake3(template.encode()).hexdigest()
    assert info.weight_files == {WEIGHTS: blake3((tiny_model_dir / WEIGHTS).read_bytes()).hexdigest()}


def test_an_untied_model_stores_a_head(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    info = inspect_model(make_model_dir(tmp_path / "untied", tie=False, layers=1))
    assert not info.tied
    assert "lm_head.weight" in read_header(tmp_path / "untied" / WEIGHTS)


def test_tied_follows_from_the_weights_where_the_config_is_silent(
    make_model_dir: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    untied = make_model_dir(tmp_path / "untied", tie=False, layers=1)
    for directory in (model, untied):
        drop(directory / "config.json", "tie_word_embeddings")
    assert inspect_model(model).tied
    assert not inspect_model(untied).tied


def add_head(source: Path, target: Path, change: float) -> None:
    """Store a head: the embedding of one file, and `change` more, in the same file or in one of its own."""
    tensors = load_file(source)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + change}
    save_file(tensors | head if target == source else head, target, {"format": "pt"})


def test_a_tied_model_may_store_its_head_too(model: Path) -> None:
    add_head(model / WEIGHTS, model / WEIGHTS, 0.0)
    assert inspect_model(model).tied


OTHER_HEAD = r"(?s)tie_word_embeddings.*`lm_head.weight` that differs from `model.embed_tokens.weight`"


def test_a_tied_model_with_another_head_is_refused(model: Path) -> None:
    """transformers would take the head, vLLM the embedding."""
    add_head(model / WEIGHTS, model / WEIGHTS, 1e-3)
    with pytest.raises(ModelError, match=OTHER_HEAD):
        inspect_model(model)


def test_another_head_is_found_in_another_shard(model: Path) -> None:
    shard(model)
    index = json.loads((model / INDEX).read_text())
    (first,) = set(index["weight_map"].values())
    add_head(model / first, model / "head.safetensors", 1e-3)
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=OTHER_HEAD):
        inspect_model(model)


def test_the_token_map_is_that_of_transformers(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    vocab = AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    assert token_map(tiny_model_dir) == {i: token for token, i in vocab.items()}
    assert inspect_model(tiny_model_dir).vocab_size == 76


def test_a_unigram_vocabulary_counts_from_zero_and_has_its_added_tokens(model: Path) -> None:
    tokenizer = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]},
        "added_tokens": [{"id": 2, "content": "<eos>"}],
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert token_map(model) == {0: "<unk>", 1: "a", 2: "<eos>"}


def test_the_vocabulary_hash_ignores_the_order_in_the_file_and_sees_permuted_ids(
    make_model_dir: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    before = inspect_model(model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(reversed(tokenizer["model"]["vocab"].items()))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert inspect_model(model).vocab_hash == before.vocab_hash
    permuted = inspect_model(make_model_dir(tmp_path / "permuted", permute_vocab=True, layers=1))
    assert permuted.vocab_size == before.vocab_size
    assert permuted.vocab_hash != before.vocab_hash


def test_end_tokens_are_the_generation_config_and_the_tokenizers_own(model: Path) -> None:
    edit(model / "generation_config.json", eos_token_id=[7, 9])
    assert inspect_model(model).eos_token_ids == (7, 9, 2)
    drop(model / "generation_config.json", "eos_token_id")
    edit(model / "config.json", eos_token_id=5)
    assert inspect_model(model).eos_token_ids == (5, 2)
    edit(model / "tokenizer_config.json", eos_token={"content": "<unk>"})
    assert inspect_model(model).eos_token_ids == (5, 3)


def test_a_chat_template_has_one_hash_wherever_it_is_stored(model: Path) -> None:
    before = inspect_model(model).chat_template_hash
    edit(model / "tokenizer_config.json", chat_template=(model / "chat_template.jinja").read_text())
    (model / "chat_template.jinja").unlink()
    assert inspect_model(model).chat_template_hash == before
    drop(model / "tokenizer_config.json", "chat_template")
    assert inspect_model(model).chat_template_hash is None


def test_shards_of_an_index_are_read(model: Path) -> None:
    before = inspect_model(model)
    shard(model)
    after = inspect_model(model)
    assert after.parameters == before.parameters
    assert list(after.weight_files) == ["model-00001-of-00001.safetensors"]


def test_without_hashes_no_weight_file_is_listed(model: Path) -> None:
    assert inspect_model(model, hash_weights=False).weight_files == {}


def test_fields_of_a_multimodal_config_are_found(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    text = {key: config.pop(key) for key in ("hidden_size", "vocab_size", "max_position_embeddings")}
    (model / "config.json").write_text(json.dumps({**config, "text_config": {**text, "final_logit_softcapping": 30}}))
    info = inspect_model(model)
    assert (info.hidden_size, info.context, info.final_logit_softcapping) == (64, 512, 30.0)


# What is refused. Each entry damages a good directory; the words must be in the message.


def delete(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def overwrite(name: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(text)


def change(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda model: edit(model / name, **changes)


def only(*names: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / WEIGHTS).unlink()
        for name in names:
            (model / name).write_bytes(b"\x80")

    return damage


def replaced_by_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("")


def truncate(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(data[:-100])


def longer(model: Path) -> None:
    with (model / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 100)


def seven_bytes(model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"\0" * 7)


def header_beyond_the_file(model: Path) -> None:
    (model / WEIGHTS).write_bytes(struct.pack("<Q", 12345) + b"{}")


def header_not_json(model: Path) -> None:
    write_tensors(model / WEIGHTS, b"{'a': 1}", b"")


def header_a_list(model: Path) -> None:
    write_tensors(model / WEIGHTS, b"[]", b"")


def tensors_at(*offsets: tuple[int, int], dtype: str = "F32", size: int = 8) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        header: dict[str, object] = {
            f"t{i}": {"dtype": dtype, "shape": [1], "data_offsets": list(o)} for i, o in enumerate(offsets)
        }
        write_tensors(model / WEIGHTS, header, b"\0" * size)

    return damage


def no_tensors(model: Path) -> None:
    write_tensors(model / WEIGHTS, {}, b"")


def emptied(model: Path) -> None:
    state = load_file(model / WEIGHTS)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        state[name] = torch.empty(0)
    save_file(state, model / WEIGHTS)


def int8_weights(model: Path) -> None:
    write_tensors(
        model / WEIGHTS,
        {"model.embed_tokens.weight": {"dtype": "I8", "shape": [76], "data_offsets": [0, 76]}},
        b"\0" * 76,
    )


def index(shard_name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        shard(model)
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": shard_name}}))

    return damage


def index_beside_single_file(model: Path) -> None:
    shutil.copy(model / WEIGHTS, model / "kept.safetensors")
    shard(model)
    (model / "kept.safetensors").rename(model / WEIGHTS)


def second_file_without_index(model: Path) -> None:
    shutil.copy(model / WEIGHTS, model / "adapter_model.safetensors")


def loop_link(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(model / "config.json")


def link_out(model: Path) -> None:
    secret = model.parent / "secret.txt"
    secret.write_text("mine")
    (model / "tokenizer_notes.txt").symlink_to(secret)


def one_int8_tensor(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["model.layers.0.packed"] = {"dtype": "I8", "shape": [4], "data_offsets": [end, end + 4]}
    write_tensors(model / WEIGHTS, header, data[8 + length :] + b"\0" * 4)


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing directory": (shutil.rmtree, ["model", "no such directory"]),
    "a file": (replaced_by_file, ["model", "a file"]),
    "no config": (delete("config.json"), ["config.json", "no such file"]),
    "link loop": (loop_link, ["config.json", "no such file"]),
    "broken config": (overwrite("config.json", '{"a": '), ["config.json", "EOF", "line 1"]),
    "config is a list": (overwrite("config.json", "[]"), ["config.json", "a list", "one JSON object"]),
    "config nested too deep": (overwrite("config.json", "[" * 100_000), ["config.json", "recursion"]),
    "config without architecture": (change("config.json", architectures=[]), ["config.json: architectures", "[]"]),
    "hidden size as text": (
        change("config.json", hidden_size="64"),
        ["config.json: hidden_size", "'64'", "a whole number"],
    ),
    "end token as text": (change("config.json", eos_token_id="</s>"), ["config.json: eos_token_id", "'</s>'"]),
    "broken generation config": (overwrite("generation_config.json", "{"), ["generation_config.json"]),
    "custom code": (
        change("config.json", auto_map={"AutoModel": "evil.Model"}),
        ["config.json: auto_map", "evil.Model"],
    ),
    "custom code deep down": (
        change("config.json", vision_config={"auto_map": "x--evil.V"}),
        ["config.json: vision_config.auto_map"],
    ),
    "custom tokenizer code": (
        change("tokenizer_config.json", auto_map={"AutoTokenizer": "evil.T"}),
        ["tokenizer_config.json: auto_map"],
    ),
    "custom code in a list": (
        change("config.json", towers=[{"auto_map": "x--evil.V"}]),
        ["config.json: towers.0.auto_map"],
    ),
    "link out of the directory": (link_out, ["tokenizer_notes.txt", "a link to", "outside of the directory", "cp -rL"]),
    "quantised": (
        change("config.json", quantization_config={"quant_method": "gptq"}),
        ["config.json: quantization_config", "gptq", "dequantise"],
    ),
    "one quantised tensor": (one_int8_tensor, ["`model.layers.0.packed` of type I8", "dequantise"]),
    "bin only": (only("pytorch_model.bin"), ["pytorch_model.bin", "safe_serialization=True"]),
    "pt only": (only("model.pt"), ["model.pt", "save_pretrained"]),
    "pth only": (only("consolidated.00.pth"), ["consolidated.00.pth", "save_pretrained"]),
    "ckpt only": (only("model.ckpt"), ["model.ckpt", "save_pretrained"]),
    "gguf only": (only("model-q4.gguf"), ["model-q4.gguf", "opd models from-gguf", "model-q4.gguf --output OUT"]),
    "verl's parts": (
        only("model_world_size_2_rank_0.pt"),
        [
            "parts of a model",
            "model_world_size_2_rank_0.pt",
            "python -m verl.model_merger merge --backend fsdp --local_dir",
        ],
    ),
    "DeepSpeed's parts": (only("zero_to_fp32.py"), ["parts of a model", "zero_to_fp32.py", "--safe_serialization"]),
    "torch's parts": (only("__0_0.distcp"), ["parts of a model", "accelerate merge-weights"]),
    "tensors that ZeRO-3 did not gather": (
        emptied,
        [
            "2 of 20 tensors without a number",
            "`model.layers.0.mlp.up_proj.weight`",
            "stage3_gather_16bit_weights_on_model_save",
        ],
    ),
    "a wrapper's name": (
        change("config.json", architectures=["FSDPLlamaForCausalLM"]),
        ["config.json: architectures", "FSDPLlamaForCausalLM", '["LlamaForCausalLM"]'],
    ),
    "PEFT's name": (
        change("config.json", architectures=["PeftModelForCausalLM"]),
        ["config.json: architectures", "PeftModelForCausalLM", "the base model's config.json"],
    ),
    "no weights": (delete(WEIGHTS), ["model", "no weights", WEIGHTS]),
    "truncated": (truncate, [WEIGHTS, "truncated", "bytes, as the header says"]),
    "longer than the header says": (longer, [WEIGHTS, "bytes, as the header says"]),
    "seven bytes": (seven_bytes, [WEIGHTS, "file of 7 bytes"]),
    "header beyond the file": (header_beyond_the_file, [WEIGHTS, "header of 12345 bytes", "file of 10 bytes"]),
    "header not JSON": (header_not_json, [WEIGHTS, "not JSON"]),
    "header a list": (header_a_list, [WEIGHTS, "a list"]),
    "overlap": (tensors_at((0, 4), (2, 6)), [WEIGHTS, "`t1` at bytes [2, 6]", "[4, 8]"]),
    "gap": (tensors_at((0, 4), (6, 10), size=10), [WEIGHTS, "`t1` at bytes [6, 10]", "[4, 8]"]),
    "shape larger than the data": (tensors_at((0, 2), size=2), [WEIGHTS, "`t0`", "[0, 4]"]),
    "negative offset": (tensors_at((-4, 0)), [WEIGHTS, "tensor `t0`: data_offsets", "-4"]),
    "unknown dtype": (tensors_at((0, 8), dtype="X8"), [WEIGHTS, "X8"]),
    "no tensors": (no_tensors, ["no tensors"]),
    "int8": (int8_weights, ["I8", "dequantise"]),
    "missing shard": (
        index("model-00002-of-00002.safetensors"),
        ["model-00002-of-00002.safetensors", "no such file", INDEX],
    ),
    "shard above": (index("../model.safetensors"), [f"{INDEX}: weight_map", "'../model.safetensors'"]),
    "absolute shard": (index("/etc/model.safetensors"), [f"{INDEX}: weight_map", "'/etc/model.safetensors'"]),
    "shard in a backslash path": (index("..\\model.safetensors"), [f"{INDEX}: weight_map"]),
    "pickle as shard": (index("pytorch_model.bin"), [f"{INDEX}: weight_map", "'pytorch_model.bin'"]),
    "empty index": (lambda m: (m / INDEX).write_text('{"weight_map": {}}'), [f"{INDEX}: weight_map"]),
    "index beside a single file": (index_beside_single_file, ["an index", "alone"]),
    "two files without an index": (second_file_without_index, ["adapter_model.safetensors", "no index"]),
    "adapter beside weights": (
        overwrite("adapter_config.json", "{}"),
        ["adapter_config.json", "delete adapter_config.json"],
    ),
    "no tokenizer": (delete("tokenizer.json"), ["tokenizer.json", "no such file"]),
    "broken tokenizer": (overwrite("tokenizer.json", "{}"), ["tokenizer.json: model", "nothing"]),
    "tokenizer without tokens": (
        change("tokenizer.json", model={"vocab": {}}, added_tokens=[]),
        ["tokenizer.json: model.vocab", "no tokens"],
    ),
    "end token not in the vocabulary": (
        change("tokenizer_config.json", eos_token="</s>"),
        ["tokenizer_config.json: eos_token", "'</s>'"],
    ),
    "an added token of tokenizer_config.json": (
        change("tokenizer_config.json", added_tokens_decoder={"76": {"content": "<tool>", "special": True}}),
        ["tokenizer_config.json: added_tokens_decoder", "'<tool>', which tokenizer.json lacks", "save_pretrained(dir)"],
    ),
    "an added token at another token's id": (
        change(
            "tokenizer_config.json", added_tokens_decoder={"10": {"content": "<tool>"}, "11": {"content": "<think>"}}
        ),
        ["tokenizer_config.json: added_tokens_decoder", "'<tool>' and 1 more, which tokenizer.json lacks"],
    ),
    "a token of added_tokens.json": (
        overwrite("added_tokens.json", '{"<tool>": 76}'),
        ["added_tokens.json: <tool>", "'<tool>', which tokenizer.json lacks"],
    ),
    "a token of special_tokens_map.json": (
        overwrite("special_tokens_map.json", '{"additional_special_tokens": [{"content": "<tool>"}]}'),
        ["special_tokens_map.json: additional_special_tokens", "'<tool>', which tokenizer.json lacks"],
    ),
    "a special token without a role": (
        change("tokenizer_config.json", extra_special_tokens=["<eos>", "<tool>"]),
        ["tokenizer_config.json: extra_special_tokens", "'<tool>', which tokenizer.json lacks"],
    ),
    "a special token of a family's own": (
        change("tokenizer_config.json", image_token="<image>"),
        ["tokenizer_config.json: image_token", "'<image>', which tokenizer.json lacks"],
    ),
    "more tokens than rows": (
        change("tokenizer.json", added_tokens=[{"id": 76, "content": "<extra>"}]),
        ["tokenizer.json", "'<extra>' with id 76", "below 76"],
    ),
}


ELSEWHERE: dict[str, Callable[[Path], object]] = {
    "added_tokens_decoder": change("tokenizer_config.json", added_tokens_decoder={"90": {"content": "<tool>"}}),
    "added_tokens.json": overwrite("added_tokens.json", '{"<tool>": 76}'),
    "special_tokens_map.json": overwrite("special_tokens_map.json", '{"mask_token": "<tool>"}'),
    "extra_special_tokens": change("tokenizer_config.json", extra_special_tokens={"tool_token": "<tool>"}),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_tokenizer_that_was_saved_again_has_the_tokens_that_transformers_found(where: str, model: Path) -> None:
    """The advice of the refusal works, and what is read then is what transformers reads."""
    from transformers import AutoTokenizer

    ELSEWHERE[where](model)
    with pytest.raises(ModelError, match=r"which tokenizer\.json lacks"):
        inspect_model(model)
    AutoTokenizer.from_pretrained(model).save_pretrained(model)
    with pytest.raises(ModelError, match="'<tool>' with id 76\n  wanted: ids below 76, the rows of the embedding"):
        inspect_model(model)
    vocab = AutoTokenizer.from_pretrained(model).get_vocab()
    assert vocab["<tool>"] == 76 and token_map(model) == {i: token for token, i in vocab.items()}


def test_older_files_are_read_as_transformers_reads_them(model: Path) -> None:
    """They come before tokenizer_config.json, unless that lists the added tokens."""
    from transformers import AutoTokenizer

    (model / "special_tokens_map.json").write_text('{"eos_token": "<unk>", "pad_token": {"content": "<bos>"}}')
    info, tokenizer = inspect_model(model), AutoTokenizer.from_pretrained(model)
    assert (info.eos_token_ids[-1], tokenizer.eos_token_id, tokenizer.pad_token_id) == (3, 3, 1)
    listed = {"0": {"content": "<pad>", "special": True}}
    edit(model / "tokenizer_config.json", added_tokens_decoder=listed)
    (model / "added_tokens.json").write_text('{"<tool>": 76}')
    info, tokenizer = inspect_model(model), AutoTokenizer.from_pretrained(model)
    assert (info.eos_token_ids, tokenizer.eos_token_id, len(tokenizer)) == ((2,), 2, 76)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_directory_is_refused_and_nothing_is_written(case: str, model: Path, tmp_path: Path) -> None:
    damage, words = BAD[case]
    damage(model)
    root = tmp_path / "registry"
    with pytest.raises(ModelError) as refusal:
        Registry(root).add("math", model, domain="math")
    message = str(refusal.value)
    assert [word for word in [*words, "found:", "wanted:", "fix:"] if word not in message] == [], message
    assert not root.exists()


def test_a_directory_of_the_hubs_cache_is_made_of_links(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--org--x" / "snapshots" / "abc", tmp_path / "models--org--x" / "blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / shutil.copy(file, blobs / f"blob-{file.name}").name)
    assert inspect_model(snapshot).weight_files == inspect_model(model).weight_files
    (snapshot / "extra").symlink_to(model / "config.json")
    with pytest.raises(ModelError, match="snapshots/abc/extra\n  found:  a link to "):
        inspect_model(snapshot)


def test_links_inside_the_directory_are_fine(model: Path) -> None:
    (model / "alias.txt").symlink_to("config.json")
    inspect_model(model)


def test_json_beyond_all_measure_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experts.json_files.MAX_JSON_BYTES", 1000)
    (model / "config.json").write_text((model / "config.json").read_text() + " " * 1000)
    with pytest.raises(ModelError, match=r"config\.json\n  found:  .* bytes, at most 1,000 are read"):
        inspect_model(model)


def test_an_adapter_is_no_full_model(model: Path) -> None:
    for file in model.iterdir():
        file.unlink()
    (model / "adapter_config.json").write_text("{}")
    (model / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"adapter_config\.json\n.*a PEFT adapter\n.*a full model\n.*merge_and_unload"):
        inspect_model(model)


def test_no_torch_is_imported(tiny_model_dir: Path) -> None:
    import subprocess
    import sys

    program = f"""
import sys, pathlib
from experts.registry import Registry
from experts.teacher_check import check_fits
from experts.model_dir import inspect_model
inspect_model(pathlib.Path({str(tiny_model_dir)!r}))
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def test_a_vocabulary_with_holes_is_refused(model: Path) -> None:
    """An id without a token can be sampled; tokenizers itself gives an added token the id of another one there."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    del tokenizer["model"]["vocab"]["a"]
    del tokenizer["model"]["vocab"]["c"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="no token for 2 ids below 75: 4, 6") as error:
        inspect_model(model)
    assert "tokenizer.json" in str(error.value) and "<|unused_4|>" in str(error.value)


def test_an_id_beyond_all_measure_is_refused_without_counting_up_to_it(model: Path) -> None:
    edit(model / "tokenizer.json", added_tokens=[{"id": 1 << 60, "content": "<far>"}])
    with pytest.raises(ModelError, match=r"no token for [\d,]+ ids below 1152921504606846976: \d+, \d+, \d+ \.\.\.\n"):
        inspect_model(model)
