"""A check of experts with another tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.config import load_pipeline
from opd.records.types import Rollout, Teacher
from opd.vocabularies.response_encoder import ResponseEncoder
from pipelines.check.comparison import Comparer, TokensComparison
from pipelines.check.own_tokens import MeasuredTokens, judge_tokens
from tests.conftest import build_tokenizer
from tests.tokenizers import permute_model
from tests.unit.pipelines.check.test_comparison import logprobs, options

FINE = TokensComparison(single=0.9, student_mass=0.97, gap=0.4, overlap=0.8)


def measured(compared: TokensComparison = FINE, unreadable: tuple[str, ...] = ()) -> MeasuredTokens:
    return MeasuredTokens(domain="sort", expert="a", responses=8, unreadable=unreadable, compared=compared)


def test_figures_of_a_model_with_permuted_ids_are_those_of_plain_transformers(
    tiny_model_dir: Path, expert_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    own, other = build_tokenizer(), build_tokenizer(permute_vocab=True)
    model_dir = permute_model(expert_dirs["rev"], tmp_path / "permuted")
    encoder = ResponseEncoder(own, other, {own.eos_token_id: other.eos_token_id})
    rollouts = [Rollout.from_tokens(f"d/{i}", (5, 6 + i), (7, 8 + i, 9, own.eos_token_id), "d") for i in range(3)]
    encoded = [encoder.encode_rollout(r, encoder.encode_response(r.prompt_ids).token_ids) for r in rollouts]
    teacher = Teacher(name="rev", model_dir=model_dir)
    compared = Comparer(tiny_model_dir, options()).compare_own_tokens(teacher, encoder.spelling, encoded)
    student, expert = (AutoModelForCausalLM.from_pretrained(p) for p in (tiny_model_dir, expert_dirs["rev"]))
    kl, agree = [], []
    for r in rollouts:
        logp, logq = (logprobs(m, [*r.prompt_ids, *r.response_ids], 76)[1:-1] for m in (student, expert))
        kl += (logp.exp() * (logp - logq)).sum(-1).tolist()
        agree += (logp.argmax(-1) == logq.argmax(-1)).double().tolist()
    figures = [compared.single, compared.student_mass, compared.gap, compared.overlap]
    wanted = [1.0, 1.0, torch.tensor(kl).mean().item(), torch.tensor(agree).mean().item()]
    assert figures == pytest.approx(wanted, abs=1e-5)
    missing = Teacher(name="rev", model_dir=expert_dirs["rev"])
    assert Comparer(tiny_model_dir, options()).compare_own_tokens(missing, encoder.spelling, []) == TokensComparison()


def test_an_expert_of_the_same_lineage_is_fine() -> None:
    assert list(judge_tokens([measured()], 0.0)) == []
    assert measured().describe() == (
        "sort: expert a reads tokens of its own: 90% of the pieces of text are one token on both sides; tokens that are not longer "
        "than its own have 97.0% of the student's probability; gap 0.400 nats a token; same first token 80%; unreadable 0 of 8 "
        "responses"
    )


@pytest.mark.parametrize(
    ("expert", "level", "text"),
    [
        (measured(TokensComparison(overlap=0.1)), "warn", "another lineage"),
        (measured(unreadable=("the special token '<x>'",)), "fail", "cannot read 1 of 8"),
        (measured(TokensComparison(broken="teacher a: no")), "fail", "teacher a: no"),
    ],
)
def test_what_is_wrong_with_an_expert_is_said(expert: MeasuredTokens, level: str, text: str) -> None:
    (finding,) = judge_tokens([expert], 0.001)
    assert finding.level == level and text in finding.message


def test_the_warm_up_that_is_proposed_is_a_pipeline(world: Any) -> None:
    """The expert of another lineage is served, and its answers are learned first."""
    (finding,) = judge_tokens([replace(measured(TokensComparison(overlap=0.1)), domain="reverse", expert="rev")], 0.001)
    proposed = re.findall(r"(?:experts|domains)\.\S+=\{.*?\}(?= \(| and)", finding.fix)
    config = load_pipeline(world.write(), proposed)
    assert len(proposed) == 2 and config.inline_experts["rev"].model is None
    assert config.engine_of("rev").payload == "text"
    objective = config.domains["reverse"].objective
    assert objective is not None and objective.kind == "sft"
