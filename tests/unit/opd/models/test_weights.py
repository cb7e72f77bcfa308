"""Files to modules as `from_pretrained` does it, and back to the same files, with what is no parameter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from opd.errors import ModelError
from opd.models.weights import (
    Naming,
    choose_attention,
    iterate_persistent_buffers,
    load_causal_lm,
    make_file_groups,
    to_files,
)

FAMILIES = ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"]
IDS = torch.arange(4, 40)[None]


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, make_mixture_dir: Callable[..., Path], tmp_path_factory: Any) -> Path:
    return make_mixture_dir(tmp_path_factory.mktemp("mixtures") / request.param, request.param)


def plain(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.from_pretrained(model_dir)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation=choose_attention(config))


def naming(model_dir: Path, dtype: torch.dtype = torch.float32) -> Naming:
    return Naming(AutoConfig.from_pretrained(model_dir), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_become_what_from_pretrained_makes_of_them(model_dir: Path, dtype: torch.dtype) -> None:
    wanted = plain(model_dir, dtype).state_dict()
    made = naming(model_dir, dtype)
    for _ in range(2):  # nothing of one model stays for the next
        state, problem = made.from_files(load_file(model_dir / "model.safetensors"))
        assert problem == ""
        assert set(state) == set(wanted)
        for name, tensor in wanted.items():
            assert state[name].dtype == tensor.dtype, name
            assert torch.equal(state[name], tensor), name
    assert all(tensor.is_meta for tensor in made.model.state_dict().values())


def test_the_router_bias_stays_float32_in_a_bfloat16_model(make_mixture_dir: Any, tmp_path: Path) -> None:
    model_dir = make_mixture_dir(tmp_path / "m", "deepseek_v3")
    files = load_file(model_dir / "model.safetensors")
    state, _ = naming(model_dir, torch.bfloat16).from_files(files)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert state[name].dtype == torch.float32
    assert torch.equal(state[name], files[name])


def test_what_does_not_fit_is_named(model_dir: Path) -> None:
    made, files = naming(model_dir), load_file(model_dir / "model.safetensors")
    norm = files.pop("model.norm.weight")
    assert made.from_files(files)[1] == "missing ['model.norm.weight']"
    assert made.from_files(files | {"model.norm.weight": norm[:3]})[1].endswith(
        "of another shape ['model.norm.weight']"
    )
    both = made.from_files(files | {"model.norm.weight": norm, "model.other.weight": norm})
    assert both[1] == "unexpected ['model.other.weight']"
    shapes = {name: tensor.to("meta") for name, tensor in files.items()}
    assert made.from_files(shapes)[1] == "missing ['model.norm.weight']"


def test_a_model_is_not_loaded_without_a_tensor(tiny_model_dir: Path, tmp_path: Path) -> None:
    """transformers would draw it at random."""
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    assert load_causal_lm(model, torch.float32) is not None
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(model, torch.float32)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"intermediate_size": 96},
            r"model\.layers\.0\.mlp\.down_proj\.weight of shape 64 x 128, config\.json .* 64 x 96",
        ),
        ({"num_attention_heads": 3}, r"config\.json\n  found:  .*\(64\) is not a multiple of .*\(3\)"),
        ({"hidden_act": "nope"}, r"config\.json\n  found:  'nope', which transformers does not know"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_the_weights_or_itself_is_refused(
    change: dict[str, Any], found: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=found):
        load_causal_lm(model, torch.float32)


def test_a_lost_router_bias_is_no_small_matter(make_mixture_dir: Any, tmp_path: Path) -> None:
    model_dir = make_mixture_dir(tmp_path / "m", "glm4_moe")
    files = load_file(model_dir / "model.safetensors")
    del files["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert naming(model_dir).from_files(files)[1] == "missing ['model.layers.1.mlp.gate.e_score_correction_bias']"


def test_an_export_has_the_hubs_names_and_gives_the_same_logits(model_dir: Path, tmp_path: Path) -> None:
    """Parameters alone would leave the router's bias at zero: logits off by up to 0.9 here."""
    model = plain(model_dir).eval()
    with torch.no_grad():
        for param in model.parameters():  # as training would
            param += 0.01 * torch.randn_like(param)
    state = {name: param.detach() for name, param in model.named_parameters()} | dict(iterate_persistent_buffers(model))
    out = tmp_path / "out"
    out.mkdir()
    save_torch_state_dict(to_files(model, state), out)
    model.config.save_pretrained(out)
    names = {name: tensor.shape for name, tensor in load_file(model_dir / "model.safetensors").items()}
    assert {name: tensor.shape for name, tensor in load_file(out / "model.safetensors").items()} == names
    with torch.no_grad():
        assert torch.equal(plain(out).eval()(IDS).logits, model(IDS).logits)


def test_group_by_group_the_files_are_those_of_all_at_once(model_dir: Path) -> None:
    """With the weights of a model that was loaded, and with those of one that was not."""
    from transformers.core_model_loading import revert_weight_conversion

    loaded = plain(model_dir)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    for model in (loaded, made):
        state = {name: param.detach() for name, param in model.named_parameters()} | dict(
            iterate_persistent_buffers(model)
        )
        groups = make_file_groups(model, state)
        assert sorted(name for group in groups for name in group.names) == sorted(state)
        assert (model_dir.name == "gpt_oss") == all(group.conversion is None for group in groups)
        found = {
            name: tensor
            for group in groups
            for name, tensor in group.to_files(model, {part: state[part] for part in group.names}).items()
        }
        wanted = revert_weight_conversion(model, dict(state))
        assert list(found) == list(wanted), "the order decides which shard a tensor is in"
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_tensors_that_a_file_fuses_are_one_group() -> None:
    """No family here has them, so the conversion is made up."""
    from transformers.core_model_loading import Chunk, WeightConverter

    fused = WeightConverter(["qkv"], ["q_proj", "k_proj"], operations=[Chunk(dim=0)])
    model = SimpleNamespace(config=None, _weight_conversions=[fused])
    state = {f"layers.{n}.{part}.weight": torch.randn(2, 3) for n in (10, 9) for part in ("q_proj", "k_proj", "o_proj")}
    groups = make_file_groups(model, state)
    assert [group.names for group in groups if len(group.names) > 1] == [
        tuple(f"layers.{n}.{part}.weight" for part in ("k_proj", "q_proj")) for n in (9, 10)
    ]
    files = to_files(model, state)
    assert torch.equal(
        files["layers.9.qkv.weight"],
        torch.cat([state["layers.9.q_proj.weight"], state["layers.9.k_proj.weight"]]),
    )


def test_exported_tensors_own_their_bytes(model_dir: Path) -> None:
    model = plain(model_dir)
    files = to_files(model, {name: param.detach() for name, param in model.named_parameters()})
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in files.values())


def test_the_head_is_found_under_its_name_in_the_files(model_dir: Path, tiny_model_dir: Path) -> None:
    for directory, name in ((model_dir, "lm_head.weight"), (tiny_model_dir, "model.embed_tokens.weight")):
        files = load_file(directory / "model.safetensors")
        assert naming(directory).head_names(files) == (name,)
    renamed = {
        f"base.{name}" if name == "lm_head.weight" else name for name in load_file(model_dir / "model.safetensors")
    }
    assert naming(model_dir).head_names(renamed) == ()


def test_a_dense_model_needs_no_conversion(tiny_model_dir: Path, model_dir: Path) -> None:
    dense = load_file(tiny_model_dir / "model.safetensors")
    assert naming(tiny_model_dir).is_plain(dense)
    assert naming(model_dir).is_plain(load_file(model_dir / "model.safetensors")) == (model_dir.name == "gpt_oss")
