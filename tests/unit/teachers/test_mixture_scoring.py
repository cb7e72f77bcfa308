"""A mixture as a teacher: what it scores is what plain transformers says, whatever its files call its experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opd.errors import RunError
from opd.records.types import Teacher
from teachers.scorers import ScorerOptions
from teachers.scorers.transformers import TransformersScorer
from tests.unit.teachers.conftest import rollout


def scorer(memory_bytes: int = 1 << 30) -> TransformersScorer:
    return TransformersScorer(
        ScorerOptions(dtype="float32", payload="sampled_logprobs", top_k=4, vocab_size=76, memory_bytes=memory_bytes)
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_mixture_scores_as_plain_transformers(
    family: str, make_mixture_dir: Callable[..., Path], tmp_path: Path
) -> None:
    teachers = [
        Teacher(name=f"t{seed}", model_dir=make_mixture_dir(tmp_path / str(seed), family, seed=seed)) for seed in (1, 2)
    ]
    scoring = scorer()
    for teacher in (*teachers, teachers[0]):
        scoring.prefetch(teacher)
        given = [rollout(i, prompt=3, response=4 + i) for i in range(3)]
        # One by one: here it is about weights, not about packing.
        rows = {r.rollout.sample_id: r for one in given for batch in scoring.score(teacher, [one], {}) for r in batch}
        attention = "eager" if family == "gpt_oss" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(teacher.model_dir, attn_implementation=attention).eval()
        for each in given:
            ids = torch.tensor([*each.prompt_ids, *each.response_ids])
            with torch.no_grad():
                logp_T_V = model(ids[None]).logits[0].log_softmax(-1)
            own = logp_T_V[len(each.prompt_ids) - 1 : -1].gather(1, ids[len(each.prompt_ids) :, None])[:, 0]
            assert rows[each.sample_id].answer.teacher_logprobs == pytest.approx(own.tolist(), abs=1e-5)
        head = scoring.head_file(teacher).read()
        assert head is not None and torch.equal(head, scoring.head(teacher))


def test_a_mixture_that_lacks_its_router_bias_is_refused(make_mixture_dir: Callable[..., Path], tmp_path: Path) -> None:
    model_dir = make_mixture_dir(tmp_path / "m", "deepseek_v3")
    files = load_file(model_dir / "model.safetensors")
    del files["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(files, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"teacher t: weights do not fit its config: missing .*e_score_correction_bias"):
        scorer().head(Teacher(name="t", model_dir=model_dir))


def test_mixtures_stay_within_the_budget(make_mixture_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Converted experts are no longer mapped: they are what the budget is about."""
    teachers = [
        Teacher(name=f"t{seed}", model_dir=make_mixture_dir(tmp_path / str(seed), "qwen3_moe", seed=seed))
        for seed in range(3)
    ]
    size = (teachers[0].model_dir / "model.safetensors").stat().st_size
    scoring = scorer(memory_bytes=2 * size)
    for teacher in teachers:
        scoring.head(teacher)
        assert scoring._weights.nbytes <= 2 * size
    assert scoring._weights.loads == 3
    scoring.head(teachers[1])
    assert scoring._weights.loads == 3, "the one before is still there"


def test_an_adapter_of_a_mixtures_attention_scores_as_the_merged_model(
    make_mixture_dir: Callable[..., Path],
    make_adapter: Callable[..., Path],
    merged_plainly: Callable[..., Path],
    tmp_path: Path,
) -> None:
    base = make_mixture_dir(tmp_path / "base", "glm4_moe")
    adapter = make_adapter(tmp_path / "adapter", base, targets=("q_proj", "o_proj"))
    merged = merged_plainly(base, adapter, tmp_path / "merged")
    scoring, answers = scorer(), {}
    for teacher in (
        Teacher(name="adapter", model_dir=base, adapter_dir=adapter, digest="a", base_digest="b"),
        Teacher(name="base", model_dir=base, digest="b"),
        Teacher(name="merged", model_dir=merged),
    ):
        ((row,),) = scoring.score(teacher, [rollout(1)], {})
        answers[teacher.name] = row.answer.teacher_logprobs
    assert answers["adapter"] == pytest.approx(answers["merged"], abs=1e-5)
    assert answers["adapter"] != pytest.approx(answers["base"], abs=0.1)
