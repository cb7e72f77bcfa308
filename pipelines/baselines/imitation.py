"""Off-policy training on the same prompts: the student learns to write what others wrote, by cross-entropy.

    MixedPrompts ── the merge's prompts, step by step ──▶ author ── a response each ──▶ transformers' Trainer
                                                     off_policy: the domain's expert
                                                     mixed_sft: the prompts file itself

Steps, learning rates and optimiser are the merge's, and so is the number of responses to each prompt. The number of samples in a
step is chosen so that all steps together have as many response tokens as the merge trained on. Without a merge, a step has the
pipeline's number of samples.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from experts.adapter import open_full_model
from experts.episodes.rows import has_episodes
from opd.cluster import ray_session
from opd.config import PipelineConfig
from opd.errors import PromptError
from opd.files import replace_dir
from opd.prompts import MixedPrompts, PromptTable, Rows, open_rows, samples_by_weight
from opd.records.types import Prompt, Rollout, WeightedTeacher
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines.baselines.episodes import FileEpisode, read_file_episodes
from pipelines.build import start_rollouts
from pipelines.draft import turn_off_guesses
from pipelines.inputs.prompts import find_prompts
from pipelines.inputs.read import Inputs, load_tokenizer
from pipelines.placement import place_rollouts
from pipelines.specs import imitation_spec, lora_options

PILOT_SAMPLES = 1000
"""Responses from which the mean length is estimated."""
CHUNK = 4096
"""Prompts that an engine gets in one call, so that the deadline of a phase applies to a bounded amount of work."""

Author = Callable[[Sequence[Prompt]], list[Rollout]]
"""Prompts -> a response or an episode to each, but for episodes that broke before their first turn."""

Completions = dict[str, tuple[int, ...] | FileEpisode]
"""Prompt id -> the answer in its prompts file as token ids, with the end token; or the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The cut of a step's samples into micro-batches."""

    micro_batch: int
    accumulate: int

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulate


def train_off_policy(
    config: PipelineConfig,
    inputs: Inputs,
    author: AbstractContextManager[Author],
    budget: Mapping[str, float] | None,
    out: Path,
    tell: Callable[[str], None],
) -> int:
    """Train the student on the author's responses and write it to `out`; returns the response tokens trained on.

    `budget`: response tokens wanted of each domain; None: those of the pipeline's number of samples. Raises: RunError.
    """
    by_domain = {domain: _select_fitting(prompts, config) for domain, prompts in inputs.prompts.items()}
    with author as write:
        weights, samples = config.domain_weights, config.trainer.samples_per_step
        if budget is not None:
            samples_by_domain, n = _estimate_samples(config, by_domain, write, budget), config.rollout.n
            samples = max(n * len(by_domain), round(sum(samples_by_domain.values())))
            weights = {name: max(count, 1e-6) for name, count in samples_by_domain.items()}
        shape = _micro_batch_shape(config, samples)
        prompts = [p for step in _deal_steps(config, by_domain, shape.samples, weights) for p in step]
        tell(f"{len(prompts)} responses: {config.trainer.steps} steps of {shape.samples}")
        responses = write(prompts)
    _train_student(config, inputs, responses, shape, out, tell)
    return sum(r.num_trained for r in responses)


@contextmanager
def rollout_engine(config: PipelineConfig, inputs: Inputs) -> Iterator[VLLMRolloutEngine]:
    """An engine that holds the student; stopped on exit. Raises: RunError if it does not come up."""
    with ray_session(config.cluster, config.rollout.workers):
        config = turn_off_guesses(config)
        place_rollouts(config)
        engine = start_rollouts(config, inputs)
        engine.wait_ready()
        yield engine


@contextmanager
def experts_author(config: PipelineConfig, inputs: Inputs, scratch: Path) -> Iterator[Author]:
    """Let the experts write, at the merge's temperature and limits; `scratch` is for adapters merged into their bases."""
    with rollout_engine(config, inputs) as engine:
        yield lambda prompts: write_by_experts(engine, inputs.routes, prompts, config.seed, scratch)


def write_by_experts(
    engine: VLLMRolloutEngine,
    routes: Mapping[str, Sequence[WeightedTeacher]],
    prompts: Sequence[Prompt],
    seed: int,
    scratch: Path,
) -> list[Rollout]:
    """Have an expert of each prompt's domain write its response or episode; of several experts one is drawn by their weights."""
    teachers = {a.teacher.name: a.teacher for assigned in routes.values() for a in assigned}
    draw = random.Random(f"{seed}/authors")
    by_author: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        assigned = routes[prompt.domain]
        [author] = draw.choices([a.teacher.name for a in assigned], [a.weight for a in assigned])
        by_author.setdefault(author, []).append(index)
    responses: dict[int, list[Rollout]] = {}
    for author, indices in by_author.items():
        with open_full_model(teachers[author], scratch) as directory:
            engine.load(directory)
        for number, start in enumerate(range(0, len(indices), CHUNK), start=1):
            chunk = indices[start : start + CHUNK]
            # The engine's seeds depend on step and prompt, so the chunk's number takes the place of the step.
            batch = engine.generate([prompts[i] for i in chunk], step=number, policy_version=0)
            by_episode: dict[str, list[Rollout]] = {}
            for rollout in batch.rollouts:
                by_episode.setdefault(rollout.episode, []).append(rollout)
            responses |= _match_prompts(chunk, prompts, list(by_episode.values()))
    return [rollout for i in range(len(prompts)) for rollout in responses.get(i, ())]


def _match_prompts(
    chunk: Sequence[int], prompts: Sequence[Prompt], answers: Sequence[list[Rollout]]
) -> Iterator[tuple[int, list[Rollout]]]:
    """Yield (index of a prompt, what was written to it); a prompt that comes twice gets its answers in the engine's order."""
    indices_by_id: dict[str, deque[int]] = {}
    for i in chunk:
        indices_by_id.setdefault(prompts[i].id, deque()).append(i)
    for rollouts in answers:
        prompt_id = rollouts[0].group.partition("/")[2]  # a group is the step and the prompt's id
        yield indices_by_id[prompt_id].popleft(), rollouts


@contextmanager
def file_author(config: PipelineConfig, completions: Completions) -> Iterator[Author]:
    """The prompts' own completions or episodes, as long as there is room for them."""
    room = config.rollout.max_model_len

    def make_rollout(prompt: Prompt) -> Rollout:
        row = completions[prompt.id]
        if isinstance(row, FileEpisode):
            return row.as_rollout(prompt, room)
        return Rollout.from_tokens(prompt.id, prompt.token_ids, row[: room - len(prompt.token_ids)], prompt.domain)

    yield lambda prompts: [make_rollout(prompt) for prompt in prompts]


def read_completions(config: PipelineConfig, inputs: Inputs) -> Completions:
    """Return the completion of every training prompt; where the file has episodes, the episode of every one that leaves room
    for a response.

    Raises: PromptError; ModelError for a chat template that cannot append the turns of an episode.
    """
    from experts.episodes.encode import EpisodeEncoder

    day, student, ends = inputs.template_date, config.student, inputs.student.eos_token_ids
    encoder = EpisodeEncoder(inputs.tokenizer, day, student.tool_call_parser, ends, student.chat_template_kwargs)
    completions: Completions = {}
    for domain, prompts in inputs.prompts.items():
        source = find_prompts(domain, config.domains[domain], inputs.registered_prompts(domain))
        rows = open_rows(source)
        if rows[0].completion is None and has_episodes(source):
            fitting = _select_fitting(prompts, config)
            completions |= read_file_episodes(source, fitting, encoder, config.rollout.max_model_len)
        else:
            variables = config.chat_template_kwargs_of(domain)
            completions |= _encode_completions(rows, prompts, inputs.tokenizer, ends, day, variables)
    return completions


def _encode_completions(
    rows: Rows,
    prompts: PromptTable,
    tokenizer: Any,
    ends: Sequence[int],
    day: date | None,
    variables: Mapping[str, Any],
) -> dict[str, tuple[int, ...]]:
    """Return the completion of every prompt. Raises: PromptError."""
    from experts.sft import IGNORED, encode_line

    completions = {}
    for index, prompt in zip(prompts.indices, prompts, strict=True):
        line = rows[int(index)]
        if line.completion is None:
            raise PromptError.at(
                f"{rows.label}: prompt {prompt.id}",
                found="no completion",
                wanted="the column `completion` in every line, or a whole episode in `messages`: mixed_sft learns it",
                fix="add it, or compare with off_policy, which needs only prompts",
            )
        labels = encode_line(tokenizer, line, ends, day, variables)["labels"]
        completions[prompt.id] = tuple(i for i in labels if i != IGNORED)
    return completions


def _select_fitting(prompts: PromptTable, config: PipelineConfig) -> PromptTable:
    """Return the prompts that leave room for a response; a merge quarantines the others."""
    return prompts.select_prompts((prompts.lengths > 0) & (prompts.lengths < config.rollout.max_model_len))


def _deal_steps(
    config: PipelineConfig, by_domain: Mapping[str, Sequence[Prompt]], samples: int, weights: Mapping[str, float]
) -> Iterator[list[Prompt]]:
    """Yield the prompts of each step, each once for every response to it; every step has all domains."""
    n = config.rollout.n
    mixed = MixedPrompts(by_domain, samples_by_weight(samples // n, weights), config.seed, n, config.prompt_orders)
    for step in range(1, config.trainer.steps + 1):
        yield mixed.take(step)


def _estimate_samples(
    config: PipelineConfig, by_domain: Mapping[str, Sequence[Prompt]], write: Author, budget: Mapping[str, float]
) -> dict[str, float]:
    """Return the samples of each domain in a step, so that all steps together have the domain's `budget` of response tokens.

    The shares of a merge with `balance` are not those of its weights, and the author's answers have lengths of their own.
    """
    samples = config.trainer.samples_per_step
    # Whole steps, so that all domains are in the pilot.
    steps = islice(_deal_steps(config, by_domain, samples, config.domain_weights), -(-PILOT_SAMPLES // samples))
    pilot = [p for step in steps for p in step]
    prompt_counts = Counter(p.domain for p in pilot)
    response_tokens: Counter[str] = Counter()
    for response in write(pilot):
        response_tokens[response.domain] += response.num_trained
    # A domain whose author wrote nothing at all keeps the length 1: it would get all samples otherwise.
    lengths = {name: max(1.0, response_tokens[name] / prompt_counts[name]) for name in by_domain}
    return {name: budget.get(name, 0.0) / config.trainer.steps / length for name, length in lengths.items()}


def _micro_batch_shape(config: PipelineConfig, samples: int) -> StepShape:
    """Return the cut of a step into micro-batches of `trainer.micro_batch_tokens` padded tokens; `samples` are rounded up until
    prompts and micro-batches are whole."""
    fitting = max(1, config.trainer.micro_batch_tokens // config.rollout.max_model_len)
    n = config.rollout.n
    # A step is `accumulate` micro-batches of one size: it grows by the n samples of a prompt until it divides evenly.
    total_samples = -(-samples // n) * n
    while total_samples % (accumulate := -(-total_samples // fitting)):
        total_samples += n
    return StepShape(micro_batch=total_samples // accumulate, accumulate=accumulate)


def _train_student(
    config: PipelineConfig,
    inputs: Inputs,
    rollouts: Sequence[Rollout],
    shape: StepShape,
    out: Path,
    tell: Callable[[str], None],
) -> None:
    """Write the student, trained on what the policy wrote in these rollouts, to `out`: whole or not at all, in the type that
    a merge exports."""
    import torch
    from transformers import set_seed
    from transformers.utils import logging

    from experts.sft import IGNORED, Example, train_on_text
    from opd.models.weights import load_causal_lm
    from opd.train.lora import add_adapters, fold_adapters

    staging = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    spec = imitation_spec(config, shape.micro_batch, shape.accumulate)
    set_seed(spec.seed)
    logging.disable_progress_bar()
    model, lora = load_causal_lm(config.student.model, torch.float32), lora_options(config)
    if lora is not None:
        add_adapters(model, lora)
    examples = [Example(input_ids=[*r.prompt_ids, *r.response_ids], labels=_make_labels(r, IGNORED)) for r in rollouts]
    train_on_text(
        model,
        examples,
        spec,
        scratch=staging,
        report=lambda step, loss: tell(f"step {step}/{config.trainer.steps}  loss {loss:.4f}"),
    )
    if lora is not None:
        fold_adapters(model)
    model.to(getattr(torch, config.trainer.dtype)).save_pretrained(staging)
    # The tokenizer of `inputs` may have been told to put nothing in front, which its files would say, too.
    load_tokenizer(config.student.model).save_pretrained(staging)
    replace_dir(staging, out)


def _make_labels(rollout: Rollout, ignored: int) -> list[int]:
    """Return the tokens that the rollout's author wrote, at their places, and `ignored` at all others."""
    response = zip(rollout.response_ids, rollout.loss_mask, strict=True)
    return [ignored] * len(rollout.prompt_ids) + [token if is_trained else ignored for token, is_trained in response]
