"""Off-policy training on the same prompts: the student learns to write what others wrote, by cross-entropy.

    MixedPrompts ── the merge's prompts, step by step ──▶ author ── a response each ──▶ transformers' Trainer
                                                     off_policy: the domain's expert
                                                     mixed_sft: the prompts file itself

Steps, learning rates and optimiser are the merge's. A step has so many samples that all steps together have as many
response tokens as the merge trained on; without a merge to look at, as many samples as the pipeline says.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from experts.adapter import whole_model
from opd.config import PipelineConfig
from opd.errors import PromptError
from opd.files import replace_dir
from opd.prompts import MixedPrompts, read_prompt_lines, split_samples
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.types import Prompt, Teacher, WeightedTeacher
from pipelines.baselines.engine import rollout_engine
from pipelines.preflight import Inputs, prompts_file

PILOT_SAMPLES = 1000
"""Responses from which the mean length is estimated."""
CHUNK = 4096
"""Prompts that an engine gets in one call, so that the deadline of a phase is one of a piece of work."""

Author = Callable[[Sequence[Prompt]], list[tuple[int, ...]]]
"""Prompts -> a response to each, as token ids with the end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How the samples of a step are cut up for the model."""

    micro_batch: int
    accumulate: int

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulate


def train_off_policy(
    config: PipelineConfig,
    inputs: Inputs,
    author: AbstractContextManager[Author],
    budget: float | None,
    out: Path,
    tell: Callable[[str], None],
) -> int:
    """Train the student on the author's responses and write it to `out`; returns the response tokens trained on.

    `budget`: response tokens wanted; None: as many as come with the pipeline's samples. Raises: RunError.
    """
    by_domain = {d: [p for p in ps if _has_room(p, config)] for d, ps in inputs.prompts.items()}
    with author as write:
        shape = _shape(config, _num_samples(config, by_domain, write, budget))
        prompts = list(_steps(config, by_domain, shape.samples))
        tell(f"{len(prompts)} responses: {config.trainer.steps} steps of {shape.samples}")
        responses = write(prompts)
    _fit(config, inputs, prompts, responses, shape, out, tell)
    return sum(map(len, responses))


@contextmanager
def experts_author(config: PipelineConfig, inputs: Inputs, scratch: Path) -> Iterator[Author]:
    """The experts write, at the merge's temperature and limits; `scratch` is for adapters merged into their bases."""
    with rollout_engine(config, inputs) as engine:
        yield lambda prompts: write_by_experts(engine, inputs.routes, prompts, config.seed, scratch)


def write_by_experts(
    engine: VLLMRolloutEngine,
    routes: Mapping[str, Sequence[WeightedTeacher]],
    prompts: Sequence[Prompt],
    seed: int,
    scratch: Path,
) -> list[tuple[int, ...]]:
    """Each prompt's response by an expert of its domain, of several drawn by their weights."""
    draw = random.Random(f"{seed}/authors")
    chosen = [draw.choices([a.teacher for a in part], [a.weight for a in part])[0] for part in _parts(routes, prompts)]
    responses: dict[int, tuple[int, ...]] = {}
    for teacher in dict.fromkeys(chosen):
        mine = [i for i, author in enumerate(chosen) if author == teacher]
        with whole_model(teacher, scratch) as directory:
            engine.load(directory)
        for number, start in enumerate(range(0, len(mine), CHUNK), start=1):
            part = mine[start : start + CHUNK]
            # The engine's seeds depend on step and prompt: chunks stand where a merge has steps.
            batch = engine.generate([prompts[i] for i in part], step=number, policy_version=0)
            responses |= zip(part, (r.response_ids for r in batch.rollouts), strict=True)
    return [responses[i] for i in range(len(prompts))]


def _parts(
    routes: Mapping[str, Sequence[WeightedTeacher]], prompts: Sequence[Prompt]
) -> Iterator[Sequence[WeightedTeacher]]:
    return (routes[prompt.domain] for prompt in prompts)


@contextmanager
def file_author(config: PipelineConfig, inputs: Inputs) -> Iterator[Author]:
    """The completions of the prompts files. Raises: PromptError for a prompt without one."""
    known = read_completions(config, inputs)
    room = config.rollout.max_model_len
    yield lambda prompts: [known[p.id][: room - len(p.token_ids)] for p in prompts]


def read_completions(config: PipelineConfig, inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Prompt id -> its completion with the end token. Raises: PromptError."""
    from experts.sft import IGNORED, encode_line

    completions = {}
    for domain, prompts in inputs.prompts.items():
        file = prompts_file(domain, config.domains[domain], inputs.experts[inputs.teachers[domain].name])
        for prompt, line in zip(prompts, read_prompt_lines(file), strict=True):
            if line.completion is None:
                raise PromptError.at(
                    f"{file}: prompt {prompt.id}",
                    found="no completion",
                    wanted="the column `completion` in every line: mixed_sft learns it",
                    fix="add it, or compare with off_policy, which needs only prompts",
                )
            labels = encode_line(inputs.tokenizer, line)["labels"]
            completions[prompt.id] = tuple(i for i in labels if i != IGNORED)
    return completions


def _has_room(prompt: Prompt, config: PipelineConfig) -> bool:
    """A merge quarantines the others."""
    return 0 < len(prompt.token_ids) < config.rollout.max_model_len


def _steps(config: PipelineConfig, by_domain: Mapping[str, Sequence[Prompt]], samples: int) -> Iterator[Prompt]:
    """The prompts of all steps in order, every domain in each."""
    weights = {name: 1.0 if d.weight == "auto" else d.weight for name, d in config.domains.items()}
    mixed = MixedPrompts(by_domain, split_samples(samples, weights), config.seed)
    for step in range(1, config.trainer.steps + 1):
        prompts = mixed.take(step)
        # Grouped by domain as they come, a micro-batch would hold one domain only; the sum over the step is the same.
        random.Random(f"{config.seed}/{step}").shuffle(prompts)
        yield from prompts


def _num_samples(
    config: PipelineConfig, by_domain: Mapping[str, Sequence[Prompt]], write: Author, budget: float | None
) -> int:
    """Samples of a step, so that all steps have `budget` response tokens."""
    samples = config.trainer.samples_per_step
    if budget is None:
        return samples
    pilot = [p for p, _ in zip(_steps(config, by_domain, samples), range(PILOT_SAMPLES), strict=False)]
    mean_length = fmean(map(len, write(pilot)))
    return max(len(by_domain), round(budget / config.trainer.steps / mean_length))


def _shape(config: PipelineConfig, samples: int) -> StepShape:
    """Micro-batches of `trainer.micro_batch_tokens` padded tokens; `samples` are rounded up to whole ones."""
    fitting = max(1, config.trainer.micro_batch_tokens // config.rollout.max_model_len)
    accumulate = -(-samples // fitting)
    return StepShape(micro_batch=-(-samples // accumulate), accumulate=accumulate)


def _fit(
    config: PipelineConfig,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    responses: Sequence[tuple[int, ...]],
    shape: StepShape,
    out: Path,
    tell: Callable[[str], None],
) -> None:
    """Write the trained student to `out`, whole or not at all, in the type that it was stored in."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from experts.sft import IGNORED, Example, imitate

    staging = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    set_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(
        config.student.model, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    examples = [
        Example(input_ids=[*p.token_ids, *r], labels=[IGNORED] * len(p.token_ids) + list(r))
        for p, r in zip(prompts, responses, strict=True)
    ]
    imitate(
        model,
        examples,
        config.trainer,
        micro_batch=shape.micro_batch,
        accumulate=shape.accumulate,
        seed=config.seed,
        scratch=staging,
        report=lambda step, loss: tell(f"step {step}/{config.trainer.steps}  loss {loss:.4f}"),
    )
    model.to(getattr(torch, inputs.student.dtype)).save_pretrained(staging)
    inputs.tokenizer.save_pretrained(staging)
    replace_dir(staging, out)
