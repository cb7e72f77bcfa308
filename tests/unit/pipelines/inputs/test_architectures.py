"""Models that one of their roles cannot run are refused by name, before any worker starts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PhiConfig, PhiForCausalLM

from opd.config import load_pipeline
from opd.errors import ConfigError, ModelError
from opd.rollouts.engine_args import CPU_ONLY, OURS, REFUSED
from opd.rollouts.served_families import (
    CPU_ATTENTION,
    _served_architectures,
    _supported_sizes,
    engine_arguments,
    find_indivisible_part,
    find_refusal,
)
from pipelines.inputs.read import read_inputs, read_teachers

Make = Callable[..., Path]


@pytest.fixture
def mixtures(world: Any, make_mixture_dir: Make) -> Any:
    """The world with mixtures of experts in place of all three models."""
    for seed, name in enumerate(("base", "rev", "up")):
        shutil.rmtree(world.root / name)
        make_mixture_dir(world.root / name, "glm4_moe", seed=seed)
    return world


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(world: Any) -> str:
    with pytest.raises(ModelError) as error:
        read_inputs(load_pipeline(world.write()))
    return str(error.value)


def test_mixtures_pass(mixtures: Any) -> None:
    assert read_inputs(load_pipeline(mixtures.write())).student.architecture == "Glm4MoeForCausalLM"


def test_heads_that_vllm_has_no_kernel_for(world: Any) -> None:
    """Heads of 16: until now this failed in a worker that had already started."""
    edit(world.root / "base" / "config.json", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    message = refused(world)
    assert "config.json: head_dim" in message and "attention heads of 16" in message and "one of 32, 64" in message
    world.data["cluster"] = {"rollout_gpus": 1}
    read_inputs(load_pipeline(world.write()))


def test_an_expert_with_such_heads_is_refused_if_it_sits_an_exam(world: Any) -> None:
    """It could be scored, by transformers; only the exam puts it into vLLM."""
    edit(world.root / "up" / "config.json", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    assert str(world.root / "up") in refused(world)
    world.data["domains"]["upper"].pop("eval")
    read_inputs(load_pipeline(world.write()))


@pytest.mark.parametrize("who", ["base", "rev"])
def test_a_head_with_a_bias(world: Any, who: str) -> None:
    """The trainer left it out of its logits, and only the probe before the first step told that the engine adds it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name in ("base", "rev", "up"):
        path = world.root / name
        model = PhiForCausalLM(PhiConfig(vocab_size=AutoConfig.from_pretrained(path).vocab_size, **sizes))
        model.save_pretrained(path)  # a bias of zeros, which is none
    read_inputs(load_pipeline(world.write()))
    file = world.root / who / "model.safetensors"
    state = load_file(file)
    state["lm_head.bias"][3] = 0.01
    save_file(state, file, metadata={"format": "pt"})
    message = refused(world)
    assert message.startswith(
        f"{file}: lm_head.bias\n  found:  an output head with a bias, as PhiForCausalLM has one\n"
    )


def test_an_architecture_that_transformers_does_not_know(world: Any) -> None:
    edit(world.root / "base" / "config.json", model_type="llama9", architectures=["Llama9ForCausalLM"])
    assert "'llama9', which transformers has no causal language model for" in refused(world)


@pytest.mark.parametrize("who", ["base", "rev"])
def test_an_activation_that_transformers_does_not_know(world: Any, who: str) -> None:
    file = world.root / who / "config.json"
    edit(file, hidden_act="nope")
    assert refused(world).startswith(f"{file}\n  found:  'nope', which transformers does not know\n")


@pytest.mark.parametrize(
    ("model_type", "architecture", "found"),
    [
        ("llama", "LlamaForSequenceClassification", "found:  LlamaForSequenceClassification"),
        ("t5", "T5ForConditionalGeneration", "'t5', which transformers has no causal language model for"),
    ],
)
def test_a_model_that_is_no_causal_one(world: Any, model_type: str, architecture: str, found: str) -> None:
    edit(world.root / "base" / "config.json", model_type=model_type, architectures=[architecture])
    assert found in refused(world)


@pytest.mark.parametrize("who", ["base", "rev"])
def test_weights_that_do_not_fit_their_config(mixtures: Any, who: str) -> None:
    """transformers alone would begin with a random router."""
    file = mixtures.root / who / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(tensors, file, {"format": "pt"})
    message = refused(mixtures)
    assert "missing ['model.layers.1.mlp.gate.e_score_correction_bias']" in message
    assert str(mixtures.root / who) in message


def test_an_adapter_of_a_mixtures_experts(mixtures: Any, make_adapter: Make) -> None:
    for name, targets in (("attention", ("q_proj",)), ("experts", ("experts.0.up_proj",))):
        make_adapter(mixtures.root / name, mixtures.root / "base", targets=targets)
        mixtures.data["experts"]["rev"] = {"model": name, "base": "base", "domain": "reverse"}
        if name == "attention":
            read_inputs(load_pipeline(mixtures.write()))
    message = refused(mixtures)
    assert "expert `rev`" in message
    assert "an adapter of model.layers.1.mlp.experts.0.up_proj, which is no linear module" in message


def test_experts_that_are_scored_elsewhere_need_no_engine_here(mixtures: Any) -> None:
    for domain in mixtures.data["domains"].values():
        domain.pop("eval")
    servers = {name: {"base_url": "https://host/v1", "model": name} for name in ("rev", "up")}
    mixtures.data["teachers"] = {"engine": "openai", "payload": "sampled_logprobs", "servers": servers}
    mixtures.data["objective"] = {"kind": "sampled"}
    edit(mixtures.root / "up" / "config.json", num_hidden_layers=3)
    read_teachers(load_pipeline(mixtures.write()))


GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "dtype", "found"),
    [
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {}, "float32", "vLLM's CPU build has no sparse attention"),
        ("qwen3_next", "Qwen3NextForCausalLM", GATED, "float32", "qwen3_next, to be served in float32"),
        ("qwen3_next", "Qwen3NextForCausalLM", GATED, "bfloat16", None),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", GATED, "bfloat16", "imports torchvision, which is not installed"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"kv_lora_rank": 32}, "float32", "attention heads of 96"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, "float32", None),
        ("xglm", "XGLMForCausalLM", {}, "float32", "XGLMForCausalLM, which the installed vLLM does not serve"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {}, "float32", "which the installed vLLM does not serve"),
        ("minimax", "MiniMaxForCausalLM", {}, "float32", "which the installed vLLM does not serve"),
        ("jamba", "JambaForCausalLM", {}, "bfloat16", "vLLM's CPU build has no kernel for Mamba-1 layers"),
        ("falcon_mamba", "FalconMambaForCausalLM", {}, "float32", "vLLM's CPU build has no kernel for Mamba-1 layers"),
        ("falcon_h1", "FalconH1ForCausalLM", {"mamba_rms_norm": True}, "float32", "a norm before the gate"),
        (
            "falcon_h1",
            "FalconH1ForCausalLM",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
            "float32",
            None,
        ),
        ("falcon_h1", "FalconH1ForCausalLM", {}, "float32", None),
        ("llama", "LlamaForCausalLM", {}, "float32", None),
        ("smollm3", "SmolLM3ForCausalLM", {}, "float32", None),
    ],
)
def test_what_vllm_cannot_serve_on_a_cpu(
    model_type: str, architecture: str, settings: dict[str, int], dtype: str, found: str | None, monkeypatch: Any
) -> None:
    if model_type == "qwen3_5_text":
        there = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchvision" else there(name))
    answer = find_refusal(AutoConfig.for_model(model_type, **settings), architecture, dtype, cpu=True)
    assert (answer and found and found in answer.found) or answer is found is None


def test_the_installed_vllm_is_understood() -> None:
    """If its source changes so that nothing is read, nothing would be refused either."""
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM"} <= _served_architectures()
    assert "BertModel" not in _served_architectures()
    assert {32, 64, 128} <= set(_supported_sizes(CPU_ATTENTION)) and 16 not in _supported_sizes(CPU_ATTENTION)


def test_a_family_whose_weights_come_from_files_alone(mixtures: Any, make_mixture_dir: Make) -> None:
    for seed, name in enumerate(("base", "rev", "up")):
        shutil.rmtree(mixtures.root / name)
        make_mixture_dir(mixtures.root / name, "gpt_oss", seed=seed)
    mixtures.data["sync"] = {"kind": "network"}
    with pytest.raises(ConfigError, match=r"^sync\.kind\n  found:  network .* gpt_oss\n  wanted: shared_memory"):
        read_inputs(load_pipeline(mixtures.write()))
    mixtures.data["student"]["lora"] = {"r": 4, "targets": ["q_proj", "v_proj"]}
    assert read_inputs(load_pipeline(mixtures.write())).lora, "what is pushed are linear modules"
    del mixtures.data["student"]["lora"]
    mixtures.data["sync"] = {"kind": "shared_memory"}
    read_inputs(load_pipeline(mixtures.write()))


def test_lora_targets_that_the_student_does_not_have(world: Any) -> None:
    world.data["student"]["lora"] = {"targets": ["query"]}
    with pytest.raises(ConfigError, match=r"student\.lora\.targets") as error:
        read_inputs(load_pipeline(world.write()))
    assert "`query`, which is no module" in str(error.value) and "down_proj, gate_proj, k_proj" in str(error.value)


def test_lora_of_a_mixture_has_to_be_told_what_to_adapt(mixtures: Any) -> None:
    mixtures.data["student"]["lora"] = {}
    with pytest.raises(ConfigError, match=r"all-linear, which cannot be had for model\.layers\.\d\.mlp\.experts"):
        read_inputs(load_pipeline(mixtures.write()))
    mixtures.data["student"]["lora"] = {"r": 4, "targets": ["q_proj"]}
    found = read_inputs(load_pipeline(mixtures.write()))
    assert found.trained < found.pushed < found.student.parameters / 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "found"),
    [(2, 2, 3, "num_attention_heads"), (8, 4, 8, None), (8, 2, 4, None), (24, 6, 4, "num_key_value_heads")],
)
def test_heads_that_the_processes_of_an_engine_cannot_divide(
    world: Any, heads: int, kv_heads: int, size: int, found: str | None
) -> None:
    """Fewer key-value heads than processes are held more than once."""
    edit(
        world.root / "base" / "config.json",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=192,
        hidden_size=24 * 8,
        head_dim=32,
    )
    config = AutoConfig.from_pretrained(world.root / "base")
    refused = find_indivisible_part(config, size, "rollout.tensor_parallel_size")
    assert (refused and refused.key) == found


def test_a_student_and_a_teacher_that_cannot_be_divided_are_refused_by_their_own_key(world: Any) -> None:
    world.data["rollout"]["tensor_parallel_size"] = 3
    message = refused(world)
    assert "base/config.json: num_attention_heads" in message
    assert "wanted: a multiple of rollout.tensor_parallel_size 3" in message
    world.data["rollout"]["tensor_parallel_size"] = 2
    read_inputs(load_pipeline(world.write()))
    world.data["teachers"] = {"engine": "vllm", "tensor_parallel_size": 3}
    with pytest.raises(ModelError, match=r"a multiple of teachers\.tensor_parallel_size 3"):
        read_teachers(load_pipeline(world.write()))


@pytest.mark.parametrize(
    ("given", "found", "said"),
    [
        ({"max_num_batched_tokenz": 9}, "9", "did you mean `max_num_batched_tokens`?"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs", "the distribution it was drawn from"),
        ({"generation_config": "auto"}, "auto", "the distribution it was drawn from"),
        ({"quantization": "fp8"}, "fp8", "what the trainer does"),
        ({"max_model_len": 9}, "9", "wanted: rollout.max_model_len, which says this"),
        ({"tensor_parallel_size": 2}, "2", "wanted: rollout.tensor_parallel_size, which says this"),
        ({"pipeline_parallel_size": 2}, "2", "one worker on one machine"),
        ({"enforce_eager": True}, "True", "give the engine a GPU"),
    ],
)
def test_arguments_of_vllm_that_an_engine_must_not_get(
    world: Any, given: dict[str, Any], found: str, said: str
) -> None:
    world.data["rollout"]["engine_args"] = given
    with pytest.raises(ConfigError) as error:
        read_inputs(load_pipeline(world.write()))
    (name,) = given
    assert str(error.value).startswith(f"rollout.engine_args.{name}\n  found:  {found}\n") and said in str(error.value)


def test_arguments_of_vllm_that_pass(world: Any) -> None:
    world.data["rollout"]["engine_args"] = {"max_num_batched_tokens": 4096, "scheduling_policy": "fcfs"}
    read_inputs(load_pipeline(world.write()))
    world.data["rollout"]["engine_args"] = {"enforce_eager": True}
    world.data["cluster"] = {"rollout_gpus": 1}
    read_inputs(load_pipeline(world.write()))


def test_what_is_said_of_arguments_is_of_arguments_that_vllm_has() -> None:
    """vLLM's source is read, not guessed: if it moves, this fails."""
    assert len(engine_arguments()) > 150
    assert {*OURS, *REFUSED, *CPU_ONLY} <= engine_arguments()
    assert not set(OURS) & set(REFUSED)
