"""An expert's answers about a few token ids are kept in its manifest; weights with a NaN are not registered at all."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from experts import weight_values
from experts.model_dir import inspect_model
from experts.probe import measure_probe, probe_ids
from experts.registry import Registry
from opd.errors import ModelError
from opd.records.types import Probe
from tests.conftest import build_tokenizer


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def spoil(path: Path, name: str, value: float, dtype: torch.dtype = torch.float32) -> None:
    """Put `value` into the middle of one tensor; all tensors become `dtype`."""
    state = {key: tensor.to(dtype) for key, tensor in load_file(path / "model.safetensors").items()}
    state[name].view(-1)[state[name].numel() // 2] = value
    save_file(state, path / "model.safetensors", {"format": "pt"})


SPREAD = {
    76: [1, 3, 5, 8, 10, 13, 15, 17, 20, 22, 24, 27, 29, 32, 34, 36, 39, 41, 43, 46, 48, 51, 53, 55, 58, 60, 62, 65, 67,
         70, 72, 74],
    60: [0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 19, 21, 23, 25, 27, 29, 30, 32, 34, 36, 38, 40, 42, 44, 45, 47, 49, 51, 53,
         55, 57, 59],
}  # fmt: skip
BEGIN = 1


@torch.no_grad()
def plain_logprobs(path: Path, vocab_size: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """One sequence at a time, no slicing tricks: log-prob of each id after those before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = []
    ids = [BEGIN, *SPREAD[vocab_size]]
    for n in range(1, 33):
        logits_V = model(input_ids=torch.tensor([ids[:n]])).logits[0, -1, :vocab_size].double()
        found.append(float(logits_V[ids[n]] - logits_V.logsumexp(0)))
    return found


def test_the_manifest_keeps_what_the_model_says(registry: Registry, model: Path) -> None:
    registry.add("math", model, domain="d")
    record = registry.get("math").probe
    assert record is not None
    want = plain_logprobs(model, 76)
    assert (record.dtype, len(record.logprobs)) == ("float32", 32)
    assert record.logprobs == pytest.approx(want, abs=6e-4)
    assert record.mean == pytest.approx(np.mean(want), abs=6e-4)
    assert record.logprobs == [round(x, 3) for x in record.logprobs]
    assert record.probe == Probe(token_ids=(BEGIN, *SPREAD[76]), logprobs=tuple(record.logprobs), dtype="float32")


def test_ids_of_small_and_large_vocabularies() -> None:
    assert probe_ids(2) == [0, 1]
    assert probe_ids(5) == [0, 1, 2, 3, 4]
    large = probe_ids(49152)
    assert (len(large), large[0], large[-1]) == (32, 768, 49152 - 768)
    assert {b - a for a, b in itertools.pairwise(large)} == {1536}


def test_rows_beyond_the_vocabulary_are_no_part_of_it(model: Path) -> None:
    info = inspect_model(model).model_copy(update={"vocab_size": 60})
    record = measure_probe(info)
    assert record is not None and record.logprobs == pytest.approx(plain_logprobs(model, 60), abs=6e-4)


def test_bfloat16_weights_compute_in_their_own_type(model: Path, registry: Registry) -> None:
    spoil(model, "model.norm.weight", 1.0, torch.bfloat16)
    record = registry.add("math", model, domain="d").probe
    assert record is not None and record.dtype == "bfloat16"
    assert np.mean(np.abs(np.subtract(record.logprobs, plain_logprobs(model, 76)))) < 0.1


def test_a_manifest_from_before_probes_is_still_valid(registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.add("math", model, domain="d")
    file = tmp_path / "registry/math/manifest.json"
    data = json.loads(file.read_text())
    del data["probe"]
    file.write_text(json.dumps(data))
    assert registry.get("math").probe is None
    assert registry.verify("math") == []


def test_without_torch_an_expert_is_registered_without_a_probe(
    registry: Registry, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("experts.probe.find_spec", lambda name: None if name == "torch" else found(name))
    assert registry.add("math", model, domain="d").probe is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    dtype: torch.dtype, value: float, registry: Registry, model: Path, tmp_path: Path
) -> None:
    spoil(model, "model.layers.1.mlp.up_proj.weight", value, dtype)
    with pytest.raises(
        ModelError, match=r"tensor `model\.layers\.1\.mlp\.up_proj\.weight`\n  found:  1 of 8192 numbers"
    ):
        registry.add("math", model, domain="d")
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_finite_numbers_pass(dtype: torch.dtype, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_values, "CHUNK", 1000)
    for value in (torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        spoil(model, "model.layers.1.mlp.up_proj.weight", value, dtype)
        weight_values.check_finite(model, ["model.safetensors"])
    spoil(model, "model.layers.1.mlp.up_proj.weight", float("nan"), dtype)
    with pytest.raises(ModelError, match="1 of 8192"):
        weight_values.check_finite(model, ["model.safetensors"])


def test_weights_that_overflow_when_they_compute_are_refused(registry: Registry, model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.layers.0.mlp.down_proj.weight"][:] = 3e38
    state["model.layers.0.mlp.up_proj.weight"][:] = 3e38
    save_file(state, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="log-probs that are not finite"):
        registry.add("math", model, domain="d")


def test_missing_weights_are_refused_and_not_made_up(registry: Registry, model: Path) -> None:
    state = load_file(model / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        registry.add("math", model, domain="d")


def test_an_architecture_that_transformers_lacks_is_refused(registry: Registry, model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama99"}))
    with pytest.raises(ModelError, match=r"model_type\n  found:  .*llama99"):
        registry.add("math", model, domain="d")


def test_weights_of_other_shapes_than_the_configs_are_refused(registry: Registry, model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"found:  model\.layers\.0\.mlp\.down_proj\.weight of shape"):
        registry.add("math", model, domain="d")


def test_other_weights_have_another_probe(
    registry: Registry, model: Path, make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    probes = [
        registry.add(name, path, domain="d").probe
        for name, path in (("a", model), ("b", make_model_dir(tmp_path / "other", seed=7)))
    ]
    ours, theirs = (p.logprobs for p in probes if p)
    assert np.mean(np.abs(np.subtract(ours, theirs))) > 0.5


# Adapters: base and adapter together


@pytest.mark.parametrize("options", [{}, {"targets": ["q_proj", "v_proj", "up_proj"], "rank": 2}])
def test_an_adapters_probe_is_that_of_base_and_adapter(
    options: dict[str, Any],
    registry: Registry,
    model: Path,
    make_adapter: Callable[..., Path],
    merged_plainly: Callable[..., Path],
    tmp_path: Path,
) -> None:
    adapter = make_adapter(tmp_path / "adapter", model, **options)
    registry.add("math", adapter, domain="d")
    record = registry.get("math").probe
    assert record is not None, "an adapter has a probe too"
    assert record.logprobs == pytest.approx(
        plain_logprobs(merged_plainly(model, adapter, tmp_path / "m"), 76), abs=6e-4
    )
    assert np.mean(np.abs(np.subtract(record.logprobs, plain_logprobs(model, 76)))) > 0.1, "and not of the base alone"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "m", "model", "registry"], "nothing merged on disk"


def test_an_adapter_on_a_bfloat16_base_computes_in_bfloat16(
    registry: Registry, model: Path, make_adapter: Callable[..., Path], merged_plainly: Any, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", model)
    spoil(model, "model.norm.weight", 1.0, torch.bfloat16)
    record = registry.add("math", adapter, domain="d").probe
    assert record is not None and record.dtype == "bfloat16"
    whole = merged_plainly(model, adapter, tmp_path / "whole")
    assert np.mean(np.abs(np.subtract(record.logprobs, plain_logprobs(whole, 76)))) < 0.1


def test_an_adapter_that_overflows_is_refused_by_its_own_name(
    registry: Registry, model: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", model, lora_alpha=3e38)
    with pytest.raises(ModelError, match=r"/adapter\n  found:  log-probs that are not finite"):
        registry.add("math", adapter, domain="d")
    assert not (tmp_path / "registry").exists()


def test_an_adapter_that_no_scorer_could_use_is_refused(
    registry: Registry, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = tmp_path / "gpt2"  # its projections are no linear modules
    config = GPT2Config(vocab_size=76, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(base)
    build_tokenizer().save_pretrained(base)
    adapter = make_adapter(tmp_path / "adapter", base, targets=["c_attn"])
    with pytest.raises(ModelError, match=r"module `transformer\.h\.0\.attn\.c_attn`\n  found:  .* GPT2LMHeadModel"):
        registry.add("math", adapter, domain="d")
