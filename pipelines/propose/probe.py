"""`opd init --probe`: does the student ever write what an expert would? That decides between adaptive and forward KL.

Each expert answers a few prompts greedily; then the student says how likely it finds each of these tokens, given the ones
before. Plain transformers, one model in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.model_dir import ModelInfo
from opd.config.objectives import DEFAULT_KIND
from opd.text import Tell
from pipelines.propose.domains import DomainFacts
from pipelines.propose.models import ExpertFacts

if TYPE_CHECKING:
    import torch

PROMPTS, MAX_TOKENS = 8, 64
"""Number of prompts of each domain, and longest answer in tokens."""
MIN_REACHABLE = 0.01
"""Probability below which the student hardly writes a token in a hundred samples. Reverse KL is measured on samples, so it does not
raise such a token's probability."""
Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt, and of the expert's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of the probe in one domain."""

    answers: int
    """Number of the expert's answers that the student scored."""
    unreachable: int
    """Number of answers with a token to whose place the student gives it less than `MIN_REACHABLE`."""


def choose_objective(probed: Mapping[str, ProbeResult]) -> tuple[str, str]:
    """Choose the kind of the objective, and return it with the reason: forward KL if most of the experts' answers are unreachable."""
    answers = sum(result.answers for result in probed.values())
    unreachable = sum(result.unreachable for result in probed.values())
    kind = "forward_kl" if 2 * unreachable > answers else DEFAULT_KIND
    reason = f"{unreachable} of the experts' {answers} answers have a token to which the student gives less than {MIN_REACHABLE:g}"
    return kind, f"the probe: {reason}; forward_kl where that is most of them, {DEFAULT_KIND} where it is not"


def probe_experts(
    student: ModelInfo, experts: Mapping[str, ExpertFacts], domains: Mapping[str, DomainFacts], tell: Tell
) -> dict[str, ProbeResult]:
    """Return domain -> result of its probe. Raises: OSError or ValueError of transformers for a model that it cannot load."""
    answers_by_expert: dict[str, list[Answer]] = {}
    for name, expert in experts.items():
        tell(f"probe: {name} answers {PROMPTS} prompts")
        with _load_model(expert) as lm:
            answers_by_expert[name] = [_greedy_answer(lm, ids, expert.info) for ids in _choose_prompts(domains[name])]
    results = {}
    with _load_model(ExpertFacts(model=Path(student.path), base=None, info=student, adapter=None)) as lm:
        for name, answers in answers_by_expert.items():
            # An expert may end at once: such an answer has no token to score.
            lowest = [_lowest_probability(lm, answer) for answer in answers if answer[1]]
            results[name] = ProbeResult(answers=len(lowest), unreachable=sum(p < MIN_REACHABLE for p in lowest))
            tell(
                f"probe: {results[name].unreachable} of {len(lowest)} answers of {name} are out of the student's reach"
            )
    return results


def _choose_prompts(domain: DomainFacts) -> list[tuple[int, ...]]:
    """Return the token ids of at most `PROMPTS` prompts, evenly over the domain."""
    filled = domain.table.select_prompts(domain.table.lengths > 0)
    return [prompt.token_ids for prompt in filled[:: max(1, len(filled) // PROMPTS)][:PROMPTS]]


@contextmanager
def _load_model(expert: ExpertFacts) -> Iterator[Any]:
    """Yield the model, loaded with its adapter if it has one, in inference mode."""
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    from opd.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, attach_updates, read_updates
    from opd.models.weights import load_causal_lm

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, expert.info.dtype if expert.info.dtype == "bfloat16" else "float32")
    lm = load_causal_lm(Path(expert.info.path), dtype).to(device).eval()
    if expert.adapter is not None:
        directory = Path(expert.adapter.path)
        config = LoraConfig.model_validate_json((directory / ADAPTER_CONFIG).read_bytes())
        tensors = load_file(directory / ADAPTER_WEIGHTS)
        attach_updates(lm, read_updates(config, {name: tensor.to(device, dtype) for name, tensor in tensors.items()}))
    with torch.inference_mode():
        yield lm


def _greedy_answer(lm: Any, prompt: Sequence[int], info: ModelInfo) -> Answer:
    """Return a prompt and the expert's greedy answer to it, its end token included."""
    import torch

    ids = torch.tensor([prompt], device=lm.device)
    ends = list(info.eos_token_ids) or None
    written = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=info.pad_token_id or (ends or [0])[0],  # transformers wants one, though one prompt is never padded
    )
    return tuple(prompt), tuple(written[0, len(prompt) :].tolist())


def _lowest_probability(lm: Any, answer: Answer) -> float:
    """Return the probability that the student gives to the token of an answer that it finds least likely."""
    import torch

    prompt, response = answer
    ids = torch.tensor([[*prompt, *response]], device=lm.device)
    logits_R_V: torch.Tensor = lm(ids).logits[0, len(prompt) - 1 : -1].float()
    logprob_R = logits_R_V.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return float(logprob_R.min().exp())
