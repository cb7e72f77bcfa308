"""What a config says about its model's logits."""

from __future__ import annotations

import transformers

from opd.losses.chunked import IDENTITY, LogitRule
from opd.stream.heads import logit_rule


def test_a_plain_model_has_plain_logits() -> None:
    assert logit_rule(transformers.LlamaConfig()) == IDENTITY


def test_factors_divisors_and_caps() -> None:
    assert logit_rule(transformers.CohereConfig(logit_scale=0.25)) == LogitRule(scale=0.25)
    assert logit_rule(transformers.GraniteConfig(logits_scaling=8.0)) == LogitRule(scale=0.125)
    assert logit_rule(transformers.Gemma2Config(final_logit_softcapping=30.0)) == LogitRule(softcap=30.0)
    assert logit_rule(transformers.Gemma2Config(final_logit_softcapping=None)) == IDENTITY


def test_a_model_that_also_sees_caps_its_text() -> None:
    config = transformers.Gemma3Config(text_config={"final_logit_softcapping": 20.0})
    assert logit_rule(config) == LogitRule(softcap=20.0)
