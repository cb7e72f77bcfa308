"""Sampling with a plain transformers model, against the same model that reads whole sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from opd.errors import RunError
from opd.rollouts.stepwise import generate_stepwise, prove_cache
from opd.rollouts.worker import Generated, GenerateRequest
from tests.conftest import build_tokenizer
from tests.models.families import FAMILIES, build_config
from tests.sparse_models import TOPK, make_sparse_model

VOCABULARY = len(build_tokenizer())
PROMPTS = ((5, 6, 7), tuple(range(4, 4 + 2 * TOPK)), (8, 9, 10, 11, 12))
UNSERVED = ("glm_moe_dsa", "Qwen3.5", "Bamba", "Jamba", "MiniMax", "RecurrentGemma")
"""Families that vLLM does not serve on a CPU."""


@pytest.fixture(scope="module")
def sparse() -> Any:
    return make_sparse_model(3)


def requests(temperature: float = 1.0, max_tokens: int = 20) -> list[GenerateRequest]:
    return [
        GenerateRequest(token_ids=ids, max_tokens=max_tokens - i, temperature=temperature, seed=100 + i)
        for i, ids in enumerate(PROMPTS)
    ]


def generate(lm: Any, asked: list[GenerateRequest], **options: Any) -> list[Generated]:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "stop": frozenset(), "max_num_seqs": 8, "cached": True}
    return generate_stepwise(lm, asked, **settings | options)


@torch.no_grad()
def whole_logprobs(lm: Any, request: GenerateRequest, out: Generated, vocab_size: int = VOCABULARY) -> torch.Tensor:
    """Return the log-probs of the written tokens, from one reading of the whole sequence without a cache."""
    ids_T = torch.tensor([*request.token_ids, *out.token_ids])
    logits_T_V = lm(ids_T[None], use_cache=False).logits[0, :-1, :vocab_size].float()
    logprobs_T_V = (logits_T_V / (request.temperature or 1.0)).log_softmax(-1)
    return logprobs_T_V.gather(-1, ids_T[1:, None])[len(request.token_ids) - 1 :, 0]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    sparse: Any, temperature: float, cached: bool
) -> None:
    asked = requests(temperature)
    for request, out in zip(asked, generate(sparse, asked, cached=cached), strict=True):
        assert len(out.token_ids) == request.max_tokens and out.stop_reason == "length"
        assert (whole_logprobs(sparse, request, out) - torch.tensor(out.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize("name", UNSERVED)
def test_a_family_that_vllm_lacks_is_sampled_exactly(name: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(build_config(FAMILIES[name]), dtype=torch.float32).eval()
    asked = requests()
    cached = prove_cache(lm, VOCABULARY)
    assert cached is (name != "RecurrentGemma"), "it gives no cache"
    for request, out in zip(asked, generate(lm, asked, cached=cached), strict=True):
        assert (whole_logprobs(lm, request, out) - torch.tensor(out.logprobs)).abs().max() < 1e-4


def test_greedy_tokens_are_those_of_transformers(sparse: Any) -> None:
    for request, out in zip(requests(0.0), generate(sparse, requests(0.0)), strict=True):
        theirs = sparse.generate(
            torch.tensor([request.token_ids]), max_new_tokens=request.max_tokens, do_sample=False, eos_token_id=None
        )
        assert out.token_ids == tuple(theirs[0, len(request.token_ids) :].tolist())


def test_a_response_depends_on_its_own_seed_alone(sparse: Any) -> None:
    together = generate(sparse, requests())
    alone = [generate(sparse, [request])[0] for request in requests()]
    in_turn = generate(sparse, requests()[::-1], max_num_seqs=2)[::-1]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.token_ids for out in together] == [out.token_ids for out in in_turn]
    assert generate(sparse, requests()) == together, "bit for bit"


def test_a_stop_token_ends_a_response_and_is_part_of_it(sparse: Any) -> None:
    free = generate(sparse, requests())
    stop = free[0].token_ids[5]
    out = generate(sparse, requests(), stop=frozenset([stop]))[0]
    end = free[0].token_ids.index(stop) + 1
    assert (out.token_ids, out.stop_reason) == (free[0].token_ids[:end], "stop")


def test_samples_have_the_frequencies_of_the_distribution(sparse: Any) -> None:
    request = requests()[0]
    asked = [
        GenerateRequest(token_ids=request.token_ids, max_tokens=1, temperature=1.0, seed=seed) for seed in range(4000)
    ]
    counts = Counter(out.token_ids[0] for out in generate(sparse, asked, max_num_seqs=4000))
    with torch.no_grad():
        probs = sparse(torch.tensor([request.token_ids])).logits[0, -1].softmax(-1)
    chi_squared = sum((counts[i] - 4000 * float(p)) ** 2 / (4000 * float(p)) for i, p in enumerate(probs))
    assert chi_squared < 130, "the 99.99 % quantile with 75 degrees of freedom"


def test_ids_that_the_tokenizer_lacks_are_never_written(sparse: Any) -> None:
    for request, out in zip(requests(), generate(sparse, requests(), vocab_size=40), strict=True):
        assert max(out.token_ids) < 40
        assert (whole_logprobs(sparse, request, out, 40) - torch.tensor(out.logprobs)).abs().max() < 1e-5


def test_broken_weights_are_an_error() -> None:
    lm = make_sparse_model(1)
    lm.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="NaN"):
        generate(lm, requests())


def test_a_cache_that_is_wrong_is_noticed(sparse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove_cache(sparse, VOCABULARY)
    original = sparse.forward

    def forget(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = original(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            past_key_values.layers[0].keys.mul_(0.5)
        return output

    monkeypatch.setattr(sparse, "forward", forget)
    assert not prove_cache(sparse, VOCABULARY)
