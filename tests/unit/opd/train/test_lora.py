"""A student that LoRA trains: what is trained, what it comes to as plain weights, and what is refused. PEFT is the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.adapter import inspect_adapter, merge_adapter
from opd.errors import ConfigError
from opd.losses.chunked import Tokens
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.models.lora import tensor_name
from opd.models.weights import load_causal_lm, to_files
from opd.payloads.hidden_states import HiddenRun
from opd.train.lora import (
    LoraOptions,
    PlainWeight,
    add_adapters,
    count_lora_weights,
    fold_adapters,
    list_plain_weights,
    select_changed_weights,
    write_adapter,
)
from opd.train.optimizer import split_parameters
from opd.train.student import Student
from opd.train.zero import _disable_randomness
from tests.models.families import FAMILIES, build_config

Make = Callable[..., Path]
IDS = torch.arange(4, 24)[None]
ATTENTION = [f"{name}_proj" for name in "qkvo"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def options(targets: Any = "all-linear", seed: int = 0, r: int = 4) -> LoraOptions:
    return LoraOptions(r=r, alpha=2 * r, targets=targets, seed=seed)


def adapted(model_dir: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    lm = load_causal_lm(model_dir, dtype)
    add_adapters(lm, options(**more))
    return lm


def trained(lm: Any, seed: int = 0) -> Any:
    """As if training had moved both matrices of each adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in lm.parameters():
            if param.requires_grad:
                param += 0.1 * torch.randn(param.shape, generator=generator).to(param.dtype)
    return lm


def logits(lm: Any) -> torch.Tensor:
    with torch.no_grad():
        return lm(IDS).logits


def adapters(lm: Any) -> dict[str, torch.Tensor]:
    return {name: param for name, param in lm.named_parameters() if param.requires_grad}


def test_adapters_alone_are_trained_and_say_nothing_yet(tiny_model_dir: Path) -> None:
    lm = adapted(tiny_model_dir)
    names = adapters(lm)
    assert len(names) == 2 * 7 * 2 and all(".lora_A." in n or ".lora_B." in n for n in names)
    assert torch.equal(logits(lm), logits(load_causal_lm(tiny_model_dir, torch.float32)))
    (group,) = split_parameters(lm, 0.1)
    assert {id(p) for p in group["params"]} == {id(p) for p in names.values()}


def test_the_seed_alone_decides_how_adapters_begin(tiny_model_dir: Path) -> None:
    torch.manual_seed(7)
    first = adapters(adapted(tiny_model_dir))
    torch.manual_seed(8)
    before = torch.get_rng_state()
    again, other = adapters(adapted(tiny_model_dir)), adapters(adapted(tiny_model_dir, seed=1))
    assert torch.equal(torch.get_rng_state(), before), "nobody else's chance is touched"
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert all(torch.equal(param, again[name]) for name, param in first.items())
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_plain_weights_are_those_of_a_model_that_says_the_same(tmp_path: Path, make_model_dir: Make, tie: bool) -> None:
    base = make_model_dir(tmp_path / "base", tie=tie)
    lm = trained(adapted(base))
    plain = load_causal_lm(base, torch.float32)
    own = dict(plain.named_parameters())
    found = {weight.name: weight for weight in list_plain_weights(lm)}
    assert list(found) == list(own)
    plain.load_state_dict({name: weight.read_tensor() for name, weight in found.items()}, strict=tie is False)
    assert logits(plain) == pytest.approx(logits(lm), abs=1e-5)
    assert not torch.allclose(logits(load_causal_lm(base, torch.float32)), logits(lm), atol=0.1)
    head = found["model.embed_tokens.weight"]
    assert head.update is None and torch.equal(head.read_tensor(), head.param)


def test_adapters_can_be_put_into_the_weights(tiny_model_dir: Path) -> None:
    lm = trained(adapted(tiny_model_dir))
    wanted = {weight.name: weight.read_tensor() for weight in list_plain_weights(lm)}
    fold_adapters(lm)
    assert {name: param.shape for name, param in lm.named_parameters()} == {n: v.shape for n, v in wanted.items()}
    assert all(torch.equal(param, wanted[name]) for name, param in lm.named_parameters())


def test_in_bfloat16_an_update_is_added_in_float32_and_rounded_once(tiny_model_dir: Path) -> None:
    lm = trained(adapted(tiny_model_dir, torch.bfloat16))
    (weight,) = [w for w in list_plain_weights(lm) if w.name == "model.layers.0.mlp.down_proj.weight"]
    assert weight.update is not None
    exact = weight.param.double() + 2 * weight.update.b_O_K.double() @ weight.update.a_K_I.double()
    assert weight.read_tensor().dtype == torch.bfloat16
    assert ((weight.read_tensor().double() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()


@pytest.mark.parametrize(
    ("targets", "changed"),
    [("all-linear", LINEAR), (["q_proj"], ATTENTION), (["1.mlp.up_proj"], ["gate_proj", "up_proj", "down_proj"])],
)
def test_a_push_has_what_changes_and_its_neighbours(tiny_model_dir: Path, targets: Any, changed: list[str]) -> None:
    lm = adapted(tiny_model_dir, targets=targets)
    every = list_plain_weights(lm)
    names = {weight.name for weight in select_changed_weights(lm, every)}
    layers = (1,) if targets == ["1.mlp.up_proj"] else (0, 1)
    part = "mlp" if "gate_proj" in changed else "self_attn"
    parts = {name: part if name in changed else "" for name in changed} | dict.fromkeys(
        set(changed) & set(ATTENTION), "self_attn"
    )
    assert names == {f"model.layers.{i}.{parts[name]}.{name}.weight" for i in layers for name in changed}
    size = count_lora_weights(lm)
    assert size.pushed == sum(weight.param.numel() for weight in every if weight.name in names)
    assert size.trained == sum(param.numel() for param in adapters(lm).values())


def test_without_adapters_every_weight_is_plain_and_changes(tiny_model_dir: Path) -> None:
    lm = load_causal_lm(tiny_model_dir, torch.float32)
    every = list_plain_weights(lm)
    assert every == [PlainWeight(name, param) for name, param in lm.named_parameters()]
    assert select_changed_weights(lm, every) is every


def meta(family: str) -> Any:
    from opd.models.weights import Naming

    return Naming(build_config(FAMILIES[family]), torch.float32).model


def test_biases_of_a_fused_layer_are_pushed_with_it() -> None:
    lm = meta("Qwen2")
    add_adapters(lm, options(["k_proj"]))
    names = {w.name for w in select_changed_weights(lm, list_plain_weights(lm)) if ".0." in w.name}
    wanted = {f"model.layers.0.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj")}
    assert names == {f"{n}.{own}" for n in wanted for own in ("weight", "bias")} | {
        "model.layers.0.self_attn.o_proj.weight"
    }


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "GPT-2"])
def test_of_every_family_some_module_can_be_adapted_and_its_files_stand_apart(name: str) -> None:
    """With the rest of the files as they were, what is pushed makes up the whole."""
    lm = meta(name)
    linear = sorted(
        {n.rpartition(".")[2] for n, m in lm.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    )
    target = next((n for n in ("o_proj", "out_proj", "dense", "fc2", "c_proj", "wo") if n in linear), linear[0])
    add_adapters(lm, options([target]))
    every = list_plain_weights(lm)
    changed = select_changed_weights(lm, every)
    assert 0 < len(changed) < len(every)
    whole = to_files(lm, {w.name: torch.empty(w.param.shape, device="meta") for w in every})
    part = to_files(lm, {w.name: torch.empty(w.param.shape, device="meta") for w in changed})
    assert {n: t.shape for n, t in part.items()} == {n: whole[n].shape for n in part}


# What the trainer makes of it


def student(model_dir: Path, **more: Any) -> Student:
    return Student(adapted(model_dir, **more), ReverseKL(), chunk=4, vocab_size=76)


def step(made: Student) -> dict[str, torch.Tensor]:
    """Gradients of one forward and backward pass against a teacher of random states."""
    generator = torch.Generator().manual_seed(3)
    hidden_N_D = made.lm.base_model(IDS).last_hidden_state[0, 4:12]
    num = len(hidden_N_D)
    head = Head(torch.randn(76, 64, generator=generator), IDENTITY)
    run = HiddenRun(heads=("h",), weights=(1.0,), hidden=(torch.randn(num, 64, generator=generator),))
    tokens = Tokens(torch.arange(num), torch.full((num,), 1 / num), torch.full((num,), -1.0))
    loss, _ = made.loss_head(hidden_N_D, tokens, [run.with_heads({"h": head})])
    loss.backward()
    return {n: p.grad for n, p in made.named_parameters() if p.grad is not None}


def test_gradients_reach_the_first_layers_adapters_and_no_frozen_weight(tiny_model_dir: Path) -> None:
    made = student(tiny_model_dir)
    trained(made.lm)
    found = step(made)
    assert set(found) == {f"lm.{name}" for name in adapters(made.lm)}
    assert all(grad.abs().max() > 0 for grad in found.values())


def test_gradients_are_the_same_when_activations_are_computed_again(tiny_model_dir: Path) -> None:
    """The inputs of the first layer want no gradient: with reentrant checkpointing its adapters would get none."""
    plain, again = student(tiny_model_dir), student(tiny_model_dir)
    for made in (plain, again):
        trained(made.lm)
    _disable_randomness(again, gradient_checkpointing=True)
    wanted, found = step(plain), step(again)
    for name, grad in wanted.items():
        assert torch.allclose(found[name], grad, atol=1e-7), name


# As PEFT's files


def written(lm: Any, base: Path, path: Path) -> Path:
    tensors = {}
    for weight in list_plain_weights(lm):
        if weight.update:
            for letter, part in (("A", weight.update.a_K_I), ("B", weight.update.b_O_K)):
                tensors[tensor_name(weight.module, letter)] = part.detach()
    path.mkdir()
    write_adapter(lm, tensors, base, path)
    return path


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_an_adapter_that_is_written_is_one_that_peft_and_a_merge_take(
    tmp_path: Path, tiny_model_dir: Path, targets: Any
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    lm = trained(adapted(tiny_model_dir, targets=targets))
    path = written(lm, tiny_model_dir, tmp_path / "adapter")
    found = inspect_adapter(path)
    assert (found.rank, found.alpha) == (4, 8) and Path(found.base) == tiny_model_dir.resolve()
    loaded = PeftModel.from_pretrained(load_causal_lm(tiny_model_dir, torch.float32), path)
    assert torch.equal(logits(loaded), logits(lm))
    merge_adapter(tiny_model_dir, path, tmp_path / "merged")
    files = load_file(tmp_path / "merged" / "model.safetensors")
    for weight in list_plain_weights(lm):
        assert torch.equal(files[weight.name], weight.read_tensor()), weight.name


# Refusals


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (["q_proj", "query"], "`query`, which is no module"),
        (["lm_head"], "`lm_head`, which is also lm_head"),
        (["mlp"], "`mlp`, which is also model.layers.0.mlp"),
        (["embed_tokens"], "`embed_tokens`, which is also model.embed_tokens"),
    ],
)
def test_targets_that_are_no_linear_modules_of_the_body_are_refused(targets: list[str], found: str) -> None:
    lm = meta("Llama")
    with pytest.raises(ConfigError) as error:
        add_adapters(lm, options(targets))
    message = str(error.value)
    assert "student.lora.targets" in message and found in message
    assert "linear modules of LlamaForCausalLM" in message and ", ".join(sorted(LINEAR)) in message
    assert all(param.requires_grad for param in lm.parameters()), "nothing was done"


def test_experts_in_one_tensor_are_not_passed_over_in_silence() -> None:
    with pytest.raises(ConfigError, match=r"all-linear, which cannot be had for model\.layers\.0\.mlp\.experts\."):
        add_adapters(meta("Qwen3-MoE"), options())
    lm = meta("Qwen3-MoE")
    add_adapters(lm, options(["q_proj", "v_proj"]))
    assert {n.split(".")[-4] for n in adapters(lm)} == {"q_proj", "v_proj"}
    assert not any("experts" in weight.name for weight in select_changed_weights(lm, list_plain_weights(lm)))


@pytest.mark.parametrize("targets", ["all-linear", ["c_attn"]])
def test_modules_whose_weights_lie_the_other_way_round_are_refused(targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"transformer\.h\.0\.attn\.c_attn\n  wanted: .* it has none"):
        add_adapters(meta("GPT-2"), options(targets))


def test_what_peft_will_not_adapt_is_refused_in_its_words() -> None:
    """A Mamba mixer reads this weight without running the module."""
    with pytest.raises(ConfigError, match=r"student\.lora\.targets\n  found:  .*'out_proj' is incompatible with Mamba"):
        add_adapters(meta("Falcon-H1"), options(["out_proj"]))
