"""`opd init --probe`: measures if the student ever writes what an expert would, to choose between adaptive and forward KL.

Each expert answers a few prompts greedily; then the student scores each token of these answers, given the ones before. Plain
transformers, one model in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.adapter import AdapterInfo
from experts.model_dir import ModelInfo
from opd.config.objectives import DEFAULT_KIND
from opd.text import Tell
from pipelines.propose.domains import DomainFacts
from pipelines.propose.models import ExpertFacts

if TYPE_CHECKING:
    import torch

PROMPTS_PER_DOMAIN = 8
MAX_ANSWER_TOKENS = 64
MIN_PROBABILITY = 0.01
"""A token to which the student gives less is out of its reach: it is in fewer than one of a hundred samples. Reverse KL is measured on
samples, so it does not raise such a token's probability."""
Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt, and of the expert's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of the probe in one domain."""

    answers: int
    """Number of the expert's answers that the student scored."""
    unreachable: int
    """Number of these answers with a token to which the student, after the tokens before it, gives less than `MIN_PROBABILITY`."""


def choose_objective(results: Mapping[str, ProbeResult]) -> tuple[str, str]:
    """Choose the kind of the objective, and return it with the reason: forward KL if most of the experts' answers are unreachable."""
    answers = sum(result.answers for result in results.values())
    unreachable = sum(result.unreachable for result in results.values())
    kind = "forward_kl" if 2 * unreachable > answers else DEFAULT_KIND
    reason = f"{unreachable} of the experts' {answers} answers have a token to which the student gives less than {MIN_PROBABILITY:g}"
    return kind, f"the probe: {reason}; forward_kl where that is most of them, {DEFAULT_KIND} where it is not"


def probe_experts(
    student: ModelInfo, experts: Mapping[str, ExpertFacts], domains: Mapping[str, DomainFacts], tell: Tell
) -> dict[str, ProbeResult]:
    """Return domain -> result of its probe. Raises: OSError or ValueError of transformers for a model that it cannot load."""
    answers_by_expert: dict[str, list[Answer]] = {}
    for name, expert in experts.items():
        tell(f"probe: {name} answers {PROMPTS_PER_DOMAIN} prompts")
        with _load_model(expert.info, expert.adapter) as lm:
            answers_by_expert[name] = [_generate_answer(lm, ids, expert.info) for ids in _choose_prompts(domains[name])]
    results = {}
    with _load_model(student) as lm:
        for name, answers in answers_by_expert.items():
            # An expert may end at once: such an answer has no token to score.
            minima = [_compute_lowest_probability(lm, answer) for answer in answers if answer[1]]
            unreachable = sum(probability < MIN_PROBABILITY for probability in minima)
            results[name] = ProbeResult(answers=len(minima), unreachable=unreachable)
            tell(f"probe: {unreachable} of {len(minima)} answers of {name} are out of the student's reach")
    return results


def _choose_prompts(domain: DomainFacts) -> list[tuple[int, ...]]:
    """Return the token ids of at most `PROMPTS_PER_DOMAIN` prompts, evenly over the domain."""
    prompts = domain.table.select_prompts(domain.table.lengths > 0)  # one of 0 tokens has no text
    every = max(1, len(prompts) // PROMPTS_PER_DOMAIN)
    return [prompt.token_ids for prompt in prompts[::every][:PROMPTS_PER_DOMAIN]]


@contextmanager
def _load_model(info: ModelInfo, adapter: AdapterInfo | None = None) -> Iterator[Any]:
    """Yield a model for inference, with the updates of `adapter`. It is bfloat16 if its files are, else float32."""
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    from opd.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, attach_updates, read_updates
    from opd.models.weights import load_causal_lm

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if info.dtype == "bfloat16" else torch.float32
    lm = load_causal_lm(Path(info.path), dtype).to(device).eval()
    if adapter is not None:
        directory = Path(adapter.path)
        config = LoraConfig.model_validate_json((directory / ADAPTER_CONFIG).read_bytes())
        tensors = load_file(directory / ADAPTER_WEIGHTS)
        attach_updates(lm, read_updates(config, {name: tensor.to(device, dtype) for name, tensor in tensors.items()}))
    with torch.inference_mode():
        yield lm


def _generate_answer(lm: Any, prompt: Sequence[int], info: ModelInfo) -> Answer:
    """Return a prompt and the expert's greedy answer to it, its end token included."""
    import torch

    prompt_ids = torch.tensor([prompt], device=lm.device)
    eos_ids = list(info.eos_token_ids) or None
    sequences = lm.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=eos_ids,
        pad_token_id=info.pad_token_id or (eos_ids or [0])[0],  # transformers wants it, though one prompt is not padded
    )
    return tuple(prompt), tuple(sequences[0, len(prompt) :].tolist())


def _compute_lowest_probability(lm: Any, answer: Answer) -> float:
    """Return the lowest of the probabilities that the student `lm` gives to the tokens of an answer."""
    import torch

    prompt, response = answer
    ids = torch.tensor([[*prompt, *response]], device=lm.device)
    logits_R_V: torch.Tensor = lm(ids).logits[0, len(prompt) - 1 : -1].float()
    logprob_R = logits_R_V.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return float(logprob_R.min().exp())
