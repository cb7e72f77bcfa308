"""Numbers of a model from its config: those that its publishers state, and those that its weight files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experts.weight_files import weight_tensors
from opd.errors import ModelError
from pipelines.sizing.formulas import KINDS, ShapeConfig, make_shape
from pipelines.sizing.models import read_body, read_shape
from pipelines.sizing.shape import Body

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
}


def shape(config: dict[str, Any]) -> Any:
    return make_shape(ShapeConfig.model_validate(config), "config.json")


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("qwen2.5-7b", 7_615_616_512), ("llama-3-70b", 70_553_706_496), ("smollm2", 134_515_008)],
)
def test_the_shipped_shapes_have_the_published_numbers(model: str, parameters: int) -> None:
    assert read_shape(Path("models") / model).parameters == parameters


def test_mixtures_have_the_published_numbers() -> None:
    assert shape(MIXTRAL).parameters == 46_702_792_704
    # The published 671.0 B, of which 37 B are active; the router's biases are no matrices.
    assert shape(DEEPSEEK).parameters == 671_026_419_200 - 58 * 256
    assert (shape(DEEPSEEK).active + shape(DEEPSEEK).head) / 1e9 == pytest.approx(36.6, abs=0.1)
    large = read_shape(Path("models/moe-744b"))
    assert large.parameters / 1e9 == pytest.approx(744, abs=0.5)
    assert (large.active + large.head) / 1e9 == pytest.approx(40.8, abs=0.1)


def test_a_cache_of_groups_and_of_latent_vectors() -> None:
    assert shape(MIXTRAL).attention.kv_values == 2 * 32 * 8 * 128
    assert shape(DEEPSEEK).attention.kv_values == 61 * (512 + 64)


def test_a_pass_reads_the_experts_that_its_tokens_touch() -> None:
    mixtral = shape(MIXTRAL)
    one, all_of_them = mixtral.numbers_read(1), mixtral.numbers_read(1000)
    experts = 8 * 3 * 4096 * 14336 * 32
    assert all_of_them - one == pytest.approx(experts * 3 / 4)
    assert one - mixtral.head == pytest.approx(mixtral.active)


def test_an_indexer_limits_what_a_token_looks_at() -> None:
    large = read_shape(Path("models/moe-744b"))
    index = 2 * large.attention.index_pair
    assert large.forward(1, 9000) - large.forward(1, 8000) == pytest.approx(1000 * index)
    assert large.forward(1, 2000) - large.forward(1, 1000) == pytest.approx(1000 * (index + 2 * large.attention.pair))


def test_adapters_are_two_matrices_for_each_target() -> None:
    small = read_shape(Path("models/qwen2.5-7b"))
    trained, pushed = small.lora_numbers(8, ["q_proj", "v_proj"])
    assert trained == 28 * 8 * (3584 + 3584 + 3584 + 512)
    assert pushed == 28 * 3584 * (3584 + 512)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_adapters_of_all_linear_modules_are_those_of_transformers(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    config.update({"num_key_value_heads": 2, "vocab_size": 80, "pad_token_id": 0, "tie_word_embeddings": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    found = shape(config.to_dict())
    wanted = (
        sum(8 * (m.in_features + m.out_features) for m in linear.values()),
        sum(m.weight.numel() for m in linear.values()),
    )
    assert (
        found.lora_numbers(8, None)
        == found.lora_numbers(8, sorted({name.rpartition(".")[2] for name in linear}))
        == wanted
    )
    assert found.parameters == model.num_parameters()


@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral", "qwen3_moe"])
def test_layers_are_the_formulas_also_where_weights_are_there(kind: str, tmp_path: Path) -> None:
    """A check reads weights and a plan may have none: of a mixture the header alone does not tell what a token passes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 80}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    mixture = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = AutoConfig.for_model(kind, **sizes, **(mixture if "mix" in kind or "moe" in kind else {}), pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    body, header = read_body(tmp_path), Body.from_tensors(weight_tensors(tmp_path))
    assert body == read_shape(tmp_path).body
    assert (header.blocks, header.widest, header.largest) == (body.blocks, body.widest, body.largest)
    assert header.inside - body.inside == (3 * 6 * 3 * (64 + 96) if "mix" in kind or "moe" in kind else 0)


def test_a_model_without_formulas_is_read_from_its_header(world: Any) -> None:
    file = Path("base/config.json")
    before = read_body(Path("base"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mamba"}))
    assert read_body(Path("base")) == before


def test_targets_may_be_the_ends_of_full_names() -> None:
    large = read_shape(Path("models/llama-3-70b"))
    every, _ = large.lora_numbers(8, ["q_proj"])
    assert large.lora_numbers(8, ["self_attn.q_proj"])[0] == every
    assert large.lora_numbers(8, ["10.self_attn.q_proj", "layers.3.self_attn.q_proj"])[0] == 2 * every // 80
    assert large.lora_numbers(8, ["0.self_attn.q_proj"])[0] == every // 80
    assert large.lora_numbers(8, ["mlp.q_proj"]) == (0, 0)


@pytest.mark.parametrize(("kind", "window"), [("mistral", 64), ("phi3", 64), ("qwen2", None)])
def test_a_window_holds_without_a_flag_where_the_family_has_none(kind: str, window: int | None) -> None:
    dense = {key: value for key, value in MIXTRAL.items() if "experts" not in key}
    found = shape(dense | {"model_type": kind, "sliding_window": 64})
    assert found.attention.window == window
    assert (found.forward(1, 500) == found.forward(1, 100)) == (window is not None)


def test_a_model_on_disk_is_checked_against_its_weights(world: Any) -> None:
    student = Path(world.data["student"]["model"])
    found = read_shape(student)
    assert found.parameters == 87_104, "as tests of the memory have it"
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match="87,104 in the weight files"):
        read_shape(student)


def test_what_is_not_there_or_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_shape(tmp_path / "nothing")
    with pytest.raises(ModelError, match="found:  mamba") as refused:
        shape(MIXTRAL | {"model_type": "mamba"})
    assert all(kind in str(refused.value) for kind in KINDS)
