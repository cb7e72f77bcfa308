"""A model's logits as its config describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from opd import cluster
from opd.models import heads
from opd.models.heads import FileStamp, HeadFile, HeadSource, head_array, head_key, head_tensor, logit_rule
from opd.models.logit_rule import IDENTITY, LogitRule


def test_a_plain_model_has_plain_logits() -> None:
    assert logit_rule(transformers.LlamaConfig()) == IDENTITY


def test_factors_divisors_and_caps() -> None:
    assert logit_rule(transformers.CohereConfig(logit_scale=0.25)) == LogitRule(scale=0.25)
    assert logit_rule(transformers.GraniteConfig(logits_scaling=8.0)) == LogitRule(scale=0.125)
    assert logit_rule(transformers.Gemma2Config(final_logit_softcapping=30.0)) == LogitRule(softcap=30.0)
    assert logit_rule(transformers.Gemma2Config(final_logit_softcapping=None)) == IDENTITY
    assert logit_rule(transformers.RecurrentGemmaConfig(logits_soft_cap=20.0)) == LogitRule(softcap=20.0)


def test_a_model_that_also_sees_caps_its_text() -> None:
    config = transformers.Gemma3Config(text_config={"final_logit_softcapping": 20.0})
    assert logit_rule(config) == LogitRule(softcap=20.0)


def test_a_heads_key_is_that_of_its_content() -> None:
    head_V_D = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    key = head_key(head_V_D, IDENTITY)
    assert head_key(head_V_D.T.contiguous().T, IDENTITY) == key, "the layout in memory is no content"
    assert head_key(head_tensor(head_array(head_V_D)), LogitRule()) == key
    low = head_V_D.to(torch.bfloat16)
    assert head_key(head_tensor(head_array(low)), IDENTITY) == head_key(low, IDENTITY)
    changed = head_V_D.clone()
    changed[5, 3] += 1e-6
    others = [
        head_key(changed, IDENTITY),
        head_key(head_V_D.reshape(4, 6), IDENTITY),
        head_key(low, IDENTITY),
        head_key(head_V_D, LogitRule(scale=2.0)),
        head_key(head_V_D, LogitRule(softcap=2.0)),
    ]
    assert len({key, *others}) == 6


def test_of_a_heads_names_the_first_counts_in_whatever_file_it_is(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(3, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    tied = HeadFile(tmp_path, ("model.embed_tokens.weight", "lm_head.weight"), "float32").read()
    own = HeadFile(tmp_path, ("lm_head.weight",), "float32").read()
    assert tied is not None and own is not None
    assert (float(tied.sum()), float(own.sum())) == (6, 0)
    assert HeadFile(tmp_path, ("output.weight",), "float32").read() is None
    assert HeadFile(tmp_path / "elsewhere", ("lm_head.weight",), "float32").read() is None


def test_a_head_that_is_read_again_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: Any
) -> None:
    weight_V_D = torch.randn(5, 3)
    save_file({"lm_head.weight": weight_V_D}, tmp_path / "model.safetensors")
    key, hashed, times = head_key(weight_V_D, IDENTITY), dict[str, FileStamp](), []

    def count_hashes(head_V_D: torch.Tensor, rule: LogitRule) -> str:
        times.append(rule)
        return head_key(head_V_D, rule)

    monkeypatch.setattr(heads, "head_key", count_hashes)
    elsewhere = cluster.StoredValue(head_array(torch.zeros(5, 3)))
    source = HeadSource(
        key=key, rule=IDENTITY, file=HeadFile(tmp_path, ("lm_head.weight",), "float32"), handle=elsewhere
    )
    for _ in range(3):
        assert torch.equal(source.read(hashed), weight_V_D)
    assert len(times) == 1
    save_file({"lm_head.weight": weight_V_D + 1}, tmp_path / "model.safetensors")
    assert torch.equal(source.read(hashed), torch.zeros(5, 3)), "changed files are hashed, and not believed"
    assert len(times) == 2
