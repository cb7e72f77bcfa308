"""LoRA adapters that are accepted, what is read from them, and base and adapter as one model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from experts.adapter import inspect_adapter, inspect_expert, is_adapter, merge_adapter
from experts.model_dir import inspect_model
from experts.registry import Registry
from opd.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> Path:
    """A good one, which the test may damage."""
    return make_adapter(tmp_path / "adapter", tiny_model_dir)


def change(**changes: object) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        file = adapter / CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def retensor(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, adapter / WEIGHTS, {"format": "pt"})

    return damage


# What a good directory says


def test_what_is_read(adapter: Path, tiny_model_dir: Path) -> None:
    info = inspect_adapter(adapter)
    assert (info.path, info.base) == (str(adapter.resolve()), str(tiny_model_dir.resolve()))
    assert (info.rank, info.alpha, info.target_modules) == (4, 8.0, ("down_proj", "q_proj"))
    assert info.parameters == 2 * 4 * ((64 + 64) + (128 + 64)), "two layers, two modules each"
    assert info.files == {name: blake3((adapter / name).read_bytes()).hexdigest() for name in (WEIGHTS, CONFIG)}
    assert inspect_adapter(adapter, hash_files=False) == info.model_copy(update={"files": {}})
    assert inspect_expert(adapter) == (inspect_model(tiny_model_dir), info)
    assert is_adapter(adapter)
    assert not is_adapter(tiny_model_dir)


@pytest.mark.parametrize("where", ["absolute", "beside the adapter", "in the current directory"])
def test_the_base_is_found(where: str, adapter: Path, tiny_model_dir: Path, monkeypatch: Any) -> None:
    base = Path(shutil.copytree(tiny_model_dir, adapter.parent / "base"))
    change(base_model_name_or_path={"absolute": str(base), "beside the adapter": "../base"}.get(where, "base"))(adapter)
    monkeypatch.chdir(base.parent if where == "in the current directory" else "/")
    assert inspect_adapter(adapter).base == str(base.resolve())


@pytest.mark.parametrize("named", [None, "", "meta-llama/Llama-3.1-8B"])
def test_a_given_base_comes_before_the_named_one(named: str | None, adapter: Path, tiny_model_dir: Path) -> None:
    change(base_model_name_or_path=named)(adapter)
    with pytest.raises(ModelError, match=r"adapter_config.json: base_model_name_or_path\n.*\n.*hubs.*\n.*--base DIR"):
        inspect_adapter(adapter)
    assert inspect_adapter(adapter, tiny_model_dir).base == str(tiny_model_dir.resolve())


def test_a_base_with_a_full_model_is_refused(tiny_model_dir: Path) -> None:
    assert inspect_expert(tiny_model_dir) == (inspect_model(tiny_model_dir), None)
    with pytest.raises(ModelError, match=r"found:  a full model, and the base .*\n.*\n.*leave out the base"):
        inspect_expert(tiny_model_dir, tiny_model_dir)


def test_pickles_and_logs_beside_the_weights_are_not_read(adapter: Path) -> None:
    for name in ("adapter_model.bin", "training_args.bin", "tokenizer.json", "README.md"):
        (adapter / name).write_bytes(b"\x80")
    assert inspect_adapter(adapter).rank == 4


# What is refused


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].T


def other_layer(tensors: dict[str, torch.Tensor]) -> None:
    for letter in "AB":
        tensors[f"{Q0.replace('.0.', '.7.')}.lora_{letter}.weight"] = tensors[f"{Q0}.lora_{letter}.weight"].clone()


def on(module: str, rows: int, columns: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, columns)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(rows, 4)

    return edit


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


def only(*names: str) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        (adapter / WEIGHTS).unlink()
        for name in names:
            (adapter / name).write_bytes(b"\x80")

    return damage


def truncate(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-1])


def without(*keys: str) -> Callable[[Path], None]:
    def damage(adapter: Path) -> None:
        data = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps({k: v for k, v in data.items() if k not in keys}))

    return damage


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "broken config": (lambda a: (a / CONFIG).write_text("{"), [CONFIG, "EOF"]),
    "custom code": (change(auto_map={"AutoModel": "evil.M"}), [f"{CONFIG}: auto_map", "custom code", "evil.M"]),
    "another method": (change(peft_type="IA3"), [f"{CONFIG}: peft_type", "'IA3'", "merge_and_unload"]),
    "no method": (without("peft_type"), [f"{CONFIG}: peft_type"]),
    "no rank": (without("r"), [f"{CONFIG}: r", "nothing"]),
    "rank 0": (change(r=0), [f"{CONFIG}: r", "at least 1"]),
    "rank as text": (change(r="4"), [f"{CONFIG}: r", "'4'"]),
    "no alpha": (without("lora_alpha"), [f"{CONFIG}: lora_alpha"]),
    "DoRA": (change(use_dora=True), [f"{CONFIG}: use_dora", "merge_and_unload"]),
    "biases": (change(bias="lora_only"), [f"{CONFIG}: bias", "'lora_only'"]),
    "bias of B": (change(lora_bias=True), [f"{CONFIG}: lora_bias"]),
    "saved modules": (change(modules_to_save=["lm_head"]), [f"{CONFIG}: modules_to_save", "['lm_head']"]),
    "tokens": (change(trainable_token_indices=[3]), [f"{CONFIG}: trainable_token_indices"]),
    "parameters": (change(target_parameters=["mlp.experts.down_proj"]), [f"{CONFIG}: target_parameters"]),
    "replicated layers": (change(layer_replication=[[0, 2], [1, 2]]), [f"{CONFIG}: layer_replication"]),
    "transposed layers": (change(fan_in_fan_out=True), [f"{CONFIG}: fan_in_fan_out"]),
    "invocation": (change(alora_invocation_tokens=[5]), [f"{CONFIG}: alora_invocation_tokens"]),
    "an option to come": (change(use_tomorrow=True), [f"{CONFIG}: use_tomorrow", "merge_and_unload"]),
    "PiSSA": (change(init_lora_weights="pissa_niter_4"), [f"{CONFIG}: init_lora_weights", "path_initial_model"]),
    "no regular expression": (
        change(rank_pattern={"q_proj(": 4}),
        [f"{CONFIG}: rank_pattern", "['q_proj(']", "unterminated"],
    ),
    "a repetition without end": (
        change(alpha_pattern={"a{99999999999999999999}": 1}),
        [f"{CONFIG}: rank_pattern, alpha_pattern", "too large"],
    ),
    "no such base": (change(base_model_name_or_path="org/base"), [f"{CONFIG}: base_model_name_or_path", "'org/base'"]),
    "its own base": (change(base_model_name_or_path="."), [CONFIG, "a PEFT adapter", "a full model"]),
    "no weights": (only(), [WEIGHTS, "no such file"]),
    "pickle": (only("adapter_model.bin"), [WEIGHTS, "only adapter_model.bin", "run code"]),
    "truncated": (truncate, [WEIGHTS, "truncated"]),
    "full weights beside": (
        lambda a: shutil.copy(a / WEIGHTS, a / "model.safetensors"),
        [CONFIG, "beside model.safetensors", "delete adapter_config.json"],
    ),
    "no tensors": (retensor(lambda t: t.clear()), [WEIGHTS, "no tensors"]),
    "a layer that the base lacks": (
        retensor(other_layer),
        [
            f"{WEIGHTS}: module `model.layers.7.self_attn.q_proj`",
            "that the base",
            "lacks",
            "model.layers.",
            "--base DIR",
        ],
    ),
    "a norm": (retensor(on("model.norm", 64, 64)), [f"{WEIGHTS}: module `model.norm`", "lacks"]),
    "transposed": (retensor(transpose), [f"{WEIGHTS}: module `model.layers.0.self_attn.q_proj`", "lora_A [64, 4]"]),
    "wider": (
        retensor(on("model.layers.0.mlp.up_proj", 64, 64)),
        [f"{WEIGHTS}: module `model.layers.0.mlp.up_proj`", "lora_B [64, 4]", "lora_B [128, 4]", "128 outputs"],
    ),
    "another rank": (change(r=8), [f"{WEIGHTS}: module", "lora_A [4, ", "rank 8"]),
    "another rank in the pattern": (change(rank_pattern={"q_proj": 2}), ["q_proj", "rank 2"]),
    "half a pair": (retensor(lambda t: t.pop(f"{Q0}.lora_B.weight")), ["q_proj", "found:  lora_A [4, 64]\n"]),
    "magnitudes": (
        retensor(put(f"{Q0}.lora_magnitude_vector", 64)),
        [f"{WEIGHTS}: tensor `{Q0}.lora_magnitude_vector`", "another kind"],
    ),
    "a saved head": (retensor(put("base_model.model.lm_head.weight", 76, 64)), ["`base_model.model.lm_head.weight`"]),
    "an adapted head": (
        retensor(on("lm_head", 76, 64)),
        ["`base_model.model.lm_head.lora_A.weight`", "embedding or output head"],
    ),
    "matrices that ZeRO-3 did not gather": (
        retensor(lambda state: state.update({f"{Q0}.lora_A.weight": torch.empty(0)})),
        [f"`{Q0}.lora_A.weight`", "shape [0]", "deepspeed.zero.GatheredParameters"],
    ),
    "an adapted embedding": (retensor(on("model.embed_tokens", 76, 64)), ["embed_tokens", "embedding or output head"]),
    "quantised": (
        retensor(put(f"{Q0}.lora_A.weight", 4, 64, dtype=torch.int8)),
        [f"{WEIGHTS}: tensor `{Q0}.lora_A.weight`", "I8"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_is_refused_and_nothing_is_written(case: str, adapter: Path, tmp_path: Path) -> None:
    damage, words = BAD[case]
    damage(adapter)
    root = tmp_path / "registry"
    with pytest.raises(ModelError) as refusal:
        Registry(root).add("math", adapter, domain="math")
    message = str(refusal.value)
    assert [word for word in [*words, "found:", "wanted:", "fix:"] if word not in message] == [], message
    assert not root.exists()


def test_another_base_of_other_sizes_is_refused(adapter: Path, make_model_dir: Any, tmp_path: Path) -> None:
    wide = make_model_dir(tmp_path / "wide", hidden=96, heads=3)
    with pytest.raises(ModelError, match=r"rank 4, (96|192) inputs and 96 outputs"):
        inspect_adapter(adapter, wide)
    with pytest.raises(ModelError, match="no such directory"):
        inspect_adapter(adapter, tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such directory"):
        inspect_adapter(tmp_path / "nowhere")


# Base and adapter as one model


@torch.no_grad()
def logits(model: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded(input_ids=torch.arange(4, 40)[None], use_cache=False).logits[0].float()


def test_the_merged_model_is_that_of_plain_arithmetic(
    adapter: Path, tiny_model_dir: Path, merged_plainly: Callable[..., Path], tmp_path: Path
) -> None:
    merge_adapter(tiny_model_dir, adapter, tmp_path / "out")
    want = merged_plainly(tiny_model_dir, adapter, tmp_path / "want")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(want), rtol=0, atol=1e-5)
    assert (logits(want) - logits(tiny_model_dir)).abs().mean() > 0.1, "the adapter matters"
    info = inspect_model(tmp_path / "out", hash_weights=False)
    assert info.model_copy(update={"path": ""}) == inspect_model(tiny_model_dir, False).model_copy(update={"path": ""})
    base, out = load_file(tiny_model_dir / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {n for n in base if not torch.equal(base[n], out[n])} == {n for n in base if "q_proj" in n or "down" in n}


def test_shards_and_types_stay_as_they_are(tiny_model_dir: Path, make_adapter: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    model.save_pretrained(base, max_shard_size="100KB")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(base)
    adapter = make_adapter(tmp_path / "adapter", tiny_model_dir)
    merge_adapter(base, adapter, tmp_path / "out")
    shards = sorted(p.name for p in base.glob("*.safetensors"))
    assert len(shards) == 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in base.iterdir())
    assert inspect_model(tmp_path / "out").dtype == "bfloat16"
    tensors = load_file(adapter / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    (shard,) = (s for s in shards if name in load_file(base / s))
    added = 2.0 * tensors[f"{Q0}.lora_B.weight"] @ tensors[f"{Q0}.lora_A.weight"]
    want = (load_file(base / shard)[name].float() + added).bfloat16()
    assert torch.equal(load_file(tmp_path / "out" / shard)[name], want)


def test_a_merge_is_not_written_over_anything(adapter: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        merge_adapter(tiny_model_dir, adapter, tmp_path)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}}],
)
def test_what_peft_itself_wrote_is_read_as_peft_reads_it(options: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **options))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
        want = peft.eval()(input_ids=torch.arange(4, 40)[None], use_cache=False).logits[0]
    peft.save_pretrained(tmp_path / "adapter")
    info = inspect_adapter(tmp_path / "adapter")
    assert (info.rank, info.base) == (4, str(tiny_model_dir.resolve()))
    merge_adapter(tiny_model_dir, tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), want, rtol=0, atol=1e-5)


# The way out


def peft_adapter(base: Path, out: Path, **options: Any) -> torch.Tensor:
    """Save an adapter as PEFT does; returns the log-probs that PEFT computes with it."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, **options))
        for param in model.parameters():
            if param.requires_grad:
                torch.nn.init.normal_(param, std=0.3)
    model.save_pretrained(out)
    return logprobs(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out))


def logprobs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.arange(4, 40)[None]).logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
        {"target_modules": ["q_proj"], "bias": "lora_only"},
    ],
    ids=lambda options: "+".join(f"{key}={value}" for key, value in options.items()),
)
def test_who_follows_the_advice_has_pefts_model(
    options: dict[str, Any], tie: bool, tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    """The lines of the message are run as they stand. Where head and embedding are one, PEFT merges the update of one into both."""
    import peft
    import transformers

    base, adapter, out = make_model_dir(tmp_path / "base", tie=tie, seed=3), tmp_path / "adapter", tmp_path / "out"
    wanted = peft_adapter(base, adapter, **options)
    with pytest.raises(ModelError) as refused:
        inspect_adapter(adapter, base)
    advice = str(refused.value).rpartition("a full model: ")[2]
    code = advice.replace("and the tokenizer with it: ", "")
    names: dict[str, Any] = {"torch": torch, "dir": adapter, "base": base, "out": out}
    exec(
        code,
        names
        | {name: getattr(peft, name) for name in ("AutoPeftModelForCausalLM",)}
        | {"AutoTokenizer": transformers.AutoTokenizer},
    )
    inspect_model(out)
    found = logprobs(transformers.AutoModelForCausalLM.from_pretrained(out))
    assert float((wanted.exp() * (wanted - found)).sum(-1).max()) < 1e-5


def test_biases_of_an_adapter_have_no_other_way_out_than_training(tiny_model_dir: Path, tmp_path: Path) -> None:
    peft_adapter(tiny_model_dir, tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ModelError, match=r"lora_bias\n(?s:.*)train it again with lora_bias=False"):
        inspect_adapter(tmp_path / "adapter", tiny_model_dir)
